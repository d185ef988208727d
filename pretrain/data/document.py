"""Define a document of a corpus, and the splits that a data set is divided into."""

from __future__ import annotations

from typing import Literal, NamedTuple

Split = Literal["train", "validation"]


class Document(NamedTuple):
    """One document as its file holds it, decoded and not cleaned."""

    text: str
    """The text, without a byte order mark."""

    piece: int
    """Index of the piece of its task that it was read from."""

    offset: int
    """Where it begins in the file: a byte offset (in what a compressed file unpacks to), a row
    number (parquet) or a sample number (webdataset), from 0."""
