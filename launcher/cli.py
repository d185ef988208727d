"""The `launcher` command line: read the config, check it, hand over."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError, EvaluationRequest, RunFailed, load_config
from pretrain.launcher.cluster import load_site
from pretrain.launcher.login.accounting import GOODPUT
from pretrain.launcher.node.local import run_locally
from pretrain.rundir.states import ExitCode

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Lengths = Annotated[
    str | None, typer.Option(help="Of evaluations: tokens, comma-separated; default: the config's.")
]
Protocols = Annotated[str, typer.Option(help="Of evaluations: nonoverlapping, sliding, or both.")]
Stride = Annotated[
    int | None, typer.Option(help="Of sliding evaluations: predictions of each window that count.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Of evaluations: score at most so many; default: the config's.")
]
BOTH = "nonoverlapping,sliding"


@app.callback()
def launcher() -> None:
    """Starts a run's processes, after checking that they can work together.

    Example: launcher local configs/demo.toml --nproc 2
    """


@app.command()
def local(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run, a TOML file.")],
    nproc: Annotated[
        int, typer.Option(min=1, help="Processes to start: one a GPU, or a few on CPU cores.")
    ],
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Override a config value; repeatable."
        ),
    ] = [],  # noqa: B006  typer copies it
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|none|PATH", help="Where to go on from, as in `pretrain train`."),
    ] = None,
) -> None:
    """Train on this machine.

    Rank 0 writes to this terminal, rank r to RUN/logs/rank-r.log. Ctrl-C stops the run at once, `kill` (SIGTERM) once it
    has saved; a second one ends it. A rank that fails or hangs is started again, with the others, from the newest
    checkpoint; see [recovery] in the config.

    Example: launcher local configs/demo.toml --nproc 2 --set train.num_steps=100 --set run.directory=runs/try
    """
    run = load_config(config, overrides)
    run.layout(
        nproc
    )  # refuses here, before any process starts, what those processes could not share
    arguments = [
        str(config),
        *(argument for override in overrides for argument in ("--set", override)),
    ]
    code = run_locally(run, nproc, [sys.executable, "-m", "pretrain", "train"], arguments, resume)
    _sum_up(run.directory, code)
    raise typer.Exit(code)


@app.command(hidden=True)
def attempt(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run that was submitted.")],
) -> None:
    """Make one attempt at a run, inside its Slurm job: what the batch script of `launcher submit` calls."""
    from pretrain.launcher.node import srun

    code = srun.attempt(run)
    _sum_up(run, code)
    raise typer.Exit(code)


@app.command()
def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run, a TOML file.")],
    site: Annotated[
        Path, typer.Option(metavar="SITE", help="Your cluster; examples: slurm/site.*.toml.")
    ],
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Override a config value; repeatable."
        ),
    ] = [],  # noqa: B006
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Default: what parallel.world_size needs, else one.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT", help="As 1-00:00:00, 12:00:00 or 90 (minutes); default: the site's."
        ),
    ] = None,
    save_before: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Save so long before the limit; default: two checkpoint times and more.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the job and when it could start; send nothing.")
    ] = False,
    evaluate_checkpoints: Annotated[
        bool,
        typer.Option(
            "--evaluate-checkpoints",
            help="Evaluate each checkpoint as it lands, in a job of its own.",
        ),
    ] = False,
    lengths: Lengths = None,
    protocols: Protocols = BOTH,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    evaluation_tasks: Annotated[
        int | None,
        typer.Option(
            min=1, help="GPUs of an evaluation, on one node; default: as training has on each."
        ),
    ] = None,
    evaluation_time: Annotated[
        str | None,
        typer.Option(metavar="LIMIT", help="Time limit of an evaluation; default: training's."),
    ] = None,
) -> None:
    """Train on a Slurm cluster: one job, which saves before its time limit and goes on in its next turn.

    What cannot work is refused here. The resolved config is kept in RUN/launch: edits while the job waits change nothing.

    With --evaluate-checkpoints, perplexity at each length over training steps grows in RUN/evaluations/: curve.json, a CSV,
    plots and report.md. Training never waits for it; checkpoint.keep spares what has not been evaluated yet.

    Example: launcher submit configs/demo.toml --site slurm/site.toml --nodes 2 --time 12:00:00 --dry-run
    """
    from pretrain.launcher.login import evaluations
    from pretrain.launcher.login import submit as jobs

    run, plan = load_config(config, overrides), None
    if evaluate_checkpoints:
        request = EvaluationRequest.parse(lengths, protocols, stride, max_tokens)
        plan = evaluations.check_options(
            config, overrides, request, evaluation_tasks, evaluation_time
        ).plan
    elif (lengths, protocols, stride, max_tokens, evaluation_tasks, evaluation_time) != (
        None,
        BOTH,
        *4 * [None],
    ):
        raise ConfigError(
            "--lengths and the other options of evaluations: want --evaluate-checkpoints too"
        )
    jobs.submit(
        run,
        load_site(site),
        nodes=nodes,
        time_limit=time,
        save_before=save_before,
        dry_run=dry_run,
        plan=plan,
    )


@app.command()
def evaluate_checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, in training or finished.")],
    site: Annotated[
        Path, typer.Option(metavar="SITE", help="Your cluster; examples: slurm/site.*.toml.")
    ],
    lengths: Lengths = None,
    protocols: Protocols = BOTH,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="GPUs of an evaluation, on one node; default: all.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="Time limit; default: the site's.")
    ] = None,
) -> None:
    """Evaluate a run's checkpoints on a Slurm cluster, as `submit --evaluate-checkpoints` would have done.

    Those that have a result are left out, those that were given up get a new chance. What training still saves is evaluated
    too, until `launcher cancel`. Start it where you started training.

    Example: launcher evaluate-checkpoints runs/demo/alibi --site slurm/site.toml --lengths 128,512,2048
    """
    from pretrain.launcher.login import evaluations

    directory = Path.cwd() / run
    request = EvaluationRequest.parse(lengths, protocols, stride, max_tokens)
    options = evaluations.check_options(evaluations.run_config(directory), [], request, tasks, time)
    evaluations.evaluate_run(directory, load_site(site), options)


@app.command(hidden=True)
def evaluation(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run whose checkpoints are evaluated.")
    ],
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="One of its checkpoints, step-########.")
    ],
) -> None:
    """Evaluate one checkpoint, inside its Slurm job: what the batch script of an evaluation calls."""
    from pretrain.launcher.node.evaluation import run_job

    raise typer.Exit(run_job(run, checkpoint))


@app.command()
def sweep(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="What the runs have in common, a TOML file.")
    ],
    site: Annotated[
        Path, typer.Option(metavar="SITE", help="Your cluster; examples: slurm/site.*.toml.")
    ],
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY.PATH=VALUE,VALUE", help="A key and its values; repeatable."),
    ],
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Override a config value; repeatable."
        ),
    ] = [],  # noqa: B006
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Most runs at once; default: all.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Of each run, as in `launcher submit`.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="Of each run, as in `launcher submit`.")
    ] = None,
    save_before: Annotated[
        int | None,
        typer.Option(min=1, metavar="SECONDS", help="Of each run, as in `launcher submit`."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the jobs; send nothing.")
    ] = False,
) -> None:
    """Train one run for each combination of values, as a job array. Runs that are finished are left out.

    Each lives in a directory below the config's run.directory that is named by its values, as RUN/alibi-512.

    Example: launcher sweep configs/demo.toml --site slurm/site.toml --over position.method=alibi,sinusoidal
    --over data.sequence_length=128,256 --concurrent 2
    """
    from pretrain.launcher.login import sweep as sweeps

    sweeps.sweep(
        config,
        load_site(site),
        over,
        overrides,
        nodes=nodes,
        time_limit=time,
        save_before=save_before,
        concurrent=concurrent,
        dry_run=dry_run,
    )


@app.command(epilog=GOODPUT)
def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN ...]", help="Default: all runs below runs/."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every few seconds, until Ctrl-C.")
    ] = False,
) -> None:
    """Show how runs stand: a table, or for one RUN also its attempts and where their time went.

    Example: launcher status runs/demo/alibi --watch
    """
    from pretrain.launcher.login import tables

    tables.show(runs or [], watch)


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Go on with what comes, across restarts, until the run ends."
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only what this rank printed; default: all.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Default: the newest.")] = None,
) -> None:
    """Show what a run's ranks print. Without Slurm rank 0 prints to its terminal, and the others have logs.

    Example: launcher logs runs/demo/alibi --follow --rank 0
    """
    from pretrain.launcher.login import logs as texts

    if follow and attempt is not None:
        raise ConfigError("--attempt: --follow goes on with the newest. Leave one of them out")
    texts.print_log(run, rank, attempt, follow)


@app.command()
def cancel(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    save: Annotated[
        bool,
        typer.Option(
            "--save", help="Let it write a checkpoint first, and wait for that; evaluations go on."
        ),
    ] = False,
) -> None:
    """End a run's jobs on Slurm: its training and the evaluation of its checkpoints.

    Example: launcher cancel runs/demo/alibi --save
    """
    from pretrain.launcher.login import control

    control.cancel(run, save)


@app.command()
def requeue(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]) -> None:
    """Start a run again on Slurm: its job saves and goes back to the queue; when it has none any more, another is sent.

    Example: launcher requeue runs/demo/alibi
    """
    from pretrain.launcher.login import control

    control.requeue(run)


def _sum_up(run: Path, code: int) -> None:
    """Where a run's time went, at its end; not of one that failed, whose last line is the error."""
    from pretrain.launcher.login.tables import summary

    if code in (0, ExitCode.STOPPED):
        print(summary(run), file=sys.stderr, flush=True)


def main() -> None:
    """The entry point: bad input is one `error: ...` line on stderr and exit code 2, without a traceback."""
    os.umask(0o027)  # what it writes, and its jobs write, is for its owner and group alone
    try:
        app()
    except ConfigError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    except RunFailed as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(
            f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}",
            file=sys.stderr,
        )
        sys.exit(1)
