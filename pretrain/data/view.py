"""Show samples of a data set (`pretrain data show`), and its statistics (`pretrain data stats`)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple, get_args

import numpy as np
import xxhash

from pretrain.config import ConfigError, RunConfig
from pretrain.data import order
from pretrain.data.files import missing, read
from pretrain.data.shards import BUILD_RECORD, DOCUMENTS, MANIFEST, Split, rebuild_advice
from pretrain.data.stream import TokenStream, build_record, open_stream
from pretrain.data.tokenizer import load_tokenizer
from pretrain.rundir.files import Json

# ---- Find the documents in a range of a split's tokens, and their origins ----


class Excerpt(NamedTuple):
    """The part of a document in a range of tokens."""

    corpus: str
    source: str
    """The file of the document."""
    offset: int
    """Start of the document in that file: a byte offset in the uncompressed content, or the number
    of its row or sample."""
    start: int
    """First token of the part in the split's stream."""
    tokens: np.ndarray
    is_begin: bool
    """True if the part holds the document's beginning."""


class Origins:
    """The origin of every document of a split, from the data set's index of documents."""

    def __init__(self, stream: TokenStream) -> None:
        """Open the index of documents, without reading the documents."""
        self._stream = stream
        record = build_record(stream.data_set, stream.manifest)
        self._tasks: list[Any] = record["tasks"]
        self._digests: dict[str, tuple[int, str]] = record["files"]
        tokens: dict[tuple[str, int], int] = {}
        for shard in stream.manifest.shards:
            key = shard.corpus, shard.task
            tokens[key] = tokens.get(key, 0) + shard.tokens
        # (corpus, task) in the order of the stream, and the first token of each.
        self._written = list(tokens)
        self._starts = list(accumulate(tokens.values(), initial=0))

    def excerpts(self, start: int, count: int) -> Iterator[Excerpt]:
        """Yield the parts of documents in tokens [start, start + count), in order.

        Raises:
            ConfigError: The index of documents is missing or damaged.
        """
        end = start + count
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for number in range(first, len(self._written)):
            begin, after = self._starts[number], self._starts[number + 1]
            if begin >= end:
                return
            yield from self._of_task(number, max(start, begin), min(end, after))

    def _of_task(self, number: int, start: int, end: int) -> Iterator[Excerpt]:
        """Yield the parts in tokens [start, end), which one task wrote."""
        corpus, _ = self._written[number]
        rows, base = self._rows(number), self._starts[number]
        first = int(np.searchsorted(rows["token"], start - base, "right")) - 1
        last = int(np.searchsorted(rows["token"], end - base, "left"))
        for row in range(first, last):
            begin = base + int(rows["token"][row])
            after = base + int(rows["token"][row + 1]) if row + 1 < len(rows) else end
            part = max(start, begin), min(end, after)
            path = self._tasks[int(rows["task"][row])][2][int(rows["piece"][row])][0]
            yield Excerpt(
                corpus,
                path,
                int(rows["offset"][row]),
                part[0],
                self._stream.read(part[0], part[1] - part[0]),
                part[0] == begin,
            )

    def _rows(self, number: int) -> np.ndarray:
        """Return the index of one task."""
        corpus, task = self._written[number]
        name = f"{DOCUMENTS}/{corpus}-{task:06d}.npy"
        where = self._stream.directory / name
        try:
            raw = read(where)
        except FileNotFoundError:
            raise missing(where, self._stream.data_set / BUILD_RECORD) from None
        expected = self._digests[f"{self._stream.manifest.split}/{name}"][1]
        if xxhash.xxh3_128_hexdigest(raw) != expected:
            raise ConfigError(
                f"{where}: damaged: its XXH3-128 is not that in build.json. "
                f"{rebuild_advice(self._stream.directory / MANIFEST)}"
            )
        rows: np.ndarray = np.load(io.BytesIO(raw))
        return rows


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def shown_samples(
    config: RunConfig, split: Split, *, corpus: str | None, count: int, seed: int, characters: int
) -> Iterator[str]:
    """Yield the lines that show samples of a split, drawn at random.

    Args:
        config: The run, whose data.sequence_length is the length of a sample.
        split: The split.
        corpus: Draw only from this corpus; None draws from all.
        count: Number of samples.
        seed: Seed of the draw.
        characters: Longest printed text of a document; the middle of a longer one is left out.

    Raises:
        ConfigError: There is no such corpus, or it is shorter than a sample.
    """
    stream = open_stream(config, split)
    origins, tokenizer = Origins(stream), load_tokenizer(stream.tokenizer_path)
    known = {found.name: found for found in stream.manifest.corpora}
    if corpus is not None and corpus not in known:
        raise ConfigError(
            f"--corpus {corpus}: {stream.directory} has no such corpus. It has {', '.join(known)}"
        )
    length = config.data.sequence_length
    places = [
        (found, order.num_samples(found.tokens, length))
        for found in ([known[corpus]] if corpus is not None else stream.manifest.corpora)
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
        first = stream.starts[found.name] + start
        yield f"== {split}, {found.name}: sample {index:,} (tokens {first:,} to {first + tokens:,})"
        for part in origins.excerpts(first, tokens):
            yield _heading(part)
            yield _shortened(tokenizer.decode(part.tokens), characters)
        yield ""


def _heading(part: Excerpt) -> str:
    source = _printable(part.source).replace("\n", REPLACEMENT)
    begins = "from its beginning" if part.is_begin else "from its middle"
    return (
        f"-- {part.corpus}, {source} at offset {part.offset:,} "
        f"({begins}, {len(part.tokens):,} tokens)"
    )


def _shortened(text: str, characters: int) -> str:
    """Return a printable text, without its middle if it is long."""
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return _printable(text)


def _printable(text: str) -> str:
    """Return a text without control sequences for terminals."""
    return "".join(c if c.isprintable() or c in "\n\t" else REPLACEMENT for c in text)


# ---- Print statistics of a data set (`pretrain data stats`, and the end of a build) ----


_REASONS = {
    "skipped": "{documents:,} could not be read",
    "cleaning.min_document_characters": "{documents:,} shorter than cleaning asks for",
    "held_out": "{documents:,} held out",
    "duplicates": "{documents:,} duplicates",
    "contaminated": "{documents:,} with held-out text",
}
"""Count -> its text in the summary."""


def stats(config: RunConfig) -> Iterator[str]:
    """Yield the lines of a data set's statistics.

    Raises:
        ConfigError: The data set is missing or damaged.
    """
    train = open_stream(config, "train")
    yield from _summary({"train": train, "validation": open_stream(config, "validation")})
    shares = order.segment_of(config, train).shares
    for name, share in shares.items():
        yield f"{name}: {share / sum(shares.values()):.1%} of the training samples"


def summary(directory: str) -> Iterator[str]:
    """Yield the lines about what a data set contains and what was left out of it."""
    yield from _summary({split: TokenStream(f"{directory}/{split}") for split in get_args(Split)})


def _summary(streams: dict[Split, TokenStream]) -> Iterator[str]:
    data_set = streams["train"].data_set
    report = build_record(data_set, *(stream.manifest for stream in streams.values()))["report"]
    yield f"{data_set}: tokenizer of {streams['train'].manifest.vocab_size:,} pieces"
    for split, stream in streams.items():
        shards = len(stream.manifest.shards)
        yield f"{split}: {_amount(report[split])}, {shards:,} shard{'s' * (shards != 1)}"
    for name, corpus in report["corpora"].items():
        yield f"{name}: {_amount(corpus['train'])}; left out: {_left_out(corpus['counts'])}"
        for reason in corpus["skipped"]:
            yield f"{name}: skipped {reason}"
    leakage = report["leakage"]
    yield f"{leakage['after']:.2%} of the held-out text's 13-word sequences are also in training"


def _amount(totals: Json) -> str:
    per_token = totals["text_bytes"] / max(totals["tokens"], 1)
    return (
        f"{totals['documents']:,} documents, {totals['text_bytes']:,} bytes of text, "
        f"{totals['tokens']:,} tokens ({per_token:.2f} bytes a token)"
    )


def _left_out(counts: Json) -> str:
    found = []
    for reason, words in _REASONS.items():
        documents = counts.get(f"{reason}.documents", counts.get(reason, 0))
        if documents:
            found.append(words.format(documents=documents))
    return ", ".join(found) or "nothing"
