"""Print samples of a data set as text (`pretrain data show`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pretrain.config import ConfigError, RunConfig
from pretrain.data import order
from pretrain.data.document import Split
from pretrain.data.samples import Excerpt, Origins
from pretrain.data.stream import open_stream
from pretrain.data.tokenizer import load_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def shown_samples(
    config: RunConfig, split: Split, *, corpus: str | None, count: int, seed: int, characters: int
) -> Iterator[str]:
    """Yield the lines that show samples of a split, drawn at random.

    Args:
        config: The run, whose data.sequence_length is the length of a sample.
        split: The split.
        corpus: Draw from this corpus alone; None draws from all.
        count: Number of samples.
        seed: Seed of the draw.
        characters: Longest text that is printed of a document; the middle is left out.

    Raises:
        ConfigError: There is no such corpus, or it is shorter than a sample.
    """
    stream = open_stream(config, split)
    origins, tokenizer = Origins(stream), load_tokenizer(stream.tokenizer_path)
    known = {found.name: found for found in stream.corpora}
    if corpus is not None and corpus not in known:
        raise ConfigError(
            f"--corpus {corpus}: {stream.directory} has no such corpus. It has {', '.join(known)}"
        )
    length = config.data.sequence_length
    places = [
        (found, order.num_samples(found.tokens, length))
        for found in ([known[corpus]] if corpus is not None else stream.corpora)
    ]
    total = sum(number for _, number in places)
    if not total:
        raise ConfigError(
            f"data.sequence_length = {length}: {stream.directory} has no corpus of {length + 1} "
            "tokens, which a sample needs. Lower it"
        )
    ends = np.cumsum([number for _, number in places])
    drawn = np.random.default_rng(seed).choice(total, size=min(count, total), replace=False)
    for place in drawn.tolist():
        at = int(np.searchsorted(ends, place, "right"))
        found, number = places[at]
        index = place - int(ends[at]) + number
        start, tokens = order.token_range(index, length)
        first = found.start + start
        yield f"== {split}, {found.name}: sample {index:,} (tokens {first:,} to {first + tokens:,})"
        for part in origins.excerpts(first, tokens):
            yield _heading(part)
            yield _shortened(tokenizer.decode(part.tokens), characters)
        yield ""


def _heading(part: Excerpt) -> str:
    source = _printable(part.source).replace("\n", REPLACEMENT)
    begins = "from its beginning" if part.is_begin else "from its middle"
    return (
        f"-- {part.corpus}, document {part.document:,}, {source} at offset {part.offset:,} "
        f"({begins}, {len(part.tokens):,} tokens)"
    )


def _shortened(text: str, characters: int) -> str:
    """Return a text without its middle if it is long, in what a terminal may print."""
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return _printable(text)


def _printable(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else REPLACEMENT for c in text)
