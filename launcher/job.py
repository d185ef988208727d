"""Make the attempts of a Slurm job: `launcher attempt`, run by the batch script on its first node.

Each attempt is one job step (`SrunRanks`) on nodes that the job holds. After a failure the next
attempt starts within seconds, because the job need not wait in the queue again. The job goes back
to the queue when it has to end anyway (its time limit, a preemption, `launcher requeue`), or when
too few of its nodes or too little of its time are left.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.config.errors import say
from pretrain.config.trajectory import allow_options
from pretrain.launcher import slurm, slurm_job
from pretrain.launcher.evaluations import PendingEvaluations
from pretrain.launcher.preflight import check_nodes
from pretrain.launcher.ranks import SrunRanks, attempt_environment, start_srun
from pretrain.launcher.submit import EARLY_SECONDS, start_seconds
from pretrain.launcher.supervise import (
    SIGNAL_CODE,
    End,
    NotStarted,
    Signals,
    Supervisor,
    Verdict,
    count_failures,
    failing_nodes,
    job_signals,
)
from pretrain.rundir.attempts import (
    HEARTBEAT_SECONDS,
    Attempt,
    AttemptRecord,
    Ended,
    is_finished,
    last_heartbeat,
    read_attempt,
    read_attempts,
)
from pretrain.rundir.jobs import (
    JobRecord,
    LaunchRecord,
    already_done,
    append_job,
    is_done,
    owner_of,
    read_jobs,
    read_launch,
    why_other_code,
)
from pretrain.rundir.paths import (
    STARTED_AGAIN,
    ExitCode,
    JobKind,
    Outcome,
    RunPaths,
    attempt_directory,
    attempt_numbers,
)

# ---- The nodes and the time that a Slurm job has for its next attempt ----


class Allocation:
    """The nodes that this process's job holds, without those that failed."""

    def __init__(
        self, run: Path, job_id: str, launch: LaunchRecord, config: RunConfig, signals: Signals
    ) -> None:
        """Describe the job that this process runs in.

        Args:
            run: The run's directory.
            job_id: The job.
            launch: How the run is started.
            config: The run.
            signals: The signals that this process receives.
        """
        self._run, self._job_id, self._launch, self._config = run, job_id, launch, config
        self._signals = signals
        self.faults: dict[str, str] = {}
        """Nodes on which the preflight found a fault, each with the cause."""
        self.look()

    def look(self) -> None:
        """Ask Slurm about the job: once for the start of an attempt and once after its end."""
        self.state = slurm.job(self._job_id)
        """Slurm's answer; None if it gave none."""
        self.nodes: list[str] = []
        """All nodes that the job holds, without those that died and that --no-kill removed."""
        with contextlib.suppress(slurm.SlurmError):
            held = (self.state and self.state.nodes) or slurm.own_nodes()
            self.nodes = slurm.hostnames(held)

    # ---- nodes ----

    def unusable(self) -> dict[str, str]:
        """Return the nodes that the next attempt must not use, each with the reason."""
        return {
            # Only failures of this start count: for lack of other nodes, Slurm may have allocated
            # a node again that failed in an earlier start.
            **failing_nodes(self._of_this_start()),
            **self.faults,
            **slurm.unusable_nodes(self.nodes),
        }

    def excluded(self) -> dict[str, str]:
        """Return the nodes that no start of this job should use again, each with the reason."""
        return {**failing_nodes(self._records()), **self.faults}

    def without(self) -> list[str]:
        """Return the nodes to exclude from the next start of this job.

        These are the nodes in `excluded`, or none if Slurm could not start the job without them, as
        it would hold such a job forever (BadConstraints).
        """
        options, nodes = self._launch.sbatch, sorted(self.excluded())
        # If Slurm refuses the job even without the option, the cause is another one, such as a
        # limit on waiting jobs.
        if (
            not nodes
            or slurm.can_start(slurm_job.excluding(options, nodes))
            or not slurm.can_start(options)
        ):
            return nodes
        say(f"job {self._job_id}: may start on {', '.join(nodes)} again: Slurm has too few others")
        return []

    def check(self, attempt: Attempt) -> None:
        """Check all nodes of the job, including spare ones, and do not use faulty ones from now on.

        Args:
            attempt: The attempt that is to start on them.

        Raises:
            ConfigError: The run can start on no node, and the cause lies in the run itself.
            NoSpace: No checkpoint fits on the disk.
            RunFailed: The run's directory cannot be written to.
        """
        unusable = self.unusable()
        nodes = [node for node in self.nodes if node not in unusable]
        self.faults |= check_nodes(
            self._launch, self._config, nodes, attempt, self._job_id, self._signals
        )

    def choose(self) -> list[str]:
        """Return the nodes of the next attempt; [] if Slurm names none, so that srun must choose.

        Raises:
            NotStarted: Too few of the job's nodes can be used.
        """
        if not (held := self.nodes):
            return []
        unusable = self.unusable()
        chosen = choose_nodes(held, self._launch.nodes, unusable, count_failures(self._records()))
        if len(chosen) < self._launch.nodes:
            causes = "; ".join(f"{node}: {cause}" for node, cause in unusable.items())
            raise NotStarted(
                f"{self._launch.nodes} nodes are needed, and of the {len(held)} that the job holds "
                f"these cannot be used: {causes or 'none is named'}",
                tuple(unusable),
            )
        return chosen

    # ---- time ----
    def why_too_late(self) -> str | None:
        """Return why the job's time is too short for another attempt; None if it is long enough.

        If there is a time limit, an attempt must already run when Slurm sends the signal to save:
        Slurm sends it once in the life of a job, and only to processes that exist at that time.
        """
        if not (self.state and self.state.ends_at):
            return None
        left = self.state.ends_at - time.time()
        needed = (
            start_seconds(self._run, self._config)
            + self._config.recovery.preflight_seconds
            + EARLY_SECONDS
            + slurm_job.lead_seconds(self._launch.sbatch)
        )
        if left >= needed:
            return None
        return (
            f"{left:.0f} s are left to the time limit, and an attempt needs {needed:.0f} s to "
            "start and to save before the limit"
        )

    def _records(self) -> list[AttemptRecord]:
        """Return the attempts that this job has made, in all of its starts."""
        return [each for each in read_attempts(self._run) if each.owner.is_of_job(self._job_id)]

    def _of_this_start(self) -> list[AttemptRecord]:
        """Return the attempts that this job has made since Slurm last started it."""
        start = self._job_id, slurm.own_restarts()
        return [each for each in read_attempts(self._run) if each.owner.is_of_start(*start)]


def choose_nodes(
    nodes: Sequence[str], count: int, unusable: Collection[str], failures: Counter[str]
) -> list[str]:
    """Return the nodes for the ranks, in Slurm's order; fewer than `count` if too few can be used.

    Nodes that failed less often come first, so that a spare node replaces a node that failed once.

    Args:
        nodes: All nodes of the job, in Slurm's order.
        count: The number of nodes that the ranks need.
        unusable: Nodes that must not be chosen.
        failures: How often each node failed.
    """
    usable = [node for node in nodes if node not in unusable]
    # The sort is stable, so among equal nodes the first ones are chosen.
    chosen = sorted(usable, key=lambda node: failures[node])[:count]
    return [node for node in nodes if node in chosen]


# ---- Requeue a job whose batch host has died: `launcher guard`, a job step on other nodes ----
# A job that was submitted with --no-kill survives the death of a node, even of the node on which
# its batch script ran. Slurm then leaves the job running without a batch script until its time
# limit (seen with 22.05), so another node has to request the requeue.


STEP = "guard"
"""The name of the job step."""
GUARDS = 2
"""The number of nodes with a guard: two, because one of them may be lost as well."""
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
"""The time without a heartbeat of the launcher after which a guard asks about the batch host."""


def guard(run: Path) -> int:
    """Watch the launcher's heartbeat, and requeue this process's job when the batch host is lost.

    Args:
        run: The run's directory.

    Returns:
        The exit code, 0, once the job has been requeued; otherwise this runs until the job ends.

    Raises:
        ConfigError: Not inside a Slurm job.
    """
    job_id = slurm.own_job_id("launcher guard")
    beat, since = _heartbeat(run), time.monotonic()
    while True:
        time.sleep(HEARTBEAT_SECONDS / 5)
        if (newest := _heartbeat(run)) != beat:
            beat, since = newest, time.monotonic()
        elif time.monotonic() - since > SILENCE_SECONDS and slurm.has_lost_batch_host(job_id):
            try:
                slurm.requeue(job_id)
            except slurm.SlurmError as error:
                # The other guard may have requeued the job first.
                say(f"job {job_id}: lost its batch host and cannot be requeued yet ({error})")
                continue
            return 0


@contextmanager
def guarded(run: Path, held: Sequence[str], options: Sequence[str]) -> Iterator[None]:
    """Run guards on nodes other than this one while the block runs.

    Args:
        run: The run's directory.
        held: The job's nodes, this node first.
        options: The job's options of sbatch; without --no-kill there is nothing to guard.
    """
    nodes = held[1:][-GUARDS:]
    if not nodes or not slurm_job.survives_nodes(options):
        yield
        return
    launcher = slurm_job.launcher_command("guard", str(run))
    # The signals are ignored, as Slurm's warning before the time limit goes to all processes.
    shell = ["sh", "-c", f"trap '' USR1 USR2; exec {shlex.join(launcher)}"]
    step = start_srun(slurm_job.own_step(STEP, nodes, options, shell), stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        step.terminate()


def _heartbeat(run: Path) -> float:
    """Return when the newest attempt last renewed its lease."""
    numbers = attempt_numbers(RunPaths(run).attempts)
    return last_heartbeat(attempt_directory(run, max(numbers))) if numbers else 0.0


AWAY_SECONDS = 600.0
"""The time for which a requeue is tried, or an attempt waits, while slurmctld does not answer."""
LOST_SECONDS = 60.0
"""The time after which a step whose end slurmctld does not know is taken to be over. It counts once
the agents have reported the ends of all ranks or are lost, or Slurm calls a node unusable."""
PAUSE_SECONDS = 10.0
"""The time before the next attempt if srun has started no rank."""
REFUSED_SECONDS = 60.0
"""The time for which a refused requeue is tried: Slurm may be ending the job itself."""
REQUEUED_SECONDS = 300.0
"""The time that this process waits for Slurm to end its requeued job."""
RETRY_SECONDS = 2.0
"""Time between two tries of a requeue."""
NOT_REQUEUED = (
    "Slurm did not put the job back into its queue. `launcher requeue {run}` submits it again, "
    "from the newest checkpoint"
)


def attempt(run: Path) -> int:
    """Make attempts at a run that `launcher submit` has put into RUN/launch, until it is over.

    If the run has to continue in another start of the job, the job is requeued and Slurm ends this
    process.

    Args:
        run: The run's directory.

    Returns:
        The exit code of the job.

    Raises:
        ConfigError: Not inside a Slurm job, or RUN/launch is missing or damaged.
        RunBusy: Another job or process trains this run.
        RunFailed: A file cannot be written.
    """
    paths = RunPaths(run)
    if not paths.launch.is_dir():
        raise ConfigError(
            f"{paths.launch}: node {os.uname().nodename} does not see it. Submit the run again: "
            "from its new path if it was moved, else with run.directory on a file system that all "
            "nodes share"
        )
    launch, config = read_launch(run), load_config(paths.launch_config)
    job_id = slurm.own_job_id("launcher attempt")
    if is_finished(run, config.train.num_steps) and is_done(config, launch.allow_changed):
        # A user may requeue the job of a finished run.
        say(already_done(config))
        return 0
    if why := why_other_code(launch):
        say(f"warning: {why}")
    # SIGUSR1 asks for a checkpoint and a restart, SIGTERM for a checkpoint and the end. They come
    # from `launcher requeue` and `launcher cancel --save`; the warning before the time limit goes
    # from Slurm to the ranks directly.
    with job_signals() as signals:
        start = _Start(run, job_id, launch, config, signals)
        with guarded(run, start.nodes, launch.sbatch):
            return start.make_attempts()


class _Start(Allocation):
    """One start of the job: the attempts that it makes in its allocation."""

    _check_nodes = True
    _ranks: SrunRanks | None = None
    _overlap = False
    """Start the next step although slurmctld does not know that the last one is over."""

    def make_attempts(self) -> int:
        """Make one attempt after another. Returns the exit code of the job."""
        launch = self._launch
        train = [launch.python, "-m", "pretrain", "train", str(RunPaths(self._run).launch_config)]
        self._train = [*train, *allow_options(launch.allow_changed)]
        submitted_at = self.state.submitted_at if self.state else None
        # A job keeps its id when it is requeued, so the id marks the attempts of one series.
        supervisor = Supervisor(
            self._config,
            self._signals,
            lambda record: record.owner.is_of_job(self._job_id),
            is_preempted=self._is_preempted,
        )
        if (code := self._take_over()) is not None:
            return code
        while True:
            known = {"num_processes": launch.num_tasks, "submitted_at": submitted_at}
            attempt = Attempt.begin(self._run, owner_of(os.environ, **known), slurm.is_over)
            self._record_job()
            end = supervisor.make_attempt(attempt, self._start, PendingEvaluations(self._run))
            if not end.again:
                return _exit_code(end.verdict)
            if why := self._why_requeue(end):
                if end.verdict.outcome != Outcome.RESTART:
                    say(f"job {self._job_id}: goes back to the queue: {why}")
                if not _requeue(self._job_id, self._signals, self.without()):
                    supervisor.give_up(end, NOT_REQUEUED.format(run=self._run))
                return _exit_code(end.verdict)
            self._check_nodes = True
            self._wait_for_slurm(attempt.directory)
            if self._ranks and not self._ranks.has_started:
                # For example, Slurm refuses steps for some seconds after slurmctld has started.
                self._pause()
            # Only the first attempt of this start of the job has waited in the queue.
            submitted_at = None

    def _record_job(self) -> None:
        """Record this job if it was sent with sbatch, or sbatch ended before it said its id."""
        run, launch = self._run, self._launch
        if all(record.job_id != self._job_id for record in read_jobs(run)):
            name = slurm_job.job_name(".".join(run.parts[-2:]))
            given = self._job_id, JobKind.TRAIN, name, time.time()
            of_site = launch.site["name"], launch.nodes, launch.num_tasks
            append_job(run, JobRecord(*given, *of_site, str(run)))

    def _pause(self) -> None:
        """Wait for PAUSE_SECONDS, or a signal."""
        before = len(self._signals.received)
        _wait_for(lambda: len(self._signals.received) > before, PAUSE_SECONDS)

    def _take_over(self) -> int | None:
        """Take over from a killed launcher of this start of the job, if there was one.

        Returns:
            The exit code of the job if no further attempt is to be made, else None.
        """
        if not (records := self._of_this_start()):
            return None
        last = records[-1]
        if last.ended and last.ended.outcome not in STARTED_AGAIN:
            return _exit_code(last.ended)
        say(f"job {self._job_id}: the launcher of attempt {last.number} was killed")
        self._nodes = self.nodes
        # If srun still runs, this ends its ranks.
        slurm.signal_step(self._job_id, _step_name(last.directory), signal.SIGKILL)
        self._wait_for_slurm(last.directory)
        return None

    def _start(self, attempt: Attempt) -> SrunRanks:
        """Start the ranks of an attempt on the nodes that can be used.

        Raises:
            NotStarted: Too few nodes can be used.
        """
        if self._check_nodes:
            self.check(attempt)
            self._check_nodes = False
        nodes = self.choose()
        self._nodes = nodes or self.nodes
        where = ",".join(nodes) or "this job's nodes"
        say(f"attempt {attempt.number}: {self._launch.num_tasks} ranks on {where}")
        self._ranks = SrunRanks(
            slurm_job.overlapping(self._launch.command) if self._overlap else self._launch.command,
            self._train,
            self._job_id,
            _step_name(attempt.directory),
            attempt_environment(attempt),
            RunPaths(self._run).attempt_log(attempt.number),
            nodes,
        )
        return self._ranks

    def _wait_for_slurm(self, attempt: Path) -> None:
        """Wait until slurmctld knows that an attempt's step is over, or a signal comes.

        Until then no new step can be created, and each attempt would fail and count as an attempt
        without progress. If a step ends before slurmctld notices that one of its nodes died, or its
        slurmstepd was killed, slurmctld never learns that it has ended (seen with 22.05).
        """
        num_signals, lost_since, is_said = len(self._signals.received), float("inf"), False
        ended = self._ranks is not None and self._ranks.have_ended

        def may_start() -> bool:
            nonlocal lost_since, is_said
            known = slurm.knows_end(self._job_id, _step_name(attempt))
            if known is None and not is_said:
                is_said = True
                minutes = f"{AWAY_SECONDS / 60:.0f} minutes"
                away = f"waits for {slurm.CONTROLLER}, which is away, for up to {minutes}"
                say(f"job {self._job_id}: {away}")
            self._overlap = known is False
            unusable = slurm.unusable_nodes(self._nodes) if self._overlap else {}
            over = bool(unusable) or (self._overlap and ended)
            lost_since = min(lost_since, time.monotonic()) if over else float("inf")
            # For some seconds after its start, slurmctld calls all nodes unusable. So a state other
            # than down counts only after LOST_SECONDS.
            lost = slurm.are_down(unusable) or time.monotonic() - lost_since > LOST_SECONDS
            return bool(known) or lost or len(self._signals.received) > num_signals

        _wait_for(may_start, AWAY_SECONDS)
        self.look()

    def _why_requeue(self, end: End) -> str | None:
        """Return why the next attempt needs another start of the job, or None if it does not.

        Args:
            end: The end of the last attempt, after which another one is to be made.
        """
        if end.verdict.outcome == Outcome.RESTART:
            return "as asked"
        if read_attempt(end.attempt.directory).ended is None:
            # The disk may be full. Without the record this process still holds the run.
            return "the end of the attempt could not be recorded"
        self.look()
        try:
            self.choose()
        except NotStarted as error:
            return str(error)
        return self.why_too_late()

    def _is_preempted(self) -> bool:
        """Return True if Slurm takes this job's nodes away for another job, or has requeued it.

        During a grace time (GraceTime > 0) Slurm sends SIGTERM only to the ranks. A job that ends
        before the grace time is over is not requeued, whatever its PreemptMode. Without a grace
        time, or at its end, Slurm sends SIGTERM to this process as well, when the job is already
        ending; with PreemptMode REQUEUE, Slurm has then counted one more restart.
        """
        state = _wait_for(lambda: slurm.job(self._job_id), REFUSED_SECONDS)
        if state is None or state.restarts > slurm.own_restarts():
            return state is not None
        # A user may also stop the run during its grace time: this process then gets the signal
        # while the job is still running.
        is_chosen = state.preempted_at is not None
        return is_chosen and (not state.is_running or not self._signals.stops)


def _step_name(attempt: Path) -> str:
    return f"attempt-{attempt.name}"


T = TypeVar("T")


def _wait_for(look: Callable[[], T], seconds: float, pause: float = RETRY_SECONDS) -> T:
    """Call `look` until its result is true or the time is over; return the last result."""
    until = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < until:
        time.sleep(pause)
    return found


def _exit_code(end: Verdict | Ended) -> int:
    """Return the exit code of the job: 0 after it has saved and stopped, as its user asked.

    With code 0 Slurm calls the job COMPLETED, sends no mail about a failure, and starts jobs that
    depend on it (afterok). The run's records say that the run is not finished, and which signal
    ended a rank. No code above 128 is returned: the batch script takes such a code to mean that the
    launcher was killed, and restarts it.
    """
    saved = end.code in (ExitCode.STOPPED, ExitCode.RESTART)
    if end.outcome == Outcome.STOPPED and saved:
        return ExitCode.FINISHED
    return end.code if end.code <= SIGNAL_CODE else ExitCode.FAILED


def _requeue(job_id: str, signals: Signals, without: Iterable[str] = ()) -> bool:
    """Have Slurm put this process's job back into the queue, then wait until Slurm ends it.

    Exiting right after the request would be a race: Slurm could take the end of the batch script
    for the end of the job.

    Args:
        job_id: The job.
        signals: The signals received so far; one more means that Slurm is ending the job.
        without: Nodes on which the job must not start again.

    Returns:
        False when the job could not be requeued.
    """
    began, signals_before = time.monotonic(), len(signals.received)
    printed = ""
    state = slurm.job(job_id)
    # Slurm may be ending the job already, for example after a preemption without a grace time.
    is_ending = state is not None and not state.is_running
    while not (state is not None and state.restarts > slurm.own_restarts()):
        try:
            slurm.requeue(job_id)
            break
        except slurm.SlurmError as error:
            # A controller that restarts is back within minutes. A refusal is final, except while
            # Slurm is changing the job's state itself.
            patience = AWAY_SECONDS if isinstance(error, slurm.SlurmAway) else REFUSED_SECONDS
            if str(error) != printed:
                say(
                    f"job {job_id}: cannot be requeued yet ({error}); trying for up to "
                    f"{patience / 60:.0f} minutes"
                )
            printed = str(error)
            if time.monotonic() - began > patience:
                return False
        time.sleep(RETRY_SECONDS)
    _exclude(job_id, without)
    if is_ending:
        return True
    _wait_for(lambda: len(signals.received) > signals_before, REQUEUED_SECONDS, RETRY_SECONDS / 10)
    return True


def _exclude(job_id: str, nodes: Iterable[str]) -> None:
    """Exclude these nodes from the next start of a job that has just been requeued."""
    if not (names := sorted(nodes)):
        return
    try:
        slurm.exclude(job_id, names)
    except slurm.SlurmError as error:
        say(f"job {job_id}: may start on {', '.join(names)} again: cannot exclude them ({error})")
    else:
        say(f"job {job_id}: will not start on {', '.join(names)} again")
