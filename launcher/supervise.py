"""Make attempts at a run: start the ranks, watch them from outside, and decide what follows.

The supervisor is a process beside the ranks that never imports torch. It renews the run's lease,
passes signals on, ends ranks that hang, and records how the attempt ended. It does the same on a
single machine and inside a Slurm job. Only two things differ: where the ranks run (`Ranks`), and
how the caller makes another attempt. `launcher local` starts it in the same process. So does a
Slurm job as long as it has enough nodes and time; otherwise the job is requeued.

The consequence of each outcome of an attempt:

- FINISHED: every step is done, according to the newest checkpoint and to the last progress that the
  ranks reported. Exit code 0 without these is a failure. No attempt follows.
- RESTART: the ranks saved on SIGUSR1, which Slurm sends before the time limit, or the job was
  preempted. Another attempt follows.
- FAILED, HUNG: a rank failed, or the watchdog ended the ranks. Another attempt follows, unless the
  failure looks permanent; then the outcome becomes GAVE_UP.
- DIVERGED: the ranks found that values differ which must be equal. As after a failure, another
  attempt follows. It starts from a good checkpoint, because the ranks compare before each save.
- POISONED: numbers were not finite. Another attempt follows, as after a failure, unless a replay of
  the steps from a proven checkpoint has produced them again. If this happened twice from a
  checkpoint on probation, or in a replay from it, the next attempt starts from the one before it.
- STOPPED: a user or Slurm asked the run to stop. No attempt follows, even if the ranks failed to
  save.
- REFUSED: the input is wrong, and would be wrong again. No attempt follows.
- GAVE_UP: too many attempts in a row without a new checkpoint, the same failure twice, or a job
  that Slurm did not requeue. No attempt follows, and the user has to act.
- NO_SPACE: the disk is full, and would still be full for another attempt. No attempt follows.
- SUPERSEDED: another attempt owns the run. This attempt ends without writing to the run.

Nor does an attempt follow after a signal to stop, or if recovery.max_restarts is 0.
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
from pretrain.processes import Repeater, in_background
from pretrain.rundir.attempts import (
    HEARTBEAT_SECONDS,
    LOOKS,
    PROGRESS,
    PROGRESS_SECONDS,
    Attempt,
    AttemptRecord,
    Cause,
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

    The handler only appends to a list, on which the supervisor's loop acts, because a handler can
    interrupt the process at any instruction, where almost nothing may be done safely.

    A signal that this process already ignores stays ignored, so that a run started with nohup
    survives the SIGHUP of a terminal that is closed.

    With `even_ignored`, ignored signals are recorded too, and ignored again on leaving the context:
    a batch script starts the launcher with these signals ignored, so that a signal that comes after
    the job's work is done does not change the exit code.
    """

    def __init__(self, *numbers: int, even_ignored: bool = False) -> None:
        self.received: list[int] = []
        """The signals received so far, oldest first."""
        self._numbers, self._even_ignored = numbers, even_ignored
        # Any, because signal.signal may return None, which the type of its argument leaves out.
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in self._numbers:
            if self._even_ignored or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._record)
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
        # A job inherits variables from the job that submits it, so the variable counts only if it
        # names an ancestor.
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


# ---- Detect from an attempt's progress file that its ranks are stuck ----
# Ranks that hang in a collective operation cannot report it themselves, so the check is made
# outside of them. Rank 0 replaces the file `progress` in the attempt's directory while it works,
# ten times within recovery.hang_seconds or every ten seconds
# (`pretrain.rundir.attempts.Attempt.progress`).


WORKING = (Phase.TRAINING, Phase.EVALUATING)
"""Phases in which every step reports progress, so recovery.hang_seconds applies. In the others
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

        Cheap to call often, because it reads the file only as often as rank 0 writes it.
        """
        passed = time.monotonic() - self._last_look
        if passed < self._pause:
            return None
        self._last_look += passed
        progress = read_progress(self._directory)
        # The modification time as well, because on a full disk rank 0 can renew only that.
        seen = progress, _modified_at(self._directory / PROGRESS)
        if seen != self._seen:
            self._seen, self._idle = seen, 0.0
            return None
        # If this process was suspended (a paused node or laptop), so were the ranks. So a long gap
        # between two looks counts only as much as two ordinary ones.
        self._idle += min(passed, 2 * self._pause)
        phase, step = (progress.phase, progress.step) if progress else (Phase.STARTING, 0)
        limit = self._hang if phase in WORKING else self._startup
        if self._idle <= limit:
            return None
        return f"no progress for {limit:g} s while {phase}, at step {step}"


def _modified_at(path: Path) -> int:
    """Return a file's modification time in nanoseconds, 0 if it cannot be read."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# ---- Define the interface of the ranks that a supervisor watches ----
# There are two implementations: `LocalRanks` (ranks.py) starts them as processes of this machine,
# `SrunRanks` starts them with srun on the nodes of a Slurm job.


class Ranks(Protocol):
    """The ranks of one attempt, which have been started."""

    failure: str
    """The first failure, in one line for the user. Set when `poll` returns a code other than 0."""

    nodes: tuple[str, ...]
    """The nodes that the failure came from, if known. Set with `failure`."""

    def poll(self) -> int | None:
        """Return None while the ranks run, then one exit code for all of them.

        The code is 0 if every rank ended with 0, else that of the rank that failed first (128 + n
        for signal n). Only the first failure counts, because the other ranks are ended as its
        consequence.
        """

    def signal(self, number: int) -> None:
        """Send a signal to every rank."""

    def stuck_nodes(self) -> tuple[str, ...]:
        """Return the nodes of ranks that hang by themselves, by the stacks written since SIGUSR2.

        Ranks that only wait for them in a collective operation are left out. If the stacks do not
        tell which ranks hang, the result is empty.
        """

    def kill(self) -> None:
        """End every rank at once, without letting it save, and wait until all are gone."""


# ---- Judge how an attempt ended, by its newest checkpoint and the last report of its ranks ----
# An exit code alone proves nothing: srun ends with 0 after "Timed out waiting for job step", and so
# does a step that was cancelled during a save.


class Verdict(NamedTuple):
    """The meaning of the end of the ranks, before restarts are counted."""

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

    The order matters: a code that the ranks chose takes precedence over the signals that were sent,
    and after a signal to stop no failure leads to another attempt.

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
        # The code is changed, because exit code 0 would be taken for success.
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
        # A signal to stop may have come while the ranks were saving for a restart.
        return Verdict(Outcome.STOPPED if is_asked else Outcome.RESTART, code, save)
    if is_asked:
        return Verdict(Outcome.STOPPED, code, f"asked to stop at {at}; {save}: {failure}")
    return Verdict(Outcome.FAILED, code, f"{failure}, at {at}", ranks.nodes)


def saved_in(record: AttemptRecord) -> int | None:
    """Return the step of the newest checkpoint if this attempt has saved it, else None."""
    newest = newest_checkpoint_step(record.directory.parents[1])
    # Also checked by its own report, as an attempt that went back may save the same step again.
    is_new = newest != record.owner.checkpoint_step or any(
        mark.saved == newest for mark in record.phases
    )
    return newest if is_new else None


def _missing(record: AttemptRecord, num_steps: int) -> str:
    """Return what is missing in the proof that a run is done: rank 0's last word or a checkpoint.

    A run that began at its last step, from another run's checkpoint, need not have saved one.
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
"""Returns whether an earlier attempt belongs to this series of restarts."""


def without_progress(records: Sequence[AttemptRecord], is_ours: IsOurs) -> int:
    """Return how many attempts in a row, up to the last, ended without a new checkpoint.

    An attempt made progress if the next attempt began from a newer checkpoint than it did; for the
    last attempt, the run's newest checkpoint is compared. Counting stops at an attempt that made
    progress, that finished or gave up, or that belongs to an earlier series.

    Args:
        records: All attempts at a run, oldest first.
        is_ours: Returns whether an attempt belongs to this series of restarts.
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
        count: Attempts in a row without a new checkpoint, including this one.
        most: recovery.max_restarts.
        local: True on a single machine, where a repeated failure before the first step is final.
            Under Slurm the next attempt may run on another node, where it works.
        goes_back: The next attempt begins from an earlier checkpoint than this one did.
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
    # A bug, or a loss that is nan, fails twice with the same code at the same step. If a signal
    # ended a rank, the cause may have been its node (out of memory, a fault), so signals do not
    # count as the same failure.
    same_end = (before.ended.code, before.ended.step) == (code, steps_done(now.directory))
    both_trained = all(
        any(phase.phase == Phase.TRAINING for phase in record.phases) for record in (before, now)
    )
    if same_end and code < SIGNAL_CODE and (local or both_trained):
        return "the attempt before failed in the same way at the same step"
    return None


# ---- Determine which nodes a run should not use, from how its attempts ended ----


MOST_FAILURES = 1
"""A node is not used any more after more failures than this came from it."""


def count_failures(records: Sequence[AttemptRecord]) -> Counter[str]:
    """Return, for each node, how many attempts ended by a failure that came from it."""
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
    # A preflight or a replay identifies a node and the cause with certainty, so once is enough.
    checks = [record.preflight for record in records if record.preflight]
    replays = [record.diagnosis for record in records if record.diagnosis]
    failed |= {d.host: d.what for d in replays if d.host and d.kind == Cause.PERSISTENT}
    return failed | {node: cause for check in checks for node, cause in check.faults.items()}


POLL_SECONDS = 0.02
"""Time between two checks of the ranks and the signals."""
EVALUATE_SECONDS = 5.0
"""Time between two searches for checkpoints to evaluate."""
ANSWER_SECONDS = 1.0
"""How long to wait for Slurm before the end of an attempt is recorded without Slurm's answer."""
DUMP_SECONDS = 3.0
"""Time that hung ranks are given to write their stacks."""
STOP_SECONDS = 2.0
"""How long the end of an attempt waits for each of its threads, as a file server may be slow."""


class End(NamedTuple):
    """The end of an attempt, and whether another one follows."""

    attempt: Attempt
    verdict: Verdict
    """If no attempt follows, its code is the exit code of the caller."""
    again: bool
    """True if the caller must make another attempt."""


@dataclass
class Supervisor:
    """Make attempts at a run, one at a time."""

    config: RunConfig
    signals: Signals
    is_ours: IsOurs
    """Returns whether an earlier attempt counts as a restart of this series, which is that of this
    process or this Slurm job. A new start by hand gets all of recovery.max_restarts again."""
    local: bool = False
    """True on a single machine. A user is at the terminal, so a second Ctrl-C ends the ranks, and
    messages that rank 0 printed there are not repeated. A repeated failure before the first step is
    final; under Slurm the next attempt may run on another node, where it works."""
    is_preempted: Callable[[], bool] = lambda: False
    """Returns, for a stopped attempt, whether Slurm took its nodes away for another job. If so, the
    run is started again."""
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
                in a thread, and once more with True if no attempt follows.

        Returns:
            How the attempt ended. It has been recorded in the attempt's ended.json and printed.

        Raises:
            Exception: Whatever `start` raises, after the attempt has been recorded as failed.
        """
        # If a node died, its attempt has no outcome, because the supervisor died too, and Slurm
        # requeued the job by itself. So the limit is also checked before the start, or such a run
        # would be started forever.
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
            # Started before the threads: a fork copies only the calling thread, and a lock that
            # another thread holds at that moment stays locked in the child forever.
            ranks = start(attempt)
            for thread in threads:
                thread.start()
            verdict = self._watch(attempt, ranks, lost)
            # Slurm may take a while to answer, so this is asked while the heartbeat still runs.
            if verdict.outcome == Outcome.STOPPED and self._ask_if_preempted(attempt, verdict):
                reason = f"preempted; {verdict.reason}"
                verdict = verdict._replace(outcome=Outcome.RESTART, reason=reason)
        except NotStarted as error:
            verdict = Verdict(Outcome.FAILED, ExitCode.FAILED, str(error), error.nodes)
        except BaseException as error:
            if ranks is not None:
                ranks.kill()
            code = exit_code_of(error)
            # Our own errors have messages for users; other errors need the name of their class.
            is_ours = isinstance(error, ConfigError | RunFailed)
            reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
            self._record(attempt, Verdict(outcome_of(code), code, reason))
            raise
        finally:
            # In reverse, so that the heartbeat continues while a call to `evaluate` ends. The wait
            # is limited, because Slurm may take minutes to answer that call, and the job may end.
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
        """Ask Slurm whether it took the nodes away; if that takes long, record the verdict first.

        After `scancel` Slurm kills this process within KillWait, and by then the end of the attempt
        must be recorded.
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
            lost: Set by the heartbeat thread when this attempt no longer holds the run.
        """
        recovery, steps = self.config.recovery, self.config.train.num_steps
        watchdog = Watchdog(attempt.directory, recovery.hang_seconds, recovery.startup_seconds)
        while True:
            # Only Ctrl-C pressed twice ends the ranks at once. SIGTERM may be repeated while the
            # ranks save (by a service manager, `launcher cancel --save`, or Slurm), and must not
            # interrupt the save.
            if self.local and self.signals.stops > 1 and signal.SIGINT in self.signals.received[1:]:
                ranks.kill()
                return Verdict(Outcome.STOPPED, ExitCode.INTERRUPTED, "left at once on Ctrl-C")
            if verdict := self._end_before_work(attempt, ranks):
                return verdict
            self._pass_on_signals(attempt, ranks)
            code = ranks.poll()
            # Checked first, because ranks that have ended are judged by their exit code, even if
            # the run was lost or the watchdog fired at the same moment.
            if code is not None:
                return judge(attempt, code, ranks, steps, self.signals.stops > 0)
            if lost.is_set():
                # At once and without a checkpoint, because the directory is gone or belongs to
                # another attempt.
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
            The nodes of the ranks that hang by themselves, if the stacks show them.
        """
        say(
            f"attempt {attempt.number}: {stuck}; every rank writes its stacks to its log and is "
            "then killed"
        )
        nodes: tuple[str, ...] = ()
        # `pretrain train` registers faulthandler for SIGUSR2. For a suspended rank (SIGSTOP) the
        # signal stays pending, so its silence reveals its node. SIGCONT then lets it write stacks.
        for number in (signal.SIGUSR2, signal.SIGCONT):
            if ranks.poll() is None:
                ranks.signal(number)
                time.sleep(DUMP_SECONDS)
                nodes = nodes or ranks.stuck_nodes()
        return nodes

    def _end_before_work(self, attempt: Attempt, ranks: Ranks) -> Verdict | None:
        """End ranks that are asked to stop or to start again before they have begun to work.

        Under Slurm a starting rank has no handlers yet, and srun passes nothing on before its tasks
        run, so a signal would kill ranks or be lost. They have nothing to save yet. On a single
        machine this also holds while they load, because a user who presses Ctrl-C should not have
        to wait until training begins.
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
            # SIGTERM is the one signal on which ranks save and stop, however they were started.
            ranks.signal(signal.SIGTERM if number in STOP_SIGNALS else number)

    # ---- when the ranks have ended ---------------------------------------------------------------
    def _conclude(self, attempt: Attempt, verdict: Verdict) -> End:
        """Decide whether another attempt follows, then record and print how this one ended."""
        recovery = self.config.recovery
        if verdict.outcome != Outcome.FINISHED and (why := attempt.why_lost()):
            # Checked before the run's records are read, as they may be gone or another attempt's.
            outcome = Outcome.SUPERSEDED if attempt.superseded() else Outcome.GAVE_UP
            verdict = Verdict(outcome, verdict.code or ExitCode.FAILED, why)
        # A signal to stop may also have come after the ranks ended. With outcome RESTART it does
        # not count, because a preemption itself sends one.
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
        """Write the attempt's ended.json, which also releases the run."""
        finished = verdict.outcome == Outcome.FINISHED
        steps = self.config.train.num_steps if finished else steps_done(attempt.directory)
        try:
            attempt.end(verdict.outcome, verdict.code, verdict.reason, steps, verdict.nodes)
        except OSError as error:
            # The disk may be full. This does not block the run, because the next attempt notices
            # that this process has ended.
            say(
                f"{attempt.directory}: cannot record how the attempt ended ({error.strerror}). "
                f"{remedy(error)}; the run can be started again"
            )
