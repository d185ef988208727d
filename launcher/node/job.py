"""Make the attempts of a Slurm job: `launcher attempt`, run by the batch script on its first node.

It starts the ranks as one job step (`SrunRanks`), supervises them, and decides what follows their
end.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from pretrain.config import ConfigError, load_config
from pretrain.config.trajectory import allow_options
from pretrain.launcher import slurm
from pretrain.launcher.evaluations import submit_pending
from pretrain.launcher.node.signals import Signals, job_signals
from pretrain.launcher.node.srun import SrunRanks
from pretrain.launcher.node.supervise import End, Supervisor
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import Owner, is_finished
from pretrain.rundir.jobs import job_id_of, read_launch
from pretrain.rundir.lock import Attempt
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import ExitCode, Outcome

AWAY_SECONDS = 600.0
"""How long a requeue is tried while slurmctld does not answer."""
REFUSED_SECONDS = 60.0
"""How long a requeue is tried while slurmctld refuses it: Slurm may be ending the job itself."""
REQUEUED_SECONDS = 300.0
"""How long a job that has been requeued waits for Slurm to end it."""
RETRY_SECONDS = 2.0
"""Time between two tries of a requeue."""


def attempt(run: Path) -> int:
    """Make one attempt at a run that `launcher submit` has put into RUN/launch.

    When another attempt follows, the job is requeued and Slurm ends this process.

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
    if is_finished(run, config.train.num_steps):
        # A user may requeue the job of a finished run.
        say(f"{run}: finished already, at step {config.train.num_steps}; nothing to do")
        return 0
    train = [launch.python, "-m", "pretrain", "train", str(paths.launch_config)]
    command = [*launch.command, *train, *allow_options(launch.allow_changed)]

    def start(attempt: Attempt) -> SrunRanks:
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        say(f"attempt {attempt.number}: {launch.num_tasks} ranks on {nodes}")
        return SrunRanks(
            command,
            job_id,
            f"attempt-{attempt.directory.name}",
            {"PRETRAIN_ATTEMPT": str(attempt.directory)},
            paths.attempt_log(attempt.number),
        )

    # SIGUSR1 asks for a checkpoint and a restart, SIGTERM for a checkpoint and the end. They come
    # from `launcher requeue` and `launcher cancel --save`; the warning before the time limit goes
    # from Slurm to the ranks directly.
    with job_signals() as signals:
        owner = job_owner(job_id, launch.num_tasks)
        # A job keeps its id when it is requeued, so the id marks the attempts of one series.
        supervisor = Supervisor(config, signals, lambda record: record.owner.slurm_job_id == job_id)
        attempt = Attempt.begin(run, owner, job_is_over)
        end = supervisor.make_attempt(attempt, start, _SubmitEvaluations(run))
        if end.again and not _requeue(job_id, signals):
            supervisor.give_up(end, "the job could not be requeued")
        return _exit_code(end)


def _exit_code(end: End) -> int:
    """Return the exit code of the job: 0 after it has saved and stopped, as its user asked.

    So Slurm calls the job COMPLETED, sends no mail of a failure, and starts jobs that depend on it
    (afterok). That the run is not finished is in the run's records.
    """
    saved = end.code in (ExitCode.STOPPED, ExitCode.RESTART)
    return ExitCode.FINISHED if end.outcome == Outcome.STOPPED and saved else end.code


def job_owner(job_id: str, num_tasks: int) -> Owner:
    """Describe this process as the owner of an attempt inside a Slurm job.

    Args:
        job_id: The job this process runs in.
        num_tasks: Number of ranks of the attempt.
    """
    states = slurm.jobs([job_id]) or {}
    state = states.get(job_id)
    return Owner.here(
        slurm_job_id=job_id,
        slurm_restart_count=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
        slurm_cluster=os.environ.get("SLURM_CLUSTER_NAME"),
        submitted_at=state.submitted_at if state else None,
        num_processes=num_tasks,
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
    )


def job_is_over(other: Owner) -> bool | None:
    """Return True if the job of another owner is over, None where Slurm does not say."""
    try:
        return slurm.is_over(other.slurm_job_id) if other.slurm_job_id else None
    except slurm.SlurmError:
        return None


def _requeue(job_id: str, signals: Signals) -> bool:
    """Have Slurm put this process's job back into the queue, then wait until Slurm ends it.

    Exiting right after the request would be a race: Slurm could take the end of the batch script
    for the end of the job.

    Args:
        job_id: The job.
        signals: The signals received so far; one more is Slurm ending the job.

    Returns:
        False when the job could not be requeued.
    """
    began, signals_before = time.monotonic(), len(signals.received)
    printed = ""
    while True:
        try:
            slurm.requeue(job_id)
            break
        except slurm.SlurmInterrupted:
            # Slurm ends this job, and with it scontrol before that has had its answer.
            return True
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
    deadline = time.monotonic() + REQUEUED_SECONDS
    while len(signals.received) == signals_before and time.monotonic() < deadline:
        time.sleep(RETRY_SECONDS / 10)
    return True


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
