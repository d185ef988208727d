"""Read the documents of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pretrain.config import ConfigError
from pretrain.config.data_schema import Source
from pretrain.data.document import Document
from pretrain.data.sources.corpus import Corpus, Piece, Task
from pretrain.data.sources.found import Found
from pretrain.data.sources.locations import unreadable
from pretrain.data.sources.parquet import read_parquet
from pretrain.data.sources.plain import read_blank_lines, read_file, read_jsonl
from pretrain.data.sources.streams import Damaged
from pretrain.data.sources.tars import read_webdataset

_READERS: dict[Source, Callable[[Piece, Corpus], Iterator[Found]]] = {
    "shakespeare": read_file,
    "text": read_file,
    "blank_lines": read_blank_lines,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "webdataset": read_webdataset,
}


def read(task: Task, corpus: Corpus, skip: Callable[[str], None] | None) -> Iterator[Document]:
    """Yield the documents that start in the pieces of a task, decoded and not cleaned.

    Args:
        task: The task.
        corpus: The corpus that it belongs to.
        skip: Called with "file:offset: reason" for each document that cannot be read, which is
            then left out. The rest of a damaged or truncated stream is reported once.

    Raises:
        ConfigError: if a document cannot be read and there is no `skip`, or if a file is missing
            or is not as it was planned.
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
    """Yield what the reader of the corpus finds in a piece; damage as the last thing found."""
    try:
        yield from _READERS[corpus.source](piece, corpus)
    except Damaged as damage:
        yield Found(damage.offset, "", f"{damage.reason}; the rest of the file is lost. Restore it")
    except OSError as error:
        raise unreadable(piece.path, error) from None
