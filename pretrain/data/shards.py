"""Write tokens to webdataset tar shards, with an index and a manifest.

The output is a pure function of the tokens: the same tokens give the same bytes, so that a rebuilt
data set has the digests of the original.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from webdataset import TarWriter

from pretrain.data.manifest import FORMAT_VERSION, INDEX, MANIFEST, Manifest, Shard, sha256


class SplitWriter:
    """Write one split of a data set into an existing, empty directory.

    The token stream is the concatenation of all documents. It is cut into blocks of
    `tokens_per_block` tokens, regardless of where documents end. A block is one webdataset sample,
    stored as the tar member `{block:08d}.npy`. A tar holds `tokens_per_shard // tokens_per_block`
    blocks.
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
        """Prepare to write; nothing is written before the first block is full.

        Args:
            directory: The directory of the split.
            tokenizer_sha256: Hex digest of the tokenizer model, recorded in the manifest.
            vocab_size: Number of token ids. Up to 65,536 they are stored as uint16, else as uint32.
            tokens_per_block: Tokens in a webdataset sample.
            tokens_per_shard: Tokens in a tar, rounded down to whole blocks.
        """
        self._directory = directory
        self._tokenizer_sha256 = tokenizer_sha256
        self._vocab_size = vocab_size
        self._block = np.empty(tokens_per_block, np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._blocks_per_shard = tokens_per_shard // tokens_per_block
        self._filled = self._blocks = self._documents = self._text_bytes = 0
        self._file: io.BufferedWriter | None = None
        self._shards: list[Shard] = []
        self._index: list[np.ndarray] = []

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append a document to the token stream.

        Args:
            tokens: Token ids [n], the end-of-document token included.
            text_bytes: Size of the document's text in UTF-8.
        """
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
        """Write the last block, the index and the manifest, and return the manifest.

        The manifest is written last: a split with a manifest is complete.
        """
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
            # TarWriter gets an open file, not a name: webdataset.gopen interprets names, and runs
            # what follows "pipe:" in a shell.
            self._file = (self._directory / f"shard-{len(self._shards):06d}.tar").open("wb")
            # No times and no user names in the tar headers, so that a rebuild gives the same bytes.
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
        rows = _index_rows(path, shard=len(self._shards))
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


def _index_rows(path: Path, shard: int) -> np.ndarray:
    """Return the rows of the index for a finished tar.

    The rows are read back from the file rather than computed while writing, so that they hold for
    the tar that is actually on disk.

    Args:
        path: The tar.
        shard: Its number.

    Returns:
        int64 [blocks, 3]: (shard, byte offset of the block's first token, tokens in the block).
    """
    rows = []
    with tarfile.open(path) as tar, path.open("rb") as file:
        for member in tar:
            file.seek(member.offset_data)
            # numpy.save writes format version 1.0 for every array without structured types.
            np.lib.format.read_magic(file)
            (tokens,), _, _ = np.lib.format.read_array_header_1_0(file)
            rows.append((shard, file.tell(), tokens))
    return np.array(rows, dtype=np.int64)
