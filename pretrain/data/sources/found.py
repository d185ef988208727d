"""Define what the readers of all formats yield, and how much text a document may hold."""

from __future__ import annotations

from typing import NamedTuple

from pretrain.config.toml_file import TO_UTF_8, UTF_16

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
