"""The order in which a pipeline stage runs its micro batches, as Megatron's schedules do.

Origin: megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`,
`get_schedule_table` and the two functions that run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from pretrain.config import Layout

State = tuple[tuple[int, ...], int]
"""Micro batches of each chunk that wait for their backward pass, and the chunk whose turn it is."""


def states(layout: Layout, stage: int) -> frozenset[State]:
    """Return what waits on a stage when a backward pass begins, each combination once.

    Args:
        layout: The layout of the run.
        stage: The pipeline stage, from 0.
    """
    # Afterwards each forward pass follows a backward pass of the same chunk.
    enough = 3 * layout.pipeline if layout.virtual > 1 else layout.pipeline + 1
    count = min(layout.num_microbatches, enough)
    return _states(layout.pipeline, layout.virtual, stage, count)


@lru_cache(maxsize=4096)
def _states(pipeline: int, virtual: int, stage: int, count: int) -> frozenset[State]:
    """Return the states of a stage in a step of `count` micro batches."""
    waiting = [0] * virtual
    found = set()
    for is_forward, chunk in passes(pipeline, virtual, stage, count):
        if is_forward:
            waiting[chunk] += 1
        else:
            found.add((tuple(waiting), chunk))
            waiting[chunk] -= 1
    return frozenset(found)


def passes(pipeline: int, virtual: int, stage: int, count: int) -> Iterator[tuple[bool, int]]:
    """Yield the passes of a step on a stage, in order: True if forward, and the chunk.

    Args:
        pipeline: Pipeline stages.
        virtual: Chunks of each.
        stage: The stage, from 0.
        count: Micro batches.
    """
    if virtual == 1:
        warm_up = pipeline - stage - 1
    else:
        warm_up = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline
    # Micro batches pass chunk by chunk in groups of the pipeline's size.
    group = pipeline if virtual > 1 else count
    forward = [
        chunk
        for first in range(0, count, group)
        for chunk in range(virtual)
        for _ in range(first, min(count, first + group))
    ]
    backward = [virtual - 1 - chunk for chunk in forward]
    warm_up = min(warm_up, len(forward))
    yield from ((True, chunk) for chunk in forward[:warm_up])
    for number, chunk in enumerate(forward[warm_up:]):
        yield True, chunk
        yield False, backward[number]
    yield from ((False, chunk) for chunk in backward[len(forward) - warm_up :])
