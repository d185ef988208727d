"""Define the `launcher` command: one short function per subcommand, which parses and calls.

The docstring of such a function is the text of its --help, so it speaks to the user of the command
and its options document themselves. What a subcommand needs beyond the config is imported inside
its function, to keep the others quick.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
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
from pretrain.config.trajectory import allow_options, check_allowed
from pretrain.launcher.status import GOODPUT
from pretrain.rundir.paths import ExitCode

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]
SiteFile = Annotated[
    Path,
    typer.Option(
        metavar="SITE",
        help="TOML file that describes your cluster. Copy one of the examples slurm/site.*.toml.",
    ),
]
OptionalSiteFile = Annotated[
    Path | None,
    typer.Option(
        metavar="SITE",
        help="TOML file that describes your Slurm cluster. Copy one of the examples "
        "slurm/site.*.toml.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of nodes of each run. Default: as many as parallel.world_size needs, else 1.",
    ),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        metavar="LIMIT",
        help="Time limit of the job, as in 1-00:00:00, 12:00:00 or 90 (minutes). Default: the "
        "site's time_limit.",
    ),
]
SaveBefore = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Save a checkpoint this long before the time limit. Default: the time of two "
        "checkpoints and one step, plus a minute.",
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Window lengths of evaluations in tokens, as in 128,512,2048. Default: "
        "evaluation.lengths of the config, else 1, 2, 4, 8 and 16 times the training length as "
        "far as the text reaches.",
    ),
]
Protocols = Annotated[
    str,
    typer.Option(
        help="Protocols of evaluations: nonoverlapping, sliding, or both separated by a comma."
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens from one sliding window to the next. Default: evaluation.stride of the "
        "config where no length is shorter, else the shortest length.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Score at most this many validation tokens. Default: all; evaluation.max_tokens "
        "bounds the evaluations while training.",
    ),
]
BOTH_PROTOCOLS = "nonoverlapping,sliding"
"""The default of --protocols."""
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="auto|none|PATH",
        help="Start from the run's newest checkpoint if there is one (auto), from step 0 "
        "(none), or from this checkpoint. Default: auto.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the job and when it could start, and submit nothing."),
]
EvaluationTasks = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="GPUs of an evaluation, on one node. Default: as many as training uses per node.",
    ),
]
EvaluationTime = Annotated[
    str | None,
    typer.Option(metavar="LIMIT", help="Time limit of an evaluation. Default: that of training."),
]
Partition = Annotated[
    str | None, typer.Option(metavar="NAME", help="Partition of the job. Default: the site's.")
]
Account = Annotated[
    str | None, typer.Option(metavar="NAME", help="Account that pays. Default: the site's.")
]
Qos = Annotated[
    str | None, typer.Option(metavar="NAME", help="Quality of service. Default: the site's.")
]
Sbatch = Annotated[
    list[str],
    typer.Option(
        metavar="KEY=VALUE",
        help="Another option of sbatch, as in exclude=node07. Can be repeated; comes before the "
        "site's sbatch_arguments.",
    ),
]
Dependency = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE:JOB", help="Jobs to wait for, as sbatch --dependency takes them: afterok:123."
    ),
]
Mail = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Have Slurm send a mail when the job has finished or given up, and when a node dies.",
    ),
]
EvaluateCheckpoints = Annotated[
    bool,
    typer.Option(
        "--evaluate-checkpoints",
        help="Evaluate each checkpoint when it is complete, in a job of its own.",
    ),
]
After = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", help="Start when this run's job has ended well, whatever its restarts."
    ),
]


# ---- Define the `launcher data` commands, which build a data set on a Slurm cluster ----


data = typer.Typer(no_args_is_help=True, help="Build a data set on a Slurm cluster.")


@data.command("build")
def data_build(
    config: Config,
    site: SiteFile,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="As many tasks run at the same time as so many nodes of the site have cores.",
        ),
    ] = 1,
    time: TimeLimit = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the jobs, and estimate tokens, bytes and time; submit and write nothing.",
        ),
    ] = False,
) -> None:
    """Build a data set on many nodes of a Slurm cluster.

    Builds exactly what `pretrain data build` does, in data.directory, which the nodes must share.
    This command plans, trains the tokenizer and finishes; for reading and for tokenizing it submits
    a job array, whose tasks have one core each, and waits for its end. Run it where it may go on
    for hours, as in tmux on the login node.

    Ctrl-C, SIGTERM and a lost terminal cancel the jobs. What is finished is kept, and the same
    command goes on, also after a node, this command or the controller has died.

    \b
    Examples:
      launcher data build configs/cc100_roberta/alibi_1024.toml --site site.toml --dry-run
      launcher data build configs/cc100_roberta/alibi_1024.toml --site site.toml --nodes 4
    """
    from pretrain.launcher import experiment
    from pretrain.launcher.site import load_site

    run = load_config(config, overrides)
    experiment.build(config, overrides, run, site, load_site(site), nodes, time, dry_run)


@data.command("array", hidden=True)
def data_array(
    tasks: Annotated[int, typer.Argument(min=0)],
    pickle: Path,
    stop: Path,
    site: SiteFile,
    name: Annotated[str, typer.Option()],
    concurrent: Annotated[int, typer.Option(min=1)],
    time: TimeLimit = None,
) -> None:
    """Run a job array of a build of data, on the login node.

    `launcher data build` has this command run by the process that experiment.
    """
    from pretrain.launcher import experiment
    from pretrain.launcher.site import load_site

    experiment.run_array(
        experiment.data_job(load_site(site), name, pickle, tasks, concurrent, time), stop
    )


# ---- Define `launcher local`, which trains on this machine ----


def local(
    config: Config,
    nproc: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of processes: one per GPU, or a few that share the CPU's cores.",
        ),
    ],
    overrides: Overrides = [],  # noqa: B006  typer copies it
    resume: Resume = None,
    allow_changed: AllowChanged = [],  # noqa: B006
) -> None:
    """Train on this machine.

    Rank 0 writes to this terminal. What every rank writes is kept in RUN/logs/rank-<rank>.log.

    When a rank fails or hangs, all ranks are ended and started again from the newest checkpoint.
    [recovery] in the config sets how often, and after what time without progress.

    \b
    Signals, to this command:
      SIGINT    (Ctrl-C) save a checkpoint, then exit with code 80; a second one leaves at once,
                with code 130, and so does the first one before training has begun
      SIGTERM   (kill PID) save a checkpoint, then exit with code 80
      SIGHUP    the same, when the terminal is closed
      SIGUSR1   save a checkpoint and start the ranks again
    A second SIGTERM or SIGHUP ends ranks that do not stop.

    \b
    Examples:
      launcher local configs/demo.toml --nproc 2
      launcher local configs/demo.toml --nproc 2 --set train.num_steps=100 \\
          --set run.directory=runs/try
    """
    from pretrain.launcher.look import print_summary
    from pretrain.launcher.ranks import run_locally
    from pretrain.rundir.jobs import LocalLaunch, already_done, check_data, is_done

    run = load_config(config, overrides)
    check_allowed(allow_changed)
    # Refuse a layout that does not fit `nproc` here, once, before every process does.
    run.layout(nproc)
    if resume in (None, "auto") and is_done(run, allow_changed):
        print(already_done(run), file=sys.stderr)
        return
    check_data(run)
    settings = [word for override in overrides for word in ("--set", override)]
    # Part of the command and not of the config's arguments, which a restart replaces.
    train = [sys.executable, "-m", "pretrain", "train", *allow_options(allow_changed)]
    # Without --resume: from here on the run has its own checkpoint to go on from.
    again = ["launcher", "local", str(config), f"--nproc={nproc}", *settings]
    again += allow_options(allow_changed)
    launch = LocalLaunch(tuple(again), str(Path.cwd()), nproc)
    code = run_locally(run, nproc, train, [str(config), *settings], resume, launch=launch)
    print_summary(run.directory, code)
    _print_goes_on(run.directory, code, again)
    raise typer.Exit(code)


def _print_goes_on(run: Path, code: int, command: Sequence[str]) -> None:
    """Print what a run that was stopped has saved, and the command that goes on from there.

    Args:
        run: The run's directory.
        code: The exit code of its last attempt.
        command: The command, without --resume.
    """
    from pretrain.launcher.look import stopped

    if code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
        print(f"{stopped(run)}; go on with:\n  {shlex.join(command)}", file=sys.stderr, flush=True)


# ---- node ----
# Define what batch scripts run: `launcher attempt`, `guard` and `evaluation`, hidden in --help.


def attempt(run: Run) -> None:
    """Make attempts at a run, inside its Slurm job.

    The batch script of `launcher submit` runs this command.
    """
    from pretrain.launcher import job
    from pretrain.launcher.look import print_summary

    code = job.attempt(run)
    print_summary(run, code)
    raise typer.Exit(code)


def guard(run: Run) -> None:
    """Requeue the Slurm job that this runs in when the node of its batch script dies.

    The jobs of runs with spare nodes run this command as a job step.
    """
    from pretrain.launcher.job import guard

    raise typer.Exit(guard(run))


def evaluation(
    run: Run,
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="Name of one of its checkpoints, step-########."),
    ],
) -> None:
    """Evaluate one checkpoint, inside its Slurm job.

    The batch script of an evaluation runs this command.
    """
    from pretrain.launcher.evaluations import run_job

    raise typer.Exit(run_job(run, checkpoint))


# ---- Define `launcher run`, which does a whole experiment ----


def run(
    config: Config,
    site: SiteFile,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    nodes: Nodes = None,
    time: TimeLimit = None,
    lengths: Lengths = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Build the data, train, evaluate and report on a Slurm cluster.

    Does what is not done yet, in this order: builds the data set with `launcher data build`, has
    Slurm check the job, submits it with --evaluate-checkpoints, prints what the ranks print until
    the run is finished, waits for the evaluations and prints perplexity by length over the
    training steps, as in RUN/evaluations/report.md.

    Ctrl-C ends only the watching, except that it cancels a build. The same command goes on where
    the run is: a job in the queue is followed, a finished run is reported.

    \b
    Examples:
      launcher run configs/demo.toml --site slurm/site.toml
      launcher run configs/cc100_roberta/alibi_1024.toml --site slurm/site.toml
    """
    from pretrain.launcher import experiment

    request = EvaluationRequest.parse(lengths, BOTH_PROTOCOLS, None, max_tokens)
    experiment.run(config, overrides, site, nodes, time, request)


# ---- sweep ----
# Define `launcher sweep`, which trains a run for each combination of values or each config.


SweepConfigs = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG",
        help="TOML file that the runs have in common; or, without --over, of each run.",
    ),
]
Over = Annotated[
    list[str],
    typer.Option(
        metavar="SECTION.KEY=VALUE,VALUE",
        help="A key of the config and the values to try. Can be repeated.",
    ),
]
SweepNproc = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Train on this machine instead of a Slurm cluster, each run with N processes.",
    ),
]
Concurrent = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="The most runs that train at the same time. Default: all."
    ),
]


def sweep(
    configs: SweepConfigs,
    over: Over = [],  # noqa: B006  typer copies it
    site: OptionalSiteFile = None,
    nproc: SweepNproc = None,
    overrides: Overrides = [],  # noqa: B006
    concurrent: Concurrent = None,
    nodes: Nodes = None,
    time: TimeLimit = None,
    save_before: SaveBefore = None,
    dry_run: DryRun = False,
    allow_changed: AllowChanged = [],  # noqa: B006
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    sbatch: Sbatch = [],  # noqa: B006
    dependency: Dependency = None,
    mail: Mail = None,
) -> None:
    """Train one run for each combination of values, or for each of several configs.

    With --site submits one job array to a Slurm cluster. With --nproc trains on this machine, one
    run after the other as `launcher local` does, and prints a table of all runs at the end. The
    exit code is 1 if a run failed; the others are trained all the same. Ctrl-C saves the present
    run and stops the sweep.

    The runs lie beside the config's run.directory, in RUN-sweep, each in a directory named after
    its values, such as RUN-sweep/alibi-512; several configs have a run.directory each. Runs that
    are finished are left out and others go on from their newest checkpoint, so the same command
    does what is missing.

    \b
    Examples:
      launcher sweep configs/demo.toml --nproc 2 --over position.method=alibi,rotary
      launcher sweep configs/demo.toml --site slurm/site.toml --concurrent 2 \\
          --over position.method=alibi,sinusoidal --over data.sequence_length=128,256
      launcher sweep configs/cc100_roberta/*_512.toml --site slurm/site.toml
    """
    check_allowed(allow_changed)
    slurm_options = {
        "--concurrent": concurrent,
        "--nodes": nodes,
        "--time": time,
        "--save-before": save_before,
        "--partition": partition,
        "--account": account,
        "--qos": qos,
        "--sbatch": sbatch or None,
        "--dependency": dependency,
        "--mail": mail,
    }
    place = _one_place(site, nproc, slurm_options)
    if isinstance(place, int):
        from pretrain.launcher.sweep import sweep_locally

        raise typer.Exit(sweep_locally(configs, place, over, overrides, dry_run, allow_changed))
    from pretrain.launcher.site import SlurmRequest, load_site
    from pretrain.launcher.sweep import sweep as submit_sweep

    submit_sweep(
        configs,
        load_site(place),
        over,
        overrides,
        nodes=nodes,
        time_limit=time,
        save_before=save_before,
        concurrent=concurrent,
        dry_run=dry_run,
        allow_changed=allow_changed,
        request=SlurmRequest(partition, account, qos, tuple(sbatch), dependency, mail),
    )


def _one_place(
    site: Path | None, nproc: int | None, slurm_options: Mapping[str, object]
) -> Path | int:
    """Return the site to submit to, or the number of processes of each run on this machine.

    Args:
        site: The value of --site.
        nproc: The value of --nproc.
        slurm_options: Names and values of options that have no effect on this machine; None for one
            that is not given.

    Raises:
        ConfigError: Not exactly one of the two is given, or an option would have no effect.
    """
    if site is not None and nproc is not None:
        raise ConfigError(
            "--site and --nproc: choose one. --site submits to a Slurm cluster, --nproc trains on "
            "this machine"
        )
    given = [option for option, value in slurm_options.items() if value is not None]
    if site is not None:
        return site
    if nproc is None:
        raise ConfigError(
            "launcher sweep: give --nproc N to train on this machine, or --site SITE to submit to "
            "a Slurm cluster"
        )
    if given:
        raise ConfigError(
            f"{given[0]}: has no effect with --nproc, which trains on this machine, one run after "
            "the other. Leave it out, or give --site instead of --nproc"
        )
    return nproc


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
app.command()(local)
app.command()(run)


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
    from pretrain.launcher import evaluations
    from pretrain.launcher.site import SlurmRequest, load_site
    from pretrain.launcher.submit import submit as submit_run

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
    submit_run(
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


app.command()(sweep)


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
    from pretrain.launcher import evaluations
    from pretrain.launcher.site import load_site

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
    from pretrain.launcher import look

    look.show_status(runs or [], watch)


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
    from pretrain.launcher import look

    if follow and attempt is not None:
        raise ConfigError(
            f"--attempt {attempt}: --follow always shows the newest attempt. Leave one of the two "
            "options out"
        )
    look.print_log(run, rank, attempt, follow)


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
    from pretrain.launcher import control

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
    from pretrain.launcher import control

    control.requeue(run)


# ---- what batch scripts run ----------------------------------------------------------------------
app.command(hidden=True)(attempt)
app.command(hidden=True)(guard)
app.command(hidden=True)(evaluation)


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
