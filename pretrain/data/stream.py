"""Read a split of a built data set as one long array of tokens."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config import ConfigError, RunConfig
from pretrain.data.manifest import INDEX, read_manifest, rebuild_advice, sha256
from pretrain.data.sources import Split
from pretrain.data.tokenizers.base import find_tokenizer


class TokenStream:
    """Give random access to the tokens of a split, from memory-mapped tars.

    `len(stream)` is the number of tokens. A stream can be pickled to another process, which maps
    the files again.
    """

    documents: int
    """Number of documents in the split."""

    text_bytes: int
    """Size of the documents' text in UTF-8."""

    vocab_size: int
    """Number of pieces of the tokenizer that produced the tokens."""

    tokenizer_sha256: str
    """Hex digest of that tokenizer's model."""

    def __init__(self, directory: str | Path) -> None:
        """Open a split and run every check that does not read the shards.

        A changed byte inside a shard is found only by `verify`, which reads everything.

        Args:
            directory: The train/ or validation/ directory of a data set.

        Raises:
            ConfigError: if a file is missing or its size is not the manifest's, if the index is
                damaged, or if the tokens come from another tokenizer than the one in the data set.
        """
        self.directory = Path(directory)
        self._manifest = read_manifest(self.directory)
        self.vocab_size = self._manifest.vocab_size
        self.tokenizer_sha256 = self._manifest.tokenizer_sha256
        self.documents = self._manifest.documents
        self.text_bytes = self._manifest.text_bytes
        self._check_sizes()
        self._check_tokenizer()
        self._index = self._read_index()
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._manifest.tokens

    @property
    def identity(self) -> str:
        """Return the hex SHA-256 of what determines the tokens: the same for a copy elsewhere.

        Made of the manifest, so the shards are not read. The same text in blocks or shards of other
        sizes has another identity.
        """
        content = {
            "tokenizer": self.tokenizer_sha256,
            "dtype": self._manifest.dtype,
            "tokens": self._manifest.tokens,
            "shards": [shard.sha256 for shard in self._manifest.shards],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count) as int64 [count], across blocks and shards.

        Raises:
            IndexError: if the range leaves the stream.
        """
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(
                f"{self.directory}: tokens {start} to {start + count} of a stream of {len(self)}"
            )
        tokens, done = np.empty(count, dtype=np.int64), 0
        while done < count:
            # Every block but the last has the same length, so the block of a token is a division.
            block, first = divmod(start + done, self._manifest.tokens_per_block)
            part = self._read_block(block)[first : first + count - done]
            tokens[done : done + len(part)] = part
            done += len(part)
        return tokens

    def verify(self) -> None:
        """Read and hash every shard.

        Raises:
            ConfigError: naming the first shard whose bytes are not the ones that were written.
        """
        for shard in self._manifest.shards:
            self._check_sha256(self.directory / shard.name, shard.sha256)

    def _read_block(self, block: int) -> np.ndarray:
        """Return the tokens of a block, as a view of the memory-mapped tar."""
        shard, offset, tokens = self._index[block].tolist()
        if shard not in self._maps:
            path = self.directory / self._manifest.shards[shard].name
            self._maps[shard] = np.memmap(path, np.uint8, mode="r")
        dtype = np.dtype(self._manifest.dtype)
        return self._maps[shard][offset : offset + tokens * dtype.itemsize].view(dtype)

    def _check_sizes(self) -> None:
        for shard in self._manifest.shards:
            path = self.directory / shard.name
            self._check_exists(path)
            found = path.stat().st_size
            if found != shard.bytes:
                problem = "truncated" if found < shard.bytes else "too long"
                raise ConfigError(
                    f"{path}: {problem}: {found} bytes found, {shard.bytes} expected. "
                    f"{rebuild_advice(self.directory)}"
                )

    def _check_tokenizer(self) -> None:
        path = find_tokenizer(self.directory.parent)
        self._check_exists(path)
        found = sha256(path)
        if found != self._manifest.tokenizer_sha256:
            raise ConfigError(
                f"{path}: wrong tokenizer: its SHA-256 is {found}, but the shards of "
                f"{self.directory} were made with the tokenizer whose SHA-256 is "
                f"{self._manifest.tokenizer_sha256}. {rebuild_advice(self.directory)}"
            )

    def _read_index(self) -> np.ndarray:
        """Return the index, int64 [blocks, 3]: (shard, byte offset of the first token, tokens)."""
        path = self.directory / INDEX
        self._check_exists(path)
        self._check_sha256(path, self._manifest.index_sha256)
        index: np.ndarray = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        return index

    def _check_exists(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(
                f"{path}: missing, but the manifest of {self.directory} refers to it. "
                f"{rebuild_advice(self.directory)}"
            )

    def _check_sha256(self, path: Path, expected: str) -> None:
        found = sha256(path)
        if found != expected:
            raise ConfigError(
                f"{path}: damaged: its SHA-256 is {found}, but the manifest says {expected}. "
                f"{rebuild_advice(self.directory)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would carry a copy of the whole file.
        return self.__dict__ | {"_maps": {}}


def open_stream(config: RunConfig, split: Split) -> TokenStream:
    """Open a split of the run's data set.

    Raises:
        ConfigError: as TokenStream does, and if data.vocab_size is not the data set's.
    """
    stream = TokenStream(config.data_directory / split)
    if stream.vocab_size != config.data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {config.data.vocab_size}: the data set in "
            f"data.directory = {config.data.directory} has {stream.vocab_size} pieces. Set "
            f"data.vocab_size={stream.vocab_size}, or choose another data.directory"
        )
    return stream


def verify(directory: str | Path) -> None:
    """Check both splits of a data set and hash every file.

    Raises:
        ConfigError: naming the first file that is missing or damaged.
    """
    for split in ("train", "validation"):
        TokenStream(Path(directory) / split).verify()
