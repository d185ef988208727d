"""Read a file of TOML, however an editor has stored its text."""

from __future__ import annotations

import codecs
import tomllib
from pathlib import Path
from typing import Any

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What a file begins with whose text is stored as UTF-16, or as UTF-32 of the same byte order."""
TO_UTF_8 = "Save it as UTF-8, as `iconv -f utf-16 -t utf-8` does"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file in UTF-8, with or without a byte order mark.

    Raises:
        OSError: The file cannot be read.
        UnicodeError: It is not UTF-8.
        ValueError: It is not TOML; also for what Python refuses, such as integers of thousands of
            digits.
        RecursionError: Its brackets are a thousand deep.
    """
    return tomllib.loads(read_toml_text(path))


def read_toml_text(path: Path) -> str:
    """Return the text of a TOML file in UTF-8, with or without a byte order mark.

    Lines may end as on Unix, on Windows or on an old Mac; those returned end with \\n alone.

    Raises:
        OSError: The file cannot be read.
        UnicodeError: It is not UTF-8.
    """
    content = path.read_bytes()
    if content.startswith(UTF_16):
        begin = f"it begins with {content[:2]!r}"
        raise UnicodeError(f"the file is stored as UTF-16: {begin}. {TO_UTF_8}")
    text = content.decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")
