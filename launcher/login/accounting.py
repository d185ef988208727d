"""Account for a run's wall time: read its attempts back as contiguous intervals that fill it.

The wall time runs from the first submission to the end of the last attempt, or to now while that
attempt runs. Every moment of it belongs to exactly one part of `PARTS`. Times are whole
milliseconds, so the parts sum to the wall time exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.rundir.attempts import AttemptRecord, Suspension, is_idle
from pretrain.rundir.paths import WORK as WORK
from pretrain.rundir.paths import Outcome, Phase

WAITING, SUSPENDED, LOST, IDLE = "waiting", "suspended", "lost", "idle"
"""Parts that are no phase of an attempt."""
PARTS = {
    WAITING: "before an attempt: in the queue, or between two attempts without a job",
    Phase.STARTING: "the processes start and find each other; nodes are chosen and checked",
    Phase.LOADING: "the model is built and a checkpoint is loaded",
    Phase.TRAINING: "training steps that the run kept",
    Phase.EVALUATING: "evaluations while training",
    Phase.SAVING: "checkpoints are written",
    Phase.ENDING: "the processes shut down",
    SUSPENDED: "Slurm had suspended the job, and its processes stood still",
    LOST: "training, evaluating and saving after the checkpoint that the next attempt resumed from",
    IDLE: "while nothing was to be trained: the run was finished and no later start was submitted, "
    "or an attempt was refused its input or found every step done",
}
"""The parts of the wall time, in the order in which an attempt goes through them."""
JUMP_SECONDS = 60.0
"""Times that go back by more are those of a clock that was set; by less, clocks disagree."""

GOODPUT = (
    "Goodput is the time spent on training steps that the run kept, as a share of the time it held "
    "its nodes (the wall time without the waiting and without suspensions of its job). Time in "
    "which nothing was to be trained does not count: while the run is finished, and attempts that "
    "were refused or found every step done."
)


class Interval(NamedTuple):
    """The time [begin, end) that an attempt spent in one phase."""

    begin: int
    """Milliseconds since 1970."""
    end: int
    """Milliseconds since 1970."""
    phase: str
    step: int
    """Steps done when the phase began."""


@dataclass(frozen=True)
class TimeSplit:
    """Milliseconds in each part of `PARTS`, of an attempt with the wait before it or of a run."""

    parts: dict[str, int]

    @property
    def wall(self) -> int:
        """Milliseconds in all parts together."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """Training that was kept / time in which nodes were held, 0 to 1; None if none were."""
        held = self._meant - self.parts[WAITING] - self.parts[SUSPENDED]
        return self.parts[Phase.TRAINING] / held if held else None

    @property
    def goodput_of_wall(self) -> float | None:
        """Training that was kept / wall time without idle time, 0 to 1; None if that is empty."""
        return self.parts[Phase.TRAINING] / self._meant if self._meant else None

    @property
    def _meant(self) -> int:
        """Milliseconds in which the run was meant to train."""
        return self.wall - self.parts[IDLE]


def time_splits(attempts: Sequence[AttemptRecord], now: float | None = None) -> list[TimeSplit]:
    """Split the wall time of a run by attempts and parts.

    An attempt that left no ended.json ends at its last sign of life. The clocks of different hosts
    may disagree, so an interval is cut to the time that earlier ones have left free; a clock that
    was set back is taken for one that went on (`_on_one_clock`).

    Args:
        attempts: All attempts, oldest first.
        now: Unix seconds if the last attempt still runs, else None.

    Returns:
        One split per attempt, oldest first. Their sum (`total`) is the run's wall time.
    """
    splits = []
    attempts, now = _on_one_clock(attempts, now)
    # The end of what is accounted for: each attempt gets the time from here to its own end.
    free_from = _first_moment(attempts)
    is_finished = False
    for index, attempt in enumerate(attempts):
        last = index == len(attempts) - 1
        running = last and now is not None
        begin = max(free_from, _begin(attempt))
        end = _milliseconds(now) if running and now is not None else _end(attempt)
        if not last:
            # A superseded attempt notices it late, and records an end after the next one's begin.
            end = min(end, _begin(attempts[index + 1]))
        end = max(begin, end)
        intervals = _intervals(attempt, begin, end)
        # While an attempt runs, all its work may still be saved.
        kept_until = end if running else _kept_until(intervals, attempt, attempts[index + 1 :])
        parts = dict.fromkeys(PARTS, 0)
        # Between two attempts of one start of a job its nodes are held.
        held = index > 0 and _is_same_start(attempts[index - 1], attempt)
        wanted = _wanted_from(attempt, free_from, begin) if is_finished else free_from
        parts[IDLE] += wanted - free_from
        parts[Phase.STARTING if held else WAITING] += begin - wanted
        if is_idle(attempt):
            parts[IDLE] += end - begin
            intervals = []
        for interval in intervals:
            lost = interval.phase in WORK and interval.begin >= kept_until
            suspended = _suspended(interval, attempt.suspensions)
            parts[SUSPENDED] += suspended
            parts[LOST if lost else interval.phase] += interval.end - interval.begin - suspended
        if not is_idle(attempt):
            ended = attempt.ended
            is_finished = ended is not None and ended.outcome == Outcome.FINISHED
        splits.append(TimeSplit(parts))
        free_from = end
    return splits


def _on_one_clock(
    attempts: Sequence[AttemptRecord], now: float | None
) -> tuple[Sequence[AttemptRecord], float | None]:
    """Move the times after a clock was set back forward, by as much as it was set back at least.

    Otherwise everything until the clock has caught up would count as no time at all.
    """
    shift, moved, latest = 0.0, [], 0.0

    def on_clock(at: float, earliest: float) -> float:
        nonlocal shift
        behind = earliest - (at + shift)
        shift += behind if behind > JUMP_SECONDS else 0.0
        return at + shift

    for attempt in attempts:
        # Attempts are numbered in the order in which they began.
        # A damaged owner.json says 0.
        began = on_clock(attempt.owner.began_at, latest) if attempt.owner.began_at else 0.0
        latest = max(began, latest)
        marks, last = [], latest
        for mark in attempt.phases:
            last = max(last, on_clock(mark.at, last))
            marks.append(dataclasses.replace(mark, at=last))
        ended = attempt.ended
        if ended is not None:
            ended = dataclasses.replace(ended, at=on_clock(ended.at, last))
        moved.append(
            dataclasses.replace(
                attempt,
                owner=dataclasses.replace(attempt.owner, began_at=began),
                phases=tuple(marks),
                ended=ended,
                last_heartbeat=attempt.last_heartbeat + shift if attempt.last_heartbeat else 0.0,
                suspensions=tuple(
                    dataclasses.replace(each, at=each.at + shift) for each in attempt.suspensions
                ),
            )
        )
    if now is not None and attempts:
        now = on_clock(now, max([latest, *(mark.at for mark in moved[-1].phases)]))
    return moved, now


def total(splits: Sequence[TimeSplit]) -> TimeSplit:
    """Return the sum of the splits, part by part."""
    return TimeSplit({part: sum(split.parts[part] for split in splits) for part in PARTS})


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _is_same_start(before: AttemptRecord, attempt: AttemptRecord) -> bool:
    """Return True if one start of one Slurm job made both attempts."""
    job = before.owner.slurm_job_id, before.owner.slurm_restart_count
    return job == (attempt.owner.slurm_job_id, attempt.owner.slurm_restart_count) != (None, None)


def _first_moment(attempts: Sequence[AttemptRecord]) -> int:
    """Return when the wall time begins: at the submission if it is known and was earlier."""
    if not attempts:
        return 0
    submitted, began = attempts[0].owner.submitted_at, _begin(attempts[0])
    return began if submitted is None else min(_milliseconds(submitted), began)


def _wanted_from(attempt: AttemptRecord, free_from: int, begin: int) -> int:
    """Return when a run that was finished is meant to train again: at the submission, if known.

    Args:
        attempt: The first attempt since.
        free_from: The end of the time that is accounted for.
        begin: When the attempt began.
    """
    submitted = attempt.owner.submitted_at
    if submitted is None or is_idle(attempt):
        return begin
    return min(max(free_from, _milliseconds(submitted)), begin)


def _begin(attempt: AttemptRecord) -> int:
    """Return when an attempt began; by its first sign of life if owner.json is damaged."""
    signs = [attempt.owner.began_at, *(mark.at for mark in attempt.phases), attempt.last_heartbeat]
    return _milliseconds(next((at for at in signs if at), 0.0))


def _end(attempt: AttemptRecord) -> int:
    """Return when an attempt ended; by its last sign of life if it left no ended.json."""
    if attempt.ended is not None:
        return _milliseconds(attempt.ended.at)
    phase_changes = (mark.at for mark in attempt.phases)
    return _milliseconds(max(attempt.owner.began_at, attempt.last_heartbeat, *phase_changes))


def _intervals(attempt: AttemptRecord, begin: int, end: int) -> list[Interval]:
    """Cut [begin, end) at each phase change; before the first one the attempt was starting."""
    intervals, since, step = [], begin, 0
    phase: str = Phase.STARTING
    # A phase that a later version added is counted as part of the phase before it.
    for mark in (mark for mark in attempt.phases if mark.phase in PARTS):
        # Never backwards, whatever a clock that was set did to the times in phases.jsonl.
        at = min(max(_milliseconds(mark.at), since), end)
        intervals.append(Interval(since, at, phase, step))
        since, phase, step = at, mark.phase, mark.step
    return [*intervals, Interval(since, end, phase, step)]


def _suspended(interval: Interval, suspensions: Sequence[Suspension]) -> int:
    """Return how many milliseconds of an interval its job was suspended."""
    suspended, counted_to = 0, interval.begin
    for each in sorted(suspensions, key=lambda each: each.at):
        # Two that overlap, as in a damaged file, count once.
        begin = max(_milliseconds(each.at), counted_to)
        end = min(_milliseconds(each.at) + _milliseconds(each.seconds), interval.end)
        suspended += max(0, end - begin)
        counted_to = max(counted_to, end)
    return suspended


def _kept_until(
    intervals: Sequence[Interval], attempt: AttemptRecord, later: Sequence[AttemptRecord]
) -> int:
    """Return the moment from which on the work of an attempt that is over was lost.

    It is the end of the newest save that every later attempt has resumed from or from beyond. A
    user may resume from an old checkpoint by hand, so all later attempts count, not only the next.

    Args:
        intervals: The attempt's time, oldest first.
        attempt: The attempt.
        later: All attempts after it.

    Returns:
        Milliseconds since 1970.
    """
    resumed = [step for each in later if (step := resumed_from(each)) is not None]
    if not resumed and attempt.ended is not None and attempt.ended.outcome == Outcome.FINISHED:
        return intervals[-1].end
    saved = [mark.saved for mark in attempt.phases if mark.saved is not None]
    # If no attempt has resumed it yet, the next one will, from its newest checkpoint.
    step = min(resumed) if resumed else max(saved, default=-1)
    return max(
        (i.end for i in intervals if i.phase == Phase.SAVING and i.step <= step),
        default=intervals[0].begin,
    )


def resumed_from(attempt: AttemptRecord) -> int | None:
    """Return the number of steps that an attempt had when its work began.

    If it never got that far, return the step of the checkpoint that it would have loaded, or None
    if there was none.
    """
    return next(
        (mark.step for mark in attempt.phases if mark.phase in WORK), attempt.owner.checkpoint_step
    )
