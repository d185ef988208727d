"""Define what a source of documents answers, and the names of all sources.

A source is a kind of file: one class, in one file of this folder. It says which names its files
have, how a file is cut into pieces, and how the documents of a piece are read; `register` makes it
a value of `source` in [data] and [data.corpora.NAME]. Nothing outside its file knows its name.
"""

from __future__ import annotations

import codecs
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeVar

from pretrain.config import ConfigError
from pretrain.data.manifest import Split

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What a file begins with whose text is stored as UTF-16, or as UTF-32 of the same byte order."""
TO_UTF_8 = "Save it as UTF-8, as `iconv -f utf-16 -t utf-8` does"


class Corpus(NamedTuple):
    """One corpus of a data set."""

    name: str
    """The NAME of [data.corpora.NAME]; "text" or "shakespeare" for a data set of one corpus."""

    source: str | None
    """How its files hold documents; None: as the ends of their names say."""

    paths: tuple[str, ...]
    """Files, glob patterns and URLs of its training documents."""

    text_field: str | None
    """Where a document's text is; None: where its source says."""


class Piece(NamedTuple):
    """A file, or a range of one.

    A document belongs to the piece in which it starts.
    """

    path: str
    """Absolute path, or URL."""

    start: int
    """First byte of the file as it is stored, or first of its parts, such as row groups."""

    end: int
    """Byte or part before which the piece ends; the size, for a whole file."""


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
    """Where it begins in the file: a byte offset (in what a compressed file unpacks to), or a
    number of what the file consists of (its row or sample), from 0."""


# ---- Define what the readers of all formats yield, and how much text a document may hold ----


MAX_DOCUMENT_BYTES = 2**26
"""A longer document of a file of many is not read: 64 MiB, ten times the longest books. JSON may
take twenty times its size in memory."""

MAX_FILE_BYTES = 2**30
"""A longer file is not read as one document: 1 GiB."""


class Found(NamedTuple):
    """A document, or why it cannot be read."""

    offset: int
    """Where it begins, as Document.offset says."""

    text: str
    """The text; empty if the document cannot be read."""

    fault: str = ""
    """Why the document cannot be read; empty if it can."""


def decoded(offset: int, raw: bytes | bytearray) -> Found:
    """Decode the UTF-8 of a document that begins at `offset`."""
    if _is_utf_16(raw):
        return Found(offset, "", f"the file is stored as UTF-16, and not as UTF-8. {TO_UTF_8}")
    try:
        return Found(offset, raw.decode())
    except UnicodeDecodeError as error:
        return Found(
            offset,
            "",
            f"byte {error.start} of this document is not UTF-8 ({error.reason}). Convert the file, "
            "as in `iconv -f latin1 -t utf-8`, or remove the document",
        )


def _is_utf_16(raw: bytes | bytearray) -> bool:
    """Return True for text in UTF-16, with its mark or, if most characters are Latin, without.

    Such text without a mark is valid UTF-8, with a zero behind every letter.
    """
    if raw.startswith(UTF_16):
        return True
    if len(raw) < 8 or 0 not in raw:
        return False
    even, odd = raw[::2].count(0) * 2 / len(raw), raw[1::2].count(0) * 2 / len(raw)
    return min(even, odd) < 0.1 and max(even, odd) > 0.9


def too_long(offset: int, limit: int) -> Found:
    """Return what stands for a document of more than `limit` bytes."""
    return Found(offset, "", f"the document is longer than {limit} bytes. Divide or remove it")


class Damaged(Exception):
    """The rest of a stream cannot be read."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


class Location(NamedTuple):
    """A file that was found. Its content was not looked at."""

    path: str
    """Absolute path, or URL."""

    size: int
    """Bytes."""

    identity: str
    """Equal for two names of one file: the path after every symlink is followed, or the URL."""

    is_packed: bool
    """It is compressed as a whole, as its name says."""


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
            f"{user}: the package {name} is missing. Run `pip install 'pretrain[data]'`"
        ) from None


# ---- Define the sources ----


class Part(NamedTuple):
    """A piece that is not divided further, and the bytes that reading it takes."""

    piece: Piece
    bytes: int


class Source(ABC):
    """A kind of file that holds documents."""

    name: ClassVar[str]
    """The value of `source` that stands for it."""

    endings: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of files that are read so where no `source` is set. Behind them may stand
    the end of a compressed file's name."""

    text_field: ClassVar[str] = ""
    """Default of a corpus's `text_field`; empty where its documents have no fields."""

    can_be_cut: ClassVar[bool] = False
    """A range of a file can be read without what stands before it."""

    in_bytes: ClassVar[bool] = True
    """Pieces are ranges of bytes of the file as it is stored; otherwise of numbered parts."""

    text_per_byte: ClassVar[float | None] = None
    """Bytes of text that a byte of a file is taken to hold in an estimate. None: documents' offsets
    are bytes, so that it can be seen."""

    has_own_text: ClassVar[bool] = False
    """A corpus of it has no paths: `own_files` knows its files."""

    def own_files(self, split: Split) -> list[str]:
        """Return the paths of the files of a source that has its own text."""
        return []

    def field(self, corpus: Corpus) -> str:
        """Return where the text of a corpus's documents is."""
        return corpus.text_field or self.text_field

    def parts(self, corpus: Corpus, file: Location, bytes_per_task: int) -> Iterator[Part]:
        """Yield the smallest parts that a file is divided into, in order.

        Args:
            corpus: Whose file it is.
            file: The file.
            bytes_per_task: What a part should not exceed.

        Raises:
            ConfigError: The file cannot be a file of this source.
        """
        is_cut = self.can_be_cut and not file.is_packed
        count = max(1, -(-file.size // bytes_per_task)) if is_cut else 1
        for start, end in pairwise(file.size * i // count for i in range(count + 1)):
            yield Part(Piece(file.path, start, end), end - start)

    @abstractmethod
    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield what stands for each document that starts in a piece.

        Raises:
            ConfigError: The file is missing or not as it was when the pieces were made.
            Damaged: The rest of the file cannot be read.
        """


SOURCES: dict[str, Source] = {}
"""Name -> source. Every module of this folder is imported with the package."""

_S = TypeVar("_S", bound=type[Source])


def register(source: _S) -> _S:
    """Make a class a source; for use as a decorator."""
    SOURCES[source.name] = source()
    return source
