"""Write tokens to webdataset tar shards, with their checksums and a manifest.

The output is a pure function of the tokens and of the borders of the tasks: the same tokens give
the same bytes, whoever writes them, so that a rebuilt data set has the digests of the original.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from webdataset import TarWriter

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
    parse_manifest,
    shard_name,
    task_seed,
)
from pretrain.rundir.files import flush_directory, replace_file


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
        self._file: _Shard | None = None
        self._shards: list[Shard] = []
        self._checksums: list[np.ndarray] = []

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append a document.

        Args:
            tokens: Token ids [n], the end-of-document token included.
            text_bytes: Size of the document's text in UTF-8.

        Raises:
            ValueError: if an id lies outside [0, vocab_size).
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
        """Write what is left and the checksums, and return the record of what was written."""
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
        )

    def _write_block(self) -> None:
        if self._file is None:
            name = f"{self._corpus}-{self._task:06d}-{len(self._shards):03d}.tar"
            # TarWriter gets an open file, not a name: webdataset.gopen interprets names, and runs
            # what follows "pipe:" in a shell.
            self._file = _Shard(self._directory / name)
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
        size, digest = self._file.finish()
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
        """Return the size and the hex XXH3-128 of what was written."""
        self._file.close()
        return self.path.stat().st_size, self._digest.hexdigest()


def finish_split(
    directory: str | Path,
    tasks: Sequence[TaskShards],
    written_to: Callable[[TaskShards], Path] | None = None,
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
    """Give the shards of all tasks their final names, join the checksums and write the manifest.

    The manifest is written last: a split with a manifest is complete. The call may be repeated
    after it was killed at any point.

    Args:
        directory: The directory of the split.
        tasks: In the order of the token stream, their numbers increasing.
        written_to: Returns where a task wrote its shards; by default `directory`.
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
        ConfigError: if the split has no tokens.
        OSError: if a task's files are missing.
    """
    directory, layout = Path(directory), Layout.of(vocab_size, tokens_per_block)
    numbers: Counter[str] = Counter()
    shards, parts = [], []
    for task in tasks:
        source = written_to(task) if written_to else directory
        for shard in task.shards:
            name = shard_name(shard.corpus, numbers[shard.corpus])
            numbers[shard.corpus] += 1
            # What an interrupted call has moved is there already.
            if (source / shard.name).exists() or not (directory / name).exists():
                (source / shard.name).rename(directory / name)
            shards.append(shard.model_copy(update={"name": name}))
        parts.append((source / task.checksums).read_bytes())
    content = b"".join(parts)
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
        shards=tuple(shards),
    )
    flush_directory(directory)
    replace_file(directory / MANIFEST, manifest.text(), durable=True)
    flush_directory(directory)
    # What a reader would refuse is refused here.
    return parse_manifest(manifest.text().encode(), directory / MANIFEST)


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
