"""The attempts at a run as their files record them: the owner, the progress, and the end of each.

Attempts are read while they are writing, and after they were killed. So the readers ignore keys
that a later version added, and leave out what is missing or was only partly written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, load_config, writing
from pretrain.config.errors import moment, say
from pretrain.rundir.checkpoints import (
    checkpoint_step,
    complete_checkpoints,
    named_by_step,
    newest_checkpoint_step,
    read_lineage,
)
from pretrain.rundir.files import (
    DIRECTORY_MODE,
    FILE_MODE,
    Json,
    append_json_line,
    from_json,
    make_directory,
    open_regular,
    read_json,
    read_records,
    replace_json,
)
from pretrain.rundir.metrics import read_metrics
from pretrain.rundir.paths import (
    OWNER,
    WORK,
    ExitCode,
    Outcome,
    Phase,
    Place,
    RunPaths,
    attempt_directory,
    attempt_numbers,
    boot_id,
    check_version,
    claim_version,
    displaced,
    whereabouts,
)
from pretrain.rundir.trust import check_trusted

HEARTBEAT = "heartbeat"
PHASES = "phases.jsonl"
PROGRESS = "progress"
ENDED = "ended.json"
METRICS_BYTES = 64 * 1024
"""How much of the end of metrics.jsonl is read to find the last step: about 200 lines."""
PREFLIGHT = "preflight.json"
DIAGNOSIS = "diagnosis.json"


@dataclass(frozen=True)
class Owner:
    """The process that makes an attempt (owner.json). `Owner.here` describes this one."""

    nonce: str = ""
    """Tells apart two owners that agree in everything else."""
    host: str = ""
    pid: int = 0
    pid_start: int | None = None
    """Clock ticks between boot and the process's start, because process ids are reused."""
    pid_namespace: str | None = None
    boot_id: str | None = None
    user: str = ""
    slurm_job_id: str | None = None
    """"123", or "123_4" for a task of an array."""
    slurm_restart_count: int | None = None
    slurm_cluster: str | None = None
    """Needed because job ids are unique only within a cluster, and clusters share file systems."""
    began_at: float = 0.0
    """Unix seconds."""
    submitted_at: float | None = None
    """When the job was put in Slurm's queue; the time from then to `began_at` is waiting."""
    num_processes: int = 1
    """The number of ranks."""
    nodes: str = ""
    """Slurm's node list, or this host."""
    checkpoint_step: int | None = None
    """The step of the newest complete checkpoint when the attempt began."""
    checkpoint_id: str | None = None
    """The id of that checkpoint."""
    directory: Place | None = None
    """The run's directory. A copy of the directory does not belong to this owner."""

    @staticmethod
    def here(**known: Any) -> Owner:
        """Describe this process.

        Args:
            **known: Further fields. Slurm's values are passed in, because only the launcher and
                `topology` read the environment.
        """
        host = socket.gethostname()
        pid, start, namespace = _this_process()
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            # The user id may have no name, for example in a container.
            user = str(os.getuid())
        return Owner(
            nonce=secrets.token_hex(8),
            host=host,
            pid=pid,
            pid_start=start,
            pid_namespace=namespace,
            boot_id=boot_id(),
            user=user,
            began_at=time.time(),
            **{"nodes": host, **known},
        )

    @staticmethod
    def read(directory: Path) -> Owner:
        """Return the owner of an attempt, or an empty `Owner` if the file is damaged."""
        return from_json(Owner, read_json(directory / OWNER)) or Owner()

    def is_of(self, run: Path) -> bool:
        """Return False if the run's directory is a copy of the one that this owner writes to."""
        return self.directory is None or self.directory.is_place_of(run)

    def is_of_job(self, job_id: str | None) -> bool:
        """Return True if this owner was in a job, "123" or "123_4"."""
        return self.slurm_job_id is not None and self.slurm_job_id == job_id

    def is_of_start(self, job_id: str | None, restarts: int) -> bool:
        """Return True if this owner was in a job after the job was requeued `restarts` times."""
        return self.is_of_job(job_id) and (self.slurm_restart_count or 0) == restarts

    def __str__(self) -> str:
        job = f"job {self.slurm_job_id}, " if self.slurm_job_id else ""
        since = moment(self.began_at)
        return f"{job}process {self.pid} of {self.user} on {self.host}, since {since}"


@dataclass(frozen=True)
class PhaseChange:
    """A line of phases.jsonl: the attempt began a phase."""

    at: float
    """Unix seconds."""
    phase: str
    """A `Phase`, or a phase of a later version."""
    step: int
    """Steps done by then."""
    saved: int | None = None
    """The step of the checkpoint that was completed just before."""


@dataclass(frozen=True)
class Progress:
    """The last sign of life of training (progress). A watchdog compares it with the previous."""

    count: int
    """Grows with every step and every pass of an evaluation."""
    step: int
    """Steps done."""
    phase: str
    """A `Phase`."""


@dataclass(frozen=True)
class Ended:
    """The end of an attempt (ended.json)."""

    at: float
    """Unix seconds."""
    code: int
    """The exit code: an `ExitCode`, or 128 + n for signal n."""
    outcome: str
    """An `Outcome`."""
    reason: str
    """One readable line."""
    step: int
    """Steps done."""
    nodes: tuple[str, ...] = ()
    """The nodes that the failure came from, according to srun, the stacks or the preflight."""


@dataclass(frozen=True)
class Preflight:
    """The results of the check of the nodes before the ranks start (preflight.json)."""

    at: float
    """Unix seconds at which the check ended."""
    seconds: float
    """How long the check took."""
    nodes: tuple[str, ...]
    """The nodes that were checked."""
    faults: dict[str, str]
    """The nodes on which the run must not train, each with the cause."""
    warnings: tuple[str, ...] = ()
    """Results that do not keep the run from training, one line each."""
    refusal: str = ""
    """Why the run can train on none of the nodes, if the cause is the run and not the nodes."""


class Cause(StrEnum):
    """The cause of a failed check, as found by replaying the same steps on the same data."""

    TRANSIENT = "transient"
    """The failure did not happen again; the run continued from the replayed steps."""
    REPRODUCES = "reproduces"
    """The failure happened again: it comes from the data, the settings or the code."""
    PERSISTENT = "persistent"
    """One rank repeatedly computes wrong results."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of the last replay of an attempt (diagnosis.json)."""

    kind: str
    """A `Cause`."""
    step: int
    """The step whose check failed."""
    rank: int | None
    """The rank that the failure came from, or None; likewise its host and device."""
    host: str | None
    device: str | None
    what: str
    """A readable description of the result."""
    replayed_from: int = 0
    """The step of the state from which the replay began; 0 for the initial state."""

    @staticmethod
    def read(directory: Path) -> Diagnosis | None:
        """Return the diagnosis of an attempt; None if nothing was replayed."""
        return from_json(Diagnosis, read_json(directory / DIAGNOSIS))

    def write(self, directory: Path) -> None:
        """Write the diagnosis to RUN/attempts/####. Raises OSError if that fails."""
        replace_json(directory / DIAGNOSIS, dataclasses.asdict(self), durable=True, indent=1)


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt as its files record it."""

    number: int
    directory: Path
    owner: Owner
    phases: tuple[PhaseChange, ...] = ()
    progress: Progress | None = None
    ended: Ended | None = None
    preflight: Preflight | None = None
    diagnosis: Diagnosis | None = None
    last_heartbeat: float = 0.0
    """Unix seconds by the file server's clock."""

    @property
    def is_copied(self) -> bool:
        """Return True if the attempt was made in the directory of which this one is a copy."""
        return not self.owner.is_of(self.directory.parents[1])

    @property
    def step(self) -> int:
        """Return the steps done, according to the attempt's reports."""
        said = [self.progress.step] if self.progress else []
        # Reports from before a checkpoint was loaded are about steps that led to another one.
        loaded = [i for i, phase in enumerate(self.phases) if phase.phase == Phase.LOADING]
        since = self.phases[loaded[-1] if loaded else 0 :]
        return max([*said, *(phase.step for phase in since)], default=0)


def read_attempts(run: Path) -> list[AttemptRecord]:
    """Return all attempts at a run, oldest first; [] for a directory that is not a run."""
    numbers = sorted(attempt_numbers(RunPaths(run).attempts))
    return [read_attempt(attempt_directory(run, number)) for number in numbers]


def read_attempt(directory: Path) -> AttemptRecord:
    """Return one attempt. Files that it has not written yet are left out."""
    return AttemptRecord(
        number=int(directory.name),
        directory=directory,
        owner=Owner.read(directory),
        phases=tuple(read_records(PhaseChange, directory / PHASES)),
        progress=read_progress(directory),
        ended=from_json(Ended, read_json(directory / ENDED)),
        preflight=from_json(Preflight, read_json(directory / PREFLIGHT)),
        diagnosis=Diagnosis.read(directory),
        last_heartbeat=last_heartbeat(directory),
    )


def read_progress(directory: Path) -> Progress | None:
    """Return the last sign of life of an attempt's training; None before the first."""
    return from_json(Progress, read_json(directory / PROGRESS))


def steps_done(directory: Path) -> int:
    """Return how many steps an attempt's training has done, as its files prove.

    `progress` may be older than the last steps, but metrics.jsonl has a line for each step. Its
    lines belong to this attempt once training has begun, which drops the lines of lost steps.

    Args:
        directory: RUN/attempts/####.
    """
    record = read_attempt(directory)
    steps = [record.step]
    if any(phase.phase == Phase.TRAINING for phase in record.phases):
        metrics = read_metrics(RunPaths(directory.parents[1]).metrics, METRICS_BYTES)
        steps += [line["step"] for line in metrics]
    return max(steps)


def said_done(attempt: AttemptRecord, num_steps: int) -> bool:
    """Return True if the last report of an attempt's ranks says that all steps are done."""
    last = attempt.phases[-1] if attempt.phases else None
    return last is not None and last.phase == Phase.ENDING and last.step >= num_steps


POISONED_ATTEMPTS = 2
"""The number of attempts that a checkpoint must poison before it is passed over."""


def poisoned(
    run: Path, attempts: Sequence[AttemptRecord], code: int | None = None
) -> dict[Path, str]:
    """Return the checkpoint from which training must not continue any more, with the reason.

    A checkpoint is on probation until the run has saved another one after it, because only then
    have numbers computed from it passed the checks of steps and of a save. A checkpoint on
    probation counts as poisoned if two attempts began from it and ended as POISONED. One attempt is
    enough if a replay from the checkpoint reproduced the numbers. If attempts from another
    checkpoint of the same step have also ended as POISONED, the checkpoint is not the cause.

    Args:
        run: The run's directory.
        attempts: Its attempts, oldest first.
        code: The exit code of the last attempt's ranks, if its end is not recorded yet.

    Returns:
        Only the newest checkpoint, or {}; always {} if there is no other checkpoint.
    """
    found = complete_checkpoints(run)
    lineage = read_lineage(found[-1]) if len(found) > 1 else None
    if lineage is None:
        return {}
    codes = [attempt.ended.code if attempt.ended else None for attempt in attempts]
    if code is not None:
        codes[-1] = code
    victims = [
        attempt
        for attempt, ended in zip(attempts, codes)
        if ended == ExitCode.POISONED and attempt.owner.checkpoint_step == lineage.step
    ]
    began_with = [attempt.owner.checkpoint_id for attempt in victims]
    is_certain = any(
        each.diagnosis.kind == Cause.REPRODUCES and each.diagnosis.replayed_from == lineage.step
        for each in victims
        if each.diagnosis
    )
    enough = 1 if is_certain else POISONED_ATTEMPTS
    if len(began_with) < enough or set(began_with) != {lineage.id}:
        return {}
    count = f"{len(began_with)} attempt{'s' * (len(began_with) > 1)}"
    why = (
        f"poisoned: {count} that began with it met numbers that are not finite or too large, "
        "before the next save"
    )
    return {found[-1]: why}


def is_idle(attempt: AttemptRecord) -> bool:
    """Return True for an attempt that ended without any work.

    Its input was refused, or every step was already done. It left the run unchanged.
    """
    ended = attempt.ended
    return (
        ended is not None
        and ended.outcome in (Outcome.REFUSED, Outcome.FINISHED)
        and not any(mark.phase in WORK for mark in attempt.phases)
    )


def is_finished(run: Path, num_steps: int | None = None) -> bool:
    """Return True if an attempt finished `num_steps` steps (default: those of the run's config).

    The attempt's record must agree with the last report of its ranks and with the newest
    checkpoint, because an exit code alone proves nothing. A run that has since gone back to an
    earlier checkpoint, or done more steps, is not finished at that step. Nor is a run whose
    checkpoints have all lost their manifests.
    """
    finished = [
        attempt
        for attempt in read_attempts(run)
        if attempt.ended and attempt.ended.outcome == Outcome.FINISHED
    ]
    if not finished:
        return False
    paths = RunPaths(run)
    if num_steps is None:
        num_steps = load_config(paths.newest_config() or paths.config).train.num_steps
    newest = newest_checkpoint_step(run)
    if newest is None and named_by_step(paths.checkpoints):
        # The checkpoints have no manifests and cannot be used. Starting the run reports that.
        return False
    return newest in (None, num_steps) and any(
        said_done(attempt, num_steps) for attempt in finished
    )


def last_heartbeat(directory: Path) -> float:
    """Return when an attempt last renewed its lease, in unix seconds by the file server's clock."""
    try:
        # Opened, and not just looked up, so that an NFS client asks the server, not its cache.
        with open_regular(directory / HEARTBEAT) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def process_stat(pid: str) -> tuple[str, int]:
    """Return state and start time of a process: fields 3 and 22 of /proc/PID/stat, proc(5)."""
    # Field 2, the command, may contain spaces and parentheses; the fields after it may not.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return fields[0], int(fields[19])


def _this_process() -> tuple[int, int | None, str | None]:
    """Return process id, start time and PID namespace; None for values others cannot check."""
    pid = os.getpid()
    with contextlib.suppress(OSError):
        # In a new PID namespace that still has the /proc of the old one, the ids there differ.
        if int(os.readlink("/proc/self")) == pid:
            return pid, process_stat("self")[1], os.readlink("/proc/self/ns/pid")
    return pid, None, None


# ---- The lock of a run: one attempt at a time, from any host, however the last one ended ----
# An attempt's folder is made under a hidden name, with owner.json and heartbeat already in it, and
# renamed to the next number. A rename onto a folder that is not empty fails on every file system,
# so exactly one of several starters gets the number. Nothing is ever deleted, so two starters
# cannot break the same stale lock.


HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0
"""The time without a heartbeat after which a holder counts as dead."""
PROGRESS_SECONDS = 10.0
"""The usual time between two writes of `progress`, unless steps take longer. It is short enough for
users, and each write costs three requests to the file server."""
LOOKS = 10
"""How often progress is written, and checked, within the time after which a run counts as hung.
See `Attempt.join`."""
POLL_SECONDS = 1.0
"""Time between two looks at another holder's heartbeat."""

JobIsOver = Callable[[str], bool | None]
"""Asks Slurm whether the job of an id is over; returns None if Slurm cannot be asked."""


class RunBusy(ConfigError):
    """Another process is making an attempt at this run. The message names it and the remedy."""


def unknown(job_id: str) -> bool | None:
    """Answer None: the `JobIsOver` of a machine without Slurm."""
    return None


@dataclass
class Attempt:
    """An attempt, for the process that makes it: the holder of the lock, or rank 0 of training."""

    number: int
    directory: Path
    progress_seconds: float = PROGRESS_SECONDS
    """The least time between two writes of `progress` in one phase."""
    _count: int = 0
    _last: tuple[float, str] = field(default=(0.0, ""))
    _root: int | None = field(default=None, compare=False)
    """A descriptor of the run's directory, by which it can be found after it is moved."""

    def __post_init__(self) -> None:
        # Without a descriptor, messages do not say where the directory was moved.
        with contextlib.suppress(OSError):
            self._root = os.open(self.run, os.O_PATH | os.O_DIRECTORY)

    def __del__(self) -> None:
        if self._root is not None:
            os.close(self._root)

    @property
    def run(self) -> Path:
        """Return the run's directory."""
        return self.directory.parents[1]

    @staticmethod
    def begin(run: Path, owner: Owner | None = None, job_is_over: JobIsOver = unknown) -> Attempt:
        """Lock the run and begin an attempt. A former holder that is dead does not prevent this.

        Whether a holder is dead is known from its process, on the same host, or from Slurm. If
        neither can tell, this waits for LEASE_SECONDS for a heartbeat.

        Args:
            run: The run's directory.
            owner: The owner of the attempt; this process by default.
            job_is_over: Asks Slurm about the job of another owner.

        Raises:
            RunBusy: Another holder is alive.
            ConfigError: The directory has another layout, or another user may write to it.
            RunFailed: A file cannot be written.
        """
        check_trusted(run)
        check_version(run)
        attempts, owner = RunPaths(run).attempts, owner or Owner.here()
        prepared = attempts / f".{owner.nonce}"
        try:
            with writing(run):
                make_directory(attempts)
                _prepare(prepared, owner)
            number = check_free(run, owner, job_is_over)
            final = attempt_directory(run, number + 1)
            try:
                with writing(run):
                    prepared.rename(final)
            except Exception:
                if not final.exists():
                    # The rename failed, but not because another starter was faster.
                    raise
                # If a file server repeats a request, the second one fails although the first one
                # has renamed the folder.
                if Owner.read(final).nonce != owner.nonce:
                    raise _busy(run, number + 1) from None
        finally:
            shutil.rmtree(prepared, ignore_errors=True)
        for left in attempts.glob(".*"):
            # Hidden folders of starters that were killed are removed.
            if process_lives(Owner.read(left), owner) is False:
                shutil.rmtree(left, ignore_errors=True)
        claim_version(run)
        return Attempt(number + 1, final)

    @staticmethod
    def join(directory: Path, hang_seconds: float = math.inf) -> Attempt:
        """Return the attempt that a supervisor holds, for rank 0 to report its phases to.

        Args:
            directory: RUN/attempts/####.
            hang_seconds: The time without progress after which the supervisor ends the ranks.
        """
        seconds = min(PROGRESS_SECONDS, hang_seconds / LOOKS)
        return Attempt(int(directory.name), directory, seconds)

    def heartbeat(self) -> bool:
        """Renew the lease; call it every HEARTBEAT_SECONDS.

        Returns:
            False if this attempt no longer holds its run (`why_lost`); the caller must then stop
            writing to the run at once.
        """
        # While the file server does not answer, the check below finds nothing; it does so later.
        with contextlib.suppress(OSError):
            os.utime(self.directory / HEARTBEAT)
        return self.why_lost() is None

    def superseded(self) -> bool:
        """Return True if a newer attempt exists, because this one was taken for dead."""
        try:
            return max(attempt_numbers(self.directory.parent), default=0) > self.number
        except OSError:
            return False

    def why_lost(self) -> str | None:
        """Return why this attempt no longer holds its run, and what to do; None while it does."""
        if self.superseded():
            return (
                "another attempt has taken over the run, because this one sent no heartbeat for "
                "too long"
            )
        with contextlib.suppress(OSError):
            return displaced(self.directory, self._now_at())
        return None

    def _now_at(self) -> Path | None:
        """Return where the run's directory lies now; None if unknown."""
        return whereabouts(self._root) if self._root is not None else None

    def phase(self, phase: str, step: int, saved: int | None = None) -> None:
        """Record the beginning of a phase.

        Args:
            phase: The `Phase`.
            step: Steps done.
            saved: The step of a checkpoint that was completed just before.
        """
        line: Json = {"at": time.time(), "phase": phase, "step": step}
        line |= {} if saved is None else {"saved": saved}
        append_json_line(self.directory / PHASES, line)
        self.progress(step, phase)

    def progress(self, step: int, phase: str) -> None:
        """Record a sign of life. Cheap to call: within a phase it writes only now and then.

        Raises:
            OSError: The file cannot be written; only its modification time is new.
        """
        self._count += 1
        written, last = self._last
        now = time.monotonic()
        if phase == last and now - written < self.progress_seconds:
            return
        self._last = now, phase
        content = {"count": self._count, "step": step, "phase": phase}
        try:
            replace_json(self.directory / PROGRESS, content)
        except OSError:
            # A full disk still accepts a new modification time, which the watchdog checks as well.
            with contextlib.suppress(OSError):
                os.utime(self.directory / PROGRESS)
            raise

    def end(
        self, outcome: str, code: int, reason: str, step: int, nodes: Sequence[str] = ()
    ) -> None:
        """Record how the attempt ended, which releases the run.

        Args:
            outcome: The `Outcome`.
            code: The exit code.
            reason: One readable line.
            step: Steps done.
            nodes: The nodes that a failure came from, if they are known.
        """
        ended = Ended(time.time(), code, outcome, reason, step, tuple(nodes))
        # The directory may have been moved in the meantime.
        folder = attempt_directory(self._now_at() or self.run, self.number)
        replace_json(folder / ENDED, dataclasses.asdict(ended), durable=True)


def check_free(run: Path, mine: Owner | None = None, job_is_over: JobIsOver = unknown) -> int:
    """Check that nobody is making an attempt at a run, without beginning one.

    Args:
        run: The run's directory.
        mine: The owner of an attempt that this process would make; this process by default.
        job_is_over: Asks Slurm about the job of another owner; by default Slurm is not asked.

    Returns:
        The number of the newest attempt; 0 if there is none.

    Raises:
        RunBusy: A holder is alive.
    """
    number = max(attempt_numbers(RunPaths(run).attempts), default=0)
    if number and _is_held(attempt_directory(run, number), mine or Owner.here(), job_is_over):
        raise _busy(run, number)
    return number


# ---- is the other holder dead? -------------------------------------------------------------------
def _is_held(directory: Path, mine: Owner, job_is_over: JobIsOver) -> bool:
    """Return True if an attempt has not ended and its owner is alive."""
    if (directory / ENDED).exists():
        return False
    owner = Owner.read(directory)
    if not owner.is_of(directory.parents[1]):
        # The owner makes an attempt at the run of which this one is a copy. On another host, inodes
        # may differ for the same directory (some user-space file systems), so a heartbeat decides.
        return owner.boot_id != mine.boot_id and _lease_is_renewed(directory)
    held = _owner_lives(owner, mine, job_is_over)
    return _lease_is_renewed(directory) if held is None else held


def _owner_lives(other: Owner, mine: Owner, job_is_over: JobIsOver) -> bool | None:
    """Return whether another owner's process or job is alive; None if neither can be seen."""
    seen = process_lives(other, mine)
    if seen or not other.slurm_job_id:
        return seen
    same_cluster = other.slurm_cluster == mine.slurm_cluster
    same_job = same_cluster and other.is_of_job(mine.slurm_job_id)
    earlier_start = (other.slurm_restart_count or 0) < (mine.slurm_restart_count or 0)
    # Slurm starts a job again only after its former processes, or their nodes, are dead.
    if same_job and (seen is False or earlier_start):
        return False
    if same_cluster or None in (other.slurm_cluster, mine.slurm_cluster):
        # Also asked if the process is dead, because ranks of its job may still be saving.
        over = job_is_over(other.slurm_job_id)
        if over is not None:
            return not over
    return seen


def process_lives(other: Owner, mine: Owner) -> bool | None:
    """Return whether another owner's process is alive; None if `mine` cannot see it.

    A process cannot be seen on another host, in another PID namespace, without /proc, or if /proc
    hides other users' processes.
    """
    here = (mine.host, mine.boot_id, mine.pid_namespace)
    there = (other.host, other.boot_id, other.pid_namespace)
    if None in here or here != there or other.pid_start is None:
        return None
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        state, start = process_stat(str(other.pid))
    except OSError:
        # /proc may hide other users' processes.
        return None
    return start == other.pid_start and state != "Z"


def _lease_is_renewed(directory: Path) -> bool:
    """Watch an attempt for LEASE_SECONDS; return True as soon as its heartbeat changes.

    The time is counted from now on by this process's own clock. The age of the heartbeat file
    proves nothing: a file server may have been unreachable for minutes, after which the holder
    renews its heartbeat, and the clocks of two hosts differ.
    """
    beat, watched, last_look = last_heartbeat(directory), 0.0, time.monotonic()
    say(
        f"{directory}: begun by {Owner.read(directory)}, which cannot be seen from this host. "
        f"Waiting {LEASE_SECONDS:.0f} s for its heartbeat"
    )
    while watched < LEASE_SECONDS:
        time.sleep(POLL_SECONDS)
        if (directory / ENDED).exists():
            return False
        if last_heartbeat(directory) != beat:
            return True
        # A pause of this process does not count as watching, because the holder may have been
        # paused as well, for example on a virtual machine.
        now = time.monotonic()
        watched += min(now - last_look, 2 * POLL_SECONDS)
        last_look = now
    return False


def _busy(run: Path, number: int) -> RunBusy:
    other = Owner.read(attempt_directory(run, number))
    job = other.slurm_job_id
    end = f"scancel {job}" if job else f"kill {other.pid} on {other.host}"
    return RunBusy(
        f"{run}: attempt {number} is being made by {other}. Wait for its end, or end it ({end})"
    )


def _prepare(directory: Path, owner: Owner) -> None:
    """Write the files with which an attempt begins, from the run's newest complete checkpoint."""
    directory.mkdir(mode=DIRECTORY_MODE)
    run = directory.parents[1]
    owner = dataclasses.replace(owner, directory=Place.of(run))
    if found := complete_checkpoints(run):
        lineage = read_lineage(found[-1])
        owner = dataclasses.replace(
            owner,
            checkpoint_step=checkpoint_step(found[-1].name),
            checkpoint_id=lineage.id if lineage else None,
        )
    replace_json(directory / OWNER, dataclasses.asdict(owner), durable=True)
    (directory / HEARTBEAT).touch(mode=FILE_MODE)
    start = {"at": owner.began_at, "phase": Phase.STARTING, "step": owner.checkpoint_step or 0}
    append_json_line(directory / PHASES, start)
