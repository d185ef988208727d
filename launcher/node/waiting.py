"""Say what a run waits for while no attempt is made, so that it does not look dead."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pretrain.launcher.node.repeater import Repeater
from pretrain.rundir.attempts import WAITING
from pretrain.rundir.files import replace_json
from pretrain.rundir.lock import HEARTBEAT_SECONDS

STOP_SECONDS = 2.0
"""The time that the end of the waiting gives the file server."""


@contextlib.contextmanager
def waiting(attempt: Path, what: str) -> Iterator[None]:
    """Show in `launcher status` what the run waits for, inside the `with` block.

    The file's time is renewed, so that one that a killed process has left is not believed. A disk
    that refuses ends no run.

    Args:
        attempt: RUN/attempts/#### of the newest attempt, which may have ended.
        what: The words after "waits for".
    """
    path = attempt / WAITING

    def renew() -> None:
        with contextlib.suppress(OSError):
            os.utime(path)

    with contextlib.suppress(OSError):
        replace_json(path, {"at": time.time(), "what": what})
    beats = Repeater(HEARTBEAT_SECONDS, renew)
    beats.start()
    try:
        yield
    finally:
        beats.stop(STOP_SECONDS)
        with contextlib.suppress(OSError):
            path.unlink()
