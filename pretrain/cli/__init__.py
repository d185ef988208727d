"""The `pretrain` command: parse arguments, call, print; and how its process ends."""

from __future__ import annotations

import contextlib
import os
import sys

from pretrain.config import ConfigError


def leave(code: int, *lines: str) -> None:
    """Print `lines` to stderr and end the process at once with `code`.

    os._exit instead of sys.exit: an orderly exit destroys the process group, which waits for ranks
    that have not failed.
    """
    prefix = _rank_prefix()
    sys.stdout.flush()
    text = "".join(f"{prefix}{line}\n" for line in lines)
    # One write, so that the lines of ranks that share a terminal do not mix.
    print(text, end="", file=sys.stderr, flush=True)
    os._exit(code)


def _rank_prefix() -> str:
    """Return "rank N: " on ranks other than 0, and nothing on rank 0 or in a single process."""
    # Without pretrain.topology, or in the middle of its import, no rank has been assigned yet.
    process = getattr(sys.modules.get("pretrain.topology"), "Process", None)
    if process is None:
        return ""
    # An incomplete environment may be the very error that is being reported.
    with contextlib.suppress(ConfigError):
        if rank := process.from_environment().rank:
            return f"rank {rank}: "
    return ""
