"""Plan a build: the settings that determine its bytes, the files of the corpus and the tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple, get_args

import fsspec

from pretrain.config import ConfigError, RunConfig
from pretrain.config.schema import WORDS, CleaningSection, DataSection
from pretrain.data import sources
from pretrain.data.build.folder import (
    BuildFolder,
    digest,
)
from pretrain.data.manifest import FORMAT_VERSION, Split
from pretrain.data.sources import Corpus, Piece, Task
from pretrain.rundir.files import Json, read_json, replace_file, replace_json

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
"""Keys of [data] that determine the bytes of a data set, beside the corpora and the tokenizer."""


LIMIT = "cleaning.max_skipped_documents"
"""The one of the settings that says only which builds end with an error."""


class File(NamedTuple):
    """A file of the corpus as it was when the build was planned."""

    path: str
    size: int
    time: int | str
    """Modification time in ns; of a URL what fsspec tells versions of a file apart by."""
    digests: tuple[tuple[int, int, str], ...] = ()
    """(start, end, XXH3-128) of ranges of its bytes; empty before they were read."""


class Plan(NamedTuple):
    """Everything that determines what is built."""

    settings: Json
    """Config keys in words, as an error message shows them."""
    data: DataSection
    cleaning: CleaningSection
    tasks: dict[Split, list[Task]]
    files: dict[Split, list[File]]
    """In the order in which the tasks read them."""

    def corpora(self) -> dict[str, Corpus]:
        """Return the corpora by name, in config order."""
        return {corpus.name: corpus for corpus in sources.corpora(self.data)}


def make_plan(config: RunConfig, tokenizer_sha256: str | None) -> Plan:
    """List the files of the corpus and cut them into tasks.

    Args:
        config: The config.
        tokenizer_sha256: Of the tokenizer that data.tokenizer names.

    Raises:
        ConfigError: if a file cannot be found or read.
    """
    data = config.data
    values = data.model_dump(mode="json", include=set(_RECORDED_KEYS))
    tasks = sources.plan(data)
    settings = {
        "format_version": FORMAT_VERSION,
        "corpora": [[c.name, *_read_as(c, tasks)] for c in sources.corpora(data)],
        **{f"data.{key}": values[key] for key in _RECORDED_KEYS},
        "data.tokenizer (SHA-256)": WORDS if data.tokenizer == WORDS else tokenizer_sha256,
        **{f"cleaning.{key}": value for key, value in config.cleaning},
    }
    files = {split: [_look(path) for path in _paths(tasks[split])] for split in SPLITS}
    return Plan(settings, data, config.cleaning, tasks, files)


def _read_as(corpus: Corpus, tasks: dict[Split, list[Task]]) -> tuple[str, str | None]:
    """Return the names of the sources of a corpus's files, and where the text of documents is."""
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


def _look(path: str) -> File:
    """Return a file's size and time."""
    try:
        if not is_url(path):
            found = os.stat(path)
            return File(path, found.st_size, found.st_mtime_ns)
        system, name = fsspec.core.url_to_fs(path)
        return File(path, system.size(name), str(system.ukey(name)))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror or error}). Restore the file, or take it out "
            "of the corpus"
        ) from None


def is_url(path: str) -> bool:
    """Return True for what fsspec reads, such as s3://bucket/file."""
    return "://" in path


# ---- on disk -------------------------------------------------------------------------------------
def save_plan(plan: Plan, folder: BuildFolder) -> None:
    """Write the plan; plan.json last, because with it the plan is complete."""
    # A task reads its own line alone: a corpus may have millions of files.
    lines = [
        json.dumps([split, *task]).encode() + b"\n"
        for split in SPLITS
        for task in plan.tasks[split]
    ]
    sizes = task_sizes(plan)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    replace_file(folder.tasks, b"".join(lines), durable=True)
    replace_json(folder.files, plan.files, durable=True)
    content = {
        "settings": plan.settings,
        "data": plan.data.model_dump(mode="json"),
        "cleaning": plan.cleaning.model_dump(mode="json"),
        "tasks": {split: len(plan.tasks[split]) for split in SPLITS},
        "starts": starts,
        "sizes": sizes,
        "held_out_bytes": _held_out_bytes(plan, sizes),
    }
    replace_json(folder.plan, content, durable=True)


def task_sizes(plan: Plan) -> list[int]:
    """Return about how many bytes of files each task reads, those of train first."""
    of_file = {file.path: file.size for split in SPLITS for file in plan.files[split]}
    corpora = plan.corpora()
    sizes = []
    tasks = plan.tasks["train"] + plan.tasks["validation"]
    ends: dict[str, int] = {}
    for task in tasks:
        for piece in task.pieces:
            ends[piece.path] = max(ends.get(piece.path, 1), piece.end)
    for task in tasks:
        size = 0
        for path, start, end in task.pieces:
            in_bytes = sources.source_of(corpora[task.corpus], path).in_bytes
            # The parts of a file that is not cut by bytes are taken to be of one size.
            size += end - start if in_bytes else of_file[path] * (end - start) // ends[path]
        sizes.append(size)
    return sizes


def _held_out_bytes(plan: Plan, sizes: list[int]) -> dict[str, int]:
    """Return for each corpus that is divided by hash its part of data.validation_bytes."""
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
"""A task keeps so many times its share of the tokenizer's sample, because a corpus that is packed
has more text than its files have bytes. The merge takes the exact share."""


class TaskPlan(NamedTuple):
    """The part of the plan that one task needs."""

    data: DataSection
    cleaning: CleaningSection
    split: Split
    task: Task
    corpus: Corpus
    sample_bytes: int
    """The most text to keep for the tokenizer's sample."""
    held_out_bytes: int | None
    """The most text that the corpus may hold out; None if it is not divided by hash."""


def load_task(folder: BuildFolder, number: int) -> TaskPlan:
    """Read a task from the plan.

    Args:
        folder: The build.
        number: Position among the tasks of both splits, those of train first.
    """
    content = json.loads(folder.plan.read_bytes())
    data = DataSection.model_validate_json(json.dumps(content["data"]))
    cleaning = CleaningSection.model_validate_json(json.dumps(content["cleaning"]))
    start, end = content["starts"][number : number + 2]
    with folder.tasks.open("rb") as file:
        file.seek(start)
        split, position, name, pieces = json.loads(file.read(end - start))
    task = Task(position, name, tuple(Piece(*piece) for piece in pieces))
    [corpus] = [corpus for corpus in sources.corpora(data) if corpus.name == name]
    in_train = content["tasks"]["train"]
    share = content["sizes"][number] / max(sum(content["sizes"][:in_train]), 1)
    most = data.tokenizer_training_bytes
    # A tokenizer is trained on it, and it shows what is boilerplate.
    wants_sample = data.tokenizer is None or cleaning.decontaminate
    return TaskPlan(
        data,
        cleaning,
        split,
        task,
        corpus,
        sample_bytes=min(most, int(_SAMPLE_FACTOR * most * share) + 1) if wants_sample else 0,
        held_out_bytes=content["held_out_bytes"].get(name) if split == "train" else None,
    )


def saved_inputs(folder: BuildFolder) -> Json:
    """Return the inputs of an unfinished build, as `differences` takes them; {} for none."""
    plan = read_json(folder.plan, most=None)
    files = read_json(folder.files, most=None)
    settings = plan.get("settings")
    return {"settings": settings, "files": files} if isinstance(settings, dict) and files else {}


def saved_finish(folder: BuildFolder) -> Json:
    """Return the inputs of a build whose tasks are all done, as `saved_inputs` does."""
    build = read_json(folder.finish, most=None).get("build")
    inputs = build.get("inputs") if isinstance(build, dict) else None
    return inputs if isinstance(inputs, dict) else {}


# ---- comparing -----------------------------------------------------------------------------------
def differences(recorded: Json | None, plan: Plan) -> list[str]:
    """Return in words how a plan differs from recorded inputs; [] if they give the same bytes.

    A file is the same if its content is, whatever its name and its time. Only those whose size and
    time are not as recorded are read.

    Args:
        recorded: {"settings": ..., "files": split -> `File`s}.
        plan: The plan.
    """
    try:
        before = {
            split: [File(*each) for each in (recorded or {})["files"][split]] for split in SPLITS
        }
        settings = dict((recorded or {})["settings"])
    except (LookupError, TypeError, ValueError):
        return ["the record of its inputs cannot be read"]
    # As JSON gives them back.
    current = json.loads(json.dumps(plan.settings))
    found = [
        f"{key} was {settings.get(key)!r}, is {value!r}"
        for key, value in current.items()
        if settings.get(key) != value
    ]
    for split in SPLITS:
        found += _different_files(before[split], plan.files[split])
    return found


def _different_files(before: list[File], files: list[File]) -> list[str]:
    """Return what differs first between two lists of files, if anything does."""
    if len(before) != len(files):
        names = {file.path for file in before} ^ {file.path for file in files}
        example = f" (for one {sorted(names)[0]})" if names else ""
        return [
            f"the text (files and their content) was {len(before)} files, is {len(files)}{example}"
        ]
    for old, new in zip(before, files):
        if reason := _different_file(old, new):
            return [f"the text (files and their content) was another one: {new.path} {reason}"]
    return []


def _different_file(old: File, new: File) -> str:
    if old[:3] == new[:3]:
        return ""
    if old.size != new.size:
        return f"has {new.size} bytes, where {old.path} had {old.size}"
    if is_url(new.path):
        return f"is another version than {old.path} was" if old.time != new.time else ""
    for start, end, expected in old.digests:
        if digest(Path(new.path), start, end) != expected:
            return f"has other content than {old.path} had"
    return ""


# ---- errors --------------------------------------------------------------------------------------
def too_many_skipped(corpus: str, limit: int, reasons: list[str]) -> ConfigError:
    """Return the error of a corpus with more unreadable documents than are allowed."""
    return ConfigError(
        f"corpus {corpus}: more than cleaning.max_skipped_documents = {limit} documents cannot be "
        f"read, for example {'; '.join(reasons[:3])}. Repair the files, or raise the limit"
    )


def changed(folder: BuildFolder, task: Task, place: tuple[int, int] | None = None) -> ConfigError:
    """Return the error of a task whose documents are not those that the scan saw.

    Args:
        folder: The build.
        task: The task.
        place: The piece and the offset of the first other document; None if one is missing.
    """
    where = f"{task.pieces[place[0]].path}:{place[1]}" if place else task.pieces[-1].path
    return ConfigError(
        f"{where}: has changed since the build began. Remove {folder.path} to build from the text "
        "as it is now, or restore the file and run the command again"
    )
