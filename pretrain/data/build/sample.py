"""Take an even sample of lines for the tokenizer, from a corpus of any size.

Documents are cut after newlines into chunks of some 4,000 characters, and each chunk has a priority
that is a hash of its place. A task keeps the chunks of lowest priority up to a bound, so any
smaller sample is a part of what it keeps: the merge takes from each task its exact share.
"""

from __future__ import annotations

import heapq
import json
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

CHUNK_CHARACTERS = 4000


class Chunk(NamedTuple):
    """Some whole lines of a document."""

    priority: int
    document: int
    """Position of the document in the task."""
    number: int
    """Position of the chunk in the document."""
    text: str

    @property
    def size(self) -> int:
        """Return the bytes in UTF-8."""
        return len(self.text.encode())


class Sampler:
    """Keep the chunks of lowest priority of the documents of one task."""

    def __init__(self, task: int, max_bytes: int) -> None:
        """Start without chunks.

        Args:
            task: Number of the task, which makes the priorities differ between tasks.
            max_bytes: The most text to keep.
        """
        self._task, self._left = task, max_bytes
        # The root of the heap is the chunk to give up first.
        self._heap: list[tuple[int, int, int, str, int]] = []
        self._highest = 1 << 64

    def add(self, document: int, text: str) -> None:
        """Take the chunks of a document."""
        for number, (start, end) in enumerate(_chunks(text)):
            place = struct.pack("<QQQ", self._task, document, number)
            priority = xxhash.xxh3_64_intdigest(place)
            if priority >= self._highest:
                continue
            chunk = text[start:end]
            size = len(chunk.encode())
            self._left -= size
            heapq.heappush(self._heap, (-priority, document, number, chunk, size))
            while self._left < 0:
                given_up = heapq.heappop(self._heap)
                # What comes later with a higher priority would be given up as well; otherwise the
                # sample would prefer the end of the task.
                self._highest = -given_up[0]
                self._left += given_up[4]

    def save(self, path: Path) -> None:
        """Write the chunks in the order of the stream."""
        with path.open("w") as file:
            for priority, document, number, text, _ in sorted(self._heap, key=lambda c: c[1:3]):
                file.write(json.dumps([-priority, document, number, text]) + "\n")


def _chunks(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(text):
        newline = text.find("\n", start + CHUNK_CHARACTERS)
        end = len(text) if newline < 0 else newline + 1
        yield start, end
        start = end


def read_lines(path: Path, max_bytes: int, left_out: Collection[int]) -> Iterator[str]:
    """Yield the lines of a task's sample in the order of the stream.

    Args:
        path: What `Sampler.save` wrote.
        max_bytes: The most text to take.
        left_out: Documents, by their position in the task, that are not trained on.
    """
    for text in read_chunks(path, max_bytes, left_out):
        yield from (line for line in text.split("\n") if line)


def read_chunks(
    path: Path, max_bytes: int, left_out: Collection[int] = frozenset()
) -> Iterator[str]:
    """Yield the chunks of a task's sample in the order of the stream; see `read_lines`."""
    with path.open() as file:
        kept = [
            c for c in (Chunk(*json.loads(line)) for line in file) if c.document not in left_out
        ]
    taken: list[Chunk] = []
    for chunk in sorted(kept):
        max_bytes -= chunk.size
        if max_bytes < 0:
            break
        taken.append(chunk)
    for chunk in sorted(taken, key=lambda c: c[1:3]):
        yield chunk.text
