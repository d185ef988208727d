"""Define the record of one evaluation: its keys, and what each of them says.

The same keys stand in curve.json, as the columns of curve.csv and, as far as they are not the
run's own, in the evaluation events of metrics.jsonl. This module imports no torch, so reports,
model cards and the launcher can read records with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.config.evaluation import MASKED

Record = Mapping[str, Any]
"""One evaluation of one checkpoint, with the keys of FIELDS."""

FIELDS = (
    "run",
    "step",
    "method",
    "seed",
    "train_length",
    "settings",
    "tokenizer",
    "validation",
    "precision",
    "protocol",
    "stride",
    "length",
    "perplexity",
    "loss_nats",
    "loss_low",
    "loss_high",
    "bits_per_byte",
    "tokens",
    "bytes",
    "checkpoint",
)
"""Keys of a record, in the order of the columns of curve.csv.

| key | type | what it says |
|---|---|---|
| run | str | the run's directory as the user gave it, or the checkpoint's path if it stands alone |
| step | int | optimizer steps that the checkpoint was trained for |
| method | str | position.method |
| seed | int | run.seed |
| train_length | int | data.sequence_length, the training length L in tokens |
| settings | str | first 12 hex digits of a hash of all that training depends on but the seed |
| tokenizer | str | first 12 hex digits of the SHA-256 of the tokenizer's file |
| validation | str | first 12 hex digits of the SHA-256 of the validation split that was scored |
| precision | str | "fp32", "bf16" or "fp16": what the model computed in, by train.precision |
| protocol | str | "nonoverlapping" or "sliding"; "masked" if the model predicts masked tokens |
| stride | int | tokens by which a window moves on; equals length where windows do not overlap |
| length | int | tokens in a window |
| perplexity | float | exp(loss_nats), per token of this tokenizer |
| loss_nats | float | mean loss over all scored tokens, end-of-document tokens among them, in nats |
| loss_low, loss_high | float | 95 % confidence interval of loss_nats, over blocks of the text |
| bits_per_byte | float | all nats / ln 2 / bytes: comparable between tokenizers |
| tokens | int | tokens scored; masked: those that were masked |
| bytes | int | bytes of the text of these tokens, in UTF-8 |
| checkpoint | str | path of the checkpoint |

The interval is of the text: it says how far the mean would move if other text of the same kind
were scored, and nothing about another seed of the training. Masked tokens are predicted from both
sides, so their perplexity is no other protocol's; their bits_per_byte and bytes are None, and so
are those of a text for some of whose words a vocabulary of words has `<unk>`.
"""

HASH_DIGITS = 12
"""Hex digits of a SHA-256 in a record."""


def fields_of(record: Record) -> dict[str, Any]:
    """Return the FIELDS of a record in their order. Raises KeyError for one that it lacks."""
    return {field: record[field] for field in FIELDS}


@dataclass(frozen=True)
class PositionLosses:
    """Losses by position in the window, of one checkpoint at one length."""

    losses: NDArray[np.float64]
    """[length] mean loss in nats; nan at a position where no token was scored."""

    counts: NDArray[np.int64]
    """[length] tokens scored at each position."""


def check_objectives(found: Iterable[tuple[str, str]]) -> None:
    """Check that a report is of language models alone, or of models of masked tokens alone.

    A masked token is predicted from both sides, so that its perplexity is lower whatever the model
    is worth.

    Args:
        found: The source and the protocol of each record.

    Raises:
        ConfigError: There are both.
    """
    sources: dict[bool, str] = {}
    for source, protocol in found:
        sources.setdefault(protocol == MASKED, source)
    if len(sources) > 1:
        raise ConfigError(
            f"{sources[True]}: predicts masked tokens, and {sources[False]} next ones "
            "(train.objective). Their perplexities do not compare. Make a report of each"
        )
