"""Measure how many tokens a second one process gets in batches, in random order.

    python -m benchmarks.data_loader [millions of tokens, default 200] [rounds, default 5]

Four loaders are measured in turn, again and again, so that a machine that is slow for a while is
slow for all of them: ours of one corpus and of a blend of five, both as in training with
data.num_workers = 0; ours without reading ahead; and a plain torch DataLoader over a numpy memmap
in the order of a RandomSampler. The tokens (2 bytes each) are written to a temporary directory
first, so they are read from the page cache: this measures the code, not a disk.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from pretrain.data import order
from pretrain.data.blend import blend_of
from pretrain.data.loader import _first_tokens, _Samples, batches
from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.stream import TokenStream

SECONDS = 1.0
"""How long batches are read for one number."""
VOCABULARY, BATCH, MICRO_BATCH = 50_000, 64, 16
CORPORA = {"books_wiki": 16, "cc_news": 76, "openwebtext": 38, "stories": 31, "cc100": 300}
"""The blend: the sizes of the published run's corpora in GB."""


def make_stream(root: Path, corpora: dict[str, int], tokens: np.ndarray) -> TokenStream:
    """Write tokens as shards under `root` and return a stream over them.

    Args:
        root: Directory of the data set.
        corpora: Name -> size, relative to the others.
        tokens: All tokens; the corpora are parts of them.
    """
    (root / "train").mkdir(parents=True)
    (root / "tokenizer.model").write_bytes(b"")
    sizes = {"tokens_per_block": 65_536, "tokens_per_shard": 2**26}
    ends = np.cumsum([*corpora.values()]) * len(tokens) // sum(corpora.values())
    tasks, start = [], 0
    for number, (name, end) in enumerate(zip(corpora, ends.tolist(), strict=True)):
        writer = ShardWriter(
            root / "train", split="train", corpus=name, task=number, vocab_size=VOCABULARY, **sizes
        )
        writer.add(tokens[start:end], text_bytes=0)
        tasks.append(writer.close())
        start = end
    finish_split(
        root / "train",
        tasks,
        split="train",
        tokenizer="tokenizer.model",
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        vocab_size=VOCABULARY,
        eos_id=0,
        **sizes,
    )
    return TokenStream(root / "train")


class Memmap(Dataset[torch.Tensor]):
    """Samples of a numpy memmap, one at a time, as a plain Dataset has them."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens, self.length = np.memmap(path, np.uint16, mode="r"), length

    def __len__(self) -> int:
        return order.num_samples(len(self.tokens), self.length)

    def __getitem__(self, sample: int) -> torch.Tensor:
        start, count = order.token_range(sample, self.length)
        return torch.from_numpy(self.tokens[start : start + count].astype(np.int64))


def plain_steps(path: Path, length: int) -> Iterator[list[torch.Tensor]]:
    """Yield steps from a plain DataLoader."""
    data = Memmap(path, length)
    sampler = RandomSampler(data, replacement=True, num_samples=10**12)
    micro_batches = iter(DataLoader(data, MICRO_BATCH, sampler=sampler))
    while True:
        yield [next(micro_batches) for _ in range(BATCH // MICRO_BATCH)]


def our_steps(stream: TokenStream, length: int) -> Iterator[list[torch.Tensor]]:
    """Yield steps as training does."""
    return batches(
        stream,
        seed=0,
        sequence_length=length,
        global_batch_size=BATCH,
        micro_batch_size=MICRO_BATCH,
    )


def steps_without_reading_ahead(stream: TokenStream, length: int) -> Iterator[list[torch.Tensor]]:
    """Yield the same steps, each read when it is asked for."""
    samples = _Samples(stream, blend_of(stream, length, {}, seed=0), length)
    steps = (range(first, first + BATCH) for first in range(0, 10**12, BATCH))
    for first_tokens in _first_tokens(samples, steps):
        yield list(torch.from_numpy(samples.read(first_tokens)).split(MICRO_BATCH))


def rate(steps: Iterator[list[torch.Tensor]]) -> float:
    """Return the tokens a second of an iterator over steps, and close it."""
    # The first steps open files and start threads, which is not counted.
    for _ in range(4):
        next(steps)
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        tokens += sum(micro.numel() for micro in next(steps))
    elapsed = time.perf_counter() - start
    steps.close()  # type: ignore[attr-defined]
    return tokens / elapsed


def wait(steps: Iterator[list[torch.Tensor]]) -> float:
    """Return the milliseconds that training waits for a step while its own work takes 10."""
    waited = []
    for _ in range(50):
        start = time.perf_counter()
        next(steps)
        waited.append((time.perf_counter() - start) * 1e3)
        # As while a device works: the process has nothing to do.
        time.sleep(0.010)
    steps.close()  # type: ignore[attr-defined]
    return statistics.median(waited[4:])


def main() -> None:
    """Print the medians at four sequence lengths as a table of Markdown."""
    millions = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, millions * 10**6, np.uint16)
        tokens.tofile(root / "plain.bin")
        one = make_stream(root / "one", {"text": 1}, tokens)
        five = make_stream(root / "five", CORPORA, tokens)
        del tokens
        made: dict[str, Callable[[int], Iterator[list[torch.Tensor]]]] = {
            "ours, one corpus": lambda length: our_steps(one, length),
            "ours, five corpora": lambda length: our_steps(five, length),
            "ours, not read ahead": lambda length: steps_without_reading_ahead(one, length),
            "DataLoader over a memmap": lambda length: plain_steps(root / "plain.bin", length),
        }
        print(
            f"{millions} million tokens, steps of {BATCH} samples in micro batches of "
            f"{MICRO_BATCH}, {rounds} rounds of {SECONDS:g} s each, {os.cpu_count()} processors; "
            "medians in million tokens a second\n"
        )
        print(f"| L | {' | '.join(made)} |\n|--:|{'--:|' * len(made)}")
        for length in (128, 512, 1024, 4096):
            rates: dict[str, list[float]] = {name: [] for name in made}
            for _ in range(rounds):
                for name, make in made.items():
                    rates[name].append(rate(make(length)) / 1e6)
            row = " | ".join(f"{statistics.median(each):.0f}" for each in rates.values())
            print(f"| {length} | {row} |", flush=True)
        waits = " | ".join(f"{wait(make(1024)):.2f}" for make in made.values())
        print(f"\nWait for a step in ms, L = 1024, when training takes 10 ms:\n\n| {waits} |")


if __name__ == "__main__":
    main()
