"""Define the corpora of a data set and the units of work that reading them is divided into."""

from __future__ import annotations

from typing import NamedTuple

from pretrain.config.data_schema import DataSection, Source


class Corpus(NamedTuple):
    """One corpus of a data set."""

    name: str
    """The NAME of [data.corpora.NAME]; "text" or "shakespeare" for a data set of one corpus."""

    source: Source
    """How its files hold documents."""

    paths: tuple[str, ...]
    """Files, glob patterns and URLs of its training documents."""

    text_field: str | None
    """Where a document's text is, or None for the default of the source."""


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
    if data.corpora:
        return [
            Corpus(name, section.source, section.paths, section.text_field)
            for name, section in data.corpora.items()
        ]
    name = "shakespeare" if data.source == "shakespeare" else "text"
    return [Corpus(name, data.source, data.paths, data.text_field)]
