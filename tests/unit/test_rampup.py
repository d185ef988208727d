"""Test the ramp-up of the batch size against Megatron's own, and what is refused about it."""

from __future__ import annotations

import random

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from pretrain.checkpoint.manifest import Change, TrainerState, trained_tokens
from pretrain.config import ConfigError
from pretrain.config.run import batch_size_at, describe, samples_of
from tests.conftest import tiny_config


def ramps(count: int) -> list[tuple[int, int, int, int]]:
    """Return random (start, increment, samples, full batch size)."""
    draw, found = random.Random(5), []
    for _ in range(count):
        start, increment, number = draw.randint(1, 64), draw.randint(1, 64), draw.randint(1, 40)
        samples = int(10 ** draw.uniform(0, 9))
        found.append((start, increment, samples, start + increment * number))
    return found


@pytest.mark.parametrize(("start", "increment", "samples", "full"), ramps(30))
def test_the_batch_size_is_that_of_megatron(start, increment, samples, full):
    oracle = RampupBatchsizeNumMicroBatchesCalculator(
        full, 1, 1, False, 0, start, increment, samples
    )
    draw = random.Random(samples)
    increments = (full - start) // increment
    # The borders, where rounding counts, and anywhere.
    asked = {samples * k // increments + d for k in range(increments + 1) for d in (-1, 0, 1)}
    asked |= {draw.randint(0, 2 * samples) for _ in range(50)}
    for consumed in sorted(asked):
        if consumed >= 0:
            oracle.update(consumed, consistency_check=True)
            found = batch_size_at(consumed, full, (start, increment, samples))
            assert found == oracle.get_current_global_batch_size(), consumed


def test_the_samples_of_a_run_are_those_of_its_steps():
    for start, increment, samples, full in ramps(30):
        ramp = (start, increment, samples % 10_000 + 1)
        batch = {"micro_batch_size": 1, "global_batch_size": full, "rampup_batch_size": ramp}
        config, consumed = tiny_config(batch=batch), 0
        for step in range(200):
            assert samples_of(config, step) == consumed
            consumed += batch_size_at(consumed, full, ramp)
    assert samples_of(tiny_config(batch={"micro_batch_size": 1, "global_batch_size": 8}), 10) == 80


def test_the_tokens_of_a_run_are_counted_with_its_ramp():
    """4 + 4 + 6 + 17 x 8 = 150 samples of 32 tokens."""
    ramp = {"micro_batch_size": 2, "global_batch_size": 8, "rampup_batch_size": [4, 2, 13]}
    config = tiny_config(batch=ramp)
    assert config.planned_tokens == 150 * 32
    assert "20 steps of 128 to 256 tokens (ramped up over 13 samples) = 4,800 tokens" in describe(
        config
    )
    assert tiny_config().planned_tokens == 20 * 8 * 32
    # What was trained before a change of the length is known although the steps were unequal.
    state = TrainerState(step=6, consumed_samples=4 + 4 + 6 + 8 + 8 + 8)
    longer = tiny_config(batch=ramp, data={"sequence_length": 64})
    changes = (Change(3, "data.sequence_length", 32, 64, 14),)
    assert trained_tokens(longer, state, changes) == {32: 14 * 32, 64: 24 * 64}


@pytest.mark.parametrize(
    ("rampup", "says"),
    [
        ([16, 4, 100], "increments of 4 do not lead from 16 up to batch.global_batch_size = 16"),
        ([4, 5, 100], "increments of 5 do not lead from 4 up to batch.global_batch_size = 16"),
        ([2, 2, 100], "= 2: not divisible by batch.micro_batch_size = 2 x 2 data-parallel ranks"),
        ([4, 6, 100], "= 6: not divisible by batch.micro_batch_size = 2 x 2 data-parallel ranks"),
        ([4, 4], "batch.rampup_batch_size"),
        ([4, -4, 100], "batch.rampup_batch_size"),
    ],
)
def test_a_ramp_that_cannot_work_is_refused(rampup, says):
    batch = {"micro_batch_size": 2, "global_batch_size": 16, "rampup_batch_size": rampup}
    with pytest.raises(ConfigError) as error:
        tiny_config(batch=batch, parallel={"world_size": 2})
    assert says in str(error.value) and "batch.rampup_batch_size" in str(error.value)
