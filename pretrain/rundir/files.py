"""Publish files and folders in one move, and read JSON back whatever state it is in.

Everything that a run publishes goes through this module: `replace_file` for one file,
`publish_directory` for a folder, `append_json_line` for a log. A process may be killed at any
instruction; a reader then finds a whole file, or a last line that is cut off, and never half a file
under its final name.
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

# ---- Keep what is made in a shared folder from being opened to all members of its team ----


DEFAULT_LIST = "system.posix_acl_default"
"""The attribute of a folder with the access list of what is made in it, acl(5)."""
ACCESS_HEADER, ACCESS_ENTRY, OWNER_ENTRY = 4, "<HHI", 0x01
"""Such a list is a version, then a tag, rights and an id for each entry; the owner's has this tag
(linux/posix_acl_xattr.h)."""


def let_nobody_write(directory: Path) -> None:
    """Take the right to write from the default access list that a folder hands on, if it has one.

    In a project's folder that list opens to all members what Slurm and libraries make: they ask for
    mode 0666, as programs do, and where there is such a list it takes the place of the umask.
    """
    # OSError: there is no list, the file system has none, or the folder is somebody else's.
    with contextlib.suppress(OSError, AttributeError, struct.error):
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
"""What a run writes can be read by its owner and the owner's group. It is given to open and mkdir,
because the umask has no effect in a folder that has a default access list."""
MAX_BYTES = 32 * 2**20
"""The most that is read of a file that is small in any run: a larger one is damage."""
PIECE_BYTES = 2**16
MAX_LINE = 2**20
"""The longest line of a JSON lines file; a longer one is damage."""
MAX_NUMBER = 2**53
"""Larger numbers in a record are damage; JSON readers agree on integers up to here."""
PARTIAL = ".partial"
"""Ends the hidden name under which a file or folder is written before it is published."""
REMOVED = ".removed"
"""Ends the hidden name of a folder that is being removed."""


# ---- publishing ----------------------------------------------------------------------------------
@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a hidden name beside `path`, whose file gets that name when the block succeeds.

    Args:
        path: The file to make or replace. Its folder must exist.
        durable: Flush the content to the disk before the move. Without it, a power cut can leave an
            empty file under the final name, even though the rename itself survived.

    Raises:
        OSError: The disk refused; `path` is as it was, and nothing is left beside it.
    """
    # Two processes may publish the same file at once, so each writes under a name of its own.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        yield partial
        if durable:
            flush_file(partial)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def replace_file(
    path: Path, content: str | bytes, *, durable: bool = False, mode: int = FILE_MODE
) -> None:
    """Write `content` to `path` in one move, so that a reader sees the old content or the new.

    Args:
        path: The file to make or replace. Its folder must exist.
        content: Text is written as UTF-8.
        durable: As for `new_file`.
        mode: Permissions, before the umask.

    Raises:
        OSError: The disk refused; `path` is as it was, and nothing is left beside it.
    """
    data = content.encode() if isinstance(content, str) else content
    with (
        new_file(path) as partial,
        open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def flush_file(path: Path) -> None:
    """Flush a file's content to the disk, so that it survives a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def replace_json(
    path: Path, content: Any, *, durable: bool = False, indent: int | None = None
) -> None:
    """Write JSON to a file in one move, as `replace_file` does.

    Args:
        path: The file.
        content: What is written.
        durable: Flush the content to the disk before the move.
        indent: Spaces of each level; None for one line.
    """
    replace_file(path, json.dumps(content, indent=indent) + "\n", durable=durable)


def publish_directory(partial: Path, final: Path) -> None:
    """Give a finished folder its final name, which is the moment at which it exists for readers.

    A rename onto a folder that is not empty fails on every file system, so exactly one of several
    publishers succeeds.

    Args:
        partial: The finished folder, on the same file system as `final`.
        final: The name under which readers look for it.

    Raises:
        OSError: `final` exists, or the disk refused. `final` is as it was.
    """
    partial.rename(final)
    flush_directory(final.parent)


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `final` that is published as `final` when the block succeeds.

    When the block raises, the hidden folder is removed. A killed process leaves it behind, under a
    name that nothing reads.

    Args:
        final: The folder to make. Its parent is made when missing.

    Raises:
        OSError: The disk refused, or `final` exists.
    """
    # Two processes may build the same folder at once, so each builds under a name of its own.
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}{PARTIAL}")
    partial.mkdir(DIRECTORY_MODE, parents=True)
    try:
        yield partial
        publish_directory(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a folder that readers look for, in such an order that they never see a part of it."""
    # Killed half-way through, the rest of the folder must not still have its name. The new name is
    # unique, so it meets nothing that somebody else put there.
    hidden = path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex}{REMOVED}"))
    # Flush the new name first: after a power cut, files must not be missing under the old one.
    flush_directory(path.parent)
    remove(hidden)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link but not what it points to."""
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
    flush_directory(directory.parent)


def flush_directory(directory: Path) -> None:
    """Flush the names in a folder to the disk: a rename is durable only when its folder is."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:
        # A folder that may be written to but not listed (mode 0733) cannot be flushed.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- opening what others may have put there ------------------------------------------------------
def open_own(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a file to write to, without following a link and without waiting for a pipe's reader.

    Args:
        path: The file. It is made when it is missing.
        mode: "ab" to append, "wb" to begin anew.
        buffering: As `open` takes it.

    Raises:
        OSError: The disk refused, or there is a link, a pipe or something else that is no file, or
            a file of another user.
    """
    flags = {"ab": os.O_WRONLY | os.O_APPEND, "wb": os.O_WRONLY}[mode]
    descriptor = _open_own(path, flags)
    if mode == "wb":
        # Not O_TRUNC: only after it is known to be a file of this user.
        os.ftruncate(descriptor, 0)
    return open(descriptor, mode, buffering)


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
    what = "belongs to another user" if stat.S_ISREG(found.st_mode) else "is no regular file"
    raise OSError(errno.EPERM, what, str(path))


_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


def open_by_steps(
    path: Path,
    check: Callable[[Path, os.stat_result, int], None] = lambda *_: None,
    *,
    follow: bool = False,
    flags: int = _READ,
) -> int:
    """Go to a file or folder from / on, name by name, and return a descriptor of it.

    No name is looked up twice, so what was checked cannot be exchanged afterwards.

    Args:
        path: The file or folder.
        check: Given each folder above it, its status and a descriptor; what it raises is raised.
        follow: Follow a link in the last place.
        flags: How it is opened: to be read, or with os.O_PATH to be looked at by fstat, which
            needs no right to it.

    Raises:
        OSError: It is missing or may not be opened, or a link on the way is another user's.
    """
    # An automounter mounts what is asked for by its whole path.
    path.stat()
    left = list(reversed(Path.cwd().joinpath(path).parts))
    where, here, links = Path("/"), -1, 0
    with contextlib.ExitStack() as opened:
        while left:
            if here >= 0:
                check(where, os.fstat(here), here)
            # "/" is the first name, and that of a link's target that begins with it.
            name = left.pop()
            step = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=None if here < 0 else here)
            opened.callback(os.close, step)
            found = os.fstat(step)
            if not stat.S_ISLNK(found.st_mode):
                where, here = where / name, step
                continue
            links += 1
            # In a container, root's files may have another number: that of the owner of /.
            if found.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
                what = f"is a link of user {found.st_uid}; name what it leads to by its own path"
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
    """Open a regular file to read. A pipe without a writer would block, and a device never end.

    Args:
        path: The file. A link of another user is not followed.

    Raises:
        OSError: It is missing, may not be read, or is no regular file.
    """
    descriptor = os.open(path, _READ)
    # Usually the path has no link. Otherwise each must be this user's or root's: a link in another
    # user's run could lead to a file of this user's.
    if os.readlink(f"/proc/self/fd/{descriptor}") != os.path.abspath(path):
        os.close(descriptor)
        descriptor = open_by_steps(path, follow=True)
    return regular(descriptor, path)


def regular(descriptor: int, path: Path) -> IO[bytes]:
    """Return what was opened to read as a file. Raise OSError if it is no regular one."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return open(descriptor, "rb")


def read_bytes(
    path: Path,
    most: int | None = MAX_BYTES,
    opening: Callable[[Path], IO[bytes]] = open_regular,
) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most: The largest size in bytes; None: any.
        opening: Opens it.

    Raises:
        OSError: It is missing, may not be read, is no regular file, or is too large.
    """
    with opening(path) as file:
        content = bytearray()
        # In pieces: files below /proc/sys refuse to be read by so many bytes at once (ENOMEM).
        while part := file.read(PIECE_BYTES):
            content += part
            if most is not None and len(content) > most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return bytes(content)


# ---- JSON ----------------------------------------------------------------------------------------
def read_text(path: Path, most: int | None = MAX_BYTES) -> str:
    """Return a file's text, with U+FFFD for bytes that are not UTF-8; "" when it cannot be read.

    So also where it is no regular file, or larger than `most`. A link that is refused is said once.
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
    """Return the JSON object in a file; {} when it is missing, damaged, or something else."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Json:
    """Return the JSON object that `text` is; {} when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def append_json_line(path: Path, record: Json) -> None:
    """Append one line of JSON to a file that several processes may append to.

    The line goes out in a single write, so lines of two writers do not mix. When the last line was
    cut off (a killed writer, a full disk), the new one starts on a line of its own.

    Raises:
        OSError: The disk refused, or there is a link or something else that is no file of this
            user.
    """
    descriptor = _open_own(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        line = b"\n" * is_cut + json.dumps(record).encode() + b"\n"
        # A disk that becomes full takes a part of the line and reports no error.
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_json_lines(path: Path, last_bytes: int | None = None) -> Iterator[Json]:
    """Yield the objects in a file of JSON lines, in order.

    Whatever is not a JSON object on a line of its own is passed over: a line cut off by a kill, NUL
    bytes after a power cut, an empty line, a bare number. A missing file yields nothing.

    Args:
        path: The file.
        last_bytes: Read only that much of the file's end. The line in which that begins is dropped.
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

    Keys that are not known are passed over.

    Returns:
        The object; None when a key that it needs is missing or has a value of another type, as in a
        file that another program wrote. JSON's lists become tuples.
    """
    known = {key: value for key, value in content.items() if key in kind.__annotations__}
    try:
        if not known or _has_odd_number(known):
            return None
        key: Any = kind
        made: T = _adapter(key).validate_json(json.dumps(known), strict=True)
    except (ValueError, RecursionError):
        return None
    return made


def read_records(kind: type[T], path: Path) -> list[T]:
    """Return the dataclasses in a file of JSON lines, as `from_json` makes them, in order."""
    made = (from_json(kind, line) for line in read_json_lines(path, MAX_BYTES))
    return [record for record in made if record is not None]


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _has_odd_number(value: Any) -> bool:
    """Return True for a number that code could not add up: nan, infinity, or a huge one."""
    if isinstance(value, dict | list):
        return any(map(_has_odd_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float) and not abs(value) < MAX_NUMBER
