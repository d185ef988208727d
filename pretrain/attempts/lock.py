"""The lock: one attempt at a run at a time, whatever host it is made on, and whatever became of the one before."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.attempts.records import (
    Ended,
    Json,
    Owner,
    attempt_directory,
    last_heartbeat,
    newest_checkpoint,
    numbers,
    private,
    process_stat,
    replace_json,
)
from pretrain.config import ConfigError, writing

HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0  # a holder that has not been heard of for so long is gone
PROGRESS_SECONDS = 0.5  # between two writes of `progress`
LOOK_SECONDS = 1.0  # between two looks at a heartbeat


class RunBusy(ConfigError):
    """Somebody else makes an attempt at this run. The message says who, since when, and what to do."""


def unknown(owner: Owner) -> bool | None:
    """A `job_is_over` for where Slurm cannot be asked."""
    return None


@dataclass
class Attempt:
    """One try at a run, in the hands of who makes it: the holder of the lock (`begin`), or its rank 0 (`join`)."""

    number: int
    directory: Path
    _count: int = 0
    _last: tuple[float, str] = field(default=(0.0, ""))

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.directory.parents[1]

    @staticmethod
    def begin(
        run: Path, owner: Owner | None = None, job_is_over: Callable[[Owner], bool | None] = unknown
    ) -> Attempt:
        """Takes the run, or raises RunBusy. An earlier holder that is gone is no obstacle.

        Whether it is gone is seen on its own host, or known from Slurm (`job_is_over`: True, False, or None when it
        cannot be asked); failing both, after a lease without a heartbeat, for which this waits.
        """
        attempts, owner = run / "attempts", owner or Owner.here()
        prepared = attempts / f".{owner.nonce}"
        with writing(run):
            attempts.mkdir(parents=True, exist_ok=True)
            _prepare(prepared, dataclasses.replace(owner, checkpoint_step=newest_checkpoint(run)))
        try:
            number = max(numbers(attempts), default=0)
            if number and _is_held(attempt_directory(run, number), owner, prepared, job_is_over):
                raise _busy(run, number)
            final = attempt_directory(run, number + 1)
            try:
                with writing(run):
                    prepared.rename(final)
            except Exception:
                if not final.exists():  # not that another was faster
                    raise
                # A file server that answers a repeated request says "exists" to who made it.
                if Owner.read(final).nonce != owner.nonce:
                    raise _busy(run, number + 1) from None
        finally:
            shutil.rmtree(prepared, ignore_errors=True)
        return Attempt(number + 1, final)

    @staticmethod
    def join(directory: Path) -> Attempt:
        """For training's rank 0 under a supervisor, which holds the lock: `phase`, `progress` and `superseded` only."""
        return Attempt(int(directory.name), directory)

    def heartbeat(self) -> bool:
        """Renews the lease, every HEARTBEAT_SECONDS. False: the run is another's now, stop touching it at once."""
        try:
            os.utime(self.directory / "heartbeat")
        except FileNotFoundError:
            return False
        except OSError:  # the file server is away: who comes back to it looks below
            return True
        return not self.superseded()

    def superseded(self) -> bool:
        """Whether a newer attempt exists: this one was taken for dead."""
        try:
            return max(numbers(self.directory.parent), default=0) > self.number
        except OSError:
            return False

    def phase(self, phase: str, step: int, saved: int | None = None) -> None:
        """`phase` begins: starting, loading, training, evaluating, saving or ending. `saved`: a checkpoint is complete."""
        line: Json = {"at": time.time(), "phase": phase, "step": step}
        line |= {} if saved is None else {"saved": saved}
        with open(self.directory / "phases.jsonl", "a", opener=private) as file:
            file.write(json.dumps(line) + "\n")
        self.progress(step, phase)

    def progress(self, step: int, phase: str) -> None:
        """Says that training lives. Call it as often as you like: within a phase it writes twice a second."""
        self._count += 1
        written, last = self._last
        now = time.monotonic()
        if phase == last and now - written < PROGRESS_SECONDS:
            return
        self._last = now, phase
        replace_json(
            self.directory / "progress", {"count": self._count, "step": step, "phase": phase}
        )

    def end(self, outcome: str, code: int, reason: str, step: int) -> None:
        """Says how it ended, and so gives the run back."""
        ended = Ended(time.time(), code, outcome, reason, step)
        replace_json(self.directory / "ended.json", dataclasses.asdict(ended), durable=True)


# ---- whether a holder is gone ----------------------------------------------------------------------------------------
def _is_held(
    directory: Path, mine: Owner, prepared: Path, job_is_over: Callable[[Owner], bool | None]
) -> bool:
    """Whether somebody holds the attempt: it has not ended, and its owner is not gone."""
    if (directory / "ended.json").exists():
        return False
    held = _owner_lives(Owner.read(directory), mine, job_is_over)
    return _lease_is_renewed(directory, prepared) if held is None else held


def _owner_lives(
    other: Owner, mine: Owner, job_is_over: Callable[[Owner], bool | None]
) -> bool | None:
    """None: it cannot be known from here."""
    seen = _process_lives(other, mine)
    if seen or other.slurm_job_id is None:
        return seen
    same_job = other.slurm_cluster == mine.slurm_cluster and other.slurm_job_id == mine.slurm_job_id
    # Slurm starts a job again only when its former processes are gone, or their node is.
    if same_job and (
        seen is False or (other.slurm_restart_count or 0) < (mine.slurm_restart_count or 0)
    ):
        return False
    if (
        None in (other.slurm_cluster, mine.slurm_cluster)
        or other.slurm_cluster == mine.slurm_cluster
    ):
        # Asked also when the process is gone: its job may still be ending, with ranks that save.
        over = job_is_over(other)
        if over is not None:
            return not over
    return seen


def _process_lives(other: Owner, mine: Owner) -> bool | None:
    """None: it is not to be seen from here (another host, another PID namespace, another user's, no /proc)."""
    place = (mine.host, mine.boot_id, mine.pid_namespace)
    if (
        None in place
        or place != (other.host, other.boot_id, other.pid_namespace)
        or other.pid_start is None
    ):
        return None
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        state, start = process_stat(str(other.pid))
    except OSError:  # /proc may hide other users' processes
        return None
    return start == other.pid_start and state != "Z"


def _lease_is_renewed(directory: Path, prepared: Path) -> bool:
    """Waits for a heartbeat or the end of the lease. Both times are the file server's: clocks differ."""
    beat, waiting_since = last_heartbeat(directory), time.monotonic()
    announced = False
    while True:
        if (directory / "ended.json").exists():
            return False
        if last_heartbeat(directory) != beat:
            return True
        os.utime(prepared / "heartbeat")
        left = LEASE_SECONDS - (last_heartbeat(prepared) - beat)
        if left <= 0 or time.monotonic() - waiting_since > LEASE_SECONDS:
            return False
        if not announced:
            print(
                f"{directory}: begun by {Owner.read(directory)}, of which nothing can be seen from here. Waiting at "
                f"most {min(left, LEASE_SECONDS):.0f} s for a sign of life",
                file=sys.stderr,
                flush=True,
            )
            announced = True
        time.sleep(LOOK_SECONDS)


def _busy(run: Path, number: int) -> RunBusy:
    other = Owner.read(attempt_directory(run, number))
    end = (
        f"scancel {other.slurm_job_id}"
        if other.slurm_job_id
        else f"kill {other.pid} on {other.host}"
    )
    return RunBusy(
        f"{run}: attempt {number} is being made by {other}. Wait for its end, or end it ({end})"
    )


def _prepare(directory: Path, owner: Owner) -> None:
    """All that an attempt has at its begin."""
    directory.mkdir(mode=0o750)
    replace_json(directory / "owner.json", dataclasses.asdict(owner), durable=True)
    (directory / "heartbeat").touch(mode=0o640)
    start = {"at": owner.began_at, "phase": "starting", "step": owner.checkpoint_step or 0}
    with open(directory / "phases.jsonl", "x", opener=private) as file:
        file.write(json.dumps(start) + "\n")
