"""Notice that the job was suspended, and record it: its time is no training."""

from __future__ import annotations

import contextlib
import time

from pretrain.launcher.terminal import say
from pretrain.rundir.lock import Attempt

LOOK_SECONDS = 1.0
"""Time between two looks at the clock."""
SUSPENDED_SECONDS = 3.0
"""A longer gap between two looks is a suspension; a shorter one may be a busy machine."""


class SuspensionClock:
    """Call it every `LOOK_SECONDS`: a gap between two calls is a time in which nothing ran.

    `scontrol suspend`, gang scheduling and preemption with PreemptMode=SUSPEND stop every process
    of a job, this one too, so a gap in its own time is the suspension of all. The first call begins
    it: what comes before, as the check of the nodes, may take long.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        # The ranks' start, after which the looks begin, may take minutes by itself.
        self._last: float | None = None

    def __call__(self) -> None:
        now = _seconds()
        gap = 0.0 if self._last is None else now - self._last - LOOK_SECONDS
        self._last = now
        if gap < SUSPENDED_SECONDS:
            return
        say(f"attempt {self._attempt.number}: stood still for {gap:.0f} s: its job was suspended")
        # A full disk must not end the thread that looks.
        with contextlib.suppress(OSError):
            self._attempt.suspended(time.time() - gap, gap)


def _seconds() -> float:
    """Return the seconds since boot, which also go on while the machine itself sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
