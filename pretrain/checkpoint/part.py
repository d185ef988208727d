"""Write a rank's part of a checkpoint: its file of tensors, and what the index says of it.

The training process does so itself, or `pretrain.checkpoint.writer` in a process of its own. So
this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pretrain.checkpoint.blocks import BlockWriter, Buffer
from pretrain.checkpoint.index import ITEM_BYTES, Part
from pretrain.config import RunFailed
from pretrain.rundir.files import replace_file

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
    bad = int(np.count_nonzero(~np.isfinite(values)))
    kind, _, parameter = name.partition("/")
    raise PoisonedState(
        f"{parameter}: {bad:,} of {values.size:,} values of its {_KINDS.get(kind, kind)} are not "
        "finite, so this step is not saved. Resume from the last checkpoint with a lower "
        "optimizer.learning_rate or a smaller optimizer.clip_grad"
    )


_KINDS = {
    "master": "fp32 weights",
    "exp_avg": "first Adam moment",
    "exp_avg_sq": "second Adam moment",
    "momentum_buffer": "momentum",
}
