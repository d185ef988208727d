"""Run the `pretrain` command, and turn every way in which it can end into an exit code."""

from __future__ import annotations

import os
import re
import sys
import warnings

from pretrain.startup import leave_on_ctrl_c, raise_on_ctrl_c


def main() -> None:
    """Run the command and end the process with its exit code.

    Exit codes: 2 and an `error: ...` line for wrong input, 1 and such a line when the run failed,
    81 when its ranks hold different weights, 82 when the disk is full, 83 when numbers are
    not finite, 130 after Ctrl-C. None of these shows a traceback. Any other exception is a bug and
    keeps its own.
    """
    leave_on_ctrl_c()
    # What a run writes is readable by its owner and group only, as under the launcher.
    os.umask(0o027)
    # Megatron and DeepSpeed warn about optional packages at import, a screenful for every process.
    warnings.simplefilter("ignore")
    # Not above: they take most of the command's start, in which Ctrl-C would print a traceback.
    from pretrain.cli import leave
    from pretrain.cli.commands import app
    from pretrain.config import ConfigError, RunFailed
    from pretrain.config.arguments import expand_home
    from pretrain.config.errors import refusal_in, refused
    from pretrain.rundir.paths import ExitCode, exit_code_of

    interrupts: list[int] = []
    try:
        raise_on_ctrl_c(interrupts)
        app(expand_home(sys.argv[1:]))
    except SystemExit as end:
        # typer ends every command with a SystemExit. After a Ctrl-C its exit code is 130 already.
        if not (end.code and interrupts):
            leave_on_ctrl_c()
            raise
        leave(ExitCode.INTERRUPTED, "interrupted")
    except BaseException as error:
        if interrupts:
            leave(ExitCode.INTERRUPTED, "interrupted")
        if (refusal := refusal_in(error)) is not None:
            error = refused(refusal)
        if isinstance(error, ConfigError | RunFailed):
            leave(exit_code_of(error), *(f"error: {line}" for line in str(error).splitlines()))
        if lost := _lost_connection(error):
            leave(
                ExitCode.FAILED,
                f"error: lost the connection to another rank ({lost}). "
                "The output of that rank says why it ended",
            )
        raise


def _lost_connection(error: BaseException) -> str | None:
    """Return what gloo or NCCL says about a peer that ended; None for any other error.

    A traceback of every surviving rank would hide the message of the one rank that failed.
    """
    said = re.search(
        r"gloo/transport/\S+ ((?:Connection|Read error|Write error).*?)(?:\. |$)"
        r"|remote process exited[^.]*",
        str(error),
    )
    return (said[1] or said[0]) if isinstance(error, RuntimeError) and said else None
