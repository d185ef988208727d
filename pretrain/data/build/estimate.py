"""Estimate from a sample what a build makes of a corpus, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pretrain.config import ConfigError, RunConfig
from pretrain.config.data_schema import WORDS
from pretrain.config.errors import free_bytes, in_bytes
from pretrain.data import sources
from pretrain.data.build.command import load_given_tokenizer
from pretrain.data.build.folder import BuildFolder
from pretrain.data.build.plan import Plan, make_plan, task_sizes
from pretrain.data.cleaning import Cleaner
from pretrain.data.sources import Corpus, Task
from pretrain.data.sources.streams import compression_of
from pretrain.data.stream import check_local
from pretrain.data.tokenizer import Tokenizer, train_tokenizer, train_words
from pretrain.data.tokenizers.dictionary import WordTokenizer
from pretrain.data.tokenizers.pieces import PieceTokenizer

SAMPLE_BYTES = 2_000_000
"""Text that is read of each corpus, from the beginnings of PLACES of its tasks."""
PLACES = 8

_PACKED = 3.0
"""Bytes of text in a byte of a file whose sample does not show it: a packed one, or Parquet."""

_FEWEST_PIECES = 300

_SHARE_OF_TOKENIZING = 0.7
"""Tokenizing takes about so much of a build's time; the rest is reading twice and comparing."""


class CorpusEstimate(NamedTuple):
    """The estimated size of a corpus when it is built."""

    files: int
    """Bytes."""
    documents: float
    text: float
    """Bytes."""
    tokens: float
    seconds: float
    """Processor time."""


def estimate(config: RunConfig, workers: int) -> dict[str, CorpusEstimate]:
    """Print and return what a build would make of each corpus. Writes nothing.

    Args:
        config: The config.
        workers: Processes that the time is given for.

    Raises:
        ConfigError: if the corpus or the tokenizer cannot be used.
    """
    check_local(config)
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    sizes = task_sizes(plan)
    samples = {name: _sample(plan, sizes, corpus) for name, corpus in plan.corpora().items()}
    if not any(sample.texts for sample in samples.values()):
        raise ConfigError("data.paths: the sample of these files has no text. Choose files that do")
    if tokenizer is None:
        tokenizer = _train(plan, [text for sample in samples.values() for text in sample.texts])
    found = {name: _extrapolate(sample, tokenizer) for name, sample in samples.items()}
    for name, corpus in found.items():
        print(f"{name}: {in_bytes(corpus.files)} of files, {_amount(corpus)}")
    itemsize = 2 if config.data.vocab_size <= 1 << 16 else 4
    size = int(sum(corpus.tokens for corpus in found.values()) * itemsize)
    free = free_bytes(BuildFolder.beside(config.data_directory).path)
    room = "" if free is None else f"; {in_bytes(free)} are free"
    seconds = sum(corpus.seconds for corpus in found.values()) / max(min(workers, len(sizes)), 1)
    print(f"{config.data_directory}: about {in_bytes(size)}{room}")
    processes = f"{workers} process{'es' * (workers != 1)}"
    more = "" if config.data.tokenizer else ", and the training of the tokenizer"
    print(f"time: {_about(seconds)} with {processes} on {len(sizes)} tasks{more}")
    return found


def _about(seconds: float) -> str:
    """Return an estimated time as people say it."""
    if seconds < 60:
        return "less than a minute"
    return (
        f"about {seconds / 60:.0f} minutes" if seconds < 7200 else f"about {seconds / 3600:.1f} h"
    )


class _Sample(NamedTuple):
    files: int
    texts: list[str]
    text_per_file_byte: float


def _sample(plan: Plan, sizes: list[int], corpus: Corpus) -> _Sample:
    """Read the beginnings of some tasks of a corpus."""
    own = [(t, size) for t, size in zip(plan.tasks["train"], sizes) if t.corpus == corpus.name]
    step = max(1, len(own) // PLACES)
    chosen = own[::step][:PLACES]
    texts: list[str] = []
    ratios: list[float] = []
    for task, size in chosen:
        ratios.append(_read(plan, task, size, corpus, SAMPLE_BYTES // len(chosen), texts))
    return _Sample(sum(size for _, size in own), texts, sum(ratios) / max(len(ratios), 1))


def _read(plan: Plan, task: Task, size: int, corpus: Corpus, most: int, texts: list[str]) -> float:
    """Add cleaned documents of a task to `texts`, and return the bytes of text per byte of file."""
    cleaner, text_bytes, last = Cleaner(plan.cleaning), 0, None
    documents = sources.read(task, corpus, lambda reason: None)
    for document in documents:
        if text_bytes > most:
            # The document begins where those before it end.
            last = document
            break
        if (text := cleaner.clean(document.text)) is not None:
            texts.append(text)
            text_bytes += len(text.encode())
    if last is None:
        # The whole task was read.
        return text_bytes / max(size, 1)
    piece = task.pieces[last.piece]
    is_packed = corpus.source == "parquet" or compression_of(piece.path) is not None
    if is_packed or corpus.source == "webdataset":
        return _PACKED if is_packed else 1.0
    read = sum(p.end - p.start for p in task.pieces[: last.piece]) + last.offset - piece.start
    return text_bytes / max(read, 1)


def _train(plan: Plan, texts: list[str]) -> Tokenizer:
    """Train a tokenizer on the sample, of as many pieces as so little text yields."""
    pieces = plan.data.vocab_size
    while True:
        try:
            if plan.data.tokenizer == WORDS:
                return WordTokenizer(Path("sample"), train_words(texts, pieces))
            return PieceTokenizer(Path("sample"), train_tokenizer(_lines(texts), pieces))
        except ConfigError:
            if pieces < 2 * _FEWEST_PIECES:
                raise
            pieces //= 2


def _lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from (line for line in text.split("\n") if line)


def _extrapolate(sample: _Sample, tokenizer: Tokenizer) -> CorpusEstimate:
    start = time.process_time()
    tokens = sum(len(ids) + 1 for ids in tokenizer.encode_batch(sample.texts))
    seconds = (time.process_time() - start) / _SHARE_OF_TOKENIZING
    read = sum(len(text.encode()) for text in sample.texts)
    text = sample.files * sample.text_per_file_byte
    factor = text / max(read, 1)
    return CorpusEstimate(
        sample.files, len(sample.texts) * factor, text, tokens * factor, seconds * factor
    )


def _amount(found: CorpusEstimate) -> str:
    return (
        f"about {found.documents:,.0f} documents, {in_bytes(int(found.text))} of text, "
        f"{found.tokens:,.0f} tokens ({found.text / max(found.tokens, 1):.2f} bytes a token)"
    )
