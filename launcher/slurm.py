"""Slurm's commands as functions: sbatch, squeue, scontrol, scancel. Argument lists without a shell; clear errors."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretrain.config import ConfigError, RunFailed

COMMAND_SECONDS = 120.0  # longer than Slurm's own timeouts
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
# The last is what scontrol makes of no answer at all.
_AWAY = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted|connection refused"
    r"|communication connection failure|transport endpoint|in standby mode|unexpected message received",
    re.IGNORECASE,
)
# The place of whoever submits must not become the place of the job's processes.
_PLACES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PRETRAIN_ATTEMPT",
)
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")


class SlurmError(RunFailed):
    """A Slurm command failed; the message has the command's own words."""


class SlurmAway(SlurmError):
    """slurmctld does not answer: a later try may succeed."""


@dataclass(frozen=True)
class JobState:
    """A job, or an array's task, as squeue knows it. Times are unix seconds, None while Slurm has none."""

    job_id: str
    """What commands take: "123", or an array's task "123_0"."""
    raw_id: str
    """SLURM_JOB_ID inside the job; another number than job_id's for an array's task."""
    state: str
    """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, ..."""
    reason: str
    nodes: str
    """The node list, "n[1-4]"; empty while it waits."""
    num_nodes: int
    submitted_at: float | None
    eligible_at: float | None
    started_at: float | None
    """While it waits: when Slurm expects to start it, if it says."""
    ends_at: float | None
    restarts: int
    name: str

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def submit(arguments: Sequence[str], script: str) -> str:
    """Sends `script` with sbatch's `arguments` and returns the job's id. Raises SlurmError with what sbatch says."""
    try:
        answer = _run("sbatch", ["--parsable", *arguments], script)
    except SlurmAway as error:
        raise SlurmAway(
            f"{error}. Should it have arrived all the same, `squeue --me` shows the job: cancel it before you "
            "submit again"
        ) from None
    job_id = answer.stdout.strip().split(";")[0]  # "id;cluster" on federated sites
    if not job_id.isdigit():
        raise SlurmError(f"sbatch: answered {answer.stdout.strip()!r} instead of a job id")
    return job_id


def test(arguments: Sequence[str], script: str) -> str:
    """What `sbatch --test-only` says of the job's start, sending nothing. Raises SlurmError when Slurm would refuse it."""
    answer = _run("sbatch", ["--test-only", *arguments], script)
    return _words(answer.stderr or answer.stdout)


def jobs(ids: Iterable[str]) -> dict[str, JobState] | None:
    """The states of `ids` ("123", "123_0", or the raw id of an array's task), by the id asked for.

    Ids that Slurm has forgotten (it does, minutes after a job's end) are left out. None: slurmctld does not answer.
    """
    asked = set(ids)
    if not asked:
        return {}
    shape = ",".join(f"{field}:|" for field in _FIELDS)
    try:
        answer = _run(
            "squeue",
            [
                "--noheader",
                "--array",
                "--states=all",
                f"--jobs={','.join(sorted(asked))}",
                f"--Format={shape}",
            ],
        )
    except SlurmAway:
        return None
    except SlurmError as error:
        if "Invalid job id" in str(
            error
        ):  # what squeue says of one forgotten id; among several it is silent
            return {}
        raise
    states = [
        _parse(line) for line in answer.stdout.splitlines() if line.count("|") >= len(_FIELDS)
    ]
    return {key: state for state in states for key in (state.raw_id, state.job_id) if key in asked}


def is_over(job_id: str) -> bool | None:
    """Whether a job has ended or is forgotten; None: slurmctld does not answer."""
    states = jobs([job_id])
    return None if states is None else job_id not in states or states[job_id].is_over


def requeue(job_id: str) -> None:
    """Sends a running job back to the queue; Slurm ends it first."""
    _run("scontrol", ["requeue", job_id])


def rename(job_id: str, name: str) -> None:
    """Gives a job, or one task of an array, another name in squeue."""
    _run("scontrol", ["update", f"JobId={job_id}", f"JobName={name}"])


def cancel(job_id: str) -> None:
    """Ends a job: SIGTERM to its processes and, after the site's KillWait, SIGKILL."""
    _run("scancel", [job_id])


def steps(job_id: str, name: str) -> list[str]:
    """The job's running steps of that name, as "123.0", which `signal` takes like a job's id."""
    shape = ["--noheader", f"--jobs={job_id}", "--format=%i|%j"]
    lines = _run("squeue", ["--steps", *shape]).stdout.splitlines()
    return [step for step, _, of in (line.strip().partition("|") for line in lines) if of == name]


def signal(job_id: str, name: str, batch: bool = False) -> None:
    """Sends a signal ("USR1") to every process of the job's steps, or with `batch` to its script alone."""
    _run("scancel", [f"--signal={name}", *(["--batch"] if batch else []), job_id])


def _run(
    program: str, arguments: Sequence[str], script: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = _environment() | (
        {"SLURM_TIME_FORMAT": "%s"} if program == "squeue" else {}
    )  # unix seconds
    try:
        answer = subprocess.run(
            [program, *arguments],
            input=script,
            stdin=None if script else subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{program}: no such command here. Slurm's commands are on a cluster's login nodes; "
            "`launcher local` trains on this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{program}: no answer within {COMMAND_SECONDS:.0f} s") from None
    if answer.returncode:
        words = _words(answer.stderr or answer.stdout) or f"exit code {answer.returncode}"
        raise (SlurmAway if _AWAY.search(words) else SlurmError)(f"{program}: {words}")
    return answer


def _environment() -> dict[str, str]:
    """Ours, which sbatch hands on to the job, without what an outer job or a user's squeue settings would change."""
    dropped = re.compile(r"(SLURM|SQUEUE|SRUN|SCANCEL)_")
    return {
        k: v for k, v in os.environ.items() if k in _KEPT or not (k in _PLACES or dropped.match(k))
    }


def _words(text: str) -> str:
    """'sbatch: error: Invalid account' -> 'Invalid account'; several lines in one."""
    lines = [
        re.sub(r"^\w+: (?:(?:error|fatal): )?", "", line).strip() for line in text.splitlines()
    ]
    return "; ".join(line for line in lines if line)


def _parse(line: str) -> JobState:
    job_id, raw, state, reason, nodes, num_nodes, *times, restarts, name = line.split(
        "|", len(_FIELDS) - 1
    )
    submitted, eligible, started, ends = (float(t) if t.isdigit() else None for t in times)
    return JobState(
        job_id,
        raw,
        state,
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
