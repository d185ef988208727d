"""The checkpoints of a run: names, which are complete and of one line, and their publication.

docs/run_directory.md says what lies where. Of the checkpoints in RUN/checkpoints each descends from
the one before: what a run turns away from is moved to RUN/abandoned (`history.py`).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, NoSpace, RunFailed, free_bytes, in_bytes, writing
from pretrain.rundir.files import (
    DIRECTORY_MODE,
    PARTIAL,
    flush_directory,
    from_json,
    make_directory,
    read_json,
    replace_json,
    say,
)
from pretrain.rundir.lineage import MANIFEST as MANIFEST
from pretrain.rundir.lineage import Branch, Lineage, parse_lineage, read_lineage
from pretrain.rundir.metrics import copy_after, drop_after
from pretrain.rundir.paths import RunPaths, attempt_numbers, check_version

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
        Superseded: A newer attempt exists, or the attempt's folder is gone.
        OSError: The file server does not answer.
    """
    if attempt is None:
        return
    newest = max(attempt_numbers(attempt.parent), default=0)
    if newest != int(attempt.name):
        by = f"attempt {newest} has taken this run over" if newest else "its folder is gone"
        raise Superseded(
            f"{attempt}: {by}, because this attempt gave no sign of life. It publishes nothing "
            "more and ends"
        )


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


# ---- Move what a run has turned away from to RUN/abandoned/####, where nothing is deleted ----
# A run that goes on from another checkpoint than its newest one, or whose newest one is damaged,
# leaves checkpoints, evaluations and lines of metrics.jsonl that are not part of its history any
# more. They are moved to the next free number, with a why.json.
#
# why.json is written first and lists what is moved. A move that was killed half-way is finished at
# the next start, and until then whoever looks for checkpoints passes over those that are listed.


WHY = "why.json"


@dataclass(frozen=True)
class Why:
    """why.json: what was set aside, when and why."""

    at: float
    """Unix seconds."""
    reason: str
    """For people."""
    id: str | None = None
    """The checkpoint that training goes on from instead."""
    step: int | None = None
    """Its step."""
    parent: str | None = None
    """The rest of its ancestry, as in its manifest."""
    branches: tuple[Branch, ...] = ()
    resumed: str = ""
    """Its path."""
    checkpoints: dict[str, Any] = field(default_factory=dict)
    """Name -> id of each checkpoint that is moved; null for a damaged one."""
    evaluations: tuple[str, ...] = ()
    """Names of the results that are moved, with their claims."""
    metrics_after: int | None = None
    """Lines of metrics.jsonl after this step are moved."""
    stayed: dict[str, Any] = field(default_factory=dict)
    """Name -> id of each checkpoint that stays."""
    finished: bool = False
    """Everything has been moved."""

    @property
    def lineage(self) -> Lineage | None:
        """Return the ancestry of the checkpoint that training goes on from."""
        return parse_lineage(dataclasses.asdict(self))


def set_aside(run: Path, why: Why) -> Path:
    """Move what `why` lists to the next free RUN/abandoned/####. For the run's holder alone.

    Returns:
        The folder.

    Raises:
        OSError: The disk refused; the next start goes on with the move.
    """
    folder = _begin(run, why)
    _finish(run, folder, why)
    return folder


def finish_set_aside(run: Path) -> None:
    """Finish moves that were killed half-way. For the run's holder alone, before it trains."""
    for folder, why in read_abandoned(run):
        if not why.finished:
            _finish(run, folder, why)


def move_aside(run: Path, path: Path, at: float, reason: str) -> Path:
    """Move a file or folder that is in the way to RUN/abandoned/####/<its name>.

    Args:
        run: The run's directory.
        path: What is in the way.
        at: Unix seconds.
        reason: For people.

    Returns:
        Where it is now.
    """
    folder = _begin(run, Why(at, reason, finished=True))
    _move(path, folder / path.name)
    return folder / path.name


def read_abandoned(run: Path) -> list[tuple[Path, Why]]:
    """Return the folders of RUN/abandoned whose why.json can be read, oldest first."""
    directory = RunPaths(run).abandoned
    folders = [directory / f"{number:04d}" for number in sorted(attempt_numbers(directory))]
    found = ((folder, from_json(Why, read_json(folder / WHY))) for folder in folders)
    return [(folder, why) for folder, why in found if why is not None]


def being_set_aside(run: Path) -> dict[str, Any]:
    """Return name -> id of the checkpoints whose move was begun and has not been finished."""
    listed: dict[str, Any] = {}
    for _, why in read_abandoned(run):
        if not why.finished:
            listed |= why.checkpoints
    return listed


def abandoned_checkpoints(run: Path) -> Iterator[Path]:
    """Yield what lies in RUN/abandoned/#### under the name of a step."""
    directory = RunPaths(run).abandoned
    for number in sorted(attempt_numbers(directory)):
        yield from sorted((directory / f"{number:04d}").glob("step-" + "[0-9]" * 8))


def _begin(run: Path, why: Why) -> Path:
    """Make the next free RUN/abandoned/#### with its why.json, in one rename."""
    directory = RunPaths(run).abandoned
    directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    partial = directory / f".{uuid.uuid4().hex}{PARTIAL}"
    partial.mkdir(mode=DIRECTORY_MODE)
    try:
        replace_json(partial / WHY, dataclasses.asdict(why), durable=True, indent=2)
        number = max(attempt_numbers(directory), default=0) + 1
        while os.path.lexists(directory / f"{number:04d}"):
            number += 1
        folder = partial.rename(directory / f"{number:04d}")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush_directory(directory)
    return folder


def _finish(run: Path, folder: Path, why: Why) -> None:
    """Move what has not been moved yet, and note in why.json that all is."""
    paths = RunPaths(run)
    for name, known in why.checkpoints.items():
        found = read_lineage(paths.checkpoints / name)
        if (found.id if found else None) == known:
            _move(paths.checkpoints / name, folder / name)
    for name in why.evaluations:
        _move(paths.evaluations / name, folder / "evaluations" / name)
        _move(paths.evaluation_claim(name), folder / "evaluations/claims" / name)
    if why.metrics_after is not None and paths.metrics.exists():
        # The copy comes first: what is dropped then is in it already.
        if not (folder / "metrics.jsonl").exists():
            copy_after(paths.metrics, why.metrics_after, folder / "metrics.jsonl")
        drop_after(paths.metrics, why.metrics_after)
    for changed in (folder, paths.checkpoints):
        if changed.is_dir():
            flush_directory(changed)
    finished = dataclasses.replace(why, finished=True)
    replace_json(folder / WHY, dataclasses.asdict(finished), durable=True, indent=2)


def _move(path: Path, target: Path) -> None:
    """Rename `path` to `target`, unless that was done before.

    RUN/checkpoints may be a link to another file system. What is moved stays on that one then, in
    the folder abandoned/ beside the checkpoints, and `target` is a link to it: nothing is copied.
    """
    # A link to nothing is left by a process that was killed between the link and the rename.
    if not os.path.lexists(path) or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_symlink():
        try:
            path.rename(target)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        # The user may have deleted a RUN/abandoned/#### of this number, so the name is a new one.
        target.symlink_to(path.parent.resolve() / "abandoned" / uuid.uuid4().hex / path.name)
        flush_directory(target.parent)
    beside = Path(os.readlink(target))
    beside.parent.mkdir(parents=True, exist_ok=True)
    path.rename(beside)
    flush_directory(beside.parent)


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
    """Return a run's complete checkpoints, oldest first.

    Those that are being moved to RUN/abandoned are not the run's any more.
    """
    return [path for path in _staying(run) if is_complete(path)]


def headless_checkpoints(run: Path) -> list[Path]:
    """Return the folders under a checkpoint's name that hold weights but no manifest, by step.

    Publication is one rename, so such a folder has been whole: it is damaged.
    """
    return [path for path in _staying(run) if is_headless(path)]


def is_headless(checkpoint: Path) -> bool:
    """Return True for a checkpoint that has lost its manifest."""
    return not is_complete(checkpoint) and any(checkpoint.glob("rank-*.safetensors"))


def _staying(run: Path) -> list[Path]:
    """Return what lies under a checkpoint's name and is not being moved to RUN/abandoned."""
    found, leaving = named_by_step(RunPaths(run).checkpoints), being_set_aside(run)
    return [path for path in found if path.name not in leaving or not _is(path, leaving[path.name])]


def _is(checkpoint: Path, known: str | None) -> bool:
    """Return True if a checkpoint has this id; a damaged one has none."""
    lineage = read_lineage(checkpoint)
    return (lineage.id if lineage else None) == known


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint by its name and its ancestry."""

    path: Path
    lineage: Lineage | None
    """None when the manifest is damaged."""

    @property
    def step(self) -> int:
        """Return the step that its name says."""
        return _step(self.path)

    @property
    def is_sound(self) -> bool:
        """Return True if its ancestry can be read and its name is its content's."""
        return self.lineage is not None and self.lineage.step == self.step


def saved_checkpoints(run: Path) -> list[Saved]:
    """Return a run's complete checkpoints with their ancestry, oldest first."""
    return [Saved(path, read_lineage(path)) for path in complete_checkpoints(run)]


def newest_checkpoint_step(run: Path) -> int | None:
    """Return the step of a run's newest complete checkpoint, or None when it has none."""
    found = complete_checkpoints(run)
    return checkpoint_step(found[-1].name) if found else None


def checkpoints_to_resume(run: Path) -> list[Path]:
    """Return the checkpoints that `auto` may go on from, the newest first.

    They are of one line of descent. Damaged ones are among them: whoever opens them finds out.

    Raises:
        ConfigError: Checkpoints of two lines lie side by side, or the run was last started from a
            checkpoint elsewhere and has saved none since, so that none here is of its line, or the
            only checkpoint has lost its manifest.
    """
    found = saved_checkpoints(run)
    check_one_line(found)
    for folder, why in reversed(read_abandoned(run)):
        if not why.resumed:
            continue
        elsewhere = Path(why.resumed).parent != RunPaths(run).checkpoints.resolve()
        ids = {saved.path.name: saved.lineage.id for saved in found if saved.lineage}
        if elsewhere and ids.items() <= why.stayed.items():
            raise ConfigError(
                f"{folder / WHY}: this run was last started from {why.resumed}, and has saved no "
                f"checkpoint since. Go on from there (--resume {why.resumed}) or name another one"
            )
        break
    headless = headless_checkpoints(run)
    if not found and headless:
        raise ConfigError(
            f"{headless[-1]}: holds weights but no {MANIFEST}, so it is damaged, and the run has "
            "no other checkpoint. Restore the file, --resume a checkpoint that is elsewhere, or "
            "train anew in another run.directory"
        )
    if not found and (left := [p for p in abandoned_checkpoints(run) if is_complete(p)]):
        # Not from scratch, as if the run had never saved anything.
        raise ConfigError(
            f"{run}: its only checkpoints are in abandoned/. Name one (--resume {left[-1]}), or "
            "start from scratch (--resume none)"
        )
    return sorted((*(saved.path for saved in found), *headless), key=_step, reverse=True)


def no_checkpoints(run: Path, newest: Path) -> list[str]:
    """Return a line for each folder after the newest checkpoint that holds nothing of one."""
    named = named_by_step(RunPaths(run).checkpoints)
    others = [path for path in named if not (is_complete(path) or is_headless(path))]
    return [
        f"{path}: no checkpoint, it holds neither weights nor a {MANIFEST}; {newest} is the newest"
        for path in others
        if _step(path) > _step(newest)
    ]


def _step(checkpoint: Path) -> int:
    return checkpoint_step(checkpoint.name) or 0


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
            a newer one has lost its manifest.
    """
    if is_complete(path):
        run = run_of(path)
        check_version(path.absolute().parents[1] if run is None else run)
        return path
    check_version(path)
    if found := saved_checkpoints(path):
        check_one_line(found)
        newest = found[-1]
        headless = [each for each in headless_checkpoints(path) if _step(each) > newest.step]
        if headless:
            # Like any other damage to the newest one: an older one is taken by its name alone.
            raise ConfigError(
                f"{headless[-1]}: holds weights but no {MANIFEST}, so the checkpoint is damaged. "
                f"The one before it is {newest.path}; name that one, or restore the file"
            )
        return newest.path
    what = "neither a run nor a checkpoint" if path.exists() else "no such directory"
    if checkpoint_step(path.name) is not None and path.is_dir():
        what = f"not a complete checkpoint, it has no {MANIFEST}"
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
    complete = complete_checkpoints(run)
    newest = read_lineage(complete[-1]) if complete else None
    waiting = []
    for path in complete:
        lineage = read_lineage(path) if path.name not in evaluated else None
        is_elsewhere = lineage and newest and not lineage.is_ancestor_of(newest)
        if path.name not in evaluated and not is_elsewhere:
            waiting.append(path)
    return waiting


def earlier_checkpoints(checkpoint: Path) -> list[Path]:
    """Return the run's complete checkpoints that a checkpoint descends from, oldest first.

    Where its ancestry cannot be read, those of earlier steps.
    """
    run, step, lineage = run_of(checkpoint), checkpoint_step(checkpoint.name), None
    if run is None or step is None:
        return []
    lineage = read_lineage(checkpoint)
    return [
        saved.path
        for saved in saved_checkpoints(run)
        if saved.step < step
        and saved.lineage is not None
        and (lineage is None or saved.lineage.is_ancestor_of(lineage))
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

    Whatever has the name already is moved to RUN/abandoned: a folder that a user made, or a
    checkpoint that was moved back by hand.

    Args:
        partial: What `begin_partial` returned, complete and flushed to the disk.
        final: RUN/checkpoints/step-########.
        attempt: As in `begin_partial`.

    Raises:
        Superseded: Another attempt has taken the run; nothing was published.
        OSError: The disk refused.
    """
    check_still_holds(attempt)
    if os.path.lexists(final):
        run = final.parents[1]
        why = f"it was in the way of the checkpoint of step {checkpoint_step(final.name)}"
        aside = move_aside(run, final, time.time(), why)
        say(f"{final}: {why}; moved to {aside}")
        try:
            # This process may have been suspended before the move, for so long that what it moved
            # is a new holder's checkpoint.
            check_still_holds(attempt)
        except Superseded:
            aside.rename(final)
            raise
    try:
        partial.rename(final)
    except FileNotFoundError:
        # The new holder has removed `partial`; see `check_still_holds`.
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
