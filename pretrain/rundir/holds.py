"""Hold a checkpoint while it is read, so that retention passes over it.

A reader holds a shared lock (flock) on the checkpoint's manifest, and retention deletes only what
it can lock exclusively. The kernel releases the lock of a reader that dies. A file system without
flock protects nothing: every checkpoint then counts as not held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.rundir.lineage import MANIFEST

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
        os.close(descriptor)


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
