"""Define the task that takes the steps of a ramp-up by hand."""

from __future__ import annotations

from typing import Any

from pretrain import platform
from pretrain.config import RunConfig


def take_steps_of(config: RunConfig, sizes: list[int]) -> list[tuple[float, float]]:
    """Take steps on batches of given sizes, each from a loader of its own.

    Args:
        config: A run without a ramp-up.
        sizes: The batch size of every step.

    Returns:
        (loss, gradient norm) of every step.
    """
    from pretrain.data.loader import batches
    from pretrain.train.loop import queue_step
    from pretrain.train.reporter import AttemptReporter, Requests
    from pretrain.train.start import StartPoint, load_run, prepare

    streams, topology, _ = prepare(config, "none")
    run = load_run(config, streams, topology, StartPoint(), Requests(), AttemptReporter())
    results, consumed = [], 0
    for size in sizes:
        steps = batches(
            run.training_stream,
            seed=config.run.seed,
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
