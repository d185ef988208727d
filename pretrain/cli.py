"""The `pretrain` command: one short function a command; parse, build, call. Heavy imports wait until they are needed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from pretrain.config import (
    ConfigError,
    EvaluationRequest,
    RunFailed,
    dump_config,
    load_config,
    writing,
)
from pretrain.train.stopping import INTERRUPTED, Requests

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data = typer.Typer(no_args_is_help=True, help="Text to shards of tokens.")
bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The run, a TOML file; see configs/.")
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a config value; repeatable."),
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|CHECKPOINT", help="A run (its newest checkpoint), or a checkpoint."
    ),
]


@app.callback()
def pretrain() -> None:
    """Train short, test long: GPTs with ALiBi in any tensor x pipeline x data-parallel layout.

    Example: pretrain data build configs/demo.toml && launcher local configs/demo.toml --nproc 2
    """


@app.command()
def config(config: Config, overrides: Overrides = []) -> None:  # noqa: B006  typer copies it
    """Show a run's resolved config, its size and how its processes share it; refuse what cannot work.

    Example: pretrain config configs/demo.toml --set model.num_layers=8
    """
    from pretrain.config.describe import describe

    run = load_config(config, overrides)
    print(dump_config(run))
    print(describe(run))


@data.command("build")
def data_build(config: Config, overrides: Overrides = []) -> None:  # noqa: B006
    """Train the tokenizer and write the shards of both splits to data.directory; done before, nothing is done.

    Example: pretrain data build configs/demo.toml
    """
    run = load_config(config, overrides)
    from pretrain.data.build import build

    build(run)


@data.command("verify")
def data_verify(config: Config, overrides: Overrides = []) -> None:  # noqa: B006
    """Read every shard again and compare it with the manifest's SHA-256.

    Example: pretrain data verify configs/demo.toml
    """
    from pretrain.data.stream import verify

    run = load_config(config, overrides)
    verify(run.data_directory)
    print(f"{run.data_directory}: every shard is as it was written")


@app.command()
def train(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|none|PATH", help="Newest checkpoint, start afresh, or this one."
        ),
    ] = "auto",
) -> None:
    """Train a run, or go on with it. One process by itself; many under `launcher local`, torchrun or srun, which start this.

    SIGTERM to any process saves and ends the run with exit code 80, SIGUSR1 with 75 (to be started again); SIGUSR2 shows
    the process's stacks. The same command goes on from there.

    Example: pretrain train configs/demo.toml --set run.directory=runs/try --set train.num_steps=100
    """
    requests = Requests()
    requests.listen()  # before the slow imports, in which a signal may come
    run = load_config(config, overrides)  # so that a typing mistake shows at once
    from pretrain import topology
    from pretrain.train.loop import train as run_training

    code = run_training(run, resume, requests)
    if not code:  # else at once: all ranks are here, and what started them ends those that are late
        topology.finish()
    _leave(
        code
    )  # everything is closed: the interpreter would take seconds to undo what it has imported


@app.command()
def evaluate(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|CHECKPOINT...", help="Runs (newest checkpoint) or checkpoints."
        ),
    ],
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens, comma-separated; default: the config's, else 1 to 16 L."),
    ] = None,
    protocols: Annotated[
        str, typer.Option(help="nonoverlapping, sliding, or both.")
    ] = "nonoverlapping,sliding",
    stride: Annotated[
        int | None, typer.Option(help="Sliding: predictions of each window that count.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Score at most so many; default: the config's, else all.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write FILE.json and, beside it, a CSV, plots and report.md."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Perplexity by length, far beyond the training length. Every token is scored exactly once in either protocol.

    Example: pretrain evaluate runs/demo/alibi runs/demo/sinusoidal --lengths 128,512,2048 --out runs/demo/report/curve.json
    """
    from pretrain.evaluate.command import evaluate_sources

    request = EvaluationRequest.parse(lengths, protocols, stride, max_tokens)
    evaluate_sources(sources, request, overrides, out)


@app.command()
def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run whose checkpoints were evaluated.")
    ],
) -> None:
    """Put a run's evaluated checkpoints together: perplexity at each length over training steps, in RUN/evaluations.

    The launcher's evaluation jobs do this after each checkpoint; by hand it does no harm.

    Example: pretrain report runs/demo/alibi
    """
    from pretrain.evaluate.checkpoints import report_run

    with writing(run / "evaluations"):
        print(report_run(run))


@app.command()
def export(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The Hugging Face folder to write.")],
    curve: Annotated[
        Path | None,
        typer.Option(help="curve.json for the model card; default: the run's last evaluation."),
    ] = None,
) -> None:
    """Write a Hugging Face model, reload it with stock transformers and compare logits on validation text.

    Example: pretrain export runs/demo/alibi runs/demo/hf
    """
    from pretrain.export.command import export_source

    if not export_source(source, out, curve):
        raise typer.Exit(1)


@bench.command("train")
def bench_train(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after a few to warm up.")] = 20,
) -> None:
    """Time training steps on random tokens: tokens/s, where a step's time goes, peak memory.

    Example: pretrain bench train configs/demo.toml --steps 20
    """
    run = load_config(config, overrides)
    from pretrain.train.bench import bench_training

    bench_training(run, steps)


@bench.command("attention")
def bench_attention(
    lengths: Annotated[
        str | None, typer.Option(help="Tokens, comma-separated; default: 512 to 65536.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="About how long it may take, compilation apart.")
    ] = 480,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the table, as Markdown.")
    ] = None,
) -> None:
    """Time every attention kernel that this machine has, side by side; without a GPU, the CPU's.

    Example: pretrain bench attention --lengths 1024,16384 --write attention.md
    """
    from pretrain.kernels import bench as attention_bench

    try:
        chosen = attention_bench.parse_lengths(lengths) if lengths else None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    text = attention_bench.bench_attention(chosen, seconds)
    if write is not None:
        with writing(write):
            write.write_text(text)


def main() -> None:
    """Entry point: bad input is `error: ...` and exit code 2, a failure of the run 1, Ctrl-C 130; none is a traceback."""
    # Megatron and DeepSpeed warn about optional packages at import, a screenful for every process.
    warnings.simplefilter("ignore")
    interrupts = _noted_interrupts()
    try:
        app()
    except SystemExit as end:  # how typer ends every command; 130 is what it makes of Ctrl-C
        if not (end.code and interrupts):
            raise
        _leave(INTERRUPTED, "interrupted")
    except BaseException as error:
        if interrupts:  # libraries turn a KeyboardInterrupt into errors of their own
            _leave(INTERRUPTED, "interrupted")
        if isinstance(error, ConfigError | RunFailed):
            _leave(
                2 if isinstance(error, ConfigError) else 1,
                *(f"error: {line}" for line in str(error).splitlines()),
            )
        if isinstance(error, OSError):
            named = error.filename and error.strerror
            _leave(1, f"error: {error.filename}: {error.strerror}" if named else f"error: {error}")
        if lost := _lost_rank(error):
            _leave(1, f"error: another rank is gone ({lost}); what it said last tells why")
        raise


def _lost_rank(error: BaseException) -> str | None:
    """What the network says of a rank that ended, if that is what `error` is; a traceback would hide that rank's own."""
    said = re.search(
        r"gloo/transport/\S+ ((?:Connection|Read error|Write error).*?)(?:\. |$)|remote process exited[^.]*",
        str(error),
    )
    return (said[1] or said[0]) if isinstance(error, RuntimeError) and said else None


def _noted_interrupts() -> list[int]:
    """Grows with every Ctrl-C from now on; each still raises KeyboardInterrupt. Where Ctrl-C is ignored it stays so."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    return noted


def _leave(code: int, *lines: str) -> None:
    """Says why and ends the process. Not sys.exit: leaving a process group in order waits for ranks that have not failed."""
    where = _rank_prefix()
    sys.stdout.flush()
    print("".join(f"{where}{line}\n" for line in lines), end="", file=sys.stderr, flush=True)
    os._exit(code)


def _rank_prefix() -> str:
    process = getattr(sys.modules.get("pretrain.topology"), "Process", None)
    if process is None:  # not imported, or interrupted at it: too early for ranks
        return ""
    with contextlib.suppress(ConfigError):  # which may be what is being said
        if rank := process.from_environment().rank:
            return f"rank {rank}: "
    return ""
