"""Handle the signals that are sent to a launcher, and keep them from killing ranks that start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pretrain.rundir.files import read_text

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to stop; no attempt follows one of them."""
JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that the batch script of a Slurm job holds and passes on (slurm/job.sbatch)."""
BATCH_SCRIPT = "PRETRAIN_BATCH_SCRIPT"
"""The variable in which the batch script gives its process id."""
BLOCKED_AT_START = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a rank cannot handle from its first instruction on."""


class Signals:
    """Record the signals sent to this process while the context is open.

    The handler only appends to a list, and the supervisor's loop acts on it: almost nothing may be
    done safely inside a handler, which can interrupt the process at any instruction.

    A signal that this process already ignores stays ignored, so that a run started with nohup
    survives the SIGHUP of the terminal that closes.

    With `even_ignored` it does not, and is ignored again afterwards: a batch script starts the
    launcher so, and a signal that comes when the job's work is done must not change its exit code.
    """

    def __init__(self, *numbers: int, even_ignored: bool = False) -> None:
        self.received: list[int] = []
        """The signals that came so far, oldest first."""
        self._numbers, self._even_ignored = numbers, even_ignored
        # Any, because signal.getsignal returns a callable, an enum or None, and signal.signal
        # takes back what it returned.
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        handlers = {number: signal.getsignal(number) for number in self._numbers}
        self._before = {
            number: handler
            for number, handler in handlers.items()
            if handler is not signal.SIG_IGN or self._even_ignored
        }
        for number in self._before:
            signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    @property
    def stops(self) -> int:
        """Return how often this process was asked to stop."""
        return sum(number in STOP_SIGNALS for number in self.received)


@contextmanager
def job_signals() -> Iterator[Signals]:
    """Record the signals that the batch script holds and passes on, and tell it to do so."""
    with Signals(*JOB_SIGNALS, even_ignored=True) as signals:
        # Jobs inherit variables from the job that sends them, so the script must be an ancestor.
        script = os.environ.get(BATCH_SCRIPT)
        if script is not None and script in map(str, _ancestors()):
            os.kill(int(script), signal.SIGUSR2)
        yield signals


def _ancestors() -> Iterator[int]:
    """Yield the ids of this process's parent, its parent, and so on."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        # Field 4 of proc(5); field 2, the command, may hold spaces and parentheses.
        fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()
        pid = int(fields[1]) if fields else 0


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start processes inside this context with SIGUSR1 and SIGUSR2 blocked.

    The default action of both signals is to end the process, and a rank needs seconds before its
    handlers stand: Python has to start first. A child inherits the signal mask through fork and
    exec, and a signal that arrives while it is blocked stays pending. So the rank itself unblocks
    both once it can handle them: `pretrain train` does it before anything else
    (pretrain/train/reporter.py), srun once it has started its tasks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_AT_START)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
