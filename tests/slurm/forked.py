"""Run `launcher` in a fork of the tests' process, which has made its imports already.

The command runs the same `main()` with its own arguments, environment, directory and descriptors. A
fresh process for each would spend most of its time on imports.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

# What the commands import in their functions.
from pretrain.launcher.main import main
from tests.end_to_end.commands import Done


def launcher(words: Sequence[object], cwd: Path, environment: Mapping[str, str]) -> Done:
    """Run `launcher WORDS` in `cwd`, with these variables and no others."""
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        # What this process has buffered must not be written twice.
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become(list(map(str, words)), cwd, dict(environment), outputs)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Done(code, *(path.read_text(errors="backslashreplace") for path in outputs))


def _become(
    words: list[str], cwd: Path, environment: dict[str, str], outputs: Sequence[Path]
) -> NoReturn:
    code = 1
    try:
        for descriptor, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # pytest has put others in their place.
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["launcher", *words]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
