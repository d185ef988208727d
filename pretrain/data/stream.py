"""Read a split of a built data set as one long array of tokens."""

from __future__ import annotations

import hashlib
import json
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from pretrain.config import ConfigError, RunConfig
from pretrain.config.run import is_url
from pretrain.data.checks import problems
from pretrain.data.document import Split
from pretrain.data.files import Cache, folder
from pretrain.data.manifest import (
    MANIFEST,
    missing_data_set,
    parse_manifest,
    rebuild_advice,
)
from pretrain.data.verified import VerifiedReader


class CorpusRange(NamedTuple):
    """The range of a corpus in the stream."""

    name: str
    start: int
    """Its first token."""

    tokens: int
    documents: int
    text_bytes: int


class TokenStream:
    """Give random access to the tokens of a split, each verified against its checksum.

    `len(stream)` is the number of tokens. Memory and the time to open do not grow with it: the
    position of a token is computed, the shard it is in is found among the manifest's, and of the
    checksums those are read that are needed. The files are read with positioned reads rather than
    mapped, because a mapped file that shrinks kills the process without a word. Several threads may
    read, and a stream can be pickled to another process.
    """

    documents: int
    """Number of documents in the split."""

    text_bytes: int
    """Size of the documents' text in UTF-8."""

    vocab_size: int
    """Number of ids of the tokenizer that produced the tokens."""

    eos_id: int
    """The id that ends every document."""

    tokenizer_sha256: str
    """Hex digest of that tokenizer's file."""

    corpora: tuple[CorpusRange, ...]
    """The corpora, in the order of the stream."""

    def __init__(self, directory: str | Path, cache: Cache | None = None) -> None:
        """Open a split and run every check that does not read the shards.

        Args:
            directory: The train/ or validation/ directory of a data set, or its URL.
            cache: Where shards of a URL are kept. Default: Cache().

        Raises:
            ConfigError: if a file is missing or its size is not the manifest's, if the manifest is
                damaged, or if the tokens come from another tokenizer than the one in the data set.
            RunFailed: if a file is there and cannot be read.
        """
        self.directory: str | Path = str(directory) if is_url(directory) else Path(directory)
        self._cache = cache
        self._folder = folder(directory, cache)
        try:
            content = self._folder.read(MANIFEST)
        except FileNotFoundError:
            raise missing_data_set(self._folder.where(MANIFEST)) from None
        self.manifest = parse_manifest(content, self._folder.where(MANIFEST))
        for problem in problems(self._folder, self.manifest):
            raise problem
        self._prepare()

    def __len__(self) -> int:
        return self.manifest.tokens

    @property
    def identity(self) -> str:
        """Return the hex SHA-256 of what determines the tokens: the same for a copy elsewhere.

        Made of the manifest, so the shards are not read. The checksums stand for the tokens, so it
        does not depend on the size of shards, but on the tasks and on tokens_per_block.
        """
        m = self.manifest
        content = {
            "tokenizer": m.tokenizer_sha256,
            "dtype": m.dtype,
            "tokens_per_block": m.tokens_per_block,
            "tokens": m.tokens,
            "checksums": m.checksums_xxh3_128,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def data_set(self) -> str:
        """Return the directory or the URL of the whole data set."""
        return self._folder.parent().location

    @property
    def tokenizer_path(self) -> Path:
        """Return the path of the data set's tokenizer, fetched first if it is at a URL."""
        parent = self._folder.parent()
        name = self.manifest.tokenizer
        content = parent.read(name)
        return parent.local(name, len(content), xxhash.xxh3_128_hexdigest(content))

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count) as int64 [count], across blocks and shards.

        Raises:
            IndexError: if the range leaves the stream.
            ConfigError: if a byte in it is damaged, or a shard is missing or too short.
            RunFailed: if the operating system cannot read it.
        """
        tokens: np.ndarray = self.read_batch(np.array([start]), count)[0]
        return tokens

    def read_batch(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return the tokens of several ranges of one length.

        Args:
            starts: The first token of each, int [n].
            count: Tokens of each.

        Returns:
            int64 [n, count].

        Raises:
            As `read`.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if len(starts) and (
            count < 0 or starts.min() < 0 or int(starts.max()) + count > self.manifest.tokens
        ):
            first = int(starts.min() if starts.min() < 0 else starts.max())
            raise IndexError(
                f"{self.directory}: tokens {first} to {first + count} of a stream of {len(self)}"
            )
        tokens = np.empty((len(starts), count), dtype=np.int64)
        if not tokens.size:
            return tokens
        self._reader.fill(tokens, starts.tolist(), count)
        if int(tokens.max()) >= self.vocab_size:
            # Sound by its checksum: whoever wrote the data set did not check the ids.
            raise ConfigError(
                f"{self.directory}: holds the token id {tokens.max()}, but vocab_size = "
                f"{self.vocab_size}. {rebuild_advice(self._folder.where(MANIFEST))}"
            )
        return tokens

    def _prepare(self) -> None:
        """Compute what the manifest implies, O(shards), and what cannot be pickled."""
        m = self.manifest
        self.documents, self.text_bytes = m.documents, m.text_bytes
        self.vocab_size, self.eos_id = m.vocab_size, m.eos_id
        self.tokenizer_sha256 = m.tokenizer_sha256
        starts = accumulate((corpus.tokens for corpus in m.corpora), initial=0)
        self.corpora = tuple(
            CorpusRange(c.name, start, c.tokens, c.documents, c.text_bytes)
            for c, start in zip(m.corpora, starts)
        )
        self._reader = VerifiedReader(self._folder, m)

    def __getstate__(self) -> dict[str, Any]:
        # The rest is computed again.
        keys = ("directory", "_cache", "_folder", "manifest")
        return {key: self.__dict__[key] for key in keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()


def open_stream(config: RunConfig, split: Split) -> TokenStream:
    """Open a split of the run's data set, which may lie at a URL.

    Raises:
        ConfigError: as TokenStream does, and if data.vocab_size is not the data set's.
        RunFailed: as TokenStream does.
    """
    data = config.data
    directory = f"{data.directory.rstrip('/')}/{split}"
    stream = TokenStream(directory, Cache(data.cache_directory, data.cache_bytes))
    if stream.vocab_size != data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {data.vocab_size}: the data set in "
            f"data.directory = {data.directory} has {stream.vocab_size} pieces. Set "
            f"data.vocab_size={stream.vocab_size}, or choose another data.directory"
        )
    if stream.manifest.split != split:
        raise ConfigError(
            f"{stream.directory}: is the {stream.manifest.split} split of a data set. Put every "
            "split where `pretrain data build` wrote it"
        )
    return stream


def tokenizer_path(config: RunConfig) -> Path:
    """Return the path of the tokenizer of the run's data set, fetched first if it is at a URL."""
    return open_stream(config, "train").tokenizer_path


def check_local(config: RunConfig) -> None:
    """Raise ConfigError if data.directory is a URL, which can be read and not written."""
    _ = config.data_directory
