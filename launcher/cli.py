"""Define the `launcher` command: one short function per subcommand, which parses and calls.

The docstring of such a function is the text of its --help, so it addresses the user of the command
and describes its options.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError, load_config
from pretrain.config.arguments import (
    AllowChanged,
    Commands,
    Config,
    Evaluations,
    Overrides,
    version_flag,
)
from pretrain.config.trajectory import allow_options, check_allowed
from pretrain.launcher import control, job
from pretrain.launcher.evaluations import evaluate_run, plan_evaluations, run_job
from pretrain.launcher.ranks import run_locally
from pretrain.launcher.site import SlurmRequest, load_site
from pretrain.launcher.status import print_end, show_status
from pretrain.launcher.submit import submit as submit_run
from pretrain.launcher.submit import sweep as submit_sweep
from pretrain.rundir.jobs import already_done, check_data, is_done

Run = Annotated[Path, typer.Argument(metavar="RUN", readable=False, help="Directory of the run.")]
SITE_HELP = "TOML file of your Slurm cluster. Copy one of the examples slurm/site.*.toml."
SiteFile = Annotated[Path, typer.Option(metavar="SITE", help=SITE_HELP)]
TimeLimit = Annotated[str | None, typer.Option(metavar="LIMIT")]
AtLeastOne = Annotated[int | None, typer.Option(min=1, metavar="N")]


app = Commands()


@app.callback()
def launcher(
    version: Annotated[bool, version_flag("launcher")] = False,
) -> None:
    """Start and manage runs of `pretrain train` on this machine or on a Slurm cluster.

    Each command first checks that the processes can work together. If they cannot, it starts or
    submits nothing.

    \b
    Example, on a machine without a GPU:
      launcher local configs/demo.toml --nproc 2

    \b
    Example, on the login node of a cluster:
      launcher submit configs/demo.toml --site slurm/site.toml --nodes 2 \\
          --set batch.micro_batch_size=1
      launcher status runs/demo/alibi
    """


# ---- training ------------------------------------------------------------------------------------
@app.command()
def local(
    config: Config,
    nproc: Annotated[int, typer.Option(min=1, metavar="N")],
    overrides: Overrides = [],  # noqa: B006  typer copies it
    resume: Annotated[str | None, typer.Option(metavar="auto|none|PATH|URL")] = None,
    allow_changed: AllowChanged = [],  # noqa: B006
) -> None:
    """Train on this machine.

    Rank 0 writes to this terminal. The output of every rank is kept in RUN/logs/rank-<rank>.log.

    If a rank fails or hangs, all ranks are stopped and restarted from the newest checkpoint.
    [recovery] in the config sets how often, and after how long without progress.

    \b
    Signals, to this command:
      SIGINT    (Ctrl-C) save a checkpoint, then exit with code 80; a second SIGINT exits
                immediately, with code 130, and so does the first one before training has begun
      SIGTERM   (kill PID) save a checkpoint, then exit with code 80
      SIGHUP    the same, when the terminal is closed
      SIGUSR1   save a checkpoint and restart the ranks
    A second SIGTERM or SIGHUP changes nothing: the save continues.

    \b
    Examples:
      launcher local configs/demo.toml --nproc 2
      launcher local configs/demo.toml --nproc 2 --set train.num_steps=100 \\
          --set run.directory=runs/try

    Args:
        nproc: Number of processes: one per GPU, or a few that share the CPU's cores.
        resume: Start from the run's newest checkpoint if there is one (auto), from step 0 (none),
            from this checkpoint, or from an object store: s3://bucket/run. Default: auto.
    """
    run = load_config(config, overrides)
    check_allowed(allow_changed)
    # A layout that does not fit `nproc` is refused once, here, and not by every process.
    run.layout(nproc)
    if resume in (None, "auto") and is_done(run, allow_changed):
        print(already_done(run), file=sys.stderr)
        return
    check_data(run)
    settings = [word for override in overrides for word in ("--set", override)]
    # --allow-changed belongs to the command and not to the config's arguments, which a restart
    # replaces.
    train = [sys.executable, "-m", "pretrain", "train", *allow_options(allow_changed)]
    # Without --resume, because from now on the run resumes from its own checkpoints.
    again = ["launcher", "local", str(config), f"--nproc={nproc}", *settings]
    again += allow_options(allow_changed)
    code = run_locally(run, nproc, train, [str(config), *settings], resume)
    print_end(run.directory, code, again)
    raise typer.Exit(code)


@app.command()
def submit(
    config: Config,
    site: SiteFile,
    request: SlurmRequest,
    evaluations: Evaluations,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    dry_run: bool = False,
    evaluate_checkpoints: bool = False,
    allow_changed: AllowChanged = [],  # noqa: B006
) -> None:
    """Train on a Slurm cluster.

    Submits one job. Before its time limit the job saves a checkpoint and goes back to the queue.
    When Slurm starts it again, it continues from the checkpoint, until all steps are done.

    A job that cannot work is refused now, before it waits in the queue. The resolved config is kept
    in RUN/launch, so edits of the config file do not change a waiting job.

    With --evaluate-checkpoints, RUN/evaluations/ collects the perplexity at each length over the
    training steps: curve.json, plots and report.md. Training does not wait for evaluations.
    checkpoint.keep does not delete checkpoints that have not been evaluated yet.

    \b
    Examples:
      launcher submit configs/demo.toml --site slurm/site.toml --nodes 2 --time 12:00:00 \\
          --set batch.micro_batch_size=1 --dry-run
      launcher submit mine.toml --site slurm/site.toml --dependency afterok:123 \\
          --sbatch exclude=node07

    Args:
        dry_run: Print the job and when it could start, and submit nothing.
        evaluate_checkpoints: Evaluate each checkpoint when it is complete, in a separate job.
    """
    run = load_config(config, overrides)
    check_allowed(allow_changed)
    if evaluations != Evaluations() and not evaluate_checkpoints:
        raise ConfigError("options of evaluations have no effect without --evaluate-checkpoints")
    plan = partial(plan_evaluations, evaluations.request()) if evaluate_checkpoints else None
    submit_run(
        run, load_site(site), request, dry_run=dry_run, plan=plan, allow_changed=allow_changed
    )


@app.command()
def sweep(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG")],
    site: SiteFile,
    request: SlurmRequest,
    overrides: Overrides = [],  # noqa: B006
    concurrent: AtLeastOne = None,
    dry_run: bool = False,
    allow_changed: AllowChanged = [],  # noqa: B006
) -> None:
    """Train several runs.

    Submits one job array to a Slurm cluster, with a task for each config. Finished runs are skipped
    and interrupted runs resume from their newest checkpoint, so the same command continues a sweep.

    \b
    Example:
      launcher sweep configs/cc100_roberta/*_512.toml --site slurm/site.toml --concurrent 2

    Args:
        configs: TOML files of the runs, each with a run.directory of its own.
        concurrent: The maximum number of runs that train at the same time. Default: all.
        dry_run: Print the job and when it could start, and submit nothing.
    """
    check_allowed(allow_changed)
    submit_sweep(
        configs,
        load_site(site),
        overrides,
        request,
        concurrent=concurrent,
        dry_run=dry_run,
        allow_changed=allow_changed,
    )


@app.command()
def evaluate_checkpoints(
    run: Run,
    site: SiteFile,
    evaluations: Evaluations,
    nproc: AtLeastOne = None,
    time: TimeLimit = None,
) -> None:
    """Evaluate the checkpoints of a run.

    Submits a Slurm job for each checkpoint, as `launcher submit --evaluate-checkpoints` does from
    the start of a run. The run may be finished or still training: checkpoints that it saves later
    are evaluated too, until `launcher cancel`. Checkpoints with a result are skipped, and failed
    evaluations are tried again.

    Run this in the directory where you started training, because the config's relative paths start
    there.

    \b
    Example:
      launcher evaluate-checkpoints runs/demo/alibi --site slurm/site.toml --lengths 128,512,2048

    Args:
        nproc: Processes of an evaluation, one per GPU, on one node. Default: all GPUs of the node.
        time: Time limit of an evaluation. Default: the site's time_limit.
    """
    evaluate_run(Path.cwd() / run, load_site(site), evaluations.request(), nproc, time)


# ---- managing runs -------------------------------------------------------------------------------
@app.command()
def status(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", readable=False)] = None,
) -> None:
    """Show the state of runs.

    Prints a table of all runs. For a single RUN, also prints its attempts, how each ended, and the
    nodes that the run no longer uses.

    Goodput is the time spent on training steps that the run kept, as a share of the time it held
    its nodes. Attempts that were refused or found every step done do not count.

    \b
    Examples:
      launcher status
      launcher status runs/demo/alibi

    Args:
        runs: Directories of runs. Default: all runs below runs/.
    """
    show_status(runs or [])


@app.command()
def logs(
    run: Run,
    follow: bool = False,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N")] = None,
) -> None:
    """Print the output of a run's ranks in the newest attempt.

    With `launcher local`, each rank has its own log of all attempts; without --rank, prints that of
    rank 0. On a cluster, logs of earlier attempts are RUN/logs/attempt-####.log.

    \b
    Example:
      launcher logs runs/demo/alibi --follow --rank 0

    Args:
        follow: Keep printing new lines, across restarts, until the run ends. Ctrl-C stops only the
            printing.
        rank: Print only this rank. Default: all.
    """
    control.print_log(run, rank, follow)


@app.command()
def cancel(
    run: Run,
    save: bool = False,
) -> None:
    """End the Slurm jobs of a run.

    Ends its training job and the evaluation jobs of its checkpoints. `launcher requeue` resumes the
    run from its newest checkpoint.

    \b
    Example:
      launcher cancel runs/demo/alibi --save

    Args:
        save: Save a checkpoint first, and wait until training has ended. Evaluations continue.
            Ctrl-C stops only the waiting.
    """
    control.cancel(run, save)


@app.command()
def requeue(run: Run) -> None:
    """Restart a run on Slurm.

    A running job saves a checkpoint, goes back to the queue and continues from the checkpoint. If
    the run no longer has a job, a new one is submitted with the options of the last job.

    \b
    Example:
      launcher requeue runs/demo/alibi
    """
    control.requeue(run)


# ---- what batch scripts run ----------------------------------------------------------------------
@app.command(hidden=True)
def attempt(run: Run) -> None:
    """Run the attempts of a run, inside its Slurm job.

    The batch script of `launcher submit` runs this command.
    """
    code = job.attempt(run)
    print_end(run, code)
    raise typer.Exit(code)


@app.command(hidden=True)
def guard(run: Run) -> None:
    """Requeue the Slurm job that this runs in when the node of its batch script dies.

    The jobs of runs with spare nodes run this command as a job step.
    """
    raise typer.Exit(job.guard(run))


@app.command(hidden=True)
def evaluation(run: Run, checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT")]) -> None:
    """Evaluate one checkpoint, inside its Slurm job.

    The batch script of an evaluation runs this command.

    Args:
        checkpoint: Name of one of its checkpoints, step-########.
    """
    raise typer.Exit(run_job(run, checkpoint))
