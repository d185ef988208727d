"""What the world outside is told of a run: the attempt it belongs to, its phases, its progress, and how it ended.

Rank 0 writes. Under a supervisor the attempt is the supervisor's, which also ends it; a run that was started by hand
holds its own, which locks the run's directory against a second one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from pretrain.config import ConfigError, writing
from pretrain.rundir.attempts import Owner
from pretrain.rundir.lock import HEARTBEAT_SECONDS, Attempt
from pretrain.rundir.paths import claim_version
from pretrain.rundir.states import ExitCode, Outcome, Phase, outcome_of


class Account:
    """Tells nobody anything until `open`; so on every rank but the first, and where tests train a run by parts."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._pulse: _Pulse | None = None
        self._phase: str = Phase.STARTING
        self._step = 0

    def join(self, directory: Path) -> None:
        """The attempt at `directory` is the supervisor's."""
        self._attempt = Attempt.join(directory)

    def begin(self, run: Path, owner: Owner) -> None:
        """Takes the run. Raises RunBusy when somebody else trains it."""
        self._attempt = Attempt.begin(run, owner)
        claim_version(run)
        self._pulse = _Pulse(self._attempt, self._lose)

    def phase(self, phase: str, step: int, saved: int | None = None) -> None:
        """From now on the run is in `phase`, with `step` steps done; `saved` is the step that was saved just before."""
        self._phase, self._step = phase, step
        if self._attempt is not None:
            with writing(self._attempt.directory):
                self._attempt.phase(phase, step, saved)

    @contextlib.contextmanager
    def during(self, phase: str, step: int, saved: int | None = None) -> Iterator[None]:
        """`phase` while the block runs, and training again after it."""
        self.phase(phase, step)
        yield
        self.phase(Phase.TRAINING, step, saved)

    def progress(self, step: int) -> None:
        """A sign of life: a step, or a pass of an evaluation, is done. Cheap; called after each."""
        self._step = step
        if self._attempt is not None:
            with writing(self._attempt.directory):
                self._attempt.progress(step, self._phase)

    def end(self, code: int, reason: str) -> None:
        """How the run ended, where it holds its own attempt; a second end changes nothing."""
        if self._pulse is None or self._attempt is None:
            return
        self._pulse.stop()
        self._pulse = None
        with contextlib.suppress(OSError):  # a full disk may be why it ended
            self._attempt.end(outcome_of(code), code, reason, self._step)

    def _lose(self) -> None:
        """The run is another's, and must not be written to any more: ends the process, whatever it is doing."""
        assert self._attempt is not None
        reason = (
            "another process has taken this run, because this one gave no sign of life for too long"
        )
        print(f"error: {self._attempt.directory}: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self._attempt.end(Outcome.SUPERSEDED, ExitCode.FAILED, reason, self._step)
        os._exit(1)

    def __enter__(self) -> Account:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """After a failure, says so."""
        if isinstance(error, KeyboardInterrupt):
            self.end(ExitCode.INTERRUPTED, "interrupted")
        elif error is not None:
            lines = str(error).splitlines()
            self.end(
                2 if isinstance(error, ConfigError) else 1,
                lines[0] if lines else type(error).__name__,
            )


class _Pulse(threading.Thread):
    """Keeps an attempt alive, and calls `lose` when a newer attempt has taken the run."""

    def __init__(self, attempt: Attempt, lose: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self._attempt, self._lose, self._over = attempt, lose, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            if not self._attempt.heartbeat():
                self._lose()

    def stop(self) -> None:
        self._over.set()
        self.join()
