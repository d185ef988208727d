"""Which window of context scores which token. Pure arithmetic, no torch.

The scored stream is the validation stream with one end-of-document token before it, so that its first token has a
context too: input t is followed by target t, and every target 0 .. tokens - 1 is scored exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """Inputs [start, start + size) are read; the last `scored` predictions count."""

    start: int
    size: int
    scored: int


def nonoverlapping(tokens: int, length: int) -> Iterator[Window]:
    """The stream in pieces of `length` tokens, each predicted from scratch; the last piece may be shorter."""
    return sliding(tokens, length, length)


def sliding(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Windows of `length` tokens, each `stride` further, of which the last `stride` predictions count.

    All of the first window's count, or no window would score them. The last window is moved by what is left, so it
    too has full context; only with stride = length, where nothing is read twice, is it a shorter piece of its own.
    """
    first = min(length, tokens)
    if first:
        yield Window(0, first, first)
    for end in range(length + stride, tokens + stride, stride):
        scored = min(stride, tokens - (end - stride))
        size = scored if stride == length else length
        yield Window(end - stride + scored - size, size, scored)
