"""Look at runs again and again, as `status --watch` and `logs --follow` do.

The file server and slurmctld serve all users of a cluster. So a file that has not changed since is
not opened again: its inode, size and time of modification are looked up instead. And Slurm, which
may take long to answer, is asked in a thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar, cast

from pretrain.rundir.attempts import (
    ENDED,
    OWNER,
    PHASES,
    PROGRESS,
    AttemptRecord,
    read_attempt,
)
from pretrain.rundir.paths import RunPaths, attempt_directory, attempt_numbers

T = TypeVar("T")
Signature = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of modification of each of some files; None for one that is missing."""


class Records:
    """Remember what was read from files, until one of them changes."""

    def __init__(self) -> None:
        self._known: dict[tuple[Callable[[Path], object], Path], tuple[Signature, object]] = {}

    def read(self, reader: Callable[[Path], T], path: Path, *files: Path) -> T:
        """Return `reader(path)`, from memory while `files` are unchanged.

        Args:
            reader: Reads what is wanted.
            path: The argument of `reader`.
            files: All files that it reads; `path` alone when none is given.
        """
        # Before the reading: a file that changes during it is read once more the next time.
        signature = tuple(map(_signature, files or (path,)))
        before = self._known.get((reader, path))
        if before is not None and before[0] == signature:
            return cast(T, before[1])
        value = reader(path)
        self._known[reader, path] = signature, value
        return value

    def newest_attempt(self, run: Path) -> AttemptRecord | None:
        """Return the newest attempt at a run; None before the first."""
        number = max(attempt_numbers(RunPaths(run).attempts), default=0)
        return self._attempt(attempt_directory(run, number)) if number else None

    def attempts(self, run: Path) -> list[AttemptRecord]:
        """Return all attempts at a run, oldest first.

        The heartbeat of one that goes on may be old: its file is renewed without another change.
        """
        numbers = sorted(attempt_numbers(RunPaths(run).attempts))
        return [self._attempt(attempt_directory(run, number)) for number in numbers]

    def _attempt(self, directory: Path) -> AttemptRecord:
        files = (directory / name for name in (OWNER, PHASES, PROGRESS, ENDED))
        return self.read(read_attempt, directory, *files)


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does; None when it cannot be looked up."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Repeated(Generic[T]):
    """Call a function every few seconds in a thread, whatever time a call takes."""

    def __init__(self, function: Callable[[], T], seconds: float) -> None:
        """Prepare the calls.

        Args:
            function: It raises nothing.
            seconds: From now to the first call, and from the end of each call to the next one.
        """
        self._function, self._seconds = function, seconds
        self._thread: threading.Thread | None = None
        self._ended_at = time.monotonic()
        self._results: list[T] = []

    def new(self) -> T | None:
        """Return the result of a call that has ended since the last time, or None.

        The calls are made by this method, so that they end with the loop that asks for them.
        """
        if self._thread is None and time.monotonic() - self._ended_at >= self._seconds:
            # A daemon, so that Ctrl-C does not wait for a call that is under way.
            self._thread = threading.Thread(target=self._call, daemon=True)
            self._thread.start()
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread, self._ended_at = None, time.monotonic()
        return self._results.pop() if self._results else None

    def _call(self) -> None:
        self._results.append(self._function())
