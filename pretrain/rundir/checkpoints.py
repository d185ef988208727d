"""The checkpoints of a run: their names, which are complete, and which await an evaluation."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.rundir.paths import RunPaths, check_version

MANIFEST = "manifest.json"
"""Written last, so a checkpoint that has it is complete."""
_NAME = re.compile(r"step-(\d{8,})")


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


def newest_checkpoint_step(run: Path) -> int | None:
    """Return the step of a run's newest complete checkpoint, or None when it has none."""
    found = complete_checkpoints(run)
    return checkpoint_step(found[-1].name) if found else None


def find_checkpoint(path: Path) -> Path:
    """Return `path` itself if it is a checkpoint, or the newest one of the run that it is.

    Raises:
        ConfigError: It is neither, or the run has no complete checkpoint.
    """
    if is_complete(path):
        check_version(path.absolute().parents[1])
        return path
    check_version(path)
    if found := complete_checkpoints(path):
        return found[-1]
    what = "neither a run nor a checkpoint" if path.exists() else "no such directory"
    if checkpoint_step(path.name) is not None and path.is_dir():
        what = f"not a complete checkpoint, it has no {MANIFEST}"
    raise ConfigError(
        f"{path}: {what}. Give a run's directory (it has checkpoints/) or one step-######## in it"
    )


def checkpoints_awaiting_evaluation(run: Path) -> list[Path]:
    """Return the complete checkpoints that a plan wants evaluated and that have no result.

    Oldest first. A folder in RUN/evaluations appears whole: a result, or the note that the launcher
    gave the checkpoint up.
    """
    paths = RunPaths(run)
    if not paths.evaluation_plan.exists():
        return []
    evaluated = {path.name for path in named_by_step(paths.evaluations)}
    return [path for path in complete_checkpoints(run) if path.name not in evaluated]
