"""The folder of a build in progress: its plan, its files, its lock, and its removal.

.building-NAME/
  lock             held by the process that builds, and names that process
  plan.jsonl       the settings, and a line for each task and each file of the corpus
  scan/TTTTTT/     hashes and origins of a task's documents, packed into its record
  compare/TTTTTT/  duplicates that a bucket of keys shows, packed into its record
  merge/           tokenizer, held-out documents, duplicates; record
  tokens/SPLIT-TTTTTT/   the shards and the index of a task; record
  data/            the data set until it gets its name: hard links to files in tokens/
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from itertools import chain, islice, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import xxhash

from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.config.schema import WORDS, CleaningSection, DataSection
from pretrain.data import sources
from pretrain.data.clean import Mode, Part
from pretrain.data.files import look
from pretrain.data.shards import FORMAT_VERSION, Split
from pretrain.data.sources import Corpus, Piece, Task
from pretrain.rundir.attempts import Owner
from pretrain.rundir.checkpoints import is_same_file, lock_alone, release
from pretrain.rundir.files import (
    PARTIAL,
    Json,
    flush,
    from_json,
    make_directory,
    new_directory,
    new_file,
    read_json,
)
from pretrain.rundir.trust import check_above, check_own_directory, open_trusted

Stage = Literal["scan", "compare", "tokenize"]


class BuildFolder:
    """The folder of a build in progress."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "lock"
        self.plan = path / "plan.jsonl"
        self.merge = path / "merge"
        """Results about the whole corpus that the tokenize stage needs."""
        self.data = path / "data"
        """The data set before it gets its name."""

    @staticmethod
    def beside(directory: Path) -> BuildFolder:
        """Return the folder in which the data set `directory` is built."""
        # Absolute, so that workers find it from any working directory.
        directory = Path(os.path.realpath(directory))
        return BuildFolder(directory.with_name(f".building-{directory.name}"))

    def scan(self, task: int) -> Path:
        """Return the folder of a task's output in the scan stage."""
        return self.path / "scan" / f"{task:06d}"

    def compare(self, bucket: int) -> Path:
        """Return the folder of a task's output in the compare stage."""
        return self.path / "compare" / f"{bucket:06d}"

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
    # Another user may have put something there.
    check_above(folder.path)
    check_own_directory(folder.path, entries=False)
    descriptor = _lock(folder)
    try:
        yield
    finally:
        release(descriptor)


def _lock(folder: BuildFolder) -> int:
    path = folder.lock
    while True:
        make_directory(folder.path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o640)
        except FileNotFoundError:
            # Its builder has finished and removed the folder in the meantime.
            continue
        if not lock_alone(descriptor):
            os.close(descriptor)
            owner = from_json(Owner, read_json(path))
            if owner is None:
                # The builder that has just taken the lock is about to write who it is.
                time.sleep(0.1)
                continue
            raise ConfigError(
                f"{folder.path}: this data set is being built by {owner}. Wait for its end, or end "
                f"it (kill {owner.pid} on {owner.host}); what it has finished is kept"
            )
        # The builder that held the lock may have removed the file since it was opened above.
        if is_same_file(descriptor, path):
            break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(dataclasses.asdict(Owner.here())).encode(), 0)
    return descriptor


def remove_build(folder: BuildFolder) -> None:
    """Remove the files of builds from the folder, and the folder if nothing else is in it.

    The plan is removed last, so that a build that is killed here is never resumed with other
    inputs.
    """
    stages = (folder.path / name for name in ("scan", "compare", "tokens"))
    outputs = *stages, folder.merge, folder.data
    partial = folder.path.glob(f".*{PARTIAL}")
    for path in [*outputs, *partial, folder.plan, folder.lock]:
        if path.is_dir():
            # A worker that outlives its builder may still add files, which are not needed.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.path.rmdir()
        flush(folder.path.parent)


# ---- Publish a task's output as one folder, and verify later that it is unchanged ----
# A task writes into its own hidden, uniquely named folder, so that two processes with the same task
# do not conflict. It writes its record last, sealed, with the size and the XXH3-128 of every file,
# flushes everything to the disk and gives the folder its name in one rename.
#
# Files that only later stages read are packed into the record: the files of the folder PACKED
# follow its line of JSON. With 39,000 tasks, separate files would burden a shared file system.
#
# A command verifies every byte that an earlier command has left. It trusts the output of its own
# tasks by record and sizes: at 10^12 tokens, one node would otherwise read 2 TB.


RECORD, PACKED = "record", "packed"
REPEATED = "repeated.npy"
"""The result of a task of the compare stage."""
_CHUNK, _ALIGNMENT = 1 << 22, 64


@contextlib.contextmanager
def output(final: Path) -> Iterator[tuple[Path, Json]]:
    """Yield a new folder, and a record to fill in; both are published if the block succeeds.

    The block may record, under "files", sizes and digests that it has computed while writing.

    If another process has published the same task, with the same bytes, this output is removed.
    """
    record: Json = {"files": {}, "packed": {}}
    try:
        with new_directory(final) as path:
            (path / PACKED).mkdir()
            yield path, record
            _pack(path / PACKED, record)
            files = sorted(p for p in path.rglob("*") if p.is_file() and p.parent.name != PACKED)
            for file in files:
                name = str(file.relative_to(path))
                if name not in record["files"]:
                    record["files"][name] = [file.stat().st_size, digest(file)]
                flush(file)
            for directory in {file.parent for file in files} - {path}:
                flush(directory)
            _write_record(path, record)
            flush(path)
    except OSError:
        if not is_done(final):
            raise


def is_done(final: Path) -> bool:
    """Return True if a task's output exists and no file has changed."""
    try:
        record, begin = _record(final)
        parts = [(final / name, 0, *each) for name, each in record["files"].items()]
        parts += [(final / RECORD, begin + at, *each) for at, *each in record["packed"].values()]
        ends: dict[Path, int] = {final / RECORD: begin}
        for path, start, size, expected in parts:
            ends[path] = max(ends.get(path, 0), start + size)
            if digest(path, start, start + size) != expected:
                return False
        return all(path.stat().st_size == end for path, end in ends.items())
    except (OSError, RunFailed):
        return False


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT


def _pack(folder: Path, record: Json) -> None:
    """Record in a record where the files of a folder will follow it."""
    end = 0
    for file in sorted(folder.iterdir()):
        size = file.stat().st_size
        record["packed"][file.name] = [end, size, digest(file)]
        end = _aligned(end + size)


def _write_record(path: Path, record: Json) -> None:
    """Write the record of a task, followed by the packed files."""
    with new_file(path / RECORD, durable=True) as partial, partial.open("xb") as file:
        file.write(_sealed_line(0, record))
        start = _aligned(file.tell())
        file.truncate(start)
        for name, (at, *_) in record["packed"].items():
            file.seek(start + at)
            file.write((path / PACKED / name).read_bytes())
    shutil.rmtree(path / PACKED)


def _record(final: Path) -> tuple[Json, int]:
    """Return the record of a finished task, and where in its file the packed files begin."""
    with (final / RECORD).open("rb") as file:
        line = file.readline()
    if (record := _unsealed(0, line)) is None:
        raise RunFailed(
            f"{final / RECORD}: damaged since it was written. Check the disk, then run the "
            "command again, which writes it again"
        )
    return record, _aligned(len(line))


def read_record(final: Path) -> Json:
    """Return the record of a finished task."""
    return _record(final)[0]


def packed(final: Path, name: str) -> Part:
    """Return the range of a file that is packed into the record of a task."""
    record, begin = _record(final)
    at, size, _ = record["packed"][name]
    return Part(final / RECORD, begin + at, size)


def read_packed(final: Path, name: str) -> io.BytesIO:
    """Return the content of a file that is packed into the record of a task."""
    path, start, size = packed(final, name)
    with path.open("rb") as file:
        file.seek(start)
        return io.BytesIO(file.read(size))


def clear(final: Path) -> None:
    """Remove a task's unusable output, and the remains of killed processes."""
    for path in [final, *final.parent.glob(f".{final.name}.*{PARTIAL}")]:
        shutil.rmtree(path, ignore_errors=True)


def digest(path: Path, start: int = 0, end: int | None = None) -> str:
    """Return the hex XXH3-128 of the bytes of a file from `start` to `end`."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        left = (path.stat().st_size if end is None else end) - start
        file.seek(start)
        while chunk := file.read(min(_CHUNK, left)):
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()


# ---- Read the results of the merge about the whole corpus ----


HELD_OUT_SEQUENCES, HELD_OUT_HASHES = "held-out.bin", "held-out-hashes.npy"
DUPLICATES = "duplicates.npy"
"""For all training documents in the order of the stream: whether each repeats an earlier one."""


class TokenTask(NamedTuple):
    """A task of the tokenize stage."""

    split: Split
    number: int
    """Position among the tasks of the split."""
    planned: int
    """The task of the plan that it reads; for held-out documents the first one of their corpus."""
    holds_out: bool
    """Whether its documents are those that the merge has held out of a corpus."""
    head: int = 0
    """If its first document is split in two, the number of its characters for training; else 0."""
    first: int = 0
    """Number of documents that the scan has found in earlier tasks than the planned one."""


def load_token_tasks(folder: BuildFolder) -> list[TokenTask]:
    """Return the tasks of the tokenize stage, which the merge has listed; those of train first."""
    with open_trusted(folder.merge / RECORD) as file:
        record = _unsealed_line(folder.merge / RECORD, 0, file.readline())
    return [TokenTask(*each) for each in record["token_tasks"]]


# ---- Plan a build: the settings that determine its bytes, the files and the tasks ----


SPLITS: tuple[Split, ...] = get_args(Split)

_RECORDED_KEYS = (
    "vocab_size",
    "validation_fraction",
    "validation_bytes",
    "tokenizer_training_bytes",
    "bytes_per_task",
    "tokens_per_block",
    "tokens_per_shard",
)
"""Keys of [data] that determine the bytes of a data set, besides corpora and tokenizer."""


class File(NamedTuple):
    """A file of the corpus as it was when the build was planned."""

    path: str
    size: int
    time: int
    """Modification time in ns."""
    digests: tuple[tuple[int, int, str], ...] = ()
    """(start, end, XXH3-128) of ranges of its bytes; empty until they have been read."""


class Plan(NamedTuple):
    """Everything that determines what is built."""

    settings: Json
    """Config keys and values, as error messages show them."""
    data: DataSection
    cleaning: CleaningSection
    tasks: dict[Split, list[Task]]
    files: dict[Split, list[File]]
    """In the order in which the tasks read them."""

    def all_tasks(self) -> list[Task]:
        """Return the tasks of both splits, those of train first."""
        return [task for split in SPLITS for task in self.tasks[split]]

    def corpora(self) -> dict[str, Corpus]:
        """Return the corpora by name, in config order."""
        return {corpus.name: corpus for corpus in sources.corpora(self.data)}


def make_plan(config: RunConfig, tokenizer_sha256: str | None) -> Plan:
    """List the files of the corpus and cut them into tasks.

    Args:
        config: The config.
        tokenizer_sha256: Hex digest of the tokenizer of data.tokenizer; None to train one.

    Raises:
        ConfigError: A file cannot be found or read.
    """
    data = config.data
    values = data.model_dump(mode="json", include=set(_RECORDED_KEYS))
    tasks = sources.plan(data)
    settings = {
        "format_version": FORMAT_VERSION,
        "corpora": [[c.name, *_read_as(c, tasks)] for c in sources.corpora(data)],
        **{f"data.{key}": values[key] for key in _RECORDED_KEYS},
        "data.tokenizer (SHA-256)": WORDS if data.tokenizer == WORDS else tokenizer_sha256,
        # This limit does not change the data set, only which builds end with an error.
        **{f"cleaning.{k}": v for k, v in config.cleaning if k != "max_skipped_documents"},
    }
    files = {split: [File(path, *look(path)) for path in _paths(tasks[split])] for split in SPLITS}
    return Plan(settings, data, config.cleaning, tasks, files)


def _read_as(corpus: Corpus, tasks: dict[Split, list[Task]]) -> tuple[str, str | None]:
    """Return the names of the sources of a corpus's files, and the fields that hold the text."""
    used = {
        sources.source_of(corpus, piece.path)
        for task in chain(*tasks.values())
        if task.corpus == corpus.name
        for piece in task.pieces
    }
    names = ", ".join(sorted(source.name for source in used))
    return names, ", ".join(sorted({source.field(corpus) for source in used} - {""})) or None


def _paths(tasks: list[Task]) -> Iterator[str]:
    """Yield the path of each file once, in the order of the tasks."""
    yield from dict.fromkeys(piece.path for task in tasks for piece in task.pieces)


# ---- on disk -------------------------------------------------------------------------------------
# The plan is one file, so that it is replaced atomically. Every line begins with a digest of the
# rest, seeded with its number, so that a task can read only its own line: a corpus may have
# millions of files.
def save_plan(plan: Plan, folder: BuildFolder) -> None:
    """Write the plan: a line that all tasks need, then a line for each task and for each file."""
    sizes = task_sizes(plan)
    held_out_bytes = _held_out_bytes(plan, sizes)
    num_train, most = len(plan.tasks["train"]), plan.data.tokenizer_training_bytes
    in_train = max(sum(sizes[:num_train]), 1)
    # The sample is for training a tokenizer, and for finding boilerplate.
    wants_sample = plan.data.tokenizer is None or plan.cleaning.decontaminate
    tasks = []
    for rank, (task, size) in enumerate(zip(plan.all_tasks(), sizes)):
        sample = min(most, int(_SAMPLE_FACTOR * most * (size / in_train)) + 1)
        held_out = held_out_bytes.get(task.corpus) if rank < num_train else None
        tasks.append([sample if wants_sample else 0, held_out, *task])
    head = {
        "settings": plan.settings,
        "data": plan.data.model_dump_json(),
        "cleaning": plan.cleaning.model_dump_json(),
        "num_train": num_train,
        "tasks": len(tasks),
        "files": {split: len(plan.files[split]) for split in SPLITS},
    }
    lines = chain([head], tasks, *(plan.files[split] for split in SPLITS))
    with new_file(folder.plan, durable=True) as partial, partial.open("xb") as file:
        file.writelines(starmap(_sealed_line, enumerate(lines)))


def read_plan(folder: BuildFolder) -> Json:
    """Return the settings and the files of a plan, as `differences` compares them.

    Raises:
        ConfigError: The plan is damaged.
    """
    with folder.plan.open("rb") as file:
        lines = [_unsealed_line(folder.plan, *each) for each in enumerate(file)]
    head: Json = lines[0] if lines else {"tasks": 0, "files": {}}
    if len(lines) != 1 + head["tasks"] + sum(head["files"].values()):
        raise _damaged_plan(folder.plan, len(lines))
    files = iter(lines[1 + head["tasks"] :])
    return head | {"files": {split: list(islice(files, n)) for split, n in head["files"].items()}}


def _sealed_line(number: int, content: Any) -> bytes:
    text = json.dumps(content).encode()
    return xxhash.xxh3_64_hexdigest(text, number).encode() + b" " + text + b"\n"


def _unsealed(number: int, line: bytes) -> Any:
    """Return the content of a line; None if it has changed."""
    seal, _, text = line.removesuffix(b"\n").partition(b" ")
    if xxhash.xxh3_64_hexdigest(text, number).encode() != seal or not line.endswith(b"\n"):
        return None
    return json.loads(text)


def _unsealed_line(path: Path, number: int, line: bytes) -> Any:
    content = _unsealed(number, line)
    if content is None:
        raise _damaged_plan(path, number)
    return content


def _damaged_plan(path: Path, line: int) -> ConfigError:
    return ConfigError(
        f"{path}: damaged: line {line + 1} has changed since it was written, so the inputs of the "
        f"build are unknown. Check the disk, then remove {path.parent} to start over"
    )


def task_sizes(plan: Plan) -> list[int]:
    """Return the approximate bytes that each task reads, train first."""
    of_file = {file.path: file.size for split in SPLITS for file in plan.files[split]}
    corpora = plan.corpora()
    ends: dict[str, int] = {}
    for task in plan.all_tasks():
        for piece in task.pieces:
            ends[piece.path] = max(ends.get(piece.path, 1), piece.end)

    def size(corpus: str, piece: Piece) -> int:
        length = piece.end - piece.start
        if sources.source_of(corpora[corpus], piece.path).in_bytes:
            return length
        # Of a file that is not cut by bytes, assume that all parts have the same size.
        return of_file[piece.path] * length // ends[piece.path]

    tasks = plan.all_tasks()
    return [sum(size(task.corpus, piece) for piece in task.pieces) for task in tasks]


def _held_out_bytes(plan: Plan, sizes: list[int]) -> dict[str, int]:
    """Return the part of data.validation_bytes of each corpus from which hashes hold out text."""
    if plan.data.validation_paths:
        return {}
    by_corpus: dict[str, int] = {}
    corpora = plan.corpora()
    for task, size in zip(plan.tasks["train"], sizes):
        if not sources.source_of(corpora[task.corpus], task.pieces[0].path).has_own_text:
            by_corpus[task.corpus] = by_corpus.get(task.corpus, 0) + size
    total = max(sum(by_corpus.values()), 1)
    return {
        name: max(plan.data.validation_bytes * size // total, 1) for name, size in by_corpus.items()
    }


_SAMPLE_FACTOR = 8
"""A task keeps this many times its share of the tokenizer's sample, because a compressed corpus has
more text than its files have bytes. The merge takes the exact share."""


class TaskPlan(NamedTuple):
    """The part of the plan that one task needs."""

    data: DataSection
    cleaning: CleaningSection
    split: Split
    task: Task
    corpus: Corpus
    sample_bytes: int
    """Limit on the text to keep for the tokenizer's sample, in bytes."""
    held_out_bytes: int | None
    """Limit on the text that the corpus may hold out, in bytes; None if hashes hold out none."""


def load_task(folder: BuildFolder, number: int) -> TaskPlan:
    """Read a task from the plan.

    Args:
        folder: The build.
        number: Position among the tasks of both splits, those of train first.
    """
    with open_trusted(folder.plan) as file:
        content = _unsealed_line(folder.plan, 0, file.readline())
        line = next(islice(file, number, None), b"")
    sample, held_out, position, name, pieces = _unsealed_line(folder.plan, number + 1, line)
    data = DataSection.model_validate_json(content["data"])
    return TaskPlan(
        data,
        CleaningSection.model_validate_json(content["cleaning"]),
        "train" if number < content["num_train"] else "validation",
        Task(position, name, tuple(Piece(*piece) for piece in pieces)),
        next(corpus for corpus in sources.corpora(data) if corpus.name == name),
        sample,
        held_out,
    )


def key_files(folder: BuildFolder) -> tuple[list[Part], Mode]:
    """Return the files with the keys that the scan has written, in stream order, and their mode."""
    with open_trusted(folder.plan) as file:
        content = _unsealed_line(folder.plan, 0, file.readline())
    mode = CleaningSection.model_validate_json(content["cleaning"]).deduplicate
    assert mode != "none"
    return [packed(folder.scan(rank), "keys") for rank in range(content["num_train"])], mode


def with_digests(folder: BuildFolder, plan: Plan) -> dict[Split, list[File]]:
    """Return the files of a plan, with the digests that the scan has computed so far."""
    digests: dict[str, set[tuple[int, int, str]]] = {}
    for rank, task in enumerate(plan.all_tasks()):
        record = read_record(folder.scan(rank))
        for piece, found in zip(task.pieces, record["digests"]):
            digests.setdefault(piece.path, set()).update(tuple(each) for each in found)
    return {
        split: [f._replace(digests=tuple(sorted(digests.get(f.path, ())))) for f in files]
        for split, files in plan.files.items()
    }


# ---- comparing -----------------------------------------------------------------------------------
def differences(before: Json, plan: Plan) -> list[str]:
    """Return messages about how a plan differs from recorded inputs; [] if they give equal bytes.

    Files are equal if their content is equal; names and times do not matter. A file is read only if
    its name or time differs from the record, and only if digests are recorded, as in a finished
    data set. In an unfinished build the tokenize stage compares every document with the scan.

    Args:
        before: {"settings": Plan.settings, "files": Plan.files}, as JSON.
        plan: The plan.
    """
    settings, files = before.get("settings", {}), before.get("files", {})
    # Convert to the types that JSON returns.
    current = json.loads(json.dumps(plan.settings))
    found = [
        f"{key} was {settings.get(key)!r}, is {value!r}"
        for key, value in current.items()
        if settings.get(key) != value
    ]
    for split in SPLITS:
        recorded = [File(*file) for file in files.get(split, [])]
        found += _different_files(recorded, plan.files[split])
    return found


def _different_files(before: list[File], files: list[File]) -> list[str]:
    """Return a message about the first difference between two lists of files, if there is one."""
    if len(before) != len(files):
        names = {file.path for file in before} ^ {file.path for file in files}
        example = f" (for one {sorted(names)[0]})" if names else ""
        return [
            f"the text (files and their content) was {len(before)} files, is {len(files)}{example}"
        ]
    for old, new in zip(before, files):
        if reason := _different_file(old, new):
            return [f"the text (files and their content) has changed: {new.path} {reason}"]
    return []


def _different_file(old: File, new: File) -> str:
    if old[:3] == new[:3]:
        return ""
    if old.size != new.size:
        return f"has {new.size} bytes, where {old.path} had {old.size}"
    for start, end, expected in old.digests:
        if digest(Path(new.path), start, end) != expected:
            return f"has other content than {old.path} had"
    return ""


# ---- errors --------------------------------------------------------------------------------------
def too_many_skipped(corpus: str, limit: int, reasons: list[str]) -> ConfigError:
    """Return the error for a corpus with more unreadable documents than allowed."""
    return ConfigError(
        f"corpus {corpus}: more than cleaning.max_skipped_documents = {limit} documents cannot be "
        f"read, for example {'; '.join(reasons[:3])}. Repair the files, or raise the limit"
    )


def changed(folder: BuildFolder, task: Task, place: tuple[int, int] | None = None) -> ConfigError:
    """Return the error for a task whose documents have changed since the scan.

    Args:
        folder: The build.
        task: The task.
        place: Piece and offset of the first changed document; None if documents are missing.
    """
    where = f"{task.pieces[place[0]].path}:{place[1]}" if place else task.pieces[-1].path
    return ConfigError(
        f"{where}: has changed since the build began. Remove {folder.path} to build from the text "
        "as it is now, or restore the file and run the command again"
    )
