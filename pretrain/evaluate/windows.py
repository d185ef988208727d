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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
