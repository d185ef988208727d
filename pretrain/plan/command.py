"""`pretrain plan`: find the fastest layout of a run on a number of GPUs, and write it down."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pretrain.config import (
    ConfigError,
    Layout,
    RunConfig,
    dump_config,
    load_config,
    num_parameters,
    parse_config,
    rules,
    writing,
)
from pretrain.config.errors import columns
from pretrain.config.load import merged
from pretrain.config.run import RunPhase
from pretrain.config.schema import PhaseSection
from pretrain.model import ALL_UP_TO, REACH, attention_share
from pretrain.plan.memory import (
    WIDEST_HEAD,
    Memory,
    Stage,
    attention_backend,
    check_counted,
    memory_of_rank,
    stages_of,
)
from pretrain.plan.timing import (
    GPU_TYPES,
    GPUS_PER_NODE,
    PARTS,
    Device,
    Inputs,
    Network,
    Target,
    Timing,
    time_of_step,
)
from pretrain.positions.base import by_layer

# ---- List the layouts in which a number of GPUs can share a run ----
# The rules of `pretrain.config` decide which of them are legal.


LARGEST_MICRO_BATCH = 64
"""In sequences. Far fewer already keep all multiprocessors of a GPU busy."""
RECOMPUTE = ("none", "selective", "full")


def candidates(
    config: RunConfig, gpus: int, refused: Counter[str]
) -> Iterator[tuple[RunConfig, Layout]]:
    """Yield the run in every legal layout for `gpus` GPUs.

    Tensor-parallel ranks stay in one node. Keys that are not enumerated keep the config's values.

    Args:
        config: The run.
        gpus: Number of GPUs.
        refused: Counts the illegal layouts by the rule that refuses them, which is identified by
            the first line of its message. Messages that differ only in numbers count as one.
    """
    examples: dict[str, str] = {}
    for keys in _parallel_keys(config, gpus):
        parallel = config.parallel.model_copy(update={**keys, "world_size": gpus})
        # If a copy of the model needs more ranks than there are, the rules below refuse the layout.
        data = max(1, gpus // parallel.ranks_per_copy)
        if keys["zero_stage"] > 1 and data * parallel.context_parallel_size == 1:
            # There is nothing to shard, and every stage is stage 1.
            continue
        own = config.batch.micro_batch_size
        share, rest = divmod(config.batch.global_batch_size, data)
        sizes = [n for n in sorted({*range(1, LARGEST_MICRO_BATCH + 1), own}) if share % n == 0]
        # If no size fits, the config's size is checked, so that the rules give the reason.
        for size in sizes if not rest and share else [own]:
            batch = config.batch.model_copy(update={"micro_batch_size": size})
            for recompute in RECOMPUTE:
                train = config.train.model_copy(update={"recompute_granularity": recompute})
                changed = {"parallel": parallel, "batch": batch, "train": train}
                run = config.model_copy(update=changed)
                try:
                    rules.check(run)
                    yield run, run.layout(gpus)
                except ConfigError as error:
                    line = str(error).splitlines()[0]
                    refused[examples.setdefault(re.sub(r"\d[\d,.]*", "N", line), line)] += 1


def _parallel_keys(config: RunConfig, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield every combination of sizes, legal or not."""
    # Each node holds complete groups of tensor-parallel ranks.
    for tensor in _divisors(min(gpus, GPUS_PER_NODE)):
        for pipeline in _divisors(gpus // tensor):
            most = config.model.num_layers // pipeline
            for virtual in [None, *range(2, most + 1)] if pipeline > 1 else [None]:
                for sequence in (False, True) if tensor > 1 else (False,):
                    for zero in (1, 2, 3):
                        yield {
                            "tensor_model_parallel_size": tensor,
                            "pipeline_model_parallel_size": pipeline,
                            "virtual_pipeline_model_parallel_size": virtual,
                            "sequence_parallel": sequence,
                            "zero_stage": zero,
                        }


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


# ---- Find the fastest layout that fits ----


@dataclass(frozen=True)
class Planned:
    """A run in one layout, with its memory and its time."""

    config: RunConfig
    layout: Layout
    memory: Memory
    """The memory of the rank that needs most."""
    timing: Timing
    tokens: int
    """The tokens that it trains on."""

    @property
    def memory_is_bound(self) -> bool:
        """True if the planned memory is an upper bound, and the run may need less.

        With ZeRO 2 and 3, all buffers are counted at full size and at the same time. With slopes,
        which need few keys of other context ranks, all keys are counted.
        """
        has_reach = self.layout.context > 1 and self.config.position.bias == "slopes"
        return has_reach or self.layout.zero_stage > 1

    @property
    def name(self) -> str:
        """The layout in short, such as "TP 2 PP 4 VPP 2 SP DP 16 ZeRO 1"."""
        p = self.config.parallel
        words = [f"TP {p.tensor_model_parallel_size} PP {p.pipeline_model_parallel_size}"]
        if p.virtual_pipeline_model_parallel_size:
            words.append(f"VPP {p.virtual_pipeline_model_parallel_size}")
        if p.context_parallel_size > 1:
            words.append(f"CP {p.context_parallel_size}")
        if p.sequence_parallel:
            words.append("SP")
        return " ".join([*words, f"DP {self.layout.data} ZeRO {p.zero_stage}"])

    def hours(self) -> float:
        """Return the GPU-hours of the run's tokens at the speed of full batches."""
        return self.tokens / self.timing.tokens_per_second * self.timing.gpus / 3600


@dataclass(frozen=True)
class Plan:
    """All layouts of a run."""

    fits: list[Planned]
    """The layouts that fit into memory, the fastest first."""
    too_large: list[Planned]
    """The layouts that do not fit, the nearest miss first."""
    refused: Counter[str]
    """The number of combinations that are not legal, by rule."""

    def best_of_layouts(self) -> list[Planned]:
        """Return the fastest micro batch and recomputation of each layout, the fastest first."""
        best: dict[str, Planned] = {}
        for each in self.fits:
            best.setdefault(each.name, each)
        return list(best.values())


def check_target(config: RunConfig, target: Target) -> None:
    """Refuse runs that the plan's arithmetic does not cover, or that the GPUs cannot execute.

    Args:
        config: The run.
        target: The GPUs.

    Raises:
        ConfigError: The run is refused; the message names the key and the remedy.
    """
    gpu, is_modern, precision = target.device.name, target.device.is_modern, config.train.precision
    wanted, of_layers = config.model.attention_backend, by_layer(config)
    taken = {attention_backend(each, is_modern) for each in of_layers}
    if target.gpus > GPUS_PER_NODE and target.gpus % GPUS_PER_NODE:
        raise ConfigError(f"--gpus {target.gpus}: choose a multiple of a node's {GPUS_PER_NODE}")
    if config.is_masked:
        raise ConfigError(
            'train.objective = "masked": attention looks both ways, and `pretrain plan` counts '
            "that of a causal mask. Plan with --set train.objective=next_token for a lower bound"
        )
    check_counted(config)
    if precision != "fp16" and not (is_modern and precision == "bf16"):
        raise ConfigError(
            f"train.precision = {precision}: the speeds of `pretrain plan` on {gpu} are those of "
            f"16-bit products. Plan with --set train.precision={'bf16' if is_modern else 'fp16'}"
        )
    if config.train.fp8 and "H100" not in gpu and "H200" not in gpu:
        raise ConfigError(f"train.fp8 = true: {gpu} has no 8-bit products. Leave it out")
    masks = config.data.per_document_attention and "sdpa" in taken
    is_biased = any(each.position.bias not in ("none", "scores") for each in of_layers)
    is_wide = is_modern and config.head_dim > WIDEST_HEAD and is_biased
    if (wanted != "auto" and taken != {wanted}) or masks or is_wide:
        raise ConfigError(
            f"model.attention_backend = {wanted}: `pretrain plan` does not know memory and time of "
            f"this attention on {gpu}. Plan with model.attention_backend=auto, heads of a width "
            f"up to {WIDEST_HEAD}, and without data.per_document_attention where there is no Triton"
        )


def make_plan(config: RunConfig, target: Target, tokens: int | None = None) -> Plan:
    """Return every layout of a run with its memory and time.

    Args:
        config: The run.
        target: The GPUs and their network.
        tokens: The tokens that it trains on; None for those of its steps.

    Raises:
        ConfigError: The run cannot be planned, or no layout is legal.
    """
    check_target(config, target)
    refused: Counter[str] = Counter()
    fits: list[Planned] = []
    too_large: list[Planned] = []
    stages: dict[str, list[Stage]] = {}
    for run, layout in candidates(config, target.gpus, refused):
        key = str(run.parallel)
        if key not in stages:
            stages[key] = stages_of(run, layout)
        each = planned(run, layout, stages[key], target, tokens)
        (fits if each.memory.total <= target.usable_bytes else too_large).append(each)
    if not fits and not too_large:
        reasons = "\n".join(refused)
        raise ConfigError(f"--gpus {target.gpus}: no layout is legal, because\n{reasons}")
    fits.sort(key=_order)
    too_large.sort(key=lambda each: each.memory.total)
    return Plan(fits, too_large, refused)


def _order(each: Planned) -> tuple[float, int, int]:
    """Return the sort key of a layout: time, then the least recomputation, then memory.

    If the host limits the speed, recomputation on the GPU costs no time in this arithmetic.
    """
    recompute = RECOMPUTE.index(each.config.train.recompute_granularity)
    return each.timing.milliseconds, recompute, each.memory.total


def planned(
    config: RunConfig,
    layout: Layout,
    stages: Sequence[Stage],
    target: Target,
    tokens: int | None = None,
) -> Planned:
    """Return the memory and the time of a run in one layout.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stages: Its pipeline stages, one of each kind.
        target: The GPUs and their network.
        tokens: The tokens that it trains on; None for those of its steps.
    """
    is_modern = target.device.is_modern
    memories = [memory_of_rank(config, layout, stage, is_modern) for stage in stages]
    largest = max(memories, key=lambda memory: memory.total)
    timing, tokens = time_of_step(config, layout, stages, target), tokens or config.planned_tokens
    return Planned(config, layout, largest, timing, tokens)


# ---- Options of the command line ----


def read_target(gpus: int, gpu_type: str, network: float | None = None) -> Target:
    """Return the GPUs and links for which a run is planned, from options of the command line.

    Args:
        gpus: Number of GPUs.
        gpu_type: One of GPU_TYPES.
        network: Gbit/s of all links of a node together, in one direction; None for the usual value
            of nodes with such GPUs.

    Raises:
        ConfigError: The type is not known.
    """
    device = GPU_TYPES.get(gpu_type.lower())
    if device is None:
        raise ConfigError(f"--gpu-type {gpu_type}: not known. Choose one of {', '.join(GPU_TYPES)}")
    return Target(gpus, device, Network(network or device.network_gbit))


# ---- Show a plan, and write its best layout ----


ROWS = 10
"""The number of layouts in the table."""


def plan_run(
    source: Path, overrides: Sequence[str], target: Target, out: Path | None = None
) -> str:
    """Return the text of a run's plan, and write a config with the best layout if asked to.

    Args:
        source: The config file.
        overrides: As in `load_config`.
        target: The GPUs and links for which the run is planned.
        out: The file for a config of the run in the best layout, or None.

    Raises:
        ConfigError: The run cannot be planned, or no layout fits that could be written.
    """
    config = load_config(source, overrides)
    # Checked before the work of planning.
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"--out {out}: exists, and is not replaced. Choose another name")
    parts = config.parts
    plans = [make_plan(phase.alone, target, phase.tokens) for phase in parts]
    tables = [to_table(phase, target, plan) for phase, plan in zip(parts, plans)]
    if config.phases:
        tables = [f"{phase}\n{table}" for phase, table in zip(parts, tables)]
    common = _common_layouts(plans)
    text = "\n\n".join([*tables, *(_phases(common) if config.phases else ())])
    if out is None:
        return text
    if not common:
        raise ConfigError(
            f"--out {out}: no layout fits into {target.usable_bytes / 1e9:.1f} GB. Plan for "
            "more GPUs, or for larger ones"
        )
    best = common[0]
    found = best[0].config
    if config.phases:
        phases = tuple(_in_layout(phase, each.config) for phase, each in zip(config.phases, best))
        # Phases with a batch size of their own do not use the size of the whole run, which must be
        # possible all the same.
        per_rank = config.batch.global_batch_size // best[0].layout.data
        micro = math.gcd(per_rank, found.batch.micro_batch_size)
        batch = config.batch.model_copy(update={"micro_batch_size": micro})
        changed = {"parallel": found.parallel, "batch": batch, "phases": phases}
        found = config.model_copy(update=changed)
    written = dump_config(found)
    parse_config(tomllib.loads(written), f"--out {out}")
    with writing(out), out.open("x") as file:
        file.write(f"# {source} in the layout of `pretrain plan`: {best[0].name}.\n")
        file.write(written)
    return f"{text}\n\n{out}: {source} as {best[0].name}"


def _common_layouts(plans: Sequence[Plan]) -> list[list[Planned]]:
    """Return the layouts that fit in every phase, each with its plan by phase; cheapest first.

    A run has one layout, but each phase has its own best micro-batch size and recomputation.
    """
    by_phase = [{each.name: each for each in plan.best_of_layouts()} for plan in plans]
    names = [name for name in by_phase[0] if all(name in found for found in by_phase)]
    layouts = [[found[name] for found in by_phase] for name in names]
    return sorted(layouts, key=lambda layout: sum(each.hours() for each in layout))


def _in_layout(phase: PhaseSection, config: RunConfig) -> PhaseSection:
    """Return a phase with its planned micro-batch size and recomputation."""
    own = {
        "batch": {"micro_batch_size": config.batch.micro_batch_size},
        "train": {"recompute_granularity": config.train.recompute_granularity},
    }
    return PhaseSection.model_validate(merged(phase.model_dump(exclude_none=True), own))


def _phases(common: Sequence[Sequence[Planned]]) -> Iterator[str]:
    """Yield the table of the whole run's cost in the layouts that fit in every phase."""
    if not common:
        yield "No layout fits in every phase"
        return
    rows = [["all phases", "GPU-hours", "of each phase"]]
    for layout in common[:ROWS]:
        hours = [each.hours() for each in layout]
        each = ", ".join(f"{hour:,.1f}" for hour in hours)
        rows.append([layout[0].name, f"{sum(hours):,.1f}", each])
    yield "\n".join(columns(rows, right=[1]))


def to_table(phase: RunPhase, target: Target, plan: Plan) -> str:
    """Return the text that `pretrain plan` prints of a run, or of one of its phases.

    Args:
        phase: The run or phase as configured.
        target: The GPUs and their network.
        plan: Its layouts.
    """
    config = phase.alone
    return "\n".join(
        [
            f"{num_parameters(config):,} parameters, {config.position.method}, "
            f"L = {config.data.sequence_length}, {config.train.precision}"
            f"{' with 8-bit products' * config.train.fp8}; "
            f"{config.tokens_per_step:,} tokens a step, {config.train.num_steps:,} steps, "
            f"{phase.tokens:,} tokens",
            f"{target.gpus} x {target.device.name}, {target.usable_bytes / 1e9:.1f} GB of each "
            f"usable; links of a node: {target.network.gbit_per_second:g} Gbit/s",
            *_layouts(target, plan),
            *_own(config, target, plan),
            *_assumptions(config),
        ]
    )


def _row(each: Planned, target: Target) -> dict[str, str]:
    """Return a layout's row of the table, by column."""
    timing = each.timing
    mfu = [timing.mfu(each.config, target.device, causal) for causal in (False, True)]
    return {
        "layout": each.name,
        "recompute": each.config.train.recompute_granularity,
        "micro": str(each.config.batch.micro_batch_size),
        "GB": f"{'<=' * each.memory_is_bound}{each.memory.total / 1e9:.1f}",
        "step ms": f"{timing.milliseconds:.0f}",
        **{part: f"{timing.part(part):.0f}" for part in PARTS},
        "tokens/s": f"{timing.tokens_per_second:,.0f}",
        "MFU all": f"{mfu[0]:.1%}",
        "causal": f"{mfu[1]:.1%}",
        "GPU-hours": f"{each.hours():,.1f}",
    }


def _layouts(target: Target, plan: Plan) -> Iterator[str]:
    """Yield the table of the best layouts, and the numbers of all others."""
    best = plan.best_of_layouts()
    if not best:
        yield "\nNo layout fits. The nearest miss:"
    rows = [_row(each, target) for each in (best or plan.too_large[:1])[:ROWS]]
    cells = [[*rows[0]], *([*row.values()] for row in rows)]
    yield from ("", *columns(cells, right=range(2, len(cells[0]))))
    yield (
        f"\n{len(plan.fits):,} combinations fit in {len(best):,} layouts, "
        f"{len(plan.too_large):,} do not fit, {plan.refused.total():,} are not legal"
    )
    for reason, count in plan.refused.most_common():
        yield f"{count:>7,}  not legal: {reason}"


def _own(config: RunConfig, target: Target, plan: Plan) -> Iterator[str]:
    """Yield the memory by part, and the time, of the best layout and of the configured one."""
    parallel = config.parallel.model_copy(update={"world_size": target.gpus})
    wanted = config.model_copy(update={"parallel": parallel})
    own = [each for each in (*plan.fits, *plan.too_large) if each.config == wanted]
    named = list(zip(["best", "as configured"][not plan.fits :], [*plan.fits[:1], *own]))
    parts = [field.name for field in fields(Memory)] + ["total"]
    rows = [
        [name + ", at most" * each.memory_is_bound]
        + [f"{getattr(each.memory, part) / 1e9:.2f}" for part in parts]
        for name, each in named
    ]
    header = ["GB of the fullest rank", *parts]
    yield from ("", *columns([header, *rows], right=range(1, len(header))))
    for name, each in named:
        yield from _interval(name, each, target)


def _interval(name: str, each: Planned, target: Target) -> Iterator[str]:
    """Yield the time of a step, and how much it changes with the speeds on which it depends."""
    stages = stages_of(each.config, each.layout)

    def step(inputs: Inputs) -> list[str]:
        timing = time_of_step(each.config, each.layout, stages, target.moved(inputs))
        mfu = timing.mfu(each.config, target.device, causal=False)
        return [f"{timing.milliseconds:,.0f}", f"{mfu:.1%}"]

    def row(title: str, names: Sequence[str]) -> list[str]:
        ends = [Inputs(**{n: getattr(end, n) for n in names}) for end in target.device.ends]
        return [title, *(text for end in ends for text in step(end))]

    planned = _row(each, target)
    yield (
        f"\n{name.capitalize()} ({each.name}, micro batches of {planned['micro']}): a step takes "
        f"{planned['step ms']} ms, MFU {planned['MFU all']}, {planned['GPU-hours']} GPU-hours"
        f"{'. Does not fit' * (each.memory.total > target.usable_bytes)}"
    )
    alone = [row(n.replace("_", " "), [n]) for n in Inputs._fields]
    together = row("all of them together", Inputs._fields)
    header = ["if these are slow, or fast", "ms, slow", "MFU", "ms, fast", "MFU"]
    yield from columns([header, together, *alone], right=range(1, 5))


def _assumptions(config: RunConfig) -> Iterator[str]:
    """Yield the assumptions of the plan."""
    yield (
        "\nNot counted: waits for the slowest rank, other jobs on the network, data, evaluations, "
        f"checkpoints, the lower speed of a ramp-up's smaller batches.\n  {Device.__module__} has "
        "the origin of every speed, docs/performance.md what they miss of published steps"
    )
    if config.position.head_slopes(config) is not None:
        yield (
            f"  each head sees back as far as {REACH:g} / slope tokens, and {ALL_UP_TO:,} tokens "
            f"at least: {attention_share(config):.0%} of the causal half, which is what MFU counts "
            "of attention"
        )
