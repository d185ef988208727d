"""Write tokens to webdataset tar shards, with their checksums and a manifest.

The output is a pure function of the tokens and of the borders of the tasks: the same tokens give
the same bytes, whoever writes them, so that a rebuilt data set has the digests of the original.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from webdataset import TarWriter

from pretrain.config import ConfigError
from pretrain.data.manifest import (
    CHECKSUMS,
    FORMAT_VERSION,
    MANIFEST,
    CorpusRecord,
    Layout,
    Manifest,
    Shard,
    Split,
    TaskShards,
    TokenizerName,
    checksums,
    read_manifest,
    shard_name,
    task_seed,
)
from pretrain.rundir.files import PARTIAL, flush_directory, replace_file


class ShardWriter:
    """Write the shards of one task into an existing directory.

    The tokens of a task are the concatenation of its documents. They are cut into blocks of
    `tokens_per_block` tokens, regardless of where documents end. A block is one webdataset sample,
    stored as the tar member `TASK-BLOCK.npy`. A tar holds `tokens_per_shard // tokens_per_block`
    blocks. A file gets its name when it is complete and on the disk, so a killed task leaves none
    that is partial.
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
            directory: Where the shards go.
            split: train or validation; part of what the checksums are seeded with.
            corpus: The corpus that the documents are from.
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
        self._file: _PublishedFile | None = None
        self._shards: list[Shard] = []
        self._checksums: list[np.ndarray] = []

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append a document.

        Args:
            tokens: Token ids [n], the end-of-document token included.
            text_bytes: Size of the document's text in UTF-8.

        Raises:
            ValueError: if an id lies outside [0, vocab_size), or if they are no integers.
        """
        if len(tokens) and not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"token ids of type {tokens.dtype}")
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
        """Write what is left and the checksums, and return the record of what was written."""
        if self._filled:
            self._write_block()
        self._close_shard()
        content = b"".join(part.tobytes() for part in self._checksums)
        name = f"{self._corpus}-{self._task:06d}.checksums"
        replace_file(self._directory / name, content, durable=True)
        flush_directory(self._directory)
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
            name = f"{self._corpus}-{self._task:06d}-{len(self._shards):03d}.tar"
            # TarWriter gets an open file, not a name: webdataset.gopen interprets names, and runs
            # what follows "pipe:" in a shell.
            self._file = _PublishedFile(self._directory / name)
            # No times and no user names in the tar headers, so that a rebuild gives the same bytes.
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
        size, digest = self._file.publish()
        expected = self._layout.shard_bytes(self._shard_tokens)
        if size != expected:
            # tarfile, webdataset or NumPy writes something else than the readers compute.
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


class _PublishedFile(io.RawIOBase):
    """A file that is hashed while it is written, and gets its name once it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
        self._file = self._partial.open("wb", buffering=1 << 20)
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, content: Any) -> int:
        self._digest.update(content)
        self._size += len(content)
        return self._file.write(content)

    def publish(self) -> tuple[int, str]:
        """Flush, rename, and return the size and the hex XXH3-128 of what was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
        return self._size, self._digest.hexdigest()


def finish_split(
    directory: str | Path,
    tasks: Sequence[TaskShards],
    *,
    split: Split,
    tokenizer: TokenizerName,
    tokenizer_sha256: str,
    vocab_size: int,
    eos_id: int,
    tokens_per_block: int,
    tokens_per_shard: int,
) -> Manifest:
    """Give the shards of all tasks their final names, join the checksums and write the manifest.

    The manifest is written last: a split with a manifest is complete. The call may be repeated
    after it was killed at any point.

    Args:
        directory: Where the tasks wrote their shards.
        tasks: In the order of the token stream, their numbers increasing.
        split: train or validation.
        tokenizer: File name of the tokenizer.
        tokenizer_sha256: Hex digest of that file.
        vocab_size: As given to the writers.
        eos_id: The id that ends every document.
        tokens_per_block: As given to the writers.
        tokens_per_shard: As given to the writers.

    Returns:
        The manifest of the split.

    Raises:
        ConfigError: if the split has no tokens, or a task's files are missing or damaged.
    """
    directory, layout = Path(directory), Layout.of(vocab_size, tokens_per_block)
    names, shards = _final_names(tasks)
    if (directory / MANIFEST).is_file():
        manifest = read_manifest(directory)
        if manifest.shards != shards:
            raise RuntimeError(f"{directory / MANIFEST}: the split was finished from other tasks")
    else:
        for before, after in names.items():
            if (directory / before).exists():
                (directory / before).rename(directory / after)
            elif not (directory / after).exists():
                raise ConfigError(
                    f"{directory / before}: missing, though its task is finished. Remove the "
                    "folder of the unfinished build and run `pretrain data build CONFIG` again"
                )
        content = _joined_checksums(directory, tasks)
        replace_file(directory / CHECKSUMS, content, durable=True)
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
            checksums_bytes=len(content),
            checksums_xxh3_128=xxhash.xxh3_128_hexdigest(content),
            corpora=_corpora(tasks),
            shards=shards,
        )
        flush_directory(directory)
        replace_file(directory / MANIFEST, manifest.text(), durable=True)
        # Read back, so that what a reader would refuse is refused here.
        manifest = read_manifest(directory)
    for task in tasks:
        (directory / task.checksums).unlink(missing_ok=True)
    for leftover in directory.glob(f".*{PARTIAL}"):
        leftover.unlink(missing_ok=True)
    flush_directory(directory)
    return manifest


def _final_names(tasks: Sequence[TaskShards]) -> tuple[dict[str, str], tuple[Shard, ...]]:
    """Return the final name of every shard, and the shards with those names."""
    names: dict[str, str] = {}
    shards: list[Shard] = []
    count: dict[str, int] = {}
    for shard in (shard for task in tasks for shard in task.shards):
        number = count.get(shard.corpus, 0)
        count[shard.corpus] = number + 1
        names[shard.name] = shard_name(shard.corpus, number)
        shards.append(shard.model_copy(update={"name": names[shard.name]}))
    return names, tuple(shards)


def _joined_checksums(directory: Path, tasks: Sequence[TaskShards]) -> bytes:
    parts = []
    for task in tasks:
        content = (directory / task.checksums).read_bytes()
        if xxhash.xxh3_128_hexdigest(content) != task.checksums_xxh3_128:
            raise RuntimeError(f"{directory / task.checksums}: not what the task wrote")
        parts.append(content)
    return b"".join(parts)


def _corpora(tasks: Sequence[TaskShards]) -> tuple[CorpusRecord, ...]:
    return tuple(
        CorpusRecord(
            name=name,
            tokens=sum(task.tokens for task in tasks if task.corpus == name),
            documents=sum(task.documents for task in tasks if task.corpus == name),
            text_bytes=sum(task.text_bytes for task in tasks if task.corpus == name),
        )
        for name in dict.fromkeys(task.corpus for task in tasks)
    )
