"""Divide a training step's time by class of kernel, beside what the model predicts of each class.

    python -m benchmarks.gpu_day.step_split --out RESULTS --part NAME --tokens 16384

The classes are the lines of the plan's model of a step as far as a kernel's name tells them apart:
reads and writes of the layers, of the loss and of gradients all stand under "bytes moved". The
table of torch.profiler, with every kernel, is written to RESULTS/NAME.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu_day.results import Rows
from benchmarks.gpu_day.sizes import CUDA, run_config
from benchmarks.gpu_day.training import predicted
from benchmarks.turns import timed
from pretrain import platform
from pretrain.bench.timing import TrainingStep
from pretrain.plan.timing import Timing
from pretrain.topology import finish, initialize

WARM_UP_STEPS, STEPS = 3, 2
CLASSES = {
    "communication": r"nccl|all_?reduce|all_?gather|reduce_?scatter|c10d",
    # Before matrix products: attention kernels carry "gemm" or "cutlass" in their names, too.
    "attention": r"flash|fmha|attention|attn|sdp|mha"
    # Our own (kernels/flash).
    r"|^(forward|dkdv|dq|delta|row_gradient|norms)_kernel|^find_visit",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|::mm|addmm|::bmm|splitk|s884|s16816",
    "optimizer": r"adam|multi_tensor|foreach",
    "copies by the copy engine": r"^memcpy|^memset",
}
"""Patterns of kernel names, in the order in which they are tried. All else moves bytes."""
OTHER = "bytes moved"
LINES = {
    "matrix products": ("matrix products",),
    "attention": ("attention",),
    OTHER: ("elementwise in layers", "cross-entropy", "gradient accumulation"),
    "optimizer": ("optimizer",),
    "no kernel at all": (
        "gaps between kernels",
        "waiting for the host",
        "optimizer, waiting for the host",
    ),
}
"""Lines of the model that a class of kernels stands for."""


def classify(kernel: str) -> str:
    """Return the class of a kernel, by its name."""
    for name, pattern in CLASSES.items():
        if re.search(pattern, kernel, flags=re.IGNORECASE):
            return name
    return OTHER


def kernels(events: Any) -> list[tuple[str, float]]:
    """Return (name, microseconds) of everything that the device did.

    Ranges that code marks for the profiler appear on the device's time line, too, and would count
    their kernels twice: torch's optimizers mark their steps (torch/optim/optimizer.py,
    `profile_hook_step`), torch.distributed its collectives.
    """
    if not CUDA:
        return [(e.name, e.self_cpu_time_total) for e in events if e.name.startswith("aten::")]
    return [
        (e.name, e.time_range.elapsed_us())
        for e in events
        if e.device_type.name == "CUDA"
        and not getattr(e, "is_user_annotation", False)
        and not e.name.startswith(("Optimizer.", "ProfilerStep", "nccl:", "## Call"))
    ]


def main() -> None:
    """Profile a few steps; write a row for each class and the table of all kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", required=True)
    parser.add_argument("--tokens", type=int, required=True, help="Tokens a step.")
    arguments = parser.parse_args()
    rows = Rows(arguments.out, arguments.part)
    config = run_config(arguments.tokens)
    step = TrainingStep(config, initialize(config))
    for _ in range(WARM_UP_STEPS):
        step.take()
    # The step's own time is taken without the profiler, which slows the host down.
    step_ms = 1e3 * statistics.mean(timed(step.take)() for _ in range(STEPS))
    # Operations of the host are left out on a GPU: they are many, and slow the host down.
    activity = ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(STEPS):
            step.take()
        platform.synchronize()
    for row in split(kernels(profiler.events()), step_ms):
        rows.add(_with_prediction(row, predicted(config)))
    finish()
    key = "self_cuda_time_total" if CUDA else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=100)
    (arguments.out / f"{arguments.part}.md").write_text(f"```\n{table}\n```\n")


def split(found: list[tuple[str, float]], step_ms: float) -> list[dict[str, Any]]:
    """Return a row for each class of kernels, with milliseconds and launches of one step.

    Args:
        found: (name, microseconds) of every kernel of STEPS steps.
        step_ms: Time of a step without the profiler.
    """
    microseconds: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for name, time_us in found:
        microseconds[classify(name)] += time_us
        launches[classify(name)] += 1
    rows: list[dict[str, Any]] = [
        {"class": name, "ms": us / 1e3 / STEPS, "launches": launches[name] / STEPS}
        for name, us in sorted(microseconds.items(), key=lambda item: -item[1])
    ]
    # Kernels of several streams run at the same time, so this can be negative.
    idle = step_ms - sum(row["ms"] for row in rows)
    rows.append({"class": "no kernel at all", "ms": idle, "launches": 0})
    total = sum(launches.values()) / STEPS
    return [*rows, {"class": "step", "ms": step_ms, "launches": total}]


def _with_prediction(row: dict[str, Any], step: Timing | None) -> dict[str, Any]:
    """Return the row with the model's time for its class, where the model knows the GPU."""
    if step is None:
        return row
    if row["class"] == "step":
        return {**row, "predicted, ms": step.milliseconds}
    names = LINES.get(row["class"], ())
    return {**row, "predicted, ms": sum(step.lines.get(name, 0.0) for name in names)}


if __name__ == "__main__":
    main()
