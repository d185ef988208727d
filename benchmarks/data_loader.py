"""Measure how many tokens per second one process reads from shards, in random order.

    python -m benchmarks.data_loader [millions of tokens, default 200]

The shards (2 bytes a token) are written to a temporary directory first, so they are read from the
page cache: this measures the code, not a disk.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from benchmarks.data_reading import write_split

from pretrain.data import order
from pretrain.data.loader import batches
from pretrain.data.stream import TokenStream

SECONDS = 2.0
"""How long batches are read for one number."""


def make_stream(root: Path, millions: int) -> TokenStream:
    """Write `millions` of random tokens as shards under `root` and return a stream over them."""
    random = np.random.default_rng(0)
    write_split(root, (random.integers(0, 50_000, 1_000_000) for _ in range(millions)))
    return TokenStream(root / "train")


def tokens_per_second_of_reads(stream: TokenStream, length: int) -> float:
    """Return the rate of reading single samples of `length` tokens, without batching."""
    samples = order.num_samples(len(stream), length)
    ids = np.random.default_rng(1).integers(0, samples, 10_000_000 // length)
    start, tokens = time.perf_counter(), 0
    for sample in ids.tolist():
        tokens += len(stream.read(*order.token_range(sample, length)))
    return tokens / (time.perf_counter() - start)


def tokens_per_second_of_batches(stream: TokenStream, length: int, num_workers: int) -> float:
    """Return the rate of the training data loader.

    Args:
        stream: Where tokens come from.
        length: Tokens in a sample.
        num_workers: Worker processes of the loader.
    """
    steps = batches(
        stream,
        seed=0,
        sequence_length=length,
        global_batch_size=64,
        micro_batch_size=16,
        num_workers=num_workers,
    )
    # The first steps start the workers, which is not counted.
    list(islice(steps, 4))
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        tokens += sum(micro.numel() for micro in next(steps))
    return tokens / (time.perf_counter() - start)


def main() -> None:
    """Print the rates at four sequence lengths."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        stream = make_stream(Path(root), int(sys.argv[1]) if len(sys.argv) > 1 else 200)
        print(f"{len(stream):,} tokens; tokens a second, in random order:")
        for length in (128, 1024, 2048, 16384):
            reads = tokens_per_second_of_reads(stream, length)
            loaded = [
                tokens_per_second_of_batches(stream, length, workers) for workers in (0, 1, 2)
            ]
            print(
                f"  L = {length:6,}: reads {reads:13,.0f}; batches with 0, 1, 2 workers "
                + ", ".join(f"{rate:13,.0f}" for rate in loaded)
            )


if __name__ == "__main__":
    main()
