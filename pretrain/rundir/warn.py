"""Warn about what goes wrong beside training, once for each kind, and let training go on."""

from __future__ import annotations

import contextlib
import sys


class WarnOnce:
    """Prints the first warning of each kind on stderr."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        """Print a warning unless one of its kind has been printed.

        Args:
            kind: A few words; not printed.
            message: What went wrong, and what becomes of it.
        """
        if kind in self._said:
            return
        self._said.add(kind)
        # stderr may be a file on the very disk that is full.
        with contextlib.suppress(OSError):
            print(f"warning: {message}", file=sys.stderr, flush=True)
