"""Write small data sets of given tokens without building one from text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pretrain.data.order import Blend, segment_of
from pretrain.data.shards import Manifest, ShardWriter, Split, finish_split
from pretrain.data.stream import TokenStream

TOKENIZER = b"a tokenizer"


def write_split(
    root: Path,
    corpora: Mapping[str, Sequence[Iterable[np.ndarray]]],
    *,
    split: Split = "train",
    vocab_size: int = 60_000,
    tokens_per_block: int = 50,
    tokens_per_shard: int = 200,
) -> Manifest:
    """Write one split of a data set in `root`.

    Args:
        root: The directory of the data set, with the tokenizer.
        corpora: Name -> the documents of each of its tasks.
        split: train or validation.
        vocab_size: Of the tokenizer.
        tokens_per_block: As in the config.
        tokens_per_shard: As in the config.
    """
    directory = root / split
    directory.mkdir(parents=True)
    (root / "tokenizer.model").write_bytes(TOKENIZER)
    done = []
    for corpus, tasks in corpora.items():
        for documents in tasks:
            writer = ShardWriter(
                directory,
                split=split,
                corpus=corpus,
                task=len(done),
                vocab_size=vocab_size,
                tokens_per_block=tokens_per_block,
                tokens_per_shard=tokens_per_shard,
            )
            for document in documents:
                writer.add(document, text_bytes=3 * len(document))
            done.append(writer.close())
    return finish_split(
        directory,
        done,
        split=split,
        tokenizer="tokenizer.model",
        tokenizer_sha256=hashlib.sha256(TOKENIZER).hexdigest(),
        vocab_size=vocab_size,
        eos_id=0,
        tokens_per_block=tokens_per_block,
        tokens_per_shard=tokens_per_shard,
    )


def make_stream(root: Path, corpora: Mapping[str, int]) -> TokenStream:
    """Write and open a stream of some corpora, in which token t is the number t.

    Args:
        root: Directory of the data set.
        corpora: Name -> tokens.
    """
    ends = np.cumsum([*corpora.values()])
    write_split(
        root,
        {
            name: [[np.arange(end - tokens, end)]]
            for (name, tokens), end in zip(corpora.items(), ends, strict=True)
        },
    )
    return TokenStream(root / "train")


def blend_of(stream: TokenStream, length: int, corpora: Any, *, seed: int, **since: Any) -> Blend:
    """Return the blend of a run with these settings; `since` is as for `segment_of`."""
    data = SimpleNamespace(sequence_length=length, corpora=corpora)
    config: Any = SimpleNamespace(data=data, run=SimpleNamespace(seed=seed))
    return Blend(segment_of(config, stream, **since), seed)
