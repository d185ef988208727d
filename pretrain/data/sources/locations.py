"""Find the files that patterns name, and open them, here or in an object store.

A location is an absolute path, or a URL that `fsspec` reads. No location ever starts a program.
"""

from __future__ import annotations

import fnmatch
import glob
import io
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, cast

import fsspec

from pretrain.config import ConfigError

SCHEMES = (
    *("abfs", "abfss", "az", "gcs", "gs", "hdfs", "hf", "http", "https"),
    *("memory", "oci", "s3", "s3a", "sftp"),
)
"""Schemes of the URLs that are read. fsspec knows others that unpack, cache or run what they are
given."""

_BUFFER_BYTES = 2**18
"""Bytes that are read at once."""

_Refused = Callable[[str, str], ConfigError]
"""Returns the error for a path that cannot be read, and why."""


class Location(NamedTuple):
    """A file that was found. Its content was not looked at."""

    path: str
    """Absolute path, or URL."""

    size: int
    """Bytes."""

    identity: str
    """Equal for two names of one file: the path after every symlink is followed, or the URL."""


def find(key: str, patterns: tuple[str, ...]) -> list[Location]:
    """Return the files that patterns name, each once, sorted by path.

    Args:
        key: The config key of the patterns, for messages.
        patterns: File names, glob patterns, or URLs of either. A pattern that is the name of a file
            is that file.

    Raises:
        ConfigError: if a pattern matches nothing, or something that cannot be read.
    """
    found: dict[str, Location] = {}
    # Files share few directories, and following the links in a path takes a call a part.
    real_directory = cache(os.path.realpath)
    for pattern in patterns:
        scheme = re.match("([A-Za-z][A-Za-z0-9+.-]*):", pattern)
        if scheme is None or os.path.lexists(pattern):
            matches = list(_find_here(key, pattern, real_directory))
        elif scheme[1] in SCHEMES and pattern.startswith("://", len(scheme[1])):
            matches = list(_find_in_store(key, pattern))
        else:
            raise ConfigError(
                f"{key} = {pattern!r}: {scheme[1]!r} is not a scheme that is read. Give a URL that "
                f"begins with one of {', '.join(SCHEMES)}, or a path; one with a colon in its "
                "first name begins with ./"
            )
        if not matches:
            raise ConfigError(
                f"{key} = {pattern!r}: no such file (relative names start at {os.getcwd()}). Give "
                "file names or a glob pattern that matches files; ** reaches into subdirectories, "
                'as in "text/**/*.txt"'
            )
        for location in sorted(matches):
            found.setdefault(location.identity, location)
    return sorted(found.values())


def open_stored(path: str) -> io.BufferedReader:
    """Open a location for reading its bytes as they are stored.

    Raises:
        ConfigError: if it cannot be opened.
    """
    try:
        if is_url(path):
            system, name = _store(path)
            return io.BufferedReader(system.open(name, "rb"), _BUFFER_BYTES)
        return cast(io.BufferedReader, open(path, "rb", _BUFFER_BYTES))
    except OSError as error:
        raise unreadable(path, error) from None


def stored_size(path: str) -> int:
    """Return the size in bytes of a location.

    Raises:
        ConfigError: if it is not there.
    """
    try:
        if is_url(path):
            system, name = _store(path)
            return _size_in_store(path, system.info(name))
        return os.stat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from None


def is_url(path: str) -> bool:
    """Return True for a URL and False for an absolute path."""
    return not path.startswith("/")


def unreadable(path: str, error: OSError) -> ConfigError:
    """Return the error that says why the operating system or the store refuses a file."""
    reason = error.strerror or str(error) or type(error).__name__
    return ConfigError(
        f"{path}: cannot be read ({reason}). Restore the file or make it readable, or leave it out "
        "of the paths of its corpus"
    )


def _find_here(key: str, pattern: str, real_directory: Callable[[str], str]) -> Iterator[Location]:
    """Yield the files of this machine that a pattern matches.

    A directory that a pattern with ** matches is passed over, because the files in it were within
    reach of the pattern too. Any other match that is no readable file is refused.

    Args:
        key: The config key of the pattern, for messages.
        pattern: A file name or glob pattern.
        real_directory: Returns a directory's path with its symlinks followed.
    """
    exact = os.path.lexists(pattern)
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    start = "/" if pattern.startswith("/") else "."
    for name in [pattern] if exact else _matches(start, parts, partial(_refused, key, pattern)):
        path = os.path.abspath(name)
        try:
            status = os.stat(path)
        except OSError as error:
            reason = error.strerror
            if os.path.islink(path):
                reason = f"a symlink to {os.readlink(path)!r}, which does not exist"
            raise _refused(key, pattern, path, str(reason)) from None
        if stat.S_ISDIR(status.st_mode):
            if exact:
                inner = os.path.join(pattern, "**", "*.txt")
                raise ConfigError(f'{key} = {pattern!r}: a directory. Name its files: "{inner}"')
            if "**" not in pattern:
                raise _refused(key, pattern, path, "a directory: name its files")
            continue
        if not stat.S_ISREG(status.st_mode):
            raise _refused(key, pattern, path, "not a regular file")
        if not os.access(path, os.R_OK):
            raise _refused(key, pattern, path, "no permission to read it")
        directory, last = os.path.split(path)
        linked = os.path.islink(path)
        real = os.path.realpath(path) if linked else os.path.join(real_directory(directory), last)
        yield Location(path, status.st_size, real)


def _refused(key: str, pattern: str, path: str, reason: str) -> ConfigError:
    path = os.path.normpath(path)
    return ConfigError(
        f"{key} = {pattern!r}: {path} cannot be read ({reason}). Mend or remove it, or give a "
        'pattern that does not match it, such as "text/**/*.txt"'
    )


def _matches(folder: str, parts: list[str], refused: _Refused) -> Iterator[str]:
    """Yield the paths below a folder that match the parts of a pattern.

    The rules are those of the module glob: names that begin with a dot are matched by such parts
    alone, and ** stands for any number of directories. But glob passes over directories that it may
    not list without a word, and follows links that lead in a circle without end.
    """
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        for directory in _directories(folder, refused):
            yield from _matches(directory, rest or ["*"], refused)
    elif glob.has_magic(part):
        for entry in _entries(folder, refused):
            hidden = entry.name.startswith(".") and not part.startswith(".")
            if hidden or not fnmatch.fnmatchcase(entry.name, part):
                continue
            if not rest or _is_directory(entry, refused):
                yield from _matches(entry.path, rest, refused)
    else:
        path = os.path.join(folder, part)
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise refused(path, str(error.strerror)) from None
        yield from _matches(path, rest, refused)


def _directories(folder: str, refused: _Refused) -> Iterator[str]:
    """Yield a folder and all directories below it, each once, whatever links lead to it."""
    waiting = deque([folder])
    seen = set()
    while waiting:
        directory = waiting.popleft()
        if not os.path.isdir(directory):
            continue
        status = os.stat(directory)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        yield directory
        below = [e for e in _entries(directory, refused) if not e.name.startswith(".")]
        # Names of their own come first, so that a file is known by its shortest one.
        below.sort(key=lambda entry: entry.is_symlink())
        waiting.extend(entry.path for entry in below if _is_directory(entry, refused))


def _entries(folder: str, refused: _Refused) -> list[os.DirEntry[str]]:
    """Return what a directory holds, sorted; nothing for what is no directory."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise refused(folder, f"its files cannot be listed: {error.strerror}") from None


def _is_directory(entry: os.DirEntry[str], refused: _Refused) -> bool:
    """Return True for a directory or a link to one; a link to nothing may have been one."""
    if entry.is_symlink() and not os.path.exists(entry.path):
        raise refused(entry.path, f"a symlink to {os.readlink(entry.path)!r}, which does not exist")
    return entry.is_dir()


def _find_in_store(key: str, pattern: str) -> Iterator[Location]:
    """Yield the files of an object store that a URL, which may be a pattern, matches."""
    try:
        system, name = _store(pattern)
        if system.isfile(name):
            entries = {name: system.info(name)}
        else:
            entries = system.glob(name, detail=True)
    except OSError as error:
        raise unreadable(pattern, error) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{pattern}: cannot be opened ({error}). Correct the URL") from None
    for name, entry in entries.items():
        if entry["type"] == "directory":
            if "**" not in pattern:
                raise _refused(key, pattern, name, "a directory: name its files")
            continue
        url = system.unstrip_protocol(name)
        yield Location(url, _size_in_store(url, entry), url)


def _store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the name of the URL in it."""
    if "::" in url:
        raise ConfigError(f"{url}: chained URLs are not read. Give the URL of the file itself")
    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url}: cannot be opened ({error}). Install the package that reads such URLs (s3fs "
            "for s3://, gcsfs for gs://), or correct the URL"
        ) from None


def _size_in_store(url: str, entry: dict[str, Any]) -> int:
    size = entry.get("size")
    if not isinstance(size, int):
        raise ConfigError(
            f"{url}: the server does not tell the size of this file, so that a truncated copy "
            "would not be noticed. Copy the file to a disk or an object store"
        )
    return size
