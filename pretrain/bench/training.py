"""`pretrain bench train`: measure training steps on random tokens, and where their time goes.

The steps are those of training, but without data, hooks or a run's directory, so nothing has to be
built or written first.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig, num_parameters, writing
from pretrain.model.flops import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.topology import Topology, finish
from pretrain.topology import initialize as initialize_topology
from pretrain.training.step import average_loss, forward_backward

P = ParamSpec("P")
T = TypeVar("T")

# The first steps allocate memory, compile kernels and create Adam's state.
WARM_UP_STEPS = 3


def bench_training(
    config: RunConfig, steps: int, json_file: Path | None = None
) -> dict[str, float]:
    """Measure training steps and print a table. All ranks together.

    Args:
        config: The run; its data is not read.
        steps: Number of steps to measure, after the warm-up.
        json_file: Where to write what was measured, for `pretrain plan --calibrate`.

    Returns:
        The medians over the steps: seconds of "step" and of each of its parts, by name;
        "tokens_per_second" of the whole job; "peak_memory_bytes" of this process.
    """
    topology = initialize_topology(config)
    training = TrainingStep(config, topology)
    optimizer, clock = training.optimizer, Clock()
    for number in range(WARM_UP_STEPS + steps):
        if number == WARM_UP_STEPS:
            clock.times.clear()
        begin = clock.now()
        micro_batches = clock.timed("data", next)(training.batches)
        losses = clock.timed("forward and backward", forward_backward)(
            training.chunks, optimizer, micro_batches, training.eos_id
        )
        # What is left of the reduction after the backward pass, in which it began.
        clock.timed("gradient reduction", optimizer.reduce_gradients)()
        clock.timed("optimizer step", optimizer.update)(config.optimizer.learning_rate)
        average_loss(losses, topology)
        clock.add("step", clock.now() - begin)
    optimizer.wait_for_weights()
    medians = {name: statistics.median(times) for name, times in clock.times.items()}
    rate = config.tokens_per_step / medians["step"]
    result = {
        **medians,
        "tokens_per_second": rate,
        "peak_memory_bytes": float(platform.peak_memory_bytes()),
    }
    if topology.is_main:
        print(_table(config, steps, topology.layout.world_size, medians))
        if json_file is not None:
            _write(json_file, config, steps, topology.layout.world_size, result)
    finish()
    return result


class TrainingStep:
    """A model, its optimizer and random tokens, for training steps without a run's directory."""

    def __init__(self, config: RunConfig, topology: Topology) -> None:
        """Build the model and its optimizer. All ranks together."""
        self.config, self.topology = config, topology
        self.chunks = build_model(config)
        self.optimizer = ZeroOptimizer(config, topology, self.chunks)
        self.batches = random_batches(config, topology.layout.num_microbatches)
        # A document of random tokens has data.vocab_size of them on average, so this measures what
        # the mask costs, and not what it saves where documents are short.
        self.eos_id = 0 if config.data.per_document_attention else None

    def take(self) -> None:
        """Take one optimizer step, and wait for its loss. All ranks together."""
        losses = forward_backward(self.chunks, self.optimizer, next(self.batches), self.eos_id)
        self.optimizer.step(self.config.optimizer.learning_rate)
        average_loss(losses, self.topology)


def _write(
    path: Path, config: RunConfig, steps: int, world_size: int, result: dict[str, float]
) -> None:
    """Write a measurement, with all that it depends on.

    Args:
        path: Where to write.
        config: The run.
        steps: Number of measured steps.
        world_size: Number of processes, one per device.
        result: What `bench_training` returns.
    """
    totals = ("tokens_per_second", "peak_memory_bytes")
    content = {
        "device": platform.device_name(),
        "world_size": world_size,
        "steps": steps,
        **{name: result[name] for name in totals},
        "seconds": {name: value for name, value in result.items() if name not in totals},
        "config": config.model_dump(mode="json", exclude_none=True),
    }
    with writing(path):
        path.write_text(json.dumps(content, indent=1) + "\n")


class Clock:
    """Collect how long named parts take, waiting for the device before every reading."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        """Seconds of every call, by the part's name."""

    @staticmethod
    def now() -> float:
        """Return the time in seconds once the device has done everything it was given."""
        platform.synchronize()
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        """Add one duration under `name`."""
        self.times.setdefault(name, []).append(seconds)

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return `function` so wrapped that the duration of every call is added under `name`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begin = self.now()
            result = function(*args, **kwargs)
            self.add(name, self.now() - begin)
            return result

        return call


def random_batches(config: RunConfig, num_microbatches: int) -> Iterator[list[Tensor]]:
    """Yield a step's micro batches of random token ids, int64 [B, S + 1], without end."""
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (config.batch.micro_batch_size, config.data.sequence_length + 1)
    size = config.data.vocab_size

    def tokens() -> Tensor:
        if config.model.adaptive_cutoffs is None:
            return torch.randint(0, size, shape, generator=generator)
        # As often as Zipf's law has words (id i with 1 / (i + 1)), because rare words cost an
        # adaptive softmax more. Equally frequent ones would cost it several times as much.
        share = torch.rand(shape, generator=generator, dtype=torch.float64)
        return ((size + 1.0) ** share - 1).long().clamp(max=size - 1)

    while True:
        yield [tokens() for _ in range(num_microbatches)]


def _table(config: RunConfig, steps: int, world_size: int, medians: dict[str, float]) -> str:
    """Return the lines that the command prints.

    Args:
        config: The run.
        steps: Number of measured steps.
        world_size: Number of processes, one per device.
        medians: Seconds of "step" and of its parts.
    """
    length = config.data.sequence_length
    device = platform.device_name()
    rate = config.tokens_per_step / medians["step"]
    lines = [
        f"{num_parameters(config):,} parameters, {config.position.method}, L = {length}, "
        f"{config.train.precision}, {world_size} x {device}; medians of {steps} steps",
        f"{'tokens/s':<22}{rate:>12,.0f}",
    ]
    peak = peak_tflops_per_second(device)
    for name, causal in (("all of attention", False), ("causal attention", True)):
        flops = flops_per_token(config, length, causal=causal)
        tflops = flops * rate / world_size / 1e12
        mfu = f", MFU {model_flops_utilization(rate / world_size, flops, peak):.1%}" if peak else ""
        lines.append(f"{'TFLOP/s a device':<22}{tflops:>12.3f}  ({name} counted{mfu})")
    for name, seconds in medians.items():
        share = seconds / medians["step"]
        lines.append(f"{name:<22}{seconds * 1e3:>9.2f} ms  {share:>6.1%}")
    lines.append(f"{'peak memory':<22}{platform.peak_memory_bytes() / 2**20:>9,.0f} MiB")
    return "\n".join(lines)
