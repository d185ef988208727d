"""Choose the documents that are held out for validation, by their hashes.

The rule, for each corpus: order its different texts by hash, those of more than `max_bytes` after
all others. Hold out texts from the front, at least one, up to `fraction` times the number of
documents, and end before they have more than `max_bytes` together. The last text is never held out,
so that one is left for training: a corpus of a single text holds out none.

So a text is on one side whatever the order of the files, the number of tasks and how often the text
occurs; and the choice is even over the corpus, as the hash is.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

import xxhash

from pretrain.config import ConfigError

T = TypeVar("T")

_LARGE = 1 << 64
"""Added to the hash of a text of more than max_bytes, to place it after all others."""


class _Front(Generic[T]):
    """The front of an order of different texts: as many as have at most `max_bytes` together.

    The first one is kept even if it is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.places: list[int] = []
        self.limit = 2 * _LARGE
        """No text at this place or behind it fits. Lower it to keep only those before it."""
        self._kept: dict[int, tuple[int, T]] = {}
        self._bytes = 0

    def fits(self, place: int) -> bool:
        """Return whether a text at this place would be kept for now and is not yet."""
        return place < self.limit and place not in self._kept

    def add(self, place: int, size: int, value: T) -> None:
        """Keep a text that `fits`, and drop those at the end that fit no longer."""
        self.places.insert(bisect_left(self.places, place), place)
        self._kept[place] = size, value
        self._bytes += size
        while self._bytes > self.max_bytes and len(self.places) > 1:
            self.cut(self.places[-1])

    def cut(self, limit: int) -> None:
        """Drop the texts at `limit` and behind it, and take none there from now on."""
        self.limit = min(self.limit, limit)
        while self.places and self.places[-1] >= self.limit:
            size, _ = self._kept.pop(self.places.pop())
            self._bytes -= size

    def kept(self) -> list[tuple[int, int, T]]:
        """Return (place, bytes, value) of the texts that are kept, in order."""
        return [(place, *self._kept[place]) for place in self.places]


class Candidates:
    """Collect the documents of one task that could be held out.

    Whatever the other tasks hold, `choose_held_out` chooses no document of this task that is not
    among those collected here: what it holds out is the front of an order and has at most
    `max_bytes`, so this task's share of it is the front of the task's own order and has at most
    `max_bytes`. That much text is kept in memory and written, and no more; or one document, if the
    first in the order has more.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start without documents.

        Args:
            max_bytes: The most bytes of UTF-8 that the corpus may hold out: its part of
                data.validation_bytes. The same number for all tasks of the corpus.
        """
        self._front: _Front[bytes] = _Front(max_bytes)
        self._documents = 0
        self._last = -1

    def add(self, text: str) -> int:
        """Take note of a cleaned document and return its `document_hash`."""
        data = text.encode("utf-8", "surrogatepass")
        digest = xxhash.xxh3_64_intdigest(data)
        place = digest + (_LARGE if len(data) > self._front.max_bytes else 0)
        self._documents += 1
        self._last = max(self._last, place)
        if self._front.fits(place):
            self._front.add(place, len(data), data)
        return digest

    def save(self, path: Path) -> None:
        """Write the candidates to a file.

        It has one line with the XXH3-64 of the following JSON, and then the texts in UTF-8 without
        separators. Each text is proved by its hash when it is read.
        """
        kept = self._front.kept()
        head = _Head(
            max_bytes=self._front.max_bytes,
            documents=self._documents,
            last=self._last,
            limit=self._front.limit,
            places=[place for place, _, _ in kept],
            sizes=[size for _, size, _ in kept],
        )
        with path.open("wb") as file:
            line = json.dumps(head._asdict()).encode()
            file.write(xxhash.xxh3_64_hexdigest(line).encode() + b" " + line + b"\n")
            file.writelines(data for _, _, data in kept)


class _Head(NamedTuple):
    """The first line of a file of candidates."""

    max_bytes: int
    documents: int
    last: int
    limit: int
    places: list[int]
    sizes: list[int]


class HeldOutText(NamedTuple):
    """A text that is held out."""

    hash: int
    """Its `document_hash`. Every copy of the text has to be left out of training."""

    text: str


def choose_held_out(paths: Sequence[Path], fraction: float) -> list[HeldOutText]:
    """Choose what one corpus holds out, from the files that `Candidates.save` wrote for its tasks.

    Args:
        paths: One file of each task of the corpus. Their order does not matter.
        fraction: data.validation_fraction.

    Returns:
        The held-out texts, each once, in the order of their hashes. Empty if the corpus does not
        have two different texts.

    Raises:
        ConfigError: A file is damaged, or the tasks had different `max_bytes`.
    """
    documents, last = 0, -1
    front: _Front[tuple[Path, int]] | None = None
    for path in paths:
        with path.open("rb") as file:
            head = _read_head(file, path)
            offset = file.tell()
        front = front or _Front(head.max_bytes)
        if head.max_bytes != front.max_bytes:
            raise _damaged(path, f"max_bytes is {head.max_bytes}, not {front.max_bytes}")
        documents, last = documents + head.documents, max(last, head.last)
        front.cut(head.limit)
        for place, size in zip(head.places, head.sizes):
            if front.fits(place):
                front.add(place, size, (path, offset))
            offset += size
    if front is None:
        return []
    front.cut(last)
    chosen = front.kept()[: max(1, int(fraction * documents))]
    return [_read_text(place % _LARGE, size, *where) for place, size, where in chosen]


def _read_head(file: BinaryIO, path: Path) -> _Head:
    checksum, _, line = file.readline().removesuffix(b"\n").partition(b" ")
    if xxhash.xxh3_64_hexdigest(line).encode() != checksum:
        raise _damaged(path, "the checksum of its first line differs")
    return _Head(**json.loads(line))


def _read_text(digest: int, size: int, path: Path, offset: int) -> HeldOutText:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise _damaged(path, f"the text at byte {offset} is not the one that was written")
    return HeldOutText(digest, data.decode("utf-8", "surrogatepass"))


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}: is damaged ({problem}). Delete it and build again; the task that wrote it is "
        "done once more"
    )
