"""Put the pipeline stages of a step together: its time by part, and what follows for the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pretrain.config import Layout, RunConfig
from pretrain.model.flops import flops_per_token
from pretrain.plan.hardware import GPUS_PER_NODE, UNSCALED, Device, Network, Scale
from pretrain.plan.step_time import Lines, Step
from pretrain.plan.traffic import Messages, messages
from pretrain.plan.weights import Stage

PARTS = {
    "GEMM": ("matrix products",),
    "attention": ("attention",),
    "elementwise": (
        "elementwise in layers",
        "cross-entropy",
        "gradient accumulation",
        "gaps between kernels",
        "waiting for the host",
    ),
    "communication": (
        "tensor-parallel communication, exposed",
        "sends between stages",
        "reduction of gradients, exposed",
        "gather of weights, exposed",
        "compute slowed by hidden communication",
    ),
    "bubble": ("pipeline bubble",),
    "optimizer": (
        "optimizer, whole model",
        "optimizer, own shard",
        "optimizer, host",
        "synchronisation and log",
    ),
}
"""The columns of the plan's table, and the lines of a step in each."""
USABLE = 0.95
"""Part of a GPU's memory that may be planned for. Assumed: a start with other lengths of text, or
another version of a library, should not fail at the last gigabyte."""


@dataclass(frozen=True)
class Target:
    """Say for which GPUs, links and measured speeds a run is planned."""

    gpus: int
    gpu_type: str
    device: Device
    network: Network
    scale: Scale = UNSCALED

    @property
    def is_modern(self) -> bool:
        """True unless the GPU is older than compute capability 8.0."""
        return not Step.is_old(self.device)

    @property
    def usable_bytes(self) -> int:
        """Memory of a GPU that may be planned for."""
        return int(USABLE * self.device.memory_bytes)


@dataclass(frozen=True)
class Timing:
    """Hold the time of a step by class of work."""

    lines: Lines
    """Milliseconds by class of work, of the slowest stage, with the bubble."""
    tokens: int
    """Tokens of a step, of all GPUs."""
    gpus: int

    @property
    def milliseconds(self) -> float:
        """Time of the step."""
        return sum(self.lines.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs together."""
        return 1e3 * self.tokens / self.milliseconds

    def part(self, name: str) -> float:
        """Return the milliseconds of one of PARTS."""
        return sum(self.lines.get(line, 0.0) for line in PARTS[name])

    def mfu(self, config: RunConfig, device: Device, causal: bool) -> float:
        """Return the model FLOPs utilization, in 0..1.

        Args:
            config: The run.
            device: The GPU.
            causal: Count the causal half of attention only.
        """
        flops = flops_per_token(config, config.data.sequence_length, causal=causal)
        rate = self.tokens_per_second / self.gpus
        return rate * flops / (device.peak_tflops * 1e12)


def time_of_step(
    config: RunConfig,
    layout: Layout,
    stages: Sequence[Stage],
    target: Target,
    waits: bool = False,
) -> Timing:
    """Return the time of a step in a layout.

    The slowest stage works without a pause; the others wait for it. Before its first and after its
    last micro batch it waits for each of the others once, divided by the chunks of a stage.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stages: Its pipeline stages, one of each kind.
        target: The GPUs, their links and measured speeds.
        waits: As in `Step`.
    """
    steps = [replace(stage_step(config, layout, stage, target), waits=waits) for stage in stages]
    times = [
        step.lines() | _model_parallel_lines(step, layout, stage)
        for step, stage in zip(steps, stages)
    ]
    slowest: Lines = max(times, key=lambda each: sum(each.values()))
    lines = dict(slowest)
    if layout.pipeline > 1:
        passes = [sum(each.get(name, 0.0) for name in _REPEATED) for each in times]
        others = sum(p * stage.count for p, stage in zip(passes, stages)) - max(passes)
        lines["pipeline bubble"] = others / layout.num_microbatches / layout.virtual
    return Timing(lines, config.tokens_per_step, layout.world_size)


_REPEATED = (
    *PARTS["GEMM"],
    *PARTS["attention"],
    *PARTS["elementwise"],
    "tensor-parallel communication, exposed",
)
"""The lines that every micro batch has a part of."""


def stage_step(config: RunConfig, layout: Layout, stage: Stage, target: Target) -> Step:
    """Return the step of one pipeline stage.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stage: The pipeline stage.
        target: The GPUs, their links and measured speeds.
    """
    micro = config.batch.micro_batch_size * config.data.sequence_length
    wire = config.parallel.gradient_reduce_dtype
    return Step(
        config,
        target.device,
        tokens=micro * layout.num_microbatches,
        micro_batch_tokens=micro,
        ranks=layout.data,
        network=target.network,
        reduction="ring, fp32" if wire == "fp32" else "two stages, 16 bit",
        stage=stage.number,
        tail=stage.tail,
        scale=target.scale,
    )


def _model_parallel_lines(step: Step, layout: Layout, stage: Stage) -> Lines:
    """Return the exposed communication between the tensor-parallel ranks and the stages of a step.

    Tensor-parallel ranks are in one node. What is hidden costs nothing here.

    Args:
        step: The step of the stage.
        layout: The layout.
        stage: The pipeline stage.
    """
    tensor = sends = 0.0
    for each in messages(step.config, layout, stage, not step.is_v100):
        if each.group == "tensor" and not each.is_hidden:
            # An all-reduce sends everything twice.
            times = 2 if each.name == "allreduce" else 1
            tensor += times * step.nvlink_ms(each.num_bytes, layout.tensor, each.calls)
        elif each.name == "send":
            sends += _sends_ms(step, layout, each)
    lines: Lines = {}
    if layout.tensor > 1:
        lines["tensor-parallel communication, exposed"] = tensor
    if layout.pipeline > 1:
        lines["sends between stages"] = sends
    return lines


def _sends_ms(step: Step, layout: Layout, sends: Messages) -> float:
    """Return the time in which a stage sends its activations and gradients on.

    Args:
        step: The step of the stage.
        layout: The layout.
        sends: What it sends.
    """
    network = step.network
    if layout.world_size <= GPUS_PER_NODE or layout.tensor * layout.data < GPUS_PER_NODE:
        rate, latency = step.device.nvlink_gb_per_second, network.within_node_us
    else:
        # All GPUs of a node send at once.
        rate = network.node_gb_per_second * network.efficiency / GPUS_PER_NODE
        latency = network.between_nodes_us
    return 1e3 * sends.num_bytes / (rate * 1e9) + 1e-3 * sends.calls * latency


@dataclass(frozen=True)
class Evaluations:
    """Hold the cost of evaluating while training."""

    count: int
    """Evaluations of the run."""
    seconds: float
    """Time of one of them, all lengths and protocols."""
    tokens: int
    """Tokens that each length scores."""


def time_of_evaluations(
    config: RunConfig, layout: Layout, stages: Sequence[Stage], target: Target
) -> Evaluations | None:
    """Return what evaluations while training cost, or None if nothing bounds the text.

    Arguments as for `time_of_step`.
    """
    e = config.evaluation
    if e.max_tokens is None:
        return None
    milliseconds = 0.0
    for length in config.evaluation_lengths:
        for protocol in e.protocols:
            scored = config.evaluation_stride if protocol == "sliding" else length
            rows = max(1, e.tokens_per_batch // length)
            windows = max(1, -(-e.max_tokens // scored))
            batches = -(-windows // (rows * layout.data))
            at_length = config.data.model_copy(update={"sequence_length": length})
            one = config.model_copy(update={"data": at_length})
            steps = [_forward(one, layout, stage, target, rows) for stage in stages]
            passes = [step.passes_ms()[0] for step in steps]
            through = sum(p * stage.count for p, stage in zip(passes, stages))
            milliseconds += (batches - 1) * max(passes) + through
    count = -(-config.train.num_steps // config.evaluation_interval_steps)
    return Evaluations(count, milliseconds / 1e3, e.max_tokens)


def _forward(config: RunConfig, layout: Layout, stage: Stage, target: Target, rows: int) -> Step:
    """Return the step whose only micro batch is that of an evaluation's forward pass.

    Args:
        config: The run, with the windows' length as that of its sequences.
        layout: Its layout.
        stage: The pipeline stage.
        target: The GPUs, their links and measured speeds.
        rows: Windows in a forward pass.
    """
    tokens = rows * config.data.sequence_length
    step = stage_step(config, layout, stage, target)
    return replace(step, tokens=tokens, micro_batch_tokens=tokens)
