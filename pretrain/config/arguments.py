"""Arguments that several commands of `pretrain` and `launcher` share, with their --help texts."""

from __future__ import annotations

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
