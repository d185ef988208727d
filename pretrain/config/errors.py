"""The two ways a command ends badly: its input was wrong, or it failed. Neither is shown as a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ConfigError(ValueError):
    """A run that cannot work. The message names the file, the key, the value and the remedy."""


class RunFailed(RuntimeError):
    """A run that was right and failed all the same. The message says where, and what to try."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writes to `path` or into it: what the disk refuses is RunFailed with a name, which a full disk's error lacks."""
    try:
        yield
    except OSError as error:
        where = f", {error.filename}" if error.filename and str(error.filename) != str(path) else ""
        raise RunFailed(
            f"{path}: cannot be written ({error.strerror or error}{where}). Make room or choose another place, "
            "then run the command again"
        ) from error
