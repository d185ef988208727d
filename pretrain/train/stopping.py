"""Requests to stop: noted when a signal comes, agreed on by all ranks between steps.

A signal may reach one rank alone, or several ranks during different steps. A rank that acted on it
by itself would leave the others waiting in their next collective. So a signal is only noted; the
ranks' notes are summed in a reduction that takes place anyway (`step.QueuedStep`), and the sum,
the same on every rank, is the decision.

This module imports nothing slow, so that signals are noted also while torch is being imported.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from pretrain.rundir.states import ExitCode

EXIT_CODES = {signal.SIGTERM: ExitCode.STOPPED, signal.SIGUSR1: ExitCode.RESTART}
"""Request -> the exit code of a run that was saved because of it. SIGUSR1 asks for a restart, which
Slurm is told to send before a time limit. Where both were noted, the first one has precedence."""

STDERR = 2
"""The descriptor."""
NUM_VOTES = len(EXIT_CODES) + 1
"""One for each request, and one for a problem."""


class Interrupted(Exception):
    """Raised on every rank between two passes of an evaluation: the ranks have agreed to stop."""


class Requests:
    """Requests made to this process, and the one that all ranks have agreed to."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self.agreed: signal.Signals | None = None
        """The request that all ranks act on; None to go on training."""
        self.has_problem: Callable[[], bool] = _no_problem
        """Returns True if this process cannot go on, for example because it cannot save."""
        self.problem_agreed = False
        """True if any rank has a problem: all act on it together."""
        self.on_interrupt: Callable[[], str] | None = None
        """Returns the answer to a first Ctrl-C, "" on ranks that say nothing; set while the run
        trains, and so has something to save. Without it a Ctrl-C ends the process."""
        self.is_interrupted = False
        """True after a Ctrl-C that asked for a save."""
        self.is_leaving = False
        """True after a second Ctrl-C: nothing is waited for any more."""
        self.command: str | None = None
        """The command that goes on with this run, if a user has typed it."""
        # Any, because signal.getsignal returns a callable, an enum or None.
        self._leave: Any = None

    def listen(self) -> None:
        """Note SIGTERM and SIGUSR1 from now on; on SIGUSR2 write every thread's stack to stderr.

        The signals are unblocked too, because a launcher may have blocked them so that none is
        lost before this call. A first SIGINT is noted as SIGTERM is while `on_interrupt` is set;
        where SIGINT is ignored, as in a shell's background job, it stays so.
        """
        self._leave = signal.getsignal(signal.SIGINT)
        if callable(self._leave):
            signal.signal(signal.SIGINT, self._interrupt)
        for number in EXIT_CODES:
            signal.signal(number, self._note)
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*EXIT_CODES, signal.SIGUSR2])

    def votes(self) -> list[float]:
        """Return 1 for each request that this process has noted, else 0, and 1 for a problem.

        The requests are in EXIT_CODES' order; the problem comes last.
        """
        noted = [float(number in self._noted) for number in EXIT_CODES]
        return [*noted, float(self.has_problem())]

    def settle(self, votes: Sequence[float]) -> None:
        """Record what all ranks agree on. `votes` sums what the method `votes` returned on each."""
        *requests, problems = votes
        self.agreed = next((number for number, count in zip(EXIT_CODES, requests) if count), None)
        self.problem_agreed = problems > 0

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ask for a save and the end; the second time leave, as without this handler."""
        if self.on_interrupt is None or self.is_interrupted:
            self.is_leaving = True
            self._leave(number, frame)
            return
        self.is_interrupted = True
        self._noted.add(signal.SIGTERM)
        if answer := self.on_interrupt():
            # Not print, which the signal may have interrupted.
            os.write(STDERR, f"{answer}\n".encode())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.add(number)


def _no_problem() -> bool:
    """Return False: nothing has been asked to look for problems yet."""
    return False
