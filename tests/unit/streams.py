"""Streams of known tokens for tests: token t of a stream is the number t."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pretrain.data.shards import ShardWriter, finish_split
from pretrain.data.stream import TokenStream


def make_stream(root: Path, corpora: Mapping[str, int]) -> TokenStream:
    """Write and open a stream of some corpora.

    Args:
        root: Directory of the data set.
        corpora: Name -> tokens.
    """
    directory = root / "train"
    directory.mkdir(parents=True)
    (root / "tokenizer.model").write_bytes(b"")
    sizes = {"tokens_per_block": 50, "tokens_per_shard": 200}
    tasks, start = [], 0
    for number, (name, tokens) in enumerate(corpora.items()):
        writer = ShardWriter(
            directory, split="train", corpus=name, task=number, vocab_size=60_000, **sizes
        )
        writer.add(np.arange(start, start + tokens), text_bytes=0)
        tasks.append(writer.close())
        start += tokens
    finish_split(
        directory,
        tasks,
        split="train",
        tokenizer="tokenizer.model",
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        vocab_size=60_000,
        eos_id=0,
        **sizes,
    )
    return TokenStream(directory)
