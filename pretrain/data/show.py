"""Print samples of a data set as text (`pretrain data show`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrain.config import ConfigError, RunConfig
from pretrain.data import order
from pretrain.data.manifest import Split
from pretrain.data.stream import TokenStream, open_stream
from pretrain.data.tokenizer import load_tokenizer

# ---- Say of any range of a split's tokens which documents it holds, and where these come from ----


BUILD_RECORD = "build.json"
DOCUMENTS = "documents"


class Excerpt(NamedTuple):
    """The part of a document that stands in a range of tokens."""

    corpus: str
    document: int
    """Number of the document in its corpus and split, from 0."""
    source: str
    """The file that the document comes from."""
    offset: int
    """Where the document begins in that file: a byte of its uncompressed content, or the number of
    its row or sample."""
    start: int
    """First token of the part in the split's stream."""
    tokens: np.ndarray
    is_begin: bool
    """True if the part holds the document's beginning."""


class Origins:
    """The place of every document of a split, read from the data set's index of documents."""

    def __init__(self, stream: TokenStream) -> None:
        """Open the index of documents; the documents themselves are not read.

        Raises:
            ConfigError: The data set is at a URL, or has no index.
        """
        if not isinstance(stream.directory, Path):
            raise ConfigError(
                f"{stream.directory}: the origin of documents is read from a local data set alone. "
                "Copy its build.json and documents/ folders, or look at the data set where it was "
                "built"
            )
        self._stream = stream
        self._folder = stream.directory / DOCUMENTS
        record = stream.directory.parent / BUILD_RECORD
        try:
            self._tasks: list[Any] = json.loads(record.read_text())["tasks"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{record}: cannot be read ({error}), so nothing is known of where documents come "
                "from. Restore it from a copy"
            ) from None
        # (corpus, task) in the order of the stream, and the first token of each.
        self._written: list[tuple[str, int]] = []
        self._starts: list[int] = []
        position = 0
        for shard in stream.manifest.shards:
            if (shard.corpus, shard.task) not in self._written[-1:]:
                self._written.append((shard.corpus, shard.task))
                self._starts.append(position)
            position += shard.tokens
        self._starts.append(position)

    def excerpts(self, start: int, count: int) -> Iterator[Excerpt]:
        """Yield the parts of documents in tokens [start, start + count), in order.

        Raises:
            ConfigError: The index of documents is missing or damaged.
        """
        end = start + count
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for number in range(first, len(self._written)):
            begin, after = self._starts[number], self._starts[number + 1]
            if begin >= end:
                return
            yield from self._of_task(number, max(start, begin), min(end, after))

    def _of_task(self, number: int, start: int, end: int) -> Iterator[Excerpt]:
        """Yield the parts in tokens [start, end), which one task wrote."""
        corpus, _ = self._written[number]
        rows, base = self._rows(number), self._starts[number]
        first = int(np.searchsorted(rows["token"], start - base, "right")) - 1
        last = int(np.searchsorted(rows["token"], end - base, "left"))
        for row in range(first, last):
            begin = base + int(rows["token"][row])
            after = base + int(rows["token"][row + 1]) if row + 1 < len(rows) else end
            part = max(start, begin), min(end, after)
            path = self._tasks[int(rows["task"][row])][2][int(rows["piece"][row])][0]
            yield Excerpt(
                corpus,
                self._before(number) + row,
                path,
                int(rows["offset"][row]),
                part[0],
                self._stream.read(part[0], part[1] - part[0]),
                part[0] == begin,
            )

    def _before(self, number: int) -> int:
        """Return how many documents of the same corpus the tasks before hold."""
        corpus = self._written[number][0]
        return sum(
            len(self._rows(before))
            for before in range(number)
            if self._written[before][0] == corpus
        )

    def _rows(self, number: int) -> np.ndarray:
        """Return the index of one task, mapped: its size is not known to be small."""
        corpus, task = self._written[number]
        path = self._folder / f"{corpus}-{task:06d}.npy"
        try:
            rows: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            if rows.dtype.names != ("task", "piece", "offset", "token") or not len(rows):
                raise ValueError("not an index of documents")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}). Restore it from a copy") from None
        return rows


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def shown_samples(
    config: RunConfig, split: Split, *, corpus: str | None, count: int, seed: int, characters: int
) -> Iterator[str]:
    """Yield the lines that show samples of a split, drawn at random.

    Args:
        config: The run, whose data.sequence_length is the length of a sample.
        split: The split.
        corpus: Draw from this corpus alone; None draws from all.
        count: Number of samples.
        seed: Seed of the draw.
        characters: Longest text that is printed of a document; the middle is left out.

    Raises:
        ConfigError: There is no such corpus, or it is shorter than a sample.
    """
    stream = open_stream(config, split)
    origins, tokenizer = Origins(stream), load_tokenizer(stream.tokenizer_path)
    known = {found.name: found for found in stream.corpora}
    if corpus is not None and corpus not in known:
        raise ConfigError(
            f"--corpus {corpus}: {stream.directory} has no such corpus. It has {', '.join(known)}"
        )
    length = config.data.sequence_length
    places = [
        (found, order.num_samples(found.tokens, length))
        for found in ([known[corpus]] if corpus is not None else stream.corpora)
    ]
    total = sum(number for _, number in places)
    if not total:
        raise ConfigError(
            f"data.sequence_length = {length}: {stream.directory} has no corpus of {length + 1} "
            "tokens, which a sample needs. Lower it"
        )
    ends = np.cumsum([number for _, number in places])
    drawn = np.random.default_rng(seed).choice(total, size=min(count, total), replace=False)
    for place in drawn.tolist():
        at = int(np.searchsorted(ends, place, "right"))
        found, number = places[at]
        index = place - int(ends[at]) + number
        start, tokens = order.token_range(index, length)
        first = found.start + start
        yield f"== {split}, {found.name}: sample {index:,} (tokens {first:,} to {first + tokens:,})"
        for part in origins.excerpts(first, tokens):
            yield _heading(part)
            yield _shortened(tokenizer.decode(part.tokens), characters)
        yield ""


def _heading(part: Excerpt) -> str:
    source = _printable(part.source).replace("\n", REPLACEMENT)
    begins = "from its beginning" if part.is_begin else "from its middle"
    return (
        f"-- {part.corpus}, document {part.document:,}, {source} at offset {part.offset:,} "
        f"({begins}, {len(part.tokens):,} tokens)"
    )


def _shortened(text: str, characters: int) -> str:
    """Return a text without its middle if it is long, in what a terminal may print."""
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return _printable(text)


def _printable(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else REPLACEMENT for c in text)
