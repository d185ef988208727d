"""End a command quietly on Ctrl-C in the moments in which Python would print a traceback.

Those are its start, most of which is imports, and its end. This file imports nothing of ours and
nothing slow, so that both commands can call it before all else.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

CODE = 130
"""The exit code of a command that Ctrl-C ends, as shells have it."""


def leave_on_ctrl_c() -> None:
    """End the process at once on Ctrl-C from now on, with nothing done by it yet or any more.

    Where Ctrl-C is ignored, as in a shell's background job, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


def raise_on_ctrl_c(recorded: list[int]) -> None:
    """Raise KeyboardInterrupt on Ctrl-C from now on, and append to `recorded`.

    Libraries turn a KeyboardInterrupt into errors of their own; the list knows better.
    """

    def record(number: int, frame: FrameType | None) -> None:
        recorded.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, record)


def _leave(number: int, frame: FrameType | None) -> None:
    # Not print: what is interrupted may be in the middle of it.
    os.write(2, b"interrupted\n")
    os._exit(CODE)
