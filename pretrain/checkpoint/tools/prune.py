"""`pretrain checkpoint prune`: delete a run's old checkpoints by the rules of retention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.tools.table import size
from pretrain.checkpoint.tools.verify import verify_checkpoint
from pretrain.config import ConfigError, RunFailed, load_config, writing
from pretrain.rundir.checkpoints import check_one_line, saved_checkpoints
from pretrain.rundir.files import remove_directory
from pretrain.rundir.history import old_checkpoints
from pretrain.rundir.holds import unheld
from pretrain.rundir.lock import check_free
from pretrain.rundir.paths import RunPaths, check_version
from pretrain.rundir.retention import Policy


@dataclass(frozen=True)
class Plan:
    """The checkpoints that a prune would keep and delete."""

    newest: Path
    delete: list[Path]
    """Oldest first."""
    stay: list[Path]
    held: list[Path]
    """Old, but a reader has them open."""


def policy_of(run: Path, keep: int | None, keep_every: int | None, keep_best: int | None) -> Policy:
    """Return what to keep: as the options say, else as the run's config says.

    Args:
        run: The run's directory.
        keep: --keep, or None.
        keep_every: --keep-every, or None.
        keep_best: --keep-best, or None.

    Raises:
        ConfigError: Neither says how many.
    """
    if keep is not None:
        return Policy(keep, keep_every, keep_best or 0)
    if keep_every is not None or keep_best is not None:
        raise ConfigError("--keep-every, --keep-best: only say what stays beside --keep N. Add it")
    path = RunPaths(run).newest_config()
    section = load_config(path).checkpoint if path else None
    if section is None or section.keep is None:
        raise ConfigError(
            f"{run}: its config has no checkpoint.keep, so everything is kept. Say how many of the "
            "newest checkpoints to keep (--keep N)"
        )
    return Policy(section.keep, section.keep_every, section.keep_best)


def plan(run: Path, policy: Policy) -> Plan:
    """Return what retention would delete. Nothing is deleted.

    Args:
        run: The run's directory.
        policy: What to keep.

    Raises:
        ConfigError: The run has no checkpoint, or two lines of them.
    """
    check_version(run)
    found = saved_checkpoints(run)
    check_one_line(found)
    sound = [saved.path for saved in found if saved.is_sound]
    if not sound:
        raise ConfigError(f"{run}: has no complete checkpoint. Give a run's directory")
    newest = sound[-1]
    old = old_checkpoints(run, newest, policy)
    held = []
    for path in old:
        with unheld(path) as is_unheld:
            held += [] if is_unheld else [path]
    delete = [path for path in old if path not in held]
    return Plan(newest, delete, [s.path for s in found if s.path not in delete], held)


def describe(plan: Plan) -> str:
    """Return the plan as text."""
    if not plan.delete:
        return f"nothing to delete; {len(plan.stay)} checkpoints stay"
    lines = [f"delete {path}  {size(_bytes(path))}" for path in plan.delete]
    lines += [f"keep   {path}{_why(plan, path)}" for path in plan.stay]
    total = size(sum(map(_bytes, plan.delete)))
    return "\n".join([*lines, f"{len(plan.delete)} checkpoints, {total}, would be deleted"])


def prune(run: Path, policy: Policy) -> list[Path]:
    """Delete what the policy does not keep, once the newest checkpoint has been read and is good.

    Args:
        run: The run's directory.
        policy: What to keep.

    Returns:
        What was deleted.

    Raises:
        ConfigError: An attempt holds the run (RunBusy), or as `plan`.
        RunFailed: The newest checkpoint is damaged, or the disk refused.
    """
    check_free(run)
    planned = plan(run, policy)
    if not planned.delete:
        return []
    problems, _ = verify_checkpoint(planned.newest)
    if problems:
        raise RunFailed(
            f"{planned.newest}: the newest checkpoint is damaged ({problems[0]}), so nothing was "
            "deleted. Train on, which goes back to the newest good one, then prune"
        )
    deleted = []
    for path in planned.delete:
        # It may have been opened, or moved, since the plan was made.
        with writing(path), unheld(path) as is_unheld:
            if is_unheld:
                remove_directory(path)
                deleted.append(path)
    return deleted


def _bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.iterdir())


def _why(plan: Plan, path: Path) -> str:
    if path == plan.newest:
        return "  (the newest)"
    return "  (held by a reader)" if path in plan.held else ""
