"""`pretrain bench train`: where the time of a training step goes, on random tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pretrain import platform, topology
from pretrain.config import RunConfig, num_parameters
from pretrain.model.flops import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.model.gpt import build_model
from pretrain.optim.zero import ZeroOptimizer
from pretrain.train.step import average_loss, forward_backward

WARM_UP_STEPS = 3


def bench_training(config: RunConfig, steps: int) -> dict[str, float]:
    """Times `steps` steps, prints medians and returns them (seconds, tokens_per_second, bytes). Every rank takes part."""
    place = topology.initialize(config)
    chunks = build_model(config)
    optimizer = ZeroOptimizer(config, place, chunks)
    clock = Clock()
    # DeepSpeed reduces gradients inside its step (stage 1), so its reduction is timed from within.
    optimizer.engine.allreduce_gradients = clock.timed(
        "gradient reduction", optimizer.engine.allreduce_gradients
    )
    batches = _random_batches(config, place.layout.num_microbatches)
    for number in range(WARM_UP_STEPS + steps):
        if number == WARM_UP_STEPS:
            clock.times.clear()
        begin = clock.now()
        micro_batches = clock.timed("data", next)(batches)
        losses = clock.timed("forward and backward", forward_backward)(
            chunks, optimizer, micro_batches
        )
        clock.timed("optimizer step", optimizer.step)(config.optimizer.learning_rate)
        average_loss(losses, place)
        clock.add("step", clock.now() - begin)
    medians = {name: statistics.median(times) for name, times in clock.times.items()}
    if "gradient reduction" in medians:
        medians["optimizer step"] -= medians["gradient reduction"]
    rate = config.tokens_per_step / medians["step"]
    result = {
        **medians,
        "tokens_per_second": rate,
        "peak_memory_bytes": float(platform.peak_memory_bytes()),
    }
    if place.is_main:
        print(_table(config, steps, place.layout.world_size, medians, rate))
    topology.finish()
    return result


class Clock:
    """Collects how long named parts took, the device's queue emptied before each reading."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def now(self) -> float:
        platform.synchronize()
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added under `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = self.now()
            result = function(*args, **kwargs)
            self.add(name, self.now() - begin)
            return result

        return call


def _random_batches(config: RunConfig, num_microbatches: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(config.run.seed)
    shape = (config.batch.micro_batch_size, config.data.sequence_length + 1)
    while True:
        yield [
            torch.randint(0, config.data.vocab_size, shape, generator=generator)
            for _ in range(num_microbatches)
        ]


def _table(
    config: RunConfig, steps: int, world_size: int, medians: dict[str, float], rate: float
) -> str:
    length, whole = config.data.sequence_length, medians["step"]
    lines = [
        f"{num_parameters(config):,} parameters, {config.position.method}, L = {length}, {config.train.precision}, "
        f"{world_size} x {platform.device_name()}; medians of {steps} steps",
        f"{'tokens/s':<22}{rate:>12,.0f}",
    ]
    peak = peak_tflops_per_second(platform.device_name())
    for name, causal in (("all of attention", False), ("causal attention", True)):
        flops = flops_per_token(config, length, causal=causal)
        mfu = f", MFU {model_flops_utilization(rate / world_size, flops, peak):.1%}" if peak else ""
        lines.append(
            f"{'TFLOP/s a device':<22}{flops * rate / world_size / 1e12:>12.3f}  ({name} counted{mfu})"
        )
    for name, seconds in medians.items():
        lines.append(f"{name:<22}{seconds * 1e3:>9.2f} ms  {seconds / whole:>6.1%}")
    lines.append(f"{'peak memory':<22}{platform.peak_memory_bytes() / 2**20:>9,.0f} MiB")
    return "\n".join(lines)
