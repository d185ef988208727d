"""Print messages and the output of ranks, without what would steer the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import sys
import termios
import threading
import time
from pathlib import Path
from typing import IO

from pretrain.rundir.files import open_regular

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


# ---- rank logs ----
# The logs of ranks that run without Slurm: one file for each rank, which all attempts append to.
#
# Each attempt begins with a line of its own, by which `launcher logs` finds it.


_HEAD = re.compile(rb"--- attempt (\d{1,9}), [-\d]+ [:\d]+ ---\n")


def head(number: int) -> bytes:
    """Return the line with which an attempt begins in a rank's log."""
    return f"--- attempt {number}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode()


def find_attempt(log: Path, number: int) -> tuple[int, int | None] | None:
    """Find what a rank printed in an attempt.

    Args:
        log: The rank's log.
        number: The attempt.

    Returns:
        Where it begins, behind its first line, and where it ends, None for the end of the file; or
        None if the log has no such attempt.
    """
    begin, at = None, 0
    with open_regular(log) as file:
        for line in file:
            found = _HEAD.fullmatch(line)
            if found and begin is not None:
                return begin, at
            at += len(line)
            if found and int(found[1]) == number:
                begin = at
    return None if begin is None else (begin, None)


# ---- Copy what rank 0 prints to the terminal and, as plain text, into its log ----
# Rank 0 draws a progress bar where it finds a terminal, so it is given one where this process has
# one. The log gets whole lines without what steers a terminal, and the bar now and then.


CHUNK_BYTES = 64 * 1024
"""Bytes that are read at a time, and the longest line."""
LOOK_SECONDS = 0.1
"""From one look if the rank has ended to the next."""
BAR_SECONDS = 10.0
"""The least time between two states of a progress bar in the log."""
STREAMS = (1, 2)
"""The descriptors of stdout and stderr."""
_ALL_STEERING = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])"
)
"""Escape sequences of ECMA-48: colours and cursor, titles of windows, and all others."""


class RankOutput:
    """The ends of rank 0's stdout and stderr, and the thread that copies what comes out of them."""

    def __init__(self, log: IO[bytes]) -> None:
        """Make the ends for the rank: a terminal where this process has one, else a pipe.

        Args:
            log: The rank's log, unbuffered; closed by `close`.
        """
        ends = [_terminal_like(stream) or os.pipe() for stream in STREAMS]
        self.ends = tuple(write for _, write in ends)
        """The descriptors that the rank gets as stdout and stderr."""
        self._copies = {
            read: (stream, _PlainLines(log)) for stream, (read, _) in zip(STREAMS, ends)
        }
        self._log = log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="rank 0's output")

    def start(self) -> None:
        """Start to copy, once all ranks have been started: a fork copies no thread."""
        self._close_ends()
        self._thread.start()

    def close(self) -> None:
        """Copy what is left, when the rank has ended, and close everything.

        Processes that the rank has left behind may hold its ends open; they are not waited for.
        """
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._close_ends()
        for read, (_, lines) in self._copies.items():
            lines.flush()
            os.close(read)
        self._copies = {}
        self._log.close()

    def _close_ends(self) -> None:
        for end in self.ends:
            os.close(end)
        self.ends = ()

    def _copy(self) -> None:
        """Copy until both streams have ended, or the rank has and nothing is left."""
        # Not select(2), which refuses descriptors from 1,024 on.
        with selectors.DefaultSelector() as left:
            for read in self._copies:
                left.register(read, selectors.EVENT_READ)
            while left.get_map():
                was_over = self._over.is_set()
                ready = left.select(0 if was_over else LOOK_SECONDS)
                if was_over and not ready:
                    return
                for key, _ in ready:
                    if not self._copy_chunk(key.fd):
                        left.unregister(key.fd)

    def _copy_chunk(self, read: int) -> bool:
        """Copy what one stream holds now.

        Returns:
            False if the stream has ended.
        """
        try:
            chunk = os.read(read, CHUNK_BYTES)
        except OSError:
            # EIO: the last process with the other end of a terminal has closed it.
            chunk = b""
        stream, lines = self._copies[read]
        if chunk:
            _resize(read, stream)
            _show(stream, chunk)
            lines.feed(chunk)
        return bool(chunk)


class _PlainLines:
    """Writes what one stream carries to a log: whole lines of plain text."""

    def __init__(self, log: IO[bytes]) -> None:
        self._log, self._rest, self._bar_at = log, b"", 0.0
        self._is_refused = False

    def feed(self, chunk: bytes) -> None:
        """Write the lines that are complete by now, and a bar that was drawn anew."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._write(line)
        # Each state of a bar begins with a carriage return, so all but the last are complete.
        *states, last = self._rest.split(b"\r")
        if states:
            self._rest = b"\r" + last
            bars = [state for state in states if state.strip()]
            if bars and time.monotonic() - self._bar_at >= BAR_SECONDS:
                self._bar_at = time.monotonic()
                self._write(bars[-1])
        if len(self._rest) > CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rest, a line without an end."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            self._write(rest)

    def _write(self, line: bytes) -> None:
        # Of a progress bar, keep the last state: each one is drawn over the one before.
        text = line.rstrip(b"\r").rpartition(b"\r")[2]
        try:
            self._log.write(plain_output(_ALL_STEERING.sub(b"", text).rstrip(b" ")) + b"\n")
        except OSError as error:
            # On a full disk the terminal still gets the line, and the run goes on.
            if not self._is_refused:
                say(f"{self._log.name}: cannot be written ({error.strerror}); lines are missing")
            self._is_refused = True


def _terminal_like(stream: int) -> tuple[int, int] | None:
    """Return the ends of a terminal like this process's, or None if `stream` is no terminal."""
    try:
        if not os.isatty(stream):
            return None
        read, write = os.openpty()
        attributes = termios.tcgetattr(write)
        # The real terminal translates line ends.
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(write, termios.TCSANOW, attributes)
    except OSError:
        return None
    _resize(read, stream)
    return read, write


def _resize(end: int, stream: int) -> None:
    """Give a terminal that was made for the rank the size of this process's, if both are such."""
    with contextlib.suppress(OSError):
        if os.isatty(end):
            termios.tcsetwinsize(end, termios.tcgetwinsize(stream))


def _show(stream: int, chunk: bytes) -> None:
    """Write to the terminal; one that was closed must not end the run, so it is lost then."""
    with contextlib.suppress(OSError):
        while chunk:
            try:
                chunk = chunk[os.write(stream, chunk) :]
            except BlockingIOError:
                # Some parents leave a terminal non-blocking.
                select.select([], [stream], [], 1.0)
