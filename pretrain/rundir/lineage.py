"""Where a checkpoint comes from: its id, the checkpoint before it, and the branches it lies on.

A run that goes on from its newest checkpoint stays on its branch. A run that goes back to an
earlier checkpoint, or begins with another run's, begins a branch. A checkpoint lists the branches
from the first step of training to itself, so that its ancestors are known even when some of them
have been deleted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass


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


def new_id() -> str:
    """Return a random name for a checkpoint or a branch."""
    return secrets.token_hex(8)
