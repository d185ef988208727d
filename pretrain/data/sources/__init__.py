"""Find the files of corpora, divide them into tasks, and read the documents of a task.

`corpora` names the corpora of a config, `plan` divides their files into tasks, and `read` yields
the documents of one task. Every document of a file is read exactly once, whatever the tasks.

A source is a file format: one class, in one file of this folder. It defines the names of its files,
how a file is cut into pieces, and how the documents of a piece are read; `register` makes it a
value of `source` in [data] and [data.corpora.NAME]. No other file mentions its name.
"""

from __future__ import annotations

import bz2
import importlib
import io
import lzma
import pkgutil
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeVar

from pretrain.config import ConfigError
from pretrain.config.schema import CorpusSection, DataSection
from pretrain.data.files import Location, find, locate, look, open_stored, unreadable
from pretrain.data.shards import Split


class Corpus(NamedTuple):
    """One corpus of a data set."""

    name: str
    """The NAME of [data.corpora.NAME]; "text" or "shakespeare" for a data set of one corpus."""

    source: str | None
    """Format of its files; None: decided by the ends of their names."""

    paths: tuple[str, ...]
    """Files and glob patterns of its training documents."""

    text_field: str | None
    """Field that holds a document's text; None: the source's default."""


class Piece(NamedTuple):
    """A file, or a range of one.

    A document belongs to the piece in which it starts.
    """

    path: str
    """Absolute path."""

    start: int
    """First byte of the stored file, or index of its first part, such as a row group."""

    end: int
    """Byte or part before which the piece ends; for a whole file, its size."""


class Task(NamedTuple):
    """A fixed part of a corpus: the unit in which a data set is built."""

    number: int
    """Position among the tasks of the split, from 0."""

    corpus: str
    """Name of the corpus that the pieces belong to."""

    pieces: tuple[Piece, ...]
    """What to read, in this order."""


class Document(NamedTuple):
    """One document as its file holds it, decoded and not cleaned."""

    text: str
    """The text, without a byte order mark."""

    piece: int
    """Index of the piece of its task that it was read from."""

    offset: int
    """Start of the document in the file: a byte offset in the uncompressed content, or the number
    of its row or sample, from 0."""


# ---- Define what the readers of all formats yield, and how much text a document may hold ----


MAX_DOCUMENT_BYTES = 2**26
"""Limit on a document in a file with several documents: 64 MiB, ten times the longest books. JSON
may take twenty times its size in memory."""

MAX_FILE_BYTES = 2**30
"""Limit on a file that is one document: 1 GiB."""


class Found(NamedTuple):
    """A document, or the reason why it cannot be read."""

    offset: int
    """Start of the document, as in Document.offset."""

    text: str
    """The text; empty if the document cannot be read."""

    fault: str = ""
    """Why the document cannot be read; empty if it can."""


class Damaged(Exception):
    """The rest of a stream cannot be read."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


def decoded(offset: int, raw: bytes | bytearray | None, limit: int | None = None) -> Found:
    """Decode the UTF-8 of a document.

    Args:
        offset: Start of the document, as in Document.offset.
        raw: Its bytes; None if they were too many to hold.
        limit: Largest number of bytes. Default: MAX_DOCUMENT_BYTES.
    """
    limit = limit or MAX_DOCUMENT_BYTES
    if raw is None or len(raw) > limit:
        fault = (
            f"the document is longer than {limit} bytes. Divide or remove it, or set source to "
            "what the files are"
        )
        return Found(offset, "", fault)
    # UTF-16 without a byte order mark may be valid UTF-8, with a NUL beside every letter.
    if 3 * raw.count(0) > len(raw) > 8:
        fault = "this document is UTF-16 or UTF-32. Convert the file, as in `iconv -t utf-8`"
        return Found(offset, "", fault)
    try:
        return Found(offset, raw.decode())
    except UnicodeDecodeError as error:
        fault = (
            f"byte {error.start} of this document is not UTF-8 ({error.reason}). Convert the file, "
            "as in `iconv -f latin1 -t utf-8`, or remove the document"
        )
        return Found(offset, "", fault)


def optional(package: str, user: str) -> Any:
    """Import a package of the extra [data].

    Args:
        package: The module.
        user: What needs it, for the message.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ConfigError(
            f"{user}: the package {name} is missing. Run `pip install -e '.[data]'` in the clone"
        ) from None


# ---- Define the sources ----


class Part(NamedTuple):
    """A piece that is not divided further, and the bytes that reading it takes."""

    piece: Piece
    bytes: int


class Source(ABC):
    """A kind of file that holds documents."""

    name: ClassVar[str]
    """Its value of `source`."""

    endings: ClassVar[tuple[str, ...]] = ()
    """Ends of file names that select this source if `source` is not set. The ending of a compressed
    file may follow."""

    text_field: ClassVar[str] = ""
    """Default of a corpus's `text_field`; empty if its documents have no fields."""

    can_be_cut: ClassVar[bool] = False
    """Whether a range of a file can be read without the preceding bytes."""

    in_bytes: ClassVar[bool] = True
    """Whether pieces are ranges of bytes of the stored file, rather than of numbered parts."""

    has_own_text: ClassVar[bool] = False
    """Whether `own_files` gives its files, so that a corpus has no paths."""

    def own_files(self, split: Split) -> list[str]:
        """Return the paths of the files of a source that has its own text."""
        return []

    def field(self, corpus: Corpus) -> str:
        """Return the field that holds the text of a corpus's documents."""
        return corpus.text_field or self.text_field

    def parts(self, corpus: Corpus, file: Location, bytes_per_task: int) -> Iterator[Part]:
        """Yield the smallest parts that a file is divided into, in order.

        Args:
            corpus: The corpus of the file.
            file: The file.
            bytes_per_task: Size that a part should not exceed, in bytes.

        Raises:
            ConfigError: The file cannot be a file of this source.
        """
        is_cut = self.can_be_cut and not compression_of(file.path)
        count = max(1, -(-file.size // bytes_per_task)) if is_cut else 1
        for start, end in pairwise(file.size * i // count for i in range(count + 1)):
            yield Part(Piece(file.path, start, end), end - start)

    @abstractmethod
    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield each document that starts in a piece, or why it cannot be read.

        Raises:
            ConfigError: The file has changed since the pieces were made.
            Damaged: The rest of the file cannot be read.
        """


SOURCES: dict[str, Source] = {}
"""Name -> source. Every module of this folder is imported with the package."""

_S = TypeVar("_S", bound=type[Source])


def register(source: _S) -> _S:
    """Register a class as a source; a decorator."""
    SOURCES[source.name] = source()
    return source


def source_of(corpus: Corpus, path: str) -> Source:
    """Return the source of a file: that of its corpus, or by the end of the file's name."""
    if corpus.source:
        return SOURCES[corpus.source]
    unpacked = path.removesuffix(compression_of(path))
    named = (each for each in SOURCES.values() if unpacked.endswith(each.endings))
    return next(named, SOURCES["text"])


# ---- Open a file as a stream of its uncompressed bytes ----


_STEP_BYTES = 2048
"""Compressed bytes that are decompressed at once. At the highest ratio of any format (zstd: 1 to
32,768) they give 64 MiB."""


def _zstandard() -> tuple[Any, type[Exception]]:
    zstandard = optional("zstandard", ".zst files")
    # Files of `zstd --long=31` need the largest possible window.
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    return unpacker, zstandard.ZstdError


COMPRESSIONS: dict[str, Callable[[], tuple[Any, type[Exception]]]] = {
    ".gz": lambda: (zlib.decompressobj(31), zlib.error),
    ".xz": lambda: (lzma.LZMADecompressor(), lzma.LZMAError),
    ".zst": _zstandard,
    ".bz2": lambda: (bz2.BZ2Decompressor(), OSError),
}
"""End of the names of compressed files -> a function that returns a new decompressor of one member,
and the error that it raises."""


def compression_of(path: str) -> str:
    """Return the ending of a compressed file's name, or "" if it is not compressed."""
    return next((suffix for suffix in COMPRESSIONS if path.endswith(suffix)), "")


def end_of(piece: Piece) -> int:
    """Return the offset in the uncompressed stream before which the documents of a piece start."""
    return sys.maxsize if compression_of(piece.path) else piece.end


def check_reaches(piece: Piece, end: int) -> None:
    """Raise ConfigError if a file is now shorter than a piece of it."""
    if end < piece.end:
        raise ConfigError(
            f"{piece.path}:{end}: the file ends here, and reached to {piece.end} when the build "
            "was planned. Restore it, or build the data set anew"
        )


def open_piece(piece: Piece) -> io.BufferedReader:
    """Open the file of a piece as a stream of its uncompressed bytes, from its beginning.

    The stream raises Damaged if compressed data are damaged or end too early.

    Raises:
        ConfigError: The file is shorter than planned.
    """
    check_reaches(piece, look(piece.path)[0])
    stored = open_stored(piece.path)
    suffix = compression_of(piece.path)
    return io.BufferedReader(_Unpacked(stored, suffix), 2**18) if suffix else stored


class _Unpacked(io.RawIOBase):
    """The content of a compressed file, decompressed member by member.

    Python's own readers silently stop at a damaged second member (lzma, bz2), and zstandard's at
    data that end too early.
    """

    def __init__(self, stored: io.BufferedReader, suffix: str) -> None:
        self._stored = stored
        self._suffix = suffix
        # The unpacker is None between two members.
        self._unpacker: Any
        self._unpacker, self._error = COMPRESSIONS[suffix]()
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
                raise Damaged(self._offset, f"the {self._suffix} data end too early")
            self._unpack()
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        self._offset += count
        return count

    def _unpack(self) -> None:
        """Decompress the available bytes, up to the end of their member."""
        if self._unpacker is None:
            # Skip zeros that pad a file to the size of a tape block.
            self._packed = self._packed.lstrip(b"\0")
            if not self._packed:
                return
            self._unpacker, self._error = COMPRESSIONS[self._suffix]()
        try:
            self._unpacked = memoryview(self._unpacker.decompress(self._packed))
        except self._error as error:
            fault = f"the {self._suffix} data are damaged, or none ({error})"
            raise Damaged(self._offset, fault) from None
        if self._unpacker.eof:
            self._packed, self._unpacker = self._unpacker.unused_data, None
        else:
            self._packed = b""


# ---- Divide the files of corpora into tasks ----


def corpora(data: DataSection) -> list[Corpus]:
    """Return the corpora of a data set in the order of the config.

    Raises:
        ConfigError: A corpus names a source that does not exist.
    """
    alone = SOURCES.get(data.source or "")
    name = alone.name if alone and alone.has_own_text else "text"
    named: Mapping[str, CorpusSection | DataSection] = data.corpora or {name: data}
    keys = {_key(data, name, "source"): each.source for name, each in named.items()}
    for key, source in {"data.source": data.source, **keys}.items():
        if source is not None and source not in SOURCES:
            raise ConfigError(
                f"{key} = {source!r}: no such source. Choose one of "
                f"{', '.join(SOURCES)}, or leave it out where the ends of the files' names tell"
            )
    shared = None if alone and alone.has_own_text and data.corpora else data.source
    return [
        Corpus(name, each.source or shared, each.paths, each.text_field)
        for name, each in named.items()
    ]


def plan(data: DataSection) -> dict[Split, list[Task]]:
    """Return the tasks of both splits, the same whatever the number of processes.

    Validation has tasks only if whole files are held out: with data.validation_paths, and for
    sources with their own text. Files are not opened, except to read an index at their end.

    Raises:
        ConfigError: A pattern matches no file, or nothing is left to train on.
        RunFailed: A file cannot be read.
    """
    named = corpora(data)
    training = {corpus.name: _files(data, corpus) for corpus in named}
    held_out = find("data.validation_paths", data.validation_paths)
    validation = _by_corpus(held_out, training, named)
    out = {location.identity for location in held_out}
    for corpus in named:
        left = [file for file in training[corpus.name] if file.identity not in out]
        if not left:
            raise ConfigError(
                f"data.validation_paths = {list(data.validation_paths)}: these patterns hold out "
                f"every file of {_key(data, corpus.name, 'paths')}, so nothing is left to train "
                "on. Hold out fewer files"
            )
        training[corpus.name] = left
        if corpus.source:
            validation[corpus.name] += map(locate, SOURCES[corpus.source].own_files("validation"))
    return {
        "train": _tasks(data, named, training),
        "validation": _tasks(data, named, validation),
    }


def _key(data: DataSection, corpus: str, key: str) -> str:
    """Return the name of a corpus's key in the config."""
    return f"data.corpora.{corpus}.{key}" if data.corpora else f"data.{key}"


def _files(data: DataSection, corpus: Corpus) -> list[Location]:
    """Return the training files of a corpus, of which some may be held out."""
    if corpus.source and (source := SOURCES[corpus.source]).has_own_text:
        return [locate(path) for path in source.own_files("train")]
    key = _key(data, corpus.name, "paths")
    if not corpus.paths:
        raise ConfigError(
            f"{key} = []: no files are given. Set files or glob patterns, as in {key} = "
            '["corpus/**/*.txt"]'
        )
    return find(key, corpus.paths)


def _by_corpus(
    held_out: list[Location], training: dict[str, list[Location]], named: list[Corpus]
) -> dict[str, list[Location]]:
    """Return the held-out files by corpus, which determines how they are read.

    It is the corpus whose paths name the file, or the first corpus if all are read alike.

    Raises:
        ConfigError: A file could be read in several ways.
    """
    owner = {file.identity: name for name, files in training.items() for file in files}
    alike = len({(corpus.source, corpus.text_field) for corpus in named}) == 1
    validation: dict[str, list[Location]] = {corpus.name: [] for corpus in named}
    for file in held_out:
        name = owner.get(file.identity, named[0].name if alike else None)
        if name is None:
            raise ConfigError(
                f"data.validation_paths: {file.path} belongs to no corpus, and the corpora are not "
                "all read alike. Add the file to the paths of the corpus as whose documents it is "
                "to be read; it is held out of its training"
            )
        validation[name].append(file)
    return validation


def _tasks(data: DataSection, named: list[Corpus], files: dict[str, list[Location]]) -> list[Task]:
    tasks: list[Task] = []
    for corpus in named:
        parts = (
            part
            for file in files[corpus.name]
            for part in source_of(corpus, file.path).parts(corpus, file, data.bytes_per_task)
        )
        for pieces in _grouped(parts, data.bytes_per_task):
            tasks.append(Task(len(tasks), corpus.name, pieces))
    return tasks


def _grouped(parts: Iterable[Part], bytes_per_task: int) -> Iterator[tuple[Piece, ...]]:
    """Yield the pieces of each task: as many parts as fit, at least one."""
    pieces: list[Piece] = []
    total = 0
    for piece, size in parts:
        if pieces and total + size > bytes_per_task:
            yield tuple(pieces)
            pieces, total = [], 0
        total += size
        if pieces and pieces[-1].path == piece.path:
            piece = pieces.pop()._replace(end=piece.end)
        pieces.append(piece)
    if pieces:
        yield tuple(pieces)


def read(task: Task, corpus: Corpus, skip: Callable[[str], None] | None) -> Iterator[Document]:
    """Yield the documents that start in the pieces of a task, decoded and not cleaned.

    Args:
        task: The task.
        corpus: The corpus that it belongs to.
        skip: Called with "file:offset: reason" for each document that cannot be read, which is
            then left out. The rest of a damaged or truncated stream is reported once.

    Raises:
        ConfigError: A document cannot be read and `skip` is None, or a file is missing or has
            changed since the build was planned.
    """
    for index, piece in enumerate(task.pieces):
        for offset, text, fault in _found(piece, corpus):
            if not fault:
                yield Document(text, index, offset)
            elif skip is None:
                raise ConfigError(
                    f"{piece.path}:{offset}: {fault}. Or let such documents be skipped and "
                    "counted, with cleaning.max_skipped_documents"
                )
            else:
                skip(f"{piece.path}:{offset}: {fault}")


def _found(piece: Piece, corpus: Corpus) -> Iterator[Found]:
    """Yield what the source of a file finds in a piece; damage is reported as the last item."""
    try:
        yield from source_of(corpus, piece.path).read(piece, corpus)
    except Damaged as damage:
        yield Found(damage.offset, "", f"{damage.reason}; the rest of the file is lost. Restore it")
    except OSError as error:
        raise unreadable(piece.path, error) from None


for _module in pkgutil.iter_modules(__path__):
    # Import every file of this folder, so that its sources are registered.
    importlib.import_module(f"{__name__}.{_module.name}")
