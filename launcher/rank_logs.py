"""The logs of ranks that run without Slurm: one file for each rank, which all attempts append to.

Each attempt begins with a line of its own, by which `launcher logs` finds it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from pretrain.rundir.files import open_regular

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
