"""Run the `launcher` command, and turn errors into messages and exit codes.

Batch scripts start it as `python -m pretrain.launcher`, because they know the path of the Python
interpreter and not that of the installed command.
"""

from __future__ import annotations

import io
import os
import sys

from pretrain.startup import CODE, leave_on_ctrl_c, raise_on_ctrl_c


def main() -> None:
    """Run the command line.

    Exit codes: 2 for wrong input, 82 for a full disk and 1 for a failed run or a file system that
    refuses otherwise, each with `error: ...` lines on stderr and without a traceback. `local` exits
    with the code of the ranks. 130 after Ctrl-C. Any other exception is a bug and keeps its
    traceback.
    """
    leave_on_ctrl_c()
    # Files that the launcher and its jobs write are readable by their owner and group only.
    os.umask(0o027)
    # Not above: they take most of the command's start, in which Ctrl-C would print a traceback.
    from pretrain.config import ConfigError, RunFailed
    from pretrain.config.arguments import expand_home
    from pretrain.config.errors import PlainStream, refused
    from pretrain.launcher.cli import app
    from pretrain.rundir.paths import exit_code_of

    sys.stdout, sys.stderr = (
        # Characters that the terminal's encoding lacks are escaped, in place of an error.
        PlainStream(
            stream.detach(),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        if isinstance(stream, io.TextIOWrapper)
        else stream
        for stream in (sys.stdout, sys.stderr)
    )
    interrupts: list[int] = []
    try:
        raise_on_ctrl_c(interrupts)
        app(expand_home(sys.argv[1:]))
    except (ConfigError, RunFailed) as error:
        _exit_with_error(str(error), exit_code_of(error))
    except OSError as error:
        failure = refused(error)
        _exit_with_error(str(failure), exit_code_of(failure))
    except SystemExit as end:
        # typer ends every command with a SystemExit. After a Ctrl-C its exit code is 130 already.
        if end.code and interrupts:
            print("interrupted", file=sys.stderr)
        raise
    except BaseException:
        if not interrupts:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(CODE)
    finally:
        leave_on_ctrl_c()


def _exit_with_error(message: str, code: int) -> None:
    """Print each line of an error to stderr, and exit."""
    print("\n".join(f"error: {line}" for line in message.split("\n")), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
