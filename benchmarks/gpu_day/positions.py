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
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_day.attention_correctness import backends
from benchmarks.gpu_day.results import Rows, markdown
from benchmarks.gpu_day.sizes import CUDA, run_config
from benchmarks.train_step import FrameworkStep
from pretrain import platform
from pretrain.model.attention import CoreAttention
from pretrain.topology import finish, initialize

PART = "positions"
TOKENS = 2**15
SECONDS = 240
"""About how long the rounds take together, on a GPU."""
WARM_UP_ROUNDS = 2


class Contestant(NamedTuple):
    """One way to take a step."""

    name: str
    step: FrameworkStep
    backend: str
    """A value of model.attention_backend."""
    context: Callable[[], Any]
    """Entered around the step; chooses among torch's own kernels."""

    def __call__(self, tokens: Tensor) -> float:
        """Take a step and return its milliseconds."""
        for chunk in self.step.chunks:
            for module in chunk.modules():
                if isinstance(module, CoreAttention):
                    module.backend = self.backend
        platform.synchronize()
        begin = time.perf_counter()
        with self.context():
            self.step(tokens)
        platform.synchronize()
        return 1e3 * (time.perf_counter() - begin)


def contestants() -> list[Contestant]:
    """Return who takes turns. Two models share the memory: one with ALiBi, one without a bias."""
    config = run_config(TOKENS)
    topology = initialize(config)
    alibi = FrameworkStep(config, topology)
    sinusoidal = FrameworkStep(run_config(TOKENS, "position.method=sinusoidal"), topology)
    none = contextlib.nullcontext
    found = [Contestant(f"ALiBi, {name}", alibi, name, none) for name in backends()]
    found.append(Contestant("sinusoidal, auto", sinusoidal, "auto", none))
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    for name, kernel in kernels.items():

        def only(kernel: SDPBackend = kernel) -> Any:
            return sdpa_kernel(kernel)

        found.append(Contestant(f"no bias, torch's {name}", sinusoidal, "sdpa", only))
    return found


def main() -> None:
    """Take rounds until the time is over; a row for each round, then one for each contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    # The log says which kernel "auto" takes.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = Rows(arguments.out, PART)
    running = contestants()
    config = running[0].step.config
    shape = (config.batch.global_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(0, config.data.vocab_size, shape)
    failures: dict[str, str] = {}
    deadline, number = time.monotonic() + (SECONDS if CUDA else 0), -WARM_UP_ROUNDS
    while time.monotonic() < deadline or number < 3:
        round_ms: dict[str, float] = {}
        for contestant in list(running):
            try:
                round_ms[contestant.name] = contestant(tokens)
            # A kernel that is not there must not end the comparison of the others.
            except (ValueError, RuntimeError, ImportError) as error:
                failures[contestant.name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                running.remove(contestant)
        if number >= 0:
            rows.add({"round": number, **round_ms})
        number += 1
    finish()
    (arguments.out / f"{PART}.md").write_text(markdown(summary(list(rows), failures)) + "\n")


def summary(rounds: list[dict[str, Any]], failures: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for each contestant: median, spread, and how much more than the best unbiased.

    Args:
        rounds: Milliseconds by contestant, of each round.
        failures: Why a contestant has no times.
    """
    names = [name for name in rounds[-1] if name != "round"]
    times = {name: [r[name] for r in rounds if name in r] for name in names}
    medians = {name: statistics.median(values) for name, values in times.items()}
    unbiased = [ms for name, ms in medians.items() if not name.startswith("ALiBi")]
    rows: list[dict[str, Any]] = []
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        row = {"contestant": name, "rounds": len(values), "ms": medians[name]}
        row |= {"first quartile": low, "third quartile": high}
        if unbiased:
            row["over the best without bias"] = f"{medians[name] / min(unbiased) - 1:+.2%}"
        rows.append(row)
    return rows + [{"contestant": name, "ms": why} for name, why in failures.items()]


if __name__ == "__main__":
    main()
