"""How a text is cut: into windows that are scored, and into blocks for its noise. Without torch.

The stream to score has an end-of-document token put before its first token, so that the first token
has a context as well: input t is followed by target t, and each target 0 .. tokens - 1 is scored by
exactly one window. The two protocols differ in how much context a target gets. In the pictures, "#"
is a target that the window scores and "." is one that it only reads as context.

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

A text may also be read in one pass, the stream: each target has all inputs up to its own as
context, as in one window of the whole text. The model takes the inputs piece by piece, with a cache
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
from pretrain.data.shards import DICTIONARY
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
    """Number of targets that the window scores: always its last ones."""


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

    The functions below define both, also where the stream does not divide evenly.
    """

    name: str
    """"nonoverlapping", "sliding", MASKED or STREAM."""
    length: int
    """Tokens in a window; STREAM: in the text."""
    stride: int
    """Tokens by which sliding windows advance. Nonoverlapping windows ignore it."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Return (name, stride, length) as in records; only sliding has a stride of its own."""
        return self.name, self.stride if self.name == SLIDING else self.length, self.length

    @property
    def pass_length(self) -> int:
        """Return the tokens of a sequence in one forward pass."""
        return min(self.length, PIECE) if self.name == STREAM else self.length

    def windows(self, tokens: int) -> Iterator[Window]:
        """Yield the windows over a stream of `tokens` tokens; STREAM: the pieces."""
        if self.name == MASKED:
            return whole(tokens, self.length)
        if self.name == STREAM:
            return sliding(tokens, self.pass_length, self.pass_length)
        _, stride, length = self.key
        return sliding(tokens, length, stride)


def whole(tokens: int, length: int) -> Iterator[Window]:
    """Yield windows of exactly `length` tokens; the last one reads some again to be as long.

    For a model that looks both ways, which padding would disturb.

    Args:
        tokens: Number of tokens in the stream, all of which are scored; at least `length`.
        length: Number of tokens in a window.
    """
    for window in sliding(tokens, length, length):
        yield Window(window.start + window.size - length, length, window.scored)


def sliding(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of `length` tokens that advance by `stride` and score their last targets.

    The first window scores all its targets, because no other window reads them. The last window has
    fewer than `stride` targets left to score when the stream does not divide evenly. It then
    advances by that many only, so that its targets have full context as well.

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
        # With stride = length no window reads another one's targets, not even for a full context:
        # the last window is a shorter piece of its own.
        size = scored if stride == length else length
        end = first_scored + scored
        yield Window(end - size, size, scored)


# ---- protocols ----
# Choose what an evaluation measures: every protocol at every length that the text can carry.


def choose_protocols(
    config: RunConfig, names: Sequence[str], tokens: int, total: int
) -> tuple[tuple[Protocol, ...], list[str]]:
    """Return what is measured, and lines that say what is left out.

    Windows longer than the text would all be one window, the whole text, under several names.

    Args:
        config: The config, whose lengths and stride are taken.
        names: The protocols.
        tokens: Tokens that are scored.
        total: Tokens of the validation split.

    Raises:
        ConfigError: The text is shorter than one window of a length that was named, or than the
            training length.
    """
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
    """Return the protocols of a model that predicts masked tokens, and what is left out.

    Args:
        names: The protocols that were asked for.

    Raises:
        ConfigError: Only sliding windows were asked for.
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
"""Tokens that are read at once: what is read has 8 bytes a token, and what is kept 2 or 4."""
_CUT = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer decodes the first bytes of a character whose last ones are missing to this."""
BLOCKS = 64
"""A text is cut into at most so many blocks and, if it has as many tokens, at least half of them.
Losses are kept by block."""


def block_ends(ids: NDArray[np.generic], eos_id: int) -> NDArray[np.int64]:
    """Return where the blocks of a text end, each the index after its last token.

    A block is 1 / BLOCKS of the text, and goes on to the next end of a document unless that would
    double it. So documents that are short stay whole, and of a long one several blocks are made.
    What two documents say does not depend on each other; what two blocks of a long document say may
    a little, which the interval cannot know.

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
        # What is left over is too short to be a block of its own.
        start = end if tokens - end >= size // 2 + 1 else tokens
        ends.append(start)
    return np.array(ends, dtype=np.int64)


class ScoredText:
    """The first tokens of a validation split.

    Args:
        stream: The split.
        max_tokens: Score at most so many tokens; None scores all.
    """

    def __init__(self, stream: TokenStream, max_tokens: int | None = None) -> None:
        self.total = len(stream)
        """Tokens of the whole split."""
        tokens = min(self.total, max_tokens or self.total)
        self.tokenizer, self.validation = stream.tokenizer_sha256, stream.identity
        """The SHA-256 of the tokenizer and of the split."""
        # A damaged byte anywhere in the text is found here, on every rank alike, and not by one of
        # them in the middle of an evaluation.
        ids = np.empty(tokens + 1, np.min_scalar_type(stream.vocab_size))
        # An end-of-document token in front gives the first token a context as well.
        ids[0] = stream.eos_id
        for start in range(0, tokens, READ_TOKENS):
            count = min(READ_TOKENS, tokens - start)
            ids[start + 1 : start + 1 + count] = stream.read(start, count)
        self._stream, self._ids, self.tokens, self.bytes = stream, ids, tokens, stream.text_bytes
        self.block_ends = block_ends(ids[1:], stream.eos_id)
        """Where the blocks end of which `pretrain.evaluation.records` makes an interval."""
        if stream.manifest.tokenizer == DICTIONARY or self.tokens < self.total:
            tokenizer = load_tokenizer(stream.tokenizer_path)
            if tokenizer.unk_id is not None and (self._ids[1:] == tokenizer.unk_id).any():
                # Unknown words are not predicted, so the loss does not give the bits of the text.
                self.bytes = 0
            else:
                self.bytes = text_bytes(tokenizer, self._ids[1:])

    def inputs(self, start: int, size: int) -> NDArray[Any]:
        """Return inputs [start, start + size) and the target after the last, [size + 1]."""
        return self._ids[start : start + size + 1]

    @cached_property
    def sha256(self) -> str | None:
        """The hex SHA-256 of the scored text, as the tokenizer decodes it: of the UTF-8 of all
        documents, one behind the other. None where `bytes` is not known."""
        if not self.bytes:
            return None
        tokenizer = load_tokenizer(self._stream.tokenizer_path)
        digest = hashlib.sha256()
        for ids in documents(tokenizer, self._ids[1:]):
            digest.update(tokenizer.decode(ids.tolist()).encode())
        return digest.hexdigest()


def text_bytes(tokenizer: Tokenizer, ids: NDArray[np.generic]) -> int:
    """Return the bytes of the text of token ids, in UTF-8.

    Documents are decoded one by one, because a tokenizer may treat the first word of a text in its
    own way. End-of-document tokens and other special tokens have no bytes. Of a character that the
    end of the ids cuts, each token counts as one byte, which may be wrong by three bytes at most.
    For a tokenizer that changes text (lower case, say), these are the bytes of the changed text: of
    a vocabulary of words, one space between words and a newline for each `</s>`, which ends a line.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids of documents, each ended by the tokenizer's end-of-document token; the last
            one may be cut.
    """
    *whole, last = documents(tokenizer, ids)
    sizes = (len(tokenizer.decode(document.tolist()).encode()) for document in whole)
    return sum(sizes) + _bytes_of_beginning(tokenizer, last.tolist())


def documents(tokenizer: Tokenizer, ids: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    """Return the ids of each document, and what follows the last end of one, which may be empty.

    Of a vocabulary of words the ids of all, because `</s>` ends a line there.
    """
    if tokenizer.file_name == DICTIONARY:
        return [ids]
    *whole, last = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1)
    return [*(document[:-1] for document in whole), last]


def _bytes_of_beginning(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return the bytes of the beginning of a document, which may end within a character."""
    count, text = len(ids), tokenizer.decode(ids)
    # A character has four bytes at most, so three tokens at most hold a part of one.
    while text.endswith(_CUT) and len(ids) - count < 3:
        count -= 1
        text = tokenizer.decode(ids[:count])
    return len(text.encode()) + len(ids) - count
