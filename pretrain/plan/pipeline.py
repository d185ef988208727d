"""The order in which a pipeline stage runs its micro batches, as Megatron's schedules do.

Origin: megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`,
`get_schedule_table` and the two functions that run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pretrain.config import Layout


@dataclass(frozen=True)
class Pass:
    """One forward or backward pass of a chunk."""

    is_forward: bool
    chunk: int
    """Number of the chunk on its stage, from 0."""


def passes(layout: Layout, stage: int) -> Iterator[Pass]:
    """Yield the passes of a step on a stage, in order.

    Only as many micro batches as it takes until memory no longer grows: afterwards each forward
    pass follows a backward pass of the same chunk.

    Args:
        layout: The layout of the run.
        stage: The pipeline stage, from 0.
    """
    pipeline, virtual = layout.pipeline, layout.virtual
    count = min(layout.num_microbatches, 4 * pipeline)
    if virtual == 1:
        warm_up = pipeline - stage - 1
    else:
        warm_up = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline
    # Micro batches pass chunk by chunk in groups of the pipeline's size.
    forward = [
        chunk
        for group in range(0, count, pipeline if virtual > 1 else count)
        for chunk in range(virtual)
        for _ in range(group, min(count, group + pipeline) if virtual > 1 else count)
    ]
    backward = [virtual - 1 - chunk for chunk in forward]
    warm_up = min(warm_up, len(forward))
    yield from (Pass(True, chunk) for chunk in forward[:warm_up])
    for number, chunk in enumerate(forward[warm_up:]):
        yield Pass(True, chunk)
        yield Pass(False, backward[number])
    yield from (Pass(False, chunk) for chunk in backward[len(forward) - warm_up :])
