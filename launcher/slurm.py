"""Speak to Slurm: only this file and slurm_job.py know its commands, states and variables.

The rest of the launcher asks in plain terms: is a job over, which nodes does it hold, put it back
into the queue. Each command is an argument list without a shell, and a failure raises an error with
the message of the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal as signals
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.config import ConfigError, RunFailed
from pretrain.config.errors import say
from pretrain.processes import signals_blocked
from pretrain.rundir.jobs import job_id_of

# ---- Run one of Slurm's commands, without a shell, and tell its failures apart ----


def names_in(text: str) -> frozenset[str]:
    """Return the names that a text lists, separated by white space."""
    return frozenset(text.split())


COMMAND_SECONDS = 120.0
"""The longest time for one command; longer than Slurm's own timeouts."""
_AWAY = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted"
    r"|connection refused|communication connection failure|transport endpoint|in standby mode"
    # scontrol says this if it gets no answer at all.
    r"|unexpected message received",
    re.IGNORECASE,
)
"""Messages of Slurm's commands if slurmctld does not answer, for which they have no exit code."""
_NO_CLUSTER = re.compile(
    r"could not establish a configuration source|unable to process configuration file",
    re.IGNORECASE,
)
"""Messages of Slurm's commands on a machine that belongs to no cluster."""
_RANK_VARIABLES = names_in(
    """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PRETRAIN_ATTEMPT
    PRETRAIN_RENDEZVOUS
    """
)
"""Variables that tell a process which rank it is. sbatch passes its environment on to the job, and
the rank of a process that submits must not become the rank of the job's processes."""
_KEPT = names_in(
    """
    SLURM_CONF SLURM_CONF_SERVER SLURM_CLUSTERS SLURM_JWT SBATCH_PARTITION SBATCH_ACCOUNT
    SBATCH_QOS SBATCH_CONSTRAINT SBATCH_RESERVATION SBATCH_WCKEY
    """
)
"""Variables of Slurm that say how to reach the cluster, and where and on whose account jobs run."""


CONTROLLER = "slurmctld"
"""The name of Slurm's controller, for messages."""
AWAY = f"{CONTROLLER} does not answer"


class SlurmError(RunFailed):
    """A Slurm command failed. The message contains the command's own message."""


class NoSlurm(ConfigError):
    """This machine has no Slurm commands, or they know of no cluster."""


class SlurmAway(SlurmError):
    """slurmctld, Slurm's controller, does not answer. A later try may succeed."""


def run_command(
    program: str, arguments: Sequence[str], script: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and return its output.

    SIGTERM, with which Slurm ends the job in which the command may run, does not end it.

    Args:
        program: The command.
        arguments: Its arguments.
        script: The text that it reads from stdin.

    Raises:
        NoSlurm: There is no such command here, or no cluster.
        SlurmAway: slurmctld does not answer.
        SlurmError: The command failed otherwise.
    """
    environment = slurm_environment()
    if program == "squeue":
        # Times in unix seconds instead of a format without a time zone.
        environment["SLURM_TIME_FORMAT"] = "%s"
    try:
        with signals_blocked(signals.SIGTERM):
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
            "cluster; `launcher local` trains on this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{program}: {AWAY} within {COMMAND_SECONDS:.0f} s") from None
    if answer.returncode:
        words = words_of(answer.stderr or answer.stdout) or f"exit code {answer.returncode}"
        # Inside a job there must be a cluster, so its configuration is missing only for a moment.
        if _NO_CLUSTER.search(words) and "SLURM_JOB_ID" not in os.environ:
            raise NoSlurm(f"{program}: there is no Slurm cluster here ({words})")
        if _AWAY.search(words):
            raise SlurmAway(f"{program}: {AWAY} ({words})")
        raise SlurmError(f"{program}: {words}")
    return answer


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without what would change Slurm's commands or the job.

    The SLURM_... variables of a job that this process runs in would be passed on to the new job,
    where srun takes some of them for options. A user's SQUEUE_... variables would change the output
    that is parsed here. SBATCH_... variables are options of sbatch: SBATCH_ARRAY_INX turns every
    job into a job array. Only variables that say where a job may run are kept.
    """
    dropped = re.compile(r"(SLURM|SQUEUE|SINFO|SRUN|SCANCEL|SBATCH|SALLOC)_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name in _RANK_VARIABLES or dropped.match(name))
    }
    if "PYTHONPATH" in environment:
        # "PYTHONPATH=$PYTHONPATH:/mine" leaves an empty entry, which makes Python look for modules
        # in the job's working directory first (PYTHONSAFEPATH does not prevent that).
        entries = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    return environment


def words_of(text: str) -> str:
    """Join the lines of an error message, without the prefixes of the command.

    "sbatch: error: Invalid account" becomes "Invalid account".
    """
    lines = [
        re.sub(r"^\w+: (?:(?:error|fatal): )?", "", line).strip() for line in text.splitlines()
    ]
    return "; ".join(line for line in lines if line)


def is_own_variable(name: str) -> bool:
    """Return True for a variable of jobs that Slurm, bash or the launcher sets itself."""
    # A site may set MASTER_ADDR and MASTER_PORT, to choose where ranks meet.
    ours = _RANK_VARIABLES - {"MASTER_ADDR", "MASTER_PORT"} | {"BASH_ENV", "IFS"}
    return name in ours or name.startswith(("SLURM_", "SBATCH_", "BASH_FUNC_"))


# ---- The job that this process runs in ----


def own_job_id(command: str) -> str:
    """Return the id of the job that this process runs in.

    Args:
        command: The command that the user has called, for the message.

    Raises:
        ConfigError: Not inside a Slurm job.
    """
    if (job_id := job_id_of(os.environ)) is None:
        raise ConfigError(
            f"{command}: SLURM_JOB_ID is not set; this command runs inside a Slurm job. "
            "`launcher submit` and `launcher evaluate-checkpoints` submit such jobs"
        )
    return job_id


def own_restarts() -> int:
    """Return how often Slurm had requeued the job when this process started."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def own_nodes() -> str:
    """Return the node list that the job of this process started with."""
    return os.environ.get("SLURM_JOB_NODELIST", "")


class Task(NamedTuple):
    """A process of a job step."""

    rank: int
    local_rank: int
    """The number of the process on its node."""
    node: str
    num_tasks: int
    per_node: int


def own_task() -> Task:
    """Return which process of its step this one is."""
    given = os.environ
    rank, local_rank = int(given["SLURM_PROCID"]), int(given["SLURM_LOCALID"])
    num_tasks, nodes = int(given["SLURM_STEP_NUM_TASKS"]), int(given["SLURM_STEP_NUM_NODES"])
    return Task(rank, local_rank, given["SLURMD_NODENAME"], num_tasks, num_tasks // nodes)


# ---- Ask about jobs, submit them, and signal, requeue or cancel them ----


TRIES = 5
"""How often squeue is called before a command that needs its answer gives up. squeue is called only
once if the answer is just shown, or is asked for again later."""
RETRY_SECONDS = 1.0
"""Time between two of these tries."""
OVER = names_in(
    """
    BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED
    TIMEOUT
    """
)
"""States of a job that has ended."""
STARTS = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
"""States of a job that is in the queue and has no running processes."""
_COLUMNS = """
    JobArrayID JobID State Reason NodeList SubmitTime StartTime EndTime PreemptTime BatchHost
    RestartCnt
"""
_FIELDS = _COLUMNS.split()
"""The columns of squeue, in the order in which `_parse` takes it apart."""
_UNKNOWN_JOB = "Invalid job id"
"""squeue's message for a job that Slurm never had, or has forgotten."""


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
    submitted_at: float | None
    started_at: float | None
    """While the job waits, the time at which Slurm expects to start it, if it says so."""
    ends_at: float | None
    """The time limit, or when the job ended."""
    preempted_at: float | None
    """When Slurm chose the job to make room for another one."""
    batch_host: str
    """The node on which the batch script runs, or ran before it died."""
    restarts: int
    """The number of requeues so far."""

    @property
    def is_over(self) -> bool:
        """Return True if the job has ended."""
        return self.state in OVER

    @property
    def is_pending(self) -> bool:
        """Return True while the job waits for nodes."""
        return self.state == "PENDING"

    @property
    def is_starting(self) -> bool:
        """Return True while nothing of the job runs, because it waits or gets its nodes."""
        return self.state in STARTS

    @property
    def is_running(self) -> bool:
        """Return True while the job's processes run."""
        return self.state == "RUNNING"

    @property
    def is_suspended(self) -> bool:
        """Return True while the job's processes are stopped on its nodes."""
        return self.state == "SUSPENDED"

    @property
    def is_ending(self) -> bool:
        """Return True while Slurm is ending the job's processes."""
        return self.state == "COMPLETING"

    @property
    def is_held(self) -> bool:
        """Return True if the job waits until somebody releases it."""
        # JobHeldUser, JobHeldAdmin, or "launch failed requeued held" after a failed prolog.
        return "held" in self.reason.lower()


def submit_script(arguments: Sequence[str], script: str) -> str:
    """Submit a batch script.

    Args:
        arguments: The options of sbatch.
        script: The text of the script.

    Returns:
        The id of the job.

    Raises:
        SlurmError: sbatch refused the job.
        SlurmAway: No answer of slurmctld came. It may have taken the job all the same.
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
        raise SlurmAway(
            f"sbatch: answered {answer.stdout.strip()!r} instead of a job id. If `squeue --me` "
            "shows the job, cancel it before you submit again"
        )
    return job_id


ANSWER = "# sbatch --test-only:"
"""How the line of a dry run begins that shows the answer of `test`."""


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


def can_start(options: Sequence[str]) -> bool:
    """Return True unless Slurm says that a job with these options of sbatch cannot start."""
    try:
        test(options, "#!/bin/sh\n")
    except SlurmError as error:
        return isinstance(error, SlurmAway)
    return True


def jobs(ids: Iterable[str], tries: int = 1) -> dict[str, JobState]:
    """Ask Slurm for the states of jobs.

    Args:
        ids: "123", for a task of an array "123_0" or its raw id.
        tries: How often squeue is asked when it fails.

    Returns:
        The states by the ids that were asked for. Slurm forgets a job minutes after its end; such
        ids are left out.

    Raises:
        SlurmAway: slurmctld does not answer.
        SlurmError: squeue failed for another reason.
    """
    asked = set(ids)
    if not asked:
        return {}
    # "Field:|" prints a field without padding, followed by a bar.
    columns = ",".join(f"{field}:|" for field in _FIELDS)
    query = ["--array", "--states=all", f"--jobs={','.join(sorted(asked))}", f"--Format={columns}"]
    try:
        lines = _squeue(query, tries).stdout.splitlines()
    except SlurmError as error:
        # squeue fails like this for a single forgotten id; among several it leaves one out.
        if _UNKNOWN_JOB in str(error):
            return {}
        raise
    states = [_parse(line) for line in lines if line.count("|") == len(_FIELDS)]
    return {key: state for state in states for key in (state.raw_id, state.job_id) if key in asked}


def job(job_id: str) -> JobState | None:
    """Return the state of a job; None if Slurm gives none, for whatever reason."""
    try:
        return jobs([job_id]).get(job_id)
    except SlurmError:
        return None


def is_over(job_id: str) -> bool | None:
    """Return True if a job has ended or is forgotten, None if Slurm does not say."""
    try:
        state = jobs([job_id]).get(job_id)
    except SlurmError:
        return None
    return state is None or state.is_over


def knows_end(job_id: str, name: str) -> bool | None:
    """Return whether slurmctld knows that a job's step is over; None if it does not answer."""
    try:
        return not steps(job_id, name, tries=1)
    except SlurmError:
        return None


def array_size() -> int:
    """Return how many tasks a job array may have on this cluster; 0 if it has no job arrays.

    Raises:
        SlurmError: scontrol failed.
    """
    answer = run_command("scontrol", ["show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.stdout, re.MULTILINE)
    # MaxArraySize is one more than the highest index, so it is the number of tasks.
    return int(found[1]) if found else 0


def requeue(job_id: str) -> None:
    """Put a running job back into the queue. Slurm ends its processes first."""
    run_command("scontrol", ["requeue", job_id])


def order(what: str, job_id: str) -> str:
    """Return the command with which a user may "release" or "resume" a job."""
    return f"scontrol {what} {job_id}"


def cancel(job_id: str) -> None:
    """End a job: Slurm sends SIGTERM to its processes and, after KillWait seconds, SIGKILL."""
    run_command("scancel", [job_id])


def steps(job_id: str, name: str, tries: int = TRIES) -> list[str]:
    """Return a job's running steps with a name, as "123.0", which `signal` takes like a job's id.

    Args:
        job_id: The job.
        name: The step's name, from srun --job-name.
        tries: How often squeue is asked when it fails.
    """
    query = ["--steps", f"--jobs={job_id}", "--format=%i|%j"]
    lines = _squeue(query, tries).stdout.splitlines()
    parts = [line.strip().partition("|") for line in lines]
    return [step for step, _, step_name in parts if step_name == name]


def signal(job_id: str, name: str, batch: bool = False) -> None:
    """Send a signal to the processes of a job.

    Args:
        job_id: The job, or one step as `steps` returns it.
        name: The signal, as in "USR1".
        batch: Send it to the batch script instead of the job steps. In a training job the launcher
            gets it there and passes it on to the ranks. The launcher must know that it was asked to
            stop, or it would start the ranks again.
    """
    if "." not in job_id:
        _split_pending_tasks(job_id)
    run_command("scancel", [f"--signal={name}", *(["--batch"] if batch else []), job_id])


def _split_pending_tasks(job_id: str) -> None:
    """Give each pending task of a job array its own record, so that a running task gets a signal.

    slurmctld keeps the tasks that have not started yet in one record. While that record holds
    several tasks, slurmctld delivers a signal to a running task, but still answers that the job
    cannot be altered now (_signal_pending_job_array_tasks in Slurm's src/slurmctld/job_mgr.c).
    scancel then sends the signal nine more times, which takes 95 s, and fails.
    """
    array, is_task, _ = job_id.partition("_")
    if not is_task:
        return
    query = ["--array", "--states=PENDING", f"--jobs={array}", "--format=%A %K"]
    lines = _squeue(query, TRIES).stdout.splitlines()
    # Tasks in the common record have the array's id as their own raw id.
    together = [task for raw, task in map(str.split, lines) if raw == array]
    if len(together) > 1:
        # An update of some tasks takes them out of the record, but an update of all would not, so
        # one task is left in it. The value is the one that sbatch was given.
        tasks = ",".join(together[1:])
        # Slurm refuses the update of a task that has just started, which then has its own record.
        with contextlib.suppress(SlurmError):
            run_command("scontrol", ["update", f"JobId={array}_[{tasks}]", "Requeue=1"])


def _squeue(arguments: Sequence[str], tries: int) -> subprocess.CompletedProcess[str]:
    """Run squeue without its header; run it again if it fails, unless the job is unknown.

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
    job_id, raw, state, reason, nodes, *times, host, restarts, _ = line.split("|")
    submitted, started, ends, preempted = (float(t) if t.isdigit() else None for t in times)
    # Slurm 24.11 calls a running job SIGNALING while it delivers a signal.
    state = "RUNNING" if state == "SIGNALING" else state
    reason = "" if reason == "None" else reason
    return JobState(
        job_id, raw, state, reason, nodes, submitted, started, ends, preempted, host, int(restarts)
    )


# ---- Ask Slurm about the nodes of a running job, and exclude nodes from its next start ----


UNUSABLE = ("down", "fail", "drained", "error", "unknown", "power", "reboot", "maint")
"""Parts of sinfo's states of nodes on which no step should be started."""


def hostnames(nodes: str) -> list[str]:
    """Return the nodes of a node list, in its order: "n[1,3]" becomes n1, n3.

    Raises:
        SlurmError: The text is not a node list.
    """
    return run_command("scontrol", ["show", "hostnames", nodes]).stdout.split() if nodes else []


def unusable_nodes(names: Sequence[str]) -> dict[str, str]:
    """Return the nodes that are down or do not answer, each with its state.

    A node that is being drained is not among them, as it still takes steps of its jobs. While
    slurmctld does not answer, the result is empty.
    """
    query = ["--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T"]
    try:
        lines = run_command("sinfo", query).stdout.splitlines()
    except SlurmError:
        return {}
    states = dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
    # A star in the state means that the node does not answer.
    return {
        node: state.strip()
        for node, state in states.items()
        if "*" in state or any(word in state for word in UNUSABLE)
    }


def are_down(states: Mapping[str, str]) -> bool:
    """Return True if Slurm calls one of these nodes down, by what `unusable_nodes` returned."""
    return any("down" in state for state in states.values())


def exclude(job_id: str, nodes: Iterable[str]) -> None:
    """Exclude nodes from the start of a waiting job, in addition to those already excluded."""
    job = f"--jobs={job_id}"
    before = run_command("squeue", ["--noheader", job, "--Format=ExcNodes:|"]).stdout
    excluded = hostnames(before.strip().rstrip("|").replace("(null)", ""))
    listed = ",".join(dict.fromkeys([*excluded, *nodes]))
    run_command("scontrol", ["update", f"JobId={job_id}", f"ExcNodeList={listed}"])


def has_lost_batch_host(job_id: str) -> bool:
    """Return True if a running job no longer holds the node on which its batch script ran."""
    state = job(job_id)
    try:
        return bool(state and state.is_running and state.batch_host not in hostnames(state.nodes))
    except SlurmError:
        return False


# ---- Job steps: what srun reports about their end, and how to end them ----


# The output of srun. Lines that a task prints begin with a label, so they cannot be taken for lines
# of srun itself.
_LABEL = re.compile(rb" {0,9}(\d{1,9}): ?")
"""The label that `srun --label` puts before each line of a task: its rank, padded with spaces."""
_SAID = "srun: error: "
_TASKS = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>\d+(?:[,-]\d+)*): (?P<how>.*)")
"""Tasks that ended badly: "srun: error: n2: tasks 2-3: Killed"."""
_EXITED = "Exited"
"""The first word for a task that exited by itself."""
_LOST = re.compile(
    r"srun: error: (?:Node failure on (?P<failed>\S+)"
    r"|Task launch for \S+ failed on node (?P<silent>\S+): (?P<why>.*))"
)
"""A node died, or no task can be started on it."""


class EndedTasks(NamedTuple):
    """Tasks of a step that ended badly, as srun reports them."""

    node: str
    """srun may report several nodes in one line, as n[1-2]."""
    ranks: str
    """Such as "0,2-4"."""
    how: str
    """Such as "Killed", or "Exited with exit code 3"."""


def labelled(line: bytes) -> tuple[int, bytes] | None:
    """Return the rank and the text of a line that a task printed; None for a line of srun."""
    label = _LABEL.match(line)
    return (int(label[1]), line[label.end() :]) if label else None


def ended_tasks(line: str) -> EndedTasks | None:
    """Return the tasks whose failure a line of srun reports."""
    match = _TASKS.fullmatch(line)
    return EndedTasks(match["node"], match["ranks"], match["how"]) if match else None


def has_exited(lines: Iterable[str]) -> bool:
    """Return True if lines of srun say that a task exited by itself, with an error."""
    return any(task.how.startswith(_EXITED) for line in lines if (task := ended_tasks(line)))


def lost_node(line: str) -> tuple[str, str] | None:
    """Return the node that died or takes no task, and the reason, if a line of srun says so."""
    match = _LOST.fullmatch(line)
    return (match["failed"] or match["silent"], match["why"] or "it died") if match else None


def first_failure(lines: Sequence[str], code: int) -> tuple[str, tuple[str, ...]]:
    """Find the first failure of a job step whose agents reported no end of a rank.

    srun reports failed tasks in the order in which they end. If a node died, ranks of other nodes
    may end first, because their connections to that node break.

    Args:
        lines: All lines of the step's log.
        code: The exit code of srun.

    Returns:
        One line for the user, with srun's message, and the nodes that the failure came from; no
        nodes if several may have failed first.
    """
    errors = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    lost = [(node[0], "", line) for line in lines if (node := lost_node(line))]
    ended = [(task.node, task.how, line) for line in lines if (task := ended_tasks(line))]
    if not (failed := lost or ended):
        # The last error counts: Slurm may have refused the step several times before.
        return f"srun ended with exit code {code}" + (f" ({errors[-1]})" if errors else ""), ()
    first, how, line = failed[0]
    # A bug ends ranks on all nodes; the fault of a node ends only the ranks on that node.
    alike = dict.fromkeys(node for node, other, _ in failed if other == how)
    nodes = (first,) if how and not how.startswith(_EXITED) else tuple(alike)
    nodes = nodes if lost or len(nodes) == 1 else ()
    return f"srun ended with exit code {code} ({line.removeprefix(_SAID)})", nodes


def signal_step(job_id: str, name: str, number: int) -> None:
    """Have slurmctld send a signal to the processes of a job's step; print it if that fails.

    Args:
        job_id: The job.
        name: The step's name, from srun --job-name.
        number: The signal.
    """
    word = signals.Signals(number).name
    try:
        for step in steps(job_id, name):
            signal(step, word.removeprefix("SIG"))
    except SlurmAway as error:
        say(f"{word}: not sent to the ranks: {error}")
    except SlurmError:
        # The step is ending, alone or with its job. If with its job, Slurm itself has sent the
        # ranks a signal.
        pass


def end_step(srun: subprocess.Popen[bytes], job_id: str, name: str, seconds: float) -> None:
    """Have srun kill the processes of its step, or slurmctld if srun does not.

    Args:
        srun: The running srun.
        job_id: The job.
        name: The step's name.
        seconds: The time that each of the two may take.
    """
    # On SIGTERM, srun sends SIGKILL to its tasks on all nodes. SIGKILL to srun itself would leave
    # the tasks running. A SIGTERM that comes while srun starts its tasks may have no effect (seen
    # with tests/slurm on a busy machine), so it is repeated after 1, 2, 4, ... seconds.
    until, pause = time.monotonic() + seconds, 1.0
    while time.monotonic() < until:
        srun.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            srun.wait(min(pause, until - time.monotonic()))
            return
        pause *= 2
    signal_step(job_id, name, signals.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        srun.wait(seconds)
    srun.kill()
    srun.wait()
