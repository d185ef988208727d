"""Find the files of corpora, divide them into tasks, and read the documents of a task.

`corpora` names the corpora of a config, `plan` divides their files into tasks, and `read` yields
the documents of one task. Every document of a file is read exactly once, whatever the tasks.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping

from pretrain.config import ConfigError
from pretrain.config.schema import CorpusSection, DataSection
from pretrain.data.manifest import Split
from pretrain.data.sources.base import (
    SOURCES,
    Corpus,
    Damaged,
    Document,
    Found,
    Location,
    Part,
    Piece,
    Source,
    Task,
    register,
)
from pretrain.data.sources.files import compression_of, find, stored_location, unreadable
from pretrain.data.sources.plain import Text

for _module in pkgutil.iter_modules(__path__):
    # A source is found because its file lies here.
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "SOURCES",
    "Corpus",
    "Document",
    "Found",
    "Location",
    "Part",
    "Piece",
    "Source",
    "Task",
    "find",
    "register",
]

MAX_TASKS = 1_000_000
"""Each task has folders and files of its own, numbered with six digits."""


def corpora(data: DataSection) -> list[Corpus]:
    """Return the corpora of a data set in the order of the config.

    Raises:
        ConfigError: if a corpus names a source that there is not.
    """
    alone = SOURCES.get(data.source or "")
    name = alone.name if alone and alone.has_own_text else "text"
    named: Mapping[str, CorpusSection | DataSection] = data.corpora or {name: data}
    for name, each in named.items():
        if each.source is not None and each.source not in SOURCES:
            raise ConfigError(
                f"{_key(data, name, 'source')} = {each.source!r}: no such source. Choose one of "
                f"{', '.join(SOURCES)}, or leave it out where the ends of the files' names tell"
            )
    return [Corpus(name, each.source, each.paths, each.text_field) for name, each in named.items()]


def source_of(corpus: Corpus, path: str) -> Source:
    """Return how a file of a corpus is read."""
    return SOURCES[corpus.source] if corpus.source else _named(path) or SOURCES[Text.name]


def _named(path: str) -> Source | None:
    """Return the source that the end of a file's name tells."""
    compression = compression_of(path)
    unpacked = path.removesuffix(compression.suffix) if compression else path
    return next((each for each in SOURCES.values() if unpacked.endswith(each.endings)), None)


def plan(data: DataSection) -> dict[Split, list[Task]]:
    """Return the tasks of both splits, the same whatever the number of processes.

    Validation has tasks only where whole files are held out: with data.validation_paths, and of
    corpora that bring their own text. No file is opened but for indexes at their ends.

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
                f"every file of {_key(data, corpus.name, 'paths')}, so nothing is left to train "
                "on. Hold out fewer files"
            )
        training[corpus.name] = left
        if corpus.source:
            own = SOURCES[corpus.source].own_files("validation")
            validation[corpus.name] += map(stored_location, own)
    return {
        "train": _tasks(data, named, training),
        "validation": _tasks(data, named, validation),
    }


def _key(data: DataSection, corpus: str, key: str) -> str:
    """Return the name of a corpus's key in the config."""
    return f"data.corpora.{corpus}.{key}" if data.corpora else f"data.{key}"


def _files(data: DataSection, corpus: Corpus) -> list[Location]:
    """Return the training files of a corpus, of which some may be held out."""
    key = _key(data, corpus.name, "paths")
    if corpus.source and (source := SOURCES[corpus.source]).has_own_text:
        if corpus.paths:
            raise ConfigError(
                f"{key} = {list(corpus.paths)}: {source.name} comes with its own text. Remove the "
                "key, or the source"
            )
        return [stored_location(path) for path in source.own_files("train")]
    if not corpus.paths:
        raise ConfigError(
            f"{key} = []: no files are given. Set files or glob patterns, as in {key} = "
            '["corpus/**/*.txt"]'
        )
    return find(key, corpus.paths)


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
            for part in _planned(corpus, file).parts(corpus, file, data.bytes_per_task)
        )
        for pieces in _grouped(parts, data.bytes_per_task):
            if len(tasks) == MAX_TASKS:
                raise ConfigError(
                    f"data.bytes_per_task = {data.bytes_per_task}: divides the corpus into more "
                    f"than {MAX_TASKS} tasks. Raise it"
                )
            tasks.append(Task(len(tasks), corpus.name, pieces))
    return tasks


def _planned(corpus: Corpus, file: Location) -> Source:
    """Return how a file is read, or refuse to read as plain text what is named as something else.

    Such a build would succeed, and the model would learn the marks of JSON.
    """
    source, named = source_of(corpus, file.path), _named(file.path)
    if named and named is not source and not source.endings:
        raise ConfigError(
            f'{file.path}: its name says {named.name}, and source = "{source.name}" would read it '
            "as plain text. Leave the source out, or rename the file if it holds plain text"
        )
    return source


def _grouped(parts: Iterable[Part], bytes_per_task: int) -> Iterator[tuple[Piece, ...]]:
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
    """Yield what the source of a file finds in a piece; damage as the last thing found."""
    try:
        yield from source_of(corpus, piece.path).read(piece, corpus)
    except Damaged as damage:
        yield Found(damage.offset, "", f"{damage.reason}; the rest of the file is lost. Restore it")
    except OSError as error:
        raise unreadable(piece.path, error) from None
