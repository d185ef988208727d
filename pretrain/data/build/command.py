"""Do the stages of a build, or find that the data set is up to date."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pretrain.config import ConfigError, NoSpace, RunConfig, writing
from pretrain.config.errors import free_bytes, in_bytes
from pretrain.config.schema import WORDS, DataSection
from pretrain.data import sources
from pretrain.data.build.folder import (
    LIMIT,
    RECORD,
    SPLITS,
    BuildFolder,
    Plan,
    Stage,
    differences,
    is_done,
    is_leftover,
    load_merge,
    locked,
    make_plan,
    own_files,
    remove_build,
    save_plan,
    saved_finish,
    saved_inputs,
    shown_progress,
    task_sizes,
    token_tasks,
)
from pretrain.data.build.merge import (
    finish,
    merge,
    note_finished,
    report_lines,
    with_digests,
)
from pretrain.data.build.tasks import Cluster, run_locally, run_on_cluster
from pretrain.data.clean import Cleaner
from pretrain.data.manifest import BUILD_RECORD, read_manifest
from pretrain.data.sources import Corpus, Task
from pretrain.data.sources.files import compression_of
from pretrain.data.stream import TokenStream, check_local
from pretrain.data.tokenizer import (
    Tokenizer,
    WordTokenizer,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
    train_words,
)
from pretrain.data.tokenizers.pieces import PieceTokenizer
from pretrain.rundir.files import Json, make_directory, read_json, remove

KEPT_BYTES = 1_000_000_000
"""Of a corpus this large, what is done is kept when the build ends with an error in the config or
the text. A smaller one is soon done again."""

RunStage = Callable[[BuildFolder, Stage, list[Path]], None]
"""Does every task of a stage that is not done: (folder, stage, where each output is published)."""


def build(config: RunConfig, workers: int = 1, run_stage: RunStage | None = None) -> None:
    """Build the data set of a config in data.directory, and print what was built.

    A build that was interrupted goes on with the tasks that are not done. A data set that was built
    earlier from the same settings and text is checked and left unchanged.

    Args:
        config: The config.
        workers: Processes on this machine. Does not change what is built.
        run_stage: Does the tasks of a stage elsewhere, such as on a cluster.

    Raises:
        ConfigError: if data.directory holds something else or a data set built from other inputs,
            if another process builds it, or if the corpus or the tokenizer cannot be used.
        RunFailed: if the data set cannot be written.
    """
    check_local(config)
    _check_packages(config)
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    given = config.data_directory
    directory = _real_directory(given)
    folder = BuildFolder.beside(directory)
    if _is_up_to_date(directory, plan):
        _remove_leftovers(folder)
        print(f"{given}: up to date (same settings, same text), nothing to do")
        return

    with writing(folder.path), locked(folder):
        if _is_up_to_date(directory, plan):
            # By another process, since the look above.
            remove_build(folder)
            print(f"{given}: up to date (same settings, same text), nothing to do")
            return
        _take_up(folder, plan)
        try:
            if not folder.finish.exists():
                _do_tasks(
                    folder, plan, tokenizer, run_stage or partial(run_locally, workers=workers)
                )
        except ConfigError:
            # After the config or the text has been corrected, the build cannot go on from here.
            if sum(task_sizes(plan)) < KEPT_BYTES:
                remove_build(folder)
            raise
        content = finish(folder, directory)
        remove_build(folder)
    shards = {split: len(read_manifest(directory / split).shards) for split in SPLITS}
    used = load_tokenizer(find_tokenizer(directory))
    print("\n".join(report_lines(given, used, content, shards)))


def build_on_cluster(
    config: RunConfig, command: Sequence[str], workers: int, array_size: int
) -> None:
    """Build the same data set as `build`, with the tasks as job arrays on a cluster.

    Args:
        config: The config.
        command: Runs a job array; see `executor.Cluster`.
        workers: The most tasks that run at the same time.
        array_size: The most jobs of an array.

    Raises:
        ConfigError: as `build`.
        RunFailed: if the cluster refused the jobs, or some ended without a result.
    """

    cluster = Cluster(tuple(command), workers, array_size)
    build(config, run_stage=partial(run_on_cluster, cluster=cluster))


def _check_packages(config: RunConfig) -> None:
    """Refuse to begin a build that needs a package which is not installed."""
    needed = {
        "rensa": ("cleaning.deduplicate", config.cleaning.deduplicate == "near"),
        "ftfy": ("cleaning.repair_unicode", config.cleaning.repair_unicode),
    }
    for package, (key, is_needed) in needed.items():
        if is_needed and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{key}: the package {package} is missing. Run `pip install 'pretrain[data]'`"
            )


def _real_directory(given: Path) -> Path:
    """Return the folder to which data.directory leads, and make the folders above it.

    What is built gets its name by a rename, which replaces no symlink and crosses no disk.

    Raises:
        ConfigError: A disk is mounted there.
        RunFailed: The folders above it cannot be made.
    """
    # Also those of new/../data, or nobody could read the data set by that name.
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
        ConfigError: if it has another number of pieces than data.vocab_size, or could not be
            exported with a model.
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
    """Return True if the data set is there and was built from this plan; False if none is there.

    Raises:
        ConfigError: Something else is there, or a data set that was built from other inputs.
    """
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if is_empty or not os.path.lexists(directory):
        return False
    remedy = f"Choose another data.directory, or remove {directory} to build it anew"
    try:
        recorded = json.loads((directory / BUILD_RECORD).read_text())
    except (OSError, ValueError, RecursionError):
        recorded = None
    if not isinstance(recorded, dict):
        raise ConfigError(
            f"data.directory = {directory}: exists, but holds no finished data set (no readable "
            f"{BUILD_RECORD}). {remedy}"
        )
    if different := differences(recorded.get("inputs"), plan):
        raise ConfigError(
            f"data.directory = {directory}: holds a data set built from other inputs: "
            f"{'; '.join(different)}. Nothing was changed. {remedy}"
        )
    for split in SPLITS:
        TokenStream(directory / split)
    return True


def _remove_leftovers(folder: BuildFolder) -> None:
    """Remove what a build left that was killed after its data set got its name."""
    if folder.path.is_dir():
        # Whoever holds the lock is about to remove it.
        with contextlib.suppress(ConfigError), writing(folder.path), locked(folder):
            if is_leftover(folder):
                remove_build(folder)


def _take_up(folder: BuildFolder, plan: Plan) -> None:
    """Go on with the build that the folder holds, or begin one.

    Raises:
        ConfigError: The folder holds a build from other inputs.
    """
    if not folder.plan.exists():
        for path in own_files(folder):
            remove(path)
        _check_space(folder, plan)
        save_plan(plan, folder)
        return
    recorded = saved_inputs(folder)
    if folder.finish.exists():
        recorded = saved_finish(folder)
    elif recorded:
        recorded["files"] = _saved_files(folder, plan, recorded["files"])
        # What is done is the same with a higher limit, and to raise it is what the error asks for.
        before, now = recorded["settings"].get(LIMIT), plan.settings[LIMIT]
        if isinstance(before, int) and before < now:
            recorded["settings"][LIMIT] = now
    if different := differences(recorded, plan):
        raise ConfigError(
            f"{folder.path}: holds an unfinished build from other inputs: {'; '.join(different)}. "
            f"Nothing was changed. Go on with those inputs, or remove {folder.path} to start over"
        )
    if not folder.finish.exists():
        # Names and times of files may be new.
        save_plan(plan, folder)


def _saved_files(folder: BuildFolder, plan: Plan, recorded: Json) -> Json:
    """Return the recorded files with the digests that the scan has made of them.

    The tasks are those of the plan, because their ranges follow from sizes and settings; where
    these differ, no digest is asked for.
    """
    try:
        return {
            split: [[*before[:3], new.digests] for before, new in zip(recorded[split], files)]
            if len(recorded[split]) == len(files)
            else recorded[split]
            for split, files in with_digests(folder, plan).items()
        }
    except (LookupError, TypeError):
        # `differences` says so of what is no list of files.
        return recorded


def _check_space(folder: BuildFolder, plan: Plan) -> None:
    """Refuse to begin where the tokens cannot fit: a tokenizer makes few of more than 8 bytes."""
    itemsize = 2 if plan.data.vocab_size <= 1 << 16 else 4
    least = sum(task_sizes(plan)) * itemsize // 8
    free = free_bytes(folder.path)
    if free is not None and free < least:
        raise NoSpace(
            f"{folder.path}: the tokens of this corpus take at least {in_bytes(least)}; "
            f"{in_bytes(free)} are free. Make room or choose another data.directory"
        )


def _do_tasks(
    folder: BuildFolder, plan: Plan, tokenizer: Tokenizer | None, run_stage: RunStage
) -> None:
    """Do what is not done of scan, merge and tokenize."""

    def run(stage: Stage, finals: list[Path], sizes: list[int]) -> None:
        # What the tasks of an earlier command have said is over.
        remove(folder.progress)
        folder.progress.mkdir()
        with shown_progress(stage, finals, sizes):
            run_stage(folder, stage, finals)

    scans = sum(len(plan.tasks[split]) for split in SPLITS)
    run("scan", [folder.scan(rank) for rank in range(scans)], task_sizes(plan))
    done = is_done(folder.merge)
    merged = load_merge(folder) if done else merge(folder, plan, tokenizer)
    tasks = token_tasks(merged)
    finals = [folder.tokens(task.split, task.number) for task in tasks]
    sizes = [read_json(folder.scan(task.planned) / RECORD)["text_bytes"] for task in tasks]
    run("tokenize", finals, sizes)
    note_finished(folder, plan, merged)


# ---- Estimate from a sample what a build makes of a corpus, and how long it takes ----


SAMPLE_BYTES = 2_000_000
"""Text that is read of each corpus, from the beginnings of PLACES of its tasks."""
PLACES = 8

_PACKED = 3.0
"""Bytes of text in a byte of a compressed file."""

_FEWEST_PIECES = 300

_SHARE_OF_TOKENIZING = 0.7
"""Tokenizing takes about so much of a build's time; the rest is reading twice and comparing."""


class CorpusEstimate(NamedTuple):
    """The estimated size of a corpus when it is built."""

    files: int
    """Bytes."""
    documents: float
    text: float
    """Bytes."""
    tokens: float
    seconds: float
    """Processor time."""


def estimate(config: RunConfig, workers: int) -> dict[str, CorpusEstimate]:
    """Print and return what a build would make of each corpus. Writes nothing.

    Args:
        config: The config.
        workers: Processes that the time is given for.

    Raises:
        ConfigError: if the corpus or the tokenizer cannot be used.
    """
    check_local(config)
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    sizes = task_sizes(plan)
    samples = {name: _sample(plan, sizes, corpus) for name, corpus in plan.corpora().items()}
    if not any(sample.texts for sample in samples.values()):
        raise ConfigError("data.paths: the sample of these files has no text. Choose files that do")
    if tokenizer is None:
        tokenizer = _train(plan, [text for sample in samples.values() for text in sample.texts])
    found = {name: _extrapolate(sample, tokenizer) for name, sample in samples.items()}
    for name, corpus in found.items():
        print(f"{name}: {in_bytes(corpus.files)} of files, {_amount(corpus)}")
    itemsize = 2 if config.data.vocab_size <= 1 << 16 else 4
    size = int(sum(corpus.tokens for corpus in found.values()) * itemsize)
    free = free_bytes(BuildFolder.beside(config.data_directory).path)
    room = "" if free is None else f"; {in_bytes(free)} are free"
    seconds = sum(corpus.seconds for corpus in found.values()) / max(min(workers, len(sizes)), 1)
    print(f"{config.data_directory}: about {in_bytes(size)}{room}")
    processes = f"{workers} process{'es' * (workers != 1)}"
    more = "" if config.data.tokenizer else ", and the training of the tokenizer"
    print(f"time: {_about(seconds)} with {processes} on {len(sizes)} tasks{more}")
    return found


def _about(seconds: float) -> str:
    """Return an estimated time as people say it."""
    if seconds < 60:
        return "less than a minute"
    return (
        f"about {seconds / 60:.0f} minutes" if seconds < 7200 else f"about {seconds / 3600:.1f} h"
    )


class _Sample(NamedTuple):
    files: int
    texts: list[str]
    text_per_file_byte: float


def _sample(plan: Plan, sizes: list[int], corpus: Corpus) -> _Sample:
    """Read the beginnings of some tasks of a corpus."""
    own = [(t, size) for t, size in zip(plan.tasks["train"], sizes) if t.corpus == corpus.name]
    step = max(1, len(own) // PLACES)
    chosen = own[::step][:PLACES]
    texts: list[str] = []
    ratios: list[float] = []
    for task, size in chosen:
        ratios.append(_read(plan, task, size, corpus, SAMPLE_BYTES // len(chosen), texts))
    return _Sample(sum(size for _, size in own), texts, sum(ratios) / max(len(ratios), 1))


def _read(plan: Plan, task: Task, size: int, corpus: Corpus, most: int, texts: list[str]) -> float:
    """Add cleaned documents of a task to `texts`, and return the bytes of text per byte of file."""
    cleaner, text_bytes, last = Cleaner(plan.cleaning), 0, None
    documents = sources.read(task, corpus, lambda reason: None)
    for document in documents:
        if text_bytes > most:
            # The document begins where those before it end.
            last = document
            break
        if (text := cleaner.clean(document.text)) is not None:
            texts.append(text)
            text_bytes += len(text.encode())
    if last is None:
        # The whole task was read.
        return text_bytes / max(size, 1)
    piece = task.pieces[last.piece]
    taken = sources.source_of(corpus, piece.path).text_per_byte
    if compression_of(piece.path) or taken:
        return taken if taken and not compression_of(piece.path) else _PACKED
    read = sum(p.end - p.start for p in task.pieces[: last.piece]) + last.offset - piece.start
    return text_bytes / max(read, 1)


def _train(plan: Plan, texts: list[str]) -> Tokenizer:
    """Train a tokenizer on the sample, of as many pieces as so little text yields."""
    pieces = plan.data.vocab_size
    while True:
        try:
            if plan.data.tokenizer == WORDS:
                return WordTokenizer(Path("sample"), train_words(texts, pieces))
            return PieceTokenizer(Path("sample"), train_tokenizer(_lines(texts), pieces))
        except ConfigError:
            if pieces < 2 * _FEWEST_PIECES:
                raise
            pieces //= 2


def _lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from (line for line in text.split("\n") if line)


def _extrapolate(sample: _Sample, tokenizer: Tokenizer) -> CorpusEstimate:
    start = time.process_time()
    tokens = sum(len(ids) + 1 for ids in tokenizer.encode_batch(sample.texts))
    seconds = (time.process_time() - start) / _SHARE_OF_TOKENIZING
    read = sum(len(text.encode()) for text in sample.texts)
    text = sample.files * sample.text_per_file_byte
    factor = text / max(read, 1)
    return CorpusEstimate(
        sample.files, len(sample.texts) * factor, text, tokens * factor, seconds * factor
    )


def _amount(found: CorpusEstimate) -> str:
    return (
        f"about {found.documents:,.0f} documents, {in_bytes(int(found.text))} of text, "
        f"{found.tokens:,.0f} tokens ({found.text / max(found.tokens, 1):.2f} bytes a token)"
    )
