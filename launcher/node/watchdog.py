"""Tell from an attempt's progress file that its ranks are stuck.

Ranks that hang in a collective operation cannot report it themselves, so the check is made outside
of them. Rank 0 replaces the file `progress` in the attempt's directory while it works, ten times
within recovery.hang_seconds or every ten seconds (`pretrain.rundir.lock.Attempt.progress`).
"""

from __future__ import annotations

import time
from pathlib import Path

from pretrain.rundir.attempts import PROGRESS, Progress, read_progress
from pretrain.rundir.lock import LOOKS, PROGRESS_SECONDS
from pretrain.rundir.states import Phase

WORKING = (Phase.TRAINING, Phase.EVALUATING)
"""Phases in which progress comes with every step, so recovery.hang_seconds applies. In the others
(starting, loading, saving, ending) the limit is recovery.startup_seconds."""


class Watchdog:
    """Watch the progress of one attempt."""

    def __init__(self, directory: Path, hang_seconds: float, startup_seconds: float) -> None:
        """Watch an attempt.

        Args:
            directory: The attempt's directory, RUN/attempts/####.
            hang_seconds: The longest time without progress while training or evaluating.
            startup_seconds: The longest time without progress in every other phase.
        """
        self._directory, self._hang, self._startup = directory, hang_seconds, startup_seconds
        self._pause = min(PROGRESS_SECONDS, hang_seconds / LOOKS, startup_seconds / LOOKS)
        self._last_look, self._idle = time.monotonic(), 0.0
        self._seen: tuple[Progress | None, int] = None, 0

    def stuck(self) -> str | None:
        """Return why the ranks must be ended, or None while they make progress.

        Cheap to call often: it reads the file as seldom as rank 0 writes it.
        """
        passed = time.monotonic() - self._last_look
        if passed < self._pause:
            return None
        self._last_look += passed
        progress = read_progress(self._directory)
        # The time as well: on a full disk rank 0 can renew that alone.
        seen = progress, _modified_at(self._directory / PROGRESS)
        if seen != self._seen:
            self._seen, self._idle = seen, 0.0
            return None
        # When this process was suspended itself (a paused node or laptop), the ranks were too, so a
        # long gap between two looks counts as two ordinary ones and no more.
        self._idle += min(passed, 2 * self._pause)
        phase, step = (progress.phase, progress.step) if progress else (Phase.STARTING, 0)
        limit = self._hang if phase in WORKING else self._startup
        if self._idle <= limit:
            return None
        return f"no progress for {limit:g} s while {phase}, at step {step}"


def _modified_at(path: Path) -> int:
    """Return a file's modification time in nanoseconds, 0 when it cannot be seen."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
