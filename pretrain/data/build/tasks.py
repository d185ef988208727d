"""Do a task of a parallel stage: read its documents, clean them, and scan or tokenize them.

A task is a chain of generators that share a `Work`. What it needs stands in the build's folder, so
any process on any machine that sees the folder can do it.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.config import RunFailed, writing
from pretrain.data import sources
from pretrain.data.build.folder import (
    HELD_OUT_HASHES,
    HELD_OUT_SEQUENCES,
    BuildFolder,
    Stage,
    clear,
    cut_of,
    digest,
    load_merge,
    load_token_task,
    output,
)
from pretrain.data.build.merge import Sampler
from pretrain.data.build.plan import changed, is_url, load_task, too_many_skipped
from pretrain.data.clean import (
    Candidates,
    Cleaner,
    HeldOut,
    document_hash,
    duplicate_keys,
    save_keys,
)
from pretrain.data.shards import ShardWriter
from pretrain.data.sources.files import unreadable
from pretrain.data.tokenizer import find_tokenizer, load_tokenizer
from pretrain.rundir.files import Json

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
