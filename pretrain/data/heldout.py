"""Choose the documents that are held out for validation, by their hashes.

The rule, for each corpus: order its different texts by hash, those of more than `max_bytes` after
all others. Hold out texts from the front, at least one, up to `fraction` times the number of
documents, and end before they have more than `max_bytes` together. The last text is never held out,
so that one is left for training: a corpus of a single text holds out none.

So a text is on one side whatever the order of the files, the number of tasks and how often the text
occurs; and the choice is even over the corpus, as the hash is.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from pretrain.config import ConfigError


class Candidates:
    """Collect the documents of one task that could be held out.

    Whatever the other tasks hold, `choose_held_out` chooses no document of this task that is not
    among those collected here: what it holds out is the front of an order and has at most
    `max_bytes`, so a task's share of it is the front of the task's order and has at most
    `max_bytes`. That much text is kept, and no more (plus one document, if the task has none of
    up to `max_bytes`).
    """

    def __init__(self, max_bytes: int) -> None:
        """Start without documents.

        Args:
            max_bytes: The most bytes of UTF-8 that the corpus may hold out: its part of
                data.validation_bytes. The same number for all tasks of the corpus.
        """
        raise NotImplementedError

    def add(self, text: str) -> int:
        """Take note of a (cleaned) document and return its `document_hash`."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write the candidates to one file."""
        raise NotImplementedError


class HeldOutText(NamedTuple):
    """A text that is held out."""

    hash: int
    text: str


def choose_held_out(paths: Sequence[Path], fraction: float) -> list[HeldOutText]:
    """Choose what one corpus holds out, from the files that `Candidates.save` wrote for its tasks.

    Args:
        paths: One file of each task of the corpus; their order does not matter.
        fraction: data.validation_fraction.

    Returns:
        The held-out texts, each once, in the order of their hashes. Empty if the corpus does not
        have two different texts.
    """
    raise NotImplementedError
