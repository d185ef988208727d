"""Run the `launcher` command, and turn errors into messages and exit codes.

Batch scripts start it as `python -m pretrain.launcher`, because they know the path of the Python
interpreter but not the path of the installed command.
"""

from __future__ import annotations

import io
import sys

from pretrain.startup import leave_on_ctrl_c


def main() -> None:
    """Run the command line; see `processes.run_command`. `local` exits with the ranks' code."""
    leave_on_ctrl_c()
    # Not at the top: these imports take most of the time that the command needs to start, and
    # Ctrl-C would print a traceback during that time.
    from pretrain.config.errors import PlainStream
    from pretrain.processes import run_command

    sys.stdout, sys.stderr = (
        # Characters that the terminal's encoding lacks are escaped instead of raising an error.
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
    run_command("pretrain.launcher.cli")


if __name__ == "__main__":
    main()
