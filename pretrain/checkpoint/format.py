"""The files of a checkpoint: tensors in hashed blocks, and the index that locates them.

A file is hashed in blocks, so that a reader can verify the part that it reads without reading the
rest. Writers use blocks of 1 MiB; readers use the block size in the file's record. The hash is
XXH3 with 128 bits. It detects all accidental damage, and is fast enough that writing does not wait
for it, whereas SHA-256 is slower than the disk.

Each rank writes its boxes of global tensors one after the other into its own safetensors file.
index.json says where each box of each tensor is, and holds the digests of all files' blocks. Stock
safetensors opens the same files: the key of a box is its tensor's name and its offset.

This module imports no torch, because the process that writes checkpoints also runs it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pretrain.config import ConfigError, Poisoned
from pretrain.config.errors import first_problem
from pretrain.data.shards import Digest128
from pretrain.rundir.checkpoints import Natural
from pretrain.rundir.files import FILE_MODE, replace_file

BLOCK_BYTES = 1 << 20
"""Size of the blocks that are written. Files with any other block size can be read."""
PIECE_BYTES = 16 << 20
"""Approximate number of bytes of a file that are read at once."""

Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview | mmap | NDArray[Any]
"""Contiguous memory that can be written to a file."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint differs from what was written; an earlier checkpoint may be good."""


class FileRecord(NamedTuple):
    """The name, size and digests of a file that was written in blocks."""

    name: str
    bytes: int
    blocks: tuple[str, ...]
    """The digest of each block, in hexadecimal."""
    block_bytes: int
    """Size of every block except the last."""


# ---- The small files of a checkpoint ----


FORMAT = 2
STATE, CONFIG, INDEX = "state.json", "config.toml", "index.json"
REQUIRED = (INDEX, STATE, CONFIG)
"""Small files that every checkpoint has. Checkpoints of a run also have one of TOKENIZER_FILES."""


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
    """Hash a stream in blocks, like a file with the same content."""

    def __init__(self, block_bytes: int | None = None) -> None:
        """Begin an empty stream with blocks of `block_bytes`, by default BLOCK_BYTES."""
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
        """End the stream and return the record of a file with this content."""
        if self._bytes % self._block_bytes:
            self._end_block()
        return FileRecord(name, self._bytes, tuple(self._digests), self._block_bytes)

    def _take(self, part: memoryview) -> None:
        """Hook for subclasses: use bytes that were just hashed and are in the processor's cache."""

    def _end_block(self) -> None:
        self._digests.append(self._block.hexdigest())
        self._block.reset()


def digest(like: FileRecord, pieces: Iterable[bytes]) -> FileRecord:
    """Return the record of a file with this content.

    Args:
        like: The expected record, which gives the name and the block size.
        pieces: The content, in pieces of any size.
    """
    hasher = BlockHasher(like.block_bytes)
    for piece in pieces:
        hasher.update(piece)
    return hasher.record(like.name)


class BlockWriter(BlockHasher):
    """Write a new file sequentially, each byte once, and hash it at the same time."""

    def __init__(self, path: Path, block_bytes: int | None = None) -> None:
        """Create the file. Raises FileExistsError if it exists."""
        super().__init__(block_bytes)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._path, self._descriptor = path, os.open(path, flags, FILE_MODE)

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
    """Read any part of a file, and verify every block that contains a byte of that part."""

    def __init__(self, directory: Path, record: FileRecord) -> None:
        """Open the file.

        Raises:
            DamagedCheckpoint: The file is missing, or its size is not that of the record.
        """
        self._path, self._record = directory / record.name, record
        # The last block that was read, in which the next read often begins.
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
        """Return `count` bytes from `start` on, uint8 [count]. Do not change the result.

        Raises:
            DamagedCheckpoint: A block differs from what was written.
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
    """Write all of `data`; a single call may write only a part, as on a disk that is filling up."""
    while data:
        data = data[os.write(descriptor, data) :]


# ---- Flat ranges of a tensor as N-dimensional boxes ----
# ZeRO cuts parameters into flat ranges that may begin and end within a row. A layout-free
# checkpoint consists of boxes (an offset and a size along each axis) of global tensors. A range of
# a tensor with `ndim` axes splits into at most 2 * ndim - 1 boxes, each of which is contiguous in
# the range, so saving and loading need no communication.


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) along each axis."""


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Split a flat range of a tensor into boxes.

    Args:
        shape: The tensor's shape.
        start: First element of the range, counted in row-major order.
        end: The element after the last one.

    Returns:
        The boxes in the order of their elements in the range: the rest of the row in which the
        range starts, all whole rows as one box, and the beginning of the row in which it ends.
        A "row" is a slice along the first axis; a partial row is split in the same way along the
        next axis.
    """
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,), (end - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    # Rows [first, last) are whole.
    first, last = -(-start // row), end // row
    # The range lies strictly inside one row.
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


def global_boxes(parts: Iterable[Box], start: int, end: int) -> tuple[Box, ...]:
    """Split a flat range of a rank's part of a global tensor into boxes of the global tensor.

    Args:
        parts: The boxes of the global tensor that this rank holds, in order.
        start: First element of the range, counted through the boxes, each in row-major order.
        end: The element after the last one.
    """
    found: list[Box] = []
    for part_offset, shape in parts:
        count = math.prod(shape)
        found += (
            (tuple(a + b for a, b in zip(offset, part_offset)), size)
            for offset, size in boxes(shape, max(start, 0), min(end, count))
        )
        start, end = start - count, end - count
    return tuple(found)


# ---- The index: which bytes of which file hold which box of which tensor ----


DTYPE, ITEM_BYTES = "F32", 4
"""Every tensor is fp32."""
MAX_BLOCK_BYTES = 1 << 30
"""Largest block size that is read, because a whole block must fit into memory."""
FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")
_ALIGNMENT = 64
"""A file's data begins at a multiple of this many bytes, so that it can be memory-mapped."""

Shape = Annotated[tuple[Natural, ...], Field(max_length=8)]
"""Limited to 8 axes: no tensor has more, and products of many sizes are too long to print."""


class Chunk(NamedTuple):
    """A box of a tensor in a file, as index.json lists it."""

    file: Natural
    """Number of the file in the index."""
    start: Natural
    """The box's first byte in the file."""
    offset: tuple[Natural, ...]
    """Start of the box in the tensor, along each axis."""
    size: tuple[Natural, ...]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TensorRecord(_Strict):
    """A tensor's global shape and its boxes."""

    shape: Shape
    chunks: tuple[Chunk, ...]


class _File(_Strict):
    name: str
    bytes: Natural
    blocks: tuple[Digest128, ...]


class _Content(_Strict):
    """The content of index.json."""

    dtype: str
    block_bytes: int
    files: tuple[_File, ...]
    tensors: dict[str, TensorRecord]


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint. Checked: the files hold every element of every tensor once."""

    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]

    def dump(self) -> str:
        """Return the content of index.json."""
        files = tuple(_File(name=f.name, bytes=f.bytes, blocks=f.blocks) for f in self.files)
        # The size of the blocks is the same for all files.
        size = self.files[0].block_bytes
        content = _Content(dtype=DTYPE, block_bytes=size, files=files, tensors=self.tensors)
        return content.model_dump_json() + "\n"

    @staticmethod
    def parse(text: str | bytes, listed: Mapping[str, int]) -> Index:
        """Read the content of an index.json and check it.

        Args:
            text: The content.
            listed: The checkpoint's files by its manifest, with their sizes in bytes.

        Raises:
            DamagedCheckpoint: The text is not an index, has gaps, or lists other files.
            ConfigError: Another version wrote the index.
        """
        try:
            content = _Content.model_validate_json(text)
        except ValidationError as error:
            raise DamagedCheckpoint(f"not an index ({first_problem(error)})") from None
        if content.dtype != DTYPE or not 0 < content.block_bytes <= MAX_BLOCK_BYTES:
            # A ConfigError, because falling back to an earlier checkpoint would be wrong here.
            raise ConfigError(
                f"dtype {content.dtype} in blocks of {content.block_bytes:,} bytes; this version "
                f"reads {DTYPE} in blocks of up to {MAX_BLOCK_BYTES:,}. Use the version that "
                "saved it"
            )
        index = Index(_records(content), content.tensors)
        index.check()
        tensor_files = {name: size for name, size in listed.items() if FILE_NAME.fullmatch(name)}
        if {file.name: file.bytes for file in index.files} != tensor_files:
            raise DamagedCheckpoint("its files are not those of the manifest")
        return index

    def check(self) -> None:
        """Check that files and tensors are complete.

        Raises:
            DamagedCheckpoint: Something is missing or listed twice; the message names it.
        """
        if not self.files:
            raise DamagedCheckpoint("no files")
        names = set[str]()
        for file in self.files:
            if not FILE_NAME.fullmatch(file.name) or file.name in names:
                raise DamagedCheckpoint(f"{file.name!r}: not a name for a rank's file, or twice")
            names.add(file.name)
            if len(file.blocks) != -(-file.bytes // file.block_bytes):
                raise DamagedCheckpoint(f"{file.name}: {len(file.blocks)} digests of its blocks")
        held = sum(math.prod(c.size) for tensor in self.tensors.values() for c in tensor.chunks)
        if ITEM_BYTES * held > sum(file.bytes for file in self.files):
            # Checked before comparing boxes with each other, which is slow if there are too many.
            raise DamagedCheckpoint("its boxes hold more than its files")
        for name, tensor in self.tensors.items():
            self._check_bounds(name, tensor)
            _check_coverage(name, tensor)

    def overlapping(self, name: str, offset: Sequence[int], size: Sequence[int]) -> list[Chunk]:
        """Return the chunks that hold elements of a box of a tensor.

        Args:
            name: The tensor.
            offset: Start of the box, along each axis.
            size: The box's size.
        """
        chunks = self.tensors[name].chunks
        begin = np.array(offset, np.int64)
        end = begin + np.array(size, np.int64)
        starts, ends = _corners(chunks, len(begin))
        hits = ((starts < end) & (ends > begin)).all(axis=1)
        return [chunks[i] for i in np.flatnonzero(hits)]

    def _check_bounds(self, name: str, tensor: TensorRecord) -> None:
        dims = len(tensor.shape)
        for chunk in tensor.chunks:
            fits = len(chunk.offset) == len(chunk.size) == dims and all(
                o + s <= n for o, s, n in zip(chunk.offset, chunk.size, tensor.shape)
            )
            if not fits:
                raise DamagedCheckpoint(f"{name}: a box at {chunk.offset} is outside the tensor")
            end = chunk.start + ITEM_BYTES * math.prod(chunk.size)
            is_aligned = chunk.start % ITEM_BYTES == 0
            in_file = chunk.file < len(self.files) and end <= self.files[chunk.file].bytes
            if not (is_aligned and in_file):
                raise DamagedCheckpoint(f"{name}: the box at {chunk.offset} is in no file")


def _records(content: _Content) -> tuple[FileRecord, ...]:
    return tuple(FileRecord(f.name, f.bytes, f.blocks, content.block_bytes) for f in content.files)


def _corners(chunks: Sequence[Chunk], dims: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last corner of each chunk, int64 [chunks, dims] each."""
    starts = np.array([c.offset for c in chunks], np.int64).reshape(len(chunks), dims)
    sizes = np.array([c.size for c in chunks], np.int64).reshape(len(chunks), dims)
    return starts, starts + sizes


def _check_coverage(name: str, tensor: TensorRecord) -> None:
    """Check that the boxes of a tensor cover it: the right number of elements, and none twice."""
    held = sum(math.prod(chunk.size) for chunk in tensor.chunks)
    if held != math.prod(tensor.shape):
        raise DamagedCheckpoint(
            f"{name}: {held:,} of its {math.prod(tensor.shape):,} elements are in the files"
        )
    filled = [chunk for chunk in tensor.chunks if math.prod(chunk.size)]
    starts, ends = _corners(filled, len(tensor.shape))
    # Sort by first row: a box can then overlap only the next boxes that begin before it ends.
    order = np.lexsort(starts.T[::-1]) if starts.shape[1] else np.arange(len(filled))
    starts, ends = starts[order], ends[order]
    for i in range(len(filled) - 1):
        stop = len(filled)
        if starts.shape[1]:
            stop = int(np.searchsorted(starts[:, 0], ends[i, 0], side="left"))
        overlaps = (starts[i + 1 : stop] < ends[i]) & (ends[i + 1 : stop] > starts[i])
        if overlaps.all(axis=1).any():
            raise DamagedCheckpoint(f"{name}: two files hold the same elements")


# ---- a rank's part -------------------------------------------------------------------------------
class Piece(NamedTuple):
    """Consecutive values of a rank's file: boxes of one tensor, one after the other."""

    name: str
    """The global tensor: "<kind>/<parameter>"."""
    shape: tuple[int, ...]
    """Its global shape."""
    boxes: tuple[Box, ...]
    """(offset in the global tensor, size) of each box, in the order of the values."""

    @property
    def bytes(self) -> int:
        """Return the size of the values."""
        return ITEM_BYTES * sum(math.prod(size) for _, size in self.boxes)


@dataclass(frozen=True)
class Part:
    """The pieces of a rank's file, in order."""

    rank: int
    pieces: tuple[Piece, ...]
    header: bytes = field(init=False)
    """The safetensors header, which precedes the values in the file."""

    def __post_init__(self) -> None:
        boxes = (
            # For example "master/output_layer.weight@512,0".
            (f"{piece.name}@{','.join(map(str, offset))}", size)
            for piece in self.pieces
            for offset, size in piece.boxes
        )
        object.__setattr__(self, "header", safetensors_header(boxes))

    @property
    def file_name(self) -> str:
        """Return the name of the rank's file."""
        return f"rank-{self.rank:05d}.safetensors"

    @property
    def record_name(self) -> str:
        """Return the name of the file that holds the rank's part of the index until publication."""
        return f"rank-{self.rank:05d}.json"

    @property
    def data_bytes(self) -> int:
        """Return the size of all values."""
        return sum(piece.bytes for piece in self.pieces)

    def record(self, file: FileRecord) -> str:
        """Return this rank's part of the index as JSON, once its file has been written."""
        tensors: dict[str, tuple[tuple[int, ...], list[Chunk]]] = {}
        start = len(self.header)
        for piece in self.pieces:
            for offset, size in piece.boxes:
                _, chunks = tensors.setdefault(piece.name, (piece.shape, []))
                chunks.append(Chunk(0, start, offset, size))
                start += ITEM_BYTES * math.prod(size)
        records = {
            name: TensorRecord(shape=shape, chunks=tuple(chunks))
            for name, (shape, chunks) in tensors.items()
        }
        return Index((file,), records).dump()


def merge(parts: Iterable[str | bytes]) -> Index:
    """Join the ranks' parts of the index, in the order of their files.

    Raises:
        DamagedCheckpoint: A part is not an index, shapes differ, or elements are missing.
    """
    files: list[FileRecord] = []
    shapes: dict[str, tuple[int, ...]] = {}
    chunks: dict[str, list[Chunk]] = {}
    for text in parts:
        content = _Content.model_validate_json(text)
        for name, tensor in content.tensors.items():
            if shapes.setdefault(name, tensor.shape) != tensor.shape:
                raise DamagedCheckpoint(f"{name}: {shapes[name]} on one rank, {tensor.shape} here")
            chunks.setdefault(name, []).extend(
                chunk._replace(file=chunk.file + len(files)) for chunk in tensor.chunks
            )
        files += _records(content)
    tensors = {
        name: TensorRecord(shape=shapes[name], chunks=tuple(boxes))
        for name, boxes in sorted(chunks.items())
    }
    index = Index(tuple(files), tensors)
    index.check()
    return index


def safetensors_header(shapes: Iterable[tuple[str, Sequence[int]]], **metadata: str) -> bytes:
    """Return the header of a file of fp32 tensors: its length as 8 bytes, then JSON and spaces.

    Format: https://huggingface.co/docs/safetensors. Offsets count from the end of the header.

    Args:
        shapes: Name and shape of each tensor, in the order of their values.
        **metadata: Facts about the file.
    """
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, shape in shapes:
        start, end = end, end + ITEM_BYTES * math.prod(shape)
        entries[name] = {"dtype": DTYPE, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


# ---- Write a rank's part of a checkpoint: its file of tensors, and its part of the index ----
# Either the training process or the process of `pretrain.checkpoint.writer` does this.


Values = NDArray[np.float32]


class PoisonedState(Poisoned):
    """The state to save holds a non-finite number, or differs from the state on the device."""


BITS_MASK = 0xFFFFFFFFFFFF
"""The bits of a checksum that are compared. The device returns it in fp64, which holds these bits
exactly."""


def write_part(
    directory: Path, part: Part, values: Iterable[Values], bits: int | None = None
) -> None:
    """Write a rank's file and, when it is on the disk, its part of the index.

    Args:
        directory: The checkpoint's hidden directory.
        part: The pieces that the file holds.
        values: The values of each piece, fp32, in the order of the pieces.
        bits: Checksum of the values on the device: the sum of their bit patterns, read as integers.
            None if it is not known.

    Raises:
        PoisonedState: A value is not finite, or the checksum differs. The part of the index is then
            not written, so the checkpoint cannot be published.
        OSError: The disk refused the write.
    """
    seen = 0
    with closing(BlockWriter(directory / part.file_name)) as file:
        file.update(part.header)
        for piece, array in zip(part.pieces, values, strict=True):
            _check_finite(piece.name, array)
            file.update(array)
            # After the write, to notice a bit that flips before it is hashed.
            seen += int(array.view(np.int32).sum(dtype=np.int64)) if bits is not None else 0
        record = file.finish()
    if bits is not None and seen & BITS_MASK != bits:
        raise PoisonedState(
            f"the state that rank {part.rank} wrote differs from the state on its device: the copy "
            "in the host's memory is damaged"
        )
    replace_file(directory / part.record_name, part.record(record), durable=True)


def split_values(part: Part, data: Buffer) -> list[Values]:
    """Return views of the values of each piece, which follow each other in `data`."""
    array = np.frombuffer(data, np.float32, part.data_bytes // ITEM_BYTES)
    ends = np.cumsum([piece.bytes // ITEM_BYTES for piece in part.pieces], dtype=np.int64)
    return np.split(array, ends)[:-1]


def _check_finite(name: str, values: Values) -> None:
    # min and max are faster than a test of every element, and a NaN makes both of them NaN.
    if not values.size or (math.isfinite(values.min()) and math.isfinite(values.max())):
        return
    # Imported here, so that the process that writes starts without the classes of a config.
    from pretrain.optim.optimizers import meaning

    bad = int(np.count_nonzero(~np.isfinite(values)))
    kind, _, parameter = name.partition("/")
    raise PoisonedState(
        f"{parameter}: {bad:,} of {values.size:,} values of its {meaning(kind)} are not "
        "finite, so this step is not saved"
    )
