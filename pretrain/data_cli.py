"""Define the subcommands of `pretrain data` that look at a data set, as in pretrain/cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pretrain.config import load_config, writing
from pretrain.config.arguments import Config, Overrides

data = typer.Typer(no_args_is_help=True, help="Build, verify and look at a data set.")


@data.command("stats")
def data_stats(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the statistics into this file.")
    ] = None,
) -> None:
    """Show the size of each corpus, its share of training, and how long its documents are.

    \b
    Example:
      pretrain data stats configs/demo.toml --plot stats.png
    """
    run = load_config(config, overrides)
    from pretrain.data import stats

    found = stats.read_stats(run)
    for line in stats.lines(found):
        print(line)
    if plot is not None:
        with writing(plot):
            plot.write_bytes(stats.plot(found))
        print(f"{plot}: written")


@data.command("show")
def data_show(
    config: Config,
    overrides: Overrides = [],  # noqa: B006
    split: Annotated[Literal["train", "validation"], typer.Option(help="The split.")] = "train",
    corpus: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draw from this corpus alone.")
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds draw other samples.")] = 0,
    characters: Annotated[
        int, typer.Option(min=20, help="Longest text that is printed of a document.")
    ] = 400,
) -> None:
    """Print samples as text, with the corpus, file and offset of every document in them.

    A sample is what the model sees at once: data.sequence_length tokens and one more.

    \b
    Example:
      pretrain data show configs/demo.toml --num 5 --corpus shakespeare
    """
    run = load_config(config, overrides)
    from pretrain.data.show import shown_samples

    for line in shown_samples(
        run, split, corpus=corpus, count=num, seed=seed, characters=characters
    ):
        print(line)
