"""Flat ranges of a tensor as rectangles, and a tensor made of such rectangles that torch's distributed checkpoint takes.

ZeRO cuts parameters into flat ranges that respect no row; a layout-free checkpoint wants N-dimensional boxes. A range
splits into at most 2 * ndim - 1 of them, so nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) along each axis."""


def boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Row-major range [start, end) of a tensor of `shape` as boxes, in the order of the range."""
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,), (end - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # inside one row
        return _within(shape, last, start - last * row, end - last * row)
    result = []
    if start < first * row:
        result += _within(shape, first - 1, start - (first - 1) * row, row)
    if last > first:
        result.append(((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if end > last * row:
        result += _within(shape, last, 0, end - last * row)
    return result


def _within(shape: Sequence[int], index: int, start: int, end: int) -> list[Box]:
    return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], start, end)]


class BoxTensor(torch.Tensor):
    """A tensor of global shape of which this process holds some boxes; it has no storage of its own.

    Speaks DCP's `_Checkpointable` protocol (torch/distributed/checkpoint/planner_helpers.py): saved, each box is
    written at its place; loaded, each box is filled in place, from whatever boxes the file holds.
    """

    parts: list[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: list[tuple[tuple[int, ...], Tensor]]
    ):
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        self.parts = parts
        return self

    def __init__(self, shape, dtype, parts) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        raise TypeError(
            f"BoxTensor only describes what a checkpoint holds; it does not compute ({function})"
        )

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offset), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), part.shape),
                    properties=TensorProperties(dtype=part.dtype),
                    size=self.shape,
                ),
            )
            for number, (offset, part) in enumerate(self.parts)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offset, part in self.parts:
            if torch.Size(offset) == index.offset:
                return part
        raise KeyError(f"no box of {index.fqn} starts at {index.offset}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BoxTensor({tuple(self.shape)}, {len(self.parts)} boxes)"


def box_tensor(
    flat: Tensor,
    start: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> BoxTensor:
    """The flat range [start, start + len(flat)) of a local tensor of `shape`, at `offset` in the global one."""
    parts, position = [], 0
    for box_offset, size in boxes(shape, start, start + flat.numel()):
        count = math.prod(size)
        at = tuple(a + b for a, b in zip(box_offset, offset))
        parts.append((at, flat.narrow(0, position, count).view(size)))
        position += count
    return BoxTensor(global_shape, flat.dtype, parts)
