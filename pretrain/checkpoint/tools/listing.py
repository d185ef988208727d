"""`pretrain checkpoint list`: the checkpoints of a run and what is known about each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.blocks import DamagedCheckpoint
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.tools.table import moment, size, table
from pretrain.config import ConfigError
from pretrain.rundir.abandoned import abandoned_checkpoints
from pretrain.rundir.checkpoints import (
    MANIFEST,
    checkpoint_step,
    checkpoints_awaiting_evaluation,
    is_complete,
    named_by_step,
)
from pretrain.rundir.holds import unheld
from pretrain.rundir.paths import RunPaths, check_version


@dataclass(frozen=True)
class Row:
    """A checkpoint in the list."""

    path: str
    step: int
    """As its name says."""
    id: str | None = None
    """None, as most of what follows, when it is damaged."""
    parent: str | None = None
    branch: str | None = None
    """The id of the branch that it lies on."""
    branch_since: int | None = None
    """The step after which that branch begins."""
    bytes: int | None = None
    saved_at: float | None = None
    """Unix seconds."""
    validation_loss_nats: float | None = None
    changes: int = 0
    """Number of keys that --allow-changed let change on the way here."""
    is_held: bool = False
    """A reader has it open, so retention passes over it."""
    awaits_evaluation: bool = False
    damage: str | None = None
    """A checkpoint as its small files show it; the tensors are not read."""
    abandoned: str | None = None
    """The folder of RUN/abandoned that it lies in."""


def list_run(run: Path) -> list[Row]:
    """Return the checkpoints of a run, then those that it has turned away from, by steps each.

    Raises:
        ConfigError: It is not a run that has a checkpoint.
    """
    check_version(run)
    own = named_by_step(RunPaths(run).checkpoints)
    aside = list(abandoned_checkpoints(run))
    if not own and not aside:
        what = "has no checkpoints" if run.is_dir() else "no such directory"
        raise ConfigError(f"{run}: {what}. Give a run's directory (it has checkpoints/)")
    awaited = set(checkpoints_awaiting_evaluation(run))
    rows = [_row(path, awaits_evaluation=path in awaited) for path in own]
    return rows + [_row(path, abandoned=path.parent.name) for path in aside]


def format_rows(run: Path | str, rows: Sequence[Row]) -> str:
    """Return the list as text.

    Args:
        run: The run's directory or URL.
        rows: Its checkpoints.
    """
    current = [row for row in rows if row.abandoned is None]
    blocks = [f"{run}: {len(current)} checkpoint{'s' * (len(current) != 1)}"]
    if current:
        blocks.append(_table(current))
    for folder in sorted({row.abandoned for row in rows if row.abandoned is not None}):
        blocks.append(f"abandoned/{folder}, which the run turned away from:")
        blocks.append(_table([row for row in rows if row.abandoned == folder]))
    if any(row.damage is None for row in rows):
        blocks.append(
            "Only manifests and other small files were read. `pretrain checkpoint verify` reads "
            "every byte."
        )
    return "\n\n".join(blocks)


def _row(path: Path, awaits_evaluation: bool = False, abandoned: str | None = None) -> Row:
    row = Row(
        str(path),
        checkpoint_step(path.name) or 0,
        awaits_evaluation=awaits_evaluation,
        abandoned=abandoned,
    )
    if not is_complete(path):
        return dataclasses.replace(row, damage=f"has no {MANIFEST}")
    try:
        opened = open_checkpoint(path)
        assert opened.index
        saved_at = (path / MANIFEST).stat().st_mtime
        with unheld(path) as is_unheld:
            is_held = not is_unheld
    except (DamagedCheckpoint, ConfigError, OSError) as error:
        # Its message names the file and ends with what to do, which `verify` and a resume say.
        damage = str(error).removeprefix(f"{path}/").partition(". ")[0]
        return dataclasses.replace(row, damage=damage)
    lineage, origin = opened.lineage, opened.origin
    return dataclasses.replace(
        row,
        id=lineage.id,
        parent=lineage.parent,
        branch=lineage.branches[-1].id,
        branch_since=lineage.branches[-1].since,
        bytes=sum(opened.files.values()),
        saved_at=saved_at,
        validation_loss_nats=origin.validation_loss_nats,
        changes=len(origin.changes),
        is_held=is_held,
    )


def _table(rows: Sequence[Row]) -> str:
    header = ("step", "id", "parent", "branch", "saved at", "size", "validation", "notes")
    lines = []
    before: str | None = None
    for row in rows:
        loss = row.validation_loss_nats
        lines.append(
            (
                f"{row.step:,}",
                row.id or "-",
                row.parent or "-",
                # A branch is named where it begins.
                f"{row.branch[:8]} from {row.branch_since:,}"
                if row.branch and row.branch != before
                else '"' * bool(row.branch),
                moment(row.saved_at) if row.saved_at else "-",
                size(row.bytes) if row.bytes is not None else "-",
                "-" if loss is None else f"{loss:.4f}",
                _notes(row),
            )
        )
        before = row.branch or before
    # Notes are of any length, so they stand last and at the left.
    width = max(len(line[-1]) for line in lines)
    return table(header, [(*line[:-1], line[-1].ljust(width)) for line in lines], left=5)


def _notes(row: Row) -> str:
    notes = [f"DAMAGED: {row.damage}"] if row.damage else []
    notes += ["held by a reader"] * row.is_held
    notes += ["awaits evaluation"] * row.awaits_evaluation
    if row.changes:
        notes.append(f"{row.changes} allowed change{'s' * (row.changes != 1)}")
    return ", ".join(notes)
