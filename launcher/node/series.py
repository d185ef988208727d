"""Judge a series of attempts: how many made no progress, and if another one may succeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pretrain.rundir.attempts import AttemptRecord, steps_done
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.states import Outcome, Phase

SIGNAL_CODE = 128
"""The exit code of a process that signal n ended is this plus n."""

IsOurs = Callable[[AttemptRecord], bool]
"""Tells if an earlier attempt belongs to this series of restarts."""


def without_progress(records: Sequence[AttemptRecord], is_ours: IsOurs) -> int:
    """Return how many attempts in a row, up to the last, ended without a new checkpoint.

    An attempt made progress if the next one began with a newer checkpoint than it did; for the last
    attempt, the run's newest checkpoint is compared. Counting stops at an attempt that made
    progress, that finished or gave up, or that belongs to an earlier series.

    Args:
        records: All attempts at a run, oldest first.
        is_ours: Tells if an attempt belongs to this series of restarts.
    """
    if not records:
        return 0
    count = 0
    newest = newest_checkpoint_step(records[0].directory.parents[1])
    for record in reversed(records):
        ended = record.ended
        series_over = ended and ended.outcome in (Outcome.FINISHED, Outcome.GAVE_UP)
        progressed = (newest or 0) > (record.owner.checkpoint_step or 0)
        if series_over or progressed or not is_ours(record):
            return count
        newest, count = record.owner.checkpoint_step, count + 1
    return count


def why_permanent(
    records: Sequence[AttemptRecord], code: int, count: int, most: int, local: bool
) -> str | None:
    """Return why another attempt would fail as well, or None if it may succeed.

    Args:
        records: All attempts at the run; the last is the one that just ended.
        code: Its exit code.
        count: Attempts in a row without a new checkpoint, this one included.
        most: recovery.max_restarts.
        local: True on a single machine: a failure before the first step is final when it repeats.
            Under Slurm the next attempt may run on another node, where it works.
    """
    if count > most:
        return (
            f"{count} attempts in a row without a new checkpoint (recovery.max_restarts = {most})"
        )
    now, before = records[-1], records[-2] if count > 1 else None
    if before is None or before.ended is None:
        return None
    if before.ended.outcome not in (Outcome.FAILED, Outcome.DIVERGED):
        return None
    # A bug or a loss that is nan ends twice with the same code at the same step. A rank that a
    # signal ended may have been a victim of its node (out of memory, a fault), so signals do
    # not count as the same failure.
    same_end = (before.ended.code, before.ended.step) == (code, steps_done(now.directory))
    both_trained = all(
        any(phase.phase == Phase.TRAINING for phase in record.phases) for record in (before, now)
    )
    if same_end and code < SIGNAL_CODE and (local or both_trained):
        return "the attempt before failed in the same way at the same step"
    return None
