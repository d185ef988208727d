"""Make attempts at a run: start the ranks, watch them from outside, and decide what follows.

The supervisor is a process beside the ranks that never imports torch. It renews the run's lease,
passes signals on, ends ranks that hang, and records how the attempt ended. It does the same on a
single machine (local.py) and inside a Slurm job (srun.py). Only two things differ: where the ranks
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

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.launcher.node.ranks import Ranks
from pretrain.launcher.node.repeater import Repeater
from pretrain.launcher.node.series import IsOurs, why_permanent, without_progress
from pretrain.launcher.node.signals import STOP_SIGNALS, Signals
from pretrain.launcher.node.suspension import LOOK_SECONDS, SuspensionClock
from pretrain.launcher.node.verdict import NotStarted, Verdict, judge
from pretrain.launcher.node.waiting import waiting
from pretrain.launcher.node.watchdog import Watchdog
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import read_attempt, read_attempts, steps_done
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.lock import HEARTBEAT_SECONDS, Attempt
from pretrain.rundir.states import (
    STARTED_AGAIN,
    ExitCode,
    Outcome,
    Phase,
    exit_code_of,
    in_words,
    outcome_of,
)
from pretrain.rundir.unsaved import saving_then_stopping

POLL_SECONDS = 0.02
"""Time between two looks at the ranks and the signals."""
EVALUATE_SECONDS = 5.0
"""Time between two looks for checkpoints to evaluate."""
STOP_SECONDS = 2.0
"""The time that the end of an attempt waits for a call in a thread before it is recorded."""
ANSWER_SECONDS = 1.0
"""The time that Slurm is waited for before the end of an attempt is recorded without its answer."""
DUMP_SECONDS = 3.0
"""Time that hung ranks are given to write their stacks."""


@dataclass(frozen=True)
class End:
    """The end of an attempt, and if another one follows."""

    attempt: Attempt
    outcome: Outcome
    code: int
    """The exit code of the ranks, which the caller exits with when no attempt follows."""
    reason: str
    """One line for the user."""
    nodes: tuple[str, ...]
    """The nodes that a failure came from."""
    again: bool
    """True when the caller must make another attempt."""


def never() -> bool:
    """Return False: nothing preempts the ranks of a single machine."""
    return False


@dataclass
class Supervisor:
    """Make attempts at a run, one at a time."""

    config: RunConfig
    signals: Signals
    is_ours: IsOurs
    """Tells which earlier attempts count as restarts of this series: those of this process, or of
    this Slurm job. A new start by hand gets all of recovery.max_restarts again."""
    local: bool = False
    """True on a single machine. A user is at the terminal: a second signal ends the ranks, and what
    rank 0 printed there is not repeated. A failure before the first step is final when it repeats;
    under Slurm the next attempt may run on another node, where it works."""
    is_preempted: Callable[[], bool] = never
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
        # At a terminal Ctrl-Z stops this process alone.
        if not self.local:
            threads.append(Repeater(LOOK_SECONDS, SuspensionClock(attempt)))
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
                verdict = Verdict(Outcome.RESTART, verdict.code, reason)
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
        reason = f"{end.reason}; {why}"
        self._record(end.attempt, Verdict(Outcome.GAVE_UP, end.code, reason, end.nodes))
        say(f"attempt {end.attempt.number}: {why}")

    def _ask_if_preempted(self, attempt: Attempt, verdict: Verdict) -> bool:
        """Ask Slurm if it took the nodes away, and record the verdict first if that takes long.

        After `scancel` Slurm kills this process within KillWait, and then the end must be written.
        """
        answer: list[bool] = []
        asking = threading.Thread(target=lambda: answer.append(self.is_preempted()), daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS)
        if asking.is_alive():
            self._record(attempt, verdict)
            with waiting(attempt.directory, "Slurm's word on whether it preempted the job"):
                asking.join()
        return answer == [True]

    # ---- while the ranks run ---------------------------------------------------------------------
    def _watch(self, attempt: Attempt, ranks: Ranks, lost: threading.Event) -> Verdict:
        """Wait until the ranks have ended, or end them, and return what that means.

        Args:
            attempt: The attempt.
            ranks: Its ranks, running.
            lost: Set by the heartbeat thread when another attempt has taken the run over.
        """
        recovery, steps = self.config.recovery, self.config.train.num_steps
        watchdog = Watchdog(attempt.directory, recovery.hang_seconds, recovery.startup_seconds)
        while True:
            # Only on a single machine. Under Slurm SIGTERM may be repeated while the ranks save (by
            # `launcher cancel --save`, or by Slurm itself), which must not cut the save short.
            if self.local and self.signals.stops > 1:
                if signal.SIGINT not in self.signals.received[1:]:
                    return Verdict(Outcome.STOPPED, ranks.end(), "ended by a second signal")
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
                # At once and without a checkpoint: the other attempt writes to the same directory.
                ranks.kill()
                reason = (
                    "another attempt has taken over the run, because this one sent no heartbeat "
                    "for too long"
                )
                return Verdict(Outcome.SUPERSEDED, ExitCode.FAILED, reason)
            if stuck := watchdog.stuck():
                if ranks.have_failed():
                    # The others wait for one that has ended, and Slurm is slow to end them.
                    return judge(attempt, ranks.end(), ranks, steps, self.signals.stops > 0)
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
                hint = "; a second signal ends them" if self.local else ""
                say(f"{signal.Signals(number).name}: asked the processes to stop{hint}")
            # The one signal on which ranks save and stop, whatever they are started by.
            ranks.signal(signal.SIGTERM if number in STOP_SIGNALS else number)

    # ---- when the ranks have ended ---------------------------------------------------------------
    def _conclude(self, attempt: Attempt, verdict: Verdict) -> End:
        """Decide if another attempt follows, then record and print how this one ended."""
        recovery = self.config.recovery
        # A signal to stop may also have come after the ranks ended; a preemption sends one itself.
        again = (
            verdict.outcome in STARTED_AGAIN
            and (verdict.outcome == Outcome.RESTART or not self.signals.stops)
            and recovery.max_restarts > 0
        )
        if again:
            records = read_attempts(attempt.run)
            count = without_progress(records, self.is_ours)
            if why := why_permanent(
                records, verdict.code, count, recovery.max_restarts, self.local
            ):
                reason = f"{verdict.reason}; given up: {why}"
                verdict, again = (
                    Verdict(Outcome.GAVE_UP, verdict.code, reason, verdict.nodes),
                    False,
                )
            else:
                saved = newest_checkpoint_step(attempt.run)
                start = "from scratch" if saved is None else f"from step {saved}"
                limit = f"{count} of {recovery.max_restarts} without progress"
                message = f"attempt {attempt.number}: {verdict.reason}; starting again {start}"
                say(f"{message} ({limit})" if count else message)
        self._record(attempt, verdict)
        # On a single machine the ranks print how they ended, except for what the launcher decides.
        decided_here = verdict.outcome in (
            Outcome.HUNG,
            Outcome.GAVE_UP,
            Outcome.NO_SPACE,
            Outcome.SUPERSEDED,
        )
        if not again and (decided_here or not self.local):
            say(f"attempt {attempt.number}: {in_words(verdict.outcome)}: {verdict.reason}")
        return End(attempt, *verdict, again)

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
                "Free disk space; the run can be started again"
            )
