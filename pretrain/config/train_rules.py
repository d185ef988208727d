"""Refuse steps to profile that the run does not take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pretrain.config.refusal import Refusal

if TYPE_CHECKING:
    # RunConfig.layout applies these rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig


def check_profile(c: RunConfig) -> Iterator[Refusal]:
    """Check that the run has the steps of train.profile_steps."""
    if c.train.profile_steps is None:
        return
    first, last = c.train.profile_steps
    if not first <= last <= c.train.num_steps:
        yield Refusal(
            "train.profile_steps",
            [first, last],
            "not the first and the last of some steps of a run of train.num_steps = "
            f"{c.train.num_steps}",
            f"Choose [first, last] within 1 to {c.train.num_steps}, or remove the key",
        )
