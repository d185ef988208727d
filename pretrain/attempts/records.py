"""The files of an attempt, written and read back. What a later version adds is passed over; what is missing is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pretrain.config import load_config

NUMBER = re.compile(r"\d{4,}")
CHECKPOINT = re.compile(r"step-(\d{8})")
Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Owner:
    """Who makes an attempt (owner.json). `Owner.here` describes this process."""

    nonce: str = ""
    host: str = ""
    pid: int = 0
    pid_start: int | None = None
    """Clock ticks between boot and the process's start: a process id alone is used again."""
    pid_namespace: str | None = None
    boot_id: str | None = None
    user: str = ""
    slurm_job_id: str | None = None
    slurm_restart_count: int | None = None
    slurm_cluster: str | None = None
    """Job ids are unique in a cluster, and clusters share file systems."""
    began_at: float = 0.0
    submitted_at: float | None = None
    """When this try was put in Slurm's queue; what lies between that and began_at is waiting."""
    num_processes: int = 1
    nodes: str = ""
    checkpoint_step: int | None = None
    """The newest complete checkpoint's step when the attempt began."""

    @staticmethod
    def here(
        *,
        slurm_job_id: str | None = None,
        slurm_restart_count: int | None = None,
        slurm_cluster: str | None = None,
        submitted_at: float | None = None,
        num_processes: int = 1,
        nodes: str = "",
    ) -> Owner:
        """This process. What Slurm says of it is passed in: the environment is read elsewhere."""
        host = socket.gethostname()
        pid, start, namespace = _this_process()
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user id without a name, as in a container
            user = str(os.getuid())
        return Owner(
            secrets.token_hex(8),
            host,
            pid,
            start,
            namespace,
            _boot_id(),
            user,
            slurm_job_id,
            slurm_restart_count,
            slurm_cluster,
            time.time(),
            submitted_at,
            num_processes,
            nodes or host,
        )

    @staticmethod
    def read(directory: Path) -> Owner:
        """The owner of an attempt; one of whom nothing is known where the file is damaged."""
        return _from_json(Owner, _read_json(directory / "owner.json")) or Owner()

    def __str__(self) -> str:
        job = f"job {self.slurm_job_id}, " if self.slurm_job_id else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began_at))
        return f"{job}process {self.pid} of {self.user} on {self.host}, since {since}"


@dataclass(frozen=True)
class Phase:
    """A line of phases.jsonl: from `at` on (unix seconds) the attempt did `phase`, with `step` steps done."""

    at: float
    phase: str
    step: int
    saved: int | None = None
    """The step of the checkpoint that was completed just before."""


@dataclass(frozen=True)
class Progress:
    """What moves while training lives: `count` grows with every step and every pass of an evaluation."""

    count: int
    step: int
    phase: str


@dataclass(frozen=True)
class Ended:
    """How an attempt ended (ended.json).

    `outcome` is finished, restart (saved, to be started again), stopped, failed, hung, refused (bad input), gave_up
    (failed once too often) or superseded (another attempt took the run over).
    """

    at: float
    code: int
    outcome: str
    reason: str
    step: int


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt as its files tell it."""

    number: int
    directory: Path
    owner: Owner
    phases: tuple[Phase, ...] = ()
    progress: Progress | None = None
    ended: Ended | None = None
    last_heartbeat: float = 0.0
    """Unix seconds by the file server's clock."""

    @property
    def step(self) -> int:
        """Steps done, as far as it said."""
        said = [self.progress.step] if self.progress else []
        return max([*said, *(phase.step for phase in self.phases)], default=0)


def read_attempts(run: Path) -> list[AttemptRecord]:
    """All attempts at a run, oldest first; none for a directory that is no run."""
    return [
        read_attempt(attempt_directory(run, number)) for number in sorted(numbers(run / "attempts"))
    ]


def read_attempt(directory: Path) -> AttemptRecord:
    """One attempt. What it has not written yet, or was cut off in writing, is left out."""
    lines = _read(directory / "phases.jsonl").splitlines()
    phases = tuple(phase for line in lines if (phase := _from_json(Phase, _parse(line))))
    return AttemptRecord(
        int(directory.name),
        directory,
        Owner.read(directory),
        phases,
        read_progress(directory),
        _from_json(Ended, _read_json(directory / "ended.json")),
        last_heartbeat(directory),
    )


def read_progress(directory: Path) -> Progress | None:
    """What training last said in an attempt; None before it said anything."""
    return _from_json(Progress, _read_json(directory / "progress"))


def is_finished(run: Path, num_steps: int | None = None) -> bool:
    """Whether an attempt finished all of `num_steps`; left out, what the run's own config says."""
    finished = [
        a.ended.step for a in read_attempts(run) if a.ended and a.ended.outcome == "finished"
    ]
    if not finished:
        return False
    if num_steps is None:
        sent, written = run / "launch" / "config.toml", run / "config.toml"
        num_steps = load_config(sent if sent.exists() else written).train.num_steps
    return max(finished) >= num_steps


def newest_checkpoint(run: Path) -> int | None:
    """The step of a run's newest complete checkpoint."""
    found = (run / "checkpoints").glob("step-*/manifest.json")
    return max(
        (int(m[1]) for path in found if (m := CHECKPOINT.fullmatch(path.parent.name))), default=None
    )


# ---- this process -----------------------------------------------------------------------------------------------------
def _this_process() -> tuple[int, int | None, str | None]:
    """Process id, start time and PID namespace; the latter two None where a later process could not look us up."""
    pid = os.getpid()
    with contextlib.suppress(OSError):
        # In a new PID namespace that still has the old one's /proc, ids there are not ours.
        if int(os.readlink("/proc/self")) == pid:
            return pid, process_stat("self")[1], os.readlink("/proc/self/ns/pid")
    return pid, None, None


def process_stat(pid: str) -> tuple[str, int]:
    """State and start time of a process, from /proc/PID/stat: fields 3 and 22, proc(5); field 2 may hold spaces."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return fields[0], int(fields[19])


def _boot_id() -> str | None:
    return _read(Path("/proc/sys/kernel/random/boot_id")).strip() or None


# ---- files -----------------------------------------------------------------------------------------------------------
def attempt_directory(run: Path, number: int) -> Path:
    return run / "attempts" / f"{number:04d}"


def numbers(attempts: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(attempts) if NUMBER.fullmatch(name)]
    except FileNotFoundError:
        return []


def last_heartbeat(directory: Path) -> float:
    """Opened, not only looked up: an NFS client then asks the server instead of its cache."""
    try:
        with open(directory / "heartbeat", "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o640)


def replace_json(path: Path, content: Json, durable: bool = False) -> None:
    """Writes JSON so that a reader sees the old or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", opener=private) as file:
        file.write(json.dumps(content) + "\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> Json:
    return _parse(_read(path))


def _parse(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _from_json(kind: type[T], content: Json) -> T | None:
    """A dataclass from its JSON; None when something is missing. Keys of a later version are passed over."""
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    try:
        return (
            kind(**{name: value for name, value in content.items() if name in names})
            if content
            else None
        )
    except TypeError:
        return None
