"""Build a data set from corpora, and resume interrupted builds.

A build has six stages. `plan` lists the corpus and cuts it into tasks, fixed ranges of bytes.
`scan` reads every task and records the hash of each document, documents that could be held out, and
a sample of lines for the tokenizer. `compare` finds duplicates among the keys of all tasks, with a
task for each bucket of keys. `merge` chooses the held-out documents, combines the results of the
buckets and trains the tokenizer. `tokenize` reads every task again and writes its shards. `finish`
joins the shards of all tasks, writes manifests and the report, and gives the data set its name.

Scan, compare and tokenize run in parallel. The output of a task depends only on the plan and on
earlier stages, so the data set is the same for any number of processes and after any interruption.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.errors import free_bytes, size
from pretrain.config.schema import WORDS, DataSection
from pretrain.data import sources
from pretrain.data.build.folder import (
    DUPLICATES,
    HELD_OUT_HASHES,
    HELD_OUT_SEQUENCES,
    REPEATED,
    SPLITS,
    BuildFolder,
    Plan,
    TokenTask,
    clear,
    differences,
    is_done,
    key_files,
    load_token_tasks,
    locked,
    make_plan,
    output,
    read_packed,
    read_plan,
    read_record,
    remove_build,
    save_plan,
    task_sizes,
    too_many_skipped,
    with_digests,
)
from pretrain.data.build.tasks import (
    EXAMPLES,
    read_again,
    read_sample,
    run_locally,
)
from pretrain.data.clean import (
    HeldOut,
    choose_held_out,
    count_buckets,
    join_repeated,
)
from pretrain.data.shards import (
    BUILD_RECORD,
    DICTIONARY,
    DOCUMENTS,
    MANIFEST,
    MODEL,
    Split,
    TaskShards,
    finish_split,
    place,
    sealed,
    unsealed,
)
from pretrain.data.stream import TokenStream, build_record
from pretrain.data.tokenizer import (
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
    train_words,
)
from pretrain.data.view import summary
from pretrain.rundir.files import (
    Json,
    flush,
    make_directory,
    publish_directory,
    read_text,
    replace_file,
)

KEPT_BYTES = 1_000_000_000
"""If a build ends with an error in the config or the text, finished tasks are kept for a corpus of
at least this size. A smaller corpus is quickly processed again."""


def build(config: RunConfig, workers: int = 1) -> None:
    """Build the data set of a config in data.directory, and print what was built.

    An interrupted build resumes with the unfinished tasks. A data set that was already built from
    the same settings and text is checked and left unchanged.

    Args:
        config: The config.
        workers: Processes on this machine, which do not change the result.

    Raises:
        ConfigError: data.directory holds something else or a data set built from other inputs,
            another process builds it, or the corpus or the tokenizer cannot be used.
        RunFailed: The data set cannot be written, or jobs ended without a result.
    """
    given = config.data_directory
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    directory = _real_directory(given)
    folder = BuildFolder.beside(directory)
    up_to_date = _is_up_to_date(directory, plan)
    if not up_to_date or folder.path.exists():
        with writing(folder.path), locked(folder):
            # Another process may have built it since the check above.
            up_to_date = _is_up_to_date(directory, plan)
            if not up_to_date:
                try:
                    _build(folder, plan, tokenizer, workers)
                except KeyboardInterrupt:
                    goes_on = f"{folder.path} keeps what is finished; the same command goes on"
                    print(goes_on, file=sys.stderr)
                    raise
                publish_directory(folder.data, directory)
            remove_build(folder)
    if up_to_date:
        print(f"{given}: up to date (same settings, same text), nothing to do")
    else:
        print("\n".join(summary(str(given))))


def _real_directory(given: Path) -> Path:
    """Return the folder to which data.directory leads, and create its parent folders.

    A built data set gets its name by a rename, which cannot replace a symlink or cross disks.

    Raises:
        ConfigError: A disk is mounted there.
        RunFailed: The folders above it cannot be made.
    """
    # Also the parents in new/../data, since the data set could not be read by that name otherwise.
    with writing(given):
        make_directory(given.absolute().parent)
    directory = Path(os.path.realpath(given))
    if os.path.ismount(directory) and not (directory / BUILD_RECORD).exists():
        raise ConfigError(
            f"data.directory = {given}: a disk is mounted there, and a data set gets its name by a "
            f"rename. Choose a folder on that disk, such as data.directory={given / 'data'}"
        )
    return directory


def load_given_tokenizer(data: DataSection) -> Tokenizer | None:
    """Return the tokenizer that data.tokenizer names, or None if one is to be trained.

    Raises:
        ConfigError: Its number of pieces is not data.vocab_size, or it could not be exported with a
            model.
    """
    if data.tokenizer is None or data.tokenizer == WORDS:
        return None
    tokenizer = load_tokenizer(data.tokenizer)
    tokenizer.check_trainable()
    if tokenizer.vocab_size != data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {data.vocab_size}: the model in data.tokenizer = {data.tokenizer} "
            f"has {tokenizer.vocab_size} pieces. Set data.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _is_up_to_date(directory: Path, plan: Plan) -> bool:
    """Return True if the data set exists and was built from this plan, False if it does not exist.

    Raises:
        ConfigError: Something else is there, or a data set built from other inputs.
    """
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if is_empty or not os.path.lexists(directory):
        return False
    remedy = f"Choose another data.directory, or remove {directory} to build it anew"
    if unsealed(read_text(directory / BUILD_RECORD, most=None)) is None:
        raise ConfigError(
            f"data.directory = {directory}: exists, but holds no finished data set "
            f"({BUILD_RECORD} is missing or damaged). {remedy}"
        )
    streams = [TokenStream(directory / split) for split in SPLITS]
    record = build_record(streams[0].data_set, *(stream.manifest for stream in streams))
    if different := differences(record["inputs"], plan):
        raise ConfigError(
            f"data.directory = {directory}: holds a data set built from other inputs: "
            f"{'; '.join(different)}. Nothing was changed. {remedy}"
        )
    return True


def _build(
    folder: BuildFolder,
    plan: Plan,
    tokenizer: Tokenizer | None,
    workers: int,
) -> None:
    """Begin a build, or resume the one in the folder, and do all of it but naming the data set.

    Raises:
        ConfigError: The folder holds a build from other inputs, or a package is missing.
    """
    if folder.plan.exists() and (different := differences(read_plan(folder), plan)):
        raise ConfigError(
            f"{folder.path}: holds an unfinished build from other inputs: "
            f"{'; '.join(different)}. Nothing was changed. Go on with those inputs, or remove "
            f"{folder.path} to start over"
        )
    check_packages(plan)
    # Saved again on resuming, because names and times of files may have changed.
    save_plan(plan, folder)

    try:
        scans = [folder.scan(rank) for rank in range(len(plan.all_tasks()))]
        run_locally(folder, "scan", scans, workers)
        if not is_done(folder.merge):
            if plan.cleaning.deduplicate != "none":
                buckets = list(map(folder.compare, range(count_buckets(*key_files(folder)))))
                run_locally(folder, "compare", buckets, workers)
            Merger(folder, plan, tokenizer).run()
        tasks = load_token_tasks(folder)
        tokens = [folder.tokens(task.split, task.number) for task in tasks]
        run_locally(folder, "tokenize", tokens, workers)
        finish(folder, plan)
    except ConfigError:
        # The build cannot resume after the config or the text has been corrected.
        if sum(task_sizes(plan)) < KEPT_BYTES:
            remove_build(folder)
        raise


def check_packages(plan: Plan) -> None:
    """Raise ConfigError if a package is missing that the build needs, before hours of reading.

    The package for Parquet is not checked here: planning has already used it to read footers.
    """
    if plan.cleaning.repair_unicode:
        sources.optional("ftfy", "cleaning.repair_unicode")
    if plan.cleaning.deduplicate == "near":
        sources.optional("rensa", 'cleaning.deduplicate = "near"')
    for suffix in {sources.compression_of(file.path) for s in SPLITS for file in plan.files[s]}:
        if suffix:
            sources.COMPRESSIONS[suffix]()


# ---- Decide what depends on the whole corpus: held-out text, duplicates, the tokenizer ----


Mask = npt.NDArray[np.bool_]


class _HeldOutDocument(NamedTuple):
    """A document that is held out of its corpus, and its first occurrence."""

    task: int
    row: int
    """Position among the documents of the task."""
    text: str
    piece: int
    offset: int


class Merger:
    """The scanned corpus, and the decisions about it."""

    def __init__(self, folder: BuildFolder, plan: Plan, tokenizer: Tokenizer | None) -> None:
        """Read the records of the scan.

        Args:
            folder: The build; every task is scanned.
            plan: The plan.
            tokenizer: The tokenizer that data.tokenizer names; None to train one.
        """
        self.folder, self.plan, self.tokenizer = folder, plan, tokenizer
        self.names = [task.corpus for task in plan.all_tasks()]
        self.num_train = len(plan.tasks["train"])
        self.records = [read_record(folder.scan(rank)) for rank in range(len(self.names))]

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
        found: np.ndarray = np.load(read_packed(self.folder.scan(task), "documents.npy"))
        return found

    def _sample(self, task: int) -> Iterable[bytes]:
        return read_packed(self.folder.scan(task), "sample.jsonl")

    def _choose_held_out(self) -> list[_HeldOutDocument]:
        """Return the documents that are held out by hash, in the order of the stream."""
        candidates: dict[str, list[Path]] = {}
        for rank in range(self.num_train):
            if "candidates" in self.records[rank]["packed"]:
                candidates.setdefault(self.names[rank], []).append(self.folder.scan(rank))
        fraction = self.plan.data.validation_fraction
        chosen = {
            name: choose_held_out((read_packed(task, "candidates") for task in tasks), fraction)
            for name, tasks in candidates.items()
        }
        common = self._boilerplate([text for texts in chosen.values() for text in texts.values()])
        return [
            document
            for name, texts in chosen.items()
            for document in self._hold_out(
                # If all chosen texts of a corpus are boilerplate, they are held out anyway.
                name,
                {digest: text for digest, text in texts.items() if text not in common} or texts,
            )
        ]

    def _boilerplate(self, texts: list[str]) -> set[str]:
        """Return the texts of which half is common in the corpus."""
        if not self.plan.cleaning.decontaminate:
            return set()
        sample = (
            chunk
            for rank, most in self._sample_sizes()
            for chunk in read_sample(self._sample(rank), most)
        )
        is_common = HeldOut.from_texts(texts).common(sample)
        return {text for text, common in zip(texts, is_common) if common}

    def _sample_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield each task, and how many bytes of its sample make an even sample of the corpus."""
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
        """Cut the only text of a data set in two, and hold out the end.

        Raises:
            ConfigError: The text is too short, or texts differ between corpora but within none.
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
            By task, which documents are duplicates or held out; only for tasks that have some.
        """
        left_out: dict[int, Mask] = {}
        ranks = range(self.num_train)
        if self.plan.cleaning.deduplicate != "none":
            files = key_files(self.folder)
            buckets = map(self.folder.compare, range(count_buckets(*files)))
            found = (np.load(read_packed(bucket, REPEATED)) for bucket in buckets)
            repeated = join_repeated(*files, found)
            np.save(path / DUPLICATES, np.concatenate(repeated))
            left_out = {rank: mask for rank, mask in zip(ranks, repeated) if mask.any()}
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
                yield from read_sample(self._sample(rank), most, out)

    # ---- tasks of the next stage ----
    def _token_tasks(self, held_out: list[_HeldOutDocument], head: int) -> list[TokenTask]:
        """Return the tasks of the tokenize stage: of train, then of validation by corpus."""
        cut = held_out[0].task if head else None
        validation = [(rank, False) for rank in range(self.num_train, len(self.names))]
        validation += [(self.names.index(n), True) for n in {self.names[d.task] for d in held_out}]
        order = list(self.plan.corpora())
        validation.sort(key=lambda each: (order.index(self.names[each[0]]), each[1]))
        firsts = accumulate((int(record["documents"]) for record in self.records), initial=0)
        return [
            *(
                TokenTask("train", rank, rank, False, head if rank == cut else 0, first)
                for rank, first in zip(range(self.num_train), firsts)
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


# ---- Assemble the outputs of all tasks, and report what became of every document ----


def finish(folder: BuildFolder, plan: Plan) -> None:
    """Assemble the data set from the outputs of the tasks, which are not changed.

    Raises:
        ConfigError: Nothing is left to train on.
        RunFailed: The checksums of a task are damaged.
    """
    tasks = load_token_tasks(folder)
    records = [read_record(folder.tokens(t.split, t.number)) for t in tasks]
    report = _report(folder, plan, tasks, records)
    if not report["train"]["tokens"]:
        raise ConfigError(
            "cleaning: every document of the train split was left out, as a duplicate or because "
            "it holds held-out text. Add text, or see [cleaning] for how to keep more"
        )
    # Remove the folder of an earlier finish that was killed.
    shutil.rmtree(folder.data, ignore_errors=True)
    folder.data.mkdir()
    source = find_tokenizer(folder.merge)
    place(source, folder.data / source.name)
    tokenizer = load_tokenizer(folder.data / source.name)
    files = {source.name: read_record(folder.merge)["files"][source.name]}
    for split in SPLITS:
        own = [record for task, record in zip(tasks, records) if task.split == split]
        files |= _finish_split(folder, split, plan, own, tokenizer)
    content = {
        "inputs": {"settings": plan.settings, "files": with_digests(folder, plan)},
        "tasks": [
            [split, task.corpus, task.pieces] for split in SPLITS for task in plan.tasks[split]
        ],
        "report": report,
        # The files that no manifest names.
        "files": files,
    }
    replace_file(folder.data / BUILD_RECORD, sealed(content), durable=True)
    flush(folder.data)


def _finish_split(
    folder: BuildFolder, split: Split, plan: Plan, records: list[Json], tokenizer: Tokenizer
) -> Json:
    """Assemble a split; return size and digest of each file that its manifest does not name."""
    final, files = folder.data / split, {}
    (final / DOCUMENTS).mkdir(parents=True)
    written = [TaskShards.model_validate_json(json.dumps(record["shards"])) for record in records]
    for task, record in zip(written, records):
        name = f"{DOCUMENTS}/{task.corpus}-{task.task:06d}.npy"
        place(folder.tokens(split, task.task) / "documents.npy", final / name)
        files[f"{split}/{name}"] = record["files"]["documents.npy"]
    flush(final / DOCUMENTS)
    manifest = finish_split(
        final,
        written,
        lambda task: folder.tokens(split, task.task),
        lambda source, name: read_packed(source, name).getvalue(),
        split=split,
        tokenizer=tokenizer.file_name,  # type: ignore[arg-type]  # one of TOKENIZER_FILES
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokens_per_block=plan.data.tokens_per_block,
        tokens_per_shard=plan.data.tokens_per_shard,
    )
    text = manifest.text().encode()
    return files | {f"{split}/{MANIFEST}": [len(text), xxhash.xxh3_128_hexdigest(text)]}


def _report(folder: BuildFolder, plan: Plan, tasks: list[TokenTask], records: list[Json]) -> Json:
    """Return the counts of every step by corpus, the totals of both splits, and the leakage."""
    scans = [read_record(folder.scan(rank)) for rank in range(len(plan.all_tasks()))]
    done = [(task.split, record) for task, record in zip(tasks, records)]
    report: Json = {"corpora": {}, "leakage": _leakage(folder, tasks)}
    report |= {split: _totals([r for of, r in done if of == split]) for split in SPLITS}
    for name in plan.corpora():
        counts: Counter[str] = Counter()
        examples: list[str] = []
        for planned, scan in zip(plan.all_tasks(), scans):
            if planned.corpus == name:
                counts.update(scan["counts"])
                counts["text.documents"] += scan["documents"]
                counts["text.bytes"] += scan["text_bytes"]
                examples += scan["skipped"]
        own = [(of, record) for of, record in done if record["shards"]["corpus"] == name]
        for record in (record for of, record in own if of == "train"):
            kept = ("held_out.", "duplicates.", "contaminated.")
            counts.update({k: v for k, v in record["counts"].items() if k.startswith(kept)})
        found: Json = {"counts": dict(sorted(counts.items())), "skipped": examples[:EXAMPLES]}
        for split in SPLITS:
            found[split] = _totals([record for of, record in own if of == split])
        report["corpora"][name] = found
    return report


def _totals(records: list[Json]) -> Json:
    keys = ("documents", "text_bytes", "tokens")
    return {key: sum(record["shards"][key] for record in records) for key in keys}


def _leakage(folder: BuildFolder, tasks: list[TokenTask]) -> Json:
    """Return the share of the held-out text's sequences that also occur in the training text."""
    found = HeldOut.load(folder.merge / HELD_OUT_SEQUENCES)
    for task in tasks:
        if task.split == "train":
            seen = read_packed(folder.tokens(task.split, task.number), "seen")
            found.merge_seen(seen.getvalue())
    return {"after": found.leakage, "sequences": found.sequences}


def show_plan(config: RunConfig) -> None:
    """Print what a build would read, and where it would write. Opens no document.

    Raises:
        ConfigError: if the corpus or the tokenizer cannot be used, or a package is missing.
    """
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    check_packages(plan)
    sizes, files = Counter[str](), Counter[str]()
    for task, stored in zip(plan.all_tasks(), task_sizes(plan)):
        sizes[task.corpus] += stored
        # Several tasks may read a file, but only one of them reads its beginning.
        files[task.corpus] += sum(piece.start == 0 for piece in task.pieces)
    for name, number in files.items():
        print(f"{name}: {number:,} files, {size(sizes[name])}")
    free = free_bytes(config.data_directory)
    print(f"{config.data_directory}: {'unknown' if free is None else size(free)} free")
