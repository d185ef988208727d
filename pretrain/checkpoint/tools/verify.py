"""`pretrain checkpoint verify`: read every byte of checkpoints and compare it with its digest."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from pretrain.checkpoint.blocks import BlockReader, DamagedCheckpoint, FileRecord
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.tools.table import size
from pretrain.config import ConfigError
from pretrain.rundir.checkpoints import MANIFEST, is_complete, named_by_step
from pretrain.rundir.holds import hold
from pretrain.rundir.paths import RunPaths

NUM_THREADS = 4
"""Files that are read at once. Hashing keeps about one core busy for 10 GB/s."""
PROGRESS_SECONDS = 5.0
"""Between two lines that say how far the work has come."""


def checkpoints_at(source: Path) -> list[Path]:
    """Return the checkpoint at `source`, or all checkpoints of the run there, oldest first.

    Raises:
        ConfigError: It is neither.
    """
    if is_complete(source):
        return [source]
    if found := named_by_step(RunPaths(source).checkpoints):
        return found
    what = "neither a run nor a checkpoint" if source.exists() else "no such directory"
    raise ConfigError(
        f"{source}: {what}. Give a run's directory (it has checkpoints/) or one step-######## in it"
    )


def verify_sources(sources: Sequence[Path]) -> bool:
    """Verify checkpoints, and print a line for each and one for each damaged file.

    Args:
        sources: Runs, which mean all of their checkpoints, and checkpoints.

    Returns:
        True if all of them are as they were written.

    Raises:
        ConfigError: A source is neither.
    """
    paths = [path for source in sources for path in checkpoints_at(source)]
    damaged = 0
    for path in paths:
        problems, read = verify_checkpoint(path, _say)
        damaged += bool(problems)
        for problem in problems:
            print(f"{path}: DAMAGED: {problem}", flush=True)
        if not problems:
            print(f"{path}: every byte is as it was written ({size(read)})", flush=True)
    if damaged:
        print(f"{damaged} of {len(paths)} checkpoints {'is' if damaged == 1 else 'are'} damaged")
    return not damaged


def verify_checkpoint(
    path: Path, say: Callable[[str], None] | None = None
) -> tuple[list[str], int]:
    """Read every byte of a checkpoint once.

    Args:
        path: The checkpoint.
        say: Is told now and then how far the work has come.

    Returns:
        What is damaged, file by file, and the number of bytes in files that are not.
    """
    progress = _Progress(path, say)
    if not is_complete(path):
        return [f"{MANIFEST}: missing"], 0
    try:
        with hold(path):
            checkpoint = open_checkpoint(path)
            files = checkpoint.index.files
            progress.total = sum(checkpoint.files.values())
            progress.add(progress.total - sum(file.bytes for file in files))
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                found = list(pool.map(lambda file: _verify_file(path, file, progress), files))
    except ConfigError as error:
        # Not only damage: also another version, another name, or a deletion a moment ago.
        return [_without_remedy(error, path)], 0
    return [problem for problem in found if problem], progress.done


def _verify_file(directory: Path, record: FileRecord, progress: _Progress) -> str | None:
    try:
        with closing(BlockReader(directory, record)) as file:
            file.verify(progress.add)
    except DamagedCheckpoint as error:
        return _without_remedy(error, directory)
    except OSError as error:
        return f"{record.name}: cannot be read ({error.strerror})"
    return None


def _without_remedy(error: Exception, path: Path) -> str:
    """Return a message without the path, which stands before it, and without what to do."""
    return str(error).replace(f"{path}/", "").partition(". ")[0]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Progress:
    """Counts bytes from several threads and says now and then how far they are."""

    def __init__(self, path: Path, say: Callable[[str], None] | None) -> None:
        self.done = self.total = 0
        self._path, self._say, self._lock = path, say, threading.Lock()
        self._last = time.monotonic()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            now = time.monotonic()
            if self._say is not None and now - self._last >= PROGRESS_SECONDS:
                self._last = now
                share = self.done / max(1, self.total)
                self._say(f"{self._path}: {share:.0%} of {size(self.total)}")
