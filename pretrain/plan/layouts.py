"""List the layouts in which a number of GPUs can share a run, and the reasons against the others.

Which layouts are legal is decided by the rules of `pretrain.config`, not here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pretrain.config import ConfigError, Layout, RunConfig, rules
from pretrain.plan.hardware import GPUS_PER_NODE

LARGEST_MICRO_BATCH = 64
"""Sequences. A GPU's multiprocessors are busy long before."""
RECOMPUTE = ("none", "selective", "full")
ZERO_STAGES = (1, 2, 3)


@dataclass
class Refused:
    """Combinations that the config's rules refuse."""

    counts: Counter[str] = field(default_factory=Counter)
    """By reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each reason, in full."""

    def add(self, message: str) -> None:
        """Count a message of the rules under its first line, without the numbers in it."""
        line = message.splitlines()[0]
        key, _, rest = line.partition(" = ")
        reason = re.sub(r"\d[\d,.]*", "N", rest.partition(": ")[2].partition(". ")[0])
        name = f"{key}: {reason}" if reason else line
        self.counts[name] += 1
        self.examples.setdefault(name, line)


def candidates(
    config: RunConfig, gpus: int, refused: Refused
) -> Iterator[tuple[RunConfig, Layout]]:
    """Yield the run in every layout that `gpus` GPUs can share it in.

    Tensor-parallel ranks stay in one node. What is not enumerated is taken from the config.

    Args:
        config: The run.
        gpus: Number of GPUs.
        refused: Takes what the rules refuse.
    """
    for keys in _parallel_keys(config, gpus):
        parallel = config.parallel.model_copy(update={**keys, "world_size": gpus})
        split = config.model_copy(update={"parallel": parallel})
        data = gpus // (keys["tensor_model_parallel_size"] * keys["pipeline_model_parallel_size"])
        if keys["zero_stage"] > 1 and data == 1:
            # There is nothing to shard, and every stage is stage 1.
            continue
        sizes = _micro_batches(config, data)
        # Without any size that fits, the rules say why with the size of the config.
        for size in sizes or [config.batch.micro_batch_size]:
            batch = config.batch.model_copy(update={"micro_batch_size": size})
            run = split.model_copy(update={"batch": batch})
            try:
                rules.check(run)
                layout = run.layout(gpus)
            except ConfigError as error:
                refused.add(str(error))
                continue
            for recompute in RECOMPUTE:
                train = run.train.model_copy(update={"recompute_granularity": recompute})
                yield run.model_copy(update={"train": train}), layout


def _parallel_keys(config: RunConfig, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield every combination of sizes, legal or not."""
    # Of several nodes, each holds whole groups of tensor-parallel ranks.
    node = gpus if gpus <= GPUS_PER_NODE else GPUS_PER_NODE
    for tensor in _divisors(node):
        for pipeline in _divisors(gpus // tensor):
            most = config.model.num_layers // pipeline
            chunks = [None, *range(2, most + 1)] if pipeline > 1 else [None]
            for virtual in chunks:
                for sequence in (False, True) if tensor > 1 else (False,):
                    for zero in ZERO_STAGES:
                        yield {
                            "tensor_model_parallel_size": tensor,
                            "pipeline_model_parallel_size": pipeline,
                            "virtual_pipeline_model_parallel_size": virtual,
                            "sequence_parallel": sequence,
                            "zero_stage": zero,
                        }


def _micro_batches(config: RunConfig, data: int) -> list[int]:
    """Return the sizes that divide a data-parallel rank's part of the batch, the config's too."""
    if config.batch.global_batch_size % data:
        return []
    share = config.batch.global_batch_size // data
    own = config.batch.micro_batch_size
    return [n for n in sorted({*range(1, LARGEST_MICRO_BATCH + 1), own}) if share % n == 0]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
