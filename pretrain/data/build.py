"""Build a data set: a tokenizer and the shards of both splits (`pretrain data build`).

The data set is built in a temporary directory and renamed into place at the end, so data.directory
holds either a complete data set or none.
"""

from __future__ import annotations

import json
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
from pretrain.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pretrain.data.tokenizers.training import sample_lines
from pretrain.rundir.files import new_directory

_BUILD_RECORD = "build.json"
"""File of the settings and text that a data set was built from."""

_RECORDED_KEYS = (
    "source",
    "paths",
    "validation_paths",
    "validation_fraction",
    "vocab_size",
    "tokenizer_training_bytes",
    "tokens_per_block",
    "tokens_per_shard",
)
"""Keys of [data] that determine the bytes of a data set."""


def build(config: RunConfig) -> None:
    """Build the data set of a config in data.directory, and print what was built.

    Writes tokenizer.model, train/, validation/ and build.json. A data set that was built earlier
    from the same settings and text is checked and left unchanged.

    Raises:
        ConfigError: if data.directory holds something else or a data set built from other inputs,
            or if the corpus or the tokenizer cannot be used.
        RunFailed: if the data set cannot be written.
    """
    directory, inputs = config.data_directory, _build_inputs(config.data)
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        _check_built_from(directory, inputs)
        for split in get_args(Split):
            TokenStream(directory / split)
        print(f"{directory}: up to date (same settings, same text), nothing to do")
        return
    with writing(directory), new_directory(directory) as temporary:
        tokenizer = _make_tokenizer(config.data, temporary / TOKENIZER)
        manifests = {
            split: _write_split(config.data, split, tokenizer, temporary)
            for split in get_args(Split)
        }
        (temporary / _BUILD_RECORD).write_text(json.dumps(inputs, indent=1) + "\n")
    print(f"{directory}: tokenizer of {tokenizer.vocab_size:,} pieces")
    for split, manifest in manifests.items():
        bytes_per_token = manifest.text_bytes / manifest.tokens
        print(
            f"{directory / split}: {manifest.documents:,} documents, "
            f"{manifest.text_bytes:,} bytes of text, {manifest.tokens:,} tokens "
            f"({bytes_per_token:.2f} bytes a token), {len(manifest.shards):,} shards"
        )


def _build_inputs(data: DataSection) -> dict[str, Any]:
    """Return everything that determines what is built, as recorded in build.json."""
    settings = data.model_dump(mode="json", include=set(_RECORDED_KEYS))
    tokenizer = _load_given_tokenizer(data)
    return {
        "format_version": FORMAT_VERSION,
        **{f"data.{key}": settings[key] for key in _RECORDED_KEYS},
        "data.tokenizer (SHA-256)": tokenizer.fingerprint if tokenizer else None,
        "the text (names, sizes and times of its files)": sources.fingerprint(data),
    }


def _check_built_from(directory: Path, inputs: dict[str, Any]) -> None:
    """Raise ConfigError unless `directory` holds a data set that was built from `inputs`."""
    remedy = f"Choose another data.directory, or remove {directory} to build it anew"
    try:
        recorded = json.loads((directory / _BUILD_RECORD).read_text())
    except (OSError, json.JSONDecodeError):
        raise ConfigError(
            f"data.directory = {directory}: exists, but holds no finished data set (no readable "
            f"{_BUILD_RECORD}). {remedy}"
        ) from None
    differences = [
        f"{key} was {recorded.get(key)!r}, is {value!r}"
        for key, value in inputs.items()
        if recorded.get(key) != value
    ]
    if differences:
        raise ConfigError(
            f"data.directory = {directory}: holds a data set built from other inputs: "
            f"{'; '.join(differences)}. Nothing was changed. {remedy}"
        )


def _make_tokenizer(data: DataSection, path: Path) -> Tokenizer:
    """Write the tokenizer model to `path`: a copy of data.tokenizer, or a newly trained one."""
    given = _load_given_tokenizer(data)
    if given is not None:
        path = path.with_name(given.file_name)
        path.write_bytes(given.content)
    else:
        path.write_bytes(
            train_tokenizer(
                sample_lines(
                    sources.documents(data, "train"),
                    min(1.0, data.tokenizer_training_bytes / max(_size_of_files(data, "train"), 1)),
                ),
                data.vocab_size,
            )
        )
    return load_tokenizer(path)


def _load_given_tokenizer(data: DataSection) -> Tokenizer | None:
    """Return the tokenizer that data.tokenizer names, or None if one is to be trained.

    Raises:
        ConfigError: if it has another number of pieces than data.vocab_size.
    """
    if data.tokenizer is None:
        return None
    tokenizer = load_tokenizer(data.tokenizer)
    tokenizer.check_exportable()
    if tokenizer.vocab_size != data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {data.vocab_size}: the model in data.tokenizer = {data.tokenizer} "
            f"has {tokenizer.vocab_size} pieces. Set data.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _write_split(
    data: DataSection, split: Split, tokenizer: Tokenizer, directory: Path
) -> Manifest:
    """Tokenize the documents of a split and write its shards.

    Args:
        data: The [data] section of the config.
        split: The split to write.
        tokenizer: The tokenizer; its </s> piece is appended to every document.
        directory: The directory of the data set; the split becomes a subdirectory.

    Returns:
        The manifest of the split.

    Raises:
        ConfigError: if the split has no document.
    """
    (directory / split).mkdir()
    writer = SplitWriter(
        directory / split,
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        tokens_per_block=data.tokens_per_block,
        tokens_per_shard=data.tokens_per_shard,
    )
    total = _size_of_files(data, split)
    # disable=None draws the bar on a terminal and nothing into a log file.
    with tqdm(desc=split, total=total, unit="B", unit_scale=True, disable=None) as bar:
        for text in sources.documents(data, split):
            size = len(text.encode())
            writer.add(np.append(tokenizer.encode(text), tokenizer.eos_id), size)
            bar.update(size)
    manifest = writer.close()
    if not manifest.documents:
        own = split == "validation" and data.validation_paths
        key, paths = ("data.validation_paths", own) if own else ("data.paths", data.paths)
        raise ConfigError(
            f"{key} = {list(paths)}: these files contain no text for the {split} split. Choose "
            "files that do"
        )
    return manifest


def _size_of_files(data: DataSection, split: Split) -> int:
    """Return the size in bytes of the files that a split is read from.

    This is an upper bound on the split's text: it also counts documents of the same files that
    belong to the other split, and the JSON around the text.
    """
    return sum(path.stat().st_size for path in sources.files(data, split))
