"""Tokens -> webdataset tars, their index and their manifest. The same tokens give the same bytes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from webdataset import TarWriter

from pretrain.data.manifest import FORMAT_VERSION, INDEX, MANIFEST, Manifest, Shard, sha256


class SplitWriter:
    """Writes one split into an existing, empty directory.

    The token stream, all documents one after the other, is cut into blocks of `tokens_per_block`. A block is one
    webdataset sample: the member `{block:08d}.npy`. A tar holds `tokens_per_shard // tokens_per_block` blocks.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tokenizer_sha256: str,
        vocab_size: int,
        tokens_per_block: int,
        tokens_per_shard: int,
    ) -> None:
        self._directory, self._tokenizer_sha256, self._vocab_size = (
            directory,
            tokenizer_sha256,
            vocab_size,
        )
        self._block = np.empty(tokens_per_block, np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._blocks_per_shard = tokens_per_shard // tokens_per_block
        self._filled = self._blocks = self._documents = self._text_bytes = 0
        self._file: io.BufferedWriter | None = None
        self._shards: list[Shard] = []
        self._index: list[np.ndarray] = []

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Appends a document: its token ids [tokens], the end-of-document token included, and its size as UTF-8."""
        self._documents += 1
        self._text_bytes += text_bytes
        while len(tokens):
            part = tokens[: len(self._block) - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == len(self._block):
                self._write_block()

    def close(self) -> Manifest:
        """Writes what is left, the index and, last, the manifest."""
        if self._filled:
            self._write_block()
        self._close_shard()
        np.save(self._directory / INDEX, np.concatenate([np.empty((0, 3), np.int64), *self._index]))
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            tokenizer_sha256=self._tokenizer_sha256,
            vocab_size=self._vocab_size,
            dtype=self._block.dtype.name,
            tokens_per_block=len(self._block),
            tokens=sum(s.tokens for s in self._shards),
            documents=self._documents,
            text_bytes=self._text_bytes,
            index_sha256=sha256(self._directory / INDEX),
            shards=self._shards,
        )
        (self._directory / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
        return manifest

    def _write_block(self) -> None:
        if self._file is None:
            # Opened here: given a name, webdataset would run what stands behind "pipe:" in a shell.
            self._file = (self._directory / f"shard-{len(self._shards):06d}.tar").open("wb")
            self._tar = TarWriter(self._file, mtime=0, user="", group="")
        self._tar.write({"__key__": f"{self._blocks:08d}", "npy": self._block[: self._filled]})
        self._blocks += 1
        self._filled = 0
        if self._blocks % self._blocks_per_shard == 0:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._tar.close()
        self._file.close()
        path, self._file = Path(self._file.name), None
        rows = _payloads(path, shard=len(self._shards))
        self._index.append(rows)
        self._shards.append(
            Shard(
                name=path.name,
                samples=len(rows),
                tokens=int(rows[:, 2].sum()),
                bytes=path.stat().st_size,
                sha256=sha256(path),
            )
        )


def _payloads(path: Path, shard: int) -> np.ndarray:
    """Rows (shard, byte offset of the first token, tokens) of a finished tar, int64 [blocks, 3], read back from it."""
    rows = []
    with tarfile.open(path) as tar, path.open("rb") as file:
        for member in tar:
            file.seek(member.offset_data)
            np.lib.format.read_magic(file)  # version 1.0, which numpy writes for every plain array
            (tokens,), _, _ = np.lib.format.read_array_header_1_0(file)
            rows.append((shard, file.tell(), tokens))
    return np.array(rows, dtype=np.int64)
