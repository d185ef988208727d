"""Define what the readers of all formats yield, and how much text a document may hold."""

from __future__ import annotations

from typing import NamedTuple

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
    try:
        return Found(offset, raw.decode())
    except UnicodeDecodeError as error:
        return Found(
            offset,
            "",
            f"byte {error.start} of this document is not UTF-8 ({error.reason}). Convert the file, "
            "as in `iconv -f latin1 -t utf-8`, or remove the document",
        )


def too_long(offset: int, limit: int) -> Found:
    """Return what stands for a document of more than `limit` bytes."""
    return Found(offset, "", f"the document is longer than {limit} bytes. Divide or remove it")
