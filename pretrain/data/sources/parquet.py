"""Read documents from Parquet files: one per row, in a column of text.

Only the text column is read, one page at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pretrain.config import ConfigError
from pretrain.data import sources
from pretrain.data.files import Location, open_stored
from pretrain.data.sources import (
    Corpus,
    Found,
    Part,
    Piece,
    Source,
    check_reaches,
    decoded,
    optional,
    register,
)

_ROWS = 256
"""Rows that are decoded at once."""


@register
class Parquet(Source):
    """A Parquet file with one document per row. Its parts are row groups."""

    name = "parquet"
    endings = (".parquet",)
    text_field = "text"
    in_bytes = False

    def parts(self, corpus: Corpus, file: Location, bytes_per_task: int) -> Iterator[Part]:
        """Yield each row group, with the bytes of its text according to the footer."""
        with _open(file.path) as opened:
            column = _column(file.path, opened, self.field(corpus))
            groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
        for number, group in enumerate(groups):
            size = group.column(column).total_uncompressed_size
            yield Part(Piece(file.path, number, number + 1), size)

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield the documents of the row groups of a piece.

        A damaged row group counts as one document that cannot be read.
        """
        pyarrow = optional("pyarrow", piece.path)
        with _open(piece.path) as file:
            field = self.field(corpus)
            _column(piece.path, file, field)
            groups = [
                file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)
            ]
            check_reaches(piece, len(groups))
            for group in range(piece.start, piece.end):
                row = first = sum(groups[:group])
                try:
                    for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[field]):
                        for value in batch.column(0):
                            yield _document(row, value)
                            row += 1
                except (OSError, pyarrow.ArrowException) as error:
                    lost = first + groups[group] - row
                    yield Found(row, "", f"this row and {lost - 1} more are damaged ({error})")


def _document(row: int, value: Any) -> Found:
    """Return the text of a cell."""
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return Found(row, "", f"byte {error.start} of this row's text is not UTF-8")
    if text is None:
        return Found(row, "", "this row has no text (null). Remove it")
    # A character has at most four bytes, so most texts need not be encoded.
    if len(text) * 4 > sources.MAX_DOCUMENT_BYTES < len(text.encode()):
        return decoded(row, None)
    return Found(row, text)


@contextmanager
def _open(path: str) -> Iterator[Any]:
    """Open a Parquet file, and raise ConfigError if it is not one."""
    pyarrow, parquet = optional("pyarrow", path), optional("pyarrow.parquet", path)
    with open_stored(path) as stored:
        try:
            file = parquet.ParquetFile(stored, pre_buffer=False, buffer_size=2**20)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(
                f"{path}:0: not a Parquet file, or a damaged one ({error}). Restore it, or leave "
                "it out of the paths of its corpus"
            ) from None
        with file:
            yield file


def _column(path: str, file: Any, field: str) -> int:
    """Return the position of the column of the text.

    Raises:
        ConfigError: if there is no column of that name, or it does not hold text.
    """
    types = optional("pyarrow", path).types
    names = file.schema_arrow.names
    if names.count(field) != 1:
        raise ConfigError(
            f"{path}: text_field = {field!r}: the file has the columns {', '.join(names)}. Name "
            "the one that holds the text"
        )
    kind = file.schema_arrow.field(field).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ConfigError(
            f"{path}: text_field = {field!r}: the column holds {kind}, not text. Name the one that "
            "holds the text"
        )
    # The file's columns are the leaves of nested columns, so positions in the two lists may differ.
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    return int(leaves.index(field))
