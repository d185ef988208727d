"""The lock of a run: one attempt at a time, from any host, whatever became of the one before.

An attempt's folder is made under a hidden name, with owner.json and heartbeat already in it, and
renamed to the next number. A rename onto a folder that is not empty fails on every file system, so
of many starters exactly one gets the number. Nothing is ever deleted, so no stale lock can be
broken twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.config import ConfigError, writing
from pretrain.rundir.attempts import (
    ENDED,
    HEARTBEAT,
    OWNER,
    PHASES,
    PROGRESS,
    SUSPENSIONS,
    Ended,
    Owner,
    Suspension,
    last_heartbeat,
    process_stat,
)
from pretrain.rundir.checkpoints import checkpoint_step, complete_checkpoints
from pretrain.rundir.files import (
    DIRECTORY_MODE,
    FILE_MODE,
    Json,
    append_json_line,
    make_directory,
    replace_json,
    say,
)
from pretrain.rundir.lineage import read_lineage
from pretrain.rundir.paths import Phase, RunPaths, attempt_directory, attempt_numbers, check_version
from pretrain.rundir.trust import check_trusted

HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0
"""A holder that gave no heartbeat for so long is taken for dead."""
PROGRESS_SECONDS = 10.0
"""The most time that a run lets pass between two writes of `progress`, if its steps allow it. For
people that is enough, and each write is three requests to the file server."""
LOOKS = 10
"""How often progress is written, and looked at, within the time after which a run counts as hung.
See `Attempt.join`."""
POLL_SECONDS = 1.0
"""Between two looks at another holder's heartbeat."""

JobIsOver = Callable[[Owner], bool | None]
"""Asks Slurm if an owner's job is over; None when Slurm cannot be asked."""


class RunBusy(ConfigError):
    """Another process makes an attempt at this run. The message names it and says what to do."""


def unknown(owner: Owner) -> bool | None:
    """Answer None: the `JobIsOver` of a machine without Slurm."""
    return None


@dataclass
class Attempt:
    """An attempt, for the process that makes it: the lock's holder, or training's rank 0."""

    number: int
    directory: Path
    progress_seconds: float = PROGRESS_SECONDS
    """The least time between two writes of `progress` in one phase."""
    _count: int = 0
    _last: tuple[float, str] = field(default=(0.0, ""))

    @property
    def run(self) -> Path:
        """Return the run's directory."""
        return self.directory.parents[1]

    @staticmethod
    def begin(run: Path, owner: Owner | None = None, job_is_over: JobIsOver = unknown) -> Attempt:
        """Take the run and begin an attempt. A former holder that is dead is no obstacle.

        A holder is known to be dead from its process, on its own host, or from Slurm; failing both,
        from a lease without a heartbeat, for which this waits.

        Args:
            run: The run's directory.
            owner: Who makes the attempt; this process by default.
            job_is_over: Asks Slurm about the job of another owner.

        Raises:
            RunBusy: Another holder lives.
            ConfigError: The directory has another layout, or another user may write to it.
            RunFailed: The disk refused.
        """
        check_trusted(run)
        check_version(run)
        attempts, owner = RunPaths(run).attempts, owner or Owner.here()
        prepared = attempts / f".{owner.nonce}"
        try:
            with writing(run):
                make_directory(attempts)
                _prepare(prepared, _with_checkpoint(owner, run))
            number = max(attempt_numbers(attempts), default=0)
            newest = attempt_directory(run, number)
            if number and _is_held(newest, owner, job_is_over):
                raise _busy(run, number)
            final = attempt_directory(run, number + 1)
            try:
                with writing(run):
                    prepared.rename(final)
            except Exception:
                if not final.exists():
                    # Not that another starter was faster: the disk refused.
                    raise
                # A file server that answers a repeated request says "exists" to the client that
                # made it.
                if Owner.read(final).nonce != owner.nonce:
                    raise _busy(run, number + 1) from None
        finally:
            shutil.rmtree(prepared, ignore_errors=True)
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
            False when another attempt has taken the run: then stop writing to it at once.
        """
        try:
            os.utime(self.directory / HEARTBEAT)
        except FileNotFoundError:
            return False
        except OSError:
            # The file server is away. When it answers again, the check below finds out whether
            # another attempt has taken the run.
            return True
        return not self.superseded()

    def superseded(self) -> bool:
        """Return True when a newer attempt exists, because this one was taken for dead."""
        try:
            return max(attempt_numbers(self.directory.parent), default=0) > self.number
        except OSError:
            return False

    def phase(self, phase: str, step: int, saved: int | None = None) -> None:
        """Record that another phase begins.

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
        """Record a sign of life. It is cheap to call: within a phase it writes now and then.

        Raises:
            OSError: The disk refused, and so only the file's time is new.
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
            # A full disk still takes a new time, which the watchdog looks at as well.
            with contextlib.suppress(OSError):
                os.utime(self.directory / PROGRESS)
            raise

    def suspended(self, at: float, seconds: float) -> None:
        """Record that all processes of the attempt stood still for `seconds`, from `at` on.

        Raises:
            OSError: The disk refused.
        """
        append_json_line(self.directory / SUSPENSIONS, dataclasses.asdict(Suspension(at, seconds)))

    def end(
        self, outcome: str, code: int, reason: str, step: int, nodes: Sequence[str] = ()
    ) -> None:
        """Record how the attempt ended, which gives the run back.

        Args:
            outcome: The `Outcome`.
            code: The exit code.
            reason: One line for people.
            step: Steps done.
            nodes: The nodes that a failure came from, where they are known.
        """
        ended = Ended(time.time(), code, outcome, reason, step, tuple(nodes))
        replace_json(self.directory / ENDED, dataclasses.asdict(ended), durable=True)


def check_free(run: Path, job_is_over: JobIsOver = unknown) -> None:
    """Check that nobody makes an attempt at a run, without beginning one.

    Args:
        run: The run's directory.
        job_is_over: Asks Slurm about the job of an owner.

    Raises:
        RunBusy: A holder lives.
    """
    number = max(attempt_numbers(RunPaths(run).attempts), default=0)
    if number and _is_held(attempt_directory(run, number), Owner.here(), job_is_over):
        raise _busy(run, number)


# ---- is the other holder dead? -------------------------------------------------------------------
def _is_held(directory: Path, mine: Owner, job_is_over: JobIsOver) -> bool:
    """Return True when an attempt has not ended and its owner lives."""
    if (directory / ENDED).exists():
        return False
    held = _owner_lives(Owner.read(directory), mine, job_is_over)
    return _lease_is_renewed(directory) if held is None else held


def _owner_lives(other: Owner, mine: Owner, job_is_over: JobIsOver) -> bool | None:
    """Return if another owner's process or job lives; None when neither can be seen."""
    seen = _process_lives(other, mine)
    if seen or other.slurm_job_id is None:
        return seen
    same_cluster = other.slurm_cluster == mine.slurm_cluster
    same_job = same_cluster and other.is_of_job(mine.slurm_job_id)
    earlier_start = (other.slurm_restart_count or 0) < (mine.slurm_restart_count or 0)
    # Slurm starts a job again only when its former processes are dead, or their node is.
    if same_job and (seen is False or earlier_start):
        return False
    if same_cluster or None in (other.slurm_cluster, mine.slurm_cluster):
        # Also asked when the process is dead: its job may still be ending, with ranks that save.
        over = job_is_over(other)
        if over is not None:
            return not over
    return seen


def _process_lives(other: Owner, mine: Owner) -> bool | None:
    """Return if another owner's process lives; None when it cannot be seen from here.

    That is so on another host, in another PID namespace, for another user's processes, and without
    /proc.
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
    """Watch an attempt for a lease's time; return True as soon as its heartbeat changes.

    The time is counted by this process's own clock, and from now on: the age of the heartbeat file
    proves nothing. A holder whose file server was away for minutes renews it when that is back, and
    the clocks of two hosts differ.
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
        # A pause of this process is no time in which it watched: the holder may have been paused
        # as well, as on a virtual machine.
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


def _with_checkpoint(owner: Owner, run: Path) -> Owner:
    """Return the owner with the run's newest complete checkpoint."""
    found = complete_checkpoints(run)
    if not found:
        return owner
    lineage = read_lineage(found[-1])
    return dataclasses.replace(
        owner,
        checkpoint_step=checkpoint_step(found[-1].name),
        checkpoint_id=lineage.id if lineage else None,
    )


def _prepare(directory: Path, owner: Owner) -> None:
    """Write all that an attempt has when it begins."""
    directory.mkdir(mode=DIRECTORY_MODE)
    replace_json(directory / OWNER, dataclasses.asdict(owner), durable=True)
    (directory / HEARTBEAT).touch(mode=FILE_MODE)
    start = {"at": owner.began_at, "phase": Phase.STARTING, "step": owner.checkpoint_step or 0}
    append_json_line(directory / PHASES, start)
