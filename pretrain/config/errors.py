"""Define the errors that end a command without a traceback: wrong input, and a failed run.

`pretrain` and `launcher` print the message of any of them as `error: ...` lines; the exit code is 2
for a ConfigError, 1 for a RunFailed and 81 for a Diverged (`rundir.states.exit_code_of`). Any other
exception is a bug in this project and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ConfigError(ValueError):
    """Wrong input: a config, option or file with which the command cannot work.

    The message names the file, the key, the value and what to do about it.
    """


class RunFailed(RuntimeError):
    """A failure of a command whose input was right.

    The message says where it failed and what to try.
    """


class Diverged(RunFailed):
    """Ranks of a run hold different values of what must be equal.

    The message names the parameters, and the ranks and hosts that differ.
    """


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside the `with` block into a RunFailed that names `path`.

    The error that Python raises when a disk is full carries no file name, so the user could not see
    which file system to clean up.

    Args:
        path: The file or directory that the block writes to, or below.

    Raises:
        RunFailed: When the operating system refuses the write (full disk, quota, permissions).
    """
    try:
        yield
    except OSError as error:
        # The refused file may be another one than `path`, for example a file below that directory.
        where = f", {error.filename}" if error.filename and str(error.filename) != str(path) else ""
        raise RunFailed(
            f"{path}: cannot be written ({error.strerror or error}{where}). "
            "Make room or choose another place, then run the command again"
        ) from error
