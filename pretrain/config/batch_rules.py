"""Refuse a ramp-up of the batch size that would not end, and name batch sizes that work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig

MOST_TRIED = 100_000
"""Sizes that are tried to find one that works."""


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


def fitting_batches(batch: int, micro_batch: int, data: int, model: int) -> str:
    """Return which batch sizes and numbers of processes would work, those nearest to the present.

    Args:
        batch: batch.global_batch_size.
        micro_batch: batch.micro_batch_size.
        data: Data-parallel ranks.
        model: Processes that hold one copy of the model.
    """
    unit = micro_batch * data
    below = batch // unit * unit
    ways = [f"a multiple of {unit}, such as {f'{below} or ' if below else ''}{below + unit}"]
    # Any larger number is a typing mistake, and a search up to it would never end.
    smaller = range(min(micro_batch - 1, MOST_TRIED), 0, -1) if batch % data == 0 else ()
    if size := next((n for n in smaller if batch // data % n == 0), None):
        ways.append(f"batch.micro_batch_size = {size}")
    fewer = range(min(data - 1, batch // micro_batch, MOST_TRIED), 0, -1)
    if ranks := next((n for n in fewer if batch % (micro_batch * n) == 0), None):
        ways.append(f"{ranks * model} process{'es' * (ranks * model > 1)}")
    return f"Choose {', or '.join(ways)}"
