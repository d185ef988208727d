"""Read the tensors of a checkpoint in slabs of bounded size, whatever the size of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.checkpoint.index import ITEM_BYTES
from pretrain.checkpoint.load import SLAB_BYTES, Target, read_into
from pretrain.checkpoint.manifest import Checkpoint


class Slab(NamedTuple):
    """Consecutive rows of a global tensor."""

    name: str
    """The global tensor: "<kind>/<parameter>"."""
    offset: tuple[int, ...]
    """Where the rows begin in the tensor."""
    size: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return ITEM_BYTES * math.prod(self.size)


def slabs(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[list[Slab]]:
    """Yield tensors in order, in lists of slabs that hold about SLAB_BYTES together.

    Only a single row that is larger makes a larger list.

    Args:
        checkpoint: The checkpoint, opened.
        names: Global tensors, "<kind>/<parameter>".
    """
    batch: list[Slab] = []
    room = SLAB_BYTES
    for name in names:
        for slab in _rows(name, checkpoint.index.tensors[name].shape):
            if batch and slab.bytes > room:
                yield batch
                batch, room = [], SLAB_BYTES
            batch.append(slab)
            room -= slab.bytes
    if batch:
        yield batch


def read_slabs(checkpoint: Checkpoint, batch: Iterable[Slab]) -> list[Tensor]:
    """Return the values of slabs, fp32, verified.

    Args:
        checkpoint: The checkpoint, opened.
        batch: Some of what `slabs` yields, of a checkpoint with the same shapes.

    Raises:
        DamagedCheckpoint: A block is not as it was written.
    """
    targets = [Target(slab.name, slab.offset, torch.empty(slab.size)) for slab in batch]
    read_into(checkpoint, targets)
    return [target.values for target in targets]


def _rows(name: str, shape: tuple[int, ...]) -> Iterator[Slab]:
    """Yield a tensor in slabs of whole rows along its first axis."""
    if not shape:
        yield Slab(name, (), ())
        return
    row_bytes = ITEM_BYTES * math.prod(shape[1:])
    if not row_bytes:
        # The rows have no elements.
        return
    at_once = max(1, SLAB_BYTES // max(1, row_bytes))
    rest = (0,) * (len(shape) - 1)
    for row in range(0, shape[0], at_once):
        yield Slab(name, (row, *rest), (min(at_once, shape[0] - row), *shape[1:]))
