"""Print messages of the launcher for the user, without what would steer the terminal."""

from __future__ import annotations

import contextlib
import re
import sys

_STEERING = re.compile(rb"\x1b\[[\d;]*m|[\t\r\n]")
"""Sequences that a log may send to a terminal: colours, and where a progress bar begins anew."""


def plain(text: str) -> str:
    """Return text without control characters, each of which is written as an escape: "\\x1b".

    Files of a run may be another user's, and name what they like as a reason or a node. A terminal
    would obey it: rename its window, change what was printed before, answer as if the user typed.
    Characters that turn the direction of writing are among them, and halves of surrogate pairs,
    which cannot be printed at all. A line end is one too; see `plain_lines`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def plain_lines(text: str) -> str:
    """Return text of several lines without other control characters."""
    return "\n".join(plain(line) for line in text.split("\n"))


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


def _plain_bytes(part: bytes) -> bytes:
    return plain(part.decode(errors="backslashreplace")).encode()


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
