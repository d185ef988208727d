"""Define the steps of the two parallel stages, as datatrove's executors run them."""

from __future__ import annotations

import itertools
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from pretrain.config import RunFailed, writing
from pretrain.data import sources
from pretrain.data.build.folder import (
    HELD_OUT_HASHES,
    HELD_OUT_SEQUENCES,
    cut_of,
    digest,
    load_merge,
)
from pretrain.data.build.merge import Sampler
from pretrain.data.build.plan import Work, changed, is_url
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

Documents = Iterable[Document]

SCANNED = np.dtype([("hash", "<u8"), ("piece", "<u4"), ("offset", "<u8"), ("bytes", "<u8")])
"""What the scan notes of a document."""

PLACE = np.dtype([("task", "<u4"), ("piece", "<u4"), ("offset", "<u8"), ("token", "<u8")])
"""Where a document comes from (task of the plan, piece of the task, offset as `Document.offset`),
and where it begins among the tokens of its task in the split."""

BATCH_CHARACTERS = 1 << 20
"""Text that is tokenized at once."""


class _Step(PipelineStep):  # type: ignore[misc]
    """A step that shares the `Work` of its task with the others of the pipeline."""

    type = "pretrain"

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work


class ReadDocuments(_Step):
    """Begin a task, and read its documents."""

    name = "read"

    def run(self, data: Documents, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of task `rank` as they are in the files."""
        self.work.begin(rank)
        try:
            for task, text, piece, offset in self._read():
                place = {"task": task, "piece": piece, "offset": offset}
                yield Document(text, id="", metadata=place)
        except OSError as error:
            where = error.filename or self.work.plan.task.pieces[0].path
            raise RunFailed(
                f"{where}: cannot be read ({error.strerror or error}). Make it readable and run "
                "the command again; what is finished is kept"
            ) from error

    def _read(self) -> Iterator[tuple[int, str, int, int]]:
        work = self.work
        if work.holds_out:
            with (work.folder.merge / "held-out" / f"{work.plan.corpus.name}.jsonl").open() as file:
                for line in file:
                    task, text, piece, offset = json.loads(line)
                    yield task, text, piece, offset
        else:
            for text, piece, offset in sources.read(work.plan.task, work.plan.corpus, work.skip()):
                yield work.planned, text, piece, offset


class CleanDocuments(_Step):
    """Apply [cleaning] to each document."""

    name = "clean"

    def run(self, data: Documents, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that are not left out, cleaned."""
        cleaner: Cleaner | None = None
        for document in data:
            cleaner = cleaner or Cleaner(self.work.plan.cleaning)
            self.work.counts["read.documents"] += 1
            if self.work.holds_out:
                # It was cleaned when it was held out.
                yield document
            elif (text := cleaner.clean(document.text)) is not None:
                document.text = text
                yield document
        if cleaner:
            self.work.counts.update({f"cleaning.{k}": v for k, v in cleaner.counts.items()})


class ScanDocuments(_Step):
    """Note what the merge needs to know about each document."""

    name = "scan"

    def run(self, data: Documents, rank: int = 0, world_size: int = 1) -> None:
        """Write the output of task `rank`."""
        documents = _begun(data)
        with writing(self.work.folder.path):
            self._scan(self.work, documents)

    def _scan(self, work: Work, documents: Documents) -> None:
        path, plan = work.output.path, work.plan
        is_training = plan.split == "train"
        candidates = Candidates(plan.held_out_bytes) if plan.held_out_bytes else None
        sampler = Sampler(work.rank, plan.sample_bytes) if is_training else None
        mode = (
            plan.cleaning.deduplicate
            if is_training and plan.cleaning.deduplicate != "none"
            else None
        )
        hashes, pieces, offsets, sizes = array("Q"), array("L"), array("Q"), array("Q")
        keys = []
        for index, document in enumerate(documents):
            text = document.text
            size = len(text.encode("utf-8", "surrogatepass"))
            hashes.append(candidates.add(text) if candidates else document_hash(text))
            pieces.append(document.metadata["piece"])
            offsets.append(document.metadata["offset"])
            sizes.append(size)
            if mode:
                keys.append(duplicate_keys(text, mode))
            if sampler:
                sampler.add(index, text)
            work.advance(size)
        rows = np.empty(len(hashes), SCANNED)
        for name, column in zip(SCANNED.names or (), (hashes, pieces, offsets, sizes)):
            rows[name] = column
        np.save(path / "documents.npy", rows)
        if candidates:
            candidates.save(path / "candidates")
        if sampler:
            sampler.save(path / "sample.jsonl")
        if mode:
            save_keys(path / "keys.npy", keys, mode)
        work.publish(
            {
                "documents": len(rows),
                "text_bytes": int(rows["bytes"].sum()),
                "digests": [list(_digests(piece, plan.corpus)) for piece in plan.task.pieces],
            }
        )


def _begun(documents: Documents) -> Iterator[Document]:
    """Ask for the first document, with which the reader begins the task, and yield all."""
    iterator = iter(documents)
    first = list(itertools.islice(iterator, 1))
    return itertools.chain(first, iterator)


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


class LeaveOut(_Step):
    """Leave out of training what is held out, what stood before, and what holds held-out text."""

    name = "leave out"

    def run(self, data: Documents, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of the split."""
        documents = _begun(data)
        if self.work.holds_out:
            # The merge has read them.
            yield from documents
            return
        scanned = np.load(self.work.folder.scan(self.work.planned) / "documents.npy")
        hashes = scanned["hash"].tolist()
        same = self._unchanged(self.work, documents, hashes)
        if self.work.token_task.split == "validation":
            yield from same
        else:
            yield from self._training(self.work, same, hashes)

    def _unchanged(self, work: Work, documents: Documents, hashes: list[int]) -> Iterator[Document]:
        """Yield the documents, which are those that the scan saw, or raise ConfigError."""
        index = -1
        for index, document in enumerate(documents):
            if index >= len(hashes) or document_hash(document.text) != hashes[index]:
                place = document.metadata["piece"], document.metadata["offset"]
                raise changed(work.folder, work.plan.task, place)
            yield document
        if index + 1 != len(hashes):
            raise changed(work.folder, work.plan.task)

    def _training(self, work: Work, documents: Documents, hashes: list[int]) -> Iterator[Document]:
        folder, merge = work.folder, load_merge(work.folder)
        cut = cut_of(merge)
        duplicates = _load_duplicates(folder.merge / f"duplicates-{work.planned:06d}.npy")
        held_out = set(np.load(folder.merge / HELD_OUT_HASHES).tolist())
        # A document is noted in one of them; together they are the leakage before.
        kept = HeldOut.load(folder.merge / HELD_OUT_SEQUENCES)
        left = HeldOut.load(folder.merge / HELD_OUT_SEQUENCES)
        for index, document in enumerate(documents):
            text = document.text
            if cut is not None:
                if cut.task == work.planned and index == 0:
                    document.text = text[: cut.characters]
                    yield document
                else:
                    work.leave_out("held_out", text)
                continue
            if hashes[index] in held_out:
                work.leave_out("held_out", text)
                continue
            if index < len(duplicates) and duplicates[index]:
                left.note(text)
                work.leave_out("duplicates", text)
            elif work.plan.cleaning.decontaminate and kept.is_leaked(text):
                left.note(text)
                work.leave_out("contaminated", text)
            else:
                kept.note(text)
                yield document
        kept.save_seen(work.output.path / "seen-kept")
        left.save_seen(work.output.path / "seen-left-out")


def _load_duplicates(path: Path) -> np.ndarray:
    return np.load(path) if path.exists() else np.empty(0, bool)


class TokenizeDocuments(_Step):
    """Add to each document its tokens."""

    name = "tokenize"

    def run(self, data: Documents, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents with metadata["tokens"], the end-of-document token included."""
        tokenizer = None
        for batch in _batches(data):
            tokenizer = tokenizer or load_tokenizer(find_tokenizer(self.work.folder.merge))
            for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch])):
                document.metadata["tokens"] = np.append(ids, tokenizer.eos_id)
                yield document


def _batches(documents: Documents) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class WriteShards(_Step):
    """Write the tokens of a task, and where each document comes from."""

    name = "write"

    def run(self, data: Documents, rank: int = 0, world_size: int = 1) -> None:
        """Write the output of task `rank`."""
        documents = _begun(data)
        with writing(self.work.folder.path):
            self._write(self.work, documents)

    def _write(self, work: Work, documents: Documents) -> None:
        data, path, task = work.plan.data, work.output.path, work.token_task
        writer = ShardWriter(
            path,
            split=task.split,
            corpus=work.plan.corpus.name,
            task=task.number,
            vocab_size=data.vocab_size,
            tokens_per_block=data.tokens_per_block,
            tokens_per_shard=data.tokens_per_shard,
        )
        columns: dict[str, Any] = {name: array("Q") for name in PLACE.names or ()}
        tokens_log2: Counter[int] = Counter()
        bytes_log2: Counter[int] = Counter()
        position = 0
        for document in documents:
            tokens, metadata = document.metadata["tokens"], document.metadata
            size = len(document.text.encode("utf-8", "surrogatepass"))
            writer.add(tokens, size)
            place = (metadata["task"], metadata["piece"], metadata["offset"], position)
            for name, value in zip(columns, place):
                columns[name].append(value)
            position += len(tokens)
            tokens_log2[len(tokens).bit_length() - 1] += 1
            bytes_log2[max(size, 1).bit_length() - 1] += 1
            work.advance(size)
        rows = np.empty(len(columns["token"]), PLACE)
        for name, column in columns.items():
            rows[name] = column
        np.save(path / "documents.npy", rows)
        work.publish(
            {
                "shards": writer.close().model_dump(mode="json"),
                "tokens_log2": _histogram(tokens_log2),
                "bytes_log2": _histogram(bytes_log2),
            }
        )


def _histogram(counts: Counter[int]) -> Json:
    return {str(bin): counts[bin] for bin in sorted(counts)}
