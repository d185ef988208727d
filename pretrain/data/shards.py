"""The files of a split: tar shards of tokens, their checksums and a JSON manifest.

Each split of a data set (train/, validation/) is a directory of tar shards, their checksums
(checksums.bin) and a manifest (manifest.json) with the sizes and digests of both. A manifest is
trusted only if it is unchanged to the byte.

The files are a pure function of the tokens and of the borders of the tasks, so a rebuilt data set
has the digests of the original.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from pretrain.config import ConfigError, RunFailed
from pretrain.config.errors import NO_SPACE_ERRORS, first_problem
from pretrain.rundir.files import Json, flush, new_file, replace_file

Split = Literal["train", "validation"]

# ---- layout ----
# Compute where the tokens of a split are in its files, and the checksums of their bytes.
#
# A shard is a plain tar of webdataset samples, one block of tokens each. Every size in it follows
# from the number of tokens, so no index is needed:
#
#     header of the member (512 bytes), header of NumPy (128), tokens, zeros up to a multiple of 512
#
# The checksums of a split are XXH3-64 of every 4 KiB of every block's tokens, in stream order. They
# are stored outside the shards, so that any tool for webdatasets can read the shards.


PIECE_BYTES = 4096
"""Bytes of tokens under one checksum. The last piece of a block may be shorter. A random sample of
1,025 two-byte tokens touches 1.5 pieces; larger pieces would only add bytes to read."""

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
        """Return the layout for a vocabulary: two bytes per token up to 65,536 ids, else four."""
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
        """Return the size of a tar with this many tokens, whose last block may be short."""
        blocks, rest = divmod(tokens, self.tokens_per_block)
        size = blocks * self.block_bytes + (self._member_bytes(rest) if rest else 0)
        # Two empty units end a tar.
        return _round_up(size + 2 * _TAR_UNIT, _TAR_RECORD)

    def pieces(self, tokens: int) -> int:
        """Return the number of checksums of this many tokens, cut into blocks."""
        blocks, rest = divmod(tokens, self.tokens_per_block)
        return blocks * self.pieces_per_block - (-rest // self.tokens_per_piece)

    def _member_bytes(self, tokens: int) -> int:
        return _TAR_UNIT + _round_up(_NPY_HEADER + tokens * self.dtype.itemsize, _TAR_UNIT)


def task_seed(split: str, corpus: str, task: int) -> int:
    """Return the seed of the checksums of a task.

    The seed of a piece is this number plus its index in the task. Intact bytes in the wrong place
    (two swapped shards or blocks) therefore fail the check.
    """
    # 63 bits, so that adding the index of a piece never exceeds 64 bits.
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


FORMAT_VERSION: Literal[3] = 3
MANIFEST, CHECKSUMS = "manifest.json", "checksums.bin"
BUILD_RECORD = "build.json"
"""File of the settings and text that a data set was built from, and of the report."""
DOCUMENTS = "documents"
"""Folder of a split with the origin of each document; see `build.tasks.PLACE`."""
TokenizerName = Literal["tokenizer.model", "tokenizer.json", "tokenizer.txt"]
MODEL, JSON, DICTIONARY = "tokenizer.model", "tokenizer.json", "tokenizer.txt"
TOKENIZER_FILES = (MODEL, JSON, DICTIONARY)
"""Names of a tokenizer's file in data sets, checkpoints and exports."""

_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Positive = Annotated[int, Field(gt=0, lt=2**53)]
Digest128 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Digest256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]*$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# ---- seals ----
# A sealed record (one with its own checksum) lists every file of a data set with its size and
# digest: the manifest of a split lists shards and checksums, and build.json lists the manifests,
# the tokenizer and the indexes of documents. The output of a build's task has such a record too.


def sealed(content: Json) -> str:
    """Return JSON that ends with the SHA-256 of its content as sorted JSON without spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content | {"sha256": digest}, indent=1) + "\n"


def unsealed(raw: str | bytes) -> Json | None:
    """Return the content of sealed JSON; None if a byte of it has changed."""
    try:
        content = json.loads(raw)
        del content["sha256"]
        text = sealed(content)
        return content if raw in (text, text.encode()) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class Shard(_Record):
    """One tar file of a split."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]*-[0-9-]+\.tar$")]
    """File name, relative to the directory of the split; never a path to another directory."""

    corpus: _Name
    """The corpus that the tokens come from."""

    task: _Count
    """Number of the task that wrote it, counted over the whole split."""

    tokens: _Positive

    bytes: _Positive
    """Size of the tar file."""

    xxh3_128: Digest128
    """Hex digest of the tar file."""

    # XXH3 rather than SHA-256, because it is ten times as fast and detects damage equally well.
    # Neither protects against forgery, because a forger could also rewrite the manifest.


class TaskShards(_Record):
    """The finished output of one task, stored as JSON until the end of the build."""

    split: Split
    corpus: _Name
    task: _Count
    documents: _Count
    text_bytes: _Count
    """Size of the documents in UTF-8, before tokenization."""

    tokens: _Count
    shards: tuple[Shard, ...]
    """The shards, with the names under which the task wrote them."""

    checksums: str
    """Name of the file of the checksums of the task's pieces."""

    checksums_xxh3_128: Digest128


class CorpusRecord(_Record):
    """The share of one corpus in a split."""

    name: _Name
    tokens: _Count
    documents: _Count
    text_bytes: _Count


class Manifest(_Record):
    """The contents of manifest.json."""

    format_version: Literal[3]

    split: Split

    tokenizer: TokenizerName
    """Name of the tokenizer's file, in the directory above."""

    tokenizer_sha256: Digest256
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

    checksums_xxh3_128: Digest128
    """Hex digest of checksums.bin."""

    corpora: tuple[CorpusRecord, ...]
    """In the order of the token stream."""

    shards: tuple[Shard, ...]
    """In the order of the token stream."""

    sha256: str = ""
    """Checksum of the manifest, from `sealed`."""

    @property
    def layout(self) -> Layout:
        """Return the arithmetic of the shards."""
        return Layout.of(self.vocab_size, self.tokens_per_block)

    def text(self) -> str:
        """Return the text of manifest.json."""
        return sealed(self.model_dump(mode="json", exclude={"sha256"}))


def parse_manifest(content: bytes, path: str | Path) -> Manifest:
    """Check the contents of a manifest and return it.

    Args:
        content: The contents of manifest.json.
        path: Path of the manifest, for messages; its folder's parent is the data set.

    Raises:
        ConfigError: Anything differs from what was written.
    """
    advice = rebuild_advice(path)
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: not a valid manifest ({first_problem(error)}). {advice}"
        ) from None
    # A manifest has exactly one spelling, so comparing bytes finds any change.
    if content != manifest.text().encode():
        raise ConfigError(f"{path}: damaged: its content is not that of its SHA-256. {advice}")
    return manifest


def missing_data_set(path: str | Path) -> ConfigError:
    """Return the error for a data set whose manifest `path` does not exist."""
    return ConfigError(
        f"{path}: no such file, so there is no finished data set in "
        f"data.directory = {str(path).rsplit('/', 2)[0]}. Build one with `pretrain data build "
        "CONFIG`, or say where it is now: --set data.directory=DIRECTORY"
    )


def rebuild_advice(path: str | Path) -> str:
    """Return the advice how to repair a file of a data set, given its path."""
    data_set = re.sub(r"/((train|validation)/(documents/)?)?[^/]*$", "", str(path))
    return (
        f"Restore it from a copy, or remove {data_set} and run `pretrain data build CONFIG` again"
    )


# ---- Write the shards of a task, and join those of all tasks ----


class ShardWriter:
    """Write the shards of one task into an existing directory, which is published as a whole.

    The tokens of a task are the concatenation of its documents. They are cut into blocks of
    `tokens_per_block` tokens, regardless of where documents end. A block is one webdataset sample,
    stored as the tar member `TASK-BLOCK.npy`. A tar holds `tokens_per_shard // tokens_per_block`
    blocks.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        split: Split,
        corpus: str,
        task: int,
        vocab_size: int,
        tokens_per_block: int,
        tokens_per_shard: int,
    ) -> None:
        """Prepare to write; nothing is written before the first block is full.

        Args:
            directory: Directory for the shards.
            split: train or validation; part of the seed of the checksums.
            corpus: The corpus of the documents.
            task: Number of the task in the split.
            vocab_size: Number of token ids. Up to 65,536 they are stored as uint16, else as uint32.
            tokens_per_block: Tokens in a webdataset sample.
            tokens_per_shard: Tokens in a tar, rounded down to whole blocks.
        """
        self._directory = Path(directory)
        self._split, self._corpus, self._task = split, corpus, task
        self._vocab_size = vocab_size
        self._layout = Layout.of(vocab_size, tokens_per_block)
        self._seed = task_seed(split, corpus, task)
        self._block = np.empty(tokens_per_block, self._layout.dtype)
        self._blocks_per_shard = tokens_per_shard // tokens_per_block
        self._filled = self._blocks = self._documents = self._text_bytes = 0
        self._shard_tokens = 0
        self._file: _Shard | None = None
        self._shards: list[Shard] = []
        self._checksums: list[np.ndarray] = []

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append a document.

        Args:
            tokens: Token ids [n], the end-of-document token included.
            text_bytes: Size of the document's text in UTF-8.

        Raises:
            ValueError: An id is outside [0, vocab_size).
        """
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < self._vocab_size):
            raise ValueError(
                f"token ids from {tokens.min()} to {tokens.max()} of a vocabulary of "
                f"{self._vocab_size}"
            )
        self._documents += 1
        self._text_bytes += text_bytes
        while len(tokens):
            part = tokens[: len(self._block) - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == len(self._block):
                self._write_block()

    def close(self) -> TaskShards:
        """Write the last block and the checksums, and return the record of all written files."""
        if self._filled:
            self._write_block()
        self._close_shard()
        name = f"{self._corpus}-{self._task:06d}.checksums"
        content = b"".join(part.tobytes() for part in self._checksums)
        (self._directory / name).write_bytes(content)
        return TaskShards(
            split=self._split,
            corpus=self._corpus,
            task=self._task,
            documents=self._documents,
            text_bytes=self._text_bytes,
            tokens=sum(shard.tokens for shard in self._shards),
            shards=tuple(self._shards),
            checksums=name,
            checksums_xxh3_128=xxhash.xxh3_128_hexdigest(content),
        )

    def _write_block(self) -> None:
        if self._file is None:
            # webdataset imports torch, which readers do not need.
            from webdataset import TarWriter

            name = f"{self._corpus}-{self._task:06d}-{len(self._shards):03d}.tar"
            # Pass an open file, because webdataset.gopen interprets names, and runs what follows
            # "pipe:" in a shell.
            self._file = _Shard(self._directory / name)
            # Leave times and user names out of the tar headers, so that a rebuild gives the same
            # bytes.
            self._tar = TarWriter(self._file, mtime=0, user="", group="")
        block = self._block[: self._filled]
        self._tar.write({"__key__": f"{self._task:06d}-{self._blocks:08d}", "npy": block})
        first_piece = self._blocks * self._layout.pieces_per_block
        self._checksums.append(checksums(block, self._seed + first_piece))
        self._blocks += 1
        self._shard_tokens += self._filled
        self._filled = 0
        if self._blocks % self._blocks_per_shard == 0:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._tar.close()
        size, digest = self._file.finish()
        expected = self._layout.shard_bytes(self._shard_tokens)
        if size != expected:
            # tarfile, webdataset or NumPy has written another layout than readers compute.
            raise RuntimeError(f"{self._file.path}: {size} bytes were written, not {expected}")
        self._shards.append(
            Shard(
                name=self._file.path.name,
                corpus=self._corpus,
                task=self._task,
                tokens=self._shard_tokens,
                bytes=size,
                xxh3_128=digest,
            )
        )
        self._file, self._shard_tokens = None, 0


class _Shard(io.RawIOBase):
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=1 << 20)
        self._digest = xxhash.xxh3_128()

    def write(self, content: Any) -> int:
        self._digest.update(content)
        return self._file.write(content)

    def finish(self) -> tuple[int, str]:
        """Return the size and the hex XXH3-128 of the written file."""
        self._file.close()
        return self.path.stat().st_size, self._digest.hexdigest()


def finish_split(
    directory: str | Path,
    tasks: Sequence[TaskShards],
    written_to: Callable[[TaskShards], Path] | None = None,
    read: Callable[[Path, str], bytes] = lambda source, name: (source / name).read_bytes(),
    /,
    *,
    split: Split,
    tokenizer: TokenizerName,
    tokenizer_sha256: str,
    vocab_size: int,
    eos_id: int,
    tokens_per_block: int,
    tokens_per_shard: int,
) -> Manifest:
    """Give the shards of all tasks their final names, join the checksums, and write the manifest.

    The manifest is returned, and written last: a split with a manifest is complete. The shards are
    not read; their digests come from the writers.

    Args:
        directory: The directory of the split.
        tasks: In the order of the token stream, with increasing numbers.
        written_to: Returns the folder of a task's shards, which stay there. By default this is
            `directory`, and the shards are renamed.
        read: Returns the content of a file of checksums in such a folder.
        split: train or validation.
        tokenizer: File name of the tokenizer.
        tokenizer_sha256: Hex digest of that file.
        vocab_size, tokens_per_block, tokens_per_shard: As given to the writers.
        eos_id: The id that ends every document.

    Raises:
        RunFailed: The checksums of a task are damaged.
        OSError: Files of a task are missing.
    """
    directory, layout = Path(directory), Layout.of(vocab_size, tokens_per_block)
    numbers: Counter[str] = Counter()
    shards, joined = list[Shard](), xxhash.xxh3_128()
    with new_file(directory / CHECKSUMS, durable=True) as partial, partial.open("xb") as file:
        for task in tasks:
            source = written_to(task) if written_to else directory
            for shard in task.shards:
                name = f"{shard.corpus}-{numbers[shard.corpus]:06d}.tar"
                numbers[shard.corpus] += 1
                (place if written_to else Path.rename)(source / shard.name, directory / name)
                shards.append(shard.model_copy(update={"name": name}))
            content = read(source, task.checksums)
            if xxhash.xxh3_128_hexdigest(content) != task.checksums_xxh3_128:
                raise RunFailed(
                    f"{source / task.checksums}: damaged since it was written. Look at the disk, "
                    "then run the command again, which makes it anew"
                )
            joined.update(content)
            file.write(content)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        split=split,
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=vocab_size,
        eos_id=eos_id,
        dtype="uint16" if layout.dtype.itemsize == 2 else "uint32",
        tokens_per_block=tokens_per_block,
        tokens_per_shard=tokens_per_shard // tokens_per_block * tokens_per_block,
        tokens=sum(task.tokens for task in tasks),
        documents=sum(task.documents for task in tasks),
        text_bytes=sum(task.text_bytes for task in tasks),
        checksums_bytes=(directory / CHECKSUMS).stat().st_size,
        checksums_xxh3_128=joined.hexdigest(),
        corpora=_corpora(tasks),
        shards=tuple(shards),
    )
    flush(directory)
    replace_file(directory / MANIFEST, manifest.text(), durable=True)
    flush(directory)
    return manifest


def place(source: Path, target: Path) -> None:
    """Hard-link a file if the file system supports that; otherwise copy it."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (*NO_SPACE_ERRORS, errno.ENOENT, errno.EEXIST):
            raise
        shutil.copyfile(source, target)
        flush(target)


def _corpora(tasks: Sequence[TaskShards]) -> tuple[CorpusRecord, ...]:
    sums: dict[str, Counter[str]] = {}
    for task in tasks:
        counts = task.model_dump(include={"tokens", "documents", "text_bytes"})
        sums.setdefault(task.corpus, Counter()).update(counts)
    return tuple(CorpusRecord(name=name, **counts) for name, counts in sums.items())
