"""Flat ranges of a tensor as N-dimensional boxes.

ZeRO cuts parameters into flat ranges that respect no row, whereas a layout-free checkpoint consists
of boxes (an offset and a size along each axis) of global tensors. A range of a tensor with `ndim`
axes splits into at most 2 * ndim - 1 boxes, each of which is contiguous in the range, so saving and
loading need no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
