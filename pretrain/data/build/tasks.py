"""Do the tasks of the parallel stages: read documents, clean them, and scan or tokenize them.

A task is a chain of generators that share a `Work`. Its inputs are all in the build's folder, so
any process on any machine that sees the folder can do the task.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import multiprocessing
import os
import re
import signal
import struct
import threading
import traceback
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from tqdm import tqdm

from pretrain.config import RunFailed, writing
from pretrain.data import sources
from pretrain.data.build.folder import (
    DUPLICATES,
    HELD_OUT_HASHES,
    HELD_OUT_SEQUENCES,
    PACKED,
    REPEATED,
    BuildFolder,
    Stage,
    changed,
    clear,
    digest,
    is_done,
    key_files,
    load_task,
    load_token_tasks,
    output,
    read_packed,
    too_many_skipped,
)
from pretrain.data.clean import (
    Candidates,
    Cleaner,
    HeldOut,
    count_buckets,
    document_hash,
    duplicate_keys,
    ranges,
    repeated_in_bucket,
    save_keys,
)
from pretrain.data.files import reading
from pretrain.data.shards import ShardWriter
from pretrain.data.tokenizer import find_tokenizer, load_tokenizer
from pretrain.processes import signals_blocked
from pretrain.rundir.files import Json

SCANNED = np.dtype([("hash", "<u8"), ("piece", "<u4"), ("offset", "<u8"), ("bytes", "<u8")])
"""What the scan records about a document."""

PLACE = np.dtype([("task", "<u4"), ("piece", "<u4"), ("offset", "<u8"), ("token", "<u8")])
"""Where a document comes from (task of the plan, piece of the task, offset as `Document.offset`),
and where it begins among the tokens of its task in the split."""

EXAMPLES = 5
"""Reasons of skipped documents that a record keeps."""


class _Document(NamedTuple):
    text: str
    task: int
    """The task of the plan that it was read from."""
    piece: int
    offset: int


_Documents = Iterable[_Document]


class Work:
    """A task in progress, and its counts."""

    def __init__(self, folder: BuildFolder, stage: Stage, rank: int) -> None:
        """Read what the plan says about a task.

        Args:
            folder: The build.
            stage: The stage.
            rank: The number of the task in the stage.
        """
        self.folder, self.rank = folder, rank
        self.counts: Counter[str] = Counter()
        self.skipped: list[str] = []
        self.token_task = load_token_tasks(folder)[rank] if stage == "tokenize" else None
        self.planned = self.token_task.planned if self.token_task else rank
        """The task of the plan whose documents are read."""
        self.holds_out = self.token_task is not None and self.token_task.holds_out
        """The documents are those that the merge has held out of a corpus."""
        self.plan = load_task(folder, self.planned)

    def leave_out(self, reason: str, text: str) -> None:
        """Count a document that is left out of training."""
        self.counts[f"{reason}.documents"] += 1
        self.counts[f"{reason}.bytes"] += text_size(text)

    def skip(self) -> Callable[[str], None] | None:
        """Return what the reader calls for a document that cannot be read; None to end the build.

        The scan counts such documents. The tokenize stage meets the same documents again.
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


def do_task(folder: BuildFolder, stage: Stage, rank: int, final: Path) -> None:
    """Do a task, and publish its output.

    Args:
        folder: The build.
        stage: The stage.
        rank: The number of the task in the stage.
        final: The folder in which its output is published.

    Raises:
        ConfigError: The text or the tokenizer cannot be used.
        RunFailed: A file cannot be read or written.
    """
    work = None if stage == "compare" else Work(folder, stage, rank)
    with writing(folder.path):
        clear(final)
        with output(final) as (path, record):
            if work is None:
                keys = key_files(folder)
                found = repeated_in_bucket(*keys, rank, count_buckets(*keys))
                np.save(path / PACKED / REPEATED, found)
                return
            documents = _cleaned(work, _read(work))
            if stage == "scan":
                record |= _scan(work, documents, path)
            else:
                record |= _write(work, _left_in(work, documents, path), path)
            record |= {"counts": dict(sorted(work.counts.items())), "skipped": work.skipped}


def _read(work: Work) -> Iterator[_Document]:
    """Yield the documents of a task as they are in the files."""
    if work.holds_out:
        path = work.folder.merge / "held-out" / f"{work.plan.corpus.name}.jsonl"
        with path.open() as file:
            for line in file:
                task, _, text, piece, offset = json.loads(line)
                yield _Document(text, task, piece, offset)
    else:
        for text, piece, offset in sources.read(work.plan.task, work.plan.corpus, work.skip()):
            yield _Document(text, work.planned, piece, offset)


def _cleaned(work: Work, documents: _Documents) -> Iterator[_Document]:
    """Yield the documents that [cleaning] does not leave out, cleaned."""
    cleaner = Cleaner(work.plan.cleaning)
    for document in documents:
        work.counts["read.documents"] += 1
        # Held-out documents were cleaned when the scan read them.
        text = document.text if work.holds_out else cleaner.clean(document.text)
        if text is not None:
            yield document._replace(text=text)
    work.counts.update({f"cleaning.{k}": v for k, v in cleaner.counts.items()})


def text_size(text: str) -> int:
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
    rows, keys = array("Q"), []
    for index, document in enumerate(documents):
        text = document.text
        hashed = candidates.add(text) if candidates else document_hash(text)
        rows.extend((hashed, document.piece, document.offset, text_size(text)))
        if is_training and mode != "none":
            keys.append(duplicate_keys(text, mode))
        if sampler:
            sampler.add(index, text)
    found = _save_rows(path / PACKED / "documents.npy", rows, SCANNED)
    if candidates:
        candidates.save(path / PACKED / "candidates")
    if sampler:
        sampler.save(path / PACKED / "sample.jsonl")
    if is_training and mode != "none":
        save_keys(path / PACKED / "keys", keys, mode)
    return {
        "documents": len(found),
        "text_bytes": int(found["bytes"].sum()),
        "digests": [list(_digests(piece, plan.corpus)) for piece in plan.task.pieces],
    }


def _save_rows(path: Path, values: array[int], dtype: np.dtype[np.void]) -> np.ndarray:
    """Write rows, given as one flat array of values, as a .npy file, and return them."""
    columns = np.array(values, np.uint64).reshape(-1, len(dtype.names or ())).T
    rows = np.empty(columns.shape[1], dtype)
    for name, column in zip(dtype.names or (), columns):
        rows[name] = column
    np.save(path, rows)
    return rows


def _digests(piece: sources.Piece, corpus: sources.Corpus) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, XXH3-128) of a piece, so that a file with a new time is not a new text."""
    path = Path(piece.path)
    with reading(piece.path, allow_missing=False):
        if sources.source_of(corpus, piece.path).in_bytes:
            yield piece.start, piece.end, digest(path, piece.start, piece.end)
        elif piece.start == 0:
            # The digest of the whole file belongs to its first part.
            yield 0, path.stat().st_size, digest(path)


# ---- Take an even sample of text for the tokenizer, from a corpus of any size ----
# Documents are cut after newlines into chunks of about 4,000 characters, and each chunk has a
# priority that is a hash of its place. A task keeps the chunks with the smallest hashes up to a
# bound, so they contain every smaller sample: the merge takes from each task its exact share.


CHUNK_CHARACTERS = 4000
_NEWLINE = re.compile("\n")


class Sampler:
    """Keep the chunks with the smallest hashes among the documents of one task."""

    def __init__(self, task: int, max_bytes: int) -> None:
        """Start without chunks.

        Args:
            task: Number of the task, which makes the priorities differ between tasks.
            max_bytes: The most text to keep, in bytes.
        """
        self._task, self._left = task, max_bytes
        # (-priority, document, chunk, text); the root of the heap is the chunk to drop first.
        self._heap: list[tuple[int, int, int, str]] = []
        self._highest = 1 << 64

    def add(self, document: int, text: str) -> None:
        """Add the chunks of a document."""
        for number, (start, end) in enumerate(ranges(text, _NEWLINE, CHUNK_CHARACTERS)):
            place = struct.pack("<QQQ", self._task, document, number)
            priority = xxhash.xxh3_64_intdigest(place)
            if priority >= self._highest:
                continue
            chunk = text[start:end]
            self._left -= text_size(chunk)
            heapq.heappush(self._heap, (-priority, document, number, chunk))
            while self._left < 0:
                given_up = heapq.heappop(self._heap)
                # Later chunks with a larger hash must be dropped as well, or the sample would
                # prefer the end of the task.
                self._highest = -given_up[0]
                self._left += text_size(given_up[3])

    def save(self, path: Path) -> None:
        """Write the chunks in the order of the stream."""
        with path.open("w") as file:
            for priority, *place, text in sorted(self._heap, key=lambda c: c[1:3]):
                file.write(json.dumps([-priority, *place, text]) + "\n")


def read_sample(
    lines: Iterable[str | bytes], max_bytes: int, left_out: Collection[int] = frozenset()
) -> Iterator[str]:
    """Yield the chunks of a task's sample in the order of the stream.

    Args:
        lines: The lines of the file that `Sampler.save` wrote.
        max_bytes: The most text to take, in bytes.
        left_out: Documents, by their position in the task, that are not trained on.
    """
    kept = [chunk for chunk in map(json.loads, lines) if chunk[1] not in left_out]
    taken = []
    for chunk in sorted(kept):
        max_bytes -= text_size(chunk[3])
        if max_bytes < 0:
            break
        taken.append(chunk)
    for *_, text in sorted(taken, key=lambda c: c[1:3]):
        yield text


# ---- tokenize ------------------------------------------------------------------------------------
def _left_in(work: Work, documents: _Documents, path: Path) -> Iterator[_Document]:
    """Yield the documents of the split that the task belongs to."""
    assert work.token_task is not None
    if work.holds_out:
        # The merge wrote them from what the scan had read.
        yield from documents
        return
    hashes = _scanned_hashes(work)
    same = _unchanged(work, documents, hashes)
    yield from same if work.token_task.split == "validation" else _trained(work, same, hashes, path)


def read_again(folder: BuildFolder, rank: int) -> Iterator[str]:
    """Yield the cleaned documents of a scanned task.

    Raises:
        ConfigError: The documents have changed since the scan.
    """
    work = Work(folder, "scan", rank)
    for document in _unchanged(work, _cleaned(work, _read(work)), _scanned_hashes(work)):
        yield document.text


def _scanned_hashes(work: Work) -> list[int]:
    scanned = np.load(read_packed(work.folder.scan(work.planned), "documents.npy"))
    hashes: list[int] = scanned["hash"].tolist()
    return hashes


def _unchanged(work: Work, documents: _Documents, hashes: list[int]) -> Iterator[_Document]:
    """Yield the documents; raise ConfigError if they have changed since the scan."""
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
    """Yield the documents that are not held out, not duplicates and hold no held-out text."""
    merge = work.folder.merge
    task, duplicates = work.token_task, np.zeros(len(hashes), bool)
    if task and (merge / DUPLICATES).exists():
        everywhere = np.load(merge / DUPLICATES, mmap_mode="r")
        duplicates = np.array(everywhere[task.first : task.first + len(hashes)])
    held_out = set(np.load(merge / HELD_OUT_HASHES).tolist())
    head = task.head if task else 0
    seen = HeldOut.load(merge / HELD_OUT_SEQUENCES)
    for index, document in enumerate(documents):
        text = document.text
        if head and index == 0:
            # Never left out, but what it shares with its held-out rest counts.
            seen.note(text[:head])
            yield document._replace(text=text[:head])
        elif hashes[index] in held_out:
            work.leave_out("held_out", text)
        elif duplicates[index]:
            work.leave_out("duplicates", text)
        elif work.plan.cleaning.decontaminate and seen.is_leaked(text):
            work.leave_out("contaminated", text)
        else:
            seen.note(text)
            yield document
    seen.save_seen(path / PACKED / "seen")


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
    tokenizer = load_tokenizer(find_tokenizer(work.folder.merge))
    rows, position = array("Q"), 0
    for document in documents:
        tokens = np.append(tokenizer.encode(document.text), tokenizer.eos_id)
        writer.add(tokens, text_size(document.text))
        rows.extend((document.task, document.piece, document.offset, position))
        position += len(tokens)
    _save_rows(path / "documents.npy", rows, PLACE)
    written = writer.close()
    (path / written.checksums).rename(path / PACKED / written.checksums)
    # The shards were hashed while they were written.
    files = {shard.name: [shard.bytes, shard.xxh3_128] for shard in written.shards}
    return {"shards": written.model_dump(mode="json"), "files": files}


# ---- Do the tasks of a stage, in a pool of processes ----
# A task is done if its output exists and is complete (`folder.is_done`), no matter which process
# did it and how that process ended.


READERS = 8
"""Threads that look for finished outputs."""


def undone(finals: list[Path]) -> list[int]:
    """Return the numbers of the tasks whose outputs are not in `finals`, where they are published.

    Every file of an output is read to check its digest.
    """
    # An NFS client may cache that a name is missing. Listing the folder asks the server again.
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
        finals: The folder in which the output of each task is published.
        workers: Number of processes; 1 runs the tasks in this process.

    Raises:
        RunFailed: A worker was killed. Errors of tasks are raised as they are.
    """
    tasks = [(rank, finals[rank]) for rank in undone(finals)]
    # disable=None draws the bar on a terminal and nothing into a log file.
    bar = tqdm(desc=stage, total=len(finals), initial=len(finals) - len(tasks), disable=None)
    if min(workers, len(tasks)) <= 1:
        with bar:
            for task in tasks:
                do_task(folder, stage, *task)
                bar.update()
        return
    count = min(workers, len(tasks))
    with bar, _workers(count, folder, stage) as pipes:
        try:
            for pipe, task in zip(pipes, tasks):
                pipe.send(task)
            waiting = deque(tasks[count:])
            while pipes:
                ready = wait(pipes)
                for pipe in [each for each in pipes if each in ready]:
                    if error := pipe.recv():
                        raise error
                    bar.update()
                    if waiting:
                        pipe.send(waiting.popleft())
                    else:
                        pipes.remove(pipe)
        except (EOFError, ConnectionError):
            raise RunFailed(
                f"{folder.path}: a worker process was killed, often because memory ran out "
                "(`dmesg` says so). Use fewer --workers, or lower data.bytes_per_task and start "
                "over; the same command goes on with the tasks that are not done"
            ) from None


@contextlib.contextmanager
def _workers(count: int, folder: BuildFolder, stage: Stage) -> Iterator[list[Connection]]:
    """Start processes that do the tasks sent to them, (number, folder of output), and answer each.

    Only pipes are used: a ProcessPoolExecutor has semaphores, which a builder that is stopped
    leaves behind with a warning.
    """
    context = multiprocessing.get_context("forkserver")
    # Imported once, and inherited by the workers.
    context.set_forkserver_preload([__name__])
    # Only the builder handles Ctrl-C. The others inherit that it is blocked from their start.
    resource_tracker.ensure_running()
    with signals_blocked(signal.SIGINT):
        forkserver.ensure_running()
    processes, pipes = [], []
    workers_end, own_end = context.Pipe(duplex=False)
    try:
        for _ in range(count):
            pipe, its = context.Pipe()
            process = context.Process(target=_work, args=(workers_end, its, folder, stage))
            process.start()
            its.close()
            processes.append(process)
            pipes.append(pipe)
        yield pipes
    finally:
        # This ends the workers, even in the middle of a task.
        own_end.close()
        for process in processes:
            process.join()


def _work(builder: Connection, tasks: Connection, folder: BuildFolder, stage: Stage) -> None:
    """Do tasks until the builder closes its pipe or ends for any reason."""

    def end_with_builder() -> None:
        wait([builder])
        os._exit(1)

    threading.Thread(target=end_with_builder, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task, failed = tasks.recv(), None
            try:
                do_task(folder, stage, *task)
            except Exception as error:
                # A pipe carries no traceback.
                error.add_note(traceback.format_exc())
                failed = error
            tasks.send(failed)
