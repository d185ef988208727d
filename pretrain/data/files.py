"""Files that may be local or at a URL: find them, look at them, read them or ranges of them.

Every access of this package to a file that a user names goes through this module, so that whatever
is done about slow or broken storage is done here. A location is an absolute path, or a URL that
`fsspec` reads.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import glob
import importlib
import io
import itertools
import os
import random
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import fsspec
import xxhash

from pretrain.config import ConfigError, RunFailed
from pretrain.config.errors import say
from pretrain.config.run import is_url
from pretrain.data.shards import rebuild_advice
from pretrain.rundir.files import replace_file

_CHUNK = 1 << 22

_BUFFER_BYTES = 2**18
"""Bytes that are read at once of a local file; of a URL, which takes longer to answer, _CHUNK."""


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
        with contextlib.suppress(FileNotFoundError):
            if ask(pattern, lambda: system.info(name))["type"] == "file":
                return [pattern]
        entries = (
            ask(pattern, lambda: system.glob(name, detail=True)) if glob.has_magic(name) else {}
        )
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

    That is the modification time in ns, or of a URL its ETag, its Last-Modified or what fsspec goes
    by; "" where an HTTP server gives neither, because fsspec's HTTP goes by the URL alone.

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
        info = ask(path, lambda: system.info(name))
        version = info.get("ETag") or info.get("Last-Modified")
        if not version and not _is_http(path):
            version = ask(path, lambda: system.ukey(name))
        size = info.get("size")
    if size is None:
        raise ConfigError(
            f"{path}: the server does not tell the size of this file. Copy it to a disk or an "
            "object store"
        )
    return int(size), str(version or "")


def open_stored(path: str) -> io.BufferedReader:
    """Open a location for reading its bytes as they are stored.

    Raises:
        FileNotFoundError: It is missing.
        RunFailed: It cannot be opened.
    """
    with reading(path):
        if is_url(path):
            system, name = store(path)
            size = ask(path, lambda: system.size(name))
            return io.BufferedReader(_Sequential(path, int(size)), _CHUNK)
        return cast(io.BufferedReader, open(path, "rb", _BUFFER_BYTES))


def store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the name of the URL in it.

    fsspec keeps the object of a file system, so this costs nothing after the first call.
    """
    try:
        options = _http_options(SILENCE_S) if _is_http(url) else {}
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url, **options))
    except (ImportError, ValueError) as error:
        remedy = "Install the package for its protocol (s3fs for s3://, gcsfs for gs://)"
        if _is_http(url):
            remedy = "Run `pip install 'pretrain[data]'`"
        raise ConfigError(
            f"{url}: fsspec cannot read this URL ({error}). {remedy}, or correct the URL"
        ) from None


@functools.cache
def _http_options(silence: float) -> Any:
    timeout = importlib.import_module("aiohttp").ClientTimeout
    # Ranges are counted in the bytes of the file, not of a packed answer.
    return {
        "headers": {"Accept-Encoding": "identity"},
        "client_kwargs": {"timeout": timeout(None, sock_connect=silence, sock_read=silence)},
    }


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


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


# ---- Read ranges of a file behind a URL, and ask its server again ----


ATTEMPTS = 8
"""How often a request is made before its error ends the command: over a minute and more."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
"""How long to wait before a request is made again: twice as long each time. Of a server's
Retry-After, no more than LONGEST_WAIT_S is obeyed."""
_SAID_S = 5.0
"""A request that has taken so many seconds, with the wait that follows, is told."""
SILENCE_S = 30.0
"""A request fails when an HTTP server sends nothing for so long, however long the whole takes."""
_LEAST_BYTES = 2**16
"""A range that was cut or came too slowly is asked for by halves, down to this."""
_HOPELESS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Errors that come again however often one asks."""

_T = TypeVar("_T")


def ask(url: str, request: Callable[[], _T]) -> _T:
    """Return what a request to a server brings, made again while its error may pass.

    Args:
        url: What is asked for, for the line that says what is being waited for.
        request: Makes the request.

    Raises:
        FileNotFoundError: The server says that there is no such file.
        Exception: What the last request raised.
    """
    begin = time.monotonic()
    for attempt in itertools.count(1):
        try:
            return request()
        except Exception as raised:
            error = _cause(raised)
            if attempt == ATTEMPTS or not _may_pass(error):
                raise error from None
            wait = _wait_s(error, attempt)
            if time.monotonic() - begin + wait >= _SAID_S:
                say(f"{url}: {type(error).__name__}: {error}. Asking again in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError


def _cause(error: BaseException) -> BaseException:
    """Return why a request failed; FileNotFoundError only if the server said that.

    fsspec's HTTP raises it whatever kept it from looking, and another error when a file that it
    reads is not there (fsspec 2026.9.0, implementations/http.py, HTTPFileSystem._info, HTTPFile).
    Its error for a timeout has no words (asyn.py, sync).
    """
    if isinstance(error, (FileNotFoundError, TimeoutError)) and error.__cause__ is not None:
        return _cause(error.__cause__)
    return FileNotFoundError(errno.ENOENT, str(error)) if _status(error) in (404, 410) else error


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error tells, if it is of such a kind."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    if status is None:
        return not isinstance(error, (*_HOPELESS, ConfigError, RunFailed))
    return status in (408, 425, 429) or status >= 500


def _wait_s(error: BaseException, attempt: int) -> float:
    """Return how long to wait after so many attempts, at least as long as the server asks for."""
    # By chance, so that a thousand ranks that were refused together do not come back together.
    wait: float = FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1)
    headers = getattr(error, "headers", None) or {}
    # The other form of the header, a date, is rare: then the time doubles as without it.
    with contextlib.suppress(ValueError):
        wait = max(wait, float(headers.get("Retry-After", 0)))
    return min(wait, LONGEST_WAIT_S)


class NoRanges(RunFailed):
    """A server does not answer with a part of a file."""


class Remote:
    """A file behind a URL, of which ranges are read. Several threads may read."""

    def __init__(self, url: str, size: int) -> None:
        """Nothing is asked of the server yet.

        Args:
            url: The file.
            size: Its bytes, as a manifest or the server says.
        """
        self.url, self.size = url, size

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset`, or fewer if the file ends before.

        Raises:
            NoRanges: The server does not answer with a part of a file.
            Exception: As `ask`.
        """
        system, name = store(self.url)
        content, step = b"", size

        def part() -> bytes:
            nonlocal step
            asked, step = min(step, size - len(content)), max(step // 2, _LEAST_BYTES)
            options = {"size": self.size, "cache_type": "none"}
            with system.open(name, "rb", **options) as file:
                file.seek(offset + len(content))
                try:
                    return cast(bytes, file.read(asked))
                except ValueError:
                    raise NoRanges(
                        f"{self.url}: cannot be read: its server does not answer with parts of a "
                        "file (Range). Download the data set, and give its directory"
                    ) from None

        size = min(size, self.size - offset)
        while len(content) < size and (more := ask(self.url, part)):
            content += more
        return content


class _Sequential(io.RawIOBase):
    """A file behind a URL as a stream that can seek."""

    def __init__(self, url: str, size: int) -> None:
        self._remote, self._position = Remote(url, size), 0
        self._copy: int | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._remote.size}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if self._copy is not None:
            os.close(self._copy)
            self._copy = None
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the position on and return the number of bytes; 0 at the end."""
        remote, at = self._remote, self._position
        size = max(0, min(len(buffer), remote.size - at))
        with reading(remote.url):
            content = self._read(size, at)
            if len(content) != size:
                raise OSError(errno.EIO, f"it ends at byte {at + len(content)} of {remote.size}")
        buffer[:size] = content
        self._position += size
        return size

    def _read(self, size: int, offset: int) -> bytes:
        if self._copy is None:
            try:
                return self._remote.read(size, offset)
            except NoRanges:
                # The whole file is copied, and the copy is read.
                system, name = store(self._remote.url)
                self._copy, path = tempfile.mkstemp()
                try:
                    ask(self._remote.url, lambda: system.get_file(name, path))
                finally:
                    os.unlink(path)
        return os.pread(self._copy, size, offset)


# ---- The files of a split, in a local directory or at a URL ----


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

    def sizes(self) -> dict[str, int] | None:
        """Return the size of every file; None where only reading tells."""
        with reading(self.location), os.scandir(self.location) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file.

        Raises:
            FileNotFoundError: if it is missing.
            RunFailed: if it cannot be read.
        """
        where = self.where(name)
        with reading(where), open_stored(where) as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def read(self, name: str) -> bytes:
        """Return the contents of a small file; as `chunks`."""
        return b"".join(self.chunks(name))

    def open(self, name: str, size: int) -> Descriptor | Remote:
        """Open a file of which ranges are read.

        Args:
            name: The file.
            size: Its bytes, as the manifest says.

        Raises:
            FileNotFoundError: if it is missing.
            OSError: if it cannot be opened.
        """
        return Descriptor(self.where(name))

    def local(self, name: str) -> Path:
        """Return the path of a local file with the content of a small file."""
        return Path(self.location, name)


class Descriptor:
    """An open local file, closed when the last one who uses it lets go."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset`, or fewer if the file ends before."""
        content = b""
        # A network file system may return less than there is. Nothing at all is the end.
        while more := os.pread(self.number, size - len(content), offset + len(content)):
            content += more
        return content

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class RemoteFolder(Folder):
    """The URL of a split, of whose files only those bytes are fetched that are read."""

    def parent(self) -> Folder:
        """Return the folder above: the data set."""
        return RemoteFolder(self.location.rstrip("/").rsplit("/", 1)[0])

    def sizes(self) -> dict[str, int] | None:
        """Return None: not every server lists a folder, and the manifest has the sizes."""
        return None

    def open(self, name: str, size: int) -> Descriptor | Remote:
        """Return a file of which ranges are read; nothing is fetched yet."""
        return Remote(self.where(name), size)

    def local(self, name: str) -> Path:
        """Return the path of a copy, which this process removes when it ends."""
        content = self.read(name)
        path = Path(_copies().name, f"{xxhash.xxh3_128_hexdigest(content)}-{name}")
        if not path.exists():
            replace_file(path, content)
        return path


@functools.cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """Return this process's folder for copies of small files, removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="pretrain-")


def folder(location: str | Path) -> Folder:
    """Return the files of a local directory or of a URL."""
    return RemoteFolder(str(location)) if is_url(location) else Folder(location)


def missing(where: str, manifest: str | None = None) -> ConfigError:
    """Return the error for a file that a manifest, by default beside it, names and lacks."""
    manifest = manifest or f"{where.rsplit('/', 1)[0]}/manifest.json"
    return ConfigError(f"{where}: missing, but {manifest} names it. {rebuild_advice(manifest)}")
