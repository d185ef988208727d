"""Do the tasks of the parallel stages: read documents, clean them, and scan or tokenize them.

A task is a chain of generators that share a `Work`. What it needs stands in the build's folder, so
any process on any machine that sees the folder can do it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.config import ConfigError, NoSpace, RunFailed, writing
from pretrain.data import sources
from pretrain.data.build.folder import (
    HELD_OUT_HASHES,
    HELD_OUT_SEQUENCES,
    BuildFolder,
    Stage,
    changed,
    clear,
    cut_of,
    digest,
    is_done,
    load_merge,
    load_task,
    load_token_task,
    output,
    too_many_skipped,
)
from pretrain.data.build.merge import Sampler
from pretrain.data.clean import (
    Candidates,
    Cleaner,
    HeldOut,
    document_hash,
    duplicate_keys,
    save_keys,
)
from pretrain.data.shards import ShardWriter
from pretrain.data.sources.files import is_url, unreadable
from pretrain.data.tokenizer import find_tokenizer, load_tokenizer
from pretrain.rundir.files import Json, make_directory, read_json, replace_json

SCANNED = np.dtype([("hash", "<u8"), ("piece", "<u4"), ("offset", "<u8"), ("bytes", "<u8")])
"""What the scan notes of a document."""

PLACE = np.dtype([("task", "<u4"), ("piece", "<u4"), ("offset", "<u8"), ("token", "<u8")])
"""Where a document comes from (task of the plan, piece of the task, offset as `Document.offset`),
and where it begins among the tokens of its task in the split."""

BATCH_CHARACTERS = 1 << 20
"""Text that is tokenized at once."""

LOOK_SECONDS = 1.0
"""From one look to the next whether another task has failed."""

EXAMPLES = 5
"""Reasons of skipped documents that a record keeps."""


class Stopped(RuntimeError):
    """Another task has failed, so this one is given up."""


class _Document(NamedTuple):
    text: str
    task: int
    """The task of the plan that it was read from."""
    piece: int
    offset: int


_Documents = Iterable[_Document]


class Work:
    """A task that is being done, and its counts."""

    def __init__(self, folder: BuildFolder, stage: Stage, rank: int) -> None:
        """Read what the plan says of a task.

        Args:
            folder: The build.
            stage: The stage.
            rank: The number of the task in the stage.
        """
        self.folder, self.rank = folder, rank
        self.counts: Counter[str] = Counter()
        self.skipped: list[str] = []
        self.token_task = load_token_task(folder, rank) if stage == "tokenize" else None
        self.planned = self.token_task.planned if self.token_task else rank
        """The task of the plan whose documents are read."""
        self.holds_out = self.token_task is not None and self.token_task.holds_out
        """The documents are those that the merge has held out of a corpus."""
        self.plan = load_task(folder, self.planned)
        self._looked = 0.0

    def leave_out(self, reason: str, text: str) -> None:
        """Count a document that is left out of training."""
        self.counts[f"{reason}.documents"] += 1
        self.counts[f"{reason}.bytes"] += _size(text)

    def skip(self) -> Callable[[str], None] | None:
        """Return what the reader calls for a document that cannot be read; None to end the build.

        The scan counts them. The tokenize stage meets the same ones again.
        """
        limit = self.plan.cleaning.max_skipped_documents
        if not limit:
            return None

        def skip(reason: str) -> None:
            self.counts["skipped"] += 1
            self.skipped = [*self.skipped, reason][:EXAMPLES]
            if self.counts["skipped"] > limit:
                raise too_many_skipped(self.plan.corpus.name, limit, self.skipped)

        return skip

    def look(self) -> None:
        """End the task if another one has failed."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            if self.folder.stop.exists():
                raise Stopped


def do_task(folder: BuildFolder, stage: Stage, rank: int) -> None:
    """Do a task, and publish its output.

    Args:
        folder: The build.
        stage: The stage.
        rank: The number of the task in the stage.

    Raises:
        ConfigError: The text or the tokenizer cannot be used.
        RunFailed: A file cannot be read or written.
        Stopped: Another task has failed.
    """
    work, final = Work(folder, stage, rank), folder.final(stage, rank)
    documents = _cleaned(work, _read(work))
    with writing(folder.path):
        clear(final)
        with output(final) as made:
            if stage == "scan":
                record = _scan(work, documents, made.path)
            else:
                record = _write(work, _left_in(work, documents, made.path), made.path)
            counts = {"counts": dict(sorted(work.counts.items())), "skipped": work.skipped}
            made.publish(record | counts)


def _read(work: Work) -> Iterator[_Document]:
    """Yield the documents of a task as they are in the files."""
    try:
        if work.holds_out:
            path = work.folder.merge / "held-out" / f"{work.plan.corpus.name}.jsonl"
            with path.open() as file:
                for line in file:
                    task, text, piece, offset = json.loads(line)
                    yield _Document(text, task, piece, offset)
        else:
            for text, piece, offset in sources.read(work.plan.task, work.plan.corpus, work.skip()):
                yield _Document(text, work.planned, piece, offset)
    except OSError as error:
        where = error.filename or work.plan.task.pieces[0].path
        raise RunFailed(
            f"{where}: cannot be read ({error.strerror or error}). Make it readable and run "
            "the command again; what is finished is kept"
        ) from error


def _cleaned(work: Work, documents: _Documents) -> Iterator[_Document]:
    """Yield the documents that [cleaning] does not leave out, cleaned."""
    cleaner = Cleaner(work.plan.cleaning)
    for document in documents:
        work.look()
        work.counts["read.documents"] += 1
        # What is held out was cleaned when the scan read it.
        text = document.text if work.holds_out else cleaner.clean(document.text)
        if text is not None:
            yield document._replace(text=text)
    work.counts.update({f"cleaning.{k}": v for k, v in cleaner.counts.items()})


def _size(text: str) -> int:
    """Return the bytes of a text in UTF-8, in which JSON can hold half of a surrogate pair."""
    return len(text.encode("utf-8", "surrogatepass"))


# ---- scan ----------------------------------------------------------------------------------------
def _scan(work: Work, documents: _Documents, path: Path) -> Json:
    """Write what the merge needs to know about each document, and return the record."""
    plan = work.plan
    is_training = plan.split == "train"
    candidates = Candidates(plan.held_out_bytes) if plan.held_out_bytes else None
    sampler = Sampler(work.rank, plan.sample_bytes) if is_training else None
    mode = plan.cleaning.deduplicate
    rows, keys = _Rows(SCANNED), []
    for index, document in enumerate(documents):
        text = document.text
        hashed = candidates.add(text) if candidates else document_hash(text)
        rows.add(hashed, document.piece, document.offset, _size(text))
        if is_training and mode != "none":
            keys.append(duplicate_keys(text, mode))
        if sampler:
            sampler.add(index, text)
    found = rows.save(path / "documents.npy")
    if candidates:
        candidates.save(path / "candidates")
    if sampler:
        sampler.save(path / "sample.jsonl")
    if is_training and mode != "none":
        save_keys(path / "keys.npy", keys, mode)
    return {
        "documents": len(found),
        "text_bytes": int(found["bytes"].sum()),
        "digests": [list(_digests(piece, plan.corpus)) for piece in plan.task.pieces],
    }


class _Rows:
    """Rows of a structured array, collected in little memory."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
        self._columns = [array("Q") for _ in dtype.names or ()]

    def add(self, *values: int) -> None:
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def save(self, path: Path) -> np.ndarray:
        """Write the rows as a .npy file, and return them."""
        rows = np.empty(len(self._columns[0]), self._dtype)
        for name, column in zip(self._dtype.names or (), self._columns):
            rows[name] = column
        np.save(path, rows)
        return rows


def _digests(piece: sources.Piece, corpus: sources.Corpus) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, XXH3-128) of the bytes of a piece, so that a new time is no new text."""
    if is_url(piece.path):
        return
    path = Path(piece.path)
    try:
        if sources.source_of(corpus, piece.path).in_bytes:
            yield piece.start, piece.end, digest(path, piece.start, piece.end)
        elif piece.start == 0:
            # The file as a whole goes with its first part.
            yield 0, path.stat().st_size, digest(path)
    except OSError as error:
        raise unreadable(piece.path, error) from None


# ---- tokenize ------------------------------------------------------------------------------------
def _left_in(work: Work, documents: _Documents, path: Path) -> Iterator[_Document]:
    """Yield the documents of the split that the task belongs to."""
    assert work.token_task is not None
    if work.holds_out:
        # The merge has read them.
        yield from documents
        return
    scanned = np.load(work.folder.scan(work.planned) / "documents.npy")
    hashes = scanned["hash"].tolist()
    same = _unchanged(work, documents, hashes)
    yield from same if work.token_task.split == "validation" else _trained(work, same, hashes, path)


def _unchanged(work: Work, documents: _Documents, hashes: list[int]) -> Iterator[_Document]:
    """Yield the documents, which are those that the scan saw, or raise ConfigError."""
    index = -1
    for index, document in enumerate(documents):
        if index >= len(hashes) or document_hash(document.text) != hashes[index]:
            raise changed(work.folder, work.plan.task, (document.piece, document.offset))
        yield document
    if index + 1 != len(hashes):
        raise changed(work.folder, work.plan.task)


def _trained(
    work: Work, documents: _Documents, hashes: list[int], path: Path
) -> Iterator[_Document]:
    """Yield the documents that are not held out, did not stand before and hold no held-out text."""
    merge = work.folder.merge
    cut = cut_of(load_merge(work.folder))
    repeated = merge / f"duplicates-{work.planned:06d}.npy"
    duplicates = np.load(repeated) if repeated.exists() else np.zeros(len(hashes), bool)
    held_out = set(np.load(merge / HELD_OUT_HASHES).tolist())
    # A document is noted in one of them; together they are the leakage before.
    kept = HeldOut.load(merge / HELD_OUT_SEQUENCES)
    left = HeldOut.load(merge / HELD_OUT_SEQUENCES)
    for index, document in enumerate(documents):
        text = document.text
        if cut is not None and cut.task == work.planned and index == 0:
            yield document._replace(text=text[: cut.characters])
        elif cut is not None or hashes[index] in held_out:
            work.leave_out("held_out", text)
        elif duplicates[index]:
            left.note(text)
            work.leave_out("duplicates", text)
        elif work.plan.cleaning.decontaminate and kept.is_leaked(text):
            left.note(text)
            work.leave_out("contaminated", text)
        else:
            kept.note(text)
            yield document
    kept.save_seen(path / "seen-kept")
    left.save_seen(path / "seen-left-out")


def _tokenized(work: Work, documents: _Documents) -> Iterator[tuple[_Document, np.ndarray]]:
    """Yield each document with its tokens, the end-of-document token included."""
    tokenizer = load_tokenizer(find_tokenizer(work.folder.merge))
    for batch in _batches(documents):
        for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch])):
            yield document, np.append(ids, tokenizer.eos_id)


def _batches(documents: _Documents) -> Iterator[list[_Document]]:
    batch: list[_Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(work: Work, documents: _Documents, path: Path) -> Json:
    """Write the tokens of a task and where each document comes from, and return the record."""
    data, task = work.plan.data, work.token_task
    assert task is not None
    writer = ShardWriter(
        path,
        split=task.split,
        corpus=work.plan.corpus.name,
        task=task.number,
        vocab_size=data.vocab_size,
        tokens_per_block=data.tokens_per_block,
        tokens_per_shard=data.tokens_per_shard,
    )
    rows = _Rows(PLACE)
    tokens_log2: Counter[int] = Counter()
    bytes_log2: Counter[int] = Counter()
    position = 0
    for document, tokens in _tokenized(work, documents):
        size = _size(document.text)
        writer.add(tokens, size)
        rows.add(document.task, document.piece, document.offset, position)
        position += len(tokens)
        tokens_log2[len(tokens).bit_length() - 1] += 1
        bytes_log2[max(size, 1).bit_length() - 1] += 1
    rows.save(path / "documents.npy")
    return {
        "shards": writer.close().model_dump(mode="json"),
        "tokens_log2": _histogram(tokens_log2),
        "bytes_log2": _histogram(bytes_log2),
    }


def _histogram(counts: Counter[int]) -> Json:
    return {str(bin): counts[bin] for bin in sorted(counts)}


# ---- Do the tasks of a stage: in a pool of processes here, or as a Slurm job array ----
# A task is done if its output is there and whole (`folder.is_done`), whoever did it and however
# that process ended.


READERS = 8
"""Threads that look for finished outputs."""


def undone(finals: list[Path]) -> list[int]:
    """Return the numbers of the tasks that are not done. Reads every output that is there.

    Args:
        finals: Where the output of each task is published.
    """
    # On NFS a name that was missing a moment ago may be remembered as missing. Opening the folder
    # asks the server.
    for folder in {final.parent for final in finals}:
        if folder.is_dir():
            os.listdir(folder)
    with ThreadPoolExecutor(READERS) as pool:
        return [rank for rank, done in enumerate(pool.map(is_done, finals)) if not done]


def run_locally(folder: BuildFolder, stage: Stage, finals: list[Path], workers: int) -> None:
    """Do every task of a stage that is not done, on this machine.

    Args:
        folder: The build.
        stage: The stage.
        finals: Where the output of each task is published.
        workers: Processes; one runs the tasks in this process.

    Raises:
        RunFailed: A worker was killed. Errors of tasks are raised as they are.
    """
    ranks = undone(finals)
    if min(workers, len(ranks)) <= 1:
        for rank in ranks:
            do_task(folder, stage, rank)
        return
    context = multiprocessing.get_context("forkserver")
    # Imported once, and inherited by the workers.
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(workers, len(ranks)), context, _begin_worker) as pool:
        try:
            tasks = [pool.submit(do_task, folder, stage, rank) for rank in ranks]
            for done in as_completed(tasks):
                done.result()
        except BrokenProcessPool:
            raise RunFailed(
                f"{folder.path}: a worker process was killed, often because memory ran out "
                "(`dmesg` says so). Use fewer --workers, or lower data.bytes_per_task and start "
                "over; the same command goes on with the tasks that are not done"
            ) from None
        except BaseException:
            folder.stop.touch()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    """Leave Ctrl-C to the builder, and end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


# ---- a job array ---------------------------------------------------------------------------------
# Whatever speaks to Slurm is another program (`launcher data array`), which is given as a command.
# It submits the array, waits for its end and prints what happens; when its stdin is closed, however
# this process ends, it cancels the array. A job runs `python -m pretrain.data.build ARRAY`.


ARRAY = "array.json"
"""File that says which tasks the jobs of an array do. Their logs lie beside it."""
LAST_CHARACTERS = 300
"""Of a log, in a message."""
_ERRORS = {kind.__name__: kind for kind in (ConfigError, NoSpace, RunFailed)}


class Cluster(NamedTuple):
    """The command and the limits by which job arrays run on a cluster."""

    command: tuple[str, ...]
    """Runs an array when the number of its jobs, the file ARRAY and the file that asks it to stop
    are added."""
    workers: int
    """The most jobs of an array that run at the same time."""
    array_size: int
    """The most jobs that an array may have."""


def run_on_cluster(folder: BuildFolder, stage: Stage, finals: list[Path], cluster: Cluster) -> None:
    """Do every task of a stage that is not done, as one job array, and wait for its end.

    Args:
        folder: The build.
        stage: The stage.
        finals: Where the output of each task is published.
        cluster: How to run job arrays.

    Raises:
        ConfigError: The text or a tokenizer cannot be used; the message is the task's.
        RunFailed: Slurm refused, or tasks ended without an output.
    """
    path = folder.logs / stage / ARRAY
    make_directory(path.parent)
    # An earlier command may have been killed with its jobs in the queue. They would meet what is
    # written below, and do tasks that new jobs do.
    _run_array(folder, cluster, path, 0)
    ranks = undone(finals)
    if not ranks:
        return
    each = tasks_per_job(len(ranks), cluster.workers, cluster.array_size)
    jobs = [ranks[first : first + each] for first in range(0, len(ranks), each)]
    replace_json(path, {"folder": str(folder.path), "stage": stage, "jobs": jobs})
    _run_array(folder, cluster, path, len(jobs))
    if left := undone([finals[rank] for rank in ranks]):
        raise RunFailed(
            f"{folder.path}: {len(left)} of {len(ranks)} tasks of the stage {stage} ended without "
            f"a result. Of task {ranks[left[0]]}, {_last_words(path.parent, left[0] // each)}. Run "
            "the command again to go on; what is finished is kept"
        )


def tasks_per_job(tasks: int, workers: int, array_size: int) -> int:
    """Return how many tasks each job of an array does, one after the other.

    As few as fit into one array and let the workers end together: where every task takes as long
    as the next, no other number is faster.

    Args:
        tasks: Tasks to do.
        workers: Jobs that run at the same time.
        array_size: The most jobs of an array.
    """
    least = math.ceil(tasks / array_size)

    def time_of(each: int) -> int:
        jobs = math.ceil(tasks / each)
        rounds, beside_the_last = divmod(jobs - 1, workers)
        return rounds * each + (each if beside_the_last else tasks - (jobs - 1) * each)

    # So many leave one round, which is no longer than some worker needs at least.
    most = max(least, math.ceil(tasks / workers))
    return min(range(least, most + 1), key=time_of)


def run_job(path: Path, index: int) -> None:
    """Do the tasks of one job of an array, in the job.

    An error is written down for the builder, and asks all other tasks to give up.

    Args:
        path: The file ARRAY.
        index: The job's number in the array.
    """
    array = read_json(path, most=None)
    folder, stage = BuildFolder(Path(array["folder"])), array["stage"]
    for rank in array["jobs"][index]:
        if folder.stop.exists():
            sys.exit(1)
        try:
            # One that Slurm has requeued may have been done before.
            if not is_done(folder.final(stage, rank)):
                do_task(folder, stage, rank)
        except Stopped:
            sys.exit(1)
        except Exception as error:
            kind, message = type(error).__name__, str(error)
            if kind not in _ERRORS:
                logs = f"the newest slurm-*_{index}.log in {path.parent}"
                message = f"task {rank} of the stage {stage}: {error!r}. Its traceback is in {logs}"
            failure = {"kind": kind, "message": message}
            replace_json(folder.progress / f"failed-{rank:06d}.json", failure)
            folder.stop.touch()
            if kind not in _ERRORS:
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)


def _last_words(logs: Path, index: int) -> str:
    """Say how the newest log of a job ends."""
    found = sorted(logs.glob(f"slurm-*_{index}.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        return "there is no log, so it was never started"
    text = " ".join(found[-1].read_text(errors="replace").split())[-LAST_CHARACTERS:]
    return f"the log {found[-1]} ends with: {text}" if text else f"the log {found[-1]} is empty"


def _run_array(folder: BuildFolder, cluster: Cluster, path: Path, jobs: int) -> None:
    """Run the command with an array of `jobs` jobs; 0 waits for an earlier command's jobs."""
    command = [*cluster.command, str(jobs), str(path), str(folder.stop)]
    errors: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            _repeat(process.stderr, errors)
        finally:
            # It cancels the array if that is not over.
            process.stdin.close()
            _repeat(process.stderr, errors)
    # The error of a task says more than that the array was cancelled.
    for failed in sorted(folder.progress.glob("failed-*.json")):
        failure = read_json(failed)
        kind = _ERRORS.get(failure.get("kind", ""), RunFailed)
        raise kind(failure.get("message", "a task failed"))
    if process.returncode:
        raise RunFailed(
            "\n".join(errors)
            or f"{folder.path}: the process that waits for the jobs was killed "
            f"(exit code {process.returncode}). Run the command again; it waits for jobs that "
            "still run"
        )


def _repeat(lines: Iterable[str], errors: list[str]) -> None:
    """Print lines as they come, and keep those that are an error instead."""
    for line in lines:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").rstrip())
        else:
            # Over a progress line.
            start = "\r" if sys.stderr.isatty() else ""
            print(f"{start}{line.rstrip():<80}".rstrip(), file=sys.stderr, flush=True)
