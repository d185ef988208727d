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
from pretrain.data.files import Descriptor, chunks, missing, read, reading
from pretrain.data.shards import (
    BUILD_RECORD,
    CHECKSUM_BYTES,
    CHECKSUMS,
    HEADER_BYTES,
    MANIFEST,
    PIECE_BYTES,
    Manifest,
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
"""Largest number of open shards, unless a quarter of the limit on open files is less."""

_SCRATCH_PIECES = 128
"""The most pieces that are read in one call, into memory that is used again."""

_UNPACK = [struct.Struct(f"<{n}Q").unpack_from for n in range(_SCRATCH_PIECES + 1)]

_PAGE_BYTES = 4096
"""Bytes of checksums that are read at once."""

_PAGE_CHECKSUMS = _PAGE_BYTES // CHECKSUM_BYTES

_PAGES = 2**14
"""Pages of checksums that are cached: 64 MiB, enough for 32 GiB of tokens, which saves a read of
the disk for each sample. Larger data sets read pages repeatedly."""

xxh3_64 = xxhash.xxh3_64_intdigest


class VerifiedReader:
    """Reads tokens of a split's shards with positioned reads. Thread-safe."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Compute the layout from the manifest in O(shards), without opening shards.

        Args:
            folder: The folder of the split.
            manifest: The split's manifest.
        """
        m = manifest
        self._folder, self._manifest = folder, manifest
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
        self._seeds, done = list[int](), dict[int, int]()
        for shard, count in zip(m.shards, pieces):
            first = done.get(shard.task, 0)
            self._seeds.append(task_seed(m.split, shard.corpus, shard.task) + first)
            done[shard.task] = first + count
        # Least recently used descriptors are closed first. Threads may share the caches, which are
        # C code, and a descriptor is closed only when no thread reads from it.
        self._open = functools.lru_cache(max_open_shards())(
            lambda number: Descriptor(folder / m.shards[number].name)
        )
        checksums = folder / CHECKSUMS
        opened = functools.lru_cache(1)(functools.partial(Descriptor, checksums))
        self._page = functools.lru_cache(_PAGES)(functools.partial(_page, checksums, opened))
        self._scratch = _Scratch(layout.dtype)

    def fill(self, tokens: np.ndarray, starts: list[int], count: int) -> None:
        """Fill each row of `tokens` with `count` tokens of the stream.

        Reading for training spends its time here: a loop over plain integers that calls no Python
        function, around one read of the shard. It handles nearly all samples: those within one
        block whose read returns all bytes, undamaged. `_fill_row` handles all others, and raises
        the errors.

        Args:
            tokens: int64 [n, count].
            starts: The first token of each row.
            count: At least 1.
        """
        per_piece, per_block, pieces_per_block, block_bytes, _ = self._sizes
        bounds, seeds, first_piece = self._starts, self._seeds, self._first_piece
        opened, stored, scratch = self._open, self._page, self._scratch
        content, whole = scratch.tokens, scratch.whole
        preadv = os.preadv
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
                page, first = divmod(first_piece[shard] + number, _PAGE_CHECKSUMS)
                try:
                    # Keep a reference, because another thread may evict the file from the cache.
                    file = opened(shard)
                    received = preadv(file.number, target, offset)
                    checksums = _UNPACK[pieces](stored(page), first * CHECKSUM_BYTES)
                except (OSError, struct.error):
                    received = -1
                if received == pieces * PIECE_BYTES:
                    seed = seeds[shard] + number
                    for view, checksum in zip(views, checksums):
                        if xxh3_64(view, seed) != checksum:
                            break
                        seed += 1
                    else:
                        row[:] = content[skip : skip + count]
                        continue
            self._fill_row(row, start, count)

    def _fill_row(self, row: np.ndarray, start: int, count: int) -> None:
        """Fill `row` with `count` tokens of the stream from `start` on, block by block."""
        per_piece, per_block, *_, itemsize = self._sizes
        starts, done = self._starts, 0
        while done < count:
            shard = bisect_right(starts, start) - 1
            block, first = divmod(start - starts[shard], per_block)
            piece, skip = divmod(first, per_piece)
            # The last block of a shard and the last piece of a block may be short.
            in_block = min(per_block, starts[shard + 1] - start + first)
            taken = min(count - done, in_block - first)
            end = min(in_block, -(-(first + taken) // per_piece) * per_piece)
            size = (end - piece * per_piece) * itemsize
            content = self._read_pieces(shard, block, piece, size)
            tokens = np.frombuffer(content, self._manifest.layout.dtype)[skip:][:taken]
            row[done : done + taken] = tokens
            done += taken
            start += taken

    def _read_pieces(self, shard: int, block: int, piece: int, size: int) -> bytes:
        """Return `size` verified bytes of a block from a piece on.

        Raises:
            ConfigError: They are damaged.
            RunFailed: They cannot be read.
        """
        *_, pieces_per_block, block_bytes, _ = self._sizes
        offset = HEADER_BYTES + block * block_bytes + piece * PIECE_BYTES
        where = self._folder / self._manifest.shards[shard].name
        content = _read(where, lambda: self._open(shard), size, offset)
        for begin in range(0, size, PIECE_BYTES):
            part, whole = content[begin : begin + PIECE_BYTES], min(PIECE_BYTES, size - begin)
            if len(part) != whole:
                problem = f"truncated: {len(part)} of {whole} bytes"
                raise self._damaged(shard, block, offset + begin, problem)
            number = block * pieces_per_block + piece + begin // PIECE_BYTES
            page, place = divmod(self._first_piece[shard] + number, _PAGE_CHECKSUMS)
            stored = self._page(page)[place * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
            checksum = xxh3_64(part, self._seeds[shard] + number)
            if checksum.to_bytes(CHECKSUM_BYTES, "little") != stored:
                problem = f"its checksum is not that in {self._folder / CHECKSUMS}: one of the two"
                problem += " files is damaged"
                raise self._damaged(shard, block, offset + begin, problem)
        return content

    def _damaged(self, shard: int, block: int, offset: int, problem: str) -> ConfigError:
        where = self._folder / self._manifest.shards[shard].name
        return ConfigError(
            f"{where}: damaged: block {block}, {PIECE_BYTES} bytes from byte {offset}: {problem}. "
            f"`pretrain data verify` names every damaged file. {rebuild_advice(where)}"
        )


class _Scratch(threading.local):
    """The memory for reading pieces, separate for each thread."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        content = np.zeros(_SCRATCH_PIECES * PIECE_BYTES, np.uint8)
        self.tokens = content.view(dtype)
        pieces = [content.data[i : i + PIECE_BYTES] for i in range(0, len(content), PIECE_BYTES)]
        self.whole = [
            ([content.data[: n * PIECE_BYTES]], pieces[:n]) for n in range(_SCRATCH_PIECES + 1)
        ]
        """Number of pieces -> memory for them, as one buffer and piece by piece."""


def max_open_shards() -> int:
    """Return how many shards a stream keeps open in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    quarter = MAX_OPEN_SHARDS if soft == resource.RLIM_INFINITY else soft // 4
    return max(1, min(MAX_OPEN_SHARDS, quarter))


def _page(path: Path, opened: Callable[[], Descriptor], number: int) -> bytes:
    """Return a page of checksums, which may be short at the end of the file."""
    return _read(path, opened, _PAGE_BYTES, number * _PAGE_BYTES)


def _read(where: Path, opened: Callable[[], Descriptor], size: int, offset: int) -> bytes:
    """Return `size` bytes of a file of a split, or fewer at its end."""
    try:
        with reading(where):
            return opened().read(size, offset)
    except FileNotFoundError:
        raise missing(where) from None


# ---- Check the sizes and the tokenizer of a split, without reading its shards ----


def problems(folder: Path, manifest: Manifest) -> Iterator[ConfigError]:
    """Yield the problems of a split that sizes and the tokenizer show."""
    yield from wrong_sizes(folder, manifest)
    yield from wrong_tokenizer(folder, manifest)


def wrong_sizes(folder: Path, manifest: Manifest) -> Iterator[ConfigError]:
    """Yield the problems that file sizes show, with one stat per file."""
    try:
        with reading(folder), os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except FileNotFoundError:
        sizes = {}
    expected = [(s.name, s.bytes) for s in manifest.shards]
    for name, size in [(CHECKSUMS, manifest.checksums_bytes), *expected]:
        where, found = folder / name, sizes.get(name)
        if found is None:
            yield missing(where)
        elif found != size:
            problem = "truncated" if found < size else "too long"
            yield ConfigError(
                f"{where}: {problem}: {found} bytes found, {size} expected. {rebuild_advice(where)}"
            )


def wrong_tokenizer(folder: Path, manifest: Manifest) -> Iterator[ConfigError]:
    """Yield the problem of the tokenizer, if any."""
    where = folder.absolute().parent / manifest.tokenizer
    try:
        digest = hashlib.sha256(read(where)).hexdigest()
    except FileNotFoundError:
        yield missing(where, folder / MANIFEST)
        return
    if digest != manifest.tokenizer_sha256:
        yield ConfigError(
            f"{where}: wrong tokenizer: its SHA-256 is {digest}, but the shards of "
            f"{folder} were made with the tokenizer whose SHA-256 is "
            f"{manifest.tokenizer_sha256}. {rebuild_advice(folder / MANIFEST)}"
        )


class TokenStream:
    """Give random access to the tokens of a split, each verified against its checksum.

    `len(stream)` is the number of tokens. Memory and the time to open do not grow with it: the
    position of a token is computed, its shard is found in the manifest, and only the needed
    checksums are read. Files are read with positioned reads rather than mapped, because a mapped
    file that shrinks kills the process without a message. Thread-safe.
    """

    starts: dict[str, int]
    """Corpus -> its first token."""

    def __init__(self, directory: str | Path, *, check_sizes: bool = True) -> None:
        """Open a split and run every check that does not read the shards.

        Args:
            directory: The train/ or validation/ directory of a data set.
            check_sizes: Check the size of every file, which one rank of a node does for the others.

        Raises:
            ConfigError: A file is missing or has another size than in the manifest, the manifest is
                damaged, or the data set's tokenizer did not make the tokens.
            RunFailed: A file exists and cannot be read.
        """
        self.directory = Path(directory)
        self.manifest = m = _load_manifest(self.directory)
        for problem in (problems if check_sizes else wrong_tokenizer)(self.directory, m):
            raise problem
        ends = accumulate((corpus.tokens for corpus in m.corpora), initial=0)
        self.starts = dict(zip((corpus.name for corpus in m.corpora), ends))
        self._reader = VerifiedReader(self.directory, m)

    def __len__(self) -> int:
        return self.manifest.tokens

    @property
    def identity(self) -> str:
        """Return a hex SHA-256 that identifies the tokens: the same for a copy elsewhere.

        It is computed from the manifest, without reading shards. The checksums represent the
        tokens, so it depends on the tasks and on tokens_per_block, but not on the size of shards.
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
    def data_set(self) -> Path:
        """Return the directory of the whole data set."""
        # Absolute, because a split may be given as "train" or "data/..".
        return self.directory.absolute().parent

    @property
    def tokenizer_path(self) -> Path:
        """Return the path of the data set's tokenizer."""
        return self.data_set / self.manifest.tokenizer

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count) as int64 [count], across blocks and shards.

        Raises:
            IndexError: The range is not within the stream.
            ConfigError: A byte in it is damaged, or a shard is missing or too short.
            RunFailed: The operating system cannot read it.
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
            The errors of `read`.
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
        if int(tokens.max()) >= self.manifest.vocab_size:
            # The checksum is right, so whoever wrote the data set did not check the ids.
            raise ConfigError(
                f"{self.directory}: holds the token id {tokens.max()}, but vocab_size = "
                f"{self.manifest.vocab_size}. {rebuild_advice(self.directory / MANIFEST)}"
            )
        return tokens


def open_stream(config: RunConfig, split: Split, *, check_sizes: bool = True) -> TokenStream:
    """Open a split of the run's data set; `check_sizes` as in TokenStream.

    Raises:
        ConfigError: As for TokenStream, or data.vocab_size is not that of the data set.
        RunFailed: As for TokenStream.
    """
    data = config.data
    stream = TokenStream(f"{data.directory.rstrip('/')}/{split}", check_sizes=check_sizes)
    if stream.manifest.vocab_size != data.vocab_size:
        raise ConfigError(
            f"data.vocab_size = {data.vocab_size}: the data set in "
            f"data.directory = {data.directory} has {stream.manifest.vocab_size} pieces. Set "
            f"data.vocab_size={stream.manifest.vocab_size}, or choose another data.directory"
        )
    if stream.manifest.split != split:
        raise ConfigError(
            f"{stream.directory}: is the {stream.manifest.split} split of a data set. Put every "
            "split where `pretrain data build` wrote it"
        )
    return stream


# ---- Read every byte of a data set, and name every damaged file ----


THREADS = 8
"""Files that are read at once, to use the bandwidth of a network file system."""


def verify(directory: str | Path) -> None:
    """Check both splits of a data set and hash every file, several at a time.

    Args:
        directory: The data set.

    Raises:
        ConfigError: Files are missing or damaged; the message names all of them.
    """
    found, todo = list[str](), list[tuple[Path, int, str]]()
    data_set, manifests = Path(directory), list[Manifest]()
    for split in get_args(Split):
        folder = data_set / split
        try:
            m = _load_manifest(folder)
            if m.split != split:
                raise ConfigError(
                    f"{folder / MANIFEST}: is of the {m.split} split. "
                    f"{rebuild_advice(folder / MANIFEST)}"
                )
            found += map(str, problems(folder, m))
            todo.append((folder / CHECKSUMS, m.checksums_bytes, m.checksums_xxh3_128))
            todo += ((folder / shard.name, shard.bytes, shard.xxh3_128) for shard in m.shards)
            manifests.append(m)
        except (ConfigError, RunFailed) as error:
            found.append(str(error))
    try:
        # Without a manifest nothing says which data set the record should be of.
        record = build_record(data_set, *manifests) if manifests else {"files": {}}
        todo += ((data_set / name, *sealed_as) for name, sealed_as in record["files"].items())
    except (ConfigError, RunFailed) as error:
        found.append(str(error))
    found += _damaged(todo, known=found)
    if found:
        # Without repetitions: both splits may report the same missing tokenizer.
        raise ConfigError("\n".join(dict.fromkeys(found)))


def _load_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return parse_manifest(read(path), path)
    except FileNotFoundError:
        raise missing_data_set(path) from None


def build_record(data_set: Path, *manifests: Manifest) -> Json:
    """Return the content of build.json, after checking that it belongs to these manifests.

    Raises:
        ConfigError: build.json is missing or damaged, or of another data set.
    """
    where = data_set / BUILD_RECORD
    advice = rebuild_advice(where)
    try:
        record = unsealed(read(where))
    except FileNotFoundError:
        raise ConfigError(f"{where}: missing. {advice}") from None
    # A manifest is sealed too, but has no "files".
    if record is None or "files" not in record:
        raise ConfigError(f"{where}: damaged: its content is not that of its SHA-256. {advice}")
    for manifest in manifests:
        digest = xxhash.xxh3_128_hexdigest(manifest.text().encode())
        name = f"{manifest.split}/{MANIFEST}"
        if record["files"][name][1] != digest:
            raise ConfigError(f"{where}: is of another data set than {data_set / name}. {advice}")
    return record


def _damaged(todo: list[tuple[Path, int, str]], known: list[str]) -> list[str]:
    """Return a message for every damaged file.

    Args:
        todo: The path, size and XXH3-128 of each file.
        known: Messages that begin with the name of a file; such files are not read.
    """
    named = {message.partition(": ")[0] for message in known}
    todo = [each for each in todo if str(each[0]) not in named]
    total = sum(size for _, size, _ in todo)
    # disable=None draws the bar on a terminal and nothing into a log file.
    with (
        tqdm(desc="verify", total=total, unit="B", unit_scale=True, disable=None) as bar,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        results = pool.map(lambda each: _problem(each[0], each[2], bar.update), todo)
        return [message for message in results if message]


def _problem(path: Path, expected: str, seen: Callable[[int], object]) -> str | None:
    """Hash a file; return a message if it cannot be read or has another digest."""
    digest = xxhash.xxh3_128()
    try:
        for chunk in chunks(path):
            digest.update(chunk)
            seen(len(chunk))
    except FileNotFoundError:
        return str(missing(path))
    except RunFailed as error:
        return str(error)
    if digest.hexdigest() == expected:
        return None
    return (
        f"{path}: damaged: its XXH3-128 is {digest.hexdigest()}, but the manifest says "
        f"{expected}. {rebuild_advice(path)}"
    )
