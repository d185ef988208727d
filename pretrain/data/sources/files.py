"""Find the files that patterns name, and open them as streams of the bytes that they hold.

A location is an absolute path, or a URL that `fsspec` reads. No location ever starts a program.
"""

from __future__ import annotations

import bz2
import fnmatch
import glob
import io
import lzma
import os
import re
import stat
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, cast

import fsspec

from pretrain.config import ConfigError
from pretrain.data.sources.base import Damaged, Location, Piece, optional

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


def stored_location(path: str) -> Location:
    """Return the location of a file whose path is known."""
    return Location(path, stored_size(path), path, compression_of(path) is not None)


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
        yield Location(path, status.st_size, real, compression_of(path) is not None)


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
        yield Location(url, _size_in_store(url, entry), url, compression_of(url) is not None)


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


_STEP_BYTES = 2048
"""Packed bytes that are unpacked at once. At the highest ratio of any format (zstd: 1 to 32,768)
they unpack to 64 MiB."""


class Compression(NamedTuple):
    """A format of compressed files."""

    suffix: str
    """End of the names of such files."""

    unpacker: Callable[[], tuple[Any, type[Exception]]]
    """Returns a new decompressor of one member, and the error that it raises."""


def _zstandard() -> tuple[Any, type[Exception]]:
    zstandard = optional("zstandard", ".zst files")
    # Files of `zstd --long=31` want the largest window that there is.
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    return unpacker, zstandard.ZstdError


COMPRESSIONS = (
    Compression(".gz", lambda: (zlib.decompressobj(31), zlib.error)),
    Compression(".xz", lambda: (lzma.LZMADecompressor(), lzma.LZMAError)),
    Compression(".zst", _zstandard),
    Compression(".bz2", lambda: (bz2.BZ2Decompressor(), OSError)),
)


def compression_of(path: str) -> Compression | None:
    """Return the compression that the name of a file tells, or None."""
    return next((c for c in COMPRESSIONS if path.endswith(c.suffix)), None)


def end_of(piece: Piece) -> int:
    """Return the offset in the unpacked stream before which the documents of a piece start."""
    return sys.maxsize if compression_of(piece.path) else piece.end


def open_piece(piece: Piece) -> io.BufferedReader:
    """Open the file of a piece as a stream of the bytes that it holds, from its beginning.

    The stream raises Damaged where its compressed data are damaged or end too early.

    Raises:
        ConfigError: if the file is missing or shorter than planned.
    """
    check_size(piece)
    stored = open_stored(piece.path)
    named = compression_of(piece.path)
    return io.BufferedReader(_Unpacked(stored, named), 2**18) if named else stored


def check_size(piece: Piece) -> None:
    """Raise ConfigError if the file of a piece no longer reaches to where the piece ends."""
    size = stored_size(piece.path)
    if size < piece.end:
        raise shrunk(piece, size)


def shrunk(piece: Piece, size: int) -> ConfigError:
    """Return the error that a file has become shorter than it was when the tasks were planned."""
    return ConfigError(
        f"{piece.path}:{size}: the file ends here, and had at least {piece.end} bytes when the "
        "build was planned. Restore it, or build the data set anew"
    )


class _Unpacked(io.RawIOBase):
    """The content of a compressed file, unpacked member after member.

    Python's own readers end silently at a damaged second member (lzma, bz2), and zstandard's at
    data that end too early.
    """

    def __init__(self, stored: io.BufferedReader, compression: Compression) -> None:
        self._stored = stored
        self._compression = compression
        # The unpacker is None between two members.
        self._unpacker: Any
        self._unpacker, self._error = compression.unpacker()
        self._packed = b""
        self._unpacked = memoryview(b"")
        self._offset = 0
        # Bytes that were handed out.

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stored.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Unpack into `buffer` and return the number of bytes; 0 at the end."""
        while not self._unpacked:
            if not self._packed:
                self._packed = self._stored.read(_STEP_BYTES)
            if not self._packed:
                if self._unpacker is None:
                    return 0
                raise Damaged(self._offset, f"the {self._compression.suffix} data end too early")
            self._unpack()
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        self._offset += count
        return count

    def _unpack(self) -> None:
        """Unpack the packed bytes at hand, up to the end of their member."""
        if self._unpacker is None:
            # A file may be padded with zeros to the size of a tape block.
            self._packed = self._packed.lstrip(b"\0")
            if not self._packed:
                return
            self._unpacker, self._error = self._compression.unpacker()
        try:
            self._unpacked = memoryview(self._unpacker.decompress(self._packed))
        except self._error as error:
            suffix = self._compression.suffix
            fault = f"the {suffix} data are damaged, or none ({error})"
            raise Damaged(self._offset, fault) from None
        if self._unpacker.eof:
            self._packed, self._unpacker = self._unpacker.unused_data, None
        else:
            self._packed = b""
