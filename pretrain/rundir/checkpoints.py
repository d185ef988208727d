"""The checkpoints of a run: names, completeness, ancestry and publication.

docs/run_directory.md describes the layout. Each checkpoint in RUN/checkpoints descends from the one
before it: when a run goes back, checkpoints of the branch that it leaves are moved to RUN/abandoned
(`history.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from pretrain.config import ConfigError, NoSpace, RunFailed, free_bytes, in_bytes, writing
from pretrain.rundir.files import (
    DIRECTORY_MODE,
    MAX_NUMBER,
    PARTIAL,
    from_json,
    make_directory,
    publish_directory,
    read_json,
)
from pretrain.rundir.paths import RunPaths, attempt_numbers, check_version, displaced

# ---- Identify a checkpoint: its id, the checkpoint before it, and the branches it lies on ----
# A run that resumes from its newest checkpoint stays on its branch. A run that goes back to an
# earlier checkpoint, or is given one by name, begins a branch. A checkpoint lists the branches
# from the first step of training to itself, so that its ancestors are known even if some of them
# have been deleted.


Natural = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
Name = Annotated[str, StringConstraints(pattern=r"^[\w-]{1,64}$")]
"""A random name of a checkpoint or a branch; ours have 16 hexadecimal digits."""
MANIFEST = "manifest.json"
"""Written last, so a checkpoint with this file is complete."""


@dataclass(frozen=True)
class Branch:
    """A sequence of checkpoints that were saved one after another."""

    id: Name
    since: Natural
    """The step after which the branch begins: 0 from scratch, else the step of the checkpoint from
    which it continues."""


@dataclass(frozen=True)
class Lineage:
    """The identity of a checkpoint and its ancestry, as manifest.json holds them."""

    id: Name
    step: Natural
    """Optimizer steps done."""
    parent: Name | None
    """The id of the previous checkpoint, saved or loaded; None for the first of a run."""
    branches: Annotated[tuple[Branch, ...], Field(min_length=1)]
    """The branches that lead here, oldest first; the last one is the checkpoint's own."""

    def is_ancestor_of(self, other: Lineage) -> bool:
        """Return True if `other` was trained on from this checkpoint, or is this checkpoint."""
        end = self._end_of_branch(other)
        return self.id == other.id or (end is not None and self.step <= min(end, other.step - 1))

    def shares_branch_beyond(self, other: Lineage) -> bool:
        """Return True if the line to `other` follows this checkpoint's branch beyond this step.

        Checkpoints of a run that continued from here on the same branch could then not be told
        apart from those on the line to `other`.
        """
        end = self._end_of_branch(other)
        return end is not None and end > self.step

    def _end_of_branch(self, other: Lineage) -> int | None:
        """Return the last step of this checkpoint's branch on the way to another one."""
        own = self.branches[-1].id
        return next((end for branch, end in _ends(other) if branch.id == own), None)

    def last_common_step(self, other: Lineage) -> int:
        """Return the last step that the lines to this checkpoint and to `other` share, or 0."""
        common = 0
        ends = zip(_ends(self), _ends(other))
        for (mine, end), (theirs, other_end) in ends:
            if mine.id != theirs.id:
                break
            common = min(end, other_end)
        return common


def _ends(lineage: Lineage) -> list[tuple[Branch, int]]:
    """Return each branch with the last step of it that lies on the line."""
    following = [branch.since for branch in lineage.branches[1:]]
    return list(zip(lineage.branches, [*following, lineage.step]))


def read_lineage(checkpoint: Path) -> Lineage | None:
    """Return the lineage in a checkpoint's manifest; None if it is missing or damaged."""
    return from_json(Lineage, read_json(checkpoint / MANIFEST))


def new_id() -> str:
    """Return a random name for a checkpoint or a branch."""
    return secrets.token_hex(8)


# ---- Hold a checkpoint while it is read, so that retention does not delete it ----
# A reader holds a shared lock (flock) on the checkpoint's manifest, and retention deletes only what
# it can lock exclusively. The kernel releases the lock of a reader that dies. On a file system
# without flock there is no protection: every checkpoint then counts as not held.


UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of flock on file systems without such locks."""


@contextlib.contextmanager
def hold(checkpoint: Path) -> Iterator[None]:
    """Keep retention from deleting a checkpoint while the block runs.

    Raises:
        ConfigError: The checkpoint was deleted a moment ago.
    """
    try:
        descriptor = os.open(checkpoint / MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        raise _gone(checkpoint) from None
    try:
        with _passing_over_unsupported():
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # Retention may have locked and deleted it between the two lines above.
        if not is_same_file(descriptor, checkpoint / MANIFEST):
            raise _gone(checkpoint)
        yield
    finally:
        release(descriptor)


@contextlib.contextmanager
def unheld(checkpoint: Path) -> Iterator[bool]:
    """Yield True if no reader holds a checkpoint; no reader can do so while the block runs."""
    path = checkpoint / MANIFEST
    try:
        # For an exclusive lock, NFS requires a writable descriptor.
        descriptor = os.open(path, os.O_RDWR)
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        yield lock_alone(descriptor)
    finally:
        release(descriptor)


def lock_alone(descriptor: int) -> bool:
    """Lock a file exclusively; return False if another process has locked it."""
    try:
        with _passing_over_unsupported():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(descriptor: int) -> None:
    """Release the lock of a file, and close it."""
    # Closing alone does not unlock it, because a child forked in the meantime shares the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextlib.contextmanager
def _passing_over_unsupported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def is_same_file(descriptor: int, path: Path) -> bool:
    """Return True if an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _gone(checkpoint: Path) -> ConfigError:
    return ConfigError(f"{checkpoint}: deleted a moment ago (checkpoint.keep). Name another one")


# ---- The fence before publication: an attempt that has lost the run publishes nothing more ----


class Superseded(RunFailed):
    """Another attempt has taken this run over, so this attempt must not write to it any more."""


def check_still_holds(attempt: Path | None) -> None:
    """Check that an attempt is the newest of its run, because the newest attempt holds the run.

    The check alone cannot prevent a race: a process may be suspended right after it, and wake up
    long after another attempt has saved its own checkpoints. Together with the order in which a new
    holder works, it does:

    1. The new holder makes its attempt's folder, in one rename.
    2. It removes the hidden folders of unfinished saves of all other attempts
       (`pretrain.rundir.history.recover`).
    3. Only then does it search for the checkpoint to resume from.

    For a late publisher that passed the check before 1, there are two cases. If its rename comes
    before 2, the checkpoint becomes part of the run that the new holder takes over, and 3 finds it.
    If its rename comes after 2, the hidden folder is gone, and the rename fails with ENOENT. A
    folder that is made after 2 belongs to a save that begins after 1, which the check refuses.

    Args:
        attempt: RUN/attempts/####; None for a save that belongs to no attempt.

    Raises:
        Superseded: A newer attempt exists.
        RunFailed: The run's directory or the attempt's folder was moved, removed or replaced.
        OSError: The file server does not answer.
    """
    if attempt is None:
        return
    newest = max(attempt_numbers(attempt.parent), default=0)
    if newest > int(attempt.name):
        raise Superseded(
            f"{attempt}: attempt {newest} has taken this run over, because this attempt gave no "
            "sign of life. It publishes nothing more and ends"
        )
    if what := displaced(attempt):
        raise RunFailed(what)


@contextmanager
def writing_as_holder(path: Path, attempt: Path | None) -> Iterator[None]:
    """Turn an OSError into a RunFailed as `writing` does, or into the error of its real cause.

    The cause may be a new holder, which removes the folder to which an old one still writes.

    Args:
        path: The checkpoint to which the block writes.
        attempt: RUN/attempts/#### of the attempt that saves; None for a save without an attempt.

    Raises:
        Superseded: Another attempt has taken the run.
        RunFailed: The write was refused.
    """
    try:
        with writing(path):
            yield
    except RunFailed:
        check_still_holds(attempt)
        raise


_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(rf"\.step-\d{{8,}}\.(\d{{4,}})-[0-9a-f]{{16}}{re.escape(PARTIAL)}")
"""The hidden name of a save in progress, with the number of the attempt that makes it."""


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint: step-00000100, longer from 100 million on."""
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in a checkpoint's name, or None if it is not the name of a checkpoint.

    Only the spelling of `checkpoint_name` counts ("step-0000000100" is not a name), so that each
    step has one name.
    """
    match = _NAME.fullmatch(name)
    step = int(match[1]) if match and match[1].isascii() else None
    return step if step is not None and checkpoint_name(step) == name else None


def checkpoint_directory(run: Path, step: int) -> Path:
    """Return RUN/checkpoints/step-########."""
    return RunPaths(run).checkpoints / checkpoint_name(step)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run to which a checkpoint in RUN/checkpoints or RUN/abandoned/#### belongs.

    A copy elsewhere belongs to no run: None.
    """
    folder = checkpoint.absolute().parent
    if folder.name == "checkpoints":
        return folder.parent
    return folder.parents[1] if folder.parent.name == "abandoned" else None


def check_name(checkpoint: Path, step: int) -> None:
    """Check that a directory with the name of a step's checkpoint holds that step.

    Args:
        checkpoint: The checkpoint's directory. With any other name it may hold any step.
        step: The step in its manifest.

    Raises:
        ConfigError: The directory holds another step.
    """
    named = checkpoint_step(checkpoint.name)
    if named is not None and named != step:
        raise ConfigError(
            f"{checkpoint}: holds step {step}, so its name is wrong. Name it "
            f"{checkpoint_name(step)} again, or move it elsewhere"
        )


# ---- finding checkpoints -------------------------------------------------------------------------
def named_by_step(directory: Path) -> list[Path]:
    """Return the entries of `directory` with the name of a checkpoint, in the order of the steps.

    The order is numeric: step-100000000 comes after step-99999999.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        # A link to a file system that is not mounted must not count as an empty folder, because the
        # run would start from scratch.
        if directory.is_symlink():
            target = os.readlink(directory)
            raise ConfigError(f"{directory}: links to {target}, which is not there") from None
        return []
    steps = {name: step for name in names if (step := checkpoint_step(name)) is not None}
    return [directory / name for name in sorted(steps, key=steps.__getitem__)]


def is_complete(checkpoint: Path) -> bool:
    """Return True for a checkpoint that was written completely."""
    return (checkpoint / MANIFEST).is_file()


def complete_checkpoints(run: Path) -> list[Path]:
    """Return a run's complete checkpoints, oldest first."""
    return [path for path in named_by_step(RunPaths(run).checkpoints) if is_complete(path)]


WHY = "why.json"


@dataclass(frozen=True)
class Why:
    """why.json: which checkpoints a run has abandoned, when and why."""

    at: float
    """Unix seconds."""
    reason: str
    """The reason as readable text."""
    id: str | None = None
    """The id of the checkpoint from which training continues; None for the initial state."""
    step: int | None = None
    """The step of that checkpoint."""
    resumed: str = ""
    """The path of that checkpoint; relative to the run's directory if it lies there, because the
    directory may be moved or copied."""
    checkpoints: dict[str, Any] = field(default_factory=dict)
    """Name -> id of each checkpoint that is moved; null for a damaged one."""
    stayed: dict[str, str] = field(default_factory=dict)
    """Name -> id of each checkpoint that stays where it is."""


def read_abandoned(run: Path) -> list[tuple[Path, Why]]:
    """Return the folders of RUN/abandoned whose why.json can be read, oldest first."""
    directory = RunPaths(run).abandoned
    folders = [directory / f"{number:04d}" for number in sorted(attempt_numbers(directory))]
    found = ((folder, from_json(Why, read_json(folder / WHY))) for folder in folders)
    return [(folder, why) for folder, why in found if why is not None]


def abandoned_checkpoints(run: Path) -> Iterator[Path]:
    """Yield the entries of RUN/abandoned/#### with the name of a checkpoint."""
    directory = RunPaths(run).abandoned
    for number in sorted(attempt_numbers(directory)):
        yield from named_by_step(directory / f"{number:04d}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint by its name and its ancestry."""

    path: Path
    lineage: Lineage | None
    """None if the manifest is damaged or missing."""

    @property
    def step(self) -> int:
        """Return the step in the checkpoint's name."""
        return checkpoint_step(self.path.name) or 0

    @property
    def is_sound(self) -> bool:
        """Return True if its ancestry can be read and its name and content have the same step."""
        return self.lineage is not None and self.lineage.step == self.step


def saved_checkpoints(run: Path) -> list[Saved]:
    """Return a run's checkpoints with their ancestry, oldest first, including damaged ones."""
    return [Saved(path, read_lineage(path)) for path in named_by_step(RunPaths(run).checkpoints)]


def newest_checkpoint_step(run: Path) -> int | None:
    """Return the step of a run's newest complete checkpoint, or None if it has none."""
    found = complete_checkpoints(run)
    return checkpoint_step(found[-1].name) if found else None


def checkpoints_to_resume(run: Path) -> list[Path]:
    """Return the checkpoints from which `auto` may resume, the newest first.

    They belong to one line of descent. Damaged ones are included, which is noticed on opening.

    Raises:
        ConfigError: There are checkpoints of two lines of descent; or the run was last started from
            a checkpoint that is not here, and has saved none since.
    """
    found = saved_checkpoints(run)
    check_one_line(found)
    ids = {saved.path.name: saved.lineage.id for saved in found if saved.lineage}
    for folder, why in read_abandoned(run)[-1:]:
        if why.id and why.id not in why.stayed.values() and ids.items() <= why.stayed.items():
            raise ConfigError(
                f"{folder / WHY}: this run was last started from {run / why.resumed}, and has "
                f"saved no checkpoint since. Go on from there (--resume {run / why.resumed}) or "
                "name another one"
            )
    return [saved.path for saved in reversed(found)]


def check_one_line(found: Sequence[Saved]) -> None:
    """Check that each readable checkpoint descends from the one before.

    A run keeps this order, but a user who moves a checkpoint by hand may mix two lines of descent.

    Raises:
        ConfigError: Names two checkpoints of which neither descends from the other.
    """
    sound = [saved for saved in found if saved.is_sound]
    for saved in sound[:-1]:
        newest = sound[-1]
        assert saved.lineage is not None and newest.lineage is not None
        if not saved.lineage.is_ancestor_of(newest.lineage):
            raise ConfigError(
                f"{newest.path}: does not descend from {saved.path}, so it cannot be known which "
                f"of the two to go on from. Name one (for training --resume {newest.path}; those "
                "that do not lead to it are then moved to abandoned/), or move the other elsewhere"
            )


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint; if it is a run, return the run's newest checkpoint.

    Raises:
        ConfigError: `path` is neither, or the run has no complete checkpoint, or two lines of
            descent, or the newest checkpoint has lost its manifest.
    """
    if is_complete(path):
        check_version(run_of(path) or path.absolute().parents[1])
        return path
    check_version(path)
    if found := saved_checkpoints(path):
        check_one_line(found)
        path = found[-1].path
        if is_complete(path):
            return path
    if checkpoint_step(path.name) is not None and path.is_dir():
        raise ConfigError(
            f"{path}: has no {MANIFEST}, so it is damaged. Restore the file, or name another "
            "checkpoint"
        )
    what = "neither a run nor a checkpoint" if path.exists() else "no such directory"
    raise ConfigError(
        f"{path}: {what}. Give a run's directory (it has checkpoints/) or one step-######## in it"
    )


def checkpoints_awaiting_evaluation(run: Path, *, with_paused: bool = False) -> list[Path]:
    """Return the complete checkpoints that are to be evaluated by a plan and have no result.

    Oldest first, and only ancestors of the newest checkpoint. A folder in RUN/evaluations is
    published complete: a result, or the note that the launcher gave the checkpoint up.

    Args:
        run: The run's directory.
        with_paused: Count a plan that `launcher cancel` has paused, too.
    """
    paths = RunPaths(run)
    plans = [paths.evaluation_plan, paths.paused_evaluation_plan][: 1 + with_paused]
    if not any(plan.exists() for plan in plans):
        return []
    evaluated = {path.name for path in named_by_step(paths.evaluations)}
    found = [saved for saved in saved_checkpoints(run) if is_complete(saved.path)]
    newest = found[-1].lineage if found else None
    return [
        saved.path
        for saved in found
        if saved.path.name not in evaluated
        and not (saved.lineage and newest and not saved.lineage.is_ancestor_of(newest))
    ]


# ---- publication ---------------------------------------------------------------------------------
def begin_partial(run: Path, step: int, attempt: Path | None) -> Path:
    """Make the hidden folder in which the checkpoint of a step is written.

    Its name is unique: it contains a random part, and the attempt's number, by which later attempts
    recognize it as left over. So no other folder can be in its way.

    Args:
        run: The run's directory.
        step: Steps done.
        attempt: RUN/attempts/#### of the attempt that saves; None for a save without an attempt.

    Raises:
        Superseded: Another attempt has taken the run.
        OSError: The folder cannot be made.
    """
    check_still_holds(attempt)
    number = int(attempt.name) if attempt else 0
    name = f".{checkpoint_name(step)}.{number:04d}-{secrets.token_hex(8)}{PARTIAL}"
    partial = RunPaths(run).checkpoints / name
    # The parent is made durable too: flushing files is useless if their folder's name gets lost.
    make_directory(partial.parent)
    partial.mkdir(mode=DIRECTORY_MODE)
    return partial


def partial_attempt(name: str) -> int | None:
    """Return the attempt to which a hidden folder of an unfinished save belongs, or None."""
    match = _PARTIAL.fullmatch(name)
    return int(match[1]) if match and match[1].isascii() else None


def publish_checkpoint(partial: Path, final: Path, attempt: Path | None) -> None:
    """Give a finished checkpoint its name, unless another attempt has taken the run.

    Args:
        partial: The folder from `begin_partial`, complete and flushed to the disk.
        final: RUN/checkpoints/step-########.
        attempt: As in `begin_partial`.

    Raises:
        Superseded: Another attempt has taken the run; nothing was published.
        OSError: The folder cannot be renamed.
    """
    check_still_holds(attempt)
    try:
        publish_directory(partial, final)
    except OSError:
        # The new holder has removed `partial`, or has saved this step; see `check_still_holds`.
        check_still_holds(attempt)
        raise


def check_room(directory: Path, needed: int) -> None:
    """Check that a checkpoint of `needed` bytes fits on the file system of `directory`.

    Raises:
        NoSpace: It does not fit; nothing has been written.
    """
    free = free_bytes(directory)
    if free is not None and free < needed:
        raise NoSpace(
            f"{directory}: a checkpoint takes {in_bytes(needed)}, but {in_bytes(free)} are free. "
            "Nothing was written, and the checkpoints that are there stay. Make room, then run the "
            "command again"
        )
