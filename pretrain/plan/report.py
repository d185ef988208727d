"""Show what a step costs: as a table for people, and as JSON for other programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pretrain.config import Layout, RunConfig, num_parameters
from pretrain.plan.costs import Collective, Kernels, Phase, StepCounts
from pretrain.plan.operators import OpClass

PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN_PASSES)
"""The phases that are repeated for every micro batch."""

MODELLED = (
    "Operators, their tensors, collectives and synchronisations are counted from the code that "
    "trains, run on tensors without data.",
    "An operator of torch is taken to launch one CUDA kernel, the backward pass of a layer norm "
    "two, and an operator on lists of tensors as many as ATen's MultiTensorApply needs.",
    "Bytes are those of the tensors that a kernel reads and writes, each once. For attention they "
    "are q, k, v, the output and their gradients, however often a kernel reads a tile.",
    "Attention is what model.attention_backend = auto chooses on a GPU of compute capability 9.0, "
    "and fusions are those of train.fusion = auto there.",
    "A region under torch.compile is one kernel, which reads the region's inputs and writes its "
    "results; its backward pass has one more for the gradient of a bias.",
    "A collective is exposed if no kernel is launched between its start and the wait for it, those "
    "of the gradient reduction itself apart. How long it takes is not counted.",
    "Copies between host and device are not counted as kernels.",
)
"""What a number in the tables stands for, and what it is not."""


def to_json(config: RunConfig, layout: Layout, counts: dict[int, StepCounts]) -> dict[str, Any]:
    """Return everything that was counted, as JSON values.

    Args:
        config: The run.
        layout: How its processes share it.
        counts: The counts by pipeline stage.
    """
    return {
        "parameters": num_parameters(config),
        "precision": config.train.precision,
        "zero_stage": config.parallel.zero_stage,
        "sequence_length": config.data.sequence_length,
        "micro_batch_size": config.batch.micro_batch_size,
        "tokens_per_step": config.tokens_per_step,
        "layout": {
            name: getattr(layout, name)
            for name in ("world_size", "tensor", "pipeline", "virtual", "data", "num_microbatches")
        },
        "modelled": list(MODELLED),
        "stages": [_stage_json(stage, each) for stage, each in counts.items()],
    }


def _stage_json(stage: int, counts: StepCounts) -> dict[str, Any]:
    """Return the counts of one pipeline stage as JSON values."""
    return {
        "pipeline_stage": stage,
        "kernels": [
            {
                "phase": phase.value,
                "class": kind.value,
                "operator": name,
                "launches": cost.launches,
                "bytes_read": cost.bytes_read,
                "bytes_written": cost.bytes_written,
            }
            for (phase, kind, name), cost in sorted(counts.kernels.items())
        ],
        "collectives": [
            {
                "phase": each.phase.value,
                "name": each.name,
                "group": each.group,
                "group_size": each.group_size,
                "dtype": each.dtype,
                "bytes": each.num_bytes,
                "wire_bytes": each.wire_bytes,
                "asynchronous": each.asynchronous,
                "awaited_in": each.awaited_in,
                "hidden_behind": each.hidden_behind and asdict(each.hidden_behind),
                "exposed": each.is_exposed,
            }
            for each in counts.collectives
        ],
        "synchronisations": [
            {"phase": phase.value, "cause": cause, "times": times}
            for (phase, cause), times in sorted(counts.synchronisations.items())
        ],
    }


def to_table(config: RunConfig, layout: Layout, counts: dict[int, StepCounts]) -> str:
    """Return the lines that the command prints.

    Args:
        config: The run.
        layout: How its processes share it.
        counts: The counts by pipeline stage.
    """
    lines = [
        f"{num_parameters(config):,} parameters, {config.position.method}, "
        f"L = {config.data.sequence_length}, {config.train.precision}, "
        f"ZeRO {config.parallel.zero_stage}",
        f"{layout.world_size} ranks: tensor {layout.tensor} x pipeline {layout.pipeline} x data "
        f"{layout.data}; {config.tokens_per_step:,} tokens a step, of which a rank passes "
        f"{layout.num_microbatches} micro batches of {config.batch.micro_batch_size} sequences",
    ]
    for stage, each in counts.items():
        lines += ["", f"One rank of pipeline stage {stage}, one step", *_kernel_lines(each)]
        lines += _micro_batch_lines(each, layout.num_microbatches)
        lines += ["", *_collective_lines(each.collectives), "", *_synchronisation_lines(each)]
    return "\n".join([*lines, "", *MODELLED])


def _kernel_lines(counts: StepCounts) -> list[str]:
    """Return the table of kernels by phase and class, with a sum for each phase and for all."""
    lines = [f"{'phase':<20}{'class':<13}{'launches':>9}{'read':>12}{'written':>12}"]
    for phase in Phase:
        if not (total := counts.total(phase)).launches:
            continue
        lines.append(_kernel_line(phase, "all", total))
        for kind in OpClass:
            if (cost := counts.total(phase, kind)).launches:
                lines.append(_kernel_line("", kind, cost))
    return [*lines, _kernel_line("step", "all", counts.total())]


def _kernel_line(phase: str, kind: str, cost: Kernels) -> str:
    """Return one row of the table of kernels."""
    read, written = _size(cost.bytes_read), _size(cost.bytes_written)
    return f"{phase:<20}{kind:<13}{cost.launches:>9,}{read:>12}{written:>12}"


def _micro_batch_lines(counts: StepCounts, num_microbatches: int) -> list[str]:
    """Return the mean cost of a micro batch."""
    launches = sum(counts.total(phase).launches for phase in PASSES) / num_microbatches
    moved = sum(counts.total(phase).bytes_moved for phase in PASSES) / num_microbatches
    return [f"a micro batch: {launches:,.0f} launches, {_size(moved)} read and written"]


def _collective_lines(collectives: Iterable[Collective]) -> list[str]:
    """Return the table of collectives, with a row for all of a kind."""
    rows: dict[tuple[str, ...], list[Collective]] = {}
    for each in collectives:
        group = f"{each.group} ({each.group_size})"
        rows.setdefault((each.phase, each.name, group, each.dtype), []).append(each)
    lines = [
        f"{'phase':<20}{'collective':<21}{'group':<15}{'dtype':<10}"
        f"{'calls':>6}{'bytes':>12}{'sent':>12}{'exposed':>9}"
    ]
    for (phase, name, group, dtype), calls in rows.items():
        size, sent = (
            _size(sum(each.num_bytes for each in calls)),
            _size(sum(each.wire_bytes for each in calls)),
        )
        exposed = sum(each.is_exposed for each in calls)
        lines.append(
            f"{phase:<20}{name:<21}{group:<15}{dtype:<10}"
            f"{len(calls):>6}{size:>12}{sent:>12}{exposed:>9}"
        )
    return lines if rows else ["no collectives"]


def _synchronisation_lines(counts: StepCounts) -> list[str]:
    """Return how often the host waits for the device, and why."""
    total = sum(counts.synchronisations.values())
    causes = [
        f"{phase}: {times} x {cause}"
        for (phase, cause), times in sorted(counts.synchronisations.items())
    ]
    return [f"the host waits for the device {total} times", *(f"  {cause}" for cause in causes)]


def _size(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:,.0f} B"
