"""Refuse a run's directory that another user made or can write to.

Files in a run's directory are executed (RUN/launch), believed (jobs.jsonl, attempts) and written to
(logs, metrics.jsonl) with all rights of the user who submits or trains the run. So nobody else may
have put anything there. docs/security.md says what this protects against, and what it does not.
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
"""Folders that other libraries make, with modes of their choice; only the owner is checked."""
CONSEQUENCE = "what lies there is executed or overwritten with your rights"
ACCESS_LIST = "system.posix_acl_access"
"""The attribute of a file with an access control list, acl(5)."""


def check_trusted(run: Path) -> None:
    """Check that only this user and root have put, or can put, anything into a run.

    Checked are the run's directory, the files of a run in it, and all entries of the directories
    whose files the launcher executes, believes or overwrites. A link is accepted if this user or
    root made it and its target passes. Paths that do not exist yet pass.

    Raises:
        ConfigError: Names the first file that belongs to another user or that others may change,
            its owner and mode, and the command that repairs it.
    """
    paths = RunPaths(run)
    check_above(run)
    # Other files in the directory are not checked, because we do not use them.
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
        directory: The directory; it passes if it does not exist.
        entries: Check its entries as well.

    Raises:
        ConfigError: Names the first path that does not pass.
    """
    _check(directory)
    for path in _entries(directory) if entries else ():
        _check(path)


def check_place(directory: Path) -> None:
    """Check that other users cannot replace a directory in `directory` by one of their own.

    `directory` may be writable by everybody if its sticky bit is set, like /tmp, and by a group,
    like a project's folder.

    Raises:
        ConfigError: Another user owns it, or everybody may rename its entries.
    """
    found = directory.stat()
    _check_owner(directory, found)
    if found.st_mode & OTHERS_MAY_WRITE and not found.st_mode & stat.S_ISVTX:
        _check_status(directory, found)


def check_above(path: Path) -> None:
    """Check that others cannot replace entries of the folders above a path.

    A folder to which everybody may write needs the sticky bit, like /tmp. A folder to which a group
    may write passes: whatever its members put into the path's place belongs to them, which later
    checks notice.

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
    """Raise ConfigError, with owner and mode, if this user may not read a directory."""
    for place in (*reversed(directory.absolute().parents), directory):
        rights = os.X_OK | (os.R_OK if place is directory else 0)
        if place.exists() and not os.access(place, rights, effective_ids=True):
            raise ConfigError(
                f"{place}: you may not read it ({_described(place.stat())}). Its owner can let "
                "your group in (chgrp, chmod g+rx)"
            )


def read_trusted(path: Path) -> str:
    """Return the text of a file that only this user or root can have written.

    The file is opened once, and both the checks and the read use the open file, so renames in
    between cannot replace it. Its folder must be as trusted as the file, and the folders above must
    pass `check_above`.

    Raises:
        OSError: The file is missing, not a regular file, a link, or too large.
        ConfigError: Another user owns the file or its folder, or may write to them.
    """
    return read_bytes(path, MAX_BYTES, open_trusted).decode(errors="replace")


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
    """Yield the entries of a directory; none if it is not a directory or cannot be read."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    yield from (directory / name for name in names)


def _check(path: Path) -> None:
    """Raise ConfigError unless only this user or root can change a file and its link's target."""
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            _check_owner(path, found)
            # A file may be created through a link to nothing, which is harmless if it is our own.
            found = path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path}: is a link that leads to itself. Remove it") from None
        # The file is missing or cannot be read; opening it raises an error that says so.
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
    """Raise ConfigError for a file with a second name elsewhere, which would change with it.

    Someone who could once write to the directory may have linked another of your files there.
    """
    try:
        found = path.lstat()
    except OSError:
        return
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        name = shlex.quote(str(path))
        raise ConfigError(
            f"{path}: has {found.st_nlink} names (hard links), so that writing to it would change "
            f"another file. Replace it by a copy: `cp {name} {name}.copy && mv {name}.copy "
            f"{name}`"
        )


def _is_alone_in_group(file: Path | int, found: os.stat_result) -> bool:
    """Return True if a file's group is its owner's private group and no access list adds others.

    Many systems give each user a group of the same name, as useradd(8) does and pam_umask(8)
    assumes, and make new files writable by that group.
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
        # By this path, because a descriptor opened with O_PATH cannot be queried directly.
        where = f"/proc/self/fd/{file}" if isinstance(file, int) else file
        return bool(os.getxattr(where, ACCESS_LIST))
    except OSError:
        # No such attribute, or a file system without attributes.
        return False


def _described(found: os.stat_result) -> str:
    """Return "owner 1000, mode 0777"."""
    return f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
