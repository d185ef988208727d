"""Define the `pretrain` command: one short function per subcommand, which parses, builds and calls.

The docstring of such a function is the text of its --help, so it speaks to the user of the command
and its options document themselves. torch, Megatron and DeepSpeed are imported inside the
functions, after the config has been checked: they take seconds, and a wrong config should be
refused at once.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from pretrain.bench_cli import bench
from pretrain.checkpoint_cli import checkpoint
from pretrain.config import (
    EvaluationRequest,
    dump_config,
    load_config,
    load_with_origins,
    writing,
)
from pretrain.config.arguments import (
    AllowChanged,
    Config,
    Overrides,
    Sources,
    print_and_exit,
    version_of,
)
from pretrain.config.shipped import list_shipped
from pretrain.config.trajectory import allow_options, check_allowed
from pretrain.data_cli import data
from pretrain.exits import leave
from pretrain.huggingface_cli import export, import_, tokenizer_obstacles
from pretrain.plan_cli import plan
from pretrain.preflight import preflight
from pretrain.study_cli import study
from pretrain.tasks_cli import evaluate_tasks
from pretrain.train.stopping import Requests

Protocols = Annotated[
    str, typer.Option(help="nonoverlapping, sliding, or both separated by a comma.")
]
Harness = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.yaml|FOLDER|TASK",
        help="Run these tasks of lm-evaluation-harness in place of all that, offline, on an export "
        "of the checkpoint; an export that is missing is made. TASK names a task of the export, "
        "such as pretrain_validation, or one of lm-eval's. --lengths bounds what the model is "
        "given; default: the training length.",
    ),
]
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # The subcommands inherit this from the app.
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")
app.command()(plan)
# Runs by itself before the ranks of a Slurm job; only `launcher` reads what it prints.
app.command(hidden=True)(preflight)


@app.callback()
def pretrain(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=print_and_exit(lambda: version_of("pretrain")),
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Pretrain GPTs with ALiBi attention at a short length, and test them at longer ones.

    The `launcher` command starts `pretrain train` on several GPUs or on a Slurm cluster.

    \b
    Example, on a machine without a GPU:
      pretrain data build configs/demo.toml
      launcher local configs/demo.toml --nproc 2
      pretrain evaluate runs/demo/alibi --out runs/demo/report/curve.json
      pretrain export runs/demo/alibi runs/demo/hf
    """


@app.command()
def config(
    config: Config,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    list_files: Annotated[
        bool,
        typer.Option(
            "--list",
            # Eager: takes effect before CONFIG is missed.
            is_eager=True,
            callback=print_and_exit(list_shipped),
            help="List the configs and example sites that are installed with this package.",
        ),
    ] = False,
) -> None:
    """Check a config and print it in full.

    Prints every key with its value and where that comes from (a file, --set or the default), then
    the parameter count, the layout, and what the trained model will export as and in which
    precisions, or why it cannot be exported.

    A config may build on another one: base = "other.toml" at its top, relative to its own folder.

    A config that cannot work is refused with the key to change. The output is itself a valid config
    file.

    \b
    Examples:
      pretrain config --list
      pretrain config configs/demo.toml --set model.num_layers=8
    """
    from pretrain.config.describe import describe, with_origins

    run, origins = load_with_origins(config, overrides)
    # The fewest processes that can hold the model. A batch that fits none of them fits no number.
    parallel = run.parallel
    if parallel.world_size is None:
        run.layout(parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    print(with_origins(dump_config(run), origins))
    print()
    print(describe(run, tokenizer_obstacles(run)))


@data.command("build")
def data_build(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes. Default: as many as this process may use cores. Does not change what "
            "is built.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Estimate tokens, bytes and time from a sample of the corpus; write nothing.",
        ),
    ] = False,
    # These two are for `launcher data build`.
    job_array: Annotated[str | None, typer.Option(hidden=True)] = None,
    array_size: Annotated[int, typer.Option(hidden=True, min=1)] = 1,
) -> None:
    """Train the tokenizer and write the token shards.

    Both splits, train and validation, go to data.directory, which appears complete or not at all.
    Until then the build is in a hidden folder beside it, .building-NAME. When it is interrupted,
    the same command goes on with what is not done. Does nothing when the data set is there already
    and the corpus has not changed.

    `launcher data build` builds the same data set on many nodes of a Slurm cluster.

    \b
    Example:
      pretrain data build configs/demo.toml --dry-run
      pretrain data build configs/demo.toml --workers 8
    """
    run = load_config(config, overrides)
    from pretrain.data.build import build, build_on_cluster, estimate

    count = workers or len(os.sched_getaffinity(0))
    if dry_run:
        estimate(run, count)
    elif job_array:
        # `launcher data build` gives a command, as a JSON list.
        build_on_cluster(run, json.loads(job_array), count, array_size)
    else:
        build(run, count)


@data.command("verify")
def data_verify(config: Config, overrides: Overrides = []) -> None:  # noqa: B006
    """Read every byte of a data set and name every file that is damaged.

    `pretrain data build` records the digests when it writes the shards.

    \b
    Example:
      pretrain data verify configs/demo.toml
    """
    from pretrain.data.files import Cache
    from pretrain.data.verify import verify

    run = load_config(config, overrides)
    verify(run.data.directory, Cache(run.data.cache_directory, run.data.cache_bytes))
    print(f"{run.data.directory}: every shard is as it was written")


@app.command()
def train(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|none|PATH|URL",
            help="Start from the run's newest checkpoint if there is one (auto), from step 0 "
            "(none), from this checkpoint, or from an object store: s3://bucket/run.",
        ),
    ] = "auto",
    allow_changed: AllowChanged = [],  # noqa: B006
) -> None:
    """Train a run, or resume it from its newest checkpoint.

    By itself this command is one process. `launcher local`, torchrun and srun start one process per
    GPU.

    A resume prints every key that differs from the checkpoint's config, and what differs in the
    data. Layout, logging, evaluation, saving and the number of steps may change. What changes
    training (data, seed, batch, optimizer, schedule, dropout, precision) is refused unless
    --allow-changed names the key, and the model cannot change.

    \b
    Signals, to any of the processes:
      SIGINT    (Ctrl-C) the same as SIGTERM while the run trains; a second one leaves at once, with
                code 130
      SIGTERM   save, then exit with code 80
      SIGUSR1   save, then exit with code 75, which asks to be started again
      SIGUSR2   write the stacks of the process's threads to stderr and go on

    \b
    Example:
      pretrain train configs/demo.toml --set run.directory=runs/try --set train.num_steps=100
      pretrain train configs/demo.toml --set optimizer.learning_rate=5e-4 \\
          --allow-changed optimizer.learning_rate
    """
    # Before the slow imports, so that a signal that comes during them is not lost.
    requests = Requests()
    requests.listen()
    settings = [word for override in overrides for word in ("--set", override)]
    words = ["pretrain", "train", str(config), *settings, *allow_options(allow_changed)]
    requests.command = shlex.join(words)
    # Also before them, so that a typing mistake shows at once.
    run = load_config(config, overrides)
    check_allowed(allow_changed)
    from pretrain import topology
    from pretrain.train.loop import train as run_training

    code = run_training(run, resume, requests, frozenset(allow_changed))
    # After success all ranks are here and can close the process group together. After a failure
    # some may never come, and whatever started the ranks ends those that wait.
    if not code:
        topology.finish()
    # All files are closed. An ordinary exit would take seconds to unload the imported libraries.
    leave(code)


@app.command()
def evaluate(
    sources: Sources,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Window lengths in tokens, as in 128,512,2048. Default: evaluation.lengths of the "
            "config, else 1, 2, 4, 8 and 16 times the training length as far as the text reaches.",
        ),
    ] = None,
    protocols: Protocols = "nonoverlapping,sliding",
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens from one sliding window to the next. Default: evaluation.stride of the "
            "config where no length is shorter, else the shortest length.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Score at most this many validation tokens. Default: all; evaluation.max_tokens "
            "bounds the evaluations while training.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the results to this file, and a CSV, plots and report.md beside it.",
        ),
    ] = None,
    text: Annotated[
        list[str],
        typer.Option(
            metavar="FILE|PATTERN|URL",
            help="Score this text in place of the validation split; can be repeated. Each file is "
            "one document. Needs the run alone, and no data set.",
        ),
    ] = [],  # noqa: B006
    harness: Harness = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Measure perplexity at several window lengths.

    The lengths may go far beyond the training length, up to the length of the text. Every token is
    scored exactly once by either protocol. Sliding windows that do not overlap (stride = length)
    are measured once, as nonoverlapping. Each number has its tokens, its bits per byte and a 95 %
    confidence interval over blocks of text. Under torchrun or srun all processes share the work.

    \b
    Example:
      pretrain evaluate runs/demo/alibi runs/demo/sinusoidal --lengths 128,512,2048 \\
          --out runs/demo/report/curve.json
      pretrain evaluate runs/demo/alibi --text 'papers/*.txt'
      pretrain evaluate runs/demo/alibi --harness tasks/hamlet.yaml --lengths 128,2048
    """
    from pretrain.evaluate.command import evaluate_sources
    from pretrain.evaluate.own_text import text_data_set

    request = EvaluationRequest.parse(lengths, protocols, stride, max_tokens)
    if harness is not None:
        from pretrain.export.harness_run import evaluate_with_harness

        evaluate_with_harness(sources, harness, request, overrides, out, text)
        return
    if not text:
        evaluate_sources(sources, request, overrides, out)
        return
    with text_data_set(sources, text, overrides) as folder:
        evaluate_sources(sources, request, [*overrides, f"data.directory={folder}"], out)


app.command("evaluate-tasks")(evaluate_tasks)
app.command()(study)


@app.command()
def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|FILE.json",
            help="Directories of runs whose checkpoints were evaluated, or curve.json files of "
            "reports.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write one report of all sources to this file, and a CSV, plots and report.md "
            "beside it. Of a run the newest evaluated checkpoint is taken.",
        ),
    ] = None,
) -> None:
    """Combine evaluations: of one run's checkpoints, or of several runs.

    Of one run, shows perplexity at each length over training steps. Writes curve.json, a CSV, plots
    and report.md to RUN/evaluations. The launcher's evaluation jobs do this after each checkpoint;
    running it by hand is safe.

    Of several runs or reports, shows them in one table. They may differ in method, training length,
    seed, tokenizer and validation set. --out writes the report.

    \b
    Example:
      pretrain report runs/demo/alibi
      pretrain report runs/sweep/alibi_512 runs/sweep/alibi_1024 old/report/curve.json \\
          --out runs/sweep/report/curve.json
    """
    from pretrain.evaluate.checkpoints import report_run
    from pretrain.evaluate.combine import combine

    if len(sources) == 1 and out is None and not sources[0].is_file():
        (run,) = sources
        with writing(run / "evaluations"):
            print(report_run(run))
    else:
        with writing(out or sources[0]):
            print(combine(sources, out))


# Both are defined beside the conversion that they share.
app.command()(export)
app.command("import")(import_)
