"""How fast one process gets training batches out of shards, in random order. Prints tokens per second.

    python benchmarks/data_loader.py [millions of tokens, default 200]

The shards (2 bytes a token) are written to a temporary directory first, so they are read from the page cache: this is
the cost of the code, not of a disk.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from pretrain.data import order
from pretrain.data.loader import batches
from pretrain.data.shards import SplitWriter
from pretrain.data.stream import TokenStream

SECONDS = 2.0


def make_stream(root: Path, millions: int) -> TokenStream:
    (root / "train").mkdir()
    (root / "tokenizer.model").write_bytes(b"")
    writer = SplitWriter(
        root / "train",
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        vocab_size=50_000,
        tokens_per_block=65_536,
        tokens_per_shard=2**26,
    )
    random = np.random.default_rng(0)
    for _ in range(millions):
        writer.add(random.integers(0, 50_000, 1_000_000), text_bytes=0)
    writer.close()
    return TokenStream(root / "train")


def tokens_per_second_of_reads(stream: TokenStream, length: int) -> float:
    samples = order.num_samples(len(stream), length)
    ids = np.random.default_rng(1).integers(0, samples, 10_000_000 // length)
    start, tokens = time.perf_counter(), 0
    for sample in ids.tolist():
        tokens += len(stream.read(*order.token_range(sample, length)))
    return tokens / (time.perf_counter() - start)


def tokens_per_second_of_batches(stream: TokenStream, length: int, num_workers: int) -> float:
    steps = batches(
        stream,
        seed=0,
        sequence_length=length,
        global_batch_size=64,
        micro_batch_size=16,
        num_workers=num_workers,
    )
    list(islice(steps, 4))  # starts the workers
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        tokens += sum(micro.numel() for micro in next(steps))
    return tokens / (time.perf_counter() - start)


def main() -> None:
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
