"""Define `pretrain export` and `pretrain import`, as pretrain/cli.py does the other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pretrain.config import ConfigError, RunConfig
from pretrain.config.arguments import Overrides, Source
from pretrain.config.data_schema import WORDS
from pretrain.rundir.states import ExitCode


def export(
    source: Source,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write the Hugging Face model to.")
    ],
    curve: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Length curve for the model card, as `pretrain evaluate --out` writes it. "
            "Default: the run's last evaluation.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Longest sequence that the export accepts; MPT and OPT fail beyond it. Default: "
            "16 training lengths, or the longest that the run evaluates.",
        ),
    ] = None,
    split_special_tokens: Annotated[
        bool,
        typer.Option(
            "--split-special-tokens",
            help="Let the exported tokenizer take </s> in a text for text, as the run's data did. "
            "Default: it is the special token, as chat templates and trainers expect.",
        ),
    ] = False,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a Hugging Face model and verify it.

    Loads the written model with stock transformers and compares its logits in fp32. The comparison
    runs on validation text, at the training length and 16 times that or as far as memory allows.
    When it fails, the exit code is 1. Its perplexity in bf16 and fp16 is measured too, printed and
    written on the model card.

    The folder also gets a model card, which names license, languages and data sets as [export] of
    the run's config or --set says, and the first documents of the validation text as a task for
    lm-eval (export.task_bytes). An earlier export in OUT is replaced if nobody has changed it.

    \b
    Example:
      pretrain export runs/demo/alibi runs/demo/hf --set export.license=apache-2.0 \\
          --set 'export.language=["en"]'
    """
    from pretrain.export.command import export_source

    if not export_source(
        source,
        out,
        curve,
        max_length,
        overrides=overrides,
        split_special_tokens=split_special_tokens,
    ):
        raise typer.Exit(ExitCode.FAILED)


def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="HF_FOLDER",
            help="Directory of a Hugging Face model: config.json and safetensors.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the run to make.")],
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Make a run from a Hugging Face model and verify it.

    Takes Bloom, MPT, OPT and GPT-NeoX (Pythia), exported by this program or published elsewhere.
    What our model cannot compute is refused. The weights become the checkpoint of step 0 of a run
    that can be evaluated, trained on and exported. Its logits are compared with those of stock
    transformers, on random tokens at up to four times the model's length (data.sequence_length, for
    OPT and MPT as far as their positions reach). When they differ, OUT is not made and the exit
    code is 1.

    Data for it has to be made with the model's own tokenizer. An export of this program carries it;
    other folders do not, unless theirs is a SentencePiece model that data.tokenizer can name.

    \b
    Example:
      pretrain import downloads/bloom-560m runs/bloom --set data.directory=data/bloom
      pretrain evaluate runs/bloom --lengths 2048,8192
      pretrain train runs/bloom/config.toml
    """
    from pretrain.importing.command import import_folder

    import_folder(folder, out, overrides)


def tokenizer_obstacles(run: RunConfig) -> list[str]:
    """Return why the tokenizer that data.tokenizer names could not be exported with the model."""
    from pretrain.data.tokenizer import load_tokenizer

    # A file that is not there is refused by `pretrain data build`, with what to do.
    given = run.data.tokenizer
    if given is None or given == WORDS or not Path(given).is_file():
        return []
    try:
        load_tokenizer(given).check_exportable()
    except ConfigError as error:
        return [str(error)]
    return []
