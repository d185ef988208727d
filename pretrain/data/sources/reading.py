"""Read the documents of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pretrain.data.document import Document
from pretrain.data.sources.corpus import Corpus, Task


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
    raise NotImplementedError
