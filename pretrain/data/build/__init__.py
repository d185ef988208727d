"""Build a data set from corpora, on one machine or many, and go on where a build was interrupted.

A build has five stages. `plan` lists the corpus and cuts it into tasks, fixed ranges of bytes.
`scan` reads every task and notes the hash of each document, what could be held out, and a sample of
lines for the tokenizer. `merge` chooses the held-out documents, finds duplicates and trains the
tokenizer. `tokenize` reads every task again and writes its shards. `finish` puts the shards of all
tasks together, writes manifests and the report, and gives the data set its name.

Only scan and tokenize work in parallel. What a task writes depends on the plan and on the merge
alone, so the data set is the same for any number of processes, whatever was interrupted.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.errors import free_bytes, size
from pretrain.config.schema import WORDS, DataSection
from pretrain.data import sources
from pretrain.data.build.folder import (
    SPLITS,
    BuildFolder,
    Plan,
    Stage,
    differences,
    is_done,
    load_token_tasks,
    locked,
    make_plan,
    piece_sizes,
    remove_build,
    save_plan,
    task_sizes,
)
from pretrain.data.build.merge import Merger, finish, note_finished
from pretrain.data.build.tasks import Cluster, run_locally, run_on_cluster, text_size
from pretrain.data.clean import Cleaner, duplicate_keys
from pretrain.data.shards import BUILD_RECORD
from pretrain.data.sources import Corpus, Piece, Task
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer, load_tokenizer
from pretrain.data.view import summary
from pretrain.rundir.files import make_directory, read_json

__all__ = ["Cluster", "build", "estimate"]

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
    up_to_date = _is_up_to_date(directory, plan)
    if not up_to_date or folder.path.exists():
        with writing(folder.path), locked(folder):
            # Another process may have built it since the look above.
            up_to_date = _is_up_to_date(directory, plan)
            if not up_to_date:
                _build(folder, plan, tokenizer, workers, cluster)
                finish(folder, directory)
            remove_build(folder)
    if up_to_date:
        print(f"{given}: up to date (same settings, same text), nothing to do")
    else:
        print("\n".join(summary(str(given))))


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
    inputs = read_json(directory / BUILD_RECORD, most=None).get("inputs")
    if inputs is None:
        raise ConfigError(
            f"data.directory = {directory}: exists, but holds no finished data set (no readable "
            f"{BUILD_RECORD}). {remedy}"
        )
    if different := differences(inputs, plan):
        raise ConfigError(
            f"data.directory = {directory}: holds a data set built from other inputs: "
            f"{'; '.join(different)}. Nothing was changed. {remedy}"
        )
    for split in SPLITS:
        TokenStream(directory / split)
    return True


def _build(
    folder: BuildFolder,
    plan: Plan,
    tokenizer: Tokenizer | None,
    workers: int,
    cluster: Cluster | None,
) -> None:
    """Begin a build, or do what is not done of one that the folder holds, up to the finish.

    Raises:
        ConfigError: The folder holds a build from other inputs, or a package is missing.
    """
    if folder.plan.exists():
        before = read_json(folder.plan, most=None) | {"files": read_json(folder.files, most=None)}
        if different := differences(before, plan):
            raise ConfigError(
                f"{folder.path}: holds an unfinished build from other inputs: "
                f"{'; '.join(different)}. Nothing was changed. Go on with those inputs, or remove "
                f"{folder.path} to start over"
            )
    if folder.finish.exists():
        return
    check_packages(plan)
    # Names and times of files may be new.
    save_plan(plan, folder)

    def run(stage: Stage, finals: list[Path]) -> None:
        if cluster:
            run_on_cluster(folder, stage, finals, cluster)
        else:
            run_locally(folder, stage, finals, workers)

    try:
        run("scan", [folder.scan(rank) for rank in range(len(plan.all_tasks()))])
        if not is_done(folder.merge):
            Merger(folder, plan, tokenizer).run()
        tasks = load_token_tasks(folder)
        run("tokenize", [folder.tokens(task.split, task.number) for task in tasks])
        note_finished(folder, plan)
    except ConfigError:
        # After the config or the text has been corrected, the build cannot go on from here.
        if sum(task_sizes(plan)) < KEPT_BYTES:
            remove_build(folder)
        raise


def check_packages(plan: Plan) -> None:
    """Raise ConfigError if a package is missing that the build needs, before hours of reading.

    Planning has read the footers of Parquet files, and has asked for their package.
    """
    if plan.cleaning.repair_unicode:
        sources.optional("ftfy", "cleaning.repair_unicode")
    if plan.cleaning.deduplicate == "near":
        sources.optional("rensa", 'cleaning.deduplicate = "near"')
    for suffix in {sources.compression_of(file.path) for s in SPLITS for file in plan.files[s]}:
        if suffix:
            sources.COMPRESSIONS[suffix]()


# ---- Estimate from a sample what a build makes of a corpus, and how long it takes ----


SAMPLE_BYTES = 1_000_000
"""Text that is read of each corpus, from the beginnings of PLACES of its files."""
PLACES = 8

_BYTES_A_TOKEN, _TOKENIZED_BYTES_A_SECOND = 4.4, 4.6e6
"""What is assumed where the tokenizer is still to be trained."""

_PACKED = 3.0
"""Bytes of text in a byte of a compressed or Parquet file of which only the beginning is read."""

_MEASURED_SHARE = 0.7
"""What is measured takes about so much of a build's time; the rest is reading again and writing."""


def estimate(config: RunConfig, workers: int) -> None:
    """Print what a build would make of each corpus, estimated from a sample. Writes nothing.

    Args:
        config: The config.
        workers: Processes that the time is given for.

    Raises:
        ConfigError: if the corpus or the tokenizer cannot be used, or a package is missing.
        RunFailed: if a file cannot be read.
    """
    tokenizer = load_given_tokenizer(config.data)
    plan = make_plan(config, tokenizer.fingerprint if tokenizer else None)
    check_packages(plan)
    tasks = plan.all_tasks()
    own: dict[str, list[tuple[Piece, int]]] = {name: [] for name in plan.corpora()}
    for task, sizes in zip(tasks, piece_sizes(plan)):
        own[task.corpus] += zip(task.pieces, sizes)
    assumed = "" if tokenizer else f", with an assumed {_BYTES_A_TOKEN} bytes a token"
    print(f"An estimate from about {size(SAMPLE_BYTES)} of each corpus{assumed}:")
    all_tokens = all_seconds = 0.0
    for name, corpus in plan.corpora().items():
        total = sum(count for _, count in own[name])
        ratio, sampled, tokens, seconds = _measured(plan, corpus, own[name], tokenizer)
        scale = ratio * total / max(sampled, 1)
        all_tokens += scale * tokens
        all_seconds += scale * seconds
        print(
            f"{name}: {len({piece.path for piece, _ in own[name]}):,} files, {size(total)}; "
            f"about {size(int(ratio * total))} of text, {scale * tokens:,.0f} tokens, "
            f"{sampled / max(tokens, 1):.2f} bytes a token, {sampled / seconds / 1e6:.1f} MB/s/core"
        )
    free = free_bytes(config.data_directory)
    left = "unknown" if free is None else size(free)
    written = int(all_tokens * (2 if config.data.vocab_size <= 1 << 16 else 4))
    print(f"{config.data_directory}: about {size(written)}; {left} free")
    at_once = max(1, min(workers, len(tasks)))
    hours = timedelta(minutes=max(1, round(all_seconds / at_once / 60)))
    print(f"time: about {hours} with {workers} processes, without training a tokenizer")


def _measured(
    plan: Plan, corpus: Corpus, own: list[tuple[Piece, int]], tokenizer: Tokenizer | None
) -> tuple[float, int, float, float]:
    """Read the beginnings of some pieces of a corpus, spread evenly over all of them.

    Returns:
        Bytes of text per byte of a file; and of the sample its bytes, its tokens, and the seconds
        of one core that a build takes for it.
    """
    start = time.process_time()
    cleaner, mode = Cleaner(plan.cleaning), plan.cleaning.deduplicate
    chosen = own[:: max(1, -(-len(own) // PLACES))]
    total = max(sum(count for _, count in chosen), 1)
    ratio, sampled, tokens = 0.0, 0, 0.0
    for piece, count in chosen:
        found, texts = _beginning(cleaner, corpus, piece, count, SAMPLE_BYTES // len(chosen))
        ratio += found * count / total
        for text in texts:
            sampled += text_size(text)
            if mode != "none":
                duplicate_keys(text, mode)
            tokens += len(tokenizer.encode(text)) + 1 if tokenizer else 0
    seconds = time.process_time() - start
    if tokenizer is None:
        tokens, seconds = sampled / _BYTES_A_TOKEN, seconds + sampled / _TOKENIZED_BYTES_A_SECOND
    return ratio, sampled, tokens, seconds / _MEASURED_SHARE


def _beginning(
    cleaner: Cleaner, corpus: Corpus, piece: Piece, stored: int, most: int
) -> tuple[float, list[str]]:
    """Return the bytes of text per byte of a piece, and its first `most` characters, cleaned.

    Args:
        cleaner: Cleans them.
        corpus: The corpus of the piece.
        piece: The piece.
        stored: The bytes of the piece as its file is stored.
        most: About how many characters to read.
    """
    texts, read, kept = list[str](), 0, 0.0
    for document in sources.read(Task(0, corpus.name, (piece,)), corpus, lambda reason: None):
        if read >= most:
            source = sources.source_of(corpus, piece.path)
            is_packed = sources.compression_of(piece.path) or not source.in_bytes
            # Where a file can be cut anywhere, offsets are bytes of it, as it is unpacked.
            held = kept / (document.offset - piece.start) if source.can_be_cut else 1.0
            return held * (_PACKED if is_packed else 1.0), texts
        begin = document.text[:most]
        read += len(begin)
        if (text := cleaner.clean(begin)) is not None:
            texts.append(text)
            kept += text_size(text) * len(document.text) / max(len(begin), 1)
    return kept / max(stored, 1), texts
