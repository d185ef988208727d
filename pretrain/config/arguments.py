"""Arguments that several commands of `pretrain` and `launcher` share, with their --help texts."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pretrain.config.overrides import check_overrides

Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="TOML file of the run. `pretrain config --list` shows examples."
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        callback=check_overrides,
        help="Override a value of the config, as in --set train.num_steps=100; with nothing after "
        "the =, remove the key, which brings its default back. Can be repeated.",
    ),
]
AllowChanged = Annotated[
    list[str],
    typer.Option(
        "--allow-changed",
        metavar="SECTION.KEY",
        help="Go on from a checkpoint although this key, which changes training, is not as it was "
        "then. data.directory stands for the training tokens, data.tokenizer for the tokenizer. "
        "Recorded in later checkpoints and metrics.jsonl. Can be repeated.",
    ),
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="Directory of a run, which means its newest checkpoint, or of one checkpoint.",
    ),
]
"""The first argument of commands that read a checkpoint."""
Sources = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="Directories of runs, which mean their newest checkpoints, or of checkpoints.",
    ),
]
"""The first argument of commands that evaluate several checkpoints together."""


def expand_home(words: Sequence[str]) -> list[str]:
    """Return command-line arguments with the ~ of --option=~/path expanded.

    A shell expands it at the beginning of a word, and bash nowhere else.
    """
    result = []
    for word in words:
        option, separator, value = word.partition("=")
        if separator and option.startswith("--") and value.startswith("~"):
            word = f"{option}={os.path.expanduser(value)}"
        result.append(word)
    return result


def print_and_exit(text: Callable[[], str]) -> Callable[[bool], None]:
    """Return the callback of a flag that prints a text and ends the command, as --help does."""

    def callback(given: bool) -> None:
        if given:
            print(text())
            raise typer.Exit

    return callback


def version_of(command: str) -> str:
    """Return the name of a command and the installed version, which pyproject.toml states."""
    try:
        return f"{command} {importlib.metadata.version('pretrain')}"
    except importlib.metadata.PackageNotFoundError:
        return f"{command} (run from its source, not installed)"
