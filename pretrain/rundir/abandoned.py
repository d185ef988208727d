"""Move what a run has turned away from to RUN/abandoned/####, where nothing is deleted.

A run that goes on from another checkpoint than its newest one, or whose newest one is damaged,
leaves checkpoints, evaluations and lines of metrics.jsonl that are not part of its history any
more. They are moved to the next free number, with a why.json.

why.json is written first and lists what is moved. A move that was killed half-way is finished at
the next start, and until then whoever looks for checkpoints passes over those that are listed.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.rundir.files import (
    DIRECTORY_MODE,
    PARTIAL,
    flush_directory,
    from_json,
    read_json,
    replace_json,
)
from pretrain.rundir.lineage import Lineage, parse_lineage, read_lineage
from pretrain.rundir.metrics import copy_after, drop_after
from pretrain.rundir.paths import RunPaths, attempt_numbers

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
    branches: tuple[dict[str, Any], ...] = ()
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
        return parse_lineage(
            {
                "id": self.id,
                "step": self.step,
                "parent": self.parent,
                "branches": list(self.branches),
            }
        )


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
