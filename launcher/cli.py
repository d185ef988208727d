"""Define the `launcher` command: one short function per subcommand, which parses and calls.

The docstring of such a function is the text of its --help, so it speaks to the user of the command
and its options document themselves. What a subcommand needs beyond the config is imported inside
its function, to keep the others quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError, EvaluationRequest, load_config
from pretrain.config.arguments import (
    AllowChanged,
    Config,
    Overrides,
    print_and_exit,
    version_of,
)
from pretrain.config.trajectory import check_allowed
from pretrain.launcher import local_cli, node_cli, run_cli, sweep_cli
from pretrain.launcher.data_cli import data
from pretrain.launcher.login.accounting import GOODPUT
from pretrain.launcher.options import (
    BOTH_PROTOCOLS,
    Account,
    After,
    Dependency,
    DryRun,
    EvaluateCheckpoints,
    EvaluationTasks,
    EvaluationTime,
    Lengths,
    Mail,
    MaxTokens,
    Nodes,
    Partition,
    Protocols,
    Qos,
    Run,
    SaveBefore,
    Sbatch,
    SiteFile,
    Stride,
    TimeLimit,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # The subcommands inherit this from the app.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data, name="data")


@app.callback()
def launcher(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=print_and_exit(lambda: version_of("launcher")),
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Start runs of `pretrain train` on this machine or on a Slurm cluster, and look after them.

    Each command first checks that the processes can work together, and starts or submits nothing if
    they cannot.

    \b
    Example, on a machine without a GPU:
      launcher local configs/demo.toml --nproc 2

    \b
    Example, on the login node of a cluster:
      launcher submit configs/demo.toml --site slurm/site.toml --nodes 2 \\
          --set batch.micro_batch_size=1
      launcher status runs/demo/alibi --watch
    """


# ---- training ------------------------------------------------------------------------------------
app.command()(local_cli.local)
app.command()(run_cli.run)


@app.command()
def submit(
    config: Config,
    site: SiteFile,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    nodes: Nodes = None,
    time: TimeLimit = None,
    save_before: SaveBefore = None,
    dry_run: DryRun = False,
    evaluate_checkpoints: EvaluateCheckpoints = False,
    lengths: Lengths = None,
    protocols: Protocols = BOTH_PROTOCOLS,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    evaluation_tasks: EvaluationTasks = None,
    evaluation_time: EvaluationTime = None,
    allow_changed: AllowChanged = [],  # noqa: B006
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    sbatch: Sbatch = [],  # noqa: B006
    dependency: Dependency = None,
    after: After = None,
    mail: Mail = None,
) -> None:
    """Train on a Slurm cluster.

    Submits one job. Before its time limit the job saves a checkpoint, goes back to the queue and
    continues from there when Slurm starts it again, until all steps are done.

    What cannot work is refused here, before the job waits in the queue. The resolved config is kept
    in RUN/launch, so edits of the config file do not change a job that waits.

    With --evaluate-checkpoints, RUN/evaluations/ collects the perplexity at each length over the
    training steps: curve.json, a CSV, plots and report.md. Training never waits for evaluations.
    checkpoint.keep spares checkpoints that have not been evaluated yet.

    \b
    Examples:
      launcher submit configs/demo.toml --site slurm/site.toml --nodes 2 --time 12:00:00 \\
          --set batch.micro_batch_size=1 --dry-run
      launcher submit mine.toml --site slurm/site.toml --after runs/demo/alibi \\
          --mail me@example.org --sbatch exclude=node07
    """
    from pretrain.launcher.cluster import load_site
    from pretrain.launcher.login import evaluations
    from pretrain.launcher.login import submit as jobs
    from pretrain.launcher.request import SlurmRequest

    run, plan = load_config(config, overrides), None
    check_allowed(allow_changed)
    if evaluate_checkpoints:
        request = EvaluationRequest.parse(lengths, protocols, stride, max_tokens)
        options = evaluations.check_options(
            config, overrides, request, evaluation_tasks, evaluation_time
        )
        plan = options.plan
    else:
        _refuse_evaluation_options(
            {
                "--lengths": lengths,
                "--protocols": None if protocols == BOTH_PROTOCOLS else protocols,
                "--stride": stride,
                "--max-tokens": max_tokens,
                "--evaluation-tasks": evaluation_tasks,
                "--evaluation-time": evaluation_time,
            }
        )
    jobs.submit(
        run,
        load_site(site),
        nodes=nodes,
        time_limit=time,
        save_before=save_before,
        dry_run=dry_run,
        plan=plan,
        allow_changed=allow_changed,
        request=SlurmRequest(partition, account, qos, tuple(sbatch), dependency, mail),
        after=after,
    )


app.command()(sweep_cli.sweep)


@app.command()
def evaluate_checkpoints(
    run: Run,
    site: SiteFile,
    lengths: Lengths = None,
    protocols: Protocols = BOTH_PROTOCOLS,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="GPUs of an evaluation, on one node. Default: all of the node."
        ),
    ] = None,
    time: TimeLimit = None,
) -> None:
    """Evaluate the checkpoints of a run.

    Submits a Slurm job for each. This does afterwards what `launcher submit
    --evaluate-checkpoints` does from the start. The run may be finished or still train:
    checkpoints that it saves later are evaluated too, until `launcher cancel`. Checkpoints with a
    result are left out, and those that were given up are tried again.

    Run this in the directory in which you started training: the config's relative paths start
    there.

    \b
    Example:
      launcher evaluate-checkpoints runs/demo/alibi --site slurm/site.toml --lengths 128,512,2048
    """
    from pretrain.launcher.cluster import load_site
    from pretrain.launcher.login import evaluations

    directory = Path.cwd() / run
    request = EvaluationRequest.parse(lengths, protocols, stride, max_tokens)
    run_config = evaluations.run_config(directory)
    options = evaluations.check_options(run_config, [], request, tasks, time)
    evaluations.evaluate_run(directory, load_site(site), options)


# ---- looking after runs --------------------------------------------------------------------------
@app.command(epilog=GOODPUT)
def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Directories of runs. Default: all runs below runs/."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print it again every few seconds, until Ctrl-C.")
    ] = False,
) -> None:
    """Show the state of runs.

    Prints a table of all runs. For a single RUN also prints its attempts, and what their time was
    spent on.

    \b
    Examples:
      launcher status
      launcher status runs/demo/alibi --watch
    """
    from pretrain.launcher.login import tables

    tables.show(runs or [], watch)


@app.command()
def logs(
    run: Run,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Go on printing new lines, across restarts, until the run ends. Ctrl-C ends only "
            "the printing.",
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Print this rank only. Default: all.")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of the attempt. Default: the newest."),
    ] = None,
) -> None:
    """Print what the ranks of a run have printed.

    Under `launcher local` each rank has a log of its own; without --rank, rank 0's is printed.

    \b
    Example:
      launcher logs runs/demo/alibi --follow --rank 0
    """
    from pretrain.launcher.login import logs as texts

    if follow and attempt is not None:
        raise ConfigError(
            f"--attempt {attempt}: --follow always shows the newest attempt. Leave one of the two "
            "options out"
        )
    texts.print_log(run, rank, attempt, follow)


@app.command()
def cancel(
    run: Run,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Save a checkpoint first, and wait until training has ended. Evaluations go on. "
            "Ctrl-C ends only the waiting.",
        ),
    ] = False,
) -> None:
    """End the Slurm jobs of a run.

    These are its training and the evaluations of its checkpoints. `launcher requeue` starts the
    run again from its newest checkpoint.

    \b
    Example:
      launcher cancel runs/demo/alibi --save
    """
    from pretrain.launcher.login import control

    control.cancel(run, save)


@app.command()
def requeue(run: Run) -> None:
    """Start a run again on Slurm.

    A job that runs saves a checkpoint, goes back to the queue and continues from there. If the run
    has no job any more, a new one is submitted with the options of the last.

    \b
    Example:
      launcher requeue runs/demo/alibi
    """
    from pretrain.launcher.login import control

    control.requeue(run)


# ---- what batch scripts run ----------------------------------------------------------------------
app.command(hidden=True)(node_cli.attempt)
app.command(hidden=True)(node_cli.guard)
app.command(hidden=True)(node_cli.evaluation)


# ---- helpers -------------------------------------------------------------------------------------
def _refuse_evaluation_options(options: dict[str, object]) -> None:
    """Refuse options of evaluations when there will be none; the user has forgotten a flag.

    Args:
        options: Names and values of the options; None for one that is not given.

    Raises:
        ConfigError: One of them is given.
    """
    for option, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value}: has no effect without --evaluate-checkpoints. Add that option, "
                f"or leave {option} out"
            )
