"""Run the `launcher` command, and turn errors into messages and exit codes."""

from __future__ import annotations

import io
import os
import sys

from pretrain.config import ConfigError, NoSpace, RunFailed
from pretrain.config.arguments import expand_home
from pretrain.launcher.cli import app
from pretrain.launcher.terminal import plain
from pretrain.rundir.states import ExitCode


def main() -> None:
    """Run the command line.

    Exit codes: 2 for wrong input, 82 for a full disk and 1 for a failed run or a file system that
    refuses otherwise, each with `error: ...` lines on stderr and without a traceback. `local` exits
    with the code of the ranks. Any other exception is a bug and keeps its traceback.
    """
    # Files that the launcher and its jobs write are readable by their owner and group only.
    os.umask(0o027)
    # Characters that the terminal's encoding lacks are escaped, in place of an error.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(expand_home(sys.argv[1:]))
    except ConfigError as error:
        _exit_with_error(str(error), ExitCode.BAD_INPUT)
    except NoSpace as error:
        _exit_with_error(str(error), ExitCode.NO_SPACE)
    except RunFailed as error:
        _exit_with_error(str(error), ExitCode.FAILED)
    except OSError as error:
        # Without a filename the message has all that is known, as for a broken pipe.
        named = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        _exit_with_error(named, ExitCode.FAILED)


def _exit_with_error(message: str, code: ExitCode) -> None:
    """Print each line of an error to stderr, and exit."""
    print("\n".join(f"error: {plain(line)}" for line in message.split("\n")), file=sys.stderr)
    sys.exit(code)
