"""Watching one attempt at a run from outside its ranks: heartbeat, watchdog, signals, and what its end means.

The same on a laptop and in a Slurm job; only the step (where the ranks are) and what "again" means differ.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pretrain.config import RunConfig
from pretrain.launcher.node.ranks import Step
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import (
    AttemptRecord,
    Progress,
    read_attempt,
    read_attempts,
    read_progress,
)
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.lock import HEARTBEAT_SECONDS, Attempt
from pretrain.rundir.states import STARTED_AGAIN, ExitCode, Outcome, Phase, in_words

POLL_SECONDS = 0.02
LOOK_SECONDS = 1.0  # between two looks at `progress`
EVALUATE_SECONDS = 5.0  # between two looks for checkpoints to evaluate
DUMP_SECONDS = 3.0  # for the ranks to write their stacks
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WORKING = (Phase.TRAINING, Phase.EVALUATING)


@dataclass(frozen=True)
class End:
    """How an attempt ended, and whether another is to be made."""

    attempt: Attempt
    outcome: str
    code: int
    reason: str
    again: bool


class Signals:
    """Notes the signals sent to this process, for a supervisor to act on. What is ignored already (nohup) stays so."""

    def __init__(self, *numbers: int) -> None:
        self.received: list[int] = []
        self._numbers = numbers
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._before = {
            n: h for n in self._numbers if (h := signal.getsignal(n)) is not signal.SIG_IGN
        }
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    @property
    def stops(self) -> int:
        """How often it was asked to stop."""
        return sum(number in STOPS for number in self.received)


class Repeater(threading.Thread):
    """Calls `function` now and every `seconds`, beside what else goes on, until `stop`."""

    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._seconds, self._function, self._over = seconds, function, threading.Event()

    def run(self) -> None:
        """What the thread does."""
        while True:
            self._function()
            if self._over.wait(self._seconds):
                return

    def stop(self) -> None:
        """Returns when no call is under way."""
        self._over.set()
        if self.is_alive():
            self.join()


class Watchdog:
    """Tells from an attempt's `progress` that its ranks are stuck; whoever is stuck cannot tell it."""

    def __init__(self, directory: Path, hang_seconds: float, startup_seconds: float) -> None:
        self._directory, self._hang, self._startup = directory, hang_seconds, startup_seconds
        self._pause = min(LOOK_SECONDS, hang_seconds / 10, startup_seconds / 10)
        self._last, self._idle = time.monotonic(), 0.0
        self._seen: Progress | None = None

    def stuck(self) -> str | None:
        """Why the ranks are to be ended; None while they move."""
        passed = time.monotonic() - self._last
        if passed < self._pause:
            return None
        self._last += passed
        progress = read_progress(self._directory)
        if progress != self._seen:
            self._seen, self._idle = progress, 0.0
            return None
        self._idle += min(
            passed, 2 * self._pause
        )  # while this process itself was paused, nobody looked
        phase, step = (progress.phase, progress.step) if progress else (Phase.STARTING, 0)
        limit = self._hang if phase in WORKING else self._startup
        return (
            f"no progress for {limit:g} s while {phase}, at step {step}"
            if self._idle > limit
            else None
        )


@dataclass
class Supervisor:
    """Makes attempts at a run, one at a time."""

    config: RunConfig
    signals: Signals
    is_ours: Callable[[AttemptRecord], bool]
    """Which earlier attempts belong to this series, and count as restarts."""
    local: bool = False
    """A second signal ends the ranks; a failure at the start is not the fault of a node that the next try may not get."""
    _passed_on: int = 0

    def make_attempt(
        self,
        attempt: Attempt,
        start: Callable[[Attempt], Step],
        evaluate: Callable[[bool], None] | None = None,
    ) -> End:
        """Starts the ranks, watches them to their end, and says and writes down what it means.

        `evaluate` is called every few seconds meanwhile, and once more, with True, when no attempt follows.
        """
        lost = threading.Event()
        beside = [Repeater(HEARTBEAT_SECONDS, lambda: None if attempt.heartbeat() else lost.set())]
        beside += [Repeater(EVALUATE_SECONDS, lambda: evaluate(False))] if evaluate else []
        died = without_progress(read_attempts(attempt.run)[:-1], self.is_ours)
        if (
            died > self.config.recovery.max_restarts
        ):  # each took its supervisor with it, as a node does
            return self._conclude(attempt, Outcome.FAILED, ExitCode.FAILED, "not started")
        step = None
        try:
            step = start(attempt)  # before there are threads: it forks
            for thread in beside:
                thread.start()
            outcome, code, reason = self._watch(attempt, step, lost)
        except BaseException as error:
            if step is not None:
                step.kill()
            self._write_down(
                attempt, Outcome.FAILED, ExitCode.FAILED, f"{type(error).__name__}: {error}"
            )
            raise
        finally:
            for thread in reversed(beside):
                thread.stop()
        end = self._conclude(attempt, outcome, code, reason)
        if evaluate and not end.again:
            evaluate(True)
        return end

    def give_up(self, end: End, why: str) -> None:
        """`end` asked for another attempt, which cannot be had."""
        self._write_down(end.attempt, Outcome.GAVE_UP, end.code, f"{end.reason}; {why}")
        say(f"attempt {end.attempt.number}: {why}")

    def _watch(self, attempt: Attempt, step: Step, lost: threading.Event) -> tuple[str, int, str]:
        """Until the ranks have ended, or must be ended: outcome, exit code and reason."""
        recovery = self.config.recovery
        watchdog = Watchdog(attempt.directory, recovery.hang_seconds, recovery.startup_seconds)
        while True:
            if self.local and self.signals.stops > 1:
                return Outcome.STOPPED, step.end(), "ended by a second signal"
            self._pass_on_signals(step)
            code = step.poll()
            if code is not None:
                return self._judge(attempt, code, step)
            if lost.is_set():
                step.kill()
                return (
                    Outcome.SUPERSEDED,
                    ExitCode.FAILED,
                    "another attempt has taken the run over: nothing was heard of this one for too long",
                )
            if stuck := watchdog.stuck():
                say(
                    f"attempt {attempt.number}: {stuck}; every rank writes its stacks into its log, then is ended"
                )
                for number in (
                    signal.SIGUSR2,
                    signal.SIGCONT,
                ):  # a stopped rank writes when it goes on
                    if step.poll() is None:
                        step.signal(number)
                        time.sleep(DUMP_SECONDS)
                step.kill()
                return Outcome.HUNG, ExitCode.KILLED, stuck
            time.sleep(POLL_SECONDS)

    def _pass_on_signals(self, step: Step) -> None:
        for number in self.signals.received[self._passed_on :]:
            self._passed_on += 1
            if number in STOPS:
                hint = "; a second signal ends them" if self.local else ""
                say(f"{signal.Signals(number).name}: asked the processes to stop{hint}")
            step.signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _judge(self, attempt: Attempt, code: int, step: Step) -> tuple[str, int, str]:
        """What the ranks' own end means."""
        at = f"step {read_attempt(attempt.directory).step}"
        if code == 0:
            return Outcome.FINISHED, code, f"at step {self.config.train.num_steps}"
        if code == ExitCode.BAD_INPUT:
            return Outcome.REFUSED, code, "bad input, as the ranks' last lines say"
        if code == ExitCode.STOPPED:
            return Outcome.STOPPED, code, f"saved at {at}"
        if self.signals.stops:
            return Outcome.STOPPED, code, f"asked to stop, at {at}, and not saved: {step.failure}"
        if code == ExitCode.RESTART:
            return Outcome.RESTART, code, f"saved at {at}"
        return Outcome.FAILED, code, f"{step.failure}, at {at}"

    def _conclude(self, attempt: Attempt, outcome: str, code: int, reason: str) -> End:
        """Whether to try again, written down and said."""
        again = outcome in STARTED_AGAIN and not self.signals.stops
        if again:
            records, most = read_attempts(attempt.run), self.config.recovery.max_restarts
            count, saved = (
                without_progress(records, self.is_ours),
                newest_checkpoint_step(attempt.run),
            )
            if not most:
                again = False
            elif why := self._hopeless(records, code, count):
                outcome, reason, again = Outcome.GAVE_UP, f"{reason}; given up: {why}", False
            else:
                start = "from scratch" if saved is None else f"from step {saved}"
                limit = f" ({count} of {most} without progress)" if count else ""
                say(f"attempt {attempt.number}: {reason}; starting again {start}{limit}")
        self._write_down(attempt, outcome, code, reason)
        if not again and (
            not self.local or outcome in (Outcome.HUNG, Outcome.GAVE_UP, Outcome.SUPERSEDED)
        ):  # else the ranks have said it
            say(f"attempt {attempt.number}: {in_words(outcome)}: {reason}")
        return End(attempt, outcome, code, reason, again)

    def _hopeless(self, records: list[AttemptRecord], code: int, count: int) -> str | None:
        """Why no further attempt is made, if so."""
        most = self.config.recovery.max_restarts
        if count > most:
            return f"{count} attempts in a row without a new checkpoint (recovery.max_restarts = {most})"
        now, before = records[-1], records[-2] if count > 1 else None
        if before is None or before.ended is None or before.ended.outcome != Outcome.FAILED:
            return None
        same = (before.ended.code, before.ended.step) == (
            code,
            now.step,
        ) and code < 128  # not a signal's
        worked = all(
            any(phase.phase == Phase.TRAINING for phase in record.phases)
            for record in (before, now)
        )
        if same and (self.local or worked):
            return "the attempt before failed in the same way at the same step"
        return None

    def _write_down(self, attempt: Attempt, outcome: str, code: int, reason: str) -> None:
        step = (
            self.config.train.num_steps
            if outcome == Outcome.FINISHED
            else read_attempt(attempt.directory).step
        )
        try:
            attempt.end(outcome, code, reason, step)
        except OSError as error:  # a full disk; the process's end will give the run back
            say(f"{attempt.directory}: the end of the attempt cannot be written ({error.strerror})")


def without_progress(
    records: Sequence[AttemptRecord], is_ours: Callable[[AttemptRecord], bool]
) -> int:
    """How many attempts of this series, up to the last, ended in a row without a newer checkpoint than they began with."""
    count = 0
    if not records:
        return 0
    newest = newest_checkpoint_step(records[0].directory.parents[1])
    for record in reversed(records):
        over = record.ended is not None and record.ended.outcome in (
            Outcome.FINISHED,
            Outcome.GAVE_UP,
        )
        if over or not is_ours(record) or (newest or 0) > (record.owner.checkpoint_step or 0):
            return count
        newest, count = record.owner.checkpoint_step, count + 1
    return count
