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
  progress/        errors of tasks, and whether all are to stop
  logs/            which tasks the jobs of an array do, and the jobs' logs
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash
from tqdm import tqdm

from pretrain.config import ConfigError
from pretrain.data.manifest import Split
from pretrain.rundir.attempts import Owner
from pretrain.rundir.files import (
    PARTIAL,
    Json,
    flush_directory,
    flush_file,
    from_json,
    make_directory,
    read_json,
    replace_json,
)
from pretrain.rundir.lineage import UNSUPPORTED
from pretrain.rundir.trust import check_own_directory

LOCK, FINISH, PLAN, TASKS = "lock", "finish.json", "plan.json", "tasks.jsonl"
FILES = "files.json"
Stage = Literal["scan", "tokenize"]

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
        """The folder of the logs of jobs."""
        return self.path / "logs"

    @property
    def progress(self) -> Path:
        """The folder of what tasks tell the builder."""
        return self.path / "progress"

    @property
    def stop(self) -> Path:
        """The file that asks running tasks to give up, because another one has failed."""
        return self.progress / "stop"

    def final(self, stage: Stage, rank: int) -> Path:
        """Return the folder of a task's output."""
        if stage == "scan":
            return self.scan(rank)
        return self.tokens(*load_token_task(self, rank)[:2])

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

    The jobs of an array read in logs/STAGE what to do.
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


# ---- Publish a task's output as one folder, and prove later that it is still what was written ----
# A task writes into a folder of its own, hidden and unique, so that two processes that happen to do
# the same task do not meet. It writes record.json last, with the size and the XXH3-128 of every
# file, flushes everything to the disk and gives the folder its name in one rename. Whether a task
# is done is answered by the record and by the files themselves.


RECORD = "record.json"
_SEAL = "xxh3_128"
_HIDDEN = ".partial"
_CHUNK = 1 << 22


class Output:
    """The folder that a task writes to, before it is published."""

    def __init__(self, final: Path) -> None:
        """Make a hidden folder beside `final`."""
        self.final = final
        self.path = final.with_name(f".{final.name}.{uuid.uuid4().hex}{_HIDDEN}")
        final.parent.mkdir(exist_ok=True)
        self.path.mkdir()

    def publish(self, record: Json) -> None:
        """Write the record and give the folder its final name.

        Whoever published the same task before has written the same bytes: then this one is removed.
        """
        files = sorted(p for p in self.path.rglob("*") if p.is_file())
        described = {
            str(path.relative_to(self.path)): [path.stat().st_size, digest(path)] for path in files
        }
        for path in files:
            flush_file(path)
        for directory in {path.parent for path in files} - {self.path}:
            flush_directory(directory)
        content = record | {"files": described}
        replace_json(self.path / RECORD, content | {_SEAL: _seal(content)}, durable=True)
        flush_directory(self.path)
        try:
            self.path.rename(self.final)
        except OSError:
            if not is_done(self.final):
                raise
            self.discard()
        flush_directory(self.final.parent)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def output(final: Path) -> Iterator[Output]:
    """Yield the folder of a task's output, which is removed unless the block publishes it."""
    made = Output(final)
    try:
        yield made
    finally:
        made.discard()


def is_done(final: Path) -> bool:
    """Return True if a task's output is there and every file is as it was written."""
    record = read_json(final / RECORD, most=None)
    if record.pop(_SEAL, None) != _seal(record):
        return False
    files = record["files"]
    try:
        return all(
            (final / name).stat().st_size == size and digest(final / name) == expected
            for name, (size, expected) in files.items()
        )
    except OSError:
        return False


def _seal(record: Json) -> str:
    """Return a digest of a record, so that a damaged number is not believed."""
    return xxhash.xxh3_128_hexdigest(json.dumps(record).encode())


def clear(final: Path) -> None:
    """Remove a task's output that cannot be used, and what killed processes left of it."""
    for path in [final, *final.parent.glob(f".{final.name}.*{_HIDDEN}")]:
        shutil.rmtree(path, ignore_errors=True)


def digest(path: Path, start: int = 0, end: int | None = None) -> str:
    """Return the hex XXH3-128 of the bytes of a file from `start` to `end`."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        file.seek(start)
        left = (file.seek(0, os.SEEK_END) if end is None else end) - start
        file.seek(start)
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()


# ---- Read what the merge found out about the whole corpus ----


HELD_OUT_SEQUENCES, HELD_OUT_HASHES = "held-out.bin", "held-out-hashes.npy"


class TokenTask(NamedTuple):
    """A task of the tokenize stage."""

    split: Split
    number: int
    """Position among the tasks of the split."""
    planned: int
    """The task of the plan that it reads; for held-out documents the first one of their corpus."""
    holds_out: bool
    """Its documents are those that the merge has held out of a corpus."""


class Cut(NamedTuple):
    """The place at which the only document of a data set is cut into training and validation."""

    task: int
    """The task of the plan that holds it, as its first document."""
    characters: int
    """Those of the training part."""


def token_tasks(merge: Json) -> list[TokenTask]:
    """Return the tasks of the tokenize stage, those of train first."""
    return [TokenTask(*each) for each in merge["token_tasks"]]


def load_merge(folder: BuildFolder) -> Json:
    """Return the record of the merge; {} before it is done."""
    return read_json(folder.merge / RECORD, most=None)


def load_token_task(folder: BuildFolder, rank: int) -> TokenTask:
    """Return a task of the tokenize stage."""
    return token_tasks(load_merge(folder))[rank]


def cut_of(merge: Json) -> Cut | None:
    """Return where the only document is cut, if the data set has a single one."""
    return Cut(*merge["cut"]) if merge["cut"] else None


LOOK_SECONDS = 0.5
"""From one look at the outputs of a stage to the next."""


@contextlib.contextmanager
def shown_progress(stage: Stage, finals: list[Path], sizes: list[int]) -> Iterator[None]:
    """Show on a terminal how far a stage is while the block runs.

    Args:
        stage: Its name.
        finals: Where the output of each task will be.
        sizes: About how many bytes each task reads.
    """
    over = threading.Event()

    def done() -> int:
        # One listing instead of a question for each task, of which a file server gets thousands.
        folders = {final.parent for final in finals}
        names = {path for each in folders if each.is_dir() for path in each.iterdir()}
        return sum(size for final, size in zip(finals, sizes) if final in names)

    # disable=None draws the bar on a terminal and nothing into a log file.
    with tqdm(
        desc=stage, total=sum(sizes), initial=done(), unit="B", unit_scale=True, disable=None
    ) as bar:

        def show() -> None:
            while not over.wait(LOOK_SECONDS):
                bar.update(done() - bar.n)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
