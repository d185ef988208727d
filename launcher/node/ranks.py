"""What a supervisor needs of the processes it watches, be they here (launcher/local.py) or on Slurm (launcher/srun.py)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

HELD = (signal.SIGUSR1, signal.SIGUSR2)


class Step(Protocol):
    """The ranks of one attempt at a run."""

    failure: str
    """Once it is over and its exit code is not 0: what happened first, for a person."""

    def poll(self) -> int | None:
        """None while it runs, then 0, or the exit code of the rank that failed first (128 + n for signal n)."""

    def signal(self, number: int) -> None:
        """Sends a signal to every rank."""

    def end(self) -> int:
        """Ends every process, at once or after a short grace; returns the exit code when they are gone."""

    def kill(self) -> None:
        """Ends every process at once, without letting it save; returns when they are gone."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes started within find SIGUSR1 and SIGUSR2 blocked until they can handle them, and then unblock them.

    Before that such a signal would end them. `pretrain train` does so first of all, srun once it has ranks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
