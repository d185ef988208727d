"""A split of a built data set as one long array of tokens, read anywhere at memory speed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config import ConfigError, RunConfig
from pretrain.data.manifest import INDEX, TOKENIZER, read_manifest, rebuild, sha256
from pretrain.data.sources import Split


class TokenStream:
    """The tokens of a split, from memory-mapped tars on a local file system.

    `len(stream)` counts tokens; `text_bytes` (UTF-8) and `documents` count what they were made from. It can be sent to
    another process, which maps the files anew.
    """

    def __init__(self, directory: str | Path) -> None:
        """Opens `directory` (train/ or validation/ of a data set).

        Raises ConfigError when a file is missing or has another size than the manifest says, when the index is
        damaged, or when the tokens come from another tokenizer than the one beside the split. `verify` finds the rest.
        """
        self.directory = Path(directory)
        self._manifest = read_manifest(self.directory)
        self.vocab_size, self.documents = self._manifest.vocab_size, self._manifest.documents
        self.text_bytes = self._manifest.text_bytes
        self._check_sizes()
        self._check_tokenizer()
        self._index = self._read_index()
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._manifest.tokens

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), int64 [count], across blocks and shards. Raises IndexError beyond the end."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"{self.directory}: tokens {start} to {start + count} of {len(self)}")
        tokens, done = np.empty(count, dtype=np.int64), 0
        while done < count:
            block, first = divmod(start + done, self._manifest.tokens_per_block)
            part = self._read_block(block)[first : first + count - done]
            tokens[done : done + len(part)] = part
            done += len(part)
        return tokens

    def verify(self) -> None:
        """Reads and hashes every shard. Raises ConfigError naming the first whose bytes are not those written."""
        for shard in self._manifest.shards:
            path = self.directory / shard.name
            if (found := sha256(path)) != shard.sha256:
                raise ConfigError(
                    f"{path}: damaged: its SHA-256 is {found}, the manifest says {shard.sha256}. "
                    f"{rebuild(self.directory)}"
                )

    def _read_block(self, block: int) -> np.ndarray:
        shard, offset, tokens = self._index[block].tolist()
        if shard not in self._maps:
            self._maps[shard] = np.memmap(
                self.directory / self._manifest.shards[shard].name, np.uint8, mode="r"
            )
        dtype = np.dtype(self._manifest.dtype)
        return self._maps[shard][offset : offset + tokens * dtype.itemsize].view(dtype)

    def _check_sizes(self) -> None:
        for shard in self._manifest.shards:
            path = self.directory / shard.name
            found = path.stat().st_size if path.is_file() else None
            if found is None:
                raise ConfigError(
                    f"{path}: missing; the manifest lists it. {rebuild(self.directory)}"
                )
            if found != shard.bytes:
                raise ConfigError(
                    f"{path}: {'truncated' if found < shard.bytes else 'too long'}: {found} bytes found, "
                    f"{shard.bytes} expected. {rebuild(self.directory)}"
                )

    def _check_tokenizer(self) -> None:
        path = self.directory.parent / TOKENIZER
        found = sha256(path) if path.is_file() else "missing"
        if found != self._manifest.tokenizer_sha256:
            raise ConfigError(
                f"{path}: wrong tokenizer: the shards of {self.directory} were made with the one whose SHA-256 is "
                f"{self._manifest.tokenizer_sha256}, this one is {found}. {rebuild(self.directory)}"
            )

    def _read_index(self) -> np.ndarray:
        path = self.directory / INDEX
        found = sha256(path) if path.is_file() else "missing"
        if found != self._manifest.index_sha256:
            raise ConfigError(
                f"{path}: damaged: its SHA-256 is {found}, the manifest says {self._manifest.index_sha256}. "
                f"{rebuild(self.directory)}"
            )
        return np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}  # a memory map would travel as a copy of the file


def open_stream(config: RunConfig, split: Split) -> TokenStream:
    """The stream of `split` in the run's data directory.

    Raises ConfigError like TokenStream, and when the model's vocabulary is not that of the data.
    """
    stream = TokenStream(config.data_directory / split)
    if stream.vocab_size != config.data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {config.data.vocab_size}: the data set in data.directory = {config.data.directory} "
            f"has {stream.vocab_size}. Set data.vocab_size={stream.vocab_size}, or choose another data.directory"
        )
    return stream


def verify(directory: str | Path) -> None:
    """Opens both splits of the data set in `directory` and hashes every file. Raises ConfigError for damage."""
    for split in ("train", "validation"):
        TokenStream(Path(directory) / split).verify()
