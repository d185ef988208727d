"""Say to people what happened: the errors that end a command, tables, sizes, times and messages.

An error ends a command without a traceback: wrong input, or a failed run.

`pretrain` and `launcher` print the message of any of them as `error: ...` lines; the exit code is 2
for a ConfigError, 1 for a RunFailed, 81 for a Diverged, 82 for a NoSpace and 83 for a Poisoned
(`rundir.paths.exit_code_of`). Any other exception is a bug in this project and keeps its
traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class ConfigError(ValueError):
    """Wrong input: a config, option or file with which the command cannot work.

    The message names the file, the key, the value and what to do about it.
    """


class RunFailed(RuntimeError):
    """A failure of a command whose input was right.

    The message says where it failed and what to try.
    """


class Unsound(RunFailed):
    """A rank holds or has computed something that cannot be right. A replay can tell why.

    It is raised on all ranks together, with the same message.
    """

    def __init__(self, seen: str, advice: str = "", ranks: Collection[int] = ()) -> None:
        """Note what was seen, what to do where no replay tells more, and the ranks it came from.

        Args:
            seen: What cannot be right, without a full stop.
            advice: Sentences.
            ranks: As far as they are known.
        """
        super().__init__(f"{seen}. {advice}" if advice else seen)
        self.seen, self.ranks = seen, tuple(ranks)


class Diverged(Unsound):
    """Ranks of a run hold different values of what must be equal.

    The message names the parameters, and the ranks and hosts that differ.
    """


class Poisoned(Unsound):
    """Numbers of training are not finite, or so large that no training makes them.

    Nothing of them is saved. Where it happens again and again from one checkpoint, the checkpoint
    may hold the cause (`pretrain.rundir.attempts.poisoned`).
    """


class MemoryChanged(Poisoned):
    """The memory of a rank has changed while nothing wrote to it."""


class NoSpace(RunFailed):
    """The disk, or the user's quota on it, is full. Starting again would find it as full."""


NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a quota that is used up."""
_REMEDIES = {
    **dict.fromkeys(NO_SPACE_ERRORS, "Make room or choose another place"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "Have its owner give you the right to, or choose another place"
    ),
    errno.EROFS: "Have the file system mounted to be written to, or choose another place",
    errno.ESTALE: "The file server has lost it. Mount the file system again",
    errno.EIO: "The disk or the file server failed. Have it looked at",
    errno.ENAMETOOLONG: "Choose a shorter path",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n)"),
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f), or choose another file system",
    errno.ENOENT: "It was moved or removed meanwhile. See that it is there",
}
"""Error number -> what to do about it."""


def remedy(error: OSError) -> str:
    """Return what to do about a file operation that was refused; a sentence without its stop."""
    return _REMEDIES.get(error.errno or 0, "Choose another place")


def refusal_in(error: BaseException) -> OSError | None:
    """Return the refusal of the operating system that an error tells of; None if it is none.

    Libraries in Rust (safetensors, tokenizers) and gloo raise errors of their own about it.
    """
    if isinstance(error, OSError):
        return error
    if not isinstance(error, Exception) or isinstance(error, ConfigError | RunFailed):
        return None
    said = re.search(r"\(os error (\d+)\)", str(error))
    if said is None and os.strerror(errno.EMFILE) not in str(error):
        return None
    number = int(said[1]) if said else errno.EMFILE
    return OSError(number, os.strerror(number))


def refused(error: OSError, path: Path | None = None) -> RunFailed:
    """Return the failure that a refused file operation means for a command.

    Args:
        error: What the operating system said.
        path: What the command was working on, where it is known: the error that Python raises when
            a disk is full carries no file name.
    """
    if error.errno is None and " requested and " in str(error):
        # NumPy wrote a part of an array, and does not say why: there was no more room.
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file = str(error.filename) if error.filename else None
    named = str(path) if path is not None else file
    if named is None and error.errno not in _REMEDIES:
        # As for a broken pipe.
        return RunFailed(str(error))
    # The refused file may be another one than `path`, for example a file below that directory.
    where = f", {file}" if file and file != named else ""
    is_full = error.errno in NO_SPACE_ERRORS
    free = free_bytes(Path(named)) if is_full and named else None
    room = "" if free is None else f"; {in_bytes(free)} are free"
    said = f"{error.strerror or error}{where}{room}"
    said = said if path is None else f"cannot be written ({said})"
    kind = NoSpace if is_full else RunFailed
    return kind(f"{named or 'pretrain'}: {said}. {remedy(error)}, then run the command again")


def free_bytes(path: Path) -> int | None:
    """Return how many bytes a user may still write where `path` lies or will lie.

    None where the file system does not say. A quota is not seen.
    """
    for place in (path, *path.absolute().parents):
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def in_bytes(count: int) -> str:
    """Return a number of bytes as people read it, and exactly: "1.5 GB (1500000000 bytes)"."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit} ({count} bytes)"
    return f"{count} bytes"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside the `with` block into a RunFailed that names `path` (`refused`).

    Args:
        path: The file or directory that the block writes to, or below.

    Raises:
        NoSpace: The disk or the quota is full; the message says how much is free.
        RunFailed: The operating system refuses the write for another reason, such as permissions.
    """
    try:
        yield
    except Exception as error:
        refusal = refusal_in(error)
        if refusal is None:
            raise
        raise refused(refusal, path) from error


# ---- One reason why a run cannot work ----


class Refusal(NamedTuple):
    """One reason why a run cannot work: "KEY = VALUE: REASON. REMEDY"."""

    key: str
    """The key that the user would change, with its section."""
    value: object
    """Its value."""
    reason: str
    """What is wrong with the value; starts in lower case, without a full stop."""
    remedy: str
    """What to set instead; a sentence without its full stop."""

    def __str__(self) -> str:
        # As TOML spells it, so that a user finds it in the file.
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key} = {value}: {self.reason}. {self.remedy}"


# ---- Tables, sizes and times ---------------------------------------------------------------------
def columns(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return the lines of a table.

    Args:
        rows: The cells of each row, as many in each, the head first.
        right: Numbers of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def size(count: float) -> str:
    """Return a number of bytes for people: 4212 -> "4.2 kB"."""
    return in_bytes(int(count)).partition(" (")[0]


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return Unix seconds as local date and time; "never" where no calendar has them."""
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        # As of a damaged file.
        return "never"


# ---- Messages as text that steers no terminal ----------------------------------------------------
_STEERING = re.compile(rb"\x1b\[[\d;]*m|[\t\r\n]")
"""Sequences that a log may send to a terminal: colors, and where a progress bar begins anew."""


class PlainStream(io.TextIOWrapper):
    """A stream of text in which every control character but a line end is written as an escape.

    The launcher prints through it. Files of a run may be another user's, and name what they like as
    a reason or a node. A terminal would obey it: rename its window, change what was printed before,
    answer as if the user typed.
    """

    def write(self, text: str) -> int:
        """Write text."""
        return super().write(plain_lines(text))


def first_problem(error: Exception) -> str:
    """Return the first problem of a small file's content, with its key."""
    # Only pydantic's error has several. pydantic is not imported here, because it takes long.
    if not hasattr(error, "errors"):
        return str(error)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def plain_lines(text: str) -> str:
    """Return text with an escape, such as "\\x1b", for each control character but line ends.

    Characters that turn the direction of writing are among them, and halves of surrogate pairs,
    which cannot be printed at all.
    """
    return "\n".join(map(printable, text.split("\n")))


def plain_output(output: bytes) -> bytes:
    """Return what a rank printed as it may go to a terminal: with line ends, tabs and colors.

    Everything else that is no printable character is written as an escape.
    """
    parts, end = [], 0
    for match in _STEERING.finditer(output):
        parts += [_plain_bytes(output[end : match.start()]), match[0]]
        end = match.end()
    return b"".join([*parts, _plain_bytes(output[end:])])


def say(*lines: str) -> None:
    """Print lines to stderr; nothing where there are none.

    A terminal that was closed, or a full disk under a log, must not end the run, so the lines are
    lost then.
    """
    if lines:
        with contextlib.suppress(OSError):
            print(*map(plain_lines, lines), sep="\n", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return a text with an escape for each control character, line ends included."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain_bytes(part: bytes) -> bytes:
    return printable(part.decode(errors="backslashreplace")).encode()
