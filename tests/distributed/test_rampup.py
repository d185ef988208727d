"""A ramp-up of the batch size equals steps that are taken by hand, and goes on in any layout."""

from __future__ import annotations

from typing import Any

import pytest

from pretrain import platform
from pretrain.config import RunConfig
from tests.conftest import tiny_config
from tests.distributed import tasks

SIZES = [4, 4, 6, 8, 8]
"""Two increments over 13 samples: one is due after 6.5 and the other after 13 samples."""
RAMP = {"micro_batch_size": 1, "global_batch_size": 8, "rampup_batch_size": [4, 2, 13]}


def test_a_ramp_equals_its_steps_by_hand_and_goes_on_in_another_layout(pools, tiny_data, tmp_path):
    data, run = {"directory": str(tiny_data)}, {"directory": str(tmp_path / "run")}
    plain = tiny_config(batch={"micro_batch_size": 1, "global_batch_size": 8}, data=data)
    by_hand = pools(2).run(take_steps_of, plain, SIZES)[0]
    ramp = tiny_config(batch=RAMP, data=data, run=run)
    begun = pools(2).run(tasks.continue_run, ramp, "none", 2)[0]
    assert list(zip(begun["losses"], begun["norms"], strict=True)) == by_hand[:2]
    assert begun["samples"] == 8
    # The next step is the one of 6 samples. Another layout adds up in another order.
    alone = tiny_config(batch={**RAMP, "micro_batch_size": 2}, data=data, run=run)
    gone_on = pools(1).run(tasks.continue_run, alone, "auto", 5)[0]
    assert gone_on["began"] == 2 and gone_on["samples"] == sum(SIZES)
    found = list(zip(gone_on["losses"], gone_on["norms"], strict=True))
    assert found == [pytest.approx(step, rel=1e-4) for step in by_hand[2:]]


# ---- tasks of the ranks --------------------------------------------------------------------------
def take_steps_of(config: RunConfig, sizes: list[int]) -> list[tuple[float, float]]:
    """Take steps on batches of given sizes, each from a loader of its own.

    Args:
        config: A run without a ramp-up.
        sizes: The batch size of every step.

    Returns:
        (loss, gradient norm) of every step.
    """
    from pretrain.data.order import batches
    from pretrain.training.loop import queue_step
    from pretrain.training.reporter import AttemptReporter, Requests
    from pretrain.training.start import StartPoint, load_run, prepare

    streams, topology, _ = prepare(config, "none")
    run = load_run(config, streams, topology, StartPoint(), Requests(), AttemptReporter())
    results, consumed = [], 0
    for size in sizes:
        steps = batches(
            run.training_stream,
            run.blend,
            sequence_length=config.data.sequence_length,
            global_batch_size=size,
            micro_batch_size=config.batch.micro_batch_size,
            data_parallel_rank=topology.data_rank,
            data_parallel_size=topology.layout.data,
            consumed_samples=consumed,
        )
        record: dict[str, Any] = queue_step(run, steps, platform.Moment()).read()
        steps.close()
        results.append((record["loss_nats"], record["gradient_norm"]))
        consumed += size
    return results
