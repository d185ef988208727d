"""Define and read the JSON manifest of a split.

Each split of a data set (train/, validation/) is a directory of tar shards, their checksums
(checksums.bin) and a manifest (manifest.json) with the sizes and digests of both. A manifest is
believed only if it is, byte for byte, what was written.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pretrain.config import ConfigError
from pretrain.rundir.files import parse_json

Split = Literal["train", "validation"]

# ---- layout ----
# Compute where the tokens of a split lie in its files, and how their bytes are checksummed.
#
# A shard is a plain tar of webdataset samples, one block of tokens each. Every size in it follows
# from the number of tokens, so no index is stored and none is read:
#
#     header of the member (512 bytes), header of NumPy (128), tokens, zeros up to a multiple of 512
#
# The checksums of a split are XXH3-64 of every 4 KiB of every block's tokens, in stream order. They
# are kept beside the shards, so that the shards remain what any tool for webdatasets expects.


PIECE_BYTES = 4096
"""Bytes of tokens under one checksum. The last piece of a block may be shorter. A random sample of
1,025 tokens of two bytes touches 1.5 pieces: larger ones would be read in vain."""

CHECKSUM_BYTES = 8

_TAR_UNIT = 512
_TAR_RECORD = 10_240
"""Tar files are padded to a multiple of this."""

_NPY_HEADER = 128

HEADER_BYTES = _TAR_UNIT + _NPY_HEADER
"""Bytes of a block before its tokens."""


class Layout(NamedTuple):
    """The arithmetic of one split."""

    dtype: np.dtype[np.unsignedinteger]
    """uint16 or uint32, little-endian."""

    tokens_per_block: int

    @classmethod
    def of(cls, vocab_size: int, tokens_per_block: int) -> Layout:
        """Return the layout for a vocabulary: two bytes a token up to 65,536 ids, else four."""
        return cls(np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4"), tokens_per_block)

    @property
    def tokens_per_piece(self) -> int:
        """Return the number of tokens under one checksum."""
        return PIECE_BYTES // self.dtype.itemsize

    @property
    def pieces_per_block(self) -> int:
        """Return the number of checksums of a full block."""
        return -(-self.tokens_per_block // self.tokens_per_piece)

    @property
    def block_bytes(self) -> int:
        """Return the bytes from one full block of a shard to the next."""
        return self._member_bytes(self.tokens_per_block)

    def shard_bytes(self, tokens: int) -> int:
        """Return the size of a tar with so many tokens, whose last block may be short."""
        blocks, rest = divmod(tokens, self.tokens_per_block)
        size = blocks * self.block_bytes + (self._member_bytes(rest) if rest else 0)
        # Two empty units end a tar.
        return _round_up(size + 2 * _TAR_UNIT, _TAR_RECORD)

    def pieces(self, tokens: int) -> int:
        """Return the number of checksums of so many tokens, cut into blocks."""
        blocks, rest = divmod(tokens, self.tokens_per_block)
        return blocks * self.pieces_per_block - (-rest // self.tokens_per_piece)

    def _member_bytes(self, tokens: int) -> int:
        return (
            HEADER_BYTES
            + _round_up(_NPY_HEADER + tokens * self.dtype.itemsize, _TAR_UNIT)
            - (_NPY_HEADER)
        )


def task_seed(split: str, corpus: str, task: int) -> int:
    """Return the number that the checksums of a task's pieces are seeded with.

    The seed of a piece is this plus its number in the task. Bytes that are sound but stand in the
    wrong place (two shards or two blocks swapped) therefore fail.
    """
    # 63 bits, so that adding the number of a piece never exceeds 64.
    return xxhash.xxh3_64_intdigest(f"{split}/{corpus}/{task}".encode()) >> 1


def checksums(block: np.ndarray, seed: int) -> np.ndarray:
    """Return the checksums of a block's pieces.

    Args:
        block: The tokens as stored, [n].
        seed: The seed of the block's first piece.

    Returns:
        uint64 [pieces], little-endian.
    """
    content = block.tobytes()
    return np.array(
        [
            xxhash.xxh3_64_intdigest(content[start : start + PIECE_BYTES], seed + number)
            for number, start in enumerate(range(0, len(content), PIECE_BYTES))
        ],
        dtype="<u8",
    )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


FORMAT_VERSION: Literal[2] = 2
MANIFEST, CHECKSUMS = "manifest.json", "checksums.bin"
BUILD_RECORD = "build.json"
"""File of the settings and text that a data set was built from, and of the report."""
DOCUMENTS = "documents"
"""Folder of a split that says where each document comes from; see `build.tasks.PLACE`."""
TOKENIZER: Literal["tokenizer.model"] = "tokenizer.model"
TokenizerName = Literal["tokenizer.model", "tokenizer.json", "tokenizer.txt"]
"""What the file of a data set's tokenizer may be called."""

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Positive = Annotated[int, Field(gt=0, lt=2**53)]
_Digest128 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
_Digest256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]*$")]


class OtherFormat(ConfigError):
    """A data set that another version of pretrain built.

    Checkpoints of then carry no tokenizer, so the advice must not be to remove theirs.
    """


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Record):
    """One tar file of a split."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]*-[0-9-]+\.tar$")]
    """File name, relative to the directory of the split. It leads to no other directory."""

    corpus: _Name
    """The corpus that the tokens come from."""

    task: _Count
    """The task that wrote it; numbered through over the split."""

    tokens: _Positive

    bytes: _Positive
    """Size of the tar file."""

    xxh3_128: _Digest128
    """Hex digest of the tar file."""

    # XXH3 rather than SHA-256: it is ten times as fast and finds damage as surely. Neither would
    # stop somebody who forges a shard, and who could write the manifest anew as well.


class TaskShards(_Record):
    """The finished output of one task, in a form that can be kept as JSON until the end."""

    split: Split
    corpus: _Name
    task: _Count
    documents: _Count
    text_bytes: _Count
    """Size of the documents in UTF-8, before tokenization."""

    tokens: _Count
    shards: tuple[Shard, ...]
    """With the names under which the task wrote them."""

    checksums: str
    """Name of the file of the checksums of the task's pieces."""


class CorpusRecord(_Record):
    """The share of one corpus in a split."""

    name: _Name
    tokens: _Count
    documents: _Count
    text_bytes: _Count


class Manifest(_Record):
    """The contents of manifest.json."""

    format_version: Literal[2]

    split: Split

    tokenizer: TokenizerName
    """Name of the tokenizer's file, in the directory above."""

    tokenizer_sha256: _Digest256
    """Hex digest of that file."""

    vocab_size: Annotated[int, Field(gt=0, le=2**32)]
    """Number of ids of the tokenizer."""

    eos_id: _Count
    """The id that ends every document."""

    dtype: Literal["uint16", "uint32"]
    """NumPy type of the stored tokens."""

    tokens_per_block: _Positive
    """Length of every block except the last of a task, which may be shorter."""

    tokens_per_shard: _Positive
    """Length of every shard except the last of a task, which may be shorter. Whole blocks."""

    tokens: _Positive
    """Number of tokens in the split, end-of-document tokens included."""

    documents: _Positive

    text_bytes: _Count
    """Size of the documents in UTF-8, before tokenization."""

    checksums_bytes: _Positive
    """Size of checksums.bin."""

    checksums_xxh3_128: _Digest128
    """Hex digest of checksums.bin."""

    corpora: tuple[CorpusRecord, ...]
    """In the order of the token stream."""

    shards: tuple[Shard, ...]
    """In the order of the token stream."""

    sha256: str = ""
    """Hex digest of everything above, as JSON with sorted keys and no spaces."""

    @property
    def layout(self) -> Layout:
        """Return the arithmetic of the shards."""
        return Layout.of(self.vocab_size, self.tokens_per_block)

    def digest(self) -> str:
        """Return what `sha256` has to be."""
        content = self.model_dump(mode="json", exclude={"sha256"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def text(self) -> str:
        """Return the text of manifest.json."""
        return self.model_copy(update={"sha256": self.digest()}).model_dump_json(indent=1) + "\n"


def parse_manifest(content: bytes, path: str | Path) -> Manifest:
    """Check the contents of a manifest and return it.

    Args:
        content: The contents of manifest.json.
        path: Where they are from, for messages; its folder's parent is the data set.

    Raises:
        OtherFormat: if the format version is another one.
        ConfigError: if anything differs from what was written.
    """
    advice = rebuild_advice(path)
    version = parse_json(content).get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        data_set = _parent(path, 2)
        raise OtherFormat(
            f"{path}: format_version = {version}, but this version of pretrain reads format "
            f"{FORMAT_VERSION}. Build a data set in another data.directory; to go on with runs of "
            f"this one, with data.tokenizer = {data_set}/{TOKENIZER}"
        )
    try:
        manifest = Manifest.model_validate_json(content)
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        key = ".".join(map(str, first["loc"])) if first else ""
        reason = f"{key}: {first['msg']}" if first and key else first["msg"] if first else error
        raise ConfigError(f"{path}: not a valid manifest ({reason}). {advice}") from None
    # The manifest has one spelling, to the byte, so any change of it is found.
    if content != manifest.text().encode():
        raise ConfigError(
            f"{path}: damaged: its content has the SHA-256 {manifest.digest()}, but it names "
            f"{manifest.sha256 or 'none'}. {advice}"
        )
    return manifest


def shard_name(corpus: str, number: int) -> str:
    """Return the file name of a finished shard, numbered through over the corpus."""
    return f"{corpus}-{number:06d}.tar"


def missing_data_set(path: str | Path) -> ConfigError:
    """Return the error for a data set whose manifest `path` is not there."""
    return ConfigError(
        f"{path}: no such file, so there is no finished data set in "
        f"data.directory = {_parent(path, 2)}. Build one with `pretrain data build CONFIG`"
    )


def rebuild_advice(path: str | Path) -> str:
    """Return the sentence that tells how to repair a split's file, by its path or URL."""
    return (
        f"Restore it from a copy, or remove {_parent(path, 2)} and run "
        "`pretrain data build CONFIG` again"
    )


def _parent(path: str | Path, levels: int) -> str:
    """Return the folder so many levels above a path or URL; Path would spoil the //."""
    return str(path).rsplit("/", levels)[0]


def sha256(path: Path) -> str:
    """Return the hex SHA-256 digest of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
