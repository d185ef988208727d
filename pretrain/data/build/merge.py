"""Decide what only the whole corpus can tell: held-out documents, duplicates, the tokenizer."""

from __future__ import annotations

import heapq
import json
import shutil
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pretrain.config import ConfigError
from pretrain.config.schema import WORDS
from pretrain.data import sources
from pretrain.data.build.folder import (
    HELD_OUT_HASHES,
    HELD_OUT_SEQUENCES,
    RECORD,
    SPLITS,
    BuildFolder,
    Cut,
    File,
    Plan,
    TokenTask,
    changed,
    clear,
    output,
    token_tasks,
    too_many_skipped,
)
from pretrain.data.clean import Cleaner, HeldOut, choose_held_out, document_hash, find_duplicates
from pretrain.data.manifest import BUILD_RECORD, DOCUMENTS, Split, TaskShards
from pretrain.data.shards import finish_split
from pretrain.data.tokenizer import (
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
    train_words,
)
from pretrain.data.tokenizers.base import DICTIONARY, MODEL
from pretrain.rundir.files import (
    Json,
    flush_directory,
    publish_directory,
    read_json,
    replace_file,
    replace_json,
)

# ---- Take an even sample of lines for the tokenizer, from a corpus of any size ----
# Documents are cut after newlines into chunks of some 4,000 characters, and each chunk has a
# priority that is a hash of its place. A task keeps the chunks of lowest priority up to a bound, so
# any smaller sample is a part of what it keeps: the merge takes from each task its exact share.


CHUNK_CHARACTERS = 4000


class Chunk(NamedTuple):
    """Some whole lines of a document."""

    priority: int
    document: int
    """Position of the document in the task."""
    number: int
    """Position of the chunk in the document."""
    text: str

    @property
    def size(self) -> int:
        """Return the bytes in UTF-8."""
        return len(self.text.encode())


class Sampler:
    """Keep the chunks of lowest priority of the documents of one task."""

    def __init__(self, task: int, max_bytes: int) -> None:
        """Start without chunks.

        Args:
            task: Number of the task, which makes the priorities differ between tasks.
            max_bytes: The most text to keep.
        """
        self._task, self._left = task, max_bytes
        # The root of the heap is the chunk to give up first.
        self._heap: list[tuple[int, int, int, str, int]] = []
        self._highest = 1 << 64

    def add(self, document: int, text: str) -> None:
        """Take the chunks of a document."""
        for number, (start, end) in enumerate(_chunks(text)):
            place = struct.pack("<QQQ", self._task, document, number)
            priority = xxhash.xxh3_64_intdigest(place)
            if priority >= self._highest:
                continue
            chunk = text[start:end]
            size = len(chunk.encode())
            self._left -= size
            heapq.heappush(self._heap, (-priority, document, number, chunk, size))
            while self._left < 0:
                given_up = heapq.heappop(self._heap)
                # What comes later with a higher priority would be given up as well; otherwise the
                # sample would prefer the end of the task.
                self._highest = -given_up[0]
                self._left += given_up[4]

    def save(self, path: Path) -> None:
        """Write the chunks in the order of the stream."""
        with path.open("w") as file:
            for priority, document, number, text, _ in sorted(self._heap, key=lambda c: c[1:3]):
                file.write(json.dumps([-priority, document, number, text]) + "\n")


def _chunks(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(text):
        newline = text.find("\n", start + CHUNK_CHARACTERS)
        end = len(text) if newline < 0 else newline + 1
        yield start, end
        start = end


def read_lines(path: Path, max_bytes: int, left_out: Collection[int]) -> Iterator[str]:
    """Yield the lines of a task's sample in the order of the stream.

    Args:
        path: What `Sampler.save` wrote.
        max_bytes: The most text to take.
        left_out: Documents, by their position in the task, that are not trained on.
    """
    for text in read_chunks(path, max_bytes, left_out):
        yield from (line for line in text.split("\n") if line)


def read_chunks(
    path: Path, max_bytes: int, left_out: Collection[int] = frozenset()
) -> Iterator[str]:
    """Yield the chunks of a task's sample in the order of the stream; see `read_lines`."""
    with path.open() as file:
        kept = [
            c for c in (Chunk(*json.loads(line)) for line in file) if c.document not in left_out
        ]
    taken: list[Chunk] = []
    for chunk in sorted(kept):
        max_bytes -= chunk.size
        if max_bytes < 0:
            break
        taken.append(chunk)
    for chunk in sorted(taken, key=lambda c: c[1:3]):
        yield chunk.text


Mask = npt.NDArray[np.bool_]


class _HeldOutDocument(NamedTuple):
    """A document that is held out of its corpus, and where it stands first."""

    task: int
    row: int
    """Position among the documents of the task."""
    text: str
    piece: int
    offset: int


class Merger:
    """The scanned corpus, and what is decided about it."""

    def __init__(self, folder: BuildFolder, plan: Plan, tokenizer: Tokenizer | None) -> None:
        """Read the records of the scan.

        Args:
            folder: The build; every task is scanned.
            plan: The plan.
            tokenizer: The one that data.tokenizer names; None to train one.
        """
        self.folder, self.plan, self.tokenizer = folder, plan, tokenizer
        tasks = plan.tasks["train"] + plan.tasks["validation"]
        self.names = [task.corpus for task in tasks]
        self.num_train = len(plan.tasks["train"])
        self.records = [read_json(folder.scan(rank) / RECORD) for rank in range(len(tasks))]

    def run(self) -> None:
        """Write and publish the output of the merge.

        Raises:
            ConfigError: if a split has no text, too many documents cannot be read, or no tokenizer
                can be trained.
        """
        self._check_skipped()
        held_out = self._choose_held_out()
        has_planned = self._documents(self.num_train, len(self.records)) > 0
        cut = None if held_out or has_planned else self._cut()
        if cut is not None:
            held_out = [cut[1]]
        clear(self.folder.merge)
        with output(self.folder.merge) as made:
            hashes = self._held_out_hashes(held_out)
            self._write_held_out(made.path, held_out, hashes)
            left_out = self._write_left_out(made.path, hashes)
            if self.tokenizer:
                shutil.copyfile(self.tokenizer.path, made.path / self.tokenizer.file_name)
            elif self.plan.data.tokenizer == WORDS:
                content = train_words(self._training(left_out, cut), self.plan.data.vocab_size)
                (made.path / DICTIONARY).write_bytes(content)
            else:
                lines = list(self._sample(left_out, cut))
                content = train_tokenizer(lines, self.plan.data.vocab_size)
                (made.path / MODEL).write_bytes(content)
            made.publish(
                {
                    "cut": cut[0] if cut else None,
                    "token_tasks": self._token_tasks(held_out),
                }
            )

    # ---- checks ----
    def _documents(self, start: int, end: int) -> int:
        return sum(int(record["documents"]) for record in self.records[start:end])

    def _check_skipped(self) -> None:
        skipped: Counter[str] = Counter()
        reasons: dict[str, list[str]] = {}
        for name, record in zip(self.names, self.records):
            skipped[name] += record["counts"].get("skipped", 0)
            reasons.setdefault(name, []).extend(record["skipped"])
        limit = self.plan.cleaning.max_skipped_documents
        for name, count in skipped.items():
            if count > limit:
                raise too_many_skipped(name, limit, reasons[name])
        if not self._documents(0, self.num_train):
            raise _no_text("data.paths", self._paths(), "train")

    def _paths(self) -> list[str]:
        return [path for corpus in self.plan.corpora().values() for path in corpus.paths]

    # ---- held-out documents ----
    def _scanned(self, task: int) -> np.ndarray:
        found: np.ndarray = np.load(self.folder.scan(task) / "documents.npy")
        return found

    def _choose_held_out(self) -> list[_HeldOutDocument]:
        """Return the documents that are held out by hash, in the order of the stream."""
        candidates: dict[str, list[Path]] = {}
        for rank in range(self.num_train):
            if (path := self.folder.scan(rank) / "candidates").exists():
                candidates.setdefault(self.names[rank], []).append(path)
        fraction = self.plan.data.validation_fraction
        chosen = {
            name: dict(choose_held_out(paths, fraction)) for name, paths in candidates.items()
        }
        common = self._boilerplate([text for texts in chosen.values() for text in texts.values()])
        return [
            document
            for name, texts in chosen.items()
            for document in self._hold_out(
                # Of a corpus that is nothing but boilerplate, some is held out all the same.
                name,
                {digest: text for digest, text in texts.items() if text not in common} or texts,
            )
        ]

    def _boilerplate(self, texts: list[str]) -> set[str]:
        """Return those texts of which half is common in the corpus."""
        if not self.plan.cleaning.decontaminate:
            return set()
        sample = (
            chunk
            for rank, most in self._sample_sizes()
            for chunk in read_chunks(self.folder.scan(rank) / "sample.jsonl", most)
        )
        is_common = HeldOut.from_texts(texts).common(sample)
        return {text for text, common in zip(texts, is_common) if common}

    def _sample_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield how many bytes of each task's sample make an even sample of the corpus."""
        most = self.plan.data.tokenizer_training_bytes
        total = sum(int(self.records[rank]["text_bytes"]) for rank in range(self.num_train))
        for rank in range(self.num_train):
            size = int(self.records[rank]["text_bytes"])
            yield rank, size if total <= most else most * size // total

    def _hold_out(self, name: str, texts: dict[int, str]) -> list[_HeldOutDocument]:
        """Return the held-out documents of a corpus in the order of the stream.

        Every copy of a held-out text is held out, so texts are taken, in the order of their hashes,
        until they and their copies are data.validation_fraction of the documents.
        """
        wanted = np.array(sorted(texts), np.uint64)
        first: dict[int, _HeldOutDocument] = {}
        copies: Counter[int] = Counter()
        documents = 0
        for rank in range(self.num_train):
            if not texts or self.names[rank] != name:
                continue
            rows = self._scanned(rank)
            documents += len(rows)
            for row in np.flatnonzero(np.isin(rows["hash"], wanted)).tolist():
                digest = int(rows["hash"][row])
                copies[digest] += 1
                if digest not in first:
                    place = int(rows["piece"][row]), int(rows["offset"][row])
                    first[digest] = _HeldOutDocument(rank, row, texts[digest], *place)
        most, chosen = self.plan.data.validation_fraction * documents, list(texts)
        while len(chosen) > 1 and sum(copies[digest] for digest in chosen) > most:
            chosen.pop()
        return sorted(first[digest] for digest in chosen)

    def _cut(self) -> tuple[Cut, _HeldOutDocument]:
        """Cut the only text of a data set in two.

        Raises:
            ConfigError: There are several texts, but no corpus has two.
        """
        ranks = [r for r in range(self.num_train) if self.records[r]["documents"]]
        hashes = np.unique(np.concatenate([self._scanned(r)["hash"] for r in ranks]))
        own = self.plan.data.validation_paths
        if len(hashes) > 1 or own:
            if own:
                raise _no_text("data.validation_paths", list(own), "validation")
            raise ConfigError(
                "data.corpora: no corpus has two different documents, so none can be held out for "
                "validation. Add text, or set data.validation_paths"
            )
        rank = ranks[0]
        text, row = next(self._texts(rank)), self._scanned(rank)[0]
        length = len(text) - max(1, round(len(text) * self.plan.data.validation_fraction))
        if not length:
            raise _no_text("data.paths", self._paths(), "train")
        place = int(row["piece"]), int(row["offset"])
        return Cut(rank, length), _HeldOutDocument(rank, 0, text[length:], *place)

    def _texts(self, rank: int) -> Iterator[str]:
        """Read the documents of a task again.

        Raises:
            ConfigError: They are not those that the scan saw.
        """
        task = (self.plan.tasks["train"] + self.plan.tasks["validation"])[rank]
        cleaner = Cleaner(self.plan.cleaning)
        may_skip = self.plan.cleaning.max_skipped_documents > 0
        skip = (lambda reason: None) if may_skip else None
        hashes = self._scanned(rank)["hash"].tolist()
        index = 0
        for document in sources.read(task, self.plan.corpora()[task.corpus], skip):
            if (text := cleaner.clean(document.text)) is not None:
                if index >= len(hashes) or document_hash(text) != hashes[index]:
                    raise changed(self.folder, task, (document.piece, document.offset))
                index += 1
                yield text
        if index != len(hashes):
            raise changed(self.folder, task)

    def _held_out_hashes(self, held_out: list[_HeldOutDocument]) -> npt.NDArray[np.uint64]:
        found = [self._scanned(d.task)["hash"][[d.row]] for d in held_out]
        if self.plan.cleaning.decontaminate:
            found += [self._scanned(r)["hash"] for r in range(self.num_train, len(self.records))]
        return np.unique(np.concatenate([np.empty(0, np.uint64), *found]))

    def _write_held_out(
        self, path: Path, held_out: list[_HeldOutDocument], hashes: npt.NDArray[np.uint64]
    ) -> None:
        np.save(path / HELD_OUT_HASHES, hashes)
        (path / "held-out").mkdir()
        for name in dict.fromkeys(self.names[d.task] for d in held_out):
            with (path / "held-out" / f"{name}.jsonl").open("w") as file:
                for document in held_out:
                    if self.names[document.task] == name:
                        task, _, text, piece, offset = document
                        file.write(json.dumps([task, text, piece, offset]) + "\n")

        def texts() -> Iterator[str]:
            yield from (document.text for document in held_out)
            for rank in range(self.num_train, len(self.records)):
                yield from self._texts(rank)

        HeldOut.from_texts(texts()).save(path / HELD_OUT_SEQUENCES)

    # ---- duplicates and the tokenizer's sample ----
    def _write_left_out(self, path: Path, hashes: npt.NDArray[np.uint64]) -> dict[int, Mask]:
        """Write which documents of each task are duplicates.

        Returns:
            For the tasks that have some, which documents are duplicates or held out.
        """
        left_out: dict[int, Mask] = {}
        ranks = range(self.num_train)
        if self.plan.cleaning.deduplicate != "none":
            repeated = find_duplicates([self.folder.scan(rank) / "keys.npy" for rank in ranks])
            for rank, mask in zip(ranks, repeated):
                if mask.any():
                    np.save(path / f"duplicates-{rank:06d}.npy", mask)
                    left_out[rank] = mask
        if not self.tokenizer and len(hashes):
            for rank in ranks:
                mask = np.isin(self._scanned(rank)["hash"], hashes)
                if mask.any():
                    left_out[rank] = mask | left_out.get(rank, False)
        return left_out

    def _sample(
        self, left_out: dict[int, Mask], cut: tuple[Cut, _HeldOutDocument] | None
    ) -> Iterator[str]:
        """Yield the lines to train the tokenizer on, from each task by its share of the text."""
        most = self.plan.data.tokenizer_training_bytes
        if cut is not None:
            text = next(self._texts(cut[0].task))[: cut[0].characters]
            if len(text.encode()) > most:
                text = text[:most].encode()[:most].decode(errors="ignore")
            yield from (line for line in text.split("\n") if line)
            return
        for rank, most in self._sample_sizes():
            mask = left_out.get(rank)
            yield from read_lines(
                self.folder.scan(rank) / "sample.jsonl",
                most,
                frozenset() if mask is None else set(np.flatnonzero(mask).tolist()),
            )

    def _training(
        self, left_out: dict[int, Mask], cut: tuple[Cut, _HeldOutDocument] | None
    ) -> Iterator[str]:
        """Yield all documents that words are counted in: the whole training text."""
        if cut is not None:
            yield next(self._texts(cut[0].task))[: cut[0].characters]
            return
        for rank in range(self.num_train):
            mask = left_out.get(rank)
            for row, text in enumerate(self._texts(rank)):
                if mask is None or not mask[row]:
                    yield text

    # ---- what follows ----
    def _token_tasks(self, held_out: list[_HeldOutDocument]) -> list[TokenTask]:
        """Return the tasks of the tokenize stage: of train, then of validation by corpus."""
        validation: list[tuple[str, int, bool]] = [
            (self.names[rank], rank, False) for rank in range(self.num_train, len(self.records))
        ]
        for name in dict.fromkeys(self.names[d.task] for d in held_out):
            validation.append((name, self.names.index(name), True))
        order = list(self.plan.corpora())
        validation.sort(key=lambda each: order.index(each[0]))
        return [
            *(TokenTask("train", rank, rank, False) for rank in range(self.num_train)),
            *(
                TokenTask("validation", number, rank, holds_out)
                for number, (_, rank, holds_out) in enumerate(validation)
            ),
        ]


def merge(folder: BuildFolder, plan: Plan, tokenizer: Tokenizer | None) -> Json:
    """Do the merge and return its record; see `Merger`."""
    Merger(folder, plan, tokenizer).run()
    return read_json(folder.merge / RECORD, most=None)


def _no_text(key: str, paths: list[str], split: str) -> ConfigError:
    return ConfigError(
        f"{key} = {paths}: these files contain no text for the {split} split. Choose files that do"
    )


# ---- Put the outputs of all tasks together, and report what became of every document ----


def note_finished(folder: BuildFolder, plan: Plan, merge: Json) -> None:
    """Write down what the data set consists of, when every task is done.

    From here on a build that was interrupted goes on with the finish, whatever of the tasks'
    outputs has been moved already.

    Raises:
        ConfigError: if nothing is left to train on.
    """
    tasks = token_tasks(merge)
    records = [read_json(folder.tokens(t.split, t.number) / RECORD) for t in tasks]
    report = _report(folder, plan, tasks, records)
    if not report["train"]["tokens"]:
        raise ConfigError(
            "cleaning: every document of the train split was left out, as a duplicate or because "
            "it holds held-out text. Add text, or see [cleaning] for how to keep more"
        )
    written: dict[str, list[Json]] = {split: [] for split in SPLITS}
    for task, record in zip(tasks, records):
        written[task.split].append(record["shards"])
    content = {
        "inputs": {
            "settings": plan.settings,
            "files": with_digests(folder, plan),
        },
        "tasks": [
            [split, task.corpus, task.pieces] for split in SPLITS for task in plan.tasks[split]
        ],
        "report": report,
    }
    replace_json(folder.finish, {"build": content, "written": written}, durable=True)


def with_digests(folder: BuildFolder, plan: Plan) -> dict[Split, list[File]]:
    """Return the files of a plan with the digests that the scan has made of them so far."""
    tasks = plan.tasks["train"] + plan.tasks["validation"]
    digests: dict[str, set[tuple[int, int, str]]] = {}
    for rank, task in enumerate(tasks):
        record = read_json(folder.scan(rank) / RECORD)
        for piece, found in zip(task.pieces, record.get("digests", [])):
            digests.setdefault(piece.path, set()).update(tuple(each) for each in found)
    return {
        split: [f._replace(digests=tuple(sorted(digests.get(f.path, ())))) for f in files]
        for split, files in plan.files.items()
    }


def _report(folder: BuildFolder, plan: Plan, tasks: list[TokenTask], records: list[Json]) -> Json:
    """Return the counts of every step by corpus, the totals of both splits, and the leakage."""
    corpora: dict[str, Json] = {}
    scans = [
        read_json(folder.scan(rank) / RECORD)
        for rank in range(sum(len(plan.tasks[split]) for split in SPLITS))
    ]
    for name in plan.corpora():
        counts: Counter[str] = Counter()
        examples: list[str] = []
        for task, scan in zip(plan.tasks["train"] + plan.tasks["validation"], scans):
            if task.corpus == name:
                counts.update(scan["counts"])
                counts.update(
                    {"text.documents": scan["documents"], "text.bytes": scan["text_bytes"]}
                )
                examples += scan["skipped"]
        for token_task, record in zip(tasks, records):
            if record["shards"]["corpus"] == name and token_task.split == "train":
                kept = ("held_out.", "duplicates.", "contaminated.")
                counts.update({k: v for k, v in record["counts"].items() if k.startswith(kept)})
        corpora[name] = {"counts": dict(sorted(counts.items())), "skipped": examples[:5]}
        for split in SPLITS:
            own = [
                record
                for token_task, record in zip(tasks, records)
                if record["shards"]["corpus"] == name and token_task.split == split
            ]
            corpora[name][split] = _totals(own)
    report: Json = {"corpora": corpora, "leakage": _leakage(folder, tasks)}
    for split in SPLITS:
        report[split] = _totals([r for t, r in zip(tasks, records) if t.split == split])
    return report


def _totals(records: list[Json]) -> Json:
    totals: Json = {
        key: sum(record["shards"][key] for record in records)
        for key in ("documents", "text_bytes", "tokens")
    }
    for key in ("tokens_log2", "bytes_log2"):
        bins: Counter[int] = Counter()
        for record in records:
            bins.update({int(bin): count for bin, count in record[key].items()})
        totals[key] = {str(bin): bins[bin] for bin in sorted(bins)}
    return totals


def _leakage(folder: BuildFolder, tasks: list[TokenTask]) -> Json:
    """Return the share of the held-out text that stood in training, and that still does."""
    found = HeldOut.load(folder.merge / HELD_OUT_SEQUENCES)
    outputs = [folder.tokens(t.split, t.number) for t in tasks if t.split == "train"]
    for path in outputs:
        found.merge_seen(path / "seen-kept")
    after = found.leakage
    for path in outputs:
        found.merge_seen(path / "seen-left-out")
    return {"before": found.leakage, "after": after, "sequences": found.sequences}


def finish(folder: BuildFolder, directory: Path) -> Json:
    """Put the data set together, give it its name, and return the report.

    May be repeated after it was interrupted anywhere before the data set has its name.

    Args:
        folder: The build, with what `note_finished` wrote.
        directory: data.directory.
    """
    finished = read_json(folder.finish, most=None)
    folder.data.mkdir(exist_ok=True)
    source = find_tokenizer(folder.merge)
    replace_file(folder.data / source.name, source.read_bytes(), durable=True)
    tokenizer = load_tokenizer(folder.data / source.name)
    for split in SPLITS:
        _finish_split(folder, split, finished, tokenizer)
    record = finished["build"]
    replace_json(folder.data / BUILD_RECORD, record, durable=True, indent=1)
    flush_directory(folder.data)
    publish_directory(folder.data, directory)
    report: Json = record["report"]
    return report


def _finish_split(folder: BuildFolder, split: Split, finished: Json, tokenizer: Tokenizer) -> None:
    final = folder.data / split
    (final / DOCUMENTS).mkdir(parents=True, exist_ok=True)
    written = [
        TaskShards.model_validate_json(json.dumps(task)) for task in finished["written"][split]
    ]
    for task in written:
        source = folder.tokens(split, task.task)
        names = {shard.name: shard.name for shard in task.shards}
        names[task.checksums] = task.checksums
        names["documents.npy"] = f"{DOCUMENTS}/{task.corpus}-{task.task:06d}.npy"
        for before, after in names.items():
            # What is missing was moved before an interruption; finish_split looks for it.
            if (source / before).exists():
                (source / before).rename(final / after)
    flush_directory(final / DOCUMENTS)
    settings = finished["build"]["inputs"]["settings"]
    finish_split(
        final,
        written,
        split=split,
        tokenizer=tokenizer.file_name,  # type: ignore[arg-type]  # one of TOKENIZER_FILES
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokens_per_block=settings["data.tokens_per_block"],
        tokens_per_shard=settings["data.tokens_per_shard"],
    )


# ---- Print what a build made of the corpus ----


_REASONS = {
    "skipped": "{documents:,} could not be read",
    "cleaning.min_document_characters": "{documents:,} shorter than cleaning asks for",
    "held_out": "{documents:,} held out",
    "duplicates": "{documents:,} duplicates",
    "contaminated": "{documents:,} with held-out text",
}
"""Count -> how the summary says it."""


def report_lines(
    directory: Path, tokenizer: Tokenizer, report: Json, shards: dict[Split, int]
) -> Iterator[str]:
    """Yield the lines of the summary.

    Args:
        directory: data.directory.
        tokenizer: The data set's tokenizer.
        report: The report in build.json.
        shards: Split -> number of shards.
    """
    yield f"{directory}: tokenizer of {tokenizer.vocab_size:,} pieces"
    for split in SPLITS:
        totals = report[split]
        parts = f"{shards[split]:,} shard{'s' * (shards[split] != 1)}"
        yield f"{directory / split}: {_amount(totals)}, {parts}"
    for name, corpus in report["corpora"].items():
        yield f"{name}: {_amount(corpus['train'])}; left out: {_left_out(corpus['counts'])}"
        for reason in corpus["skipped"]:
            yield f"{name}: skipped {reason}"
    leakage = report["leakage"]
    yield (
        f"{leakage['after']:.2%} of the held-out text's 13-word sequences are also in training "
        f"({leakage['before']:.2%} before documents were left out)"
    )


def _amount(totals: Json) -> str:
    per_token = totals["text_bytes"] / max(totals["tokens"], 1)
    return (
        f"{totals['documents']:,} documents, {totals['text_bytes']:,} bytes of text, "
        f"{totals['tokens']:,} tokens ({per_token:.2f} bytes a token)"
    )


def _left_out(counts: Json) -> str:
    found = []
    for reason, words in _REASONS.items():
        documents = counts.get(f"{reason}.documents", counts.get(reason, 0))
        if documents:
            found.append(words.format(documents=documents))
    return ", ".join(found) or "nothing"
