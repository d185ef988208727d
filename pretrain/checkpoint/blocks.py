"""Files whose every byte is hashed as it is written, and verified as it is read.

A file is hashed in blocks, so that a reader can verify the part that it reads without reading the
rest. Writers take blocks of 1 MiB; readers take the size that the file's record says. The hash is
XXH3 with 128 bits: it finds every damage that is not made on purpose, at a speed at which writing
does not wait for it (SHA-256 takes longer than the disk).

This module imports no torch: it also runs in the process that writes beside training.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.rundir.files import FILE_MODE

BLOCK_BYTES = 1 << 20
"""The size of the blocks that are written; any other is read."""
PIECE_BYTES = 16 << 20
"""About as much of a file is read at once."""
DIGEST_PATTERN = r"[0-9a-f]{32}"

Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview | mmap | NDArray[Any]
"""What can be written: contiguous memory."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint is not as it was written; an earlier one may be good."""


class FileRecord(NamedTuple):
    """The name, size and digests of a file that was written in blocks."""

    name: str
    bytes: int
    blocks: tuple[str, ...]
    """The digest of each block, in hexadecimal."""
    block_bytes: int
    """Bytes of each block but the last."""


# ---- The small files of a checkpoint ----


FORMAT = 2
STATE, CONFIG, INDEX = "state.json", "config.toml", "index.json"
REQUIRED = (INDEX, STATE, CONFIG)
"""Every checkpoint has these small files. Those of a run have a tokenizer too: one of
TOKENIZER_FILES."""


def describe(path: Path) -> dict[str, Any]:
    """Return a small file's manifest entry: its size in bytes and its SHA-256."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def checksum(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, without its own checksum."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# ---- Files in blocks ----


class BlockHasher:
    """Hash a stream in blocks, as a file that holds it is hashed."""

    def __init__(self, block_bytes: int | None = None) -> None:
        """Begin an empty stream, in blocks of BLOCK_BYTES or another size."""
        self._block_bytes = block_bytes or BLOCK_BYTES
        self._bytes, self._digests = 0, list[str]()
        self._block = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        """Add bytes to the stream."""
        # memoryview cannot cast an empty array.
        memory = data.data if isinstance(data, np.ndarray) else data
        view = memoryview(memory).cast("B") if len(data) else memoryview(b"")
        while view:
            part = view[: self._block_bytes - self._bytes % self._block_bytes]
            self._block.update(part)
            self._take(part)
            self._bytes += len(part)
            if self._bytes % self._block_bytes == 0:
                self._end_block()
            view = view[len(part) :]

    def record(self, name: str) -> FileRecord:
        """End the stream and return the record of a file that holds it."""
        if self._bytes % self._block_bytes:
            self._end_block()
        return FileRecord(name, self._bytes, tuple(self._digests), self._block_bytes)

    def _take(self, part: memoryview) -> None:
        """Receive a part of a block just hashed, still in the processor's cache; for subclasses."""

    def _end_block(self) -> None:
        self._digests.append(self._block.hexdigest())
        self._block.reset()


def digest(like: FileRecord, pieces: Iterable[bytes]) -> FileRecord:
    """Return the record that a file with this content has.

    Args:
        like: The record that it should have.
        pieces: Its content, in pieces of any size.
    """
    hasher = BlockHasher(like.block_bytes)
    for piece in pieces:
        hasher.update(piece)
    return hasher.record(like.name)


class BlockWriter(BlockHasher):
    """Write a new file from its beginning to its end, each byte once, and hash it on the way."""

    def __init__(self, path: Path, block_bytes: int | None = None) -> None:
        """Create the file. Raises FileExistsError when there is one."""
        super().__init__(block_bytes)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._path, self._descriptor = path, os.open(path, flags, FILE_MODE)

    def write(self, data: Buffer) -> None:
        """Append `data`. Raises OSError when the disk refuses."""
        self.update(data)

    def finish(self) -> FileRecord:
        """Flush the file to the disk and return its record."""
        os.fsync(self._descriptor)
        return self.record(self._path.name)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _take(self, part: memoryview) -> None:
        _write_all(self._descriptor, part)


class BlockReader:
    """Read any part of a file and verify each block of which a byte is read."""

    def __init__(self, directory: Path, record: FileRecord) -> None:
        """Open the file.

        Raises:
            DamagedCheckpoint: It is missing or has another size than the record's.
        """
        self._path, self._record = directory / record.name, record
        # The last block that was read: what follows often begins in it.
        self._last: tuple[int, Bytes] = (-1, np.empty(0, np.uint8))
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self._path}: missing") from None
        size = os.fstat(self._descriptor).st_size
        if size != record.bytes:
            os.close(self._descriptor)
            raise DamagedCheckpoint(f"{self._path}: {size} bytes, {record.bytes} were written")

    def read(self, start: int, count: int) -> Bytes:
        """Return `count` bytes from `start` on, uint8 [count]. The result is not to be changed.

        Raises:
            DamagedCheckpoint: A block is not as it was written.
        """
        if count == 0:
            return np.empty(0, np.uint8)
        size = self._record.block_bytes
        first, last = start // size, (start + count - 1) // size
        begin = first * size
        data = np.empty(min((last + 1) * size, self._record.bytes) - begin, np.uint8)
        unread = first
        if self._last[0] == first:
            data[: len(self._last[1])] = self._last[1]
            unread += 1
        at = (unread - first) * size
        while at < len(data):
            got = os.preadv(self._descriptor, [data[at:].data], begin + at)
            if got == 0:
                raise DamagedCheckpoint(f"{self._path}: became shorter while it was read")
            at += got
        for number in range(unread, last + 1):
            block = data[(number - first) * size :][:size]
            if xxhash.xxh3_128_hexdigest(block.data) != self._record.blocks[number]:
                raise DamagedCheckpoint(
                    f"{self._path}: bytes {number * size:,} to "
                    f"{number * size + len(block):,} are not what was written"
                )
        if self._last[0] != last:
            self._last = (last, data[(last - first) * size :].copy())
        return data[start - begin :][:count]

    def verify(self) -> None:
        """Read the whole file. Raises DamagedCheckpoint as `read` does."""
        for _ in self.pieces():
            pass

    def pieces(self) -> Iterator[Bytes]:
        """Yield the whole file, verified, in pieces of about PIECE_BYTES; each byte is read once.

        Raises:
            DamagedCheckpoint: As `read` does.
        """
        size = self._record.block_bytes
        step = size * max(1, PIECE_BYTES // size)
        for start in range(0, self._record.bytes, step):
            yield self.read(start, min(step, self._record.bytes - start))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data`: a call may take a part of it, as on a disk that becomes full."""
    while data:
        data = data[os.write(descriptor, data) :]


# ---- Flat ranges of a tensor as N-dimensional boxes ----
# ZeRO cuts parameters into flat ranges that respect no row, whereas a layout-free checkpoint
# consists of boxes (an offset and a size along each axis) of global tensors. A range of a tensor
# with `ndim` axes splits into at most 2 * ndim - 1 boxes, each of which is contiguous in the range,
# so saving and loading need no communication.


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) along each axis."""


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Split a flat range of a tensor into boxes.

    Args:
        shape: The tensor's shape.
        start: First element of the range, counted in row-major order.
        end: The element after the last one.

    Returns:
        The boxes in the order in which their elements stand in the range: what is left of the row
        in which it starts, all whole rows as one box, what it covers of the row in which it ends.
        A "row" is a slice along the first axis; partial ones are split likewise along the next.
    """
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,), (end - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    # Whole rows are [first, last).
    first, last = -(-start // row), end // row
    # The range begins and ends within one row, and fills it on neither side.
    if first > last:
        return _within_row(shape, last, start - last * row, end - last * row)
    result = []
    if start < first * row:
        result += _within_row(shape, first - 1, start - (first - 1) * row, row)
    if last > first:
        result.append(((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if end > last * row:
        result += _within_row(shape, last, 0, end - last * row)
    return result


def _within_row(shape: Sequence[int], index: int, start: int, end: int) -> list[Box]:
    """Return the boxes of the range [start, end) of row `index`."""
    return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], start, end)]


def global_boxes(
    shape: Sequence[int], start: int, end: int, part_offset: Sequence[int]
) -> tuple[Box, ...]:
    """Split a flat range of this rank's part of a global tensor into boxes of the global tensor.

    Args:
        shape: Shape of this rank's part.
        start: The range's first element in this rank's part, flattened by rows.
        end: The element after the last one.
        part_offset: Where this rank's part starts in the global tensor, along each axis.
    """
    return tuple(
        (tuple(a + b for a, b in zip(offset, part_offset)), size)
        for offset, size in boxes(shape, start, end)
    )
