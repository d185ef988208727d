"""Upload checkpoints beside training, in a process of its own.

The process looks for complete checkpoints in RUN/checkpoints that are not in the store, the newest
first, and uploads them. So it needs no word of a publication, a save never waits for it, and what
an earlier attempt could not upload is made up for. A checkpoint that is being uploaded is held, so
that retention leaves it alone.

It reads lines of JSON on stdin: {"do": "finish"} asks it to upload what is missing once more and to
end. Before it ends it prints what is still missing. It also ends, at once, when stdin does.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pretrain.checkpoint.store import Store
from pretrain.config import ConfigError, RunFailed
from pretrain.rundir.checkpoints import Saved, saved_checkpoints
from pretrain.rundir.holds import hold

POLL_SECONDS = 2.0
"""Between two looks into RUN/checkpoints."""

_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
"""What is sent to all processes of a job, and which the training process acts on."""
_ROOT = Path(__file__).parents[2]
_PROGRAM = f"import sys; sys.path.append(sys.argv[3]); import {__name__} as u; u.main()"
"""Not `-m`, which would look in the current directory first; that is where users keep scripts."""


# ---- in the training process ---------------------------------------------------------------------
class Uploader:
    """The process that uploads a run's checkpoints, seen from the training process of rank 0."""

    def __init__(self, run: Path, url: str) -> None:
        """Start the process.

        Args:
            run: The run's directory.
            url: checkpoint.upload_to.
        """
        self._run, self._url = run, url
        self._process = self._start()
        self._was_reported = False

    def check(self) -> None:
        """Warn, once, if the process has ended although it was not asked to."""
        if self._was_reported or self._process.poll() is None:
            return
        self._was_reported = True
        _warn(f"{self._ended()}. Uploading is tried again when the run ends")

    def finish(self, may_wait: Callable[[], bool]) -> list[str]:
        """Wait until everything is uploaded, or has failed once more.

        Args:
            may_wait: Is asked about once a second if there is still time.

        Returns:
            What is not in the store, and why: a line for each checkpoint.
        """
        if self._process.poll() is not None:
            self._process = self._start()
        command: str | None = '{"do": "finish"}\n'
        while True:
            try:
                out, _ = self._process.communicate(command, timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                # The command has been sent; from the second call on, only wait.
                command = None
                if not may_wait():
                    self.close()
                    return [f"{self._run}: there was no time to upload every checkpoint"]
        try:
            missing: list[str] = json.loads(out)["missing"]
        except (ValueError, KeyError, TypeError):
            return [self._ended()]
        return missing

    def close(self) -> None:
        """End the process, whatever it is doing. What it has begun is finished by a later start."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _ended(self) -> str:
        code = self._process.poll()
        return (
            f"checkpoint.upload_to = {self._url}: the process that uploads "
            f"(process {self._process.pid}) ended with code {code}"
        )

    def _start(self) -> subprocess.Popen[str]:
        """Start the process, with the signals blocked that are meant for the training process."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(self._run), self._url, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the process beside it --------------------------------------------------------------------
class Rounds:
    """Uploads what is missing, one checkpoint at a time."""

    def __init__(self, run: Path, store: Store) -> None:
        """Remember nothing yet.

        Args:
            run: The run's directory.
            store: Where to.
        """
        self._run, self._store = run, store
        self._uploaded: set[str] = set()
        self._failed: dict[str, str] = {}
        """Id -> why, of those that failed since the last checkpoint appeared."""
        self._warned: set[str] = set()
        self._newest: str | None = None

    def upload_next(self) -> bool:
        """Upload the newest checkpoint that is missing in the store and has not just failed.

        Returns:
            False when there was none.
        """
        found = self._found()
        if found and found[0].lineage is not None and found[0].lineage.id != self._newest:
            # What failed is tried again with every new checkpoint.
            self._newest = found[0].lineage.id
            self._failed.clear()
        for saved in found:
            assert saved.lineage is not None
            identifier = saved.lineage.id
            if identifier in self._uploaded or identifier in self._failed:
                continue
            self._upload(saved, is_newest=identifier == self._newest)
            return True
        return False

    def try_again(self) -> None:
        """Forget which uploads failed."""
        self._failed.clear()

    def missing(self) -> list[str]:
        """Return a line for each checkpoint of the run that is not in the store."""
        lines = []
        for saved in reversed(self._found()):
            assert saved.lineage is not None
            if saved.lineage.id not in self._uploaded:
                why = self._failed.get(saved.lineage.id, "not tried yet")
                lines.append(f"{saved.path}: not uploaded: {why}")
        return lines

    def _found(self) -> list[Saved]:
        """Return the run's checkpoints, newest first."""
        with contextlib.suppress(OSError, ConfigError):
            return [saved for saved in reversed(saved_checkpoints(self._run)) if saved.is_sound]
        return []

    def _upload(self, saved: Saved, is_newest: bool) -> None:
        assert saved.lineage is not None
        identifier = saved.lineage.id
        try:
            with hold(saved.path):
                self._store.upload(saved.path)
                if is_newest:
                    self._store.set_newest(saved.lineage)
        except (ConfigError, RunFailed, OSError) as error:
            if not saved.path.exists():
                # Retention deleted it, or it was set aside: it is not wanted any more.
                return
            self._failed[identifier] = str(error)
            if identifier not in self._warned:
                self._warned.add(identifier)
                _warn(
                    f"{saved.path}: not uploaded: {error}. Training goes on, and the upload is "
                    "tried again after the next save and when the run ends"
                )
        else:
            self._uploaded.add(identifier)


def main() -> None:
    """Upload until stdin asks to finish, then once more what is missing; print what still is."""
    run, url = Path(sys.argv[1]), sys.argv[2]
    commands: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    # Below training's priority: verifying and encrypting take time on a processor.
    with contextlib.suppress(OSError):
        os.nice(5)
    rounds = Rounds(run, Store(url))
    while commands.empty():
        if not rounds.upload_next():
            with contextlib.suppress(queue.Empty):
                commands.put(commands.get(timeout=POLL_SECONDS))
    rounds.try_again()
    while rounds.upload_next():
        pass
    print(json.dumps({"missing": rounds.missing()}), flush=True)
    # Threads of a store's client may still wait for something.
    os._exit(0)


def _listen(commands: queue.Queue[str]) -> None:
    """Pass on the first line of stdin. Without one, the training process has ended."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    commands.put(line)


def _warn(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"warning: {message}", file=sys.stderr, flush=True)
