"""Do the stages of a build, or find that the data set is up to date."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.errors import free_bytes, in_bytes
from pretrain.config.schema import WORDS, DataSection
from pretrain.data import sources
from pretrain.data.build.folder import (
    SPLITS,
    BuildFolder,
    BuildRecord,
    Plan,
    Stage,
    differences,
    is_done,
    load_merge,
    locked,
    make_plan,
    recorded,
    remove_build,
    save_plan,
    saved_inputs,
    task_sizes,
)
from pretrain.data.build.merge import Merger, finish, note_finished, report_lines, train
from pretrain.data.build.tasks import Cluster, run_locally, run_on_cluster
from pretrain.data.clean import Cleaner, check_packages
from pretrain.data.manifest import BUILD_RECORD
from pretrain.data.sources import Corpus, Task
from pretrain.data.sources.files import compression_of
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import (
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from pretrain.rundir.files import make_directory, read_json

KEPT_BYTES = 1_000_000_000
"""Of a corpus this large, what is done is kept when the build ends with an error in the config or
the text. A smaller one is soon done again."""


def build(config: RunConfig, workers: int = 1, cluster: Cluster | None = None) -> None:
    """Build the data set of a config in data.directory, and print what was built.

    A build that was interrupted goes on with the tasks that are not done. A data set that was built
    earlier from the same settings and text is checked and left unchanged.

    Args:
        config: The config.
        workers: Processes on this machine. Does not change what is built.
        cluster: Does the tasks as job arrays instead. Does not change what is built.

    Raises:
        ConfigError: if data.directory holds something else or a data set built from other inputs,
            if another process builds it, or if the corpus or the tokenizer cannot be used.
        RunFailed: if the data set cannot be written, or jobs ended without a result.
    """
    given = config.data_directory
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    directory = _real_directory(given)
    folder = BuildFolder.beside(directory)
    up_to_date = f"{given}: up to date (same settings, same text), nothing to do"
    if _is_up_to_date(directory, plan):
        if folder.path.exists():
            # A build was killed after its last step. Another process may just be removing this.
            with contextlib.suppress(ConfigError, OSError), locked(folder):
                remove_build(folder)
        print(up_to_date)
        return
    check_packages(plan.cleaning)

    with writing(folder.path), locked(folder):
        if _is_up_to_date(directory, plan):
            # By another process, since the look above.
            remove_build(folder)
            print(up_to_date)
            return
        _take_up(folder, plan)
        try:
            if not folder.finish.exists():
                _do_tasks(folder, plan, tokenizer, workers, cluster)
        except ConfigError:
            # After the config or the text has been corrected, the build cannot go on from here.
            if sum(task_sizes(plan)) < KEPT_BYTES:
                remove_build(folder)
            raise
        content = finish(folder, directory)
        remove_build(folder)
    shards = {s: len(TokenStream(directory / s).manifest.shards) for s in SPLITS}
    used = load_tokenizer(find_tokenizer(directory))
    print("\n".join(report_lines(given, used, content, shards)))


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
    record = recorded(BuildRecord, read_json(directory / BUILD_RECORD, most=None))
    if record is None:
        raise ConfigError(
            f"data.directory = {directory}: exists, but holds no finished data set (no readable "
            f"{BUILD_RECORD}). {remedy}"
        )
    if different := differences(record.inputs, plan):
        raise ConfigError(
            f"data.directory = {directory}: holds a data set built from other inputs: "
            f"{'; '.join(different)}. Nothing was changed. {remedy}"
        )
    for split in SPLITS:
        TokenStream(directory / split)
    return True


def _take_up(folder: BuildFolder, plan: Plan) -> None:
    """Go on with the build that the folder holds, or begin one.

    Raises:
        ConfigError: The folder holds a build from other inputs.
    """
    if folder.plan.exists() and (different := differences(saved_inputs(folder, plan), plan)):
        raise ConfigError(
            f"{folder.path}: holds an unfinished build from other inputs: {'; '.join(different)}. "
            "Nothing was changed. Go on with those inputs, or remove "
            f"{folder.path} to start over"
        )
    if not folder.finish.exists():
        # Names and times of files may be new.
        save_plan(plan, folder)


def _do_tasks(
    folder: BuildFolder,
    plan: Plan,
    tokenizer: Tokenizer | None,
    workers: int,
    cluster: Cluster | None,
) -> None:
    """Do what is not done of scan, merge and tokenize."""

    def run(stage: Stage, finals: list[Path]) -> None:
        if cluster:
            run_on_cluster(folder, stage, finals, cluster)
        else:
            run_locally(folder, stage, finals, workers)

    run("scan", [folder.scan(rank) for rank in range(len(plan.all_tasks()))])
    if not is_done(folder.merge):
        Merger(folder, plan, tokenizer).run()
    _, tasks = load_merge(folder)
    run("tokenize", [folder.tokens(task.split, task.number) for task in tasks])
    note_finished(folder, plan)


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

    def __str__(self) -> str:
        return (
            f"{in_bytes(self.files)} of files, about {self.documents:,.0f} documents, "
            f"{in_bytes(int(self.text))} of text, {self.tokens:,.0f} tokens "
            f"({self.text / max(self.tokens, 1):.2f} bytes a token)"
        )


def estimate(config: RunConfig, workers: int) -> dict[str, CorpusEstimate]:
    """Print and return what a build would make of each corpus. Writes nothing.

    Args:
        config: The config.
        workers: Processes that the time is given for.

    Raises:
        ConfigError: if the corpus or the tokenizer cannot be used.
    """
    directory = config.data_directory
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    sizes = task_sizes(plan)
    samples = {name: _sample(plan, sizes, corpus) for name, corpus in plan.corpora().items()}
    if not any(sample.texts for sample in samples.values()):
        raise ConfigError("data.paths: the sample of these files has no text. Choose files that do")
    if tokenizer is None:
        tokenizer = _train(
            config.data, [text for sample in samples.values() for text in sample.texts]
        )
    found = {name: _extrapolate(sample, tokenizer) for name, sample in samples.items()}
    for name, corpus in found.items():
        print(f"{name}: {corpus}")
    itemsize = 2 if config.data.vocab_size <= 1 << 16 else 4
    size = int(sum(corpus.tokens for corpus in found.values()) * itemsize)
    free = free_bytes(BuildFolder.beside(directory).path)
    room = "" if free is None else f"; {in_bytes(free)} are free"
    seconds = sum(corpus.seconds for corpus in found.values()) / max(min(workers, len(sizes)), 1)
    print(f"{directory}: about {in_bytes(size)}{room}")
    more = "" if config.data.tokenizer else ", and the training of the tokenizer"
    hours = timedelta(minutes=max(1, round(seconds / 60)))
    print(f"time: about {hours} with {workers} processes on {len(sizes)} tasks{more}")
    return found


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


def _train(data: DataSection, texts: list[str]) -> Tokenizer:
    """Train a tokenizer on the sample, of as many pieces as so little text yields."""
    while True:
        try:
            name, content = train(data, texts)
            return make_tokenizer(Path(name), content)
        except ConfigError:
            if data.vocab_size < 2 * _FEWEST_PIECES:
                raise
            data = data.model_copy(update={"vocab_size": data.vocab_size // 2})


def _extrapolate(sample: _Sample, tokenizer: Tokenizer) -> CorpusEstimate:
    start = time.process_time()
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in sample.texts)
    seconds = (time.process_time() - start) / _SHARE_OF_TOKENIZING
    read = sum(len(text.encode()) for text in sample.texts)
    text = sample.files * sample.text_per_file_byte
    factor = text / max(read, 1)
    return CorpusEstimate(
        sample.files, len(sample.texts) * factor, text, tokens * factor, seconds * factor
    )
