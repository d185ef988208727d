"""Refuse a run's directory that another user made or can write to.

What lies in a run's directory is executed (RUN/launch), believed (jobs.jsonl, attempts) and written
to (logs, metrics.jsonl) with all rights of whoever submits or trains the run. So nobody else may
have put anything there. docs/security.md says what that protects from and what not.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError
from pretrain.rundir.files import MAX_BYTES, open_by_steps, read_bytes, regular
from pretrain.rundir.paths import RunPaths

ROOT = 0
"""The user id of root, who can change every file anyway."""
OTHERS_MAY_WRITE, GROUP_MAY_WRITE = stat.S_IWOTH, stat.S_IWGRP
WRITTEN_BY_LIBRARIES = {"wandb", "tensorboard"}
"""These folders are made by others' code, with the modes that it chooses; only whose they are is
checked."""
CONSEQUENCE = "what lies there is executed or overwritten with your rights"
ACCESS_LIST = "system.posix_acl_access"
"""The attribute of a file with an access control list, acl(5)."""


def check_trusted(run: Path) -> None:
    """Check that nobody but this user, and root, has put or can put anything into a run.

    Looked at are the run's directory, what a run has in it, and all entries of the directories of
    which the launcher executes, believes or overwrites files. A link is followed if this user or
    root made it and what it leads to passes. What does not exist yet passes.

    Raises:
        ConfigError: Names the first file that is another user's or that others may change, its
            owner and mode, and the command that mends it.
    """
    paths = RunPaths(run)
    check_above(run)
    # Anything else that lies there is of no interest to us.
    own = [path for path in vars(paths).values() if path.parent == run]
    for path in (run, *own):
        if path.name not in WRITTEN_BY_LIBRARIES:
            _check(path)
    for name in WRITTEN_BY_LIBRARIES:
        with contextlib.suppress(OSError):
            _check_owner(run / name, (run / name).lstat())
    for folder in (
        paths.launch,
        paths.logs,
        paths.attempts,
        paths.evaluations,
        paths.checkpoints,
        paths.abandoned,
    ):
        check_own_directory(folder)
    for path in (paths.jobs, *_entries(paths.logs)):
        _check_one_name(path)


def check_own_directory(directory: Path, *, entries: bool = True) -> None:
    """Check a directory, as `check_trusted` does, and its entries, but not what is below them.

    Args:
        directory: The directory; one that does not exist passes.
        entries: Look at its entries as well.

    Raises:
        ConfigError: Names the first that does not pass.
    """
    _check(directory)
    for path in _entries(directory) if entries else ():
        _check(path)


def check_place(directory: Path) -> None:
    """Check that other users cannot put a directory of theirs in the place of one in `directory`.

    It may be writable by others if its sticky bit is set, as /tmp's is, and by a group, as a
    project's folder is.

    Raises:
        ConfigError: Another user owns it, or everybody may rename what is in it.
    """
    found = directory.stat()
    _check_owner(directory, found)
    if found.st_mode & OTHERS_MAY_WRITE and not found.st_mode & stat.S_ISVTX:
        _check_status(directory, found)


def check_above(path: Path) -> None:
    """Check that others cannot exchange what lies in the folders above a path.

    A folder to which everybody may write needs the sticky bit, as /tmp has it. What a group may
    write to passes: what its members could put into the path's place is theirs, and found out by
    that.

    Raises:
        ConfigError: Names the folder, its owner and mode; or a link that another user made.
    """
    above = next(each for each in path.absolute().parents if each.exists())
    try:
        descriptor = open_by_steps(above, _check_above, follow=True, flags=os.O_PATH)
    except OSError as error:
        raise ConfigError(f"{error.filename or above}: {error.strerror}") from None
    try:
        _check_above(above, os.fstat(descriptor), descriptor)
    finally:
        os.close(descriptor)


def check_readable(directory: Path) -> None:
    """Raise ConfigError, with owner and mode, if this user may not look into a directory."""
    for place in (*reversed(directory.absolute().parents), directory):
        rights = os.X_OK | (os.R_OK if place is directory else 0)
        if place.exists() and not os.access(place, rights, effective_ids=True):
            raise ConfigError(
                f"{place}: you may not read it ({_described(place.stat())}). Its owner can let "
                "your group in (chgrp, chmod g+rx)"
            )


def read_trusted(path: Path, most: int | None = MAX_BYTES) -> str:
    """Return the text of a file that nobody but this user, or root, can have written.

    It is opened once, the checks are made on what is open, and the text is read from that. So
    nothing can take its place in between, whatever is renamed meanwhile. Its folder has to be as
    trusted as the file, and those above as `check_above` says.

    Args:
        path: The file.
        most: The largest size in bytes; None: any.

    Raises:
        OSError: It is missing, no regular file, a link, or too large.
        ConfigError: Another user owns it or its folder, or may write to them.
    """
    return read_bytes(path, most, open_trusted).decode(errors="replace")


def open_trusted(path: Path) -> IO[bytes]:
    """Open a file as `read_trusted` does, which raises the same errors."""
    folder: list[ConfigError] = []

    def check(where: Path, found: os.stat_result, descriptor: int) -> None:
        _check_above(where, found, descriptor)
        folder.clear()
        try:
            _check_status(where, found, descriptor)
        except ConfigError as error:
            folder.append(error)

    file = regular(open_by_steps(path, check), path)
    try:
        for error in folder:
            raise error
        _check_status(path, os.fstat(file.fileno()), file.fileno())
    except ConfigError:
        file.close()
        raise
    return file


def _check_above(where: Path, found: os.stat_result, descriptor: int) -> None:
    if found.st_mode & OTHERS_MAY_WRITE and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{where}: everybody may rename what lies in it ({_described(found)}), and so put "
            f"something else in its place. `chmod o-w {shlex.quote(str(where))}` or `chmod +t`, or "
            "use a directory elsewhere"
        )


def _entries(directory: Path) -> Iterator[Path]:
    """Yield what lies in a directory; nothing where it is none, or may not be read."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    yield from (directory / name for name in names)


def _check(path: Path) -> None:
    """Raise ConfigError unless a file is this user's or root's alone, and so what it links to."""
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            _check_owner(path, found)
            # A link that leads nowhere can be written through; the owner's own does no harm.
            found = path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path}: is a link that leads to itself. Remove it") from None
        # It is not there or cannot be read; opening it raises the error that says so.
        return
    _check_status(path, found)


def _check_status(path: Path, found: os.stat_result, descriptor: int | None = None) -> None:
    _check_owner(path, found)
    shared = path if descriptor is None else descriptor
    is_open = found.st_mode & OTHERS_MAY_WRITE or (
        found.st_mode & GROUP_MAY_WRITE and not _is_alone_in_group(shared, found)
    )
    if is_open:
        who = "everybody" if found.st_mode & OTHERS_MAY_WRITE else f"group {found.st_gid}"
        raise ConfigError(
            f"{path}: {who} may write to it ({_described(found)}), and {CONSEQUENCE}. If you trust "
            f"all that is in it, `chmod -R go-w {shlex.quote(str(path))}`; where the file system "
            "keeps no modes, choose another one"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), ROOT):
        raise ConfigError(
            f"{path}: belongs to another user ({_described(found)}), and {CONSEQUENCE}. Use one of "
            "your own; if you trust all that is in it, copy it there with `cp -r`, and remove the "
            "links in the copy, which would be yours"
        )


def _check_one_name(path: Path) -> None:
    """Raise ConfigError for a file that has a second name, elsewhere, which would change with it.

    Whoever could write to the directory once may have given it the name of another of your files.
    """
    try:
        found = path.lstat()
    except OSError:
        return
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        name = shlex.quote(str(path))
        raise ConfigError(
            f"{path}: has {found.st_nlink} names (hard links), so that what is written to it would "
            f"change another file. Give it a copy of its own: `cp {name} {name}.copy && mv "
            f"{name}.copy {name}`"
        )


def _is_alone_in_group(file: Path | int, found: os.stat_result) -> bool:
    """Return True if a file's group is its owner's private one and no access list adds others.

    Many systems give each user a group of the same name, as useradd(8) does and pam_umask(8) takes
    for granted, and let new files be writable by it.
    """
    try:
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    is_private = user.pw_gid == found.st_gid and group.gr_name == user.pw_name
    return is_private and set(group.gr_mem) <= {user.pw_name} and not _has_access_list(file)


def _has_access_list(file: Path | int) -> bool:
    """Return True if a file's group bits are the mask of an access control list."""
    try:
        # So also of a folder that was opened only to be passed.
        where = f"/proc/self/fd/{file}" if isinstance(file, int) else file
        return bool(os.getxattr(where, ACCESS_LIST))
    except (OSError, AttributeError):
        # No such attribute, a file system without them, or a system without getxattr.
        return False


def _described(found: os.stat_result) -> str:
    """Return "owner 1000, mode 0777"."""
    return f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
