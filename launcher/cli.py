"""The `launcher` command line: read the config, check it, hand over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher import local as processes
from pretrain.config import ConfigError, load_config

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def launcher() -> None:
    """Starts a run's processes, after checking that they can work together.

    Example: launcher local configs/demo.toml --nproc 2
    """


@app.command()
def local(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run, a TOML file.")],
    nproc: Annotated[int, typer.Option(min=1, help="Processes to start: one a GPU, or a few on CPU cores.")],
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a config value; repeatable.")
    ] = [],  # noqa: B006  typer copies it
    resume: Annotated[
        str | None, typer.Option(metavar="auto|none|PATH", help="Where to go on from, as in `pretrain train`.")
    ] = None,
) -> None:
    """Train on this machine.

    Rank 0 writes to this terminal, rank r to RUN/logs/rank-r.log. Ctrl-C asks the run to stop; a second one ends it.

    Example: launcher local configs/demo.toml --nproc 2 --set train.num_steps=100 --set run.directory=runs/try
    """
    run = load_config(config, overrides)
    run.layout(nproc)  # refuses here, before any process starts, what those processes could not share
    command = [sys.executable, "-m", "pretrain", "train", str(config)]
    command += ["--resume", resume] if resume is not None else []
    command += [argument for override in overrides for argument in ("--set", override)]
    raise typer.Exit(processes.run_processes(command, nproc, run.directory / "logs"))


def main() -> None:
    """The entry point: bad input is one `error: ...` line on stderr and exit code 2, without a traceback."""
    try:
        app()
    except ConfigError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", file=sys.stderr)
        sys.exit(1)
