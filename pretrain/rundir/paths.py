"""The layout of a run's directory: its paths, and its version.

docs/run_directory.md is the contract with other tools, and its table lists every path. `VERSION` is
raised if a file moves or changes its meaning, but not for a new file or a new key in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import signal
import time
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path

from pretrain.config import ConfigError, Diverged, NoSpace, Poisoned, writing
from pretrain.config.errors import say
from pretrain.rundir.files import (
    Json,
    from_json,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    replace_json,
)

# ---- states ----
# The words and numbers that a run's files use: phases, outcomes, exit codes, kinds of jobs.


class Phase(StrEnum):
    """The phases of an attempt, as written in phases.jsonl and progress."""

    STARTING = "starting"
    """The processes start and find each other."""
    LOADING = "loading"
    """The model is built and a checkpoint is loaded."""
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"
    """Everything is written; the processes are shutting down."""


WORK = (Phase.TRAINING, Phase.EVALUATING, Phase.SAVING)
"""Phases whose time counts as lost when a later attempt resumes from an earlier step."""


class Outcome(StrEnum):
    """The ways in which an attempt ends, as written in ended.json."""

    FINISHED = "finished"
    """Every step of the config is done."""
    RESTART = "restart"
    """It saved and asks to be started again, for example before a time limit."""
    STOPPED = "stopped"
    """It ended because a user or Slurm asked it to."""
    FAILED = "failed"
    HUNG = "hung"
    """The watchdog ended it, because it made no progress."""
    DIVERGED = "diverged"
    """Values that must be equal on all ranks differed. It stopped without saving."""
    POISONED = "poisoned"
    """Its numbers were not finite, or too large to be true. It stopped without saving."""
    REFUSED = "refused"
    """Its input was wrong, so starting it again would not help."""
    GAVE_UP = "gave_up"
    """It failed once too often, and the launcher does not start another attempt."""
    SUPERSEDED = "superseded"
    """Another attempt took the run over, because this one gave no sign of life."""
    NO_SPACE = "no_space"
    """The disk is full, and would still be full for another attempt."""


ENDED_WELL = (Outcome.FINISHED, Outcome.RESTART, Outcome.STOPPED)
"""Outcomes that need no explanation."""
FAILURES = (Outcome.FAILED, Outcome.HUNG, Outcome.DIVERGED, Outcome.POISONED)
"""Outcomes that count toward recovery.max_restarts."""
STARTED_AGAIN = (Outcome.RESTART, *FAILURES)
"""Outcomes after which the launcher or Slurm makes another attempt."""


class ExitCode(IntEnum):
    """Exit codes of `pretrain train`, which tell the launcher how the ranks ended."""

    FINISHED = 0
    FAILED = 1
    BAD_INPUT = 2
    RESTART = 75
    """Saved on SIGUSR1, to be started again (EX_TEMPFAIL of sysexits.h)."""
    STOPPED = 80
    """Saved on SIGTERM, not to be started again."""
    DIVERGED = 81
    """Values that must be equal on all ranks differed; nothing was saved since."""
    NO_SPACE = 82
    """The disk is full; not to be started again before there is room."""
    POISONED = 83
    """Numbers were not finite, or too large to be true; nothing was saved since."""
    INTERRUPTED = 128 + signal.SIGINT
    KILLED = 128 + signal.SIGKILL


_OUTCOMES: dict[int, Outcome] = {
    **{code: Outcome[code.name] for code in ExitCode if code.name in Outcome.__members__},
    ExitCode.BAD_INPUT: Outcome.REFUSED,
    ExitCode.INTERRUPTED: Outcome.STOPPED,
}


def outcome_of(code: int) -> Outcome:
    """Return the outcome of a process that ends with this exit code."""
    return _OUTCOMES.get(code, Outcome.FAILED)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a process that ends with this error."""
    if isinstance(error, ConfigError):
        return ExitCode.BAD_INPUT
    if isinstance(error, NoSpace):
        return ExitCode.NO_SPACE
    if isinstance(error, Poisoned):
        return ExitCode.POISONED
    return ExitCode.DIVERGED if isinstance(error, Diverged) else ExitCode.FAILED


class JobKind(StrEnum):
    """The kinds of Slurm jobs that are submitted for a run."""

    TRAIN = "train"
    EVALUATE = "evaluate"


def in_words(outcome: str) -> str:
    """Return an outcome as it is printed: "gave_up" becomes "gave up"."""
    return outcome.replace("_", " ")


# ---- Tell a run's directory from a copy of it, and find out where it was moved ----
# Every record that names a process or a job also holds the place of the directory in which it was
# written, because in a copied directory such a record is about the original run. A directory that
# is moved keeps its inode, so it remains the same run; if it is moved to another file system, it
# counts as a copy.


@functools.cache
def boot_id() -> str | None:
    """Return the id of this host's current boot; None if the kernel provides none."""
    return read_text(Path("/proc/sys/kernel/random/boot_id")).strip() or None


@dataclass(frozen=True)
class Place:
    """The identity of a directory, independent of its path."""

    device: int = 0
    inode: int = 0
    boot_id: str | None = None
    """Device numbers can be compared only on one host, and only between two boots."""

    @staticmethod
    def of(directory: Path) -> Place:
        """Return the place of a directory. Raises OSError if it cannot be read."""
        found = os.stat(directory)
        return Place(found.st_dev, found.st_ino, boot_id())

    def is_place_of(self, directory: Path) -> bool:
        """Return False if this is the place of another directory, or `directory` is missing."""
        try:
            there = Place.of(directory)
        except (FileNotFoundError, NotADirectoryError):
            return False
        # A network file system has a different device number, with major 0, at each mount.
        known = self.boot_id == there.boot_id and os.major(self.device) and os.major(there.device)
        return self.inode == there.inode and not (known and self.device != there.device)


OWNER = "owner.json"
DIRECTORY = "directory"
"""The key under which a record holds the `Place` of its run's directory."""


def is_of_copied(record: Json, run: Path) -> bool:
    """Return True for a record in `run` that was written in the original of which `run` is a copy.

    A record without a place counts as written in `run`.
    """
    content = record.get(DIRECTORY)
    place = from_json(Place, content) if isinstance(content, dict) else None
    return place is not None and not place.is_place_of(run)


def whereabouts(descriptor: int) -> Path | None:
    """Return the current path of an opened directory; None if it was removed or is unknown."""
    with contextlib.suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return path
    return None


def displaced(attempt: Path, now_at: Path | None = None) -> str | None:
    """Return what happened to an attempt's folder, and what to do; None if it is at its path.

    Args:
        attempt: RUN/attempts/####.
        now_at: The current path of the run's directory, if known.

    Raises:
        OSError: The file server does not answer.
    """
    run = attempt.parents[1]
    try:
        if not is_of_copied(parse_json(read_bytes(attempt / OWNER)), run):
            return None
        what = "another directory has taken its place"
    except (FileNotFoundError, NotADirectoryError):
        if attempt.is_dir():
            return None
        what = "is not there any more"
    place = next((path for path in (run, attempt.parent) if not path.is_dir()), attempt)
    if place == run or what.startswith("another"):
        place, what = (
            run,
            f"{what}: it was {f'moved to {now_at}' if now_at else 'moved or removed'}",
        )
    there = f" with run.directory = {now_at}" if now_at else ""
    return (
        f"{place}: {what} while the run trained. Nothing more is written. Start the run again"
        f"{there or (' where it lies now' if place == run else '')}; it goes on from its newest "
        "checkpoint"
    )


VERSION = 1


class RunPaths:
    """The paths below a run's directory `root`. Nothing is read or created."""

    def __init__(self, root: Path) -> None:
        """Compute the paths."""
        self.root = root
        self.version = root / "run.json"
        self.config = root / "config.toml"
        self.metrics = root / "metrics.jsonl"
        self.wandb_run_id = root / "wandb_run_id"
        self.tensorboard = root / "tensorboard"
        self.profile = root / "profile"
        self.checkpoints = root / "checkpoints"
        self.abandoned = root / "abandoned"
        self.attempts = root / "attempts"
        self.jobs = root / "jobs.jsonl"
        self.logs = root / "logs"
        # Files of `launcher submit` and `sweep`.
        self.launch = root / "launch"
        self.launch_config = self.launch / "config.toml"
        self.launch_record = self.launch / "launch.json"
        self.launch_script = self.launch / "train.sbatch"
        # The evaluations of checkpoints.
        self.evaluations = root / "evaluations"
        self.evaluation_plan = self.evaluations / "plan.json"
        self.paused_evaluation_plan = self.evaluations / "plan.paused.json"

    def rank_log(self, rank: int) -> Path:
        """Return the log of a rank that `launcher local` started."""
        return self.logs / f"rank-{rank}.log"

    def attempt_log(self, number: int) -> Path:
        """Return the log of all ranks of an attempt under Slurm."""
        return self.logs / f"attempt-{number:04d}.log"

    def slurm_log(self, job_id: str) -> Path:
        """Return the log of a job's batch script; `job_id` is "123", or "123_0" in an array."""
        return self.logs / f"slurm-{job_id}.log"

    def evaluation_log(self, checkpoint: str) -> Path:
        """Return the log of the evaluations of a checkpoint, named step-########."""
        return self.logs / f"evaluate-{checkpoint}.log"

    def newest_config(self) -> Path | None:
        """Return the config with which the run was last submitted or started."""
        found = [path for path in (self.launch_config, self.config) if path.is_file()]
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


RUN_MARKS = ("run.json", "jobs.jsonl", "attempts/####", "launch/launch.json", "metrics.jsonl")
"""A directory that holds one of these is the directory of a run."""

DATA_MANIFESTS = ("train/manifest.json", "validation/manifest.json")
"""The files that `pretrain data build` writes last, so a data set with these files is complete."""


def is_run(directory: Path) -> bool:
    """Return True for the directory of a run that was submitted, started or imported.

    The files decide, because other programs may also have folders named attempts and launch.
    """
    paths = RunPaths(directory)
    return (
        any(path.is_file() for path in (paths.jobs, paths.launch_record, paths.metrics))
        or bool(attempt_numbers(paths.attempts))
        # Checked last, since only this opens a file.
        or (paths.version.is_file() and "run_directory_version" in read_json(paths.version))
    )


def check_apart(run: Path) -> None:
    """Check that a new run's directory is not inside that of another run or a data set.

    Each run removes, renames and lists files in its directory. To build a data set again, users
    remove its directory, and would remove the run with it. An existing run passes in any case.

    Raises:
        ConfigError: The directory lies inside another.
    """
    if is_run(run):
        return
    resolved = Path(os.path.realpath(run))
    for place in (resolved, *resolved.parents):
        # Not Path.is_file, which raises an error below a folder that only another user may read.
        if all(os.path.isfile(place / name) for name in DATA_MANIFESTS):
            raise ConfigError(
                f"run.directory = {run}: {place} holds a data set. Give the run a directory of its "
                "own, outside of it"
            )
    for parent in resolved.parents:
        if "run_directory_version" in read_json(RunPaths(parent).version):
            raise ConfigError(
                f"run.directory = {run}: lies inside {parent}, which is the directory of another "
                "run. Choose a directory outside of it, such as beside it"
            )


def claim_version(run: Path) -> None:
    """Write RUN/run.json, with a new id for the run, at its first start or submission.

    A copy of a run gets its own id at its first start, and the original's id is recorded with it.
    The copy loses the W&B run, which remains that of the original.

    Raises:
        ConfigError: The directory has another layout; see `check_version`.
        RunFailed: The file cannot be written.
    """
    path = RunPaths(run).version
    check_version(run)
    with writing(path):
        before = read_json(path)
        if before.get("id") and not is_of_copied(before, run):
            return
        content = {
            "run_directory_version": VERSION,
            "created_at": time.time(),
            "id": secrets.token_hex(8),
            DIRECTORY: dataclasses.asdict(Place.of(run)),
        }
        if before.get("id"):
            content["copy_of"] = before["id"]
            # Removed before run.json is written, so that a kill in between cannot skip this.
            RunPaths(run).wandb_run_id.unlink(missing_ok=True)
            say(
                f"{run}: is a copy of run {before['id']}. From here on it has an id of its own, "
                "also at W&B"
            )
            # Checkpoints saved after one of these belong to a new branch (`history.begins_branch`).
            content["copied"] = [
                read_json(path).get("id")
                for path in sorted(RunPaths(run).checkpoints.glob("step-*/manifest.json"))
            ]
        replace_json(path, content)


def restore_version(run: Path, lost: bytes) -> None:
    """Restore the id of a run whose directory was lost. Raises OSError if that fails."""
    content = parse_json(lost)
    if content.get("id"):
        place = {DIRECTORY: dataclasses.asdict(Place.of(run))}
        replace_json(RunPaths(run).version, content | place, durable=True)


def check_version(run: Path) -> None:
    """Raise ConfigError if another version has laid out this run's directory in another way.

    Also raise it if this user may not read run.json.
    """
    path = RunPaths(run).version
    if not path.exists():
        return
    if not os.access(path, os.R_OK, effective_ids=True):
        raise ConfigError(f"{path}: you may not read it. Ask its owner")
    found = read_json(path).get("run_directory_version")
    if type(found) is not int:
        raise ConfigError(
            f"{path}: run_directory_version = {found!r}: the file is damaged. Checkpoints and "
            "metrics do not depend on it: move it away, and the next start writes a new one, with "
            "another id"
        )
    if found != VERSION:
        raise ConfigError(
            f"{path}: run_directory_version = {found!r}: this version of pretrain reads {VERSION}. "
            "Use the version that made the run"
        )


def attempt_directory(run: Path, number: int) -> Path:
    """Return RUN/attempts/####."""
    return RunPaths(run).attempts / f"{number:04d}"


def attempt_numbers(attempts: Path) -> list[int]:
    """Return the numbers of the folders in RUN/attempts or RUN/abandoned, in no order."""
    try:
        names = os.listdir(attempts)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(name) for name in names if len(name) >= 4 and name.isascii() and name.isdigit()]
