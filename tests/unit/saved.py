"""Write small checkpoints as the ranks of a run would, without training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.checkpoint.format import Part, Piece, global_boxes, write_part
from pretrain.checkpoint.manifest import (
    MASTER,
    Checkpoint,
    Origin,
    TrainerState,
    lineage_content,
    open_checkpoint,
    state_content,
)
from pretrain.checkpoint.writer import Publication, publish
from pretrain.config import RunConfig, dump_config
from pretrain.data.tokenizer import Tokenizer
from pretrain.rundir.checkpoints import Branch, begin_partial, checkpoint_directory, new_id
from tests.conftest import tiny_config

MOMENTS = ("exp_avg", "exp_avg_sq")
SHAPES = {"embedding.weight": (300, 700), "layer.bias": (7,), "layer.weight": (4, 3, 2)}
Values = Mapping[str, NDArray[np.float32]]


def values(seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Values:
    """Random values of every global tensor, "<kind>/<parameter>"."""
    generator = np.random.default_rng(seed)
    return {
        f"{kind}/{name}": generator.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
        for kind in (MASTER, *MOMENTS)
    }


def first_origin(**fields: Any) -> Origin:
    """The origin of a run's first checkpoint."""
    return Origin(**{"branches": (Branch(new_id(), 0),), "data": {"training": "a"}} | fields)


def after(checkpoint: Checkpoint, branch: bool = False, **fields: Any) -> Origin:
    """The origin of the checkpoint that is saved next; on a branch of its own if `branch`."""
    lineage = checkpoint.lineage
    branches = lineage.branches
    if branch:
        branches = (*branches, Branch(new_id(), lineage.step))
    return Origin(
        **{"parent": lineage.id, "branches": branches, "data": checkpoint.origin.data} | fields
    )


def write(
    run: Path,
    step: int,
    origin: Origin,
    tensors: Values,
    world_size: int = 2,
    config: RunConfig | None = None,
    tokenizer: Tokenizer | None = None,
    attempt: Path | None = None,
    keep: dict[str, Any] | None = None,
    identifier: str | None = None,
) -> list[str]:
    """Write RUN/checkpoints/step-########, each tensor cut into flat ranges, one for each rank.

    Returns the warnings.
    """
    partial = begin_partial(run, step, attempt)
    for rank in range(world_size):
        pieces, arrays = [], []
        for name, array in tensors.items():
            start, end = (r * array.size // world_size for r in (rank, rank + 1))
            boxes = global_boxes([((0,) * array.ndim, array.shape)], start, end)
            assert sum(math.prod(size) for _, size in boxes) == end - start
            pieces.append(Piece(name, array.shape, boxes))
            arrays.append(array.reshape(-1)[start:end])
        write_part(partial, Part(rank, tuple(pieces)), arrays)
    if tokenizer is not None:
        (partial / tokenizer.file_name).write_bytes(tokenizer.content)
    return publish(
        Publication(
            partial=str(partial),
            final=str(checkpoint_directory(run, step)),
            attempt=str(attempt) if attempt else None,
            keep=keep or {},
            world_size=world_size,
            lineage=lineage_content(identifier or new_id(), step, origin),
            state=state_content(TrainerState(step, 8 * step), step, None, origin),
            config=dump_config(config or tiny_config()),
            tokenizer=tokenizer.file_name if tokenizer else None,
        )
    )


def save(
    run: Path,
    step: int,
    origin: Origin | None = None,
    tensors: Values | None = None,
    world_size: int = 2,
    config: RunConfig | None = None,
    tokenizer: Tokenizer | None = None,
) -> Checkpoint:
    """Write a checkpoint as `write` does, and open it."""
    values_ = values(step) if tensors is None else tensors
    write(run, step, origin or first_origin(), values_, world_size, config, tokenizer)
    return open_checkpoint(checkpoint_directory(run, step))


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
