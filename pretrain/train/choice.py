"""Choose the checkpoint that a run goes on from."""

from __future__ import annotations

from pathlib import Path

from pretrain.checkpoint.blocks import DamagedCheckpoint
from pretrain.checkpoint.manifest import Checkpoint, open_checkpoint
from pretrain.checkpoint.store_names import is_url
from pretrain.config import ConfigError, RunConfig
from pretrain.rundir.checkpoints import (
    checkpoints_to_resume,
    complete_checkpoints,
    find_checkpoint,
)

Damaged = tuple[tuple[Path, str], ...]
"""Checkpoints that cannot be used, and the messages that say why."""


def choose_checkpoint(
    config: RunConfig,
    resume: str,
    opened: Checkpoint | None = None,
    damaged: Damaged = (),
) -> tuple[Checkpoint | None, Damaged]:
    """Open the checkpoint to resume from. `check_training` says whether the run may go on from it.

    Args:
        config: The run.
        resume: "auto" for the run's newest checkpoint that is not damaged, or from scratch if it
            has none at all; "none" to start from scratch; else the path of a run or a checkpoint.
        opened: What this function returned before. It is returned again, without reading its files
            anew, if it is still the checkpoint to resume from.
        damaged: Checkpoints that `auto` must pass over, because loading them failed.

    Returns:
        The checkpoint, or None to start from scratch; and the damaged ones that were passed over.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, or starting from scratch would
            write over it.
    """
    run = config.directory
    if resume == "none":
        if complete_checkpoints(run):
            raise ConfigError(
                f"{run}: has checkpoints, and --resume none would write over them. "
                "Resume (--resume auto), remove them, or set another run.directory"
            )
        return None, ()
    if is_url(resume):
        # It is downloaded when the processes have joined (`pretrain.train.upload.bring`).
        return None, ()
    if resume != "auto":
        return _open(find_checkpoint(Path(resume)), opened), ()
    found = checkpoints_to_resume(run)
    passed_over = dict(damaged)
    for path in found:
        if path in passed_over:
            continue
        try:
            return _open(path, opened), tuple(passed_over.items())
        except DamagedCheckpoint as damage:
            passed_over[path] = str(damage)
    if passed_over:
        # Do not start from scratch, which could throw away weeks of training.
        lines = "".join(
            f"\n{path}: {first_sentence(damage)}" for path, damage in passed_over.items()
        )
        raise ConfigError(
            f"{run}: all of its checkpoints are damaged. Restore one of them, --resume one that is "
            f"elsewhere, or train anew in another run.directory{lines}"
        )
    return None, ()


def _open(path: Path, opened: Checkpoint | None) -> Checkpoint:
    """Return the checkpoint at `path`; `opened` if it is that one."""
    if opened is not None and opened.path == path and opened.is_unchanged():
        return opened
    return open_checkpoint(path)


def first_sentence(damage: str) -> str:
    """Return what a message about damage says first; the rest is what a user could do."""
    return damage.partition(". ")[0]
