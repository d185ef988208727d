"""Run Slurm's commands: sbatch, squeue, scontrol and scancel.

Each is a function that builds an argument list, without a shell, and raises an error with the words
of the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from signal import SIGTERM

from pretrain.config import ConfigError, RunFailed

# ---- Run one of Slurm's commands, without a shell, and tell its failures apart ----


COMMAND_SECONDS = 120.0
"""The longest time for one command; longer than Slurm's own timeouts."""
_AWAY = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted"
    r"|connection refused|communication connection failure|transport endpoint|in standby mode"
    # What scontrol makes of no answer at all.
    r"|unexpected message received",
    re.IGNORECASE,
)
"""Words of Slurm's commands when slurmctld does not answer. They have no exit code for it."""
_NO_CLUSTER = re.compile(
    r"could not establish a configuration source|unable to process configuration file",
    re.IGNORECASE,
)
"""Words of Slurm's commands on a machine that belongs to no cluster."""
_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PRETRAIN_ATTEMPT",
    "PRETRAIN_RENDEZVOUS",
)
"""Variables that tell a process which rank it is. sbatch hands its environment on to the job, and
the rank of a process that submits must not become the rank of the job's processes."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables of Slurm that say how to reach the cluster."""


class SlurmError(RunFailed):
    """A Slurm command failed. The message has the words of the command."""


class NoSlurm(ConfigError):
    """This machine has no Slurm commands, or they know of no cluster."""


class SlurmAway(SlurmError):
    """slurmctld, Slurm's controller, does not answer. A later try may succeed."""


class SlurmInterrupted(SlurmError):
    """SIGTERM ended the command, as it does when Slurm ends the job in which the command runs."""


def run_command(
    program: str, arguments: Sequence[str], script: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and return its output.

    Args:
        program: The command.
        arguments: Its arguments.
        script: What it reads from stdin.

    Raises:
        NoSlurm: There is no such command here, or no cluster.
        SlurmAway: slurmctld does not answer.
        SlurmInterrupted: SIGTERM ended the command.
        SlurmError: The command failed otherwise.
    """
    environment = slurm_environment()
    if program == "squeue":
        # Times in unix seconds instead of a format without a time zone.
        environment["SLURM_TIME_FORMAT"] = "%s"
    try:
        answer = subprocess.run(
            [program, *arguments],
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise NoSlurm(
            f"{program}: no such command here. Slurm's commands are on the login nodes of a "
            "cluster; `launcher local` and `launcher sweep --nproc` train on this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{program}: no answer within {COMMAND_SECONDS:.0f} s") from None
    if answer.returncode == -SIGTERM:
        raise SlurmInterrupted(f"{program}: ended by SIGTERM")
    if answer.returncode:
        words = words_of(answer.stderr or answer.stdout) or f"exit code {answer.returncode}"
        # In a job there is a cluster, so its configuration is missing for a moment only.
        if _NO_CLUSTER.search(words) and "SLURM_JOB_ID" not in os.environ:
            raise NoSlurm(
                f"{program}: there is no Slurm cluster here. Slurm's commands are installed, but "
                "find no configuration (slurm.conf, or the file that SLURM_CONF names). Log in to "
                "a cluster; `launcher local` and `launcher sweep --nproc` train on this machine"
            )
        raise (SlurmAway if _AWAY.search(words) else SlurmError)(f"{program}: {words}")
    return answer


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without what would change Slurm's commands or the job.

    The SLURM_... variables of a job that this process runs in would be handed on to the new job,
    where srun takes some of them for options. A user's SQUEUE_... variables would change the output
    that is parsed here. SBATCH_... variables are options of sbatch: SBATCH_ARRAY_INX makes a job
    array of every job. Those that say where a job may run are options of the job by now
    (pretrain.launcher.site.with_variables).
    """
    dropped = re.compile(r"(SLURM|SQUEUE|SINFO|SRUN|SCANCEL|SBATCH|SALLOC)_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name in _RANK_VARIABLES or dropped.match(name))
    }
    if "PYTHONPATH" in environment:
        # "PYTHONPATH=$PYTHONPATH:/mine" leaves an empty entry, by which Python would look for
        # modules in the job's working directory first (PYTHONSAFEPATH does not prevent that).
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    return environment


def words_of(text: str) -> str:
    """Join the lines of an error, without what comes before the words.

    "sbatch: error: Invalid account" becomes "Invalid account".
    """
    lines = [
        re.sub(r"^\w+: (?:(?:error|fatal): )?", "", line).strip() for line in text.splitlines()
    ]
    return "; ".join(line for line in lines if line)


# ---- slurm options ----
# Name the options of sbatch and srun that the launcher sets itself, and refuse them elsewhere.


OUR_OPTIONS = (
    "account",
    "array",
    "batch",
    "chdir",
    "constraint",
    "cpus-per-task",
    "dependency",
    "export",
    "gpus-per-node",
    "help",
    "job-name",
    "mem",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "error",
    "input",
    "no-kill",
    "export-file",
    "parsable",
    "partition",
    "qos",
    "requeue",
    "signal",
    "test-only",
    "time",
    "time-min",
    "uid",
    "usage",
    "version",
    "wait",
    "wrap",
)
"""Options of sbatch that a site file may not give: most are set in `Job.arguments`, and the others
would change what the launcher relies on. sbatch also accepts any unambiguous beginning of an
option's name."""
SRUN_OPTIONS = (
    "chdir",
    "cpus-per-task",
    "error",
    "exclude",
    "export",
    "gpus-per-node",
    "input",
    "jobid",
    "job-name",
    "kill-on-bad-exit",
    "label",
    "multi-prog",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "output",
    "pty",
    "signal",
    "test-only",
    "time",
    "wait",
)
"""Options of srun that a site file may not give, for the same reasons."""


def why_refused(argument: str, ours: Sequence[str] = OUR_OPTIONS) -> str:
    """Return why an argument may not be passed on to Slurm; "" if it may.

    Args:
        argument: The argument, "--name=value" or "--name".
        ours: The options that the launcher sets itself.
    """
    if not re.fullmatch(r"--[a-z][a-z-]+(=.*)?", argument):
        return 'not an option. Write each option as one string, such as "--reservation=night"'
    if any(name.startswith(option_name(argument)) for name in ours):
        return "the launcher sets this option itself"
    return ""


def option_name(argument: str) -> str:
    """Return the name of an option: "--exclude=n1" -> "exclude"."""
    return argument.removeprefix("--").split("=")[0]


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


# ---- Ask Slurm about the nodes of a running job, and whether it takes them away ----


UNUSABLE = ("down", "fail", "drained", "error", "unknown", "power", "reboot", "maint")
"""Parts of the states, as sinfo words them, of nodes on which no step should be started."""


def hostnames(nodes: str) -> list[str]:
    """Return the nodes of a node list, in its order: "n[1,3]" becomes n1, n3.

    Raises:
        SlurmError: This is no node list.
    """
    return run_command("scontrol", ["show", "hostnames", nodes]).stdout.split() if nodes else []


def unusable_nodes(names: Sequence[str]) -> dict[str, str]:
    """Return those of these nodes that are down or do not answer, each with its state.

    A node that is being drained still takes the steps of the jobs on it. Nothing is returned while
    slurmctld does not answer.
    """
    query = ["--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T"]
    try:
        lines = run_command("sinfo", query).stdout.splitlines()
    except SlurmError:
        return {}
    states = dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
    # A star: the node does not answer.
    return {
        node: state.strip()
        for node, state in states.items()
        if "*" in state or any(word in state for word in UNUSABLE)
    }


def exclude(job_id: str, nodes: Iterable[str]) -> None:
    """Keep a job that waits in the queue off some nodes, beside those it avoids already."""
    job = f"--jobs={job_id}"
    before = run_command("squeue", ["--noheader", job, "--Format=ExcNodes:|"]).stdout
    excluded = hostnames(before.strip().rstrip("|").replace("(null)", ""))
    listed = ",".join(dict.fromkeys([*excluded, *nodes]))
    run_command("scontrol", ["update", f"JobId={job_id}", f"ExcNodeList={listed}"])


@dataclass(frozen=True)
class Preemption:
    """The facts that tell a preempted job from one that a user cancelled."""

    state: str
    """RUNNING in the grace time, COMPLETING once Slurm ends the job."""
    restarts: int
    """One more than in the job's own environment once Slurm has requeued it."""
    preempted_at: str | None
    """Unix seconds at which Slurm chose the job to make room; None if it did not."""


def preemption(job_id: str) -> Preemption | None:
    """Return if a job is being preempted; None when Slurm does not say."""
    columns = "State:|,RestartCnt:|,PreemptTime:|"
    query = ["--noheader", "--array", "--states=all", f"--jobs={job_id}", f"--Format={columns}"]
    try:
        lines = run_command("squeue", query).stdout.split()
    except SlurmError:
        return None
    fields = lines[0].split("|") if lines else []
    if len(fields) < 3 or not fields[1].isdigit():
        return None
    return Preemption(fields[0], int(fields[1]), fields[2] if fields[2] != "N/A" else None)


def has_lost_batch_host(job_id: str) -> bool:
    """Return True if a running job no longer holds the node on which its batch script ran."""
    query = ["--noheader", "--array", f"--jobs={job_id}", "--format=%T|%B|%N"]
    try:
        state, batch_host, nodes = run_command("squeue", query).stdout.strip().split("|")
        return state == "RUNNING" and batch_host not in hostnames(nodes)
    except (SlurmError, ValueError):
        return False
