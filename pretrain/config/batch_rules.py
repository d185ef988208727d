"""Refuse a ramp-up of the batch size that would not end, or whose steps cannot be divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig


def check_rampup(c: RunConfig) -> Iterator[Refusal]:
    """Check that the ramp-up ends at the full batch size."""
    if c.batch.rampup_batch_size is None:
        return
    (start, increment, _), full = c.batch.rampup_batch_size, c.batch.global_batch_size
    if start >= full:
        yield Refusal(
            "batch.rampup_batch_size",
            list(c.batch.rampup_batch_size),
            f"begins with {start} sequences, not less than batch.global_batch_size = {full}",
            "Begin with fewer, or remove the key",
        )
    elif (full - start) % increment:
        yield Refusal(
            "batch.rampup_batch_size",
            list(c.batch.rampup_batch_size),
            f"increments of {increment} do not lead from {start} to batch.global_batch_size = "
            f"{full}",
            f"Choose an increment that divides {full - start}",
        )


def check_rampup_layout(c: RunConfig, data: int) -> Iterator[Refusal]:
    """Check that every batch size of the ramp-up divides into micro batches, as the full one does.

    Args:
        c: The run, which has a ramp-up.
        data: Data-parallel ranks.
    """
    assert c.batch.rampup_batch_size is not None
    unit = c.batch.micro_batch_size * data
    what = f"batch.micro_batch_size = {c.batch.micro_batch_size} x {data} data-parallel ranks"
    if c.parallel.virtual_pipeline_model_parallel_size:
        stages = c.parallel.pipeline_model_parallel_size
        unit *= stages
        what += f" x {stages} pipeline stages, as the interleaved schedule needs"
    for size in c.batch.rampup_batch_size[:2]:
        if size % unit:
            yield Refusal(
                "batch.rampup_batch_size",
                list(c.batch.rampup_batch_size),
                f"{size} is not divisible by {what}",
                f"Begin with a multiple of {unit}, and add multiples of it",
            )
            return
