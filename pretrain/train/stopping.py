"""Requests to stop: noted by signal from a process's first moment on, agreed on by all ranks between steps.

A signal may reach one rank alone, or ranks at different steps, so nobody acts on it by itself: what each has noted is
summed over all ranks, in a reduction that takes place anyway, and the sum is the decision. Importing this costs
nothing slow: signals that come while torch is being imported are noted too.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Sequence
from types import FrameType

from pretrain.rundir.states import ExitCode

EXIT_CODES = {signal.SIGTERM: ExitCode.STOPPED, signal.SIGUSR1: ExitCode.RESTART}
"""What each request ends a run with once it is saved; the first one wins where ranks were asked for both."""
INTERRUPTED = 130
"""What Ctrl-C ends a run with, at once and unsaved."""


class Interrupted(Exception):
    """Raised on every rank to leave an evaluation between two of its passes: the ranks have agreed to stop."""


class Requests:
    """What this process was asked to do, and what all ranks agreed to do."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self.agreed: signal.Signals | None = None
        """The request that all ranks now act on."""

    def listen(self) -> None:
        """From now on SIGUSR1 and SIGTERM are noted; SIGUSR2 writes every thread's stack to stderr, and no more.

        They are unblocked too: a launcher may block them so that none is lost before this line.
        """
        for number in EXIT_CODES:
            signal.signal(number, self._note)
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*EXIT_CODES, signal.SIGUSR2])

    def votes(self) -> list[float]:
        """1 for what was asked of this process, else 0; the sum over all ranks is what `settle` takes."""
        return [float(number in self._noted) for number in EXIT_CODES]

    def settle(self, votes: Sequence[float]) -> None:
        """Takes the votes of all ranks, summed, as the decision."""
        self.agreed = next((number for number, count in zip(EXIT_CODES, votes) if count), None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.add(number)
