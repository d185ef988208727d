"""`pretrain bench train`: measure training steps on random tokens, and where their time goes.

The steps are those of training, but without data, hooks or a run's directory, so nothing has to be
built or written first.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(WARM_UP_STEPS + steps):
        begin = last = synchronized()
        for name in training.parts():
            now = synchronized()
            times[name].append(now - last)
            last = now
        times["step"].append(synchronized() - begin)
    training.optimizer.wait_for_weights()
    seconds = {name: statistics.median(each[WARM_UP_STEPS:]) for name, each in times.items()}
    totals = {
        "tokens_per_second": config.tokens_per_step / seconds["step"],
        "peak_memory_bytes": float(platform.peak_memory_bytes()),
    }
    if topology.is_main:
        world_size = topology.layout.world_size
        print(_table(config, steps, world_size, seconds, totals))
        if json_file is not None:
            content = {
                "device": platform.device_name(),
                "world_size": world_size,
                "steps": steps,
                **totals,
                "seconds": seconds,
                "config": config.model_dump(mode="json", exclude_none=True),
            }
            with writing(json_file):
                json_file.write_text(json.dumps(content, indent=1) + "\n")
    finish()
    return {**seconds, **totals}


class TrainingStep:
    """A model, its optimizer and random tokens, for training steps without a run's directory."""

    def __init__(self, config: RunConfig, topology: Topology) -> None:
        """Build the model and its optimizer. All ranks together.

        Args:
            config: The run.
            topology: What `initialize` returned for a config of the same layout. Several models can
                share it.
        """
        self.config, self.topology = config, topology
        self.chunks = build_model(config)
        self.optimizer = ZeroOptimizer(config, topology, self.chunks)
        self.batches = random_batches(config, topology.layout.num_microbatches)
        # A document of random tokens has data.vocab_size of them on average, so this measures what
        # the mask costs, and not what it saves where documents are short.
        self.eos_id = 0 if config.data.per_document_attention else None

    def parts(self, tokens: Tensor | None = None) -> Iterator[str]:
        """Take one optimizer step, and yield each part's name behind it. All ranks together.

        Args:
            tokens: Token ids [sequences, S + 1]; random ones if None.
        """
        if tokens is None:
            micro_batches = next(self.batches)
        else:
            micro_batches = list(torch.split(tokens, self.config.batch.micro_batch_size))
        yield "data"
        losses = forward_backward(self.chunks, self.optimizer, micro_batches, self.eos_id)
        yield "forward and backward"
        # What is left of the reduction after the backward pass, in which it began.
        self.optimizer.reduce_gradients()
        yield "gradient reduction"
        self.optimizer.update(self.config.optimizer.learning_rate)
        yield "optimizer step"
        average_loss(losses, self.topology)

    def take(self, tokens: Tensor | None = None) -> None:
        """Take one optimizer step, and wait for its loss; `tokens` as for `parts`."""
        for _ in self.parts(tokens):
            pass


def synchronized() -> float:
    """Return the time in seconds once the device has done everything it was given."""
    platform.synchronize()
    return time.perf_counter()


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


def _table(
    config: RunConfig,
    steps: int,
    world_size: int,
    seconds: dict[str, float],
    totals: dict[str, float],
) -> str:
    """Return the lines that the command prints.

    Args:
        config: The run.
        steps: Number of measured steps.
        world_size: Number of processes, one per device.
        seconds: Medians of "step" and of its parts.
        totals: Speed and memory, as `bench_training` returns them.
    """
    device, rate = platform.device_name(), totals["tokens_per_second"]
    length = config.data.sequence_length
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
    for name, value in seconds.items():
        lines.append(f"{name:<22}{value * 1e3:>9.2f} ms  {value / seconds['step']:>6.1%}")
    lines.append(f"{'peak memory':<22}{totals['peak_memory_bytes'] / 2**20:>9,.0f} MiB")
    return "\n".join(lines)
