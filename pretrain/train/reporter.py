"""Report the progress of a run to its attempt: phases, signs of life, and how it ended.

Rank 0 reports. Under a supervisor (`launcher local`, a Slurm job) the attempt is the supervisor's,
which also ends it. A run that was started by hand makes an attempt of its own, which locks the
run's directory against a second trainer.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from pretrain.rundir.attempts import Owner
from pretrain.rundir.fence import Superseded
from pretrain.rundir.lock import HEARTBEAT_SECONDS, Attempt
from pretrain.rundir.paths import check_apart, claim_version
from pretrain.rundir.states import ExitCode, Outcome, Phase, exit_code_of, outcome_of
from pretrain.rundir.warn import WarnOnce


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
        claim_version(run)
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
        """End this process at once, whatever it is doing: another attempt writes to the run now."""
        assert self._attempt is not None
        reason = "another process has taken this run over, because this one gave no sign of life"
        print(f"error: {self._attempt.directory}: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self._attempt.end(Outcome.SUPERSEDED, ExitCode.FAILED, reason, self._step)
        os._exit(ExitCode.FAILED)

    def __enter__(self) -> AttemptReporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        """End the attempt if the block failed; after success the caller has said how it ended."""
        if isinstance(error, KeyboardInterrupt):
            self.end(ExitCode.INTERRUPTED, "interrupted")
        elif error is not None:
            lines = str(error).splitlines()
            lost = Outcome.SUPERSEDED if isinstance(error, Superseded) else None
            self.end(exit_code_of(error), lines[0] if lines else type(error).__name__, lost)


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
