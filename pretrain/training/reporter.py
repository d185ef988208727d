"""Report the progress of a run to its attempt: phases, signs of life, and how it ended.

Rank 0 reports. Under a supervisor (`launcher local`, a Slurm job) the attempt is the supervisor's,
which also ends it. A run that was started by hand makes an attempt of its own, which locks the
run's directory against a second trainer.
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

# ---- Requests to stop: noted when a signal comes, agreed on by all ranks between steps ----
# A signal may reach one rank alone, or several ranks during different steps. A rank that acted on
# it by itself would leave the others waiting in their next collective. So a signal is only noted;
# the ranks' notes are summed in a reduction that takes place anyway (`step.QueuedStep`), and the
# sum, the same on every rank, is the decision.
#
# This module imports nothing slow, so that signals are noted also while torch is being imported.


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
        self.has_problem: Callable[[], bool] = no_problem
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
            signal.signal(number, lambda n, _: self._noted.add(n))
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


def no_problem() -> bool:
    """Return False: nothing has been asked to look for problems yet."""
    return False


class AttemptReporter:
    """Reports to one attempt, after `join` or `begin`; before that it reports nothing.

    So the same code runs on ranks other than 0, and in tests that train a run in parts.
    """

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._heartbeat: _Heartbeat | None = None
        self._phase: str = Phase.STARTING
        self._step = 0
        self.warn = WarnOnce()
        """Takes what goes wrong beside training."""

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
        """Take the run and begin an attempt. Raises RunBusy when another process trains it."""
        check_apart(run)
        self._attempt = Attempt.begin(run, owner)
        self._heartbeat = _Heartbeat(self._attempt, self._abandon)

    def phase(self, phase: str, step: int, saved: int | None = None) -> None:
        """Report that another phase begins.

        Args:
            phase: The `Phase`.
            step: Steps done.
            saved: The step of a checkpoint that was completed just before.
        """
        self._phase, self._step = phase, step
        if self._attempt is not None:
            with self._warning_of(self._attempt.directory):
                self._attempt.phase(phase, step, saved)

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
        """Report a sign of life after a step or a pass of an evaluation. It is cheap to call."""
        self._step = step
        if self._attempt is not None:
            with self._warning_of(self._attempt.directory):
                self._attempt.progress(step, self._phase)

    @contextlib.contextmanager
    def _warning_of(self, directory: Path) -> Iterator[None]:
        """Warn once about a status that the disk refuses: it is no state, so training goes on."""
        try:
            yield
        except OSError as error:
            self.warn(
                "status",
                f"{directory}: status cannot be written ({error.strerror}); training goes on, and "
                "`launcher status` may show an older step",
            )

    def end(self, code: int, reason: str, outcome: Outcome | None = None) -> None:
        """End the attempt if this process holds it; a second call changes nothing.

        Args:
            code: The exit code.
            reason: One line for people.
            outcome: What that means; by default what the code says.
        """
        # Only a holder has a heartbeat: a supervisor ends its own attempt.
        if self._heartbeat is None or self._attempt is None:
            return
        self._heartbeat.stop()
        self._heartbeat = None
        # A full disk may be the very reason why the run ends.
        with contextlib.suppress(OSError):
            self._attempt.end(outcome or outcome_of(code), code, reason, self._step)

    def _abandon(self) -> None:
        """End this process at once, whatever it is doing: the run is not its own any more."""
        assert self._attempt is not None
        reason = self._attempt.why_lost() or "this attempt holds its run no longer"
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
        """End the attempt if the block failed; after success the caller has said how it ended.

        Raises:
            RunFailed: In place of a failure that came from the run's directory being gone.
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


class _Heartbeat(threading.Thread):
    """Renews an attempt's lease, and calls `abandon` when a newer attempt has taken the run."""

    def __init__(self, attempt: Attempt, abandon: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self._attempt, self._abandon, self._over = attempt, abandon, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            if not self._attempt.heartbeat():
                self._abandon()

    def stop(self) -> None:
        self._over.set()
        self.join()
