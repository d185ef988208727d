"""Decide what only the whole corpus can tell: held-out documents, duplicates, the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain.config import ConfigError
from pretrain.config.schema import WORDS, DataSection
from pretrain.data.build.folder import (
    HELD_OUT_HASHES,
    HELD_OUT_SEQUENCES,
    RECORD,
    SPLITS,
    BuildFolder,
    Plan,
    TokenTask,
    clear,
    load_token_tasks,
    output,
    too_many_skipped,
    with_digests,
)
from pretrain.data.build.tasks import EXAMPLES, read_again, read_sample
from pretrain.data.clean import HeldOut, choose_held_out, find_duplicates
from pretrain.data.shards import (
    BUILD_RECORD,
    DICTIONARY,
    DOCUMENTS,
    MODEL,
    Split,
    TaskShards,
    finish_split,
)
from pretrain.data.tokenizer import (
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
    train_words,
)
from pretrain.rundir.files import (
    PARTIAL,
    Json,
    flush_directory,
    publish_directory,
    read_json,
    replace_file,
    replace_json,
)

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
        self.names = [task.corpus for task in plan.all_tasks()]
        self.num_train = len(plan.tasks["train"])
        self.records = [read_json(folder.scan(rank) / RECORD) for rank in range(len(self.names))]

    def run(self) -> None:
        """Write and publish the output of the merge.

        Raises:
            ConfigError: if a split has no text, too many documents cannot be read, or no tokenizer
                can be trained.
        """
        self._check_skipped()
        held_out, head = self._choose_held_out(), ""
        if not held_out and not self._documents(self.num_train, len(self.records)):
            head, end = self._cut()
            held_out = [end]
        clear(self.folder.merge)
        with output(self.folder.merge) as (path, record):
            hashes = self._held_out_hashes(held_out)
            self._write_held_out(path, held_out, hashes)
            left_out = self._write_left_out(path, hashes)
            if self.tokenizer:
                shutil.copyfile(self.tokenizer.path, path / self.tokenizer.file_name)
            else:
                name, content = train(self.plan.data, self._training(left_out, head))
                (path / name).write_bytes(content)
            record["token_tasks"] = self._token_tasks(held_out, len(head))

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
        chosen = {name: choose_held_out(paths, fraction) for name, paths in candidates.items()}
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
            for chunk in read_sample(self.folder.scan(rank) / "sample.jsonl", most)
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

    def _cut(self) -> tuple[str, _HeldOutDocument]:
        """Cut the only text of a data set in two, of which the end is held out.

        Raises:
            ConfigError: There are several texts, but no corpus has two; or it is too short.
        """
        if own := self.plan.data.validation_paths:
            raise _no_text("data.validation_paths", list(own), "validation")
        ranks = [r for r in range(self.num_train) if self.records[r]["documents"]]
        if len(np.unique(np.concatenate([self._scanned(r)["hash"] for r in ranks]))) > 1:
            raise ConfigError(
                "data.corpora: no corpus has two different documents, so none can be held out for "
                "validation. Add text, set the source of a corpus if a file of it holds many "
                "documents, or set data.validation_paths"
            )
        text, row = next(read_again(self.folder, ranks[0])), self._scanned(ranks[0])[0]
        length = len(text) - max(1, round(len(text) * self.plan.data.validation_fraction))
        if length <= 0:
            raise _no_text("data.paths", self._paths(), "train")
        place = int(row["piece"]), int(row["offset"])
        return text[:length], _HeldOutDocument(ranks[0], 0, text[length:], *place)

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
                        file.write(json.dumps(document) + "\n")

        def texts() -> Iterator[str]:
            yield from (document.text for document in held_out)
            for rank in range(self.num_train, len(self.records)):
                yield from read_again(self.folder, rank)

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

    def _training(self, left_out: dict[int, Mask], head: str) -> Iterator[str]:
        """Yield the text to train the tokenizer on: for words all of it, else an even sample."""
        if head:
            most = self.plan.data.tokenizer_training_bytes
            is_words = self.plan.data.tokenizer == WORDS
            yield head if is_words else head[:most].encode()[:most].decode(errors="ignore")
            return
        for rank, most in self._sample_sizes():
            out = set(np.flatnonzero(left_out.get(rank, [])).tolist())
            if self.plan.data.tokenizer == WORDS:
                texts = enumerate(read_again(self.folder, rank))
                yield from (text for index, text in texts if index not in out)
            else:
                yield from read_sample(self.folder.scan(rank) / "sample.jsonl", most, out)

    # ---- what follows ----
    def _token_tasks(self, held_out: list[_HeldOutDocument], head: int) -> list[TokenTask]:
        """Return the tasks of the tokenize stage: of train, then of validation by corpus."""
        cut = held_out[0].task if head else None
        validation = [(rank, False) for rank in range(self.num_train, len(self.names))]
        validation += [(self.names.index(n), True) for n in {self.names[d.task] for d in held_out}]
        order = list(self.plan.corpora())
        validation.sort(key=lambda each: (order.index(self.names[each[0]]), each[1]))
        return [
            *(
                TokenTask("train", rank, rank, False, head if rank == cut else 0)
                for rank in range(self.num_train)
            ),
            *(
                TokenTask("validation", number, rank, holds_out)
                for number, (rank, holds_out) in enumerate(validation)
            ),
        ]


def train(data: DataSection, texts: Iterable[str]) -> tuple[str, bytes]:
    """Train the kind of tokenizer that the config asks for; return its file's name and content."""
    if data.tokenizer == WORDS:
        return DICTIONARY, train_words(texts, data.vocab_size)
    return MODEL, train_tokenizer(texts, data.vocab_size)


def _no_text(key: str, paths: list[str], split: str) -> ConfigError:
    return ConfigError(
        f"{key} = {paths}: these files contain no text for the {split} split. Choose files that do"
    )


# ---- Put the outputs of all tasks together, and report what became of every document ----


def note_finished(folder: BuildFolder, plan: Plan) -> None:
    """Write down what the data set consists of, when every task is done.

    From here on a build that was interrupted goes on with the finish, whatever of the tasks'
    outputs has been moved already.

    Raises:
        ConfigError: if nothing is left to train on.
    """
    tasks = load_token_tasks(folder)
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
        "inputs": {"settings": plan.settings, "files": with_digests(folder, plan)},
        "tasks": [
            [split, task.corpus, task.pieces] for split in SPLITS for task in plan.tasks[split]
        ],
        "report": report,
    }
    replace_json(folder.finish, {"build": content, "written": written}, durable=True)


def _report(folder: BuildFolder, plan: Plan, tasks: list[TokenTask], records: list[Json]) -> Json:
    """Return the counts of every step by corpus, the totals of both splits, and the leakage."""
    scans = [read_json(folder.scan(rank) / RECORD) for rank in range(len(plan.all_tasks()))]
    report: Json = {"corpora": {}, "leakage": _leakage(folder, tasks)}
    for split in SPLITS:
        report[split] = _totals([r for t, r in zip(tasks, records) if t.split == split])
    for name in plan.corpora():
        counts: Counter[str] = Counter()
        examples: list[str] = []
        for planned, scan in zip(plan.all_tasks(), scans):
            if planned.corpus == name:
                counts.update(scan["counts"])
                counts["text.documents"] += scan["documents"]
                counts["text.bytes"] += scan["text_bytes"]
                examples += scan["skipped"]
        own: dict[str, list[Json]] = {split: [] for split in SPLITS}
        for task, record in zip(tasks, records):
            if record["shards"]["corpus"] == name:
                own[task.split].append(record)
        for record in own["train"]:
            kept = ("held_out.", "duplicates.", "contaminated.")
            counts.update({k: v for k, v in record["counts"].items() if k.startswith(kept)})
        report["corpora"][name] = {
            "counts": dict(sorted(counts.items())),
            "skipped": examples[:EXAMPLES],
            "train": _totals(own["train"]),
            "validation": _totals(own["validation"]),
        }
    return report


def _totals(records: list[Json]) -> Json:
    keys = ("documents", "text_bytes", "tokens")
    return {key: sum(record["shards"][key] for record in records) for key in keys}


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


def finish(folder: BuildFolder, directory: Path) -> None:
    """Put the data set together and give it its name.

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
    # Of a finish that was killed.
    for leftover in folder.data.rglob(f".*{PARTIAL}"):
        leftover.unlink()
    replace_json(folder.data / BUILD_RECORD, finished["build"], durable=True, indent=1)
    flush_directory(folder.data)
    publish_directory(folder.data, directory)


def _finish_split(folder: BuildFolder, split: Split, finished: Json, tokenizer: Tokenizer) -> None:
    final = folder.data / split
    (final / DOCUMENTS).mkdir(parents=True, exist_ok=True)
    written = [
        TaskShards.model_validate_json(json.dumps(task)) for task in finished["written"][split]
    ]
    for task in written:
        source = folder.tokens(split, task.task) / "documents.npy"
        # What is missing was moved before an interruption.
        if source.exists():
            source.rename(final / DOCUMENTS / f"{task.corpus}-{task.task:06d}.npy")
    flush_directory(final / DOCUMENTS)
    settings = finished["build"]["inputs"]["settings"]
    finish_split(
        final,
        written,
        lambda task: folder.tokens(split, task.task),
        split=split,
        tokenizer=tokenizer.file_name,  # type: ignore[arg-type]  # one of TOKENIZER_FILES
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokens_per_block=settings["data.tokens_per_block"],
        tokens_per_shard=settings["data.tokens_per_shard"],
    )
