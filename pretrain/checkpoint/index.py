"""The index of a checkpoint: which bytes of which file hold which box of which tensor.

Each rank writes its boxes of global tensors one after the other into a safetensors file of its own.
index.json says where each box of each tensor is, and holds the digests of all files' blocks. Stock
safetensors opens the same files: the key of a box is its tensor's name and its offset.

This module imports no torch: it also runs in the process that writes beside training.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pretrain.checkpoint.blocks import (
    DIGEST_PATTERN,
    BlockWriter,
    Box,
    Buffer,
    DamagedCheckpoint,
    FileRecord,
)
from pretrain.config import ConfigError, RunFailed
from pretrain.rundir.files import replace_file
from pretrain.rundir.lineage import Natural

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
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DamagedCheckpoint(f"not an index ({where}: {first['msg']})") from None
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


def box_key(name: str, offset: Sequence[int]) -> str:
    """Return the key of a box in a safetensors file: "master/output_layer.weight@512,0"."""
    return f"{name}@{','.join(map(str, offset))}"


def _safetensors_header(pieces: Sequence[Piece]) -> bytes:
    """Return the header of a rank's file: its length as 8 bytes, then JSON, padded by spaces.

    The format is https://huggingface.co/docs/safetensors: offsets count from the header's end.
    """
    entries: dict[str, object] = {}
    start = 0
    for name, size, offset in _boxes(pieces):
        end = start + ITEM_BYTES * math.prod(size)
        entries[box_key(name, offset)] = {
            "dtype": DTYPE,
            "shape": list(size),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _boxes(pieces: Sequence[Piece]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    for piece in pieces:
        for offset, size in piece.boxes:
            yield piece.name, size, offset


# ---- Write a rank's part of a checkpoint: its file of tensors, and what the index says of it ----
# The training process does so itself, or `pretrain.checkpoint.writer` in a process of its own. So
# this module imports no torch.


Values = NDArray[np.float32]


class PoisonedState(RunFailed):
    """The state to save holds a number that is not finite."""


def write_part(directory: Path, part: Part, values: Iterable[Values]) -> None:
    """Write a rank's file and, when it is on the disk, its part of the index.

    Args:
        directory: The checkpoint's hidden directory.
        part: The pieces that the file holds.
        values: The values of each piece, fp32, in the order of the pieces.

    Raises:
        PoisonedState: A value is not finite. The part of the index is not written then, so the
            checkpoint cannot be published.
        OSError: The disk refused.
    """
    with closing(BlockWriter(directory / part.file_name)) as file:
        file.write(part.header)
        for piece, array in zip(part.pieces, values, strict=True):
            _check_finite(piece.name, array)
            file.write(array)
        record = file.finish()
    replace_file(directory / part.record_name, part.record(record), durable=True)


def split_values(part: Part, data: Buffer) -> Iterator[Values]:
    """Yield the values of each piece, where they stand one after the other in `data`."""
    array = np.frombuffer(data, np.float32, part.data_bytes // ITEM_BYTES)
    start = 0
    for piece in part.pieces:
        count = piece.bytes // ITEM_BYTES
        yield array[start : start + count]
        start += count


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
        "finite, so this step is not saved. Resume from the last checkpoint with a lower "
        "optimizer.learning_rate or a smaller optimizer.clip_grad"
    )
