"""Where a run's time went: its attempts, read back, turned into contiguous intervals that fill the wall time.

The wall time runs from the first submission to the end of the last attempt, or to now while that one runs. Every
moment of it belongs to exactly one part of `PARTS`. Times are whole milliseconds, so that the parts sum exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.rundir.attempts import AttemptRecord
from pretrain.rundir.states import Outcome, Phase

WAITING, LOST = "waiting", "lost"
PARTS = {
    WAITING: "before an attempt: in the queue, or between the end of one attempt and the start of the next",
    Phase.STARTING: "the processes start and find each other",
    Phase.LOADING: "the model is built and a checkpoint loaded",
    Phase.TRAINING: "steps that the run kept",
    Phase.EVALUATING: "evaluations in the loop, and of checkpoints",
    Phase.SAVING: "checkpoints are written",
    Phase.ENDING: "the processes end",
    LOST: "training, evaluating and saving after the checkpoint that the next attempt went on from",
}
WORK = (Phase.TRAINING, Phase.EVALUATING, Phase.SAVING)
"""What is lost when a later attempt starts from before it."""

GOODPUT = (
    "Goodput is the time spent on training steps that the run kept, as a share of the time it held its nodes "
    "(the wall time without the waiting)."
)


class Interval(NamedTuple):
    """[begin, end) in milliseconds since 1970, the phase it was in and the steps done when it began."""

    begin: int
    end: int
    phase: str
    step: int


@dataclass(frozen=True)
class TimeSplit:
    """Milliseconds in each part of `PARTS`: of one attempt with the wait before it, or of a run."""

    parts: dict[str, int]

    @property
    def wall(self) -> int:
        """Milliseconds of all parts together."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """Kept training time over the time nodes were held, 0 to 1; None when none were."""
        held = self.wall - self.parts[WAITING]
        return self.parts[Phase.TRAINING] / held if held else None

    @property
    def goodput_of_wall(self) -> float | None:
        """The same over the whole wall time, waiting included."""
        return self.parts[Phase.TRAINING] / self.wall if self.wall else None


def time_splits(attempts: Sequence[AttemptRecord], now: float | None = None) -> list[TimeSplit]:
    """Return one split per attempt, oldest first; their sum (`total`) fills the run's wall time.

    `now` (unix seconds) when the last attempt still runs, else None. An attempt that left no ended.json ends at its
    last sign of life. Where hosts' clocks disagree, an interval is cut to what is free.
    """
    splits = []
    free_from = _first_moment(attempts)
    for index, attempt in enumerate(attempts):
        last = index == len(attempts) - 1
        running = last and now is not None
        begin = max(free_from, _begin(attempt))
        end = _milliseconds(now) if running and now is not None else _end(attempt)
        if (
            not last
        ):  # one that lost its place notices late, and writes its end after the next has begun
            end = min(end, _begin(attempts[index + 1]))
        end = max(begin, end)
        intervals = _intervals(attempt, begin, end)
        kept_until = end if running else _kept_until(intervals, attempt, attempts[index + 1 :])
        parts = dict.fromkeys(PARTS, 0)
        parts[WAITING] = begin - free_from
        for interval in intervals:
            lost = interval.phase in WORK and interval.begin >= kept_until
            parts[LOST if lost else interval.phase] += interval.end - interval.begin
        splits.append(TimeSplit(parts))
        free_from = end
    return splits


def total(splits: Sequence[TimeSplit]) -> TimeSplit:
    """The sum."""
    return TimeSplit({part: sum(each.parts[part] for each in splits) for part in PARTS})


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _first_moment(attempts: Sequence[AttemptRecord]) -> int:
    if not attempts:
        return 0
    submitted, began = attempts[0].owner.submitted_at, _begin(attempts[0])
    return began if submitted is None else min(_milliseconds(submitted), began)


def _begin(attempt: AttemptRecord) -> int:
    """When it began; by its first sign of life where owner.json is damaged."""
    signs = [attempt.owner.began_at, *(mark.at for mark in attempt.phases), attempt.last_heartbeat]
    return _milliseconds(next((at for at in signs if at), 0.0))


def _end(attempt: AttemptRecord) -> int:
    """When it ended, or its last sign of life."""
    if attempt.ended is not None:
        return _milliseconds(attempt.ended.at)
    return _milliseconds(
        max(attempt.owner.began_at, attempt.last_heartbeat, *(mark.at for mark in attempt.phases))
    )


def _intervals(attempt: AttemptRecord, begin: int, end: int) -> list[Interval]:
    """[begin, end) cut at every change of phase; "starting" until the first line."""
    intervals, since, step = [], begin, 0
    phase: str = Phase.STARTING
    for mark in (mark for mark in attempt.phases if mark.phase in PARTS):
        at = min(max(_milliseconds(mark.at), since), end)
        intervals.append(Interval(since, at, phase, step))
        since, phase, step = at, mark.phase, mark.step
    return [*intervals, Interval(since, end, phase, step)]


def _kept_until(
    intervals: Sequence[Interval], attempt: AttemptRecord, later: Sequence[AttemptRecord]
) -> int:
    """The moment after which an attempt's work is lost: the end of the newest save that nobody went back behind."""
    resumed = [step for each in later if (step := resumed_from(each)) is not None]
    if not resumed and attempt.ended is not None and attempt.ended.outcome == Outcome.FINISHED:
        return intervals[-1].end
    saved = [mark.saved for mark in attempt.phases if mark.saved is not None]
    # Nobody has gone on from it yet: it will be from its own newest checkpoint.
    step = min(resumed) if resumed else max(saved, default=-1)
    return max(
        (i.end for i in intervals if i.phase == Phase.SAVING and i.step <= step),
        default=intervals[0].begin,
    )


def resumed_from(attempt: AttemptRecord) -> int | None:
    """The steps done when its work began, or, when it never got that far, the checkpoint it would have loaded."""
    return next(
        (mark.step for mark in attempt.phases if mark.phase in WORK), attempt.owner.checkpoint_step
    )
