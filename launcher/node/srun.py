"""An attempt at a run inside a Slurm job: `launcher attempt`, which the batch script runs, and the ranks behind srun."""

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
from pretrain.launcher import slurm
from pretrain.launcher.evaluations import submit_pending
from pretrain.launcher.node.ranks import signals_held
from pretrain.launcher.node.supervise import Signals, Supervisor
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import Owner, is_finished
from pretrain.rundir.jobs import read_launch
from pretrain.rundir.lock import Attempt
from pretrain.rundir.paths import RunPaths

KILL_SECONDS = 60.0  # for Slurm to end a step's processes
AWAY_SECONDS = 600.0  # for slurmctld to come back, when the job is to be requeued
REFUSED_SECONDS = 60.0  # for what else forbids it: Slurm may be ending the job itself
REQUEUED_SECONDS = 300.0  # for Slurm to end a job that it has requeued
RETRY_SECONDS = 2.0
# Sent to srun, which hands them to its tasks without asking slurmctld; others it takes for itself.
HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
FAILED_TASK = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.*)")
EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
LABEL = re.compile(rb"\s*(\d+): ")


def attempt(run: Path) -> int:
    """One attempt at the run that `launcher submit` has put in RUN/launch. Returns the job's exit code.

    After an attempt that is to be made again the job is requeued, and Slurm ends this process. Raises ConfigError, RunBusy
    among them.
    """
    paths = RunPaths(run)
    launch, config = read_launch(run), load_config(paths.launch_config)
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise ConfigError(
            "launcher attempt: runs in a Slurm job. Use `launcher submit`, or on this machine `launcher local`"
        )
    if is_finished(run, config.train.num_steps):
        say(f"{run}: finished already, at step {config.train.num_steps}; nothing to do")
        return 0
    train = [launch.python, "-m", "pretrain", "train", str(paths.launch_config)]
    command = [*launch.command, *train]

    def start(attempt: Attempt) -> SrunStep:
        name = f"attempt-{attempt.directory.name}"
        say(
            f"attempt {attempt.number}: {launch.num_tasks} ranks on {os.environ.get('SLURM_JOB_NODELIST')}"
        )
        return SrunStep(
            command,
            job_id,
            name,
            {"PRETRAIN_ATTEMPT": str(attempt.directory)},
            paths.attempt_log(attempt.number),
        )

    with Signals(signal.SIGTERM, signal.SIGUSR1) as signals:
        owner = job_owner(job_id, launch.num_tasks)
        supervisor = Supervisor(config, signals, lambda record: record.owner.slurm_job_id == job_id)
        end = supervisor.make_attempt(
            Attempt.begin(run, owner, job_is_over), start, _Evaluations(run)
        )
        if end.again and not _requeue(job_id, signals):
            supervisor.give_up(end, "the job could not be requeued")
        return end.code


class SrunStep:
    """`command` (srun with its options, then what each rank runs) as a step `name` of this process's job.

    All that srun prints goes to `log`; what rank 0 and srun itself say, to this process's stdout too.
    """

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        name: str,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.failure = ""
        self._job_id, self._name, self._log = job_id, name, log
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            file = open(log, "ab")  # noqa: SIM115  closed by _copy
        try:
            with signals_held():
                # A process group of its own: what is sent to this process's group is for this process to pass on.
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
        self._copier = threading.Thread(target=_copy, args=(self._srun.stdout, file), daemon=True)
        self._copier.start()

    def poll(self) -> int | None:
        """The exit code of the rank that failed first: srun's own is the highest of all, of those it ended itself too."""
        code = self._srun.poll()
        if not code:
            return code
        self._copier.join(KILL_SECONDS)  # the log is whole
        self.failure, code = _failure(self._log, 128 - code if code < 0 else code)
        return code

    def signal(self, number: int) -> None:
        """SIGTERM and the like are sent by slurmctld; where it does not answer, that is said."""
        if number in HANDED_ON:
            self._srun.send_signal(number)
            return
        name = signal.Signals(number).name
        try:
            for step in slurm.steps(self._job_id, self._name):
                slurm.signal(step, name.removeprefix("SIG"))
        except slurm.SlurmAway as error:
            say(f"{name} not sent to the ranks: {error}")
        except slurm.SlurmError:
            pass  # the step is ending, or with its job: Slurm has signalled the ranks itself

    def end(self) -> int:
        """As `kill`: Slurm has no grace for one step alone."""
        self.kill()
        return self.poll() or 0

    def kill(self) -> None:
        """srun answers SIGTERM with SIGKILL to its tasks; where it does not, slurmctld is asked to."""
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


def _copy(source: IO[bytes], log: IO[bytes]) -> None:
    with source, log:
        for line in source:
            label = LABEL.match(line)
            copies = [(log, line)]
            if label is None or label[1] == b"0":
                copies.append((sys.stdout.buffer, line[label.end() :] if label else line))
            for file, text in copies:
                with contextlib.suppress(
                    OSError
                ):  # a full disk must not stop who writes into our pipe
                    file.write(text)
                    file.flush()


def _failure(log: Path, code: int) -> tuple[str, int]:
    """What ended the step first, in words and as an exit code, by what srun wrote: it names bad ends as they come."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    said = [line for line in lines if line.startswith("srun: error: ")]
    for line in said:
        if match := FAILED_TASK.match(line):
            own = EXIT_CODE.fullmatch(match["how"])
            how = f"ended with exit code {own[1]}" if own else f"was ended ({match['how']})"
            return f"rank {match['ranks']} on {match['node']} {how}; see {log}", int(
                own[1]
            ) if own else code
    why = f" ({said[0].removeprefix('srun: error: ')})" if said else ""
    return f"srun ended with exit code {code}{why}; see {log}", code


def job_owner(job_id: str, num_tasks: int) -> Owner:
    """This process, in job `job_id`, as the owner of an attempt that `num_tasks` ranks make."""
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
    """Whether the job of another owner is; None where Slurm does not say."""
    try:
        return slurm.is_over(other.slurm_job_id) if other.slurm_job_id else None
    except slurm.SlurmError:
        return None


def _requeue(job_id: str, signals: Signals) -> bool:
    """Asks for the job to be queued again, then waits for Slurm to end it. False when that cannot be had."""
    began, asked = time.monotonic(), len(signals.received)
    said = ""
    while True:
        try:
            slurm.requeue(job_id)
            break
        except slurm.SlurmError as error:
            patience = AWAY_SECONDS if isinstance(error, slurm.SlurmAway) else REFUSED_SECONDS
            if str(error) != said:
                say(
                    f"job {job_id}: cannot be requeued yet ({error}); trying for {patience / 60:.0f} minutes"
                )
            said = str(error)
            if time.monotonic() - began > patience:
                return False
        time.sleep(RETRY_SECONDS)
    deadline = time.monotonic() + REQUEUED_SECONDS
    while len(signals.received) == asked and time.monotonic() < deadline:
        time.sleep(RETRY_SECONDS / 10)
    return True


class _Evaluations:
    """Submits what is to be evaluated, where a plan says so. A failure is said once, and never disturbs training."""

    def __init__(self, run: Path) -> None:
        self._run, self._said = run, False

    def __call__(self, last: bool) -> None:
        try:
            submit_pending(self._run, at_once=last)
        except Exception as error:
            if not self._said:
                say(f"checkpoints are not evaluated for now, training goes on: {error}")
            self._said = True
