"""Find the fastest layout that fits, and say why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.config import ConfigError, Layout, RunConfig
from pretrain.plan.activations import BIASED, WIDEST_HEAD, attention_backend
from pretrain.plan.hardware import GPUS_PER_NODE
from pretrain.plan.layouts import RECOMPUTE, Refused, candidates
from pretrain.plan.memory import Memory, memory_of_rank
from pretrain.plan.timing import Target, Timing, time_of_step
from pretrain.plan.weights import Stage, stages_of, weights_of_rank, zero_stage

MOST_GPUS = 1_000_000
"""GPUs of a job that are believed."""


@dataclass(frozen=True)
class Planned:
    """Hold a run in one layout, with its memory and its time."""

    config: RunConfig
    layout: Layout
    memory: Memory
    """Of the rank that needs most."""
    timing: Timing

    @property
    def memory_is_bound(self) -> bool:
        """True if the run needs no more memory than planned, and maybe less.

        Of ZeRO 2 and 3 the buffers are taken at their full size, all at once.
        """
        return zero_stage(self.config, self.layout) > 1

    @property
    def group(self) -> tuple[object, ...]:
        """The layout without micro-batch size and recomputation."""
        p = self.config.parallel
        return (
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            p.virtual_pipeline_model_parallel_size,
            p.sequence_parallel,
            p.zero_stage,
        )

    def hours(self, gpus: int) -> float:
        """Return the GPU-hours of the whole run, without evaluations and checkpoints."""
        seconds = self.config.planned_tokens / self.timing.tokens_per_second
        return seconds * gpus / 3600


@dataclass(frozen=True)
class Plan:
    """Hold all layouts of a run."""

    fits: list[Planned]
    """Those that fit, the fastest first."""
    too_large: list[Planned]
    """Those that do not, the nearest miss first."""
    refused: Refused

    def best_of_groups(self) -> list[Planned]:
        """Return the fastest micro batch and recomputation of each layout, the fastest first."""
        best: dict[tuple[object, ...], Planned] = {}
        for each in self.fits:
            best.setdefault(each.group, each)
        return list(best.values())

    def reasons(self) -> Counter[str]:
        """Return how many combinations fall out for each reason."""
        counts = Counter(self.refused.counts)
        if self.too_large:
            counts["more memory than a GPU has"] = len(self.too_large)
        return counts


def check_target(config: RunConfig, target: Target) -> None:
    """Refuse what the plan's arithmetic does not describe, or the GPUs cannot do.

    Args:
        config: The run.
        target: The GPUs.

    Raises:
        ConfigError: With the key and the remedy.
    """
    precision = config.train.precision
    if not 0 < target.gpus <= MOST_GPUS:
        raise ConfigError(
            f"--gpus {target.gpus}: not a number of GPUs. Choose 1 or more, up to {MOST_GPUS:,}"
        )
    if target.gpus > GPUS_PER_NODE and target.gpus % GPUS_PER_NODE:
        below = target.gpus // GPUS_PER_NODE * GPUS_PER_NODE
        raise ConfigError(
            f"--gpus {target.gpus}: not a multiple of the {GPUS_PER_NODE} GPUs of a node. Choose "
            f"{below} or {below + GPUS_PER_NODE}"
        )
    if config.is_masked:
        raise ConfigError(
            'train.objective = "masked": attention looks both ways, and `pretrain plan` counts '
            "that of a causal mask. Plan with --set train.objective=next_token for a lower bound"
        )
    if config.model.adaptive_cutoffs is not None:
        raise ConfigError(
            f"model.adaptive_cutoffs = {list(config.model.adaptive_cutoffs)}: how many tokens a "
            "tail computes is up to the text, so `pretrain plan` has no time for it. `pretrain "
            "bench train` times steps"
        )
    if precision == "fp32":
        raise ConfigError(
            "train.precision = fp32: the speeds of `pretrain plan` are those of 16-bit products. "
            f"Plan with --set train.precision={'bf16' if target.is_modern else 'fp16'}"
        )
    if precision == "bf16" and not target.is_modern:
        raise ConfigError(
            f"train.precision = bf16: a {target.gpu_type} has no bf16. Plan with --set "
            "train.precision=fp16"
        )
    _check_attention(config, target)
    weights_of_rank(config, 0)


def _check_attention(config: RunConfig, target: Target) -> None:
    """Refuse kernels of attention whose memory and time are not known; arguments as above."""
    wanted, taken = config.model.attention_backend, attention_backend(config, target.is_modern)
    if wanted not in ("auto", taken):
        raise ConfigError(
            f"model.attention_backend = {wanted}: `pretrain plan` knows memory and time of {taken} "
            f"alone, which auto takes for this run on a {target.gpu_type}. Plan with --set "
            "model.attention_backend=auto"
        )
    if config.data.per_document_attention and taken == "sdpa":
        raise ConfigError(
            "data.per_document_attention = true: without Triton's kernel, attention has a mask for "
            "each text, which `pretrain plan` does not count. Plan with --set "
            "data.per_document_attention=false for a lower bound"
        )
    if config.head_dim > WIDEST_HEAD and target.is_modern and config.position.method in BIASED:
        raise ConfigError(
            f"model.hidden_size = {config.model.hidden_size}: heads of width {config.head_dim} are "
            f"served by {taken}, of which `pretrain plan` knows nothing on a {target.gpu_type}. "
            "Choose more heads, of a width up to 256"
        )


def make_plan(config: RunConfig, target: Target) -> Plan:
    """Return every layout of a run with memory and time.

    Args:
        config: The run.
        target: The GPUs and their network.

    Raises:
        ConfigError: The run cannot be planned, or no layout is legal.
    """
    check_target(config, target)
    refused = Refused()
    fits: list[Planned] = []
    too_large: list[Planned] = []
    stages: dict[str, list[Stage]] = {}
    for run, layout in candidates(config, target.gpus, refused):
        key = str(run.parallel)
        if key not in stages:
            stages[key] = stages_of(run, layout)
        each = planned(run, layout, stages[key], target)
        (fits if each.memory.total <= target.usable_bytes else too_large).append(each)
    if not fits and not too_large:
        reasons = "\n".join(refused.examples.values())
        raise ConfigError(f"--gpus {target.gpus}: no layout is legal, because\n{reasons}")
    fits.sort(key=_order)
    too_large.sort(key=lambda each: each.memory.total)
    return Plan(fits, too_large, refused)


def _order(each: Planned) -> tuple[float, int, int]:
    """Return what layouts are sorted by: time, then the least recomputation, then memory.

    Where the host sets the pace, what a GPU computes again costs no time in the model.
    """
    recompute = RECOMPUTE.index(each.config.train.recompute_granularity)
    return each.timing.milliseconds, recompute, each.memory.total


def planned(config: RunConfig, layout: Layout, stages: Sequence[Stage], target: Target) -> Planned:
    """Return the memory and the time of a run in one layout.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stages: Its pipeline stages, one of each kind.
        target: The GPUs and their network.
    """
    memories = [memory_of_rank(config, layout, stage, target.is_modern) for stage in stages]
    largest = max(memories, key=lambda memory: memory.total)
    timing = time_of_step(config, layout, stages, target)
    return Planned(config, layout, largest, timing)
