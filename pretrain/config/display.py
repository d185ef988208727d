"""Print messages as text that steers no terminal."""

from __future__ import annotations

import contextlib
import io
import re
import sys

_STEERING = re.compile(rb"\x1b\[[\d;]*m|[\t\r\n]")
"""Sequences that a log may send to a terminal: colours, and where a progress bar begins anew."""


class PlainStream(io.TextIOWrapper):
    """A stream of text in which every control character but a line end is written as an escape.

    The launcher prints through it. Files of a run may be another user's, and name what they like as
    a reason or a node. A terminal would obey it: rename its window, change what was printed before,
    answer as if the user typed.
    """

    def write(self, text: str) -> int:
        """Write text."""
        return super().write(plain_lines(text))


def plain_lines(text: str) -> str:
    """Return text with an escape, such as "\\x1b", for each control character but line ends.

    Characters that turn the direction of writing are among them, and halves of surrogate pairs,
    which cannot be printed at all.
    """
    return "\n".join(map(_plain, text.split("\n")))


def plain_output(output: bytes) -> bytes:
    """Return what a rank printed as it may go to a terminal: with line ends, tabs and colours.

    Everything else that is no printable character is written as an escape.
    """
    parts, end = [], 0
    for match in _STEERING.finditer(output):
        parts += [_plain_bytes(output[end : match.start()]), match[0]]
        end = match.end()
    return b"".join([*parts, _plain_bytes(output[end:])])


def say(text: str) -> None:
    """Print a message to stderr.

    A terminal that was closed, or a full disk under a log, must not end the run, so the message is
    lost then.
    """
    with contextlib.suppress(OSError):
        print(plain_lines(text), file=sys.stderr, flush=True)


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain_bytes(part: bytes) -> bytes:
    return _plain(part.decode(errors="backslashreplace")).encode()
