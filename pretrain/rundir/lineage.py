"""Identify a checkpoint: its id, the checkpoint before it, and the branches it lies on.

A run that goes on from its newest checkpoint stays on its branch. A run that goes back to an
earlier checkpoint, or begins with another run's, begins a branch. A checkpoint lists the branches
from the first step of training to itself, so that its ancestors are known even when some of them
have been deleted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.rundir.files import MAX_NUMBER, Json, read_json

MANIFEST = "manifest.json"
"""Written last, so a checkpoint that has it is complete."""


@dataclass(frozen=True)
class Branch:
    """A line of checkpoints that were saved one after the other."""

    id: str
    """A random name, 16 hexadecimal digits."""
    since: int
    """The step after which it begins: 0 from scratch, else the step of the checkpoint that the
    branch goes on from."""


@dataclass(frozen=True)
class Lineage:
    """The identity of a checkpoint and its ancestry, as manifest.json holds them."""

    id: str
    """A random name of the checkpoint, 16 hexadecimal digits."""
    step: int
    """Optimizer steps done."""
    parent: str | None
    """The id of the checkpoint that was saved or loaded before; None for the first of a run."""
    branches: tuple[Branch, ...]
    """The branches that lead here, oldest first; the last one is the checkpoint's own."""

    def is_ancestor_of(self, other: Lineage) -> bool:
        """Return True if `other` was trained on from this checkpoint, or is this checkpoint."""
        if self.id == other.id:
            return True
        own = self.branches[-1].id
        for branch, following in zip(other.branches, (*other.branches[1:], None)):
            if branch.id == own:
                end = other.step - 1 if following is None else following.since
                return self.step <= end
        return False

    def shares_branch_beyond(self, other: Lineage) -> bool:
        """Return True if `other` lies, or its line leads, further on this checkpoint's branch.

        A run that went on from here on the same branch could not be told from the line to `other`.
        """
        own = self.branches[-1].id
        for branch, following in zip(other.branches, (*other.branches[1:], None)):
            if branch.id == own:
                return (other.step if following is None else following.since) > self.step
        return False

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
    return parse_lineage(read_json(checkpoint / MANIFEST))


def parse_lineage(content: Json) -> Lineage | None:
    """Return the lineage in the content of a manifest; None when it holds none."""
    parent, listed = content.get("parent"), content.get("branches")
    if not (_is_name(content.get("id")) and _is_step(content.get("step"))):
        return None
    if not (parent is None or _is_name(parent)) or not isinstance(listed, list) or not listed:
        return None
    for entry in listed:
        is_branch = isinstance(entry, dict) and _is_name(entry.get("id"))
        if not is_branch or not _is_step(entry.get("since")):
            return None
    branches = tuple(Branch(entry["id"], entry["since"]) for entry in listed)
    return Lineage(content["id"], content["step"], parent, branches)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER


def new_id() -> str:
    """Return a random name for a checkpoint or a branch."""
    return secrets.token_hex(8)
