"""Print messages of the launcher for the user, without what would steer the terminal."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from pretrain.rundir.attempts import AttemptRecord
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


# ---- Tell which nodes of a cluster a run should not use, from how its attempts ended ----


MOST_FAILURES = 1
"""A node from which more of a run's failures came than this is left out."""


def count_failures(records: Sequence[AttemptRecord]) -> Counter[str]:
    """Return how many attempts ended by a failure that came from each node."""
    ends = [record.ended for record in records if record.ended]
    return Counter(node for end in ends for node in set(end.nodes))


def failing_nodes(records: Sequence[AttemptRecord]) -> dict[str, str]:
    """Return the nodes that failed twice or that a preflight found unfit, with the last reason.

    Args:
        records: The attempts to count, such as those of one Slurm job, oldest first.
    """
    ends = [record.ended for record in records if record.ended]
    reasons = {node: end.reason for end in ends for node in end.nodes}
    failures = count_failures(records)
    failed = {node: reasons[node] for node, count in failures.items() if count > MOST_FAILURES}
    # A preflight names a node and its cause for certain, so once is enough.
    checks = [record.preflight for record in records if record.preflight]
    return failed | {node: cause for check in checks for node, cause in check.faults.items()}


def choose_nodes(
    nodes: Sequence[str],
    count: int,
    unusable: Collection[str] = (),
    failures: Counter[str] | None = None,
) -> list[str]:
    """Choose the nodes for the ranks from those that a job holds.

    Args:
        nodes: All nodes of the job, in Slurm's order.
        count: How many the ranks need.
        unusable: Nodes that must not be chosen.
        failures: How often each node failed; those that failed less often come first, so that a
            spare node takes the place of one that failed once.

    Returns:
        The chosen nodes in Slurm's order; fewer than `count` when too few can be used.
    """
    failed = failures or Counter()
    usable = [node for node in nodes if node not in unusable]
    # A stable sort: of equals, the nodes that come first.
    chosen = sorted(usable, key=lambda node: failed[node])[:count]
    return [node for node in nodes if node in chosen]
