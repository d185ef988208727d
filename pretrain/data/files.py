"""Find and read the files that a user names.

All access of this package to such files goes through this module, so slow or broken storage is
handled only here.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import io
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from pretrain.config import ConfigError, RunFailed
from pretrain.data.shards import rebuild_advice

_CHUNK = 1 << 22

_BUFFER_BYTES = 2**18
"""Bytes that are read at once."""


class Location(NamedTuple):
    """A file that was found, but not read."""

    path: str
    """Absolute path."""

    size: int
    """Bytes."""

    identity: str
    """The path with all symlinks resolved, which is equal for two names of one file."""


def find(key: str, patterns: tuple[str, ...]) -> list[Location]:
    """Return the files that patterns name, each once, sorted by path.

    Args:
        key: The config key of the patterns, for messages.
        patterns: File names or glob patterns. If a file has a pattern as its name, the pattern
            means this file.

    Raises:
        ConfigError: A pattern matches no file.
        RunFailed: A matching file or directory cannot be read.
    """
    found: dict[str, Location] = {}
    for pattern in patterns:
        is_name = os.path.lexists(pattern)
        if is_name and os.path.isdir(pattern):
            inner = os.path.join(pattern, "**", "*.txt")
            raise ConfigError(f'{key} = {pattern!r}: a directory. Name its files: "{inner}"')
        root = os.sep if pattern.startswith(os.sep) else ""
        matches = [pattern] if is_name else list(_matches(root, pattern.split(os.sep)))
        if not matches:
            raise ConfigError(
                f"{key} = {pattern!r}: no such file (relative names start at {os.getcwd()}). Give "
                "file names or a glob pattern that matches files; ** reaches into subdirectories, "
                'as in "text/**/*.txt"'
            )
        for location in sorted(map(locate, matches)):
            found.setdefault(location.identity, location)
    return sorted(found.values())


def _matches(
    folder: str, parts: Sequence[str], above: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the files below a folder that match the parts of a pattern, like the module glob.

    glob itself silently skips directories that it may not list, so that text would be missing from
    a corpus, and follows circular links.

    Args:
        folder: Folder to search; "" is the working directory.
        parts: The parts of the pattern between slashes.
        above: The real paths of the folders through which ** has passed.
    """
    part, *rest = parts
    names, real = [part], os.path.realpath(folder)
    if glob.has_magic(part):
        if real in above:
            return
        with reading(folder or os.curdir):
            found = sorted(os.listdir(folder or os.curdir))
        names = [name for name in found if part.startswith(".") or not name.startswith(".")]
        names = names if part == "**" else fnmatch.filter(names, part)
    if part == "**" and rest:
        yield from _matches(folder, rest)
    for name in names:
        path = os.path.join(folder, name)
        try:
            with reading(path):
                is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError as error:
            if os.path.islink(path):
                raise unreadable(path, error) from None
            continue
        if is_directory and part == "**":
            yield from _matches(path, parts, above | {real})
        elif is_directory and rest:
            yield from _matches(path, rest)
        elif not is_directory and not rest:
            yield path


def locate(path: str) -> Location:
    """Return the location of a file whose name is known."""
    path = os.path.abspath(path)
    return Location(path, look(path)[0], os.path.realpath(path))


def look(path: str) -> tuple[int, int]:
    """Return a file's size in bytes, and its modification time in ns.

    Raises:
        RunFailed: The file cannot be read.
    """
    with reading(path, allow_missing=False):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size, status.st_mtime_ns


def open_stored(path: str | Path) -> io.BufferedReader:
    """Open a location for reading its bytes as they are stored.

    Raises:
        FileNotFoundError: It is missing.
        RunFailed: It cannot be opened.
    """
    with reading(path):
        return cast(io.BufferedReader, open(path, "rb", _BUFFER_BYTES))


@contextlib.contextmanager
def reading(where: str | Path, *, allow_missing: bool = True) -> Iterator[None]:
    """Turn the errors of reading a file into a RunFailed that names it.

    Args:
        where: The file's path.
        allow_missing: A missing file stays a FileNotFoundError.
    """
    try:
        yield
    except (ConfigError, RunFailed):
        raise
    except Exception as error:
        if allow_missing and isinstance(error, FileNotFoundError):
            raise
        raise unreadable(where, error) from error


def unreadable(where: str | Path, error: Exception) -> RunFailed:
    """Return the error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return RunFailed(
        f"{where}: cannot be read ({reason}). Look at the disk or the permissions, then start again"
    )


# ---- The files of a split ----


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file.

    Raises:
        FileNotFoundError: It is missing.
        RunFailed: It cannot be read.
    """
    with reading(path), open_stored(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def read(path: Path) -> bytes:
    """Return the content of a small file. Raises the errors of `chunks`."""
    return b"".join(chunks(path))


class Descriptor:
    """An open local file, which is closed when its last user drops it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset` on, or fewer if the file ends earlier."""
        content = b""
        # A network file system may return fewer bytes than it has; only 0 bytes mean the end.
        while more := os.pread(self.number, size - len(content), offset + len(content)):
            content += more
        return content

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def missing(path: Path, manifest: Path | None = None) -> ConfigError:
    """Return the error for a missing file that a manifest, by default the one beside it, names."""
    manifest = manifest or path.with_name("manifest.json")
    return ConfigError(f"{path}: missing, but {manifest} names it. {rebuild_advice(manifest)}")
