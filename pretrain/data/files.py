"""Give a split's files as local ones: as they are, or fetched from a URL into a bounded cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec
import xxhash

from pretrain.config import ConfigError, RunFailed, writing
from pretrain.config.load import expand_path
from pretrain.config.run import is_url
from pretrain.data.manifest import rebuild_advice
from pretrain.rundir.files import PARTIAL

_CHUNK = 1 << 22
_CACHED = re.compile(rf"[0-9a-f]{{32}}-.+|\.[0-9a-f]{{32}}-.+{re.escape(PARTIAL)}")
"""Names of the files that a cache may remove: what it keeps, and its partial files."""

_STALE_SECONDS = 86_400
"""A partial file that nobody has written to for so long was left by a process that was killed."""


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
        with self._reading("."), os.scandir(self.location) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file, which is not kept.

        Raises:
            FileNotFoundError: if it is missing.
            RunFailed: if it cannot be read.
        """
        with self._reading(name), self._open(name) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def read(self, name: str) -> bytes:
        """Return the contents of a small file; as `chunks`."""
        return b"".join(self.chunks(name))

    def _open(self, name: str) -> BinaryIO:
        return Path(self.location, name).open("rb")

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

    def remedy(self, name: str, digest: str) -> str:
        """Return what to do about a damaged file that a stream has open."""
        return rebuild_advice(self.where(name))

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn the errors of reading a file into one that names it; a missing file stays one."""
        try:
            yield
        except (FileNotFoundError, ConfigError):
            raise
        except Exception as error:
            raise unreadable(self.where(name), error) from error


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
        with self._reading("."):
            system, path = self._system()
            found = system.ls(path, detail=True)
            return {
                entry["name"].rstrip("/").rsplit("/", 1)[-1]: int(entry["size"])
                for entry in found
                if entry["type"] == "file"
            }

    def _open(self, name: str) -> BinaryIO:
        system, path = self._system()
        return cast(BinaryIO, system.open(f"{path}/{name}", "rb"))

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

    def remedy(self, name: str, digest: str) -> str:
        """Return what to do about a damaged file: it was sound when it arrived."""
        return f"Remove its copy {self._kept(name, digest)}, which is what is damaged, and go on"

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
            if not _CACHED.fullmatch(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if not path.name.startswith("."):
                    kept.append((status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > _STALE_SECONDS:
                    path.unlink()
        total = size + sum(each[1] for each in kept)
        for _, bytes_, path in sorted(kept):
            if total <= self._bytes:
                return
            path.unlink(missing_ok=True)
            (self._cache / f".{path.name}.lock").unlink(missing_ok=True)
            total -= bytes_

    def _system(self) -> tuple[Any, str]:
        """Return the file system of the URL and the path in it.

        fsspec keeps the object of a file system, so this costs nothing after the first call, and
        nothing has to be pickled.
        """
        try:
            system, path = fsspec.core.url_to_fs(self.location)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{self.location}: fsspec cannot read this URL ({error}). Install the package for "
                "its protocol (s3fs for s3://), or give a local directory"
            ) from None
        return system, str(path).rstrip("/")


def folder(location: str | Path, cache: Cache | None = None) -> Folder:
    """Return the files of a local directory or of a URL."""
    return RemoteFolder(str(location), cache or Cache()) if is_url(location) else Folder(location)


def unreadable(where: str, error: Exception) -> RunFailed:
    """Return the error for a file that is there and cannot be read."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    stale = isinstance(error, OSError) and error.errno == errno.ESTALE
    hint = "it was replaced on the server" if stale else "the disk, the network or the permissions"
    return RunFailed(f"{where}: cannot be read ({reason}). Look at {hint}, then start again")


def missing(where: str) -> ConfigError:
    """Return the error for a file that the manifest names and that is not there."""
    parent = where.rsplit("/", 1)[0]
    return ConfigError(
        f"{where}: missing, but the manifest of {parent} refers to it. {rebuild_advice(where)}"
    )
