"""The folder of a build under way: its files, its lock, and its removal.

.building-NAME/
  lock             held by the process that builds; says which
  plan.json        the settings and the sizes of the tasks; written when the plan is whole
  tasks.jsonl      one line a task
  files.json       the files of the corpus, by split
  scan/TTTTTT/     what a task's documents are; record.json is written last
  merge/           tokenizer, held-out documents, duplicates; record.json
  tokens/SPLIT-TTTTTT/   the shards of a task; record.json
  finish.json      every task is done: what the data set consists of
  data/            the data set, until it gets its name
  progress/ logs/  how far each task is; what datatrove says
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.rundir.attempts import Owner
from pretrain.rundir.files import (
    PARTIAL,
    flush_directory,
    from_json,
    make_directory,
    read_json,
)
from pretrain.rundir.holds import UNSUPPORTED
from pretrain.rundir.trust import check_own_directory

LOCK, FINISH, PLAN, TASKS = "lock", "finish.json", "plan.json", "tasks.jsonl"
FILES = "files.json"
_OWN = (PLAN, TASKS, FILES, FINISH, "scan", "merge", "tokens", "data", "progress", "logs")


@dataclass(frozen=True)
class BuildFolder:
    """The folder of a build under way."""

    path: Path

    @staticmethod
    def beside(directory: Path) -> BuildFolder:
        """Return the folder in which the data set `directory` is built."""
        # Absolute: workers and jobs on other nodes find it whatever their working directory.
        directory = Path(os.path.realpath(directory))
        return BuildFolder(directory.with_name(f".building-{directory.name}"))

    @property
    def plan(self) -> Path:
        """The file of the settings and the files of the corpus."""
        return self.path / PLAN

    @property
    def files(self) -> Path:
        """The file of the files of the corpus."""
        return self.path / FILES

    @property
    def tasks(self) -> Path:
        """The file of the tasks."""
        return self.path / TASKS

    @property
    def finish(self) -> Path:
        """The file that says that every task is done."""
        return self.path / FINISH

    @property
    def merge(self) -> Path:
        """The folder of what the tokenize stage needs to know about the whole corpus."""
        return self.path / "merge"

    @property
    def data(self) -> Path:
        """The data set before it gets its name."""
        return self.path / "data"

    @property
    def logs(self) -> Path:
        """The folder of datatrove's logs."""
        return self.path / "logs"

    @property
    def progress(self) -> Path:
        """The folder of a small file for each task that runs."""
        return self.path / "progress"

    @property
    def stop(self) -> Path:
        """The file that asks running tasks to give up, because another one has failed."""
        return self.progress / "stop"

    def scan(self, task: int) -> Path:
        """Return the folder of a task's output in the scan stage."""
        return self.path / "scan" / f"{task:06d}"

    def tokens(self, split: str, task: int) -> Path:
        """Return the folder of a task's output in the tokenize stage."""
        return self.path / "tokens" / f"{split}-{task:06d}"


@contextlib.contextmanager
def locked(folder: BuildFolder) -> Iterator[None]:
    """Make the folder if it is missing, and hold its lock while the block runs.

    The kernel releases the lock of a process that dies.

    Raises:
        ConfigError: Another process builds there, or another user may write to it.
    """
    _check_trusted(folder)
    descriptor = _lock(folder)
    try:
        yield
    finally:
        # Not by closing alone: a child that was forked meanwhile has the same lock.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _check_trusted(folder: BuildFolder) -> None:
    """Refuse a folder in which another user may have put something.

    The tasks of a job array execute a pickle in logs/STAGE.
    """
    for path in (folder.path, folder.logs, *folder.logs.glob("*/")):
        check_own_directory(path, entries=False)


def _lock(folder: BuildFolder) -> int:
    path = folder.path / LOCK
    while True:
        make_directory(folder.path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o640)
        except FileNotFoundError:
            # Its builder has finished and removed the folder meanwhile.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            owner = from_json(Owner, read_json(path)) or Owner()
            raise ConfigError(
                f"{folder.path}: this data set is being built by {owner}. Wait for its end, or end "
                f"it (kill {owner.pid} on {owner.host}); what it has finished is kept"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise
        # The builder that held it may have removed it between the two lines above.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(dataclasses.asdict(Owner.here())).encode(), 0)
    return descriptor


def remove_build(folder: BuildFolder) -> None:
    """Remove the folder of a build that is finished, or was never begun.

    finish.json and the lock go last: killed half-way, a later call sees what is left as leftovers.
    """
    for path in own_files(folder):
        if path.name != FINISH:
            # A worker that outlives its builder may still add files, which are not needed.
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    folder.finish.unlink(missing_ok=True)
    (folder.path / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.path.rmdir()
        flush_directory(folder.path.parent)


def own_files(folder: BuildFolder) -> list[Path]:
    """Return what builds have put into the folder, the lock excepted: anything else is a user's."""
    return [
        path
        for path in sorted(folder.path.iterdir())
        if path.name in _OWN or (path.name.startswith(".") and path.name.endswith(PARTIAL))
    ]


def is_leftover(folder: BuildFolder) -> bool:
    """Return True if the folder holds nothing that a build could go on with."""
    return folder.finish.exists() or not folder.plan.exists()
