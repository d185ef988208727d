"""Compute the batch size of a step while it is ramped up, in Megatron's arithmetic."""

from __future__ import annotations

Rampup = tuple[int, int, int]
"""batch.rampup_batch_size: (first batch size, increment, samples until the full batch size)."""


def batch_size_at(consumed_samples: int, global_batch_size: int, rampup: Rampup | None) -> int:
    """Return the samples of the step that begins after `consumed_samples`.

    The same as Megatron's RampupBatchsizeNumMicroBatchesCalculator
    (megatron/core/num_microbatches_calculator.py), its floating-point division included.

    Args:
        consumed_samples: Samples consumed before the step, over all ranks.
        global_batch_size: Samples of a step after the ramp-up.
        rampup: The ramp-up; None for steps of the full size from the start.
    """
    if rampup is None:
        return global_batch_size
    start, increment, samples = rampup
    if consumed_samples > samples:
        return global_batch_size
    samples_per_increment = samples / ((global_batch_size - start) // increment)
    return min(start + int(consumed_samples / samples_per_increment) * increment, global_batch_size)


def samples_of_steps(steps: int, global_batch_size: int, rampup: Rampup | None) -> int:
    """Return the samples that the first steps of a run consume.

    Args:
        steps: Number of steps.
        global_batch_size: Samples of a step after the ramp-up.
        rampup: The ramp-up, or None.
    """
    consumed = 0
    while rampup is not None and steps and consumed <= rampup[2]:
        consumed += batch_size_at(consumed, global_batch_size, rampup)
        steps -= 1
    return consumed + steps * global_batch_size
