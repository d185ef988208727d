"""Make attempts at a run: start the ranks, watch them from outside, and decide what follows.

The supervisor is a process beside the ranks that never imports torch. It renews the run's lease,
passes signals on, ends ranks that hang, and records how the attempt ended. It does the same on a
single machine and inside a Slurm job. Only two things differ: where the ranks
run (`Ranks`), and how the caller makes another attempt: `launcher local` starts one itself, and so
does a Slurm job while its nodes and its time suffice; else it has itself requeued.

What each outcome of an attempt leads to:

- FINISHED: every step is done. The newest checkpoint and the ranks' own last word say so; an exit
  code of 0 alone is a failure. No attempt follows.
- RESTART: the ranks saved on SIGUSR1, which Slurm sends before the time limit, or the job was
  preempted. Another attempt follows.
- FAILED, HUNG: a rank failed, or the watchdog ended the ranks. Another attempt follows, unless the
  failure looks permanent; then the outcome becomes GAVE_UP.
- DIVERGED: the ranks found that they differ in what must be equal. As after a failure, another
  attempt follows. It starts from a good checkpoint, because the ranks compare before each save.
- POISONED: numbers were not finite. Another attempt follows, as after a failure, unless a replay of
  the steps from a proven checkpoint has shown them again. A checkpoint on probation from which that
  happened twice, or in a replay, is passed over: the attempt begins with the one before it.
- STOPPED: a user or Slurm asked the run to stop. No attempt follows, even when the ranks failed to
  save.
- REFUSED: the input is wrong, and would be wrong again. No attempt follows.
- GAVE_UP: too many attempts in a row without a new checkpoint, the same failure twice, or a job
  that Slurm did not requeue. No attempt follows, and the user has to act.
- NO_SPACE: the disk is full, and another attempt would find it as full. No attempt follows.
- SUPERSEDED: another attempt owns the run. This one touches nothing and ends.

No attempt follows either after a signal to stop, or when recovery.max_restarts is 0.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.config.errors import remedy, say
from pretrain.launcher import slurm
from pretrain.launcher.agent import BLOCKED_AT_START
from pretrain.processes import in_background
from pretrain.rundir.attempts import (
    HEARTBEAT_SECONDS,
    LOOKS,
    PROGRESS,
    PROGRESS_SECONDS,
    Attempt,
    AttemptRecord,
    Cause,
    Owner,
    Progress,
    poisoned,
    read_attempt,
    read_attempts,
    read_progress,
    said_done,
    steps_done,
)
from pretrain.rundir.checkpoints import (
    checkpoint_step,
    complete_checkpoints,
    newest_checkpoint_step,
)
from pretrain.rundir.files import read_text
from pretrain.rundir.history import saving_then_stopping
from pretrain.rundir.paths import (
    STARTED_AGAIN,
    WORK,
    ExitCode,
    Outcome,
    Phase,
    exit_code_of,
    in_words,
    outcome_of,
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to stop; no attempt follows one of them."""
JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that the batch script of a Slurm job holds and passes on (slurm/job.sbatch)."""
BATCH_SCRIPT = "PRETRAIN_BATCH_SCRIPT"
"""The variable in which the batch script gives its process id."""


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
    (pretrain/training/reporter.py), srun once it has started its tasks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_AT_START)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- Call a function every few seconds, in a thread beside what the process does ----


class Repeater(threading.Thread):
    """Call a function at once and then every few seconds, in a thread, until `stop`."""

    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        # So that Ctrl-C does not wait for a call that is under way.
        super().__init__(daemon=True)
        self._seconds, self._function, self._over = seconds, function, threading.Event()
        self._result: Any = None

    def run(self) -> None:
        """Run the thread; threading.Thread.start calls this."""
        while True:
            self._result = self._function()
            if self._over.wait(self._seconds):
                return

    def new(self) -> Any:
        """Return the result of the newest call that has ended since the last time, or None."""
        result, self._result = self._result, None
        return result

    def stop(self, seconds: float | None = None) -> None:
        """Stop calling, and wait for a call that is under way, for `seconds` at most."""
        self._over.set()
        if self.is_alive():
            self.join(seconds)


# ---- Tell from an attempt's progress file that its ranks are stuck ----
# Ranks that hang in a collective operation cannot report it themselves, so the check is made
# outside of them. Rank 0 replaces the file `progress` in the attempt's directory while it works,
# ten times within recovery.hang_seconds or every ten seconds
# (`pretrain.rundir.attempts.Attempt.progress`).


WORKING = (Phase.TRAINING, Phase.EVALUATING)
"""Phases in which progress comes with every step, so recovery.hang_seconds applies. In the others
(starting, loading, saving, ending) the limit is recovery.startup_seconds."""


class Watchdog:
    """Watch the progress of one attempt."""

    def __init__(self, directory: Path, hang_seconds: float, startup_seconds: float) -> None:
        """Watch an attempt.

        Args:
            directory: The attempt's directory, RUN/attempts/####.
            hang_seconds: The longest time without progress while training or evaluating.
            startup_seconds: The longest time without progress in every other phase.
        """
        self._directory, self._hang, self._startup = directory, hang_seconds, startup_seconds
        self._pause = min(PROGRESS_SECONDS, hang_seconds / LOOKS, startup_seconds / LOOKS)
        self._last_look, self._idle = time.monotonic(), 0.0
        self._seen: tuple[Progress | None, int] = None, 0

    def stuck(self) -> str | None:
        """Return why the ranks must be ended, or None while they make progress.

        Cheap to call often: it reads the file as seldom as rank 0 writes it.
        """
        passed = time.monotonic() - self._last_look
        if passed < self._pause:
            return None
        self._last_look += passed
        progress = read_progress(self._directory)
        # The time as well: on a full disk rank 0 can renew that alone.
        seen = progress, _modified_at(self._directory / PROGRESS)
        if seen != self._seen:
            self._seen, self._idle = seen, 0.0
            return None
        # When this process was suspended itself (a paused node or laptop), the ranks were too, so a
        # long gap between two looks counts as two ordinary ones and no more.
        self._idle += min(passed, 2 * self._pause)
        phase, step = (progress.phase, progress.step) if progress else (Phase.STARTING, 0)
        limit = self._hang if phase in WORKING else self._startup
        if self._idle <= limit:
            return None
        return f"no progress for {limit:g} s while {phase}, at step {step}"


def _modified_at(path: Path) -> int:
    """Return a file's modification time in nanoseconds, 0 when it cannot be seen."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# ---- Define what a supervisor needs of the ranks that it watches ----
# There are two implementations: `LocalRanks` (ranks.py) starts them as processes of this machine,
# `SrunRanks` starts them with srun on the nodes of a Slurm job.


class Ranks(Protocol):
    """The ranks of one attempt, which have been started."""

    failure: str
    """The first failure, in one line for the user. Set when `poll` returns a code other than 0."""

    nodes: tuple[str, ...]
    """The nodes that the failure came from, where that is known. Set with `failure`."""

    def poll(self) -> int | None:
        """Return None while the ranks run, then the exit code of all of them together.

        That is 0 when every rank ended with 0, else the code of the rank that failed first (128 + n
        for signal n). Only the first failure tells what happened: the other ranks are ended because
        of it.
        """

    def signal(self, number: int) -> None:
        """Send a signal to every rank."""

    def stuck_nodes(self) -> tuple[str, ...]:
        """Return the nodes of ranks that hang by themselves, by the stacks written since SIGUSR2.

        The ranks that only wait for them in a collective operation are left out. Nothing is
        returned where that cannot be told.
        """

    def kill(self) -> None:
        """End every rank at once, without letting it save, and wait until all are gone."""


# ---- Judge how an attempt ended: by its newest checkpoint and its ranks' own last word ----
# An exit code alone proves nothing: srun ends with 0 after "Timed out waiting for job step", and so
# does a step that was cancelled while it saved.


class Verdict(NamedTuple):
    """The meaning of the ranks' end by itself, before restarts are counted."""

    outcome: Outcome
    code: int
    reason: str
    nodes: tuple[str, ...] = ()
    """The nodes that a failure came from."""


class NotStarted(Exception):
    """The ranks of an attempt cannot be started; the message is the reason of its failure."""

    def __init__(self, reason: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.nodes = tuple(nodes)
        """The nodes that are to blame."""


def judge(attempt: Attempt, code: int, ranks: Ranks, num_steps: int, is_asked: bool) -> Verdict:
    """Return what the exit code of ranks that ended by themselves means.

    The order matters: a code that the ranks chose counts before the signals that were sent, and
    after a signal to stop no failure leads to another attempt.

    Args:
        attempt: The attempt.
        code: The exit code of its ranks.
        ranks: The ranks, which have ended.
        num_steps: train.num_steps.
        is_asked: True if a signal to stop was passed on to the ranks.
    """
    record = read_attempt(attempt.directory)
    at, saved = f"step {steps_done(attempt.directory)}", saved_in(record)
    save = f"saved at step {saved}" if saved is not None else f"nothing saved, at {at}"
    failure = ranks.failure
    if code == ExitCode.FINISHED:
        if not (missing := _missing(record, num_steps)):
            return Verdict(Outcome.FINISHED, code, f"at step {num_steps}")
        # Exit code 0 would be taken for success.
        code, failure = ExitCode.FAILED, f"the ranks ended with exit code 0, but {missing}"
    if code == ExitCode.BAD_INPUT:
        return Verdict(Outcome.REFUSED, code, "bad input; see the last lines of the ranks")
    if code == ExitCode.NO_SPACE:
        return Verdict(Outcome.NO_SPACE, code, f"the disk is full, at {at}")
    if code == ExitCode.STOPPED:
        return Verdict(Outcome.STOPPED, code, save)
    if code == ExitCode.DIVERGED and not is_asked:
        reason = f"the ranks differ in what must be equal, at {at}; see the ranks' last lines"
        return Verdict(Outcome.DIVERGED, code, reason)
    found = record.diagnosis
    if code == ExitCode.FAILED and found and found.kind == Cause.PERSISTENT and found.host:
        return Verdict(Outcome.FAILED, code, f"{found.what}, at {at}", (found.host,))
    if code == ExitCode.POISONED and not is_asked:
        return Verdict(Outcome.POISONED, code, f"{failure}, at {at}", ranks.nodes)
    if code == ExitCode.RESTART:
        # A signal to stop may have come while the ranks saved for a restart.
        return Verdict(Outcome.STOPPED if is_asked else Outcome.RESTART, code, save)
    if is_asked:
        return Verdict(Outcome.STOPPED, code, f"asked to stop at {at}; {save}: {failure}")
    return Verdict(Outcome.FAILED, code, f"{failure}, at {at}", ranks.nodes)


def saved_in(record: AttemptRecord) -> int | None:
    """Return the step of the newest checkpoint if this attempt has saved it, else None."""
    newest = newest_checkpoint_step(record.directory.parents[1])
    # Said as well: an attempt that went back may have saved the same step once more.
    is_new = newest != record.owner.checkpoint_step or any(
        mark.saved == newest for mark in record.phases
    )
    return newest if is_new else None


def _missing(record: AttemptRecord, num_steps: int) -> str:
    """Return what is missing of the proof that a run is done: its ranks' last word, a checkpoint.

    A run that began at its last step, with another run's checkpoint, has no step to save.
    """
    if not said_done(record, num_steps):
        last = record.phases[-1] if record.phases else None
        said = f'"{last.phase}", at step {last.step}' if last else "never written"
        return f"rank 0's last word was {said} of {num_steps}"
    newest = newest_checkpoint_step(record.directory.parents[1])
    began = next((mark.step for mark in record.phases if mark.phase in WORK), num_steps)
    done = began if newest is None else newest
    if done >= num_steps:
        return ""
    return f"the newest checkpoint is {'none' if newest is None else f'of step {newest}'}"


# ---- Judge a series of attempts: how many made no progress, and if another one may succeed ----


SIGNAL_CODE = 128
"""The exit code of a process that signal n ended is this plus n."""

IsOurs = Callable[[AttemptRecord], bool]
"""Tells if an earlier attempt belongs to this series of restarts."""


def without_progress(records: Sequence[AttemptRecord], is_ours: IsOurs) -> int:
    """Return how many attempts in a row, up to the last, ended without a new checkpoint.

    An attempt made progress if the next one began with a newer checkpoint than it did; for the last
    attempt, the run's newest checkpoint is compared. Counting stops at an attempt that made
    progress, that finished or gave up, or that belongs to an earlier series.

    Args:
        records: All attempts at a run, oldest first.
        is_ours: Tells if an attempt belongs to this series of restarts.
    """
    if not records:
        return 0
    count = 0
    newest = newest_checkpoint_step(records[0].directory.parents[1])
    for record in reversed(records):
        ended = record.ended
        series_over = ended and ended.outcome in (Outcome.FINISHED, Outcome.GAVE_UP)
        progressed = (newest or 0) > (record.owner.checkpoint_step or 0)
        if series_over or progressed or not is_ours(record):
            return count
        newest, count = record.owner.checkpoint_step, count + 1
    return count


def why_permanent(
    records: Sequence[AttemptRecord],
    code: int,
    count: int,
    most: int,
    local: bool,
    goes_back: bool = False,
) -> str | None:
    """Return why another attempt would fail as well, or None if it may succeed.

    Args:
        records: All attempts at the run; the last is the one that just ended.
        code: Its exit code.
        count: Attempts in a row without a new checkpoint, this one included.
        most: recovery.max_restarts.
        local: True on a single machine: a failure before the first step is final when it repeats.
            Under Slurm the next attempt may run on another node, where it works.
        goes_back: The next attempt begins with an earlier checkpoint, as this one did not.
    """
    if count > most:
        return (
            f"{count} attempts in a row without a new checkpoint (recovery.max_restarts = {most})"
        )
    found = records[-1].diagnosis
    if code == ExitCode.POISONED and found and found.kind == Cause.REPRODUCES and not goes_back:
        return f"a replay from step {found.replayed_from} with the same data fails in the same way"
    if local and found and found.kind == Cause.PERSISTENT and found.host:
        return f"there is no other host than {found.host} to go to"
    now, before = records[-1], records[-2] if count > 1 else None
    if before is None or before.ended is None or goes_back:
        return None
    if before.ended.outcome not in (Outcome.FAILED, Outcome.DIVERGED, Outcome.POISONED):
        return None
    # A bug or a loss that is nan ends twice with the same code at the same step. A rank that a
    # signal ended may have been a victim of its node (out of memory, a fault), so signals do
    # not count as the same failure.
    same_end = (before.ended.code, before.ended.step) == (code, steps_done(now.directory))
    both_trained = all(
        any(phase.phase == Phase.TRAINING for phase in record.phases) for record in (before, now)
    )
    if same_end and code < SIGNAL_CODE and (local or both_trained):
        return "the attempt before failed in the same way at the same step"
    return None


# ---- Tell which nodes of a cluster a run should not use, from how its attempts ended ----


MOST_FAILURES = 1
"""A node from which more of a run's failures came than this is left out."""


def count_failures(records: Sequence[AttemptRecord]) -> Counter[str]:
    """Return how many attempts ended by a failure that came from each node."""
    ends = [record.ended for record in records if record.ended]
    return Counter(node for end in ends for node in set(end.nodes))


def failing_nodes(records: Sequence[AttemptRecord]) -> dict[str, str]:
    """Return the nodes that failed twice or that a preflight found unfit, with the last reason.

    Args:
        records: The attempts to count, such as those of one Slurm job, oldest first.
    """
    ends = [record.ended for record in records if record.ended]
    reasons = {node: end.reason for end in ends for node in end.nodes}
    failures = count_failures(records)
    failed = {node: reasons[node] for node, count in failures.items() if count > MOST_FAILURES}
    # A preflight, and a replay, name a node and its cause for certain, so once is enough.
    checks = [record.preflight for record in records if record.preflight]
    replays = [record.diagnosis for record in records if record.diagnosis]
    failed |= {d.host: d.what for d in replays if d.host and d.kind == Cause.PERSISTENT}
    return failed | {node: cause for check in checks for node, cause in check.faults.items()}


def job_is_over(other: Owner) -> bool | None:
    """Return True if the job of another owner is over, None where Slurm does not say."""
    return slurm.is_over(other.slurm_job_id) if other.slurm_job_id else None


POLL_SECONDS = 0.02
"""Time between two looks at the ranks and the signals."""
EVALUATE_SECONDS = 5.0
"""Time between two looks for checkpoints to evaluate."""
ANSWER_SECONDS = 1.0
"""The time that Slurm is waited for before the end of an attempt is recorded without its answer."""
DUMP_SECONDS = 3.0
"""Time that hung ranks are given to write their stacks."""
STOP_SECONDS = 2.0
"""The time that the end of an attempt gives a thread beside it; a file server may be slow."""


class End(NamedTuple):
    """The end of an attempt, and if another one follows."""

    attempt: Attempt
    verdict: Verdict
    """Its code is what the caller exits with when no attempt follows."""
    again: bool
    """True when the caller must make another attempt."""


@dataclass
class Supervisor:
    """Make attempts at a run, one at a time."""

    config: RunConfig
    signals: Signals
    is_ours: IsOurs
    """Tells which earlier attempts count as restarts of this series: those of this process, or of
    this Slurm job. A new start by hand gets all of recovery.max_restarts again."""
    local: bool = False
    """True on a single machine. A user is at the terminal: a second Ctrl-C ends the ranks, and what
    rank 0 printed there is not repeated. A failure before the first step is final when it repeats;
    under Slurm the next attempt may run on another node, where it works."""
    is_preempted: Callable[[], bool] = lambda: False
    """Asks, when an attempt was stopped, if Slurm took the nodes away for another job: then the run
    is to come back."""
    _passed_on: int = 0
    """The number of received signals that were passed on to the ranks."""

    def make_attempt(
        self,
        attempt: Attempt,
        start: Callable[[Attempt], Ranks],
        evaluate: Callable[[bool], None] | None = None,
    ) -> End:
        """Start the ranks, watch them until they end, and record what that means.

        Args:
            attempt: The attempt, which this process has begun (`Attempt.begin`).
            start: Starts the ranks.
            evaluate: Submits the evaluation of new checkpoints. Called with False every few seconds
                in a thread beside training, and with True once more when no attempt follows.

        Returns:
            How the attempt ended. It has been recorded in the attempt's ended.json and printed.

        Raises:
            Exception: Whatever `start` raises, once the attempt is recorded as failed.
        """
        # An attempt whose node died left no outcome: its supervisor died with it, and Slurm
        # requeued the job by itself. So the limit is checked before the start as well, or such a
        # run would be started forever.
        earlier = read_attempts(attempt.run)[:-1]
        if without_progress(earlier, self.is_ours) > self.config.recovery.max_restarts:
            return self._conclude(attempt, Verdict(Outcome.FAILED, ExitCode.FAILED, "not started"))
        lost = threading.Event()

        def renew_lease() -> None:
            if not attempt.heartbeat():
                lost.set()

        threads = [Repeater(HEARTBEAT_SECONDS, renew_lease)]
        if evaluate:
            threads.append(Repeater(EVALUATE_SECONDS, lambda: evaluate(False)))
        ranks = None
        try:
            # Before the threads: a fork copies only the thread that forks, and locks that the
            # others hold at that moment stay locked in the child forever.
            ranks = start(attempt)
            for thread in threads:
                thread.start()
            verdict = self._watch(attempt, ranks, lost)
            # While the heartbeat goes on: Slurm may take a while to answer.
            if verdict.outcome == Outcome.STOPPED and self._ask_if_preempted(attempt, verdict):
                reason = f"preempted; {verdict.reason}"
                verdict = verdict._replace(outcome=Outcome.RESTART, reason=reason)
        except NotStarted as error:
            verdict = Verdict(Outcome.FAILED, ExitCode.FAILED, str(error), error.nodes)
        except BaseException as error:
            if ranks is not None:
                ranks.kill()
            code = exit_code_of(error)
            # The message of our own errors is for the user as it is; others are named.
            is_ours = isinstance(error, ConfigError | RunFailed)
            reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
            self._record(attempt, Verdict(outcome_of(code), code, reason))
            raise
        finally:
            # In reverse, so that the heartbeat goes on while a call to `evaluate` ends. Slurm may
            # take minutes to answer that, and the job's time may be over before.
            for thread in reversed(threads):
                thread.stop(STOP_SECONDS)
        end = self._conclude(attempt, verdict)
        if evaluate and not end.again:
            threads[-1].stop()
            evaluate(True)
        return end

    def give_up(self, end: End, why: str) -> None:
        """Record that the attempt that should have followed `end` cannot be made.

        Args:
            end: An end with `again` set.
            why: The obstacle, in a few words.
        """
        reason = f"{end.verdict.reason}; {why}"
        verdict = end.verdict._replace(outcome=Outcome.GAVE_UP, reason=reason)
        self._record(end.attempt, verdict)
        say(f"attempt {end.attempt.number}: {why}")

    def _ask_if_preempted(self, attempt: Attempt, verdict: Verdict) -> bool:
        """Ask Slurm if it took the nodes away, and record the verdict first if that takes long.

        After `scancel` Slurm kills this process within KillWait, and then the end must be written.
        """
        answer = in_background(self.is_preempted)
        if not wait([answer], ANSWER_SECONDS).done:
            self._record(attempt, verdict)
        return answer.exception() is None and answer.result()

    # ---- while the ranks run ---------------------------------------------------------------------
    def _watch(self, attempt: Attempt, ranks: Ranks, lost: threading.Event) -> Verdict:
        """Wait until the ranks have ended, or end them, and return what that means.

        Args:
            attempt: The attempt.
            ranks: Its ranks, running.
            lost: Set by the heartbeat thread when this attempt holds the run no longer.
        """
        recovery, steps = self.config.recovery, self.config.train.num_steps
        watchdog = Watchdog(attempt.directory, recovery.hang_seconds, recovery.startup_seconds)
        while True:
            # Only a user who presses Ctrl-C twice. SIGTERM may be repeated while the ranks save (by
            # a service manager, `launcher cancel --save`, or Slurm), which must not cut that short.
            if self.local and self.signals.stops > 1 and signal.SIGINT in self.signals.received[1:]:
                ranks.kill()
                return Verdict(Outcome.STOPPED, ExitCode.INTERRUPTED, "left at once on Ctrl-C")
            if verdict := self._end_before_work(attempt, ranks):
                return verdict
            self._pass_on_signals(attempt, ranks)
            code = ranks.poll()
            # Looked at first: ranks that have ended are judged by their exit code, even when the
            # run was lost or nothing moved at the same moment.
            if code is not None:
                return judge(attempt, code, ranks, steps, self.signals.stops > 0)
            if lost.is_set():
                # At once and without a checkpoint: the directory is another attempt's, or gone.
                ranks.kill()
                return Verdict(Outcome.SUPERSEDED, ExitCode.FAILED, "the run was lost")
            if stuck := watchdog.stuck():
                nodes = self._dump_stacks(attempt, ranks, stuck)
                ranks.kill()
                return Verdict(Outcome.HUNG, ExitCode.KILLED, stuck, nodes)
            time.sleep(POLL_SECONDS)

    def _dump_stacks(self, attempt: Attempt, ranks: Ranks, stuck: str) -> tuple[str, ...]:
        """Have every rank write the stacks of its threads into its log, to show where it hangs.

        Returns:
            The nodes of the ranks that hang by themselves, as far as the stacks tell.
        """
        say(
            f"attempt {attempt.number}: {stuck}; every rank writes its stacks to its log and is "
            "then killed"
        )
        nodes: tuple[str, ...] = ()
        # `pretrain train` registers faulthandler for SIGUSR2. A rank that was suspended (SIGSTOP)
        # has SIGUSR2 pending and writes once SIGCONT lets it run, after it has been found silent.
        for number in (signal.SIGUSR2, signal.SIGCONT):
            if ranks.poll() is None:
                ranks.signal(number)
                time.sleep(DUMP_SECONDS)
                nodes = nodes or ranks.stuck_nodes()
        return nodes

    def _end_before_work(self, attempt: Attempt, ranks: Ranks) -> Verdict | None:
        """End ranks that are asked to stop or to start again before they have begun to work.

        Under Slurm a rank that starts has no handlers yet, and srun passes nothing on before its
        tasks run, so a signal would kill ranks or be lost. They have nothing to save. Nor have they
        until training begins; who presses Ctrl-C does not wait for that.
        """
        waiting = self.signals.received[self._passed_on :]
        if not waiting or (self.local and signal.SIGINT not in waiting):
            return None
        early = (Phase.STARTING, Phase.LOADING) if self.local else (Phase.STARTING,)
        if any(mark.phase not in early for mark in read_attempt(attempt.directory).phases):
            return None
        self._passed_on += len(waiting)
        ranks.kill()
        reason = "asked while the ranks started; nothing to save"
        if self.local:
            return Verdict(Outcome.STOPPED, ExitCode.INTERRUPTED, reason)
        if self.signals.stops:
            return Verdict(Outcome.STOPPED, ExitCode.STOPPED, reason)
        return Verdict(Outcome.RESTART, ExitCode.RESTART, reason)

    def _pass_on_signals(self, attempt: Attempt, ranks: Ranks) -> None:
        """Pass on the signals that this process received since the last call."""
        for number in self.signals.received[self._passed_on :]:
            self._passed_on += 1
            if number == signal.SIGINT:
                step, saved = steps_done(attempt.directory), newest_checkpoint_step(attempt.run)
                say(saving_then_stopping(step, saved))
            elif number in STOP_SIGNALS:
                say(f"{signal.Signals(number).name}: asked the processes to save and stop")
            # The one signal on which ranks save and stop, whatever they are started by.
            ranks.signal(signal.SIGTERM if number in STOP_SIGNALS else number)

    # ---- when the ranks have ended ---------------------------------------------------------------
    def _conclude(self, attempt: Attempt, verdict: Verdict) -> End:
        """Decide if another attempt follows, then record and print how this one ended."""
        recovery = self.config.recovery
        if verdict.outcome != Outcome.FINISHED and (why := attempt.why_lost()):
            # Before the run's records are looked at: they may be another attempt's, or gone.
            outcome = Outcome.SUPERSEDED if attempt.superseded() else Outcome.GAVE_UP
            verdict = Verdict(outcome, verdict.code or ExitCode.FAILED, why)
        # A signal to stop may also have come after the ranks ended; a preemption sends one itself.
        again = (
            verdict.outcome in STARTED_AGAIN
            and (verdict.outcome == Outcome.RESTART or not self.signals.stops)
            and recovery.max_restarts > 0
        )
        if again:
            records = read_attempts(attempt.run)
            count = without_progress(records, self.is_ours)
            passed_over = poisoned(attempt.run, records, verdict.code)
            if why := why_permanent(
                records, verdict.code, count, recovery.max_restarts, self.local, bool(passed_over)
            ):
                reason, again = f"{verdict.reason}; given up: {why}", False
                verdict = verdict._replace(outcome=Outcome.GAVE_UP, reason=reason)
            else:
                left = [p for p in complete_checkpoints(attempt.run) if p not in passed_over]
                saved = checkpoint_step(left[-1].name) if left else None
                start = "from scratch" if saved is None else f"from step {saved}"
                limit = f"{count} of {recovery.max_restarts} without progress"
                message = f"attempt {attempt.number}: {verdict.reason}; starting again {start}"
                say(f"{message} ({limit})" if count else message)
        self._record(attempt, verdict)
        # On a single machine the ranks print how they ended, except for what the launcher decides.
        ours = (Outcome.HUNG, Outcome.GAVE_UP, Outcome.NO_SPACE, Outcome.SUPERSEDED)
        if not again and (verdict.outcome in ours or not self.local):
            say(f"attempt {attempt.number}: {in_words(verdict.outcome)}: {verdict.reason}")
        return End(attempt, verdict, again)

    def _record(self, attempt: Attempt, verdict: Verdict) -> None:
        """Write the attempt's ended.json, which also gives the run back."""
        finished = verdict.outcome == Outcome.FINISHED
        steps = self.config.train.num_steps if finished else steps_done(attempt.directory)
        try:
            attempt.end(verdict.outcome, verdict.code, verdict.reason, steps, verdict.nodes)
        except OSError as error:
            # As on a full disk. The run is not blocked by that: the next attempt finds that this
            # process has ended.
            say(
                f"{attempt.directory}: cannot record how the attempt ended ({error.strerror}). "
                f"{remedy(error)}; the run can be started again"
            )
