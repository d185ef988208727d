"""Define and read the JSON manifest of a split.

Each split of a data set (train/, validation/) is a directory of tar shards, an index (index.npy)
and a manifest (manifest.json) with the sizes and SHA-256 digests of both. The manifest lets a run
find a missing, truncated or damaged file before training starts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.config import ConfigError

FORMAT_VERSION = 1
MANIFEST, INDEX, TOKENIZER = "manifest.json", "index.npy", "tokenizer.model"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Record):
    """One tar file of a split."""

    name: str
    """File name, relative to the directory of the split."""

    samples: int
    """Number of webdataset samples. Each holds one block of tokens."""

    tokens: int
    """Number of tokens in all blocks of the shard."""

    bytes: int
    """Size of the tar file."""

    sha256: str
    """Hex digest of the tar file."""


class Manifest(_Record):
    """The contents of manifest.json."""

    format_version: int

    tokenizer_sha256: str
    """Hex digest of the SentencePiece model that produced the tokens."""

    vocab_size: int
    """Number of pieces of that model."""

    dtype: str
    """NumPy type of the stored tokens: uint16 or uint32."""

    tokens_per_block: int
    """Length of every block except the last, which may be shorter."""

    tokens: int
    """Number of tokens in the split, end-of-document tokens included."""

    documents: int

    text_bytes: int
    """Size of the documents in UTF-8, before tokenization."""

    index_sha256: str
    """Hex digest of index.npy."""

    shards: list[Shard]
    """In the order of the token stream."""


def read_manifest(directory: Path) -> Manifest:
    """Read and validate the manifest of the split in `directory`.

    Raises:
        ConfigError: if there is no manifest, if it is malformed, or if it has another format
            version.
    """
    path = directory / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file, so there is no finished data set in "
            f"data.directory = {directory.parent}. Build one with `pretrain data build CONFIG`"
        ) from None
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(
            f"{path}: not a valid manifest ({reason}). {rebuild_advice(directory)}"
        ) from None
    if manifest.format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format_version = {manifest.format_version}, but this version of pretrain "
            f"reads format {FORMAT_VERSION}. {rebuild_advice(directory)}"
        )
    return manifest


def rebuild_advice(directory: Path) -> str:
    """Return the sentence that tells the user how to repair the damaged split in `directory`."""
    return (
        f"Restore it from a copy, or remove {directory.parent} and run "
        "`pretrain data build CONFIG` again"
    )


def sha256(path: Path) -> str:
    """Return the hex SHA-256 digest of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
