"""Publish files and folders atomically, and read JSON even if it is damaged.

Everything that a run publishes goes through this module: `replace_file` for one file,
`publish_directory` for a folder, `append_json_line` for a log. A process may be killed at any
instruction; a reader then finds a complete file, or a log whose last line is cut off, but never a
part of a file under its final name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import stat
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter

from pretrain.config.errors import say

# ---- Keep files that are made in a shared folder from being writable by all its users ----


DEFAULT_LIST = "system.posix_acl_default"
"""The attribute of a folder that holds the default access list of new files in it, acl(5)."""
ACCESS_HEADER, ACCESS_ENTRY, OWNER_ENTRY = 4, "<HHI", 0x01
"""An access list is a version, then a tag, rights and an id for each entry; OWNER_ENTRY is the
owner's tag (linux/posix_acl_xattr.h)."""


def let_nobody_write(directory: Path) -> None:
    """Remove the right to write from a folder's default access list, if it has one.

    In a project's folder such a list replaces the umask. It would make files of Slurm and libraries
    writable by all members, because programs usually request mode 0666.
    """
    # OSError: no list, a file system without lists, or the folder belongs to somebody else.
    with contextlib.suppress(OSError, struct.error):
        given = os.getxattr(directory, DEFAULT_LIST)
        entries = struct.iter_unpack(ACCESS_ENTRY, given[ACCESS_HEADER:])
        kept = [
            (tag, bits if tag == OWNER_ENTRY else bits & ~stat.S_IWOTH, who)
            for tag, bits, who in entries
        ]
        rows = b"".join(struct.pack(ACCESS_ENTRY, *entry) for entry in kept)
        os.setxattr(directory, DEFAULT_LIST, given[:ACCESS_HEADER] + rows)


T = TypeVar("T")
Json = dict[str, Any]

FILE_MODE, DIRECTORY_MODE = 0o640, 0o750
"""Files and folders of a run are readable by the owner and the owner's group. The modes are given
to open and mkdir, because the umask has no effect in a folder with a default access list."""
MAX_BYTES = 32 * 2**20
"""The most that is read of a file that is small in any run; a larger file is damaged."""
PIECE_BYTES = 2**16
MAX_LINE = 2**20
"""The longest line of a JSON lines file; a longer line is damaged."""
MAX_NUMBER = 2**53
"""Larger numbers in a record count as damage; JSON readers agree on integers up to here."""
PARTIAL = ".partial"
"""The end of the hidden name under which a file or folder is written before it is published."""
REMOVED = ".removed"
"""The end of the hidden name of a folder that is being removed."""


# ---- publishing ----------------------------------------------------------------------------------
@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a hidden name beside `path`; its file is renamed to `path` if the block succeeds.

    Args:
        path: The file to create or replace. Its folder must exist.
        durable: Flush the content to the disk before the rename. Otherwise a power cut can leave an
            empty file under the final name, even though the rename itself survived.

    Raises:
        OSError: The file cannot be written; `path` is unchanged, and nothing is left beside it.
    """
    # Two processes may publish the same file at once, so each writes under a unique name.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        yield partial
        if durable:
            flush(partial)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def replace_file(
    path: Path, content: str | bytes, *, durable: bool = False, mode: int = FILE_MODE
) -> None:
    """Write `content` to `path` atomically, so that a reader sees the old or the new content.

    Args:
        path: The file to create or replace. Its folder must exist.
        content: The new content; text is written as UTF-8.
        durable: As in `new_file`.
        mode: Permissions, before the umask.

    Raises:
        OSError: The file cannot be written; `path` is unchanged, and nothing is left beside it.
    """
    data = content.encode() if isinstance(content, str) else content
    with (
        new_file(path, durable=durable) as partial,
        open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.write(data)


def replace_json(
    path: Path, content: Any, *, durable: bool = False, indent: int | None = None
) -> None:
    """Write JSON to a file atomically, as `replace_file` does.

    Args:
        path: The file.
        content: The value to write.
        durable: Flush the content to the disk before the rename.
        indent: Spaces per level; None for one line.
    """
    replace_file(path, json.dumps(content, indent=indent) + "\n", durable=durable)


def publish_directory(partial: Path, final: Path) -> None:
    """Give a finished folder its final name, under which readers can find it from then on.

    A rename onto a folder that is not empty fails on every file system, so exactly one of several
    publishers succeeds.

    Args:
        partial: The finished folder, on the same file system as `final`.
        final: The name under which readers look for it.

    Raises:
        OSError: `final` exists, or the rename failed. `final` is unchanged.
    """
    partial.rename(final)
    flush(final.parent)


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `final` that is published as `final` if the block succeeds.

    If the block raises, the hidden folder is removed. A killed process leaves it behind, under a
    name that nothing reads.

    Args:
        final: The folder to make. Its parent is created if missing.

    Raises:
        OSError: A file cannot be written, or `final` exists.
    """
    # Two processes may build the same folder at once, so each builds under a unique name.
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}{PARTIAL}")
    partial.mkdir(DIRECTORY_MODE, parents=True)
    try:
        yield partial
        publish_directory(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a folder so that readers never see only a part of it."""
    # Renamed first, because after a kill the rest of the folder must not still have its name. The
    # new name is unique, so it cannot exist already.
    hidden = path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex}{REMOVED}"))
    # The rename is flushed before, because after a power cut no file must be missing under the old
    # name.
    flush(path.parent)
    remove(hidden)


def remove(path: Path) -> None:
    """Remove a folder with everything in it, a file, or a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """Make a folder and its missing parents, and flush the name of each to the disk."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    let_nobody_write(directory)
    flush(directory.parent)


def flush(path: Path) -> None:
    """Flush a file's content, or the names in a folder, so that they survive a power cut.

    Without the latter a rename in the folder is not durable.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        # A folder that may be written to but not listed (mode 0733) cannot be flushed.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- opening files that others may have put there ------------------------------------------------
def open_own(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file to append, without following a link and without waiting for a pipe's reader.

    Args:
        path: The file. It is created if it is missing.
        buffering: As in `open`.

    Raises:
        OSError: The file cannot be opened; or the path is a link, a pipe, anything else that is not
            a regular file, or a file of another user.
    """
    return open(_open_own(path, os.O_WRONLY | os.O_APPEND), "ab", buffering)


def _open_own(path: Path, flags: int) -> int:
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "a link, which is not followed", str(path)) from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0):
        return descriptor
    os.close(descriptor)
    what = "belongs to another user" if stat.S_ISREG(found.st_mode) else "is not a regular file"
    raise OSError(errno.EPERM, what, str(path))


_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


def open_by_steps(
    path: Path,
    check: Callable[[Path, os.stat_result, int], None] = lambda *_: None,
    *,
    follow: bool = False,
    flags: int = _READ,
) -> int:
    """Walk to a file or folder name by name, starting at /, and return a descriptor of it.

    No name is looked up twice, so a folder cannot be replaced after it was checked.

    Args:
        path: The file or folder.
        check: Called with each folder above it, its status and a descriptor; may raise.
        follow: Follow a link in the last position.
        flags: How to open it: for reading, or with os.O_PATH for fstat alone, which needs no
            permission.

    Raises:
        OSError: It is missing or may not be opened, or a link on the way belongs to another user.
    """
    # First by the whole path, because only then does an automounter mount it.
    path.stat()
    left = list(reversed(Path.cwd().joinpath(path).parts))
    where, here, links = Path("/"), -1, 0
    with contextlib.ExitStack() as opened:
        while left:
            if here >= 0:
                check(where, os.fstat(here), here)
            # "/" is the first name of the path, and of a link's absolute target.
            name = left.pop()
            step = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=None if here < 0 else here)
            opened.callback(os.close, step)
            found = os.fstat(step)
            if not stat.S_ISLNK(found.st_mode):
                where, here = where / name, step
                continue
            links += 1
            # In a container, root's files may have another user id: that of the owner of /.
            if found.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
                what = f"is a link of user {found.st_uid}; give the path of its target instead"
                raise PermissionError(errno.EPERM, what, str(where / name))
            if links > _MOST_LINKS or not (left or follow):
                raise OSError(errno.ELOOP, "a link, which is not followed", str(path))
            left += reversed(Path(os.readlink("", dir_fd=step)).parts)
        try:
            return os.open(f"/proc/self/fd/{here}", flags)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


_MOST_LINKS = 40


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. A pipe without a writer would block; a device never ends.

    Args:
        path: The file. A link of another user is not followed.

    Raises:
        OSError: The file is missing, may not be read, or is not a regular file.
    """
    descriptor = os.open(path, _READ)
    # Usually the path has no link. Otherwise each link must belong to this user or root, because a
    # link in another user's run could lead to a file of this user.
    if os.readlink(f"/proc/self/fd/{descriptor}") != os.path.abspath(path):
        os.close(descriptor)
        descriptor = open_by_steps(path, follow=True)
    return regular(descriptor, path)


def regular(descriptor: int, path: Path) -> IO[bytes]:
    """Return a file object for a descriptor. Raise OSError if it is not a regular file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(descriptor, "rb")


def read_bytes(
    path: Path,
    most: int | None = MAX_BYTES,
    opening: Callable[[Path], IO[bytes]] = open_regular,
) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most: The largest size in bytes; None for any.
        opening: Opens the file.

    Raises:
        OSError: The file is missing, may not be read, is not a regular file, or is too large.
    """
    with opening(path) as file:
        content = bytearray()
        # In pieces, because files below /proc/sys refuse large reads (ENOMEM).
        while part := file.read(PIECE_BYTES):
            content += part
            if most is not None and len(content) > most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return bytes(content)


# ---- JSON ----------------------------------------------------------------------------------------
def read_text(path: Path, most: int | None = MAX_BYTES) -> str:
    """Return a file's text, with U+FFFD for bytes that are not UTF-8; "" if it cannot be read.

    A file that is not regular, or larger than `most` bytes, cannot be read. A warning about a
    refused link is printed once.
    """
    try:
        return read_bytes(path, most).decode(errors="replace")
    except OSError as error:
        if error.errno == errno.EPERM:
            _warn_once(str(error.filename), str(error.strerror))
        return ""


@functools.cache
def _warn_once(path: str, why: str) -> None:
    say(f"warning: {path}: {why}")


def read_json(path: Path) -> Json:
    """Return the JSON object in a file; {} if it is missing, damaged, or something else."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Json:
    """Return the JSON object in `text`; {} if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def append_json_line(path: Path, record: Json) -> None:
    """Append one line of JSON to a file to which several processes may append.

    The line is written in a single write, so lines of two writers do not mix. If the last line was
    cut off (by a killed writer or a full disk), the new line still starts on its own line.

    Raises:
        OSError: The line cannot be written; or the path is a link, or not a regular file of this
            user.
    """
    descriptor = _open_own(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        line = b"\n" * is_cut + json.dumps(record).encode() + b"\n"
        # A disk that becomes full accepts a part of the line and reports no error.
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_json_lines(path: Path, last_bytes: int | None = None) -> Iterator[Json]:
    """Yield the objects in a file of JSON lines, in order.

    Everything that is not a JSON object on its own line is skipped: a line cut off by a kill, NUL
    bytes after a power cut, an empty line, a bare number. A missing file yields nothing.

    Args:
        path: The file.
        last_bytes: Read only this many bytes at the end of the file. If they begin in the middle of
            a line, that line is dropped.
    """
    try:
        file = open_regular(path)
    except OSError:
        return
    with file:
        if last_bytes is not None:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - last_bytes))
            if size > last_bytes:
                _skip_line(file)
        while line := file.readline(MAX_LINE):
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                _skip_line(file)
            elif record := parse_json(line.decode(errors="replace").strip("\0 \r\n\t")):
                yield record


def _skip_line(file: IO[bytes]) -> None:
    """Read to the end of a line, however long it is."""
    while (part := file.readline(MAX_LINE)) and not part.endswith(b"\n"):
        pass


def from_json(kind: type[T], content: Json) -> T | None:
    """Make a dataclass from a JSON object.

    Unknown keys are ignored.

    Returns:
        The object; None if a required key is missing or has a value of another type, as in a file
        that another program wrote. JSON lists become tuples.
    """
    known = {key: value for key, value in content.items() if key in kind.__annotations__}
    try:
        if not known or _has_odd_number(known):
            return None
        key: Any = kind
        made: T = adapter(key).validate_json(json.dumps(known), strict=True)
    except (ValueError, RecursionError):
        return None
    return made


def read_records(kind: type[T], path: Path) -> list[T]:
    """Return the dataclasses in a file of JSON lines, as `from_json` makes them, in order."""
    made = (from_json(kind, line) for line in read_json_lines(path, MAX_BYTES))
    return [record for record in made if record is not None]


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of a type, which is slow to make."""
    return TypeAdapter(kind)


def _has_odd_number(value: Any) -> bool:
    """Return True if a value holds a number that cannot be added up: nan, infinity or huge."""
    if isinstance(value, dict | list):
        return any(map(_has_odd_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float) and not abs(value) < MAX_NUMBER
