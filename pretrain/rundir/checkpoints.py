"""The checkpoints of a run: names, which are complete and of one line, and their publication.

docs/run_directory.md says what lies where. Of the checkpoints in RUN/checkpoints each descends from
the one before: what a run turns away from is moved to RUN/abandoned (`history.py`).
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
    flush_directory,
    from_json,
    make_directory,
    read_json,
)
from pretrain.rundir.paths import RunPaths, attempt_numbers, check_version, displaced

# ---- Identify a checkpoint: its id, the checkpoint before it, and the branches it lies on ----
# A run that goes on from its newest checkpoint stays on its branch. A run that goes back to an
# earlier checkpoint, or begins with another run's, begins a branch. A checkpoint lists the branches
# from the first step of training to itself, so that its ancestors are known even when some of them
# have been deleted.


Natural = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
Name = Annotated[str, StringConstraints(pattern=r"^[\w-]{1,64}$")]
"""A random name of a checkpoint or a branch: 16 hexadecimal digits where we wrote it."""
MANIFEST = "manifest.json"
"""Written last, so a checkpoint that has it is complete."""


@dataclass(frozen=True)
class Branch:
    """A line of checkpoints that were saved one after the other."""

    id: Name
    since: Natural
    """The step after which it begins: 0 from scratch, else the step of the checkpoint that the
    branch goes on from."""


@dataclass(frozen=True)
class Lineage:
    """The identity of a checkpoint and its ancestry, as manifest.json holds them."""

    id: Name
    step: Natural
    """Optimizer steps done."""
    parent: Name | None
    """The id of the checkpoint that was saved or loaded before; None for the first of a run."""
    branches: Annotated[tuple[Branch, ...], Field(min_length=1)]
    """The branches that lead here, oldest first; the last one is the checkpoint's own."""

    def is_ancestor_of(self, other: Lineage) -> bool:
        """Return True if `other` was trained on from this checkpoint, or is this checkpoint."""
        end = self._end_of_branch(other)
        return self.id == other.id or (end is not None and self.step <= min(end, other.step - 1))

    def shares_branch_beyond(self, other: Lineage) -> bool:
        """Return True if `other` lies, or its line leads, further on this checkpoint's branch.

        A run that went on from here on the same branch could not be told from the line to `other`.
        """
        end = self._end_of_branch(other)
        return end is not None and end > self.step

    def _end_of_branch(self, other: Lineage) -> int | None:
        """Return the last step of this checkpoint's branch on the way to another one."""
        own = self.branches[-1].id
        return next((end for branch, end in _ends(other) if branch.id == own), None)

    def last_common_step(self, other: Lineage) -> int:
        """Return the step up to which this line and another are the same; 0 when never."""
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
    """Return the lineage in a checkpoint's manifest; None when it is missing or damaged."""
    return from_json(Lineage, read_json(checkpoint / MANIFEST))


def new_id() -> str:
    """Return a random name for a checkpoint or a branch."""
    return secrets.token_hex(8)


# ---- Hold a checkpoint while it is read, so that retention passes over it ----
# A reader holds a shared lock (flock) on the checkpoint's manifest, and retention deletes only what
# it can lock exclusively. The kernel releases the lock of a reader that dies. A file system without
# flock protects nothing: every checkpoint then counts as not held.


UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of flock where a file system has no such locks."""


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
    """Yield True if no reader holds a checkpoint; none can begin to while the block runs."""
    path = checkpoint / MANIFEST
    try:
        # NFS wants a descriptor that may write for an exclusive lock.
        descriptor = os.open(path, os.O_RDWR)
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            with _passing_over_unsupported():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        release(descriptor)


def release(descriptor: int) -> None:
    """Give up the lock of a file, and close it."""
    # Not by closing alone: a child that was forked meanwhile has the same lock.
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
    """Another attempt has taken this run over; whatever this one still writes is not wanted."""


def check_still_holds(attempt: Path | None) -> None:
    """Check that an attempt is the newest of its run, which is what holds the run.

    By itself the check cannot close the race: a process may be suspended right after it and wake
    when another attempt has long saved checkpoints of its own. It does together with the order in
    which a new holder works:

    1. it makes its attempt's folder, in one rename;
    2. it removes the hidden folders of unfinished saves of all other attempts
       (`pretrain.rundir.history.recover`);
    3. only then it looks for the checkpoint to go on from.

    A late publisher that has passed the check before 1 then finds one of two cases. Its rename
    comes before 2: the checkpoint is one more of the run that the new holder takes over, and 3 sees
    it. Or its rename comes after 2: what it would rename is gone, and the rename fails with ENOENT.
    A folder that is made after 2 belongs to a save that begins after 1, and the check refuses it.

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
    """Turn an OSError into a RunFailed as `writing` does, or into what it is due to.

    A new holder removes the folder to which an old one still writes.

    Args:
        path: The checkpoint that is written.
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
"""The hidden name of a save that is under way, with the number of the attempt that makes it."""


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint: step-00000100, longer from 100 million on."""
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step that a checkpoint's name says, or None when it is no such name.

    Only the spelling that `checkpoint_name` gives counts ("step-0000000100" names nothing), so a
    step has one name.
    """
    match = _NAME.fullmatch(name)
    step = int(match[1]) if match and match[1].isascii() else None
    return step if step is not None and checkpoint_name(step) == name else None


def checkpoint_directory(run: Path, step: int) -> Path:
    """Return RUN/checkpoints/step-########."""
    return RunPaths(run).checkpoints / checkpoint_name(step)


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint in RUN/checkpoints or RUN/abandoned/#### belongs to.

    None for a copy elsewhere, which has no run whose files would be about it.
    """
    folder = checkpoint.absolute().parent
    if folder.name == "checkpoints":
        return folder.parent
    return folder.parents[1] if folder.parent.name == "abandoned" else None


def check_name(checkpoint: Path, step: int) -> None:
    """Check that a directory named as a step's checkpoint holds that step.

    Args:
        checkpoint: The checkpoint's directory. A name that names no step may hold any.
        step: The step that its manifest says.

    Raises:
        ConfigError: It holds another step.
    """
    named = checkpoint_step(checkpoint.name)
    if named is not None and named != step:
        raise ConfigError(
            f"{checkpoint}: holds step {step}, so its name is wrong. Name it "
            f"{checkpoint_name(step)} again, or move it elsewhere"
        )


# ---- which there are -----------------------------------------------------------------------------
def named_by_step(directory: Path) -> list[Path]:
    """Return what lies in `directory` under a checkpoint's name, in the order of the steps.

    By number, not by name: step-100000000 comes after step-99999999.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        # A link to a file system that is not mounted is no empty folder: a run would start anew.
        if directory.is_symlink():
            target = os.readlink(directory)
            raise ConfigError(f"{directory}: links to {target}, which is not there") from None
        return []
    steps = {name: step for name in names if (step := checkpoint_step(name)) is not None}
    return [directory / name for name in sorted(steps, key=steps.__getitem__)]


def is_complete(checkpoint: Path) -> bool:
    """Return True for a checkpoint that was written to its end."""
    return (checkpoint / MANIFEST).is_file()


def complete_checkpoints(run: Path) -> list[Path]:
    """Return a run's complete checkpoints, oldest first."""
    return [path for path in named_by_step(RunPaths(run).checkpoints) if is_complete(path)]


WHY = "why.json"


@dataclass(frozen=True)
class Why:
    """why.json: what a run turned away from, when and why."""

    at: float
    """Unix seconds."""
    reason: str
    """For people."""
    id: str | None = None
    """The checkpoint that training goes on from instead; None for the initial state."""
    step: int | None = None
    """Its step."""
    resumed: str = ""
    """Its path: relative to the run's directory if it lies in it, which may be moved or copied."""
    checkpoints: dict[str, Any] = field(default_factory=dict)
    """Name -> id of each checkpoint that is moved; null for a damaged one."""
    stayed: dict[str, str] = field(default_factory=dict)
    """Name -> id of each checkpoint that stays where it is."""

    def resumed_at(self, run: Path) -> Path:
        """Return the path of the checkpoint that training goes on from instead."""
        return run / self.resumed


def read_abandoned(run: Path) -> list[tuple[Path, Why]]:
    """Return the folders of RUN/abandoned whose why.json can be read, oldest first."""
    directory = RunPaths(run).abandoned
    folders = [directory / f"{number:04d}" for number in sorted(attempt_numbers(directory))]
    found = ((folder, from_json(Why, read_json(folder / WHY))) for folder in folders)
    return [(folder, why) for folder, why in found if why is not None]


def abandoned_checkpoints(run: Path) -> Iterator[Path]:
    """Yield what lies in RUN/abandoned/#### under a checkpoint's name."""
    directory = RunPaths(run).abandoned
    for number in sorted(attempt_numbers(directory)):
        yield from named_by_step(directory / f"{number:04d}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint by its name and its ancestry."""

    path: Path
    lineage: Lineage | None
    """None when the manifest is damaged or missing."""

    @property
    def step(self) -> int:
        """Return the step that its name says."""
        return checkpoint_step(self.path.name) or 0

    @property
    def is_sound(self) -> bool:
        """Return True if its ancestry can be read and its name is its content's."""
        return self.lineage is not None and self.lineage.step == self.step


def saved_checkpoints(run: Path) -> list[Saved]:
    """Return a run's checkpoints with their ancestry, oldest first; damaged ones are among them."""
    return [Saved(path, read_lineage(path)) for path in named_by_step(RunPaths(run).checkpoints)]


def newest_checkpoint_step(run: Path) -> int | None:
    """Return the step of a run's newest complete checkpoint, or None when it has none."""
    found = complete_checkpoints(run)
    return checkpoint_step(found[-1].name) if found else None


def checkpoints_to_resume(run: Path) -> list[Path]:
    """Return the checkpoints that `auto` may go on from, the newest first.

    They are of one line of descent. Damaged ones are among them: whoever opens them finds out.

    Raises:
        ConfigError: Checkpoints of two lines lie side by side, or the run was last started from one
            that is not here, and has saved none since.
    """
    found = saved_checkpoints(run)
    check_one_line(found)
    ids = {saved.path.name: saved.lineage.id for saved in found if saved.lineage}
    for folder, why in read_abandoned(run)[-1:]:
        if why.id and why.id not in ids.values() and ids.items() <= why.stayed.items():
            raise ConfigError(
                f"{folder / WHY}: this run was last started from {why.resumed_at(run)}, and has "
                f"saved no checkpoint since. Go on from there (--resume {why.resumed_at(run)}) or "
                "name another one"
            )
    return [saved.path for saved in reversed(found)]


def check_one_line(found: Sequence[Saved]) -> None:
    """Check that of the checkpoints that can be read each descends from the one before.

    A run keeps them so. A user who moves one back by hand may mix two lines.

    Raises:
        ConfigError: Names two of which neither descends from the other.
    """
    sound = [saved for saved in found if saved.is_sound]
    for saved in sound[:-1]:
        newest = sound[-1]
        assert saved.lineage is not None and newest.lineage is not None
        if not saved.lineage.is_ancestor_of(newest.lineage):
            raise ConfigError(
                f"{newest.path}: does not descend from {saved.path}, so it cannot be known which "
                f"of the two to go on from. Name one (for training --resume {newest.path}; what "
                "does not lead to it is then moved to abandoned/), or move the other one elsewhere"
            )


def find_checkpoint(path: Path) -> Path:
    """Return `path` itself if it is a checkpoint, or the newest one of the run that it is.

    Raises:
        ConfigError: It is neither, or the run has no complete checkpoint, or two lines of them, or
            the newest one has lost its manifest.
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


def checkpoints_awaiting_evaluation(run: Path) -> list[Path]:
    """Return the complete checkpoints that a plan wants evaluated and that have no result.

    Oldest first, and only those that the newest one descends from. A folder in RUN/evaluations
    appears whole: a result, or the note that the launcher gave the checkpoint up.
    """
    paths = RunPaths(run)
    if not paths.evaluation_plan.exists():
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

    Its name is its own: it holds the attempt's number, by which the next attempt knows that it is
    left over, and a random part. So nothing that somebody else put there is in the way.

    Args:
        run: The run's directory.
        step: Steps done.
        attempt: RUN/attempts/#### of the attempt that saves; None for a save without an attempt.

    Raises:
        Superseded: Another attempt has taken the run.
        OSError: The disk refused.
    """
    check_still_holds(attempt)
    number = int(attempt.name) if attempt else 0
    name = f".{checkpoint_name(step)}.{number:04d}-{secrets.token_hex(8)}{PARTIAL}"
    partial = RunPaths(run).checkpoints / name
    # Durable: without the folder's own name, no flush of what is in it helps.
    make_directory(partial.parent)
    partial.mkdir(mode=DIRECTORY_MODE)
    return partial


def partial_attempt(name: str) -> int | None:
    """Return the attempt that a hidden folder of an unfinished save belongs to, or None."""
    match = _PARTIAL.fullmatch(name)
    return int(match[1]) if match and match[1].isascii() else None


def publish_checkpoint(partial: Path, final: Path, attempt: Path | None) -> None:
    """Give a finished checkpoint its name, unless another attempt has taken the run.

    Args:
        partial: What `begin_partial` returned, complete and flushed to the disk.
        final: RUN/checkpoints/step-########.
        attempt: As in `begin_partial`.

    Raises:
        Superseded: Another attempt has taken the run; nothing was published.
        OSError: The disk refused.
    """
    check_still_holds(attempt)
    try:
        partial.rename(final)
    except OSError:
        # The new holder has removed `partial`, or has saved this step; see `check_still_holds`.
        check_still_holds(attempt)
        raise
    flush_directory(final.parent)


def check_room(directory: Path, needed: int) -> None:
    """Check that a checkpoint of `needed` bytes fits where `directory` lies.

    Raises:
        NoSpace: It does not; nothing has been written.
    """
    free = free_bytes(directory)
    if free is not None and free < needed:
        raise NoSpace(
            f"{directory}: a checkpoint takes {in_bytes(needed)}, but {in_bytes(free)} are free. "
            "Nothing was written, and the checkpoints that are there stay. Make room, then run the "
            "command again"
        )
