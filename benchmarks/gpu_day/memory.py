"""Measure the peak of memory by the size of a micro batch, with and without recomputation.

python -m benchmarks.gpu_day.memory --out RESULTS --recompute none
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.gpu_day.results import Rows
from benchmarks.gpu_day.sizes import CUDA, run_config
from benchmarks.turns import timed
from pretrain import platform
from pretrain.bench.timing import TrainingStep
from pretrain.config import num_parameters
from pretrain.topology import finish, initialize

PART = "memory"
SEQUENCES = (1, 2, 4, 8, 16, 32, 64) if CUDA else (1, 2)
MICRO_BATCHES = 2
"""In a step: with the second one, gradients are there while activations are at their largest."""


def main() -> None:
    """Write a row for each size of a micro batch, until the memory is used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recompute", choices=("none", "full"), required=True)
    arguments = parser.parse_args()
    rows = Rows(arguments.out, f"{PART}-{arguments.recompute}")
    config = run_config(2**14, f"train.recompute_granularity={arguments.recompute}")
    topology = initialize(config)
    step = TrainingStep(config, topology)
    length = config.data.sequence_length
    for sequences in SEQUENCES:
        if rows.has(sequences=sequences):
            continue
        size = MICRO_BATCHES * sequences
        # The schedule takes the sizes of the batches as they come.
        step.config = run_config(size * length if CUDA else 0, sequences=sequences)
        row = {"sequences": sequences, "recompute": arguments.recompute}
        try:
            rows.add({**row, **_measure(step, size, length)})
        except torch.OutOfMemoryError:
            rows.add({**row, "step, ms": "out of memory"})
            break
    finish()


def _measure(step: TrainingStep, sequences: int, length: int) -> dict[str, float]:
    """Take a step that allocates and one that is timed.

    Args:
        step: What takes the steps.
        sequences: Sequences in a step.
        length: Tokens of a sequence.

    Returns:
        Time and memory. On a CPU the memory is the peak of the process since it started.
    """
    tokens = torch.randint(0, step.config.data.vocab_size, (sequences, length + 1))
    step.take(tokens)
    gib = 2**30
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    milliseconds = 1e3 * timed(lambda: step.take(tokens))()
    peak = platform.peak_memory_bytes()
    kept = torch.cuda.memory_allocated() if CUDA else 0
    return {
        "tokens a micro batch": sequences * length // MICRO_BATCHES,
        "step, ms": milliseconds,
        "peak, GiB": peak / gib,
        "between steps, GiB": kept / gib,
        "reserved, GiB": (torch.cuda.memory_reserved() if CUDA else 0) / gib,
        "bytes per parameter between steps": kept / num_parameters(step.config),
    }


if __name__ == "__main__":
    main()
