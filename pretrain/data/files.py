"""Files that may be local or at a URL: find them, look at them, read them, keep copies of them.

Every access of this package to a file that a user names goes through this module, so that whatever
is done about slow or broken storage is done here. A location is an absolute path, or a URL that
`fsspec` reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import glob
import io
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import fsspec
import xxhash

from pretrain.config import ConfigError, RunFailed, writing
from pretrain.config.load import expand_path
from pretrain.config.run import is_url
from pretrain.data.shards import rebuild_advice
from pretrain.rundir.files import PARTIAL

_CHUNK = 1 << 22

_BUFFER_BYTES = 2**18
"""Bytes that are read at once."""


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
        ConfigError: A pattern matches no file.
        RunFailed: What it matches cannot be read.
    """
    found: dict[str, Location] = {}
    for pattern in patterns:
        is_name = os.path.lexists(pattern)
        if is_name and os.path.isdir(pattern):
            inner = os.path.join(pattern, "**", "*.txt")
            raise ConfigError(f'{key} = {pattern!r}: a directory. Name its files: "{inner}"')
        if not is_name and is_url(pattern):
            matches = _matches_in_store(pattern)
        else:
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
    """Yield the files below a folder that the parts of a pattern match, as the module glob does.

    But glob passes over directories that it may not list, so that a corpus would lack their text,
    and follows links in circles.

    Args:
        folder: Where to look; "" is the working directory.
        parts: What stands between the slashes of the pattern.
        above: The real paths of the folders that ** has come through.
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


def _matches_in_store(pattern: str) -> list[str]:
    """Return the URLs of the files of a store that a URL, which may be a pattern, matches."""
    system, name = store(pattern)
    with reading(pattern):
        if system.isfile(name):
            return [pattern]
        entries = system.glob(name, detail=True)
    return [
        system.unstrip_protocol(name)
        for name, entry in entries.items()
        if entry["type"] != "directory"
    ]


def locate(path: str) -> Location:
    """Return the location of a file whose name is known."""
    if is_url(path):
        return Location(path, look(path)[0], path)
    path = os.path.abspath(path)
    return Location(path, look(path)[0], os.path.realpath(path))


def look(path: str) -> tuple[int, int | str]:
    """Return a file's size in bytes, and what tells versions of it apart.

    That is the modification time in ns, or of a URL what fsspec goes by.

    Raises:
        ConfigError: The server does not tell the size, so a truncated copy would not be noticed.
        RunFailed: The file cannot be read.
    """
    with reading(path, allow_missing=False):
        if not is_url(path):
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return status.st_size, status.st_mtime_ns
        system, name = store(path)
        size, version = system.size(name), str(system.ukey(name))
    if size is None:
        raise ConfigError(
            f"{path}: the server does not tell the size of this file. Copy it to a disk or an "
            "object store"
        )
    return int(size), version


def open_stored(path: str) -> io.BufferedReader:
    """Open a location for reading its bytes as they are stored.

    Raises:
        FileNotFoundError: It is missing.
        RunFailed: It cannot be opened.
    """
    with reading(path):
        if is_url(path):
            system, name = store(path)
            return io.BufferedReader(system.open(name, "rb"), _BUFFER_BYTES)
        return cast(io.BufferedReader, open(path, "rb", _BUFFER_BYTES))


def store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the name of the URL in it.

    fsspec keeps the object of a file system, so this costs nothing after the first call.
    """
    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url}: fsspec cannot read this URL ({error}). Install the package for its protocol "
            "(s3fs for s3://, gcsfs for gs://), or correct the URL"
        ) from None


@contextlib.contextmanager
def reading(where: str, *, allow_missing: bool = True) -> Iterator[None]:
    """Turn the errors of reading a file into a RunFailed that names it.

    Args:
        where: The file's path or URL.
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


def unreadable(where: str, error: Exception) -> RunFailed:
    """Return the error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return RunFailed(
        f"{where}: cannot be read ({reason}). Look at the disk, the network or the permissions, "
        "then start again"
    )


# ---- Give a split's files as local ones: as they are, or fetched into a bounded cache ----


_CACHED = re.compile(r"[0-9a-f]{32}-.+")
"""Names of the files that a cache keeps and may remove."""


class Cache(NamedTuple):
    """The folder where files from a URL are kept, and its largest size in bytes."""

    directory: str = "~/.cache/pretrain"
    bytes: int = 100_000_000_000


class Folder:
    """The local directory of a split."""

    def __init__(self, location: str | Path) -> None:
        self.location = str(location)

    def where(self, name: str) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self.location.rstrip('/')}/{name}"

    def parent(self) -> Folder:
        """Return the folder above: the data set."""
        # With pathlib, because a local split may be given as "train" or "data/..".
        return Folder(Path(self.location).absolute().parent)

    def sizes(self) -> dict[str, int]:
        """Return the size of every file."""
        with reading(self.location), os.scandir(self.location) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file, which is not kept.

        Raises:
            FileNotFoundError: if it is missing.
            RunFailed: if it cannot be read.
        """
        with reading(self.where(name)), open_stored(self.where(name)) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def read(self, name: str) -> bytes:
        """Return the contents of a small file; as `chunks`."""
        return b"".join(self.chunks(name))

    def local(self, name: str, size: int, digest: str) -> Path:
        """Return the path of a local file with the content of `name`.

        Args:
            name: The file.
            size: Its bytes.
            digest: Hex XXH3-128 of its content.
        """
        return Path(self.location, name)

    def descriptor(self, name: str, size: int, digest: str) -> int:
        """Open a local file with the content of `name`; the arguments are those of `local`.

        Raises:
            FileNotFoundError: if it is missing.
            OSError: if it cannot be opened.
        """
        return os.open(self.local(name, size, digest), os.O_RDONLY | os.O_CLOEXEC)

    def remedy(self, where: str) -> str:
        """Return what to do about a damaged file that a stream has open."""
        return f"`pretrain data verify` names every damaged file. {rebuild_advice(where)}"


class RemoteFolder(Folder):
    """The URL of a split. Whole files are fetched on first use and kept in the cache."""

    def __init__(self, location: str, cache: Cache) -> None:
        super().__init__(location)
        self._cache = Path(expand_path("data.cache_directory", cache.directory))
        self._bytes = cache.bytes

    def parent(self) -> Folder:
        """Return the folder above: the data set."""
        cache = Cache(str(self._cache), self._bytes)
        return RemoteFolder(self.location.rstrip("/").rsplit("/", 1)[0], cache)

    def sizes(self) -> dict[str, int]:
        """Return the size of every file; one request, or one a thousand files."""
        with reading(self.location):
            system, path = store(self.location)
            found = system.ls(path, detail=True)
            return {
                entry["name"].rstrip("/").rsplit("/", 1)[-1]: int(entry["size"])
                for entry in found
                if entry["type"] == "file"
            }

    def local(self, name: str, size: int, digest: str) -> Path:
        """Return the path of the file in the cache, after fetching it if it is not there."""
        os.close(self.descriptor(name, size, digest))
        return self._kept(name, digest)

    def descriptor(self, name: str, size: int, digest: str) -> int:
        """Open the file in the cache, after fetching it if it is not there.

        The file is opened before another process can evict it.
        """
        path = self._kept(name, digest)
        with writing(self._cache):
            self._cache.mkdir(parents=True, exist_ok=True)
            # One process of a node fetches and the others wait. The kernel releases the lock of a
            # process that dies.
            with (self._cache / f".{path.name}.lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    found = self._fetch(path, name, size, digest)
                # What was used last is evicted last.
                os.utime(found)
        return found

    def remedy(self, where: str) -> str:
        """Return what to do about a damaged file: it was sound when it arrived."""
        return f"Remove the copies in {self._cache}, which are what is damaged, and go on"

    def _kept(self, name: str, digest: str) -> Path:
        """Return where a file is kept.

        Under its digest, so that a data set which was replaced at its URL is never mixed with the
        old one, and copies of one data set share what was fetched.
        """
        return self._cache / f"{digest}-{name}"

    def _fetch(self, path: Path, name: str, size: int, digest: str) -> int:
        """Copy a file into the cache, checked on the way, and return a descriptor of it."""
        self._make_room(size)
        partial = self._cache / f".{path.name}.{uuid.uuid4().hex}{PARTIAL}"
        found, received = xxhash.xxh3_128(), 0
        try:
            with partial.open("xb") as target:
                for chunk in self.chunks(name):
                    found.update(chunk)
                    received += len(chunk)
                    target.write(chunk)
            if found.hexdigest() != digest:
                raise ConfigError(
                    f"{self.where(name)}: damaged: {received} bytes with the XXH3-128 "
                    f"{found.hexdigest()} arrived, but the manifest says {size} bytes with "
                    f"{digest}. {rebuild_advice(self.where(name))}"
                )
            descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
            partial.replace(path)
        except FileNotFoundError:
            raise missing(self.where(name)) from None
        finally:
            partial.unlink(missing_ok=True)
        return descriptor

    def _make_room(self, size: int) -> None:
        """Remove what was used longest ago, until `size` more bytes fit.

        Other processes evict at the same time, so any file may be gone at any moment. One that a
        process has open remains readable to it.
        """
        kept = []
        for path in self._cache.iterdir():
            # The directory is the user's choice, and may hold files of the user's own.
            if _CACHED.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    kept.append((status.st_mtime_ns, status.st_size, path))
        total = size + sum(each[1] for each in kept)
        for _, bytes_, path in sorted(kept):
            if total <= self._bytes:
                return
            path.unlink(missing_ok=True)
            (self._cache / f".{path.name}.lock").unlink(missing_ok=True)
            total -= bytes_


def folder(location: str | Path, cache: Cache | None = None) -> Folder:
    """Return the files of a local directory or of a URL."""
    return RemoteFolder(str(location), cache or Cache()) if is_url(location) else Folder(location)


def missing(where: str, manifest: str | None = None) -> ConfigError:
    """Return the error for a file that a manifest, by default beside it, names and lacks."""
    manifest = manifest or f"{where.rsplit('/', 1)[0]}/manifest.json"
    return ConfigError(f"{where}: missing, but {manifest} names it. {rebuild_advice(manifest)}")
