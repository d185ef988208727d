"""Time training steps of one size, through `pretrain bench train`, beside what the model predicts.

python -m benchmarks.gpu_day.training --out RESULTS --part NAME --tokens 16384
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu_day.results import Row, Rows
from benchmarks.gpu_day.sizes import device_name, run_config
from pretrain.bench.timing import bench_training
from pretrain.config import RunConfig
from pretrain.model import flops_per_token, model_flops_utilization, peak_tflops_per_second
from pretrain.plan.command import read_target
from pretrain.plan.memory import stages_of
from pretrain.plan.timing import GPU_TYPES, Timing, time_of_step

SECONDS = 60
"""About how long the steps that are timed take together, where the model knows the GPU."""


def predicted(config: RunConfig) -> Timing | None:
    """Return the time of a step on this GPU by pretrain.plan.timing, or None if it has none."""
    for name, device in GPU_TYPES.items():
        if device.name == device_name():
            layout, target = config.layout(1), read_target(1, name)
            return time_of_step(config, layout, stages_of(config, layout), target)
    return None


def main() -> None:
    """Time the steps and write one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", required=True)
    parser.add_argument("--tokens", type=int, required=True, help="Tokens a step.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    rows = Rows(arguments.out, arguments.part)
    config = run_config(arguments.tokens, *arguments.set)
    step = predicted(config)
    count = 3 if step is None else max(10, min(40, round(1e3 * SECONDS / step.milliseconds)))
    measured = bench_training(config, count)
    row: Row = {
        "settings": " ".join(arguments.set),
        "tokens": config.tokens_per_step,
        "micro batches": config.tokens_per_step
        // (config.batch.micro_batch_size * config.data.sequence_length),
        "steps": count,
        "precision": config.train.precision,
        **{f"{name}, ms": 1e3 * measured[name] for name in measured if name in PHASES},
        "tokens/s": measured["tokens_per_second"],
        "peak memory, GiB": measured["peak_memory_bytes"] / 2**30,
    }
    peak = peak_tflops_per_second(device_name())
    if peak is not None:
        for name, causal in (("MFU, all of attention", False), ("MFU, causal half", True)):
            flops = flops_per_token(config, config.data.sequence_length, causal=causal)
            mfu = model_flops_utilization(measured["tokens_per_second"], flops, peak)
            row[name] = f"{mfu:.1%}"
    if step is not None:
        row["predicted step, ms"] = step.milliseconds
        device = next(each for each in GPU_TYPES.values() if each.name == device_name())
        row["predicted MFU, causal half"] = f"{step.mfu(config, device, causal=True):.1%}"
    rows.add(row)


PHASES = ("data", "forward and backward", "gradient reduction", "optimizer step", "step")
"""Parts of a step that `bench_training` can report."""

if __name__ == "__main__":
    main()
