"""Flat ranges of a tensor as N-dimensional boxes, for torch's distributed checkpoint (DCP).

ZeRO cuts parameters into flat ranges that respect no row, whereas a layout-free checkpoint consists
of boxes (an offset and a size along each axis) of global tensors. A range of a tensor with `ndim`
axes splits into at most 2 * ndim - 1 boxes, each of which is contiguous in the range, so saving and
loading need neither communication nor copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

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


class BoxTensor(torch.Tensor):
    """A tensor of global shape, of which this process holds some boxes.

    It has no storage of its own and cannot compute. It implements DCP's `_Checkpointable` protocol
    (torch/distributed/_checkpointable.py): on saving, each box is written as a chunk of the global
    tensor; on loading, each box is filled in place from whatever chunks overlap it.
    """

    parts: list[tuple[tuple[int, ...], Tensor]]
    """(offset in the global tensor, values) of each box."""

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: list[tuple[tuple[int, ...], Tensor]]
    ) -> BoxTensor:
        """Describe boxes of a global tensor.

        Args:
            shape: The global shape.
            dtype: The boxes' dtype.
            parts: (offset, values) of each box; the values are used in place.
        """
        # DCP accepts only torch.Tensor or DTensor as tensors, so this has to be a subclass; a
        # wrapper subclass is one without storage.
        self: BoxTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        self.parts = parts
        return self

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, parts: list[tuple[tuple[int, ...], Tensor]]
    ) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        raise TypeError(
            f"BoxTensor only describes what a checkpoint holds; it does not compute ({func})"
        )

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
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

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes a keyword
        return f"BoxTensor({tuple(self.shape)}, {len(self.parts)} boxes)"


def box_tensor(
    flat: Tensor,
    start: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offset: Sequence[int],
) -> BoxTensor:
    """Describe a flat range of this rank's part of a global tensor.

    Args:
        flat: The range's values [n]; the boxes are views of it.
        start: The range's first element in this rank's part, flattened by rows.
        shape: Shape of this rank's part.
        global_shape: Shape of the global tensor.
        offset: Where this rank's part starts in the global tensor, along each axis.
    """
    parts, position = [], 0
    for box_offset, size in boxes(shape, start, start + flat.numel()):
        count = math.prod(size)
        global_offset = tuple(a + b for a, b in zip(box_offset, offset))
        parts.append((global_offset, flat.narrow(0, position, count).view(size)))
        position += count
    return BoxTensor(global_shape, flat.dtype, parts)
