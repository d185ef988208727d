"""Measure what methods and training lengths cost beside each other, in one job.

The contestants take turns, round by round, so that what else the machine does hits all of them
alike. Numbers of runs that trained at different times could not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pretrain.config import RunConfig


def measure(configs: Sequence[RunConfig], rounds: int, nproc: int) -> dict[str, Any]:
    """Time training and evaluation of several configs in turns, and measure their memory.

    Args:
        configs: The contestants, one for each method and training length. All must take equally
            many tokens a step.
        rounds: How often each contestant takes its turn.
        nproc: Processes of each contestant.

    Returns:
        {"device", "rounds", "rows": [{"method", "train_length", "train_tokens_per_second",
        "evaluation_tokens_per_second", "peak_memory_bytes"}]}: the speeds are lists with one value
        for each round, of the whole job; the memory is the largest of any process of the
        contestant.

    Raises:
        ConfigError: Two configs are the same contestant, or take different numbers of tokens a
            step, or a contestant failed.
    """
    raise NotImplementedError
