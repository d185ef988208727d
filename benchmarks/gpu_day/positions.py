"""Time steps with ALiBi beside steps without any bias, taking turns in one process.

    python -m benchmarks.gpu_day.positions --out RESULTS

The question is what ALiBi costs over the best kernel that needs no bias. All models have the same
weights and sizes; they differ in the position method and in the kernel. Each round takes one step
of each, in turn, so that whatever else the machine does affects all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_day.attention_correctness import backends
from benchmarks.gpu_day.results import Rows, markdown
from benchmarks.gpu_day.sizes import CUDA, run_config
from benchmarks.turns import Way, rounds, summary, timed
from pretrain.bench.timing import TrainingStep
from pretrain.config import RunConfig
from pretrain.model.attention import CoreAttention
from pretrain.topology import finish, initialize

PART = "positions"
TOKENS = 2**15
SECONDS = 240
"""About how long the rounds take together, on a GPU."""
WARM_UP_ROUNDS = 2


def ways(config: RunConfig, tokens: Tensor) -> dict[str, Way]:
    """Return who takes turns. Two models share the memory: one with ALiBi, one without a bias."""
    topology = initialize(config)
    alibi = TrainingStep(config, topology)
    sinusoidal = TrainingStep(run_config(TOKENS, "position.method=sinusoidal"), topology)

    def way(step: TrainingStep, backend: str, kernel: SDPBackend | None = None) -> Way:
        """Return steps with one model.attention_backend, and with one of torch's own kernels."""

        def take() -> None:
            for chunk in step.chunks:
                for module in chunk.modules():
                    if isinstance(module, CoreAttention):
                        module.backend = backend
            with contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel):
                step.take(tokens)

        return timed(take)

    return {
        **{f"ALiBi, {name}": way(alibi, name) for name in backends()},
        "sinusoidal, auto": way(sinusoidal, "auto"),
        "no bias, torch's flash": way(sinusoidal, "sdpa", SDPBackend.FLASH_ATTENTION),
        "no bias, torch's cuDNN": way(sinusoidal, "sdpa", SDPBackend.CUDNN_ATTENTION),
    }


def main() -> None:
    """Take rounds until the time is over; a row for each round, then one for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    # The log says which kernel "auto" takes.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows, config = Rows(arguments.out, PART), run_config(TOKENS)
    shape = (config.batch.global_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(0, config.data.vocab_size, shape)
    found = []
    for each in rounds(ways(config, tokens), 1000, WARM_UP_ROUNDS, SECONDS if CUDA else 0):
        found.append(each)
        rows.add({"round": len(found), **each})
    finish()
    (arguments.out / f"{PART}.md").write_text(markdown(with_cost(summary(found))) + "\n")


def with_cost(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of `summary` with how much more each takes than the best without a bias."""
    unbiased = [
        row["ms"]
        for row in found
        if isinstance(row["ms"], float) and not row["way"].startswith("ALiBi")
    ]
    return [
        {**row, "over the best without bias": f"{row['ms'] / min(unbiased) - 1:+.2%}"}
        if unbiased and isinstance(row["ms"], float)
        else row
        for row in found
    ]


if __name__ == "__main__":
    main()
