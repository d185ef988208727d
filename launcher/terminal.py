"""Print messages of the launcher for the user."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Print a message to stderr.

    A terminal that was closed, or a full disk under a log, must not end the run, so the message is
    lost then.
    """
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
