"""Define the corpora of a data set and the units of work that reading them is divided into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pretrain.config.data_schema import CorpusSection, DataSection, Source

TEXT_FIELDS = {"jsonl": "text", "parquet": "text", "webdataset": "txt"}
"""Source -> where a document's text is unless text_field says so."""


class Corpus(NamedTuple):
    """One corpus of a data set."""

    name: str
    """The NAME of [data.corpora.NAME]; "text" or "shakespeare" for a data set of one corpus."""

    source: Source
    """How its files hold documents."""

    paths: tuple[str, ...]
    """Files, glob patterns and URLs of its training documents."""

    text_field: str
    """Where a document's text is; empty where the source has only text."""


class Piece(NamedTuple):
    """A file, or a range of one.

    A document belongs to the piece in which it starts.
    """

    path: str
    """Absolute path, or URL."""

    start: int
    """First byte of the file as it is stored, or first row group (parquet)."""

    end: int
    """Byte or row group before which the piece ends; the size, for a whole file."""


class Task(NamedTuple):
    """A fixed part of a corpus: the unit in which a data set is built."""

    number: int
    """Position among the tasks of the split, from 0."""

    corpus: str
    """Name of the corpus that the pieces belong to."""

    pieces: tuple[Piece, ...]
    """What to read, in this order."""


def corpora(data: DataSection) -> list[Corpus]:
    """Return the corpora of a data set in the order of the config."""
    name = "shakespeare" if data.source == "shakespeare" else "text"
    named: Mapping[str, CorpusSection | DataSection] = data.corpora or {name: data}
    return [
        Corpus(name, each.source, each.paths, each.text_field or TEXT_FIELDS.get(each.source, ""))
        for name, each in named.items()
    ]
