"""Read a split of a built data set as one long array of tokens."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import numpy as np
import xxhash
from tqdm import tqdm

from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.config.run import is_url
from pretrain.data.files import Cache, Folder, folder, missing, reading
from pretrain.data.shards import (
    BUILD_RECORD,
    CHECKSUM_BYTES,
    CHECKSUMS,
    HEADER_BYTES,
    MANIFEST,
    PIECE_BYTES,
    CorpusRecord,
    Manifest,
    Shard,
    Split,
    missing_data_set,
    parse_manifest,
    rebuild_advice,
    task_seed,
    unsealed,
)
from pretrain.rundir.files import Json

# ---- verified ----
# Read ranges of tokens from the shards of a split, each piece verified against its checksum.


MAX_OPEN_SHARDS = 256
"""A stream keeps no more shards open, and no more than a quarter of what the process may open."""

_SCRATCH_PIECES = 128
"""The most pieces that are read in one call, into memory that is used again."""

_UNPACK = [struct.Struct(f"<{n}Q").unpack for n in range(_SCRATCH_PIECES + 1)]

xxh3_64 = xxhash.xxh3_64_intdigest


class VerifiedReader:
    """Reads tokens of a split's shards with positioned reads. Several threads may read."""

    def __init__(self, files: Folder, manifest: Manifest) -> None:
        """Compute what the manifest implies, O(shards). Nothing is opened.

        Args:
            files: The folder of the split.
            manifest: The split's manifest.
        """
        m = manifest
        self._folder, self._manifest = files, manifest
        layout = m.layout
        self._sizes = (
            layout.tokens_per_piece,
            layout.tokens_per_block,
            layout.pieces_per_block,
            layout.block_bytes,
            layout.dtype.itemsize,
        )
        self._starts = list(accumulate((shard.tokens for shard in m.shards), initial=0))
        pieces = [layout.pieces(shard.tokens) for shard in m.shards]
        self._first_piece = list(accumulate(pieces, initial=0))
        self._seeds = []
        task_piece = 0
        for number, shard in enumerate(m.shards):
            if number and shard.task == m.shards[number - 1].task:
                task_piece += pieces[number - 1]
            else:
                task_piece = 0
            self._seeds.append(task_seed(m.split, shard.corpus, shard.task) + task_piece)
        # Least recently used descriptors are closed first. The cache is C code that threads may
        # share, and a descriptor is closed only when nobody reads from it any more.
        self._open = functools.lru_cache(max_open_shards())(
            functools.partial(_open_shard, self._folder, m.shards)
        )
        self._checksums: _Descriptor | None = None
        self._scratch = _Scratch(layout.dtype)

    def fill(self, tokens: np.ndarray, starts: list[int], count: int) -> None:
        """Fill each row of `tokens` with `count` tokens, which lie in the stream.

        This is where training's reading spends its time: a loop over plain integers that calls no
        Python function, around one read of the shard and one of the checksums. It serves what
        nearly every sample is, whole pieces of one block that arrive at once and sound. `_fill_row`
        serves everything else, and says what is wrong with it.

        Args:
            tokens: int64 [n, count].
            starts: The first token of each row.
            count: At least 1.
        """
        per_piece, per_block, pieces_per_block, block_bytes, _ = self._sizes
        bounds, seeds, first_piece = self._starts, self._seeds, self._first_piece
        opened, stored, scratch = self._open, self._opened_checksums(), self._scratch
        content, whole = scratch.tokens, scratch.whole
        preadv, pread = os.preadv, os.pread
        for row, start in zip(tokens, starts):
            shard = bisect_right(bounds, start) - 1
            block, first = divmod(start - bounds[shard], per_block)
            piece, skip = divmod(first, per_piece)
            pieces = -(-(first + count) // per_piece) - piece
            end = (piece + pieces) * per_piece
            if (
                end <= per_block
                and start - first + end <= bounds[shard + 1]
                and pieces <= _SCRATCH_PIECES
            ):
                number = block * pieces_per_block + piece
                offset = HEADER_BYTES + block * block_bytes + piece * PIECE_BYTES
                target, views = whole[pieces]
                try:
                    # Held while it is read from: another thread may push it out of the open ones.
                    file = opened(shard)
                    received = preadv(file.number, target, offset)
                    checksums = pread(
                        stored.number,
                        pieces * CHECKSUM_BYTES,
                        (first_piece[shard] + number) * CHECKSUM_BYTES,
                    )
                except OSError:
                    received = -1
                if received == pieces * PIECE_BYTES and len(checksums) == pieces * CHECKSUM_BYTES:
                    seed = seeds[shard] + number
                    for view, checksum in zip(views, _UNPACK[pieces](checksums)):
                        if xxh3_64(view, seed) != checksum:
                            break
                        seed += 1
                    else:
                        row[:] = content[skip : skip + count]
                        continue
            self._fill_row(row, start, count)

    def _fill_row(self, row: np.ndarray, start: int, count: int) -> None:
        """Fill `row` with `count` tokens from `start`, which lie in the stream, piece by piece."""
        per_piece, per_block, *_, itemsize = self._sizes
        starts, done = self._starts, 0
        while done < count:
            shard = bisect_right(starts, start) - 1
            block, first = divmod(start - starts[shard], per_block)
            piece, skip = divmod(first, per_piece)
            # The last block of a shard and the last piece of a block may be short.
            in_block = min(per_block, starts[shard + 1] - start + first)
            size = min(per_piece, in_block - piece * per_piece) * itemsize
            content = self._read_piece(shard, block, piece, size)
            tokens = np.frombuffer(content, self._manifest.layout.dtype)[skip:][: count - done]
            row[done : done + len(tokens)] = tokens
            done += len(tokens)
            start += len(tokens)

    def _read_piece(self, shard: int, block: int, piece: int, size: int) -> bytes:
        """Return a piece of a block, of `size` bytes, as it was written.

        Raises:
            ConfigError: It is damaged.
            RunFailed: It cannot be read.
        """
        *_, pieces_per_block, block_bytes, _ = self._sizes
        offset = HEADER_BYTES + block * block_bytes + piece * PIECE_BYTES
        name = self._manifest.shards[shard].name
        content = self._pread(name, lambda: self._open(shard), size, offset)
        if len(content) != size:
            problem = f"truncated: {len(content)} of {size} bytes"
            raise self._damaged(shard, block, offset, problem)
        number = block * pieces_per_block + piece
        place = (self._first_piece[shard] + number) * CHECKSUM_BYTES
        stored = self._pread(CHECKSUMS, self._opened_checksums, CHECKSUM_BYTES, place)
        checksum = xxh3_64(content, self._seeds[shard] + number)
        if checksum.to_bytes(CHECKSUM_BYTES, "little") != stored:
            problem = f"its checksum is not that in {self._folder.where(CHECKSUMS)}: one of the two"
            raise self._damaged(shard, block, offset, f"{problem} files is damaged")
        return content

    def _pread(self, name: str, opened: Callable[[], _Descriptor], size: int, offset: int) -> bytes:
        """Return `size` bytes of a file, or fewer at its end."""
        content = b""
        with reading(self._folder.where(name)):
            file = opened()
            # A network file system may return less than there is. Nothing at all is the end.
            while more := os.pread(file.number, size - len(content), offset + len(content)):
                content += more
        return content

    def _opened_checksums(self) -> _Descriptor:
        m = self._manifest
        if self._checksums is None:
            with reading(self._folder.where(CHECKSUMS)):
                self._checksums = _Descriptor(
                    self._folder, CHECKSUMS, m.checksums_bytes, m.checksums_xxh3_128
                )
        return self._checksums

    def _damaged(self, shard: int, block: int, offset: int, problem: str) -> ConfigError:
        where = self._folder.where(self._manifest.shards[shard].name)
        return ConfigError(
            f"{where}: damaged: block {block}, {PIECE_BYTES} bytes from byte {offset}: {problem}. "
            f"{self._folder.remedy(where)}"
        )


class _Descriptor:
    """An open file, closed when the last one who uses it lets go."""

    def __init__(self, files: Folder, name: str, size: int, digest: str) -> None:
        try:
            self.number = files.descriptor(name, size, digest)
        except FileNotFoundError:
            raise missing(files.where(name)) from None

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class _Scratch(threading.local):
    """The memory that pieces are read into, one for each thread."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        content = np.zeros(_SCRATCH_PIECES * PIECE_BYTES, np.uint8)
        self.tokens = content.view(dtype)
        pieces = [content.data[i : i + PIECE_BYTES] for i in range(0, len(content), PIECE_BYTES)]
        self.whole = [
            ([content.data[: n * PIECE_BYTES]], pieces[:n]) for n in range(_SCRATCH_PIECES + 1)
        ]
        """Number of pieces -> so many of them as one buffer to read into, and one by one."""


def max_open_shards() -> int:
    """Return how many shards a stream keeps open in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    quarter = MAX_OPEN_SHARDS if soft == resource.RLIM_INFINITY else soft // 4
    return max(1, min(MAX_OPEN_SHARDS, quarter))


def _open_shard(files: Folder, shards: tuple[Shard, ...], number: int) -> _Descriptor:
    shard = shards[number]
    return _Descriptor(files, shard.name, shard.bytes, shard.xxh3_128)


# ---- Check a split as far as sizes and the tokenizer tell, without reading its shards ----


def problems(files: Folder, manifest: Manifest) -> Iterator[ConfigError]:
    """Yield what is wrong with a split as far as sizes and the tokenizer tell."""
    try:
        sizes = files.sizes()
    except FileNotFoundError:
        sizes = {}
    expected = [(s.name, s.bytes) for s in manifest.shards]
    for name, size in [(CHECKSUMS, manifest.checksums_bytes), *expected]:
        where, found = files.where(name), sizes.get(name)
        if found is None:
            yield missing(where)
        elif found != size:
            problem = "truncated" if found < size else "too long"
            yield ConfigError(
                f"{where}: {problem}: {found} bytes found, {size} expected. {rebuild_advice(where)}"
            )
    parent = files.parent()
    where = parent.where(manifest.tokenizer)
    try:
        digest = hashlib.sha256(parent.read(manifest.tokenizer)).hexdigest()
    except FileNotFoundError:
        yield missing(where, files.where(MANIFEST))
        return
    if digest != manifest.tokenizer_sha256:
        yield ConfigError(
            f"{where}: wrong tokenizer: its SHA-256 is {digest}, but the shards of "
            f"{files.location} were made with the tokenizer whose SHA-256 is "
            f"{manifest.tokenizer_sha256}. {rebuild_advice(files.where(MANIFEST))}"
        )


class TokenStream:
    """Give random access to the tokens of a split, each verified against its checksum.

    `len(stream)` is the number of tokens. Memory and the time to open do not grow with it: the
    position of a token is computed, the shard it is in is found among the manifest's, and of the
    checksums those are read that are needed. The files are read with positioned reads rather than
    mapped, because a mapped file that shrinks kills the process without a word. Several threads may
    read.
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

    corpora: tuple[CorpusRecord, ...]
    """The corpora, in the order of the stream."""

    starts: dict[str, int]
    """Corpus -> its first token."""

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
        self.files = folder(directory, cache)
        self.manifest = m = _load_manifest(self.files)
        for problem in problems(self.files, m):
            raise problem
        self.documents, self.text_bytes, self.corpora = m.documents, m.text_bytes, m.corpora
        self.vocab_size, self.eos_id = m.vocab_size, m.eos_id
        self.tokenizer_sha256 = m.tokenizer_sha256
        ends = accumulate((corpus.tokens for corpus in m.corpora), initial=0)
        self.starts = dict(zip((corpus.name for corpus in m.corpora), ends))
        self._reader = VerifiedReader(self.files, m)

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
        return self.files.parent().location

    @property
    def tokenizer_path(self) -> Path:
        """Return the path of the data set's tokenizer, fetched first if it is at a URL."""
        parent = self.files.parent()
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
                f"{self.vocab_size}. {rebuild_advice(self.files.where(MANIFEST))}"
            )
        return tokens


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


# ---- Read every byte of a data set and name every file that is not as it was written ----


THREADS = 8
"""Hashing is faster than one disk; several reads at once make a network file system busy."""


def verify(directory: str | Path, cache: Cache | None = None) -> None:
    """Check both splits of a data set and hash every file, several at a time.

    Args:
        directory: The data set, or its URL; then every byte is fetched, and none is kept.
        cache: As TokenStream's.

    Raises:
        ConfigError: naming every file that is missing or damaged.
    """
    found: list[str] = []
    splits: list[tuple[Folder, Manifest]] = []
    for split in get_args(Split):
        files = folder(f"{str(directory).rstrip('/')}/{split}", cache)
        try:
            manifest = _load_manifest(files)
            if manifest.split != split:
                raise ConfigError(
                    f"{files.where(MANIFEST)}: is of the {manifest.split} split. "
                    f"{rebuild_advice(files.where(MANIFEST))}"
                )
            found += map(str, problems(files, manifest))
            splits.append((files, manifest))
        except (ConfigError, RunFailed) as error:
            found.append(str(error))
    others = list[tuple[Folder, str, str]]()
    if splits:
        data_set = splits[0][0].parent()
        try:
            record = build_record(data_set, *(manifest for _, manifest in splits))
            others += [(data_set, name, digest) for name, (_, digest) in record["files"].items()]
        except (ConfigError, RunFailed) as error:
            found.append(str(error))
    found += _damaged(splits, others, known=found)
    if found:
        # Both splits may miss the same tokenizer.
        raise ConfigError("\n".join(dict.fromkeys(found)))


def _load_manifest(files: Folder) -> Manifest:
    try:
        return parse_manifest(files.read(MANIFEST), files.where(MANIFEST))
    except FileNotFoundError:
        raise missing_data_set(files.where(MANIFEST)) from None


def build_record(data_set: Folder, *manifests: Manifest) -> Json:
    """Return the content of build.json, which is that of these manifests.

    Raises:
        ConfigError: It is missing or damaged, or of another data set.
    """
    where = data_set.where(BUILD_RECORD)
    advice = rebuild_advice(data_set.where(f"{manifests[0].split}/{MANIFEST}"))
    try:
        record = unsealed(data_set.read(BUILD_RECORD))
    except FileNotFoundError:
        raise ConfigError(f"{where}: missing. {advice}") from None
    if record is None:
        raise ConfigError(f"{where}: damaged: its content is not that of its SHA-256. {advice}")
    for manifest in manifests:
        digest = xxhash.xxh3_128_hexdigest(manifest.text().encode())
        name = f"{manifest.split}/{MANIFEST}"
        if record["files"][name][1] != digest:
            raise ConfigError(
                f"{where}: is of another data set than {data_set.where(name)}. {advice}"
            )
    return record


def _damaged(
    splits: list[tuple[Folder, Manifest]],
    others: list[tuple[Folder, str, str]],
    known: list[str],
) -> list[str]:
    """Return a message for every file whose digest is wrong, except those in `known`.

    Args:
        splits: Their shards and checksums are read,
        others: and these files, by name and digest.
        known: Messages that begin with the name of a file.
    """
    todo = [
        (files, name, digest)
        for files, m in splits
        for name, digest in [
            (CHECKSUMS, m.checksums_xxh3_128),
            *((shard.name, shard.xxh3_128) for shard in m.shards),
        ]
    ]
    named = {message.partition(": ")[0] for message in known}
    todo = [each for each in [*todo, *others] if each[0].where(each[1]) not in named]
    total = sum(m.checksums_bytes + sum(s.bytes for s in m.shards) for _, m in splits)
    # disable=None draws the bar on a terminal and nothing into a log file.
    with (
        tqdm(desc="verify", total=total, unit="B", unit_scale=True, disable=None) as bar,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        results = pool.map(lambda each: _problem(each[0], each[1], each[2], bar.update), todo)
        return [message for message in results if message]


def _problem(files: Folder, name: str, expected: str, seen: Callable[[int], object]) -> str | None:
    """Hash a file; return a message if it cannot be read or has another digest."""
    where = files.where(name)
    digest = xxhash.xxh3_128()
    try:
        for chunk in files.chunks(name):
            digest.update(chunk)
            seen(len(chunk))
    except FileNotFoundError:
        return str(missing(where))
    except RunFailed as error:
        return str(error)
    if digest.hexdigest() == expected:
        return None
    return (
        f"{where}: damaged: its XXH3-128 is {digest.hexdigest()}, but the manifest says "
        f"{expected}. {rebuild_advice(where)}"
    )
