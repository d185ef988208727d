"""Count how well the scored text can be predicted without any context.

A model that has learned nothing but how frequent each token is predicts alike at every length,
whatever its positions. Its curve is flat and says nothing of extrapolation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.data.stream import TokenStream
from pretrain.evaluate.text import READ_TOKENS
from pretrain.rundir.files import read_json, replace_json

FILE = "unigram.json"


class Unigram(NamedTuple):
    """The best that a prediction can do that is the same at every position."""

    loss_nats: float
    """The entropy of the frequencies of the scored tokens: no other fixed distribution has a lower
    loss on this text."""
    tokens: int
    """How many were counted."""


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of frequencies in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def count(study: Path, stream: TokenStream, max_tokens: int | None) -> None:
    """Write STUDY/unigram.json, unless it is of this text already.

    Args:
        study: The study's directory.
        stream: The validation text.
        max_tokens: As in the evaluation: the first so many tokens are scored; None scores all.
    """
    tokens = min(len(stream), max_tokens or len(stream))
    asked = {"validation": stream.identity, "tokens": tokens}
    if read_json(study / FILE).items() >= asked.items():
        return
    counts = np.zeros(stream.vocab_size, np.int64)
    for start in range(0, tokens, READ_TOKENS):
        ids = stream.read(start, min(READ_TOKENS, tokens - start))
        counts += np.bincount(ids, minlength=stream.vocab_size)
    replace_json(study / FILE, {**asked, "loss_nats": entropy(counts)}, indent=1)


def parse(content: Mapping[str, Any], record: Mapping[str, Any]) -> Unigram | None:
    """Return what STUDY/unigram.json holds; None where it is of another text than a record.

    Args:
        content: The file's content.
        record: Any record of the evaluation.

    Raises:
        ValueError: The entropy is none that so many tokens can have; other errors where a key is
            missing or of another type.
    """
    # Records have the beginning of the text's SHA-256.
    same = str(content["validation"]).startswith(str(record["validation"]))
    if not same or content["tokens"] != record["tokens"]:
        return None
    found = Unigram(float(content["loss_nats"]), int(content["tokens"]))
    # That of tokens which all differ, with room for rounding.
    if not 0 <= found.loss_nats <= math.log(found.tokens) + 1e-9:
        raise ValueError(f"loss_nats = {found.loss_nats}: no entropy of {found.tokens} tokens")
    return found
