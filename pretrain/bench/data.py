"""Measure how fast one process gets its batches, beside the usual ways to read the same tokens.

All contestants deliver the same work: the micro batches of a rank's step, int64, in random order,
from files that hold the same tokens. They take turns in one process.

    pretrain           the loader of training: exact order, every byte verified, one step ahead
    verified reads     its reads alone, of the samples that the memmap reads
    memmap             slices of a numpy memmap, nothing verified
    torch DataLoader   the same memmap as a Dataset, in the order of a RandomSampler
    webdataset         our shards through webdataset, shuffled by shard and in a buffer
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform as machine
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from pretrain.bench.turns import Column, contest, table
from pretrain.config import ConfigError, RunConfig, writing
from pretrain.data import order
from pretrain.data.blend import blend_of
from pretrain.data.loader import batches
from pretrain.data.manifest import Layout
from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.stream import TokenStream

OURS, READS, MEMMAP, TORCH, WEBDATASET = (
    *("pretrain", "verified reads", "memmap"),
    *("torch DataLoader", "webdataset"),
)
SPEED, COST = "tokens_per_second", "tokens_per_processor_second"
WAIT = "wait_milliseconds"
WARM_UP_STEPS = 4
"""Steps before the clock runs: files are opened, threads and workers start."""
WAITED_STEPS, STEP_SECONDS = 30, 0.01
"""How often training is played, and how long its own work takes each time."""
SHUFFLED_SHARDS, SHUFFLED_SAMPLES = 100, 1000
"""webdataset's buffers; the second one has the size of its own default."""
_CHUNK = 2**20

Steps = Iterator[list[torch.Tensor]]


@dataclass(frozen=True)
class Contest:
    """Samples that every contestant reads, and how many of them at once."""

    config: RunConfig
    stream: TokenStream
    flat: Path
    """The tokens of the stream in one file, without anything else."""
    data_parallel_size: int

    @property
    def length(self) -> int:
        """Return the tokens that a sample has: those that the model sees, and one more."""
        return self.config.data.sequence_length + 1

    @property
    def samples(self) -> int:
        """Return the samples of a rank's step."""
        return self.config.batch.global_batch_size // self.data_parallel_size

    def memmap(self) -> np.ndarray:
        """Map the flat file."""
        dtype = self.stream.manifest.layout.dtype
        return np.asarray(np.memmap(self.flat, dtype, mode="r"))

    def starts(self) -> Iterator[np.ndarray]:
        """Yield where the samples of each step begin, in an order of numpy's."""
        stride = self.config.data.sequence_length
        count = order.num_samples(len(self.stream), stride)
        random = np.random.default_rng(self.config.run.seed)
        # Many steps at once, so that the order costs the reader nothing to speak of.
        while True:
            yield from random.integers(0, count, (256, self.samples)) * stride

    def cut(self, samples: np.ndarray) -> list[torch.Tensor]:
        """Return the micro batches that the samples of a step form."""
        tokens, size = torch.from_numpy(samples), self.config.batch.micro_batch_size
        return [tokens[first : first + size] for first in range(0, len(tokens), size)]


def measure_loading(
    config: RunConfig, tokens: int, rounds: int, seconds: float, directory: Path | None
) -> dict[str, Any]:
    """Time every contestant on random tokens, in turns. Progress goes to stderr.

    Args:
        config: The run, which says how long samples are, how many a rank takes and how many
            processes load them.
        tokens: Tokens to write and to read.
        rounds: How often each contestant takes its turn.
        seconds: How long it reads in a turn.
        directory: Where a folder with the tokens is made, and removed again. Default: the system's
            place for temporary files.

    Returns:
        {"machine", "rounds", "seconds", "tokens", "sequence_length", "samples_per_step",
        "micro_batch_size", "num_workers", "rows": [{"loader", "tokens_per_second",
        "tokens_per_processor_second", "wait_milliseconds"}], "failed": [{"loader", "reason"}]}: one
        value for each round. Processor time is that of this process, so it says little where
        others load. The wait is that of a training step of 10 ms for its batch.

    Raises:
        ConfigError: There are too few tokens for a step, or there is no such directory.
        RunFailed: The directory cannot be written to, or all contestants failed.
    """
    parallel = config.parallel
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    layout = config.layout(parallel.world_size or split)
    needed = config.tokens_per_step * max(1, len(config.data.corpora))
    if tokens <= needed:
        raise ConfigError(
            f"--tokens {tokens}: a step of every corpus takes {needed}. Give more, a hundred times "
            "as many for a random order to mean something"
        )
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--directory {directory}: not a directory. Make it, or choose another")
    with writing(directory or Path(tempfile.gettempdir())):
        folder = tempfile.TemporaryDirectory(dir=directory)
    with folder as name:
        with writing(Path(name)):
            stream = _write(config, Path(name), tokens)
        sources = Contest(config, stream, Path(name) / "flat.bin", layout.data)
        contestants = list(CONTESTANTS)

        def one(number: int) -> dict[str, float]:
            make = CONTESTANTS[contestants[number]]
            return _speed(make(sources), seconds) | {WAIT: _wait(make(sources))}

        measured = contest(
            [{"loader": name} for name in contestants],
            rounds,
            one,
            lambda t: f"{t[SPEED]:,.0f} tokens/s, {t[WAIT]:.2f} ms waited",
        )
    return {
        "machine": f"{machine.processor() or machine.machine()}, {os.cpu_count()} processors",
        "seconds": seconds,
        "tokens": tokens,
        "sequence_length": config.data.sequence_length,
        "samples_per_step": sources.samples,
        "micro_batch_size": config.batch.micro_batch_size,
        "num_workers": config.data.num_workers,
        **measured,
    }


def loading_table(result: dict[str, Any]) -> str:
    """Return what `measure_loading` returned as a Markdown table, with ratios to the memmap."""
    memmap = next((row for row in result["rows"] if row["loader"] == MEMMAP), None)
    return table(
        result,
        f"{result['machine']}; {result['tokens']:,} random tokens, L = "
        f"{result['sequence_length']:,}, steps of {result['samples_per_step']} samples in micro "
        f"batches of {result['micro_batch_size']}, data.num_workers = {result['num_workers']}; "
        f"medians of {result['rounds']} rounds of {result['seconds']:g} s in turn; ratios to the "
        f"{MEMMAP}, with their range over the rounds",
        ["loader"],
        [
            Column("tokens/s", SPEED, "{:,.0f}", ratio=True),
            Column("tokens per second of processor time", COST, "{:,.0f}", ratio=True),
            Column(f"waited for a step of {STEP_SECONDS * 1e3:g} ms", WAIT, "{:.2f} ms"),
        ],
        lambda row: memmap,
    )


def _write(config: RunConfig, root: Path, tokens: int) -> TokenStream:
    """Write random tokens as the shards of a data set and as one flat file, and open the shards."""
    data, names = config.data, list(config.data.corpora) or ["text"]
    sizes = {"tokens_per_block": data.tokens_per_block, "tokens_per_shard": data.tokens_per_shard}
    dtype = Layout.of(data.vocab_size, data.tokens_per_block).dtype
    random, tasks = np.random.default_rng(config.run.seed), []
    (root / "train").mkdir()
    (root / "tokenizer.model").write_bytes(b"")
    bounds = [tokens * i // len(names) for i in range(len(names) + 1)]
    with (root / "flat.bin").open("wb") as flat:
        for task, (name, (start, end)) in enumerate(zip(names, itertools.pairwise(bounds))):
            writer = ShardWriter(
                root / "train",
                split="train",
                corpus=name,
                task=task,
                vocab_size=data.vocab_size,
                **sizes,
            )
            for first in range(start, end, _CHUNK):
                part = random.integers(0, data.vocab_size, min(_CHUNK, end - first), dtype)
                writer.add(part, text_bytes=0)
                flat.write(part.tobytes())
            tasks.append(writer.close())
    finish_split(
        root / "train",
        tasks,
        split="train",
        tokenizer="tokenizer.model",
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        vocab_size=data.vocab_size,
        eos_id=0,
        **sizes,
    )
    return TokenStream(root / "train")


# ---- contestants ---------------------------------------------------------------------------------
def _ours(contest: Contest) -> Steps:
    config, stream = contest.config, contest.stream
    length, seed = config.data.sequence_length, config.run.seed
    return batches(
        stream,
        seed=seed,
        sequence_length=length,
        global_batch_size=config.batch.global_batch_size,
        micro_batch_size=config.batch.micro_batch_size,
        blend=blend_of(stream, length, config.data.corpora, seed=seed),
        data_parallel_size=contest.data_parallel_size,
        num_workers=config.data.num_workers,
    )


def _verified_reads(contest: Contest) -> Steps:
    for starts in contest.starts():
        yield contest.cut(contest.stream.read_batch(starts, contest.length))


def _memmap(contest: Contest) -> Steps:
    tokens, length = contest.memmap(), contest.length
    for starts in contest.starts():
        found = np.empty((len(starts), length), np.int64)
        for row, first in zip(found, starts.tolist()):
            row[:] = tokens[first : first + length]
        yield contest.cut(found)


class _Mapped(Dataset[torch.Tensor]):
    """The samples of a flat file, one at a time, as a plain Dataset has them."""

    def __init__(self, contest: Contest) -> None:
        self._tokens, self._length = contest.memmap(), contest.config.data.sequence_length

    def __len__(self) -> int:
        return order.num_samples(len(self._tokens), self._length)

    def __getitem__(self, sample: int) -> torch.Tensor:
        start, count = order.token_range(sample, self._length)
        return torch.from_numpy(self._tokens[start : start + count].astype(np.int64))


def _torch_loader(contest: Contest) -> Steps:
    data, config = _Mapped(contest), contest.config
    sampler = RandomSampler(data, replacement=True, num_samples=2**40)
    workers = config.data.num_workers
    return _steps(
        contest,
        DataLoader(data, config.batch.micro_batch_size, sampler=sampler, num_workers=workers),
    )


class _Windows(IterableDataset[torch.Tensor]):
    """The samples of shards in the order that webdataset reads and shuffles them."""

    def __init__(self, contest: Contest) -> None:
        names = [shard.name for shard in contest.stream.manifest.shards]
        self._paths = [str(Path(contest.stream.directory) / name) for name in names]
        self._length = contest.config.data.sequence_length

    def __iter__(self) -> Iterator[torch.Tensor]:
        shards = webdataset.WebDataset(self._paths, shardshuffle=SHUFFLED_SHARDS, empty_check=False)
        # Its argument `repeat` is not read (webdataset 1.0.2): the tokens would end.
        windows = self._windows(sample["npy"] for sample in shards.decode().repeat())
        for window in webdataset.filters.shuffle(SHUFFLED_SAMPLES)(windows):
            yield torch.from_numpy(window.astype(np.int64))

    def _windows(self, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Cut blocks, one behind the other, into samples that overlap by a token."""
        left = np.empty(0, np.uint16)
        for block in blocks:
            tokens = np.concatenate([left, block]) if len(left) else block
            end = order.num_samples(len(tokens), self._length) * self._length
            for start in range(0, end, self._length):
                yield tokens[start : start + self._length + 1]
            left = tokens[end:]


def _webdataset(contest: Contest) -> Steps:
    # A worker reads whole shards: one without any would wait for ever.
    workers = min(contest.config.data.num_workers, len(contest.stream.manifest.shards))
    size = contest.config.batch.micro_batch_size
    return _steps(contest, DataLoader(_Windows(contest), size, num_workers=workers))


def _steps(contest: Contest, loader: DataLoader[torch.Tensor]) -> Steps:
    """Yield the steps that the micro batches of a DataLoader form."""
    micro_batches = iter(loader)
    count = contest.samples // contest.config.batch.micro_batch_size
    while True:
        yield [next(micro_batches) for _ in range(count)]


CONTESTANTS: dict[str, Callable[[Contest], Steps]] = {
    OURS: _ours,
    READS: _verified_reads,
    MEMMAP: _memmap,
    TORCH: _torch_loader,
    WEBDATASET: _webdataset,
}


# ---- the clock -----------------------------------------------------------------------------------
def _speed(steps: Steps, seconds: float) -> dict[str, float]:
    """Return the tokens a second that are read when nothing else is done, by both clocks."""
    tokens = 0
    with closing(steps):  # type: ignore[type-var]
        for _ in range(WARM_UP_STEPS):
            next(steps)
        processor, start = time.process_time(), time.perf_counter()
        now = start
        while now - start < seconds:
            tokens += sum(micro.numel() for micro in next(steps))
            now = time.perf_counter()
        processor = time.process_time() - processor
    return {SPEED: tokens / (now - start), COST: tokens / processor}


def _wait(steps: Steps) -> float:
    """Return the milliseconds that training waits for a step while its own work takes 10."""
    waited = []
    with closing(steps):  # type: ignore[type-var]
        for _ in range(WARM_UP_STEPS + WAITED_STEPS):
            start = time.perf_counter()
            next(steps)
            waited.append((time.perf_counter() - start) * 1e3)
            # As while a device works: the process has nothing to do.
            time.sleep(STEP_SECONDS)
    return statistics.median(waited[WARM_UP_STEPS:])
