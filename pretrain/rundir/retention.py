"""Decide which of a run's checkpoints go: the last N, every M-th and the best N stay.

The decision is a pure function of what is known about the checkpoints of one line of descent.
`pretrain.rundir.history.remove_old` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The keys of [checkpoint] that say what is kept."""

    keep: int | None = None
    """Number of newest checkpoints; None keeps all."""
    keep_every: int | None = None
    """Those whose step is a multiple of this are kept for good."""
    keep_best: int = 0
    """Number of those with the lowest validation loss that are kept."""


@dataclass(frozen=True)
class Known:
    """A checkpoint as far as the decision needs to know it."""

    step: int
    validation_loss_nats: float | None = None
    """None for a step that was not evaluated while training."""


def removable(
    checkpoints: Sequence[Known], policy: Policy, wanted: Collection[int] = ()
) -> list[int]:
    """Return the steps of the checkpoints that may be deleted, in ascending order.

    The newest is never among them, so a run that has a checkpoint keeps one.

    Args:
        checkpoints: Complete, readable checkpoints of one line of descent, each step once.
        policy: What to keep.
        wanted: Steps of checkpoints that are still needed, such as those that await an evaluation.
    """
    if policy.keep is None:
        return []
    steps = sorted(known.step for known in checkpoints)
    kept = {*steps[-policy.keep :], *wanted}
    if policy.keep_every is not None:
        kept |= {step for step in steps if step % policy.keep_every == 0}
    evaluated = [
        (known.validation_loss_nats, -known.step)
        for known in checkpoints
        # A loss that is nan or infinite is no result to keep a checkpoint for.
        if known.validation_loss_nats is not None and math.isfinite(known.validation_loss_nats)
    ]
    # Of equal losses the later checkpoint is kept.
    kept |= {-step for _, step in sorted(evaluated)[: policy.keep_best]}
    return [step for step in steps if step not in kept]
