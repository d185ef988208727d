"""Run Slurm's commands: sbatch, squeue, scontrol and scancel.

Each is a function that builds an argument list, without a shell, and raises an error with the words
of the command.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain.config import ConfigError
from pretrain.launcher.slurm_command import COMMAND_SECONDS, run_command, words_of
from pretrain.launcher.slurm_command import NoSlurm as NoSlurm
from pretrain.launcher.slurm_command import SlurmAway as SlurmAway
from pretrain.launcher.slurm_command import SlurmError as SlurmError
from pretrain.launcher.slurm_command import SlurmInterrupted as SlurmInterrupted

TRIES = 5
"""Calls of squeue before an order is given up that needs its answer. Where the answer is
only shown, or asked for again later, it is asked once."""
RETRY_SECONDS = 1.0
"""Time between two of these tries."""
OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
"""States of a job that has ended."""
_FIELDS = (
    "JobArrayID",
    "JobID",
    "State",
    "Reason",
    "NodeList",
    "NumNodes",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "RestartCnt",
    "Name",
)
"""The columns of squeue, in the order in which `_parse` takes it apart. The name is last because
it may contain the separator."""
_UNKNOWN_JOB = "Invalid job id"
"""The words of squeue for a job that Slurm has never had, or has forgotten."""


@dataclass(frozen=True)
class JobState:
    """A job, or a task of a job array, as squeue reports it.

    Times are unix seconds, or None while Slurm has none.
    """

    job_id: str
    """The id that Slurm's commands take: "123", or for a task of an array "123_0"."""
    raw_id: str
    """SLURM_JOB_ID inside the job. A task of an array has a number of its own here."""
    state: str
    """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, ..."""
    reason: str
    nodes: str
    """The node list, "n[1-4]"; empty while the job waits."""
    num_nodes: int
    submitted_at: float | None
    eligible_at: float | None
    """The earliest start of the job, as after a requeue."""
    started_at: float | None
    """While the job waits, the time at which Slurm expects to start it, if it says so."""
    ends_at: float | None
    """The time limit, or when the job ended."""
    restarts: int
    """The number of requeues so far."""
    name: str

    @property
    def is_over(self) -> bool:
        """Return True if the job has ended."""
        return self.state in OVER


def submit(arguments: Sequence[str], script: str) -> str:
    """Submit a batch script.

    Args:
        arguments: The options of sbatch.
        script: The text of the script.

    Returns:
        The id of the job.

    Raises:
        SlurmError: sbatch refused the job.
        SlurmAway: slurmctld does not answer. It may have taken the job all the same.
    """
    try:
        answer = run_command("sbatch", ["--parsable", *arguments], script)
    except SlurmAway as error:
        raise SlurmAway(
            f"{error}. The job may have been submitted all the same: if `squeue --me` shows it, "
            "cancel it before you submit again"
        ) from None
    # Federated clusters answer "id;cluster".
    job_id = answer.stdout.strip().split(";")[0]
    if not job_id.isdigit():
        raise SlurmError(f"sbatch: answered {answer.stdout.strip()!r} instead of a job id")
    return job_id


def test(arguments: Sequence[str], script: str) -> str:
    """Ask Slurm when a job could start, without submitting it.

    Args:
        arguments: The options of sbatch.
        script: The text of the script.

    Returns:
        What `sbatch --test-only` prints.

    Raises:
        SlurmError: Slurm would refuse the job.
    """
    answer = run_command("sbatch", ["--test-only", *arguments], script)
    return words_of(answer.stderr or answer.stdout)


def ask(program: str, *arguments: str) -> str | None:
    """Return what one of Slurm's commands prints, or None when it fails or does not answer."""
    try:
        return run_command(program, arguments).stdout
    except (ConfigError, SlurmError):
        return None


def jobs(ids: Iterable[str], tries: int = 1) -> dict[str, JobState] | None:
    """Ask Slurm for the states of jobs.

    Args:
        ids: "123", for a task of an array "123_0" or its raw id.
        tries: How often squeue is asked when it fails.

    Returns:
        The states by the ids that were asked for, or None when slurmctld does not answer. Slurm
        forgets a job minutes after its end; such ids are left out.

    Raises:
        SlurmError: squeue failed for another reason.
    """
    asked = set(ids)
    if not asked:
        return {}
    # "Field:|" prints a field without padding, followed by a bar.
    columns = ",".join(f"{field}:|" for field in _FIELDS)
    query = ["--array", "--states=all", f"--jobs={','.join(sorted(asked))}"]
    try:
        answer = _squeue([*query, f"--Format={columns}"], tries)
    except SlurmAway:
        return None
    except SlurmError as error:
        # squeue fails like this for a single forgotten id; among several it leaves one out.
        if _UNKNOWN_JOB in str(error):
            return {}
        raise
    states = [
        _parse(line) for line in answer.stdout.splitlines() if line.count("|") >= len(_FIELDS)
    ]
    return {key: state for state in states for key in (state.raw_id, state.job_id) if key in asked}


def is_over(job_id: str) -> bool | None:
    """Return True if a job has ended or is forgotten, None if slurmctld does not answer."""
    states = jobs([job_id])
    return None if states is None else job_id not in states or states[job_id].is_over


def jobs_named(name: str) -> dict[str, set[str]] | None:
    """Ask Slurm for this user's jobs of a name that are not over; the tasks of an array are one.

    Returns:
        "RUNNING" or why the job waits, for each part of a job, by job id. None when squeue fails.
    """
    try:
        answer = _squeue(["--me", f"--name={name}", "--format=%F|%T|%r"])
    except SlurmError:
        return None
    found: dict[str, set[str]] = {}
    for line in answer.stdout.splitlines():
        if line.count("|") >= 2:
            job_id, state, reason = line.strip().split("|", 2)
            found.setdefault(job_id, set()).add(reason if state == "PENDING" else "RUNNING")
    return found


def array_ends(job_id: str) -> Counter[str]:
    """Return how many tasks of a job array have ended in each state, as far as Slurm remembers.

    Nothing while slurmctld does not answer: this is for messages alone.
    """
    try:
        answer = _squeue(["--array", "--states=all", f"--jobs={job_id}", "--format=%T"])
    except SlurmError:
        return Counter()
    return Counter(state for state in answer.stdout.split() if state in OVER)


def array_size() -> int:
    """Return how many tasks a job array may have on this cluster.

    Raises:
        SlurmError: scontrol failed, or the cluster has no job arrays.
    """
    answer = run_command("scontrol", ["show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.stdout, re.MULTILINE)
    # The highest index is one less.
    size = int(found[1]) if found else 0
    if not size:
        raise SlurmError("scontrol show config: MaxArraySize is 0, so this cluster has no arrays")
    return size


def requeue(job_id: str) -> None:
    """Put a running job back into the queue. Slurm ends its processes first.

    Raises:
        SlurmInterrupted: Inside the job: Slurm ends its processes, and with them this command.
    """
    run_command("scontrol", ["requeue", job_id])


def resume(job_id: str) -> None:
    """Let a suspended job go on. Slurm allows it to operators and administrators alone."""
    run_command("scontrol", ["resume", job_id])


def cancel(job_id: str) -> None:
    """End a job: Slurm sends SIGTERM to its processes and, after KillWait seconds, SIGKILL."""
    run_command("scancel", [job_id])


def steps(job_id: str, name: str) -> list[str]:
    """Return a job's running steps of a name, as "123.0", which `signal` takes like a job's id.

    Args:
        job_id: The job.
        name: The step's name, from srun --job-name.
    """
    query = ["--steps", f"--jobs={job_id}", "--format=%i|%j"]
    lines = _squeue(query, TRIES).stdout.splitlines()
    parts = [line.strip().partition("|") for line in lines]
    return [step for step, _, step_name in parts if step_name == name]


def signal(job_id: str, name: str, batch: bool = False) -> None:
    """Send a signal to the processes of a job.

    Args:
        job_id: The job, or one step as `steps` returns it.
        name: The signal, as in "USR1".
        batch: Send it to the batch script instead of the job steps. For a training job that is the
            launcher, which must know that it was asked to stop, or it would start the ranks again.
            It passes the signal on to the ranks.
    """
    if "." not in job_id:
        _split_pending_tasks(job_id)
    run_command("scancel", [f"--signal={name}", *(["--batch"] if batch else []), job_id])


def _split_pending_tasks(job_id: str) -> None:
    """Give the pending tasks of a task's array records of their own, so that it takes a signal.

    slurmctld keeps the tasks that have not started yet in one record. While it holds several,
    slurmctld delivers a signal to a running task and answers all the same that the job cannot be
    altered now (_signal_pending_job_array_tasks in Slurm's src/slurmctld/job_mgr.c). scancel then
    sends the signal nine times more, which takes 95 s, and fails.
    """
    array, is_task, _ = job_id.partition("_")
    if not is_task:
        return
    query = ["--array", "--states=PENDING", f"--jobs={array}", "--format=%A %K"]
    lines = _squeue(query, TRIES).stdout.splitlines()
    # The tasks of that record have the array's id for their own.
    together = [task for raw, task in map(str.split, lines) if raw == array]
    if len(together) > 1:
        # An update of some of its tasks takes them out of the record, one of all would not, so one
        # stays. The value is what sbatch was given.
        tasks = ",".join(together[1:])
        # One that starts meanwhile is refused, and has a record of its own then.
        with contextlib.suppress(SlurmError):
            run_command("scontrol", ["update", f"JobId={array}_[{tasks}]", "Requeue=1"])


def _squeue(arguments: Sequence[str], tries: int = 1) -> subprocess.CompletedProcess[str]:
    """Run squeue without its head line, and again when it fails for another reason than the job.

    Raises:
        SlurmAway: slurmctld does not answer.
        SlurmError: squeue failed otherwise.
    """
    deadline = time.monotonic() + COMMAND_SECONDS
    while True:
        tries -= 1
        try:
            return run_command("squeue", ["--noheader", *arguments])
        except SlurmError as error:
            if _UNKNOWN_JOB in str(error) or tries <= 0 or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def _parse(line: str) -> JobState:
    """Read a line that squeue printed for `_FIELDS`."""
    job_id, raw, state, reason, nodes, num_nodes, *times, restarts, name = line.split(
        "|", len(_FIELDS) - 1
    )
    submitted, eligible, started, ends = (float(t) if t.isdigit() else None for t in times)
    return JobState(
        job_id,
        raw,
        # What 24.11 calls a running job while it delivers a signal.
        "RUNNING" if state == "SIGNALING" else state,
        "" if reason == "None" else reason,
        nodes,
        int(num_nodes),
        submitted,
        eligible,
        started,
        ends,
        int(restarts),
        name.removesuffix("|"),
    )
