"""Make the attempts of a Slurm job: `launcher attempt`, run by the batch script on its first node.

Each attempt is one job step (`SrunRanks`) on nodes that the job holds. After a failure the next one
follows at once, in seconds and not after the minutes of a queue. The job goes back to the queue
when it is to end anyway (its time limit, a preemption, `launcher requeue`), when too few of its
nodes are left, or when too little of its time is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.config.trajectory import allow_options
from pretrain.launcher import slurm, slurm_nodes
from pretrain.launcher.evaluations import submit_pending
from pretrain.launcher.node.allocation import Allocation, job_state, restart_count
from pretrain.launcher.node.guard import guarded
from pretrain.launcher.node.signals import Signals, job_signals
from pretrain.launcher.node.srun import SrunRanks
from pretrain.launcher.node.supervise import End, Supervisor
from pretrain.launcher.node.verdict import NotStarted
from pretrain.launcher.node.waiting import waiting
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import Owner, is_finished, read_attempt
from pretrain.rundir.jobs import LaunchRecord, job_id_of, read_launch
from pretrain.rundir.lock import Attempt
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.starts import already_done, is_done
from pretrain.rundir.states import ExitCode, Outcome

AWAY_SECONDS = 600.0
"""The time for which a requeue is tried, or an attempt waits, while slurmctld does not answer."""
REFUSED_SECONDS = 60.0
"""The time for which a refused requeue is tried: Slurm may be ending the job itself."""
REQUEUED_SECONDS = 300.0
"""The time that a job that has been requeued gives Slurm to end it."""
RETRY_SECONDS = 2.0
"""Time between two tries of a requeue."""
EXCLUDE_TRIES = 3
"""The number of times that Slurm is asked to keep a requeued job off a node."""
NOT_REQUEUED = (
    "Slurm did not put the job back into its queue. `launcher requeue {run}` submits it again, "
    "from the newest checkpoint"
)


def attempt(run: Path) -> int:
    """Make attempts at a run that `launcher submit` has put into RUN/launch, until it is over.

    When the run is to go on in another start of the job, the job is requeued and Slurm ends this
    process.

    Args:
        run: The run's directory.

    Returns:
        The exit code of the job.

    Raises:
        ConfigError: Not inside a Slurm job, or RUN/launch is missing or damaged.
        RunBusy: Another job or process trains this run.
        RunFailed: The disk refused.
    """
    paths = RunPaths(run)
    if not paths.launch.is_dir():
        raise ConfigError(
            f"{paths.launch}: node {os.uname().nodename} does not see it. Put run.directory on a "
            "file system that all nodes share, and submit the run again"
        )
    launch, config = read_launch(run), load_config(paths.launch_config)
    job_id = job_id_of(os.environ)
    if job_id is None:
        raise ConfigError(
            "launcher attempt: SLURM_JOB_ID is not set; this command runs inside a Slurm job. Use "
            "`launcher submit`, or on this machine `launcher local`"
        )
    if is_finished(run, config.train.num_steps) and is_done(config, launch.allow_changed):
        # A user may requeue the job of a finished run.
        say(already_done(config))
        return 0
    # SIGUSR1 asks for a checkpoint and a restart, SIGTERM for a checkpoint and the end. They come
    # from `launcher requeue` and `launcher cancel --save`; the warning before the time limit goes
    # from Slurm to the ranks directly.
    with (
        job_signals() as signals,
        guarded(run, job_id, launch.sbatch),
    ):
        return _Start(run, job_id, launch, config, signals).make_attempts()


class _Start:
    """One start of the job: the attempts that it makes in its allocation."""

    def __init__(
        self, run: Path, job_id: str, launch: LaunchRecord, config: RunConfig, signals: Signals
    ) -> None:
        self._run, self._job_id, self._launch, self._config = run, job_id, launch, config
        self._signals = signals
        self._allocation = Allocation(run, job_id, launch, config, signals)
        self._check_nodes = True
        self._ranks: SrunRanks | None = None
        train = [launch.python, "-m", "pretrain", "train", str(RunPaths(run).launch_config)]
        self._command = [*launch.command, *train, *allow_options(launch.allow_changed)]

    def make_attempts(self) -> int:
        """Make one attempt after the other. Returns the exit code of the job."""
        owner = job_owner(self._job_id, self._launch.num_tasks)
        # A job keeps its id when it is requeued, so the id marks the attempts of one series.
        supervisor = Supervisor(
            self._config,
            self._signals,
            lambda record: record.owner.is_of_job(owner.slurm_job_id),
            is_preempted=self._is_preempted,
        )
        while True:
            attempt = Attempt.begin(self._run, owner, job_is_over)
            end = supervisor.make_attempt(attempt, self._start, _SubmitEvaluations(self._run))
            if not end.again:
                return _exit_code(end)
            if self._ranks is not None:
                self._allocation.lose(self._ranks.lost, end.reason)
            if why := self._why_requeue(end):
                if end.outcome != Outcome.RESTART:
                    say(f"job {self._job_id}: goes back to the queue: {why}")
                with waiting(attempt.directory, "Slurm to put its job back into the queue"):
                    is_back = _requeue(self._job_id, self._signals, self._allocation.without())
                if not is_back:
                    supervisor.give_up(end, NOT_REQUEUED.format(run=self._run))
                return _exit_code(end)
            self._check_nodes = True
            self._wait_for_slurm(attempt)
            # The nodes have not been waited for since.
            owner = job_owner(self._job_id, self._launch.num_tasks, is_first=False)

    def _start(self, attempt: Attempt) -> SrunRanks:
        """Start the ranks of an attempt on the nodes that can be used.

        Raises:
            NotStarted: Too few can.
        """
        self._ranks = None
        if self._check_nodes:
            with waiting(attempt.directory, "the check of its nodes"):
                self._allocation.check(attempt)
            self._check_nodes = False
        nodes = self._allocation.choose()
        where = ",".join(nodes) or "this job's nodes"
        say(f"attempt {attempt.number}: {self._launch.num_tasks} ranks on {where}")
        self._ranks = SrunRanks(
            self._command,
            self._job_id,
            f"attempt-{attempt.directory.name}",
            {
                "PRETRAIN_ATTEMPT": str(attempt.directory),
                "PRETRAIN_RENDEZVOUS": str(attempt.directory),
            },
            RunPaths(self._run).attempt_log(attempt.number),
            nodes,
        )
        return self._ranks

    def _wait_for_slurm(self, attempt: Attempt) -> None:
        """Wait until slurmctld answers, for `AWAY_SECONDS` at most, or until a signal comes.

        No job step can be made without it, so each attempt would fail and count as one without
        progress.

        Args:
            attempt: The attempt that has just ended.
        """
        began, num_signals = time.monotonic(), len(self._signals.received)
        if not _is_away(self._job_id):
            return
        minutes = f"{AWAY_SECONDS / 60:.0f} minutes"
        say(f"job {self._job_id}: waits for slurmctld, which is away, for up to {minutes}")
        with waiting(attempt.directory, f"slurmctld, which is away, for up to {minutes}"):
            while time.monotonic() - began < AWAY_SECONDS:
                time.sleep(RETRY_SECONDS)
                if len(self._signals.received) > num_signals or not _is_away(self._job_id):
                    return

    def _why_requeue(self, end: End) -> str | None:
        """Return why the next attempt needs another start of the job, or None if it does not.

        Args:
            end: The end of the last attempt, which another one follows.
        """
        if end.outcome == Outcome.RESTART:
            return "as asked"
        if read_attempt(end.attempt.directory).ended is None:
            # As on a full disk. Without the record this process still holds the run.
            return "the end of the attempt could not be recorded"
        try:
            self._allocation.choose()
        except NotStarted as error:
            return str(error)
        left, needed = self._allocation.seconds_left(), self._allocation.seconds_needed()
        if left is not None and left < needed:
            return (
                f"{left:.0f} s are left to the time limit, and an attempt needs {needed:.0f} s to "
                "start and to save before it"
            )
        return None

    def _is_preempted(self) -> bool:
        """Return True if Slurm takes this job's nodes away for another job, or has requeued it.

        In a grace time (GraceTime > 0) Slurm sends SIGTERM to the ranks alone, and does not requeue
        a job that ends before the time is over, whatever its PreemptMode. Without one, or at its
        end, it sends SIGTERM to this process as well while the job is ending already; with
        PreemptMode REQUEUE it has then counted one more restart.
        """
        began = time.monotonic()
        while (state := slurm_nodes.preemption(self._job_id)) is None:
            if time.monotonic() - began > REFUSED_SECONDS:
                return False
            time.sleep(RETRY_SECONDS)
        if state.restarts > restart_count():
            return True
        if state.preempted_at is None:
            return False
        # A user who stops a run in its grace time asks for the stop, and `scancel` asks Slurm.
        return state.state != "RUNNING" or not self._signals.stops


def _is_away(job_id: str) -> bool:
    """Return True if slurmctld does not answer."""
    try:
        return slurm.jobs([job_id]) is None
    except slurm.SlurmError:
        return False


def _exit_code(end: End) -> int:
    """Return the exit code of the job: 0 after it has saved and stopped, as its user asked.

    So Slurm calls the job COMPLETED, sends no mail of a failure, and starts jobs that depend on it
    (afterok). That the run is not finished is in the run's records.
    """
    saved = end.code in (ExitCode.STOPPED, ExitCode.RESTART)
    return ExitCode.FINISHED if end.outcome == Outcome.STOPPED and saved else end.code


def job_owner(job_id: str, num_tasks: int, is_first: bool = True) -> Owner:
    """Describe this process as the owner of an attempt inside a Slurm job.

    Args:
        job_id: The job this process runs in.
        num_tasks: Number of ranks of the attempt.
        is_first: True for the first attempt of this start of the job, which waited in the queue.
    """
    try:
        state = job_state(job_id)
    except slurm.SlurmError:
        # The time of submission is for the account of the run's time alone.
        state = None
    return Owner.here(
        slurm_job_id=job_id,
        slurm_restart_count=restart_count(),
        slurm_cluster=os.environ.get("SLURM_CLUSTER_NAME"),
        submitted_at=state.submitted_at if state and is_first else None,
        num_processes=num_tasks,
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
    )


def job_is_over(other: Owner) -> bool | None:
    """Return True if the job of another owner is over, None where Slurm does not say."""
    try:
        return slurm.is_over(other.slurm_job_id) if other.slurm_job_id else None
    except slurm.SlurmError:
        return None


def _requeue(job_id: str, signals: Signals, without: Iterable[str] = ()) -> bool:
    """Have Slurm put this process's job back into the queue, then wait until Slurm ends it.

    Exiting right after the request would be a race: Slurm could take the end of the batch script
    for the end of the job.

    Args:
        job_id: The job.
        signals: The signals received so far; one more is Slurm ending the job.
        without: Nodes on which the job must not start again.

    Returns:
        False when the job could not be requeued.
    """
    began, signals_before = time.monotonic(), len(signals.received)
    printed = ""
    state = slurm_nodes.preemption(job_id)
    # Slurm ends the job already, as when it is preempted without a grace time.
    is_ending = state is not None and state.state != "RUNNING"
    while not (state is not None and state.restarts > restart_count()):
        try:
            slurm.requeue(job_id)
            break
        except slurm.SlurmInterrupted:
            # Slurm ends this job, and with it scontrol before that has had its answer.
            is_ending = True
            break
        except slurm.SlurmError as error:
            # A controller that restarts comes back within minutes. A refusal lasts, except in the
            # moments in which Slurm changes the job's state itself.
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
    deadline = time.monotonic() + REQUEUED_SECONDS
    while len(signals.received) == signals_before and time.monotonic() < deadline:
        time.sleep(RETRY_SECONDS / 10)
    return True


def _exclude(job_id: str, nodes: Iterable[str]) -> None:
    """Keep a job that has just been requeued off these nodes, if Slurm can find it others."""
    if not (names := sorted(nodes)):
        return
    for _ in range(EXCLUDE_TRIES):
        try:
            slurm_nodes.exclude(job_id, names)
        except slurm.SlurmError as error:
            # SIGTERM, with which Slurm ends the job, may have ended scontrol.
            refused = error
            continue
        say(f"job {job_id}: will not start on {', '.join(names)} again")
        return
    say(f"job {job_id}: may start on {', '.join(names)} again, which failed ({refused})")


class _SubmitEvaluations:
    """Submit the evaluation jobs of new checkpoints, if the run has a plan for them.

    A failure is printed once and never disturbs training.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._printed = run, False

    def __call__(self, last: bool) -> None:
        try:
            submit_pending(self._run, at_once=last)
        # Any error at all: this runs in a thread beside training, or after its last attempt.
        except Exception as error:
            if not self._printed:
                say(
                    f"{self._run}: evaluation jobs cannot be submitted for now; training goes on "
                    f"({error})"
                )
            self._printed = True
