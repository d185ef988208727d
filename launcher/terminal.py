"""Messages to the person at the terminal."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """A message to the person; a terminal that is gone does not end the run."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
