"""Put the outputs of all tasks together, report what became of every document, and publish."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.data.build.folder import (
    HELD_OUT_SEQUENCES,
    RECORD,
    BuildFolder,
    TokenTask,
    token_tasks,
)
from pretrain.data.build.plan import SPLITS, File, Plan
from pretrain.data.clean import HeldOut
from pretrain.data.manifest import Split, TaskShards
from pretrain.data.shards import finish_split
from pretrain.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from pretrain.rundir.files import (
    Json,
    flush_directory,
    publish_directory,
    read_json,
    replace_file,
    replace_json,
)

BUILD_RECORD = "build.json"
"""File of the settings and text that a data set was built from, and of the report."""

DOCUMENTS = "documents"
"""Folder of a split that says where each document comes from; see `steps.PLACE`."""


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
