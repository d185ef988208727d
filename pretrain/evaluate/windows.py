"""Cut a token stream into evaluation windows. Pure arithmetic, without torch.

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

Both are defined in Press, Smith and Lewis, "Train Short, Test Long" (arXiv 2108.12409), appendix B,
where the cost of a short context at the start of a window is called the early token curse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.config import ConfigError, RunConfig
from pretrain.config.evaluation import MASKED


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
    """"nonoverlapping", "sliding" or MASKED."""
    length: int
    """Tokens in a window."""
    stride: int
    """Tokens by which sliding windows advance. Nonoverlapping windows ignore it."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Return (name, stride, length) as in records; only sliding has a stride of its own."""
        return self.name, self.stride if self.name == "sliding" else self.length, self.length

    def windows(self, tokens: int) -> Iterator[Window]:
        """Yield the windows over a stream of `tokens` tokens."""
        if self.name == MASKED:
            return whole(tokens, self.length)
        if self.name == "nonoverlapping":
            return nonoverlapping(tokens, self.length)
        return sliding(tokens, self.length, self.stride)


def nonoverlapping(tokens: int, length: int) -> Iterator[Window]:
    """Yield consecutive windows of `length` tokens; the last one may be shorter."""
    return sliding(tokens, length, length)


def whole(tokens: int, length: int) -> Iterator[Window]:
    """Yield windows of exactly `length` tokens; the last one reads some again to be as long.

    For a model that looks both ways, which padding would disturb.

    Args:
        tokens: Number of tokens in the stream, all of which are scored; at least `length`.
        length: Number of tokens in a window.
    """
    for window in nonoverlapping(tokens, length):
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
    config: RunConfig,
    names: Sequence[str],
    tokens: int,
    total: int,
    *,
    lengths_from: str = "evaluation.lengths =",
    limit: str = "evaluation.max_tokens",
) -> tuple[tuple[Protocol, ...], list[str]]:
    """Return what is measured, and lines that say what is left out.

    Windows longer than the text would all be one window, the whole text, under several names.

    Args:
        config: The config, whose lengths and stride are taken.
        names: The protocols.
        tokens: Tokens that are scored.
        total: Tokens of the validation split.
        lengths_from: What a user changes to name other lengths.
        limit: What a user changes to have more of the split scored.

    Raises:
        ConfigError: The text is shorter than one window of a length that was named, or than the
            training length.
    """
    lengths = dict.fromkeys(config.evaluation_lengths)
    short = f"the {tokens:,} tokens that are scored are less than one window"
    more = "hold out more text (data.validation_fraction, data.validation_paths) and build again"
    if tokens < total:
        more = f"score more of the validation split's {total:,} tokens ({limit})"
    notes: list[str] = []
    if config.is_masked:
        names, notes = _masked(names)
    too_long = [length for length in lengths if length > tokens]
    if too_long and (config.evaluation.lengths is not None or too_long == list(lengths)):
        choose = f"Choose lengths up to {tokens:,}, or {more}"
        raise ConfigError("\n".join(f"{lengths_from} {n}: {short}. {choose}" for n in too_long))
    if too_long:
        left_out = ", ".join(map(str, too_long))
        notes.append(f"{lengths_from} {left_out} left out: {short}; to measure them, {more}")
    chosen = []
    for name in dict.fromkeys(names):
        for length in lengths:
            stride = config.evaluation_stride
            if length in too_long:
                continue
            if name == "sliding" and stride == length and "nonoverlapping" in names:
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
    if "nonoverlapping" not in names:
        raise ConfigError(f"sliding: {why}. Choose the protocol nonoverlapping")
    return [MASKED], [f"sliding windows are left out: {why}"] if "sliding" in names else []
