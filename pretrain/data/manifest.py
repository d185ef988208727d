"""What lies beside the shards of a split: a JSON manifest and an index, by which damage is found before training."""

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
    name: str
    samples: int
    """webdataset samples, each a block of tokens."""
    tokens: int
    bytes: int
    """Size of the tar file."""
    sha256: str


class Manifest(_Record):
    format_version: int
    tokenizer_sha256: str
    vocab_size: int
    dtype: str
    """Of the tokens: uint16 or uint32."""
    tokens_per_block: int
    """In every block but the last, which may be shorter."""
    tokens: int
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    index_sha256: str
    shards: list[Shard]


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the split in `directory`. Raises ConfigError when there is none that can be read."""
    path = directory / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file, so there is no finished data set in data.directory = {directory.parent}. "
            "Make one with `pretrain data build CONFIG`"
        ) from None
    except ValidationError as error:
        raise ConfigError(
            f"{path}: not a manifest ({error.errors()[0]['msg']}). {rebuild(directory)}"
        ) from None
    if manifest.format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{path}: format_version = {manifest.format_version}, this program reads {FORMAT_VERSION}. "
            f"{rebuild(directory)}"
        )
    return manifest


def rebuild(directory: Path) -> str:
    """The remedy for a damaged split."""
    return f"Restore it from a copy, or remove {directory.parent} and run `pretrain data build CONFIG` again"


def sha256(path: Path) -> str:
    """Hex digest of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
