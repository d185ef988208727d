"""`pretrain data build`: corpus -> tokenizer and shards of both splits, complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from pretrain.config import ConfigError, RunConfig, writing
from pretrain.config.schema import DataSection
from pretrain.data import sources
from pretrain.data.manifest import FORMAT_VERSION, TOKENIZER, Manifest
from pretrain.data.shards import SplitWriter
from pretrain.data.sources import Split
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import Tokenizer, train_tokenizer

_INPUTS = "build.json"


def build(config: RunConfig) -> None:
    """Makes data.directory: tokenizer.model, train/, validation/, build.json; and prints what it made.

    Made from the same settings and text before, it is left as it is. Raises ConfigError when it was made from others,
    when something else stands there, or when the corpus or the tokenizer cannot be used.
    """
    directory, inputs = config.data_directory, _inputs(config.data)
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        _check_same(directory, inputs)
        for split in get_args(Split):
            TokenStream(directory / split)
        print(f"{directory}: up to date (same settings, same text), nothing to do")
        return
    with writing(directory), _published(directory) as temporary:
        tokenizer = _make_tokenizer(config.data, temporary / TOKENIZER)
        manifests = {
            split: _write_split(config.data, split, tokenizer, temporary)
            for split in get_args(Split)
        }
        (temporary / _INPUTS).write_text(json.dumps(inputs, indent=1) + "\n")
    print(f"{directory}: tokenizer of {tokenizer.vocab_size:,} pieces")
    for split, made in manifests.items():
        print(
            f"{directory / split}: {made.documents:,} documents, {made.text_bytes:,} bytes of text, "
            f"{made.tokens:,} tokens ({made.text_bytes / made.tokens:.2f} bytes a token), {len(made.shards):,} shards"
        )


def _inputs(data: DataSection) -> dict[str, Any]:
    """Everything that decides what is built, as it stands in build.json."""
    keys = (
        "source",
        "paths",
        "validation_paths",
        "validation_fraction",
        "vocab_size",
        "tokenizer_training_bytes",
        "tokens_per_block",
        "tokens_per_shard",
    )
    settings = data.model_dump(mode="json", include=set(keys))
    tokenizer = _given_tokenizer(data)
    return {
        "format_version": FORMAT_VERSION,
        **{f"data.{key}": settings[key] for key in keys},
        "data.tokenizer (SHA-256)": tokenizer.fingerprint if tokenizer else None,
        "the text (names, sizes and times of its files)": sources.fingerprint(data),
    }


def _check_same(directory: Path, inputs: dict[str, Any]) -> None:
    remedy = f"Choose another data.directory, or remove {directory} to build it anew"
    try:
        built = json.loads((directory / _INPUTS).read_text())
    except (OSError, json.JSONDecodeError):
        raise ConfigError(
            f"data.directory = {directory}: exists, and is no finished data set (no readable {_INPUTS}). {remedy}"
        ) from None
    differences = [
        f"{k} was {built.get(k)!r}, is {inputs[k]!r}" for k in inputs if built.get(k) != inputs[k]
    ]
    if differences:
        raise ConfigError(
            f"data.directory = {directory}: built from other inputs: {'; '.join(differences)}. Nothing was changed. "
            f"{remedy}"
        )


@contextmanager
def _published(directory: Path) -> Iterator[Path]:
    """A temporary sibling that becomes `directory` when the block ends well, and goes away when it does not.

    A killed build leaves it behind under its own name, which nothing reads.
    """
    temporary = directory.with_name(f"{directory.name}.building-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_tokenizer(data: DataSection, path: Path) -> Tokenizer:
    if _given_tokenizer(data) is not None:
        shutil.copyfile(str(data.tokenizer), path)
    else:
        path.write_bytes(
            train_tokenizer(
                sources.documents(data, "train"),
                vocab_size=data.vocab_size,
                max_bytes=data.tokenizer_training_bytes,
                total_bytes=_size(data, "train"),
            )
        )
    return Tokenizer(path)


def _given_tokenizer(data: DataSection) -> Tokenizer | None:
    if data.tokenizer is None:
        return None
    tokenizer = Tokenizer(data.tokenizer)
    if tokenizer.vocab_size != data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {data.vocab_size}: the model that data.tokenizer = {data.tokenizer} names has "
            f"{tokenizer.vocab_size} pieces. Set data.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _write_split(
    data: DataSection, split: Split, tokenizer: Tokenizer, directory: Path
) -> Manifest:
    (directory / split).mkdir()
    writer = SplitWriter(
        directory / split,
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        tokens_per_block=data.tokens_per_block,
        tokens_per_shard=data.tokens_per_shard,
    )
    # disable=None: a bar on a terminal, nothing in a log
    with tqdm(desc=split, total=_size(data, split), unit="B", unit_scale=True, disable=None) as bar:
        for text in sources.documents(data, split):
            size = len(text.encode())
            writer.add(np.append(tokenizer.encode(text), tokenizer.eos_id), size)
            bar.update(size)
    manifest = writer.close()
    if not manifest.documents:
        own = split == "validation" and data.validation_paths
        key, paths = ("data.validation_paths", own) if own else ("data.paths", data.paths)
        raise ConfigError(f"{key} = {list(paths)}: no text for {split} in these files. Name others")
    return manifest


def _size(data: DataSection, split: Split) -> int:
    """Bytes of the files; what is held out of them, and JSON around the text, counts too."""
    return sum(path.stat().st_size for path in sources.files(data, split))
