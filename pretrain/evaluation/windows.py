"""Cut a text into windows to score, and into blocks for confidence intervals. Without torch.

An end-of-document token is put before the first token of the scored stream, so that the first token
has a context too: input t is followed by target t, and exactly one window scores each target 0 ..
tokens - 1. The protocols differ in how much context a target gets. In the pictures, "#" is a target
that the window scores, and "." is one that it only reads as context.

Nonoverlapping, 10 tokens in windows of length 4. Each window starts without context, so its first
targets are hard to predict, however long the window is:

    target     0 1 2 3 4 5 6 7 8 9
    window 0   # # # #
    window 1           # # # #
    window 2                   # #

Sliding, 9 tokens in windows of length 4 with stride 2. After the first window, each target has at
least length - stride tokens of context, at length / stride times the compute:

    target     0 1 2 3 4 5 6 7 8
    window 0   # # # #
    window 1       . . # #
    window 2           . . # #
    window 3             . . . #

A text may also be read in one pass, as a stream: the context of each target is the whole text
before it, as in a single window. The model reads the inputs in pieces, with a cache
(`pretrain.model.cache`), so that memory does not grow with the text.

The first two are defined in Press, Smith and Lewis, "Train Short, Test Long" (arXiv 2108.12409),
appendix B, where the cost of a short context at the start of a window is called the early token
curse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError, RunConfig
from pretrain.config.run import MASKED, PIECE, PROTOCOLS, STREAM
from pretrain.data.shards import DICTIONARY, MODEL
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer, load_tokenizer

NONOVERLAPPING, SLIDING = PROTOCOLS


class Window(NamedTuple):
    """A range of inputs to read, [start, start + size), and how many of its targets to score."""

    start: int
    """Index of the first input token."""
    size: int
    """Number of input tokens that the window reads."""
    scored: int
    """Number of targets that the window scores, which are its last ones."""


@dataclass(frozen=True)
class Protocol:
    """A rule that cuts a stream into windows and says which tokens each window scores.

    For 8 tokens and windows of length 4 ("#": scored, ".": read as context only):

        token             0 1 2 3 4 5 6 7
        nonoverlapping    # # # #              window 0
                                  # # # #      window 1
        sliding           # # # #              window 0
        with stride 2         . . # #          window 1
                                  . . # #      window 2

    The functions below define both, including streams that do not divide evenly.
    """

    name: str
    """"nonoverlapping", "sliding", MASKED or STREAM."""
    length: int
    """Tokens in a window; for STREAM, in the text."""
    stride: int
    """Tokens by which sliding windows advance. Nonoverlapping windows ignore it."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Return (name, stride, length) as in records; only sliding has a separate stride."""
        return self.name, self.stride if self.name == SLIDING else self.length, self.length

    @property
    def pass_length(self) -> int:
        """Return the number of tokens of a sequence in one forward pass."""
        return min(self.length, PIECE) if self.name == STREAM else self.length

    def windows(self, tokens: int) -> Iterator[Window]:
        """Yield the windows over a stream of `tokens` tokens; for STREAM, the pieces."""
        if self.name == MASKED:
            return whole(tokens, self.length)
        stride = self.stride if self.name == SLIDING else self.pass_length
        return sliding(tokens, self.pass_length, stride)


def whole(tokens: int, length: int) -> Iterator[Window]:
    """Yield windows of exactly `length` tokens; the last one reads some tokens a second time.

    For masked models, whose attention would see padding.

    Args:
        tokens: Number of tokens in the stream, all of which are scored; at least `length`.
        length: Number of tokens in a window.
    """
    for window in sliding(tokens, length, length):
        yield Window(window.start + window.size - length, length, window.scored)


def sliding(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of `length` tokens that advance by `stride` and score their last targets.

    The first window scores all its targets, because no other window reads them. The last window has
    fewer than `stride` targets left to score if the stream does not divide evenly. It then advances
    only by that number, so that its targets have the full context too.

    Args:
        tokens: Number of targets in the stream, all of which are scored.
        length: Largest number of tokens in a window.
        stride: Number of targets that each window after the first scores, at most `length`. With
            stride = length the windows do not overlap.

    Yields:
        Windows in the order of the stream. Together they score every target exactly once.
    """
    first = min(length, tokens)
    if first:
        yield Window(0, first, first)
    for first_scored in range(length, tokens, stride):
        scored = min(stride, tokens - first_scored)
        # With stride = length windows do not overlap, so the last one is a shorter piece instead
        # of reading another window's targets for a full context.
        size = scored if stride == length else length
        end = first_scored + scored
        yield Window(end - size, size, scored)


# ---- Choose what an evaluation measures: each protocol at each length up to the text's ----


def choose_protocols(config: RunConfig, total: int) -> tuple[tuple[Protocol, ...], list[str]]:
    """Return the protocols to measure, and messages about those that are left out.

    Lengths beyond the text are left out, because all of them would be one window, the whole text.

    Args:
        config: The config, for [evaluation].
        total: Number of tokens of the validation split.

    Raises:
        ConfigError: The text is shorter than a requested length, or than the training length.
    """
    names: Sequence[str] = config.evaluation.protocols
    tokens = min(total, config.evaluation.max_tokens or total)
    if STREAM in names:
        return (Protocol(STREAM, tokens, tokens),), []
    lengths = dict.fromkeys(config.evaluation_lengths)
    short = f"the {tokens:,} tokens that are scored are less than one window"
    more = (
        "give more text: of evaluate, a longer --text; of a data set, hold out more text "
        "(data.validation_fraction, data.validation_paths) and build again"
    )
    if tokens < total:
        limits = "--max-tokens, evaluation.max_tokens"
        more = f"score more of the validation split's {total:,} tokens ({limits})"
    notes: list[str] = []
    if config.is_masked:
        names, notes = _masked(names)
    too_long = [length for length in lengths if length > tokens]
    if too_long and (config.evaluation.lengths is not None or too_long == list(lengths)):
        choose = f"Choose lengths up to {tokens:,} (--lengths, evaluation.lengths), or {more}"
        raise ConfigError("\n".join(f"length {n}: {short}. {choose}" for n in too_long))
    if too_long:
        left_out = ", ".join(map(str, too_long))
        notes.append(f"evaluation.lengths {left_out} left out: {short}; to measure them, {more}")
    chosen = []
    for name in dict.fromkeys(names):
        for length in lengths:
            stride = config.evaluation_stride
            if length in too_long:
                continue
            if name == SLIDING and stride == length and NONOVERLAPPING in names:
                notes.append(
                    f"sliding windows of {length} tokens by {stride} do not overlap; they are "
                    "measured once, as nonoverlapping"
                )
            else:
                chosen.append(Protocol(name, length, stride))
    return tuple(chosen), notes


def _masked(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the protocols of a masked model, and messages about those that are left out.

    Args:
        names: The requested protocols.

    Raises:
        ConfigError: Only sliding windows were requested.
    """
    why = (
        "a sliding window gives each token more of what is before it, and train.objective = "
        '"masked" looks both ways'
    )
    if NONOVERLAPPING not in names:
        raise ConfigError(f"sliding: {why}. Choose the protocol nonoverlapping")
    return [MASKED], [f"sliding windows are left out: {why}"] if SLIDING in names else []


# ---- the text that is scored --------------------------------------------------------------------
READ_TOKENS = 1 << 20
"""Tokens that are read at once. Tokens take 8 bytes each when read, and 2 or 4 when kept."""
_CUT = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode an incomplete character to this."""
BLOCKS = 64
"""Largest number of blocks of a text, for each of which losses are kept. Any longer
text has at least 29."""


def block_ends(ids: NDArray[np.generic], eos_id: int) -> NDArray[np.int64]:
    """Return where the blocks of a text end, each the index after its last token.

    A block is 1 / BLOCKS of the text, extended to the next end of a document unless that would
    double it. Short documents therefore stay whole, and long ones are cut into several blocks. The
    losses of different documents are independent; blocks of one long document may be slightly
    dependent, which the confidence interval does not account for.

    Args:
        ids: The tokens of the text.
        eos_id: The token that ends every document.
    """
    tokens = len(ids)
    size = -(-tokens // BLOCKS)
    documents = np.flatnonzero(ids == eos_id) + 1
    ends, start = [], 0
    while start < tokens:
        end = start + size
        next_document = np.searchsorted(documents, end)
        if next_document < len(documents) and documents[next_document] < end + size:
            end = int(documents[next_document])
        # A remainder that is too short for a block is added to the last one.
        start = end if tokens - end >= size // 2 + 1 else tokens
        ends.append(start)
    return np.array(ends, dtype=np.int64)


class ScoredText:
    """The tokens of a validation split that are scored: the first ones of each corpus.

    Args:
        stream: The split.
        max_tokens: Largest number of tokens to score, of which every corpus has its share; None
            scores all.
    """

    def __init__(self, stream: TokenStream, max_tokens: int | None = None) -> None:
        self.total = len(stream)
        """Number of tokens of the whole split."""
        tokens = min(self.total, max_tokens or self.total)
        # Read the whole text here, so that all ranks find a damaged byte now, instead of one rank
        # in the middle of the evaluation.
        ids = np.empty(tokens + 1, np.min_scalar_type(stream.manifest.vocab_size))
        # Put an end-of-document token first, so that the first token has a context too.
        ids[0] = stream.manifest.eos_id
        done, self._ends = 1, list[int]()
        for corpus in stream.manifest.corpora:
            first = stream.starts[corpus.name]
            share = tokens * (first + corpus.tokens) // self.total - tokens * first // self.total
            for start in range(0, share, READ_TOKENS):
                count = min(READ_TOKENS, share - start)
                ids[done : done + count] = stream.read(first + start, count)
                done += count
            self._ends.append(done - 1)
        self._stream, self._ids, self.tokens = stream, ids, tokens
        self.block_ends = block_ends(ids[1:], stream.manifest.eos_id)
        """Ends of the blocks from which `pretrain.evaluation.records` computes intervals."""

    @cached_property
    def bytes(self) -> int:
        """Return the bytes of the scored text; 0 if some of it is unknown to the vocabulary.

        Unknown text is not predicted, so it has no bits per byte.
        """
        tokenizer = load_tokenizer(self._stream.tokenizer_path)
        if (self._ids[1:] == tokenizer.unk_id).any():
            return 0
        # Other tokenizers may have changed the text: only what their tokens stand for is predicted.
        if tokenizer.file_name == MODEL and self.tokens == self.total:
            return self._stream.manifest.text_bytes
        return sum(text_bytes(tokenizer, part) for part in self._parts())

    def inputs(self, start: int, size: int) -> NDArray[Any]:
        """Return inputs [start, start + size) and the target after the last, [size + 1]."""
        return self._ids[start : start + size + 1]

    @cached_property
    def sha256(self) -> str | None:
        """Return the hex SHA-256 of the scored text as the tokenizer decodes it, in UTF-8, with
        all documents concatenated. None if `bytes` is not known."""
        if not self.bytes:
            return None
        tokenizer = load_tokenizer(self._stream.tokenizer_path)
        digest = hashlib.sha256()
        for part in self._parts():
            for ids in documents(tokenizer, part):
                digest.update(tokenizer.decode(ids.tolist()).encode())
        return digest.hexdigest()

    def _parts(self) -> list[NDArray[Any]]:
        """Return the scored tokens of each corpus, of which the last may be cut."""
        return [part for part in np.split(self._ids[1:], self._ends) if len(part)]


def text_bytes(tokenizer: Tokenizer, ids: NDArray[np.generic]) -> int:
    """Return the number of UTF-8 bytes of the text of token ids.

    Documents are decoded one by one, because a tokenizer may treat the first word of a text in a
    special way. End-of-document tokens and other special tokens have no bytes. If the end of the
    ids cuts a character, each of its tokens counts as one byte, with an error of at most three. If
    a tokenizer changes the text (to lower case, for example), the changed text counts. With a
    vocabulary of words there is one space between words and a newline for each `</s>`.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids of documents, each ended by the tokenizer's end-of-document token; the last
            one may be cut.
    """
    *whole, last = documents(tokenizer, ids)
    sizes = (len(tokenizer.decode(document.tolist()).encode()) for document in whole)
    return sum(sizes) + _bytes_of_beginning(tokenizer, last.tolist())


def documents(tokenizer: Tokenizer, ids: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    """Return the ids of each document; the last item is what follows the last end, maybe empty.

    With a vocabulary of words all ids are one item, because `</s>` ends lines there.
    """
    if tokenizer.file_name == DICTIONARY:
        return [ids]
    *whole, last = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1)
    return [*(document[:-1] for document in whole), last]


def _bytes_of_beginning(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return the bytes of the beginning of a document, which may end inside a character."""
    count, text = len(ids), tokenizer.decode(ids)
    # A character has at most four bytes, so at most three tokens belong to an incomplete one.
    while text.endswith(_CUT) and len(ids) - count < 3:
        count -= 1
        text = tokenizer.decode(ids[:count])
    return len(text.encode()) + len(ids) - count
