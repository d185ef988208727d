"""Identify a checkpoint: its id, the checkpoint before it, and the branches it lies on.

A run that goes on from its newest checkpoint stays on its branch. A run that goes back to an
earlier checkpoint, or begins with another run's, begins a branch. A checkpoint lists the branches
from the first step of training to itself, so that its ancestors are known even when some of them
have been deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from pretrain.config import ConfigError
from pretrain.rundir.files import MAX_NUMBER, Json, from_json, read_json

Natural = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
Name = Annotated[str, StringConstraints(min_length=1)]
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
    return parse_lineage(read_json(checkpoint / MANIFEST))


def parse_lineage(content: Json) -> Lineage | None:
    """Return the lineage in the content of a manifest; None when it holds none."""
    return from_json(Lineage, content)


def new_id() -> str:
    """Return a random name for a checkpoint or a branch."""
    return secrets.token_hex(8)


# ---- Decide which of a run's checkpoints go: the last N, every M-th and the best N stay ----
# The decision is a pure function of what is known about the checkpoints of one line of descent.
# `pretrain.rundir.history.remove_old` applies it.


@dataclass(frozen=True)
class Policy:
    """The keys of [checkpoint] that say what is kept."""

    keep: int | None = None
    """Number of newest checkpoints; None keeps all."""
    keep_every: int | None = None
    """Those whose step is a multiple of this are kept for good."""
    keep_best: int = 0
    """Number of those with the lowest validation loss that are kept."""


def removable(
    losses: Mapping[int, float | None], policy: Policy, wanted: Collection[int] = ()
) -> list[int]:
    """Return the steps of the checkpoints that may be deleted, in ascending order.

    The newest two are never among them. The newest is on probation until the next save; if what is
    trained from it fails, the run goes on from the one before (`attempts.poisoned`).

    Args:
        losses: Step -> validation loss in nats of complete, readable checkpoints of one line of
            descent; None for a step that was not evaluated while training.
        policy: What to keep.
        wanted: Steps of checkpoints that are still needed, such as those that await an evaluation.
    """
    if policy.keep is None:
        return []
    steps = sorted(losses)
    kept = {*steps[-max(policy.keep, 2) :], *wanted}
    if policy.keep_every is not None:
        kept |= {step for step in steps if step % policy.keep_every == 0}
    # A loss that is nan or infinite is no result to keep a checkpoint for.
    finite = ((n, -step) for step, n in losses.items() if n is not None and math.isfinite(n))
    # Of equal losses the later checkpoint is kept.
    kept |= {-step for _, step in sorted(finite)[: policy.keep_best]}
    return [step for step in steps if step not in kept]


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
        if not _is_same_file(descriptor, checkpoint / MANIFEST):
            raise _gone(checkpoint)
        yield
    finally:
        _release(descriptor)


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
        _release(descriptor)


def _release(descriptor: int) -> None:
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


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _gone(checkpoint: Path) -> ConfigError:
    return ConfigError(f"{checkpoint}: deleted a moment ago (checkpoint.keep). Name another one")
