"""Find held-out text in training documents, by sequences of 13 words."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain.config import ConfigError
from pretrain.data.words import Hashes, sequence_hashes

SEQUENCE_WORDS = 13


_DAMAGE = (
    *(OSError, ValueError, KeyError, EOFError, SyntaxError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
"""Errors of numpy.load for a damaged .npz file: of its zip archive, its compression, and the
headers of its arrays, which are Python text."""


COMMON_TEXTS = 3
"""A sequence in so many texts of a sample is common to the corpus."""


class Overlap(NamedTuple):
    """The overlap of a document with the held-out documents, in different 13-word sequences."""

    sequences: int
    """How many the document has."""

    shared: int
    """How many of them stand in some held-out document."""

    by_document: dict[int, int]
    """How many of them stand in each held-out document that has any of them, by its number."""


class HeldOut:
    """The 13-word sequences of the held-out documents, and which of them training holds.

    Words are compared in lower case and without punctuation (see pretrain/data/words.py). A
    document of fewer than 13 words is one sequence, of all its words: short documents match whole
    ones alone. Sequences are compared by 64-bit hashes: a sequence of training is taken for one of
    a million held-out ones by chance with a probability of about 2^-40, and a document only if half
    of its sequences are.

    A process needs some 30 bytes for each held-out sequence.
    """

    def __init__(self, sequences: Hashes, documents: npt.NDArray[np.uint32]) -> None:
        """Take (sequence, document) pairs. Use `from_texts` or `load`.

        Args:
            sequences: uint64[pairs], the hashes of sequences, ascending.
            documents: uint32[pairs], the number of the held-out document with that sequence.
        """
        self._pairs = sequences
        self._documents = documents
        self._sequences, self._first = np.unique(sequences, return_index=True)
        self._copies = np.diff(np.append(self._first, len(sequences)))
        self._sizes = np.bincount(documents)
        self._seen = np.zeros(len(self._sequences), np.bool_)
        # Nearly every sequence of training is none of these, and one look at a table of flags tells
        # so: it has 16 to 32 flags for each held-out sequence, and at most 2^28.
        bits = min(max(4 + len(self._sequences).bit_length(), 10), 28)
        self._shift = np.uint64(64 - bits)
        self._maybe = np.zeros(1 << bits, np.bool_)
        self._maybe[self._sequences >> self._shift] = True
        self._last: tuple[str, int, npt.NDArray[np.intp]] | None = None

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> HeldOut:
        """Take the sequences of the held-out documents, numbered in the order given."""
        each = [np.unique(sequence_hashes(text, SEQUENCE_WORDS)) for text in texts]
        sequences = np.concatenate([np.empty(0, np.uint64), *each])
        documents = np.repeat(np.arange(len(each), dtype=np.uint32), [len(e) for e in each])
        order = np.argsort(sequences, kind="stable")
        return cls(sequences[order], documents[order])

    def save(self, path: Path) -> None:
        """Write the held-out sequences to a .npz file, without what `note` has found."""
        with path.open("wb") as file:
            np.savez(file, sequences=self._pairs, documents=self._documents)

    @classmethod
    def load(cls, path: Path) -> HeldOut:
        """Read what `save` wrote; raise ConfigError if it is damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                sequences, documents = file["sequences"], file["documents"]
        except _DAMAGE as error:
            raise ConfigError(f"{path}: is damaged ({error}). Delete it and build again") from None
        return cls(sequences, documents)

    def common(self, sample: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Return which held-out documents are boilerplate, such as a licence or a menu.

        Half of such a document stands in COMMON_TEXTS texts of the sample or more. Held out, it
        would take every training document with the same boilerplate out of training.

        Args:
            sample: Texts of the corpus, or parts of them.
        """
        texts = np.zeros(len(self._sequences), np.int64)
        for text in sample:
            texts[self._shared(text)[1]] += 1
        is_common = texts[np.searchsorted(self._sequences, self._pairs)] >= COMMON_TEXTS
        found = np.bincount(self._documents, weights=is_common, minlength=len(self._sizes))
        return (self._sizes > 0) & (2 * found >= self._sizes)

    def overlap(self, text: str) -> Overlap:
        """Return what a document shares with the held-out ones."""
        hashes = np.unique(sequence_hashes(text, SEQUENCE_WORDS))
        shared = self._find(hashes)
        return Overlap(len(hashes), len(shared), self._by_document(shared))

    def is_leaked(self, text: str) -> bool:
        """Return whether a training document has to go.

        It does if it has at least half of the different sequences of some held-out document, or if
        at least half of its own different sequences are held-out ones.
        """
        own, shared = self._shared(text)
        if not len(shared):
            return False
        if 2 * len(shared) >= own:
            return True
        return any(2 * n >= self._sizes[d] for d, n in self._by_document(shared).items())

    def note(self, text: str) -> None:
        """Take note of the held-out sequences in a document that training keeps."""
        self._seen[self._shared(text)[1]] = True

    def save_seen(self, path: Path) -> None:
        """Write which held-out sequences `note` has found, one bit for each."""
        path.write_bytes(np.packbits(self._seen).tobytes())

    def merge_seen(self, path: Path) -> None:
        """Add what `save_seen` wrote in another process that loaded the same held-out sequences."""
        bits = np.frombuffer(path.read_bytes(), np.uint8)
        size = -(-len(self._seen) // 8)
        if len(bits) != size:
            raise ConfigError(
                f"{path}: is {len(bits)} bytes, not the {size} of these held-out documents. Delete "
                "it and build again; the task that wrote it is done once more"
            )
        self._seen |= np.unpackbits(bits, count=len(self._seen)).astype(np.bool_)

    @property
    def sequences(self) -> int:
        """Return the number of different sequences in the held-out documents."""
        return len(self._sequences)

    @property
    def leakage(self) -> float:
        """Return the share of the held-out sequences that also stand in a noted document."""
        return float(self._seen.mean()) if len(self._seen) else 0.0

    def _shared(self, text: str) -> tuple[int, npt.NDArray[np.intp]]:
        """Return how many sequences a document has, and the places of its held-out ones.

        The number is that of different sequences, but for a document without held-out ones, where
        nobody asks for it.
        """
        # A document is usually checked and then noted: the second call has the answer.
        if self._last is None or self._last[0] is not text:
            hashes = sequence_hashes(text, SEQUENCE_WORDS)
            shared = np.unique(self._find(hashes))
            own = len(np.unique(hashes)) if len(shared) else len(hashes)
            self._last = text, own, shared
        return self._last[1:]

    def _find(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        """Return the places in `self._sequences` of those hashes that are in it."""
        hashes = hashes[self._maybe[hashes >> self._shift]]
        if not len(hashes):
            return np.empty(0, np.intp)
        places = np.searchsorted(self._sequences, hashes)
        places = np.minimum(places, len(self._sequences) - 1)
        found: npt.NDArray[np.intp] = places[self._sequences[places] == hashes]
        return found

    def _by_document(self, shared: npt.NDArray[np.intp]) -> dict[int, int]:
        """Return how many of these sequences each held-out document has that has any."""
        first, copies = self._first[shared], self._copies[shared]
        # The pairs of one sequence stand together: first, first + 1, ..., first + copies - 1.
        starts = np.repeat(first - (np.cumsum(copies) - copies), copies)
        pairs = starts + np.arange(copies.sum())
        documents, counts = np.unique(self._documents[pairs], return_counts=True)
        return dict(zip(documents.tolist(), counts.tolist()))
