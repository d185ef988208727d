"""Measure random reads of tokens beside other readers, placing samples, and opening a data set.

    python -m benchmarks.data_reading [millions of tokens, default 300] [directory]

All readers read the same samples of 1,025 tokens in batches of 16, in turns, in one process. A rate
is tokens per second of processor time (user and system), the median of the turns. "cold" is wall
time after the files were dropped from the page cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.turns import rounds, summary, timed
from pretrain.data.order import Blend, Segment, batches, num_samples
from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.stream import TokenStream

LENGTH, BATCH, SAMPLES, TURNS, COLD_SAMPLES = 1024, 16, 16_000, 7, 400
VOCAB_SIZE, BLOCK, SHARD = 50_000, 65_536, 2**26


def write_split(root: Path, documents: Iterable[np.ndarray]) -> None:
    """Write documents as the train split of a data set in `root`, with an empty tokenizer."""
    (root / "train").mkdir()
    (root / "tokenizer.model").write_bytes(b"")
    sizes = {"vocab_size": VOCAB_SIZE, "tokens_per_block": BLOCK, "tokens_per_shard": SHARD}
    writer = ShardWriter(root / "train", split="train", corpus="text", task=0, **sizes)
    for document in documents:
        writer.add(document, text_bytes=0)
    finish_split(
        root / "train",
        [writer.close()],
        split="train",
        tokenizer="tokenizer.model",
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        eos_id=0,
        **sizes,
    )


Reader = Callable[[np.ndarray], Any]
"""Reads the batch of samples with these numbers."""


def readers(root: Path) -> dict[str, Reader]:
    """Return every way to read that is installed."""
    stream = TokenStream(root / "train")
    flat = np.asarray(np.memmap(root / "flat.bin", np.uint16, "r"))

    def ours(ids: np.ndarray) -> np.ndarray:
        return stream.read_batch(ids * LENGTH, LENGTH + 1)

    def memmap(ids: np.ndarray) -> np.ndarray:
        starts = (ids * LENGTH).tolist()
        return np.stack([flat[i : i + LENGTH + 1].astype(np.int64) for i in starts])

    plain_file = os.open(root / "flat.bin", os.O_RDONLY)

    def pread(ids: np.ndarray) -> np.ndarray:
        size, width = 2 * (LENGTH + 1), 2 * LENGTH
        raw = [os.pread(plain_file, size, i * width) for i in ids.tolist()]
        return np.stack([np.frombuffer(each, np.uint16).astype(np.int64) for each in raw])

    sizes = {each.name: num_samples(each.tokens, LENGTH) for each in stream.manifest.corpora}
    steps = batches(
        stream,
        Blend(Segment(0, sizes, sizes, dict.fromkeys(sizes, 0)), seed=0),
        sequence_length=LENGTH,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        data_parallel_size=1,
        num_workers=0,
    )
    samples = [flat[i : i + LENGTH + 1] for i in range(0, len(flat) - LENGTH, LENGTH)]
    # A sampler of its own order, as the loader of training has one.
    plain = iter(DataLoader(samples, BATCH, sampler=RandomSampler(samples, True, 2**40)))  # type: ignore[arg-type,type-var]  # a list is a data set
    found: dict[str, Reader] = {
        "ours, verified": ours,
        "ours, the loader of training": lambda ids: next(steps),
        "numpy memmap": memmap,
        "positioned reads": pread,
        "torch DataLoader": lambda ids: next(plain),
    }
    for name, make in {"Megatron GPTDataset": gpt_dataset, "webdataset": webdataset}.items():
        try:
            found[name] = make(root)
        except Exception as error:
            print(f"{name}: not measured ({type(error).__name__}: {error})", file=sys.stderr)
    return found


def gpt_dataset(root: Path) -> Reader:
    """Return a reader through Megatron-core's IndexedDataset and GPTDataset."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 0, VOCAB_SIZE, "none"

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=LENGTH,
        blend=([str(root / "megatron")], None),
        split="1,0,0",
        path_to_cache=str(root / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low = IndexedDataset(str(root / "megatron"))
    indices = np.arange(len(low), dtype=np.int32)
    dataset = GPTDataset(low, str(root / "megatron"), indices, None, Split.train, config)
    return lambda ids: [dataset[i % len(dataset)] for i in ids.tolist()]


def webdataset(root: Path) -> Reader:
    """Return a reader of the next samples of a stream of our shards: it has no random access."""
    import webdataset as wds

    paths = sorted(map(str, (root / "train").glob("*.tar")))

    def samples() -> Iterator[np.ndarray]:
        while True:
            for block in wds.WebDataset(paths, shardshuffle=False).decode():
                tokens = block["npy"]
                for start in range(0, len(tokens) - LENGTH, LENGTH):
                    yield tokens[start : start + LENGTH + 1].astype(np.int64)

    stream = samples()
    return lambda ids: np.stack([next(stream) for _ in ids])


def write_others(root: Path, parts: Callable[[], Iterable[np.ndarray]]) -> None:
    """Write the same tokens as one flat file and as Megatron's."""
    with (root / "flat.bin").open("wb") as file:
        for part in parts():
            file.write(part.astype(np.uint16).tobytes())
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(root / "megatron.bin"), dtype=np.uint16)
    for part in parts():
        for start in range(0, len(part), 1000):
            document = torch.from_numpy(part[start : start + 1000])
            builder.add_document(document, [len(document)])
    builder.finalize(str(root / "megatron.idx"))


def drop(root: Path) -> None:
    """Drop the files of `root` from the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def placing(corpora: int) -> str:
    """Return the processor time that it takes to place a sample in a blend, by samples at once."""
    sizes = np.random.default_rng(0).integers(1000, 20_000_000, corpora).tolist()
    samples = {f"c{number}": size for number, size in enumerate(sizes)}
    blend = Blend(Segment(0, samples, samples, dict.fromkeys(samples, 0)), seed=0)
    found = []
    for count in (1, 16, 256, 4096):
        times = max(5, 4096 // count)
        begin = time.process_time()
        for turn in range(times):
            blend.locate(np.arange(turn * count, (turn + 1) * count))
        took = (time.process_time() - begin) / times / count
        found.append(f"{took * 1e3:.4f} ms in {count:,}")
    return f"a sample of {corpora} corpora: {', '.join(found)}"


def opening(root: Path) -> str:
    """Open a split in a new process; return its time and how much its memory grew."""
    program = """
import os, sys, time
from pretrain.data.stream import TokenStream
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before, start = resident(), time.perf_counter()
stream = TokenStream(sys.argv[1])
print(f"{len(stream):,} tokens in {len(stream.manifest.shards):,} shards: opened in "
      f"{time.perf_counter() - start:.3f} s, {(resident() - before) / 2**20:.1f} MiB more memory")
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(root / "train")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Write the data, and print the rates and the times to open."""
    millions = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as name:
        root = Path(name)

        def parts() -> Iterator[np.ndarray]:
            random = np.random.default_rng(0)
            return (random.integers(0, VOCAB_SIZE, 1_000_000) for _ in range(millions))

        write_split(root, parts())
        write_others(root, parts)
        all_readers = readers(root)
        ids = np.random.default_rng(1).integers(0, millions * 1_000_000 // LENGTH - 1, SAMPLES)

        def turn(read: Reader) -> Callable[[], None]:
            def call() -> None:
                for i in range(0, SAMPLES, BATCH):
                    read(ids[i : i + BATCH])

            return call

        ways = {
            reader: timed(turn(read), clock=time.process_time)
            for reader, read in all_readers.items()
        }
        found = {row["way"]: row["ms"] for row in summary(list(rounds(ways, TURNS)))}
        for reader, ms in found.items():
            rate, ratio = SAMPLES * LENGTH / ms / 1e3, ms / found["numpy memmap"]
            print(f"warm  {reader:28} {rate:8.1f}M tokens/s, memmap x {ratio:.2f}")
        # Pages that are mapped stay in memory, so nobody may have the files open.
        names = list(all_readers)
        del all_readers, ways
        for reader in names:
            drop(root)
            read = readers(root)[reader]
            start = time.perf_counter()
            for i in range(0, COLD_SAMPLES, BATCH):
                read(ids[i : i + BATCH])
            del read
            took = time.perf_counter() - start
            print(f"cold  {reader:22} {COLD_SAMPLES * LENGTH / took / 1e6:8.2f}M tokens/s")
        print("open ", opening(root))
        print("place", placing(50))


if __name__ == "__main__":
    main()
