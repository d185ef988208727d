"""The files of a checkpoint: tensors in blocks that are hashed, and the index of what lies where.

A file is hashed in blocks, so that a reader can verify the part that it reads without reading the
rest. Writers take blocks of 1 MiB; readers take the size that the file's record says. The hash is
XXH3 with 128 bits: it finds every damage that is not made on purpose, at a speed at which writing
does not wait for it (SHA-256 takes longer than the disk).

Each rank writes its boxes of global tensors one after the other into a safetensors file of its own.
index.json says where each box of each tensor is, and holds the digests of all files' blocks. Stock
safetensors opens the same files: the key of a box is its tensor's name and its offset.

This module imports no torch: it also runs in the process that writes beside training.
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
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pretrain.config import ConfigError, Poisoned
from pretrain.rundir.checkpoints import Natural
from pretrain.rundir.files import FILE_MODE, replace_file

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


def first_problem(error: Exception) -> str:
    """Return the first thing that is wrong with a small file, with the key."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


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


def global_boxes(parts: Iterable[Box], start: int, end: int) -> tuple[Box, ...]:
    """Split a flat range of what this rank holds of a global tensor into boxes of that tensor.

    Args:
        parts: The boxes of the global tensor that this rank holds, one behind another.
        start: The range's first element in them, each flattened by rows.
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
"""Of larger blocks none is read: one has to fit into memory."""
FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")
_ALIGNMENT = 64
"""The data of a file begin at a multiple of so many bytes, so that they can be memory-mapped."""

Shape = Annotated[tuple[Natural, ...], Field(max_length=8)]
"""More axes than any tensor has would only make numbers that cannot be printed."""
Digest = Annotated[str, StringConstraints(pattern=f"^{DIGEST_PATTERN}$")]


class Chunk(NamedTuple):
    """A box of a tensor in a file, as index.json lists it."""

    file: Natural
    """Number of the file in the index."""
    start: Natural
    """The box's first byte in the file."""
    offset: tuple[Natural, ...]
    """Where the box begins in the tensor, along each axis."""
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
    blocks: tuple[Digest, ...]


class _Content(_Strict):
    """The content of index.json."""

    dtype: str
    block_bytes: int
    files: tuple[_File, ...]
    tensors: dict[str, TensorRecord]


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint, checked: every element of every tensor is in one file, once."""

    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]

    @property
    def block_bytes(self) -> int:
        """Return the size of the blocks of its files, which is the same for all."""
        return self.files[0].block_bytes

    def dump(self) -> str:
        """Return the content of index.json."""
        files = tuple(_File(name=f.name, bytes=f.bytes, blocks=f.blocks) for f in self.files)
        content = _Content(
            dtype=DTYPE, block_bytes=self.block_bytes, files=files, tensors=self.tensors
        )
        return content.model_dump_json() + "\n"

    @staticmethod
    def parse(text: str | bytes, listed: Mapping[str, int]) -> Index:
        """Read the content of an index.json and check it.

        Args:
            text: The content.
            listed: The checkpoint's files by its manifest, with their sizes in bytes.

        Raises:
            DamagedCheckpoint: It is no index, or one with gaps, or of other files.
            ConfigError: It is the index of another version.
        """
        try:
            content = _Content.model_validate_json(text)
        except ValidationError as error:
            raise DamagedCheckpoint(f"not an index ({first_problem(error)})") from None
        if content.dtype != DTYPE or not 0 < content.block_bytes <= MAX_BLOCK_BYTES:
            # Not damaged: it would be wrong to go on from an earlier one.
            raise ConfigError(
                f"dtype {content.dtype} in blocks of {content.block_bytes:,} bytes; this version "
                f"reads {DTYPE} in blocks of up to {MAX_BLOCK_BYTES:,}. Use the version that "
                "saved it"
            )
        index = Index(_records(content), content.tensors)
        index.check()
        tensor_files = {name: size for name, size in listed.items() if FILE_NAME.fullmatch(name)}
        if {file.name: file.bytes for file in index.files} != tensor_files:
            raise DamagedCheckpoint("its files are not the manifest's")
        return index

    def check(self) -> None:
        """Check that files and tensors are complete.

        Raises:
            DamagedCheckpoint: Names what is missing or twice.
        """
        if not self.files:
            raise DamagedCheckpoint("no files")
        names = set[str]()
        for file in self.files:
            if not FILE_NAME.fullmatch(file.name) or file.name in names:
                raise DamagedCheckpoint(f"{file.name!r}: not a name for a rank's file, or twice")
            names.add(file.name)
            if file.block_bytes != self.block_bytes:
                raise DamagedCheckpoint(f"{file.name}: in blocks of another size than the others")
            if len(file.blocks) != -(-file.bytes // file.block_bytes):
                raise DamagedCheckpoint(f"{file.name}: {len(file.blocks)} digests of its blocks")
        held = sum(math.prod(c.size) for tensor in self.tensors.values() for c in tensor.chunks)
        if ITEM_BYTES * held > sum(file.bytes for file in self.files):
            # Before the boxes are compared with each other, which takes long if there are too many.
            raise DamagedCheckpoint("its boxes hold more than its files")
        for name, tensor in self.tensors.items():
            self._check_bounds(name, tensor)
            _check_coverage(name, tensor)

    def overlapping(self, name: str, offset: Sequence[int], size: Sequence[int]) -> list[Chunk]:
        """Return the chunks that hold elements of a box of a tensor.

        Args:
            name: The tensor.
            offset: Where the box begins, along each axis.
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
                raise DamagedCheckpoint(f"{name}: a box at {chunk.offset} is not inside of it")
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
    """Check that the boxes of a tensor cover it: as many elements as it has, and none twice."""
    held = sum(math.prod(chunk.size) for chunk in tensor.chunks)
    if held != math.prod(tensor.shape):
        raise DamagedCheckpoint(
            f"{name}: {held:,} of its {math.prod(tensor.shape):,} elements are in the files"
        )
    filled = [chunk for chunk in tensor.chunks if math.prod(chunk.size)]
    starts, ends = _corners(filled, len(tensor.shape))
    # Sorted by their first row, a box can only overlap those that begin before it ends.
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
    """What stands before the values in the file: safetensors' header."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", _safetensors_header(self.pieces))

    @property
    def file_name(self) -> str:
        """Return the name of the rank's file."""
        return f"rank-{self.rank:05d}.safetensors"

    @property
    def record_name(self) -> str:
        """Return the name under which the rank leaves its part of the index until publication."""
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
        DamagedCheckpoint: A part is no index, shapes differ, or the whole has gaps.
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


def _safetensors_header(pieces: Sequence[Piece]) -> bytes:
    """Return the header of a rank's file: its length as 8 bytes, then JSON, padded by spaces.

    The format is https://huggingface.co/docs/safetensors: offsets count from the header's end.
    """
    entries: dict[str, object] = {}
    start = 0
    for piece in pieces:
        for offset, size in piece.boxes:
            end = start + ITEM_BYTES * math.prod(size)
            # As "master/output_layer.weight@512,0".
            key = f"{piece.name}@{','.join(map(str, offset))}"
            entries[key] = {"dtype": DTYPE, "shape": list(size), "data_offsets": [start, end]}
            start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


# ---- Write a rank's part of a checkpoint: its file of tensors, and what the index says of it ----
# The training process does so itself, or `pretrain.checkpoint.writer` in a process of its own.


Values = NDArray[np.float32]


class PoisonedState(Poisoned):
    """The state to save holds a number that is not finite, or is not the device's."""


BITS_MASK = 0xFFFFFFFFFFFF
"""Of a sum of bits, what is compared: fp64, in which it comes from the device, holds it exactly."""


def write_part(
    directory: Path, part: Part, values: Iterable[Values], bits: int | None = None
) -> None:
    """Write a rank's file and, when it is on the disk, its part of the index.

    Args:
        directory: The checkpoint's hidden directory.
        part: The pieces that the file holds.
        values: The values of each piece, fp32, in the order of the pieces.
        bits: The sum of the bits of all values on the device, each read as an integer; None if it
            is not known.

    Raises:
        PoisonedState: A value is not finite, or the sum is another. The part of the index is not
            written then, so the checkpoint cannot be published.
        OSError: The disk refused.
    """
    seen = 0
    with closing(BlockWriter(directory / part.file_name)) as file:
        file.update(part.header)
        for piece, array in zip(part.pieces, values, strict=True):
            _check_finite(piece.name, array)
            file.update(array)
            # After the write, so that a bit that flips before it is hashed is seen.
            seen += int(array.view(np.int32).sum(dtype=np.int64)) if bits is not None else 0
        record = file.finish()
    if bits is not None and seen & BITS_MASK != bits:
        raise PoisonedState(
            f"what rank {part.rank} wrote of its state is not what its device held: the copy in "
            "the host's memory is damaged"
        )
    replace_file(directory / part.record_name, part.record(record), durable=True)


def split_values(part: Part, data: Buffer) -> list[Values]:
    """Return the values of each piece, where they stand one after the other in `data`."""
    array = np.frombuffer(data, np.float32, part.data_bytes // ITEM_BYTES)
    ends = np.cumsum([piece.bytes // ITEM_BYTES for piece in part.pieces], dtype=np.int64)
    return np.split(array, ends)[:-1]


def _check_finite(name: str, values: Values) -> None:
    # The extremes are found faster than every element is looked at, and nan takes part in both.
    if not values.size or (math.isfinite(values.min()) and math.isfinite(values.max())):
        return
    # Not above: the process that writes starts on every rank, and needs no class of a config.
    from pretrain.optim.optimizers import meaning

    bad = int(np.count_nonzero(~np.isfinite(values)))
    kind, _, parameter = name.partition("/")
    raise PoisonedState(
        f"{parameter}: {bad:,} of {values.size:,} values of its {meaning(kind)} are not "
        "finite, so this step is not saved"
    )
