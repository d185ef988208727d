"""Report the progress of a run to its attempt: phases, signs of life, and how it ended.

Rank 0 reports. Under a supervisor (`launcher local`, a Slurm job) the attempt belongs to the
supervisor, which also ends it. A run that was started by hand makes an attempt of its own, which
locks the run's directory against a second trainer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pretrain.config import RunFailed
from pretrain.config.errors import say
from pretrain.processes import Repeater
from pretrain.rundir.attempts import HEARTBEAT_SECONDS, Attempt, Owner
from pretrain.rundir.checkpoints import Superseded
from pretrain.rundir.metrics import WarnOnce
from pretrain.rundir.paths import (
    ExitCode,
    Outcome,
    Phase,
    check_apart,
    exit_code_of,
    outcome_of,
)

# ---- Requests to stop: recorded when a signal comes, agreed on by all ranks between steps ----
# A signal may reach only one rank, or several ranks during different steps. A rank that acted on it
# by itself would leave the others waiting in their next collective. So a signal is only recorded;
# the ranks' records are summed in a reduction that takes place anyway (`step.QueuedStep`), and the
# sum, the same on every rank, is the decision.
#
# This module imports nothing slow, so that signals are recorded even while torch is being imported.


EXIT_CODES = {signal.SIGTERM: ExitCode.STOPPED, signal.SIGUSR1: ExitCode.RESTART}
"""Request -> the exit code of a run that was saved because of it. SIGUSR1, which Slurm sends before
a time limit, asks for a restart. If both were recorded, SIGTERM takes precedence."""

STDERR = 2
"""The file descriptor."""
NUM_VOTES = len(EXIT_CODES) + 1
"""One vote for each request, and one for a problem."""


class Interrupted(Exception):
    """Raised on every rank between passes of an evaluation when the ranks have agreed to stop."""


class Requests:
    """Requests made to this process, and the one that all ranks have agreed to."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self.agreed: signal.Signals | None = None
        """The request that all ranks act on; None to go on training."""
        self.has_problem: Callable[[], bool] = no_problem
        """Returns True if this process cannot go on, for example because it cannot save."""
        self.problem_agreed = False
        """True if any rank has a problem, on which all ranks act together."""
        self.on_interrupt: Callable[[], str] | None = None
        """Returns the answer to a first Ctrl-C, "" on ranks that print none. Set only while the run
        trains, and so has something to save; otherwise Ctrl-C ends the process."""
        self.is_interrupted = False
        """True after a Ctrl-C that asked for a save."""
        self.is_leaving = False
        """True after a second Ctrl-C, after which nothing is waited for."""
        self.command: str | None = None
        """The command that continues this run, if a user typed it."""
        # Any, because signal.getsignal returns a callable, an enum or None.
        self._leave: Any = None

    def listen(self) -> None:
        """Record SIGTERM and SIGUSR1 from now on; on SIGUSR2 write every thread's stack to stderr.

        The signals are also unblocked, because a launcher may have blocked them so that none is
        lost before this call. While `on_interrupt` is set, a first SIGINT counts as SIGTERM. If
        SIGINT is ignored, as in a shell's background job, it stays ignored.
        """
        self._leave = signal.getsignal(signal.SIGINT)
        if callable(self._leave):
            signal.signal(signal.SIGINT, self._interrupt)
        for number in EXIT_CODES:
            signal.signal(number, self._note)
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*EXIT_CODES, signal.SIGUSR2])

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Record SIGTERM and SIGUSR1 in this context, if it is in the main thread.

        Handlers that C code has set, such as faulthandler's, are not known to Python and are lost.
        """
        in_main = threading.current_thread() is threading.main_thread()
        numbers = tuple(EXIT_CODES) if in_main else ()
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.add(number)

    def votes(self) -> list[float]:
        """Return 1 for each request that this process has recorded, else 0, and 1 for a problem.

        The requests are in the order of EXIT_CODES; the problem comes last.
        """
        noted = [float(number in self._noted) for number in EXIT_CODES]
        return [*noted, float(self.has_problem())]

    def settle(self, votes: Sequence[float]) -> None:
        """Record what all ranks agree on. `votes` is the sum over ranks of `Requests.votes()`."""
        *requests, problems = votes
        self.agreed = next((number for number, count in zip(EXIT_CODES, requests) if count), None)
        self.problem_agreed = problems > 0

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ask for a save and an end; the second time, exit at once as without this handler."""
        if self.on_interrupt is None or self.is_interrupted:
            self.is_leaving = True
            self._leave(number, frame)
            return
        self.is_interrupted = True
        self._noted.add(signal.SIGTERM)
        if answer := self.on_interrupt():
            # Not print, because the signal may have interrupted another print.
            os.write(STDERR, f"{answer}\n".encode())


def no_problem() -> bool:
    """Return False: the default, as long as no hook looks for problems."""
    return False


class AttemptReporter:
    """Reports to one attempt, after `join` or `begin`; before that it reports nothing.

    Without an attempt, the same code runs on ranks other than 0, and in tests that train in parts.
    """

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._heartbeat: Repeater | None = None
        self._phase: str = Phase.STARTING
        self._step = 0
        self.warn = WarnOnce()
        """Prints warnings about what goes wrong beside training, each kind once."""

    @property
    def attempt(self) -> Path | None:
        """Return RUN/attempts/#### of the attempt; None on ranks that do not report."""
        return self._attempt.directory if self._attempt is not None else None

    def join(self, directory: Path, hang_seconds: float = math.inf) -> None:
        """Report to the attempt in `directory`, which a supervisor holds.

        Args:
            directory: RUN/attempts/####.
            hang_seconds: recovery.hang_seconds, from which the supervisor's patience follows.
        """
        self._attempt = Attempt.join(directory, hang_seconds)

    def begin(self, run: Path, owner: Owner) -> None:
        """Lock the run and begin an attempt. Raises RunBusy if another process trains it."""
        check_apart(run)
        self._attempt = Attempt.begin(run, owner)
        self._heartbeat = Repeater(HEARTBEAT_SECONDS, self._renew)
        self._heartbeat.start()

    def phase(self, phase: str, step: int, saved: int | None = None) -> None:
        """Report the beginning of a phase.

        Args:
            phase: The `Phase`.
            step: Steps done.
            saved: The step of a checkpoint that was completed just before.
        """
        self._phase, self._step = phase, step
        self._report(lambda attempt: attempt.phase(phase, step, saved))

    @contextlib.contextmanager
    def during(self, phase: str, step: int, saved: int | None = None) -> Iterator[None]:
        """Report `phase` for the block, and training again after it.

        Args:
            phase: The `Phase` of the block.
            step: Steps done.
            saved: The step of the checkpoint that the block completes.
        """
        self.phase(phase, step)
        yield
        self.phase(Phase.TRAINING, step, saved)

    def progress(self, step: int) -> None:
        """Report a sign of life after a step or a pass of an evaluation. Cheap to call."""
        self._step = step
        self._report(lambda attempt: attempt.progress(step, self._phase))

    def _report(self, act: Callable[[Attempt], object]) -> None:
        """Report to the attempt, if there is one.

        Warn once about a status that cannot be written: training does not need it.
        """
        if self._attempt is None:
            return
        try:
            act(self._attempt)
        except OSError as error:
            self.warn(
                "status",
                f"{self.attempt}: status cannot be written ({error.strerror}); training goes on, "
                "and `launcher status` may show an older step",
            )

    def end(self, code: int, reason: str, outcome: Outcome | None = None) -> None:
        """End the attempt if this process holds it; a second call changes nothing.

        Args:
            code: The exit code.
            reason: One readable line.
            outcome: The outcome; by default the one that belongs to the code.
        """
        # Only a process that holds its attempt has a heartbeat; a supervisor ends its own attempt.
        if self._heartbeat is None or self._attempt is None:
            return
        self._heartbeat.stop()
        self._heartbeat = None
        # Errors are suppressed, because a full disk may be the very reason why the run ends.
        with contextlib.suppress(OSError):
            self._attempt.end(outcome or outcome_of(code), code, reason, self._step)

    def _renew(self) -> None:
        """Renew the lease; end this process at once if it no longer holds the run."""
        assert self._attempt is not None
        if self._attempt.heartbeat():
            return
        reason = self._attempt.why_lost() or "this attempt no longer holds its run"
        say(f"error: {self._attempt.directory}: {reason}")
        outcome = Outcome.SUPERSEDED if self._attempt.superseded() else Outcome.FAILED
        with contextlib.suppress(OSError):
            self._attempt.end(outcome, ExitCode.FAILED, reason, self._step)
        os._exit(ExitCode.FAILED)

    def __enter__(self) -> AttemptReporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        """End the attempt if the block failed; after success the caller has ended it already.

        Raises:
            RunFailed: In place of a failure whose cause is that the run's directory is gone.
        """
        if isinstance(error, KeyboardInterrupt):
            self.end(ExitCode.INTERRUPTED, "interrupted")
        elif error is not None:
            lost = self._attempt.why_lost() if self._attempt is not None else None
            if lost and isinstance(error, RunFailed) and not isinstance(error, Superseded):
                # Only the attempt knows where its directory went.
                self.end(ExitCode.FAILED, lost)
                raise RunFailed(lost) from error
            lines = str(error).splitlines()
            outcome = Outcome.SUPERSEDED if isinstance(error, Superseded) else None
            self.end(exit_code_of(error), lines[0] if lines else type(error).__name__, outcome)
