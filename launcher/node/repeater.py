"""Call a function every few seconds, in a thread beside what the process does."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Repeater(threading.Thread):
    """Call a function at once and then every few seconds, in a thread, until `stop`."""

    def __init__(self, seconds: float, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._seconds, self._function, self._over = seconds, function, threading.Event()

    def run(self) -> None:
        """Run the thread; threading.Thread.start calls this."""
        while True:
            self._function()
            if self._over.wait(self._seconds):
                return

    def stop(self, seconds: float | None = None) -> None:
        """Stop calling, and wait for a call that is under way, for `seconds` at most."""
        self._over.set()
        if self.is_alive():
            self.join(seconds)
