"""Count what one optimizer step of a run costs each of its pipeline stages.

The step is that of training (`pretrain.train.loop.queue_step`), in the loop's order: the host reads
the numbers of a step when it has queued the next one. The second step is counted, because the first
creates Adam's state. A third one runs so that somebody waits for the weights that the second one
gathers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pretrain import platform
from pretrain.checkpoint.content import TrainerState
from pretrain.config import ConfigError, RunConfig
from pretrain.model import forward
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.plan.costs import Phase, StepCounts
from pretrain.plan.counter import Counter
from pretrain.plan.report import to_json, to_table
from pretrain.plan.simulation import simulated_rank
from pretrain.topology import Topology
from pretrain.train import loop, step
from pretrain.train.reporter import AttemptReporter
from pretrain.train.start import Run
from pretrain.train.start_point import StartPoint
from pretrain.train.stopping import Requests


def count_run(config: RunConfig) -> dict[int, StepCounts]:
    """Count a step on one rank of every pipeline stage: tensor rank 0 of data rank 0.

    The ranks are simulated one after the other; parallel.world_size says how many the job has, by
    default as few as its layout allows.

    Args:
        config: The run.

    Returns:
        The counts by pipeline stage.

    Raises:
        ConfigError: The model has an adaptive softmax.
    """
    if config.model.adaptive_cutoffs is not None:
        raise ConfigError(
            f"model.adaptive_cutoffs = {list(config.model.adaptive_cutoffs)}: how many tokens a "
            "tail computes is up to the text, so a step cannot be counted without one. `pretrain "
            "bench train` times steps"
        )
    world_size = planned_world_size(config)
    layout = config.layout(world_size)
    counts = {}
    for stage in range(layout.pipeline):
        rank = stage * layout.tensor * layout.data
        with simulated_rank(config, rank, world_size) as (topology, counter):
            counts[stage] = count_step(config, topology, counter)
    return counts


def bench_step_counts(config: RunConfig) -> tuple[dict[str, Any], str]:
    """Count a step and return the counts as JSON values, and the table to print."""
    layout, counts = config.layout(planned_world_size(config)), count_run(config)
    return to_json(config, layout, counts), to_table(config, layout, counts)


def planned_world_size(config: RunConfig) -> int:
    """Return parallel.world_size, or the fewest processes that the layout allows."""
    p = config.parallel
    return p.world_size or p.tensor_model_parallel_size * p.pipeline_model_parallel_size


def count_step(config: RunConfig, topology: Topology, counter: Counter) -> StepCounts:
    """Build the model of this rank, take steps, and count the last one. All ranks together.

    Args:
        config: The run.
        topology: This rank's topology.
        counter: The active counter.
    """
    chunks = build_model(config)
    optimizer = ZeroOptimizer(config, topology, chunks)
    run = Run(
        config=config,
        topology=topology,
        chunks=chunks,
        optimizer=optimizer,
        # The step reads its micro batches from an iterator that is passed to it.
        training_stream=None,  # type: ignore[arg-type]  # not read
        validation_stream=None,  # type: ignore[arg-type]  # not read
        state=TrainerState(step=0, consumed_samples=0),
        start_point=StartPoint(),
        requests=Requests(),
        reporter=AttemptReporter(),
        # Which token ends a document changes no count.
        eos_id=0 if config.data.per_document_attention else None,
    )
    with _markers(counter, optimizer):
        batches = _token_batches(config, topology.layout.num_microbatches, counter)
        first = loop.queue_step(run, batches, platform.Moment())
        counter.counts = counts = StepCounts()
        second = loop.queue_step(run, batches, first.end)
        first.read()
        counter.counts = StepCounts()
        loop.queue_step(run, batches, second.end)
    return counts


def _token_batches(
    config: RunConfig, num_microbatches: int, counter: Counter
) -> Iterator[list[Tensor]]:
    """Yield a step's micro batches of token ids, int64 [B, S + 1], without end."""
    shape = (config.batch.micro_batch_size, config.data.sequence_length + 1)
    while True:
        with counter.paused():
            batches = [
                torch.ones(shape, dtype=torch.int64, device="cpu") for _ in range(num_microbatches)
            ]
        yield batches


@contextlib.contextmanager
def _markers(counter: Counter, optimizer: ZeroOptimizer) -> Iterator[None]:
    """Tell the counter which part of a step runs, by wrapping the functions of a step.

    What `platform` does differently on a GPU is told here, too: the step's numbers arrive in host
    memory, and the host waits for their arrival.
    """
    marks: list[tuple[Any, str, Phase]] = [
        (loop, "forward_backward", Phase.BETWEEN_PASSES),
        (forward, "call_model", Phase.FORWARD),
        (optimizer, "begin_step", Phase.OPTIMIZER_STEP),
        (optimizer, "reduce_gradients", Phase.GRADIENT_REDUCTION),
        (optimizer, "update", Phase.OPTIMIZER_STEP),
        (step, "_sum_over_ranks", Phase.LOSS_AVERAGE),
        (step.QueuedStep, "read", Phase.LOSS_AVERAGE),
    ]

    def numbers(readback: platform.Readback) -> list[float]:
        counter.synchronised("numbers")
        with counter.paused():
            return read(readback)

    def synchronize() -> None:
        counter.synchronised("synchronize")

    read = platform.Readback.numbers
    with contextlib.ExitStack() as stack:
        for owner, name, phase in marks:
            wrapped = counter.marked(phase, getattr(owner, name))
            stack.enter_context(platform.replaced(owner, name, wrapped))
        stack.enter_context(platform.replaced(platform.Readback, "numbers", numbers))
        stack.enter_context(platform.replaced(platform, "to_device", counter.to_device))
        stack.enter_context(platform.replaced(platform, "synchronize", synchronize))
        yield
