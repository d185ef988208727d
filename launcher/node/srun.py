"""Make an attempt inside a Slurm job: `launcher attempt`, with the ranks behind srun.

The batch script runs `launcher attempt` on the first node of the job. It starts the ranks as one
job step, supervises them, and has the job requeued when another attempt follows.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError, load_config, writing
from pretrain.config.trajectory import allow_options
from pretrain.launcher import slurm
from pretrain.launcher.evaluations import submit_pending
from pretrain.launcher.node.signals import Signals, signals_blocked
from pretrain.launcher.node.supervise import SIGNAL_CODE, Supervisor
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import Owner, is_finished
from pretrain.rundir.jobs import read_launch
from pretrain.rundir.lock import Attempt
from pretrain.rundir.paths import RunPaths

KILL_SECONDS = 60.0
"""Time for Slurm to end the processes of a job step."""
AWAY_SECONDS = 600.0
"""How long a requeue is tried while slurmctld does not answer."""
REFUSED_SECONDS = 60.0
"""How long a requeue is tried while slurmctld refuses it: Slurm may be ending the job itself."""
REQUEUED_SECONDS = 300.0
"""How long a job that has been requeued waits for Slurm to end it."""
RETRY_SECONDS = 2.0
"""Time between two tries of a requeue."""
FORWARDED_BY_SRUN = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that srun forwards to its tasks without asking slurmctld. It acts on most others itself:
SIGTERM, for one, makes it kill the tasks."""
FAILED_TASK = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.*)")
"""A line in which srun reports tasks that ended badly: "srun: error: n2: tasks 2-3: Killed"."""
EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
"""How srun words a task that exited by itself."""
LABEL = re.compile(rb"\s*(\d+): ")
"""What `srun --label` puts before each line of a task: its rank, padded with spaces."""


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
    launch, config = read_launch(run), load_config(paths.launch_config)
    job_id = os.environ.get("SLURM_JOB_ID")
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
    with Signals(signal.SIGTERM, signal.SIGUSR1) as signals:
        owner = job_owner(job_id, launch.num_tasks)
        # A job keeps its id when it is requeued, so the id marks the attempts of one series.
        supervisor = Supervisor(config, signals, lambda record: record.owner.slurm_job_id == job_id)
        attempt = Attempt.begin(run, owner, job_is_over)
        end = supervisor.make_attempt(attempt, start, _SubmitEvaluations(run))
        if end.again and not _requeue(job_id, signals):
            supervisor.give_up(end, "the job could not be requeued")
        return end.code


class SrunRanks:
    """The ranks of one attempt as a step of this process's job; an implementation of `Ranks`.

    All output of srun goes to the log. What rank 0 and srun itself print also goes to the stdout of
    this process, which is the job's log.
    """

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        name: str,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start the ranks.

        Args:
            command: srun with its options, then what each rank runs.
            job_id: The job this process runs in.
            name: The name of the job step, by which Slurm finds it.
            environment: Environment variables to add.
            log: The file to append the output to.

        Raises:
            ConfigError: srun cannot be started.
            RunFailed: The log cannot be written.
        """
        self.failure = ""
        self._job_id, self._name, self._log = job_id, name, log
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            file = open(log, "ab")  # noqa: SIM115  closed by _copy_output
        try:
            with signals_blocked():
                # A process group of its own: a signal that is sent to the group of this process
                # must reach the ranks once, passed on by the supervisor.
                self._srun = subprocess.Popen(
                    [command[0], f"--job-name={name}", *command[1:]],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            file.close()
            raise ConfigError(
                f"{command[0]}: cannot be started on this node ({error.strerror})"
            ) from None
        output = self._srun.stdout
        self._copier = threading.Thread(target=_copy_output, args=(output, file), daemon=True)
        self._copier.start()

    def poll(self) -> int | None:
        """Return None while srun runs, then 0 or the exit code of the rank that failed first.

        srun's own exit code is the highest of all tasks. It includes the tasks that srun killed
        after the first failure (137), so it would hide codes such as 75, which asks for a restart.
        """
        code = self._srun.poll()
        if not code:
            return code
        # Wait until the log is complete: it says which rank failed first.
        self._copier.join(KILL_SECONDS)
        self.failure, code = _first_failure(self._log, SIGNAL_CODE - code if code < 0 else code)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to every rank, through srun where it forwards the signal.

        Other signals are sent by slurmctld. When it does not answer, that is printed and the ranks
        do not get the signal.
        """
        if number in FORWARDED_BY_SRUN:
            self._srun.send_signal(number)
            return
        name = signal.Signals(number).name
        try:
            for step in slurm.steps(self._job_id, self._name):
                slurm.signal(step, name.removeprefix("SIG"))
        except slurm.SlurmAway as error:
            say(f"{name}: not sent to the ranks: {error}")
        except slurm.SlurmError:
            # The step is ending, alone or with its job; in the second case Slurm has sent the ranks
            # a signal itself.
            pass

    def end(self) -> int:
        """Kill the ranks: srun has no grace period to offer for a single step.

        Returns:
            The exit code.
        """
        self.kill()
        return self.poll() or 0

    def kill(self) -> None:
        """Have srun kill the ranks, or slurmctld where srun does not."""
        # srun answers SIGTERM by sending SIGKILL to its tasks on all nodes. SIGKILL to srun itself
        # would leave the tasks running.
        self._srun.terminate()
        try:
            self._srun.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(KILL_SECONDS)
            self._srun.kill()
            self._srun.wait()
        self._copier.join(KILL_SECONDS)


def _copy_output(source: IO[bytes], log: IO[bytes]) -> None:
    """Copy srun's output to the log, and the lines of rank 0 and of srun to stdout, unlabelled."""
    with source, log:
        for line in source:
            label = LABEL.match(line)
            copies = [(log, line)]
            if label is None or label[1] == b"0":
                copies.append((sys.stdout.buffer, line[label.end() :] if label else line))
            for file, text in copies:
                # A full disk must not end this thread: srun would block on a full pipe, and with it
                # every rank that prints.
                with contextlib.suppress(OSError):
                    file.write(text)
                    file.flush()


def _first_failure(log: Path, code: int) -> tuple[str, int]:
    """Find out what ended a job step first, from what srun wrote into the log.

    srun reports tasks that end badly in the order in which they end.

    Args:
        log: The log of the step.
        code: The exit code of srun.

    Returns:
        What failed first, in one line, and its exit code.
    """
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    # Lines that a rank prints have a label before them, so they cannot be taken for srun's.
    errors = [line for line in lines if line.startswith("srun: error: ")]
    for line in errors:
        if match := FAILED_TASK.match(line):
            where = f"rank {match['ranks']} on {match['node']}"
            if exited := EXIT_CODE.fullmatch(match["how"]):
                return f"{where} ended with exit code {exited[1]}; see {log}", int(exited[1])
            return f"{where} was ended ({match['how']}); see {log}", code
    why = f" ({errors[0].removeprefix('srun: error: ')})" if errors else ""
    return f"srun ended with exit code {code}{why}; see {log}", code


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
