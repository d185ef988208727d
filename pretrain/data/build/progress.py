"""Show how far a stage is: one line on a terminal that is drawn anew, or a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from pretrain.data.build.folder import BuildFolder
from pretrain.rundir.files import read_json

TERMINAL_SECONDS, LOG_SECONDS = 0.5, 30.0
"""From one look at the tasks to the next."""


class Progress:
    """Look at the small files that the tasks of a stage write, from a thread of its own."""

    def __init__(self, folder: BuildFolder, stage: str, finals: list[Path], sizes: list[int]):
        """Prepare to show a stage.

        Args:
            folder: The build.
            stage: Its name.
            finals: Where the output of each task will be.
            sizes: About how many bytes each task reads.
        """
        self._folder, self._stage, self._finals, self._sizes = folder, stage, finals, sizes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._shown = 0

    def __enter__(self) -> Progress:
        self._folder.progress.mkdir(exist_ok=True)
        for path in self._folder.progress.iterdir():
            path.unlink(missing_ok=True)
        self._before = self._done()
        self._start = time.monotonic()
        # The stream as it is now: a task may redirect it.
        self._stream = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._shown and self._is_terminal:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._stream.flush()

    def _show(self) -> None:
        while not self._over.wait(TERMINAL_SECONDS if self._is_terminal else LOG_SECONDS):
            line = self.line()
            if self._is_terminal:
                self._stream.write("\r" + line.ljust(self._shown))
                self._shown = len(line)
            else:
                self._stream.write(line + "\n")
            self._stream.flush()

    def _done(self) -> set[int]:
        """Return the tasks whose output is there."""
        # One listing instead of a question for each task, of which a file server gets thousands.
        names = {
            path
            for parent in {path.parent for path in self._finals}
            if parent.is_dir()
            for path in parent.iterdir()
        }
        return {rank for rank, path in enumerate(self._finals) if path in names}

    def line(self) -> str:
        """Return how far the stage is, in one line."""
        seconds = max(time.monotonic() - self._start, 1e-3)
        done = self._done()
        documents = size = 0
        seen = sum(self._sizes[rank] for rank in done - self._before)
        for path in self._folder.progress.glob(f"{self._stage}-*.json"):
            record = read_json(path)
            documents += record.get("documents", 0)
            size += record.get("bytes", 0)
            rank = int(path.stem.rpartition("-")[2])
            if rank not in done:
                seen += min(record.get("bytes", 0), self._sizes[rank])
        to_do = sum(size for rank, size in enumerate(self._sizes) if rank not in self._before)
        share = seen / max(to_do, 1)
        left = f"{in_time(seconds * (1 - share) / share)} left" if share > 0 else "begun"
        return (
            f"{self._stage}: {len(done)}/{len(self._finals)} tasks, {documents:,} documents, "
            f"{size / 1e6 / seconds:.1f} MB/s, {left}"
        )


def in_time(seconds: float) -> str:
    """Return a time as people read it: 12:34 or 1:02:03."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
