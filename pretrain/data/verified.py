"""Read ranges of tokens from the shards of a split, each piece verified against its checksum."""

from __future__ import annotations

import functools
import os
import resource
import struct
import threading
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

from pretrain.config import ConfigError
from pretrain.data.files import Folder, missing, unreadable
from pretrain.data.layout import CHECKSUM_BYTES, HEADER_BYTES, PIECE_BYTES, task_seed
from pretrain.data.manifest import CHECKSUMS, Manifest, Shard, rebuild_advice

MAX_OPEN_SHARDS = 256
"""A stream keeps no more shards open, and no more than a quarter of what the process may open."""

_SCRATCH_PIECES = 128
"""Pieces that one system call reads at most. It takes no more than 1,024 (IOV_MAX)."""

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
            self._fill_row(row, start, count, scratch)

    def _fill_row(self, row: np.ndarray, start: int, count: int, scratch: _Scratch) -> None:
        """Fill `row` with `count` tokens from `start`, which lie in the stream.

        Whole pieces are read into the scratch and compared with their checksums, across blocks and
        shards.
        """
        per_piece, per_block, pieces_per_block, block_bytes, itemsize = self._sizes
        starts, done = self._starts, 0
        while done < count:
            shard = bisect_right(starts, start) - 1
            block, first = divmod(start - starts[shard], per_block)
            piece, skip = divmod(first, per_piece)
            # Up to the end of the block, of what is wanted, and of the scratch.
            end = min(per_block, starts[shard + 1] - start + first)
            last = min(first + count - done, end)
            pieces = -(-last // per_piece) - piece
            if pieces > _SCRATCH_PIECES:
                pieces, last = _SCRATCH_PIECES, (piece + _SCRATCH_PIECES) * per_piece
            lacking = (piece + pieces) * per_piece - end
            if lacking <= 0:
                size, (target, views) = pieces * PIECE_BYTES, scratch.whole[pieces]
            else:
                size = pieces * PIECE_BYTES - lacking * itemsize
                target, views = scratch.views(size)
            offset = HEADER_BYTES + block * block_bytes + piece * PIECE_BYTES
            number = block * pieces_per_block + piece
            try:
                file = self._open(shard)
                received = os.preadv(file.number, target, offset)
                # A network file system may return less than there is. Nothing at all is the end.
                while 0 < received < size and (
                    more := os.preadv(file.number, [target[0][received:]], offset + received)
                ):
                    received += more
            except OSError as error:
                raise unreadable(self._where(shard), error) from error
            if received != size:
                problem = f"truncated: {received} of {size} bytes"
                raise self._damaged(shard, block, offset, problem)
            seed = self._seeds[shard] + number
            checksums = self._expected(self._first_piece[shard] + number, pieces)
            for view, checksum in zip(views, checksums):
                if xxh3_64(view, seed) != checksum:
                    self._check_checksums()
                    offset += (seed - number - self._seeds[shard]) * PIECE_BYTES
                    raise self._damaged(shard, block, offset, "its checksum differs")
                seed += 1
            taken = last - first
            row[done : done + taken] = scratch.tokens[skip : skip + taken]
            done += taken
            start += taken

    def _expected(self, first: int, count: int) -> tuple[int, ...]:
        """Return checksums [first, first + count)."""
        size, offset = count * CHECKSUM_BYTES, first * CHECKSUM_BYTES
        try:
            file = self._opened_checksums()
            content = os.pread(file.number, size, offset)
        except OSError as error:
            raise unreadable(self._folder.where(CHECKSUMS), error) from error
        if len(content) != size:
            where = self._folder.where(CHECKSUMS)
            raise ConfigError(f"{where}: truncated at byte {offset}. {rebuild_advice(where)}")
        return _UNPACK[count](content)

    def _opened_checksums(self) -> _Descriptor:
        m = self._manifest
        if self._checksums is None:
            try:
                self._checksums = _Descriptor(
                    self._folder, CHECKSUMS, m.checksums_bytes, m.checksums_xxh3_128
                )
            except OSError as error:
                raise unreadable(self._folder.where(CHECKSUMS), error) from error
        return self._checksums

    def _check_checksums(self) -> None:
        """Raise ConfigError if it is checksums.bin that is damaged, rather than a shard."""
        digest, offset = xxhash.xxh3_128(), 0
        while chunk := os.pread(self._opened_checksums().number, 1 << 22, offset):
            digest.update(chunk)
            offset += len(chunk)
        if digest.hexdigest() != self._manifest.checksums_xxh3_128:
            expected = self._manifest.checksums_xxh3_128
            raise ConfigError(
                f"{self._folder.where(CHECKSUMS)}: damaged: its XXH3-128 is {digest.hexdigest()}, "
                f"but the manifest says {expected}. {self._folder.remedy(CHECKSUMS, expected)}"
            )

    def _damaged(self, shard: int, block: int, offset: int, problem: str) -> ConfigError:
        name, digest = self._manifest.shards[shard].name, self._manifest.shards[shard].xxh3_128
        return ConfigError(
            f"{self._folder.where(name)}: damaged: block {block}, {PIECE_BYTES} bytes from byte "
            f"{offset}: {problem}. {self._folder.remedy(name, digest)}"
        )

    def _where(self, shard: int) -> str:
        return self._folder.where(self._manifest.shards[shard].name)


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
        self._all = content.data
        self._pieces = [self._all[i : i + PIECE_BYTES] for i in range(0, len(content), PIECE_BYTES)]
        self.whole = [self.views(n * PIECE_BYTES) for n in range(_SCRATCH_PIECES + 1)]
        """Number of pieces -> `views` of so many whole ones, made once."""

    def views(self, size: int) -> tuple[list[memoryview], list[memoryview]]:
        """Return the first `size` bytes as one buffer to read into, and cut into pieces."""
        whole, rest = divmod(size, PIECE_BYTES)
        pieces = self._pieces[:whole]
        return [self._all[:size]], [*pieces, self._pieces[whole][:rest]] if rest else pieces


def max_open_shards() -> int:
    """Return how many shards a stream keeps open in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    quarter = MAX_OPEN_SHARDS if soft == resource.RLIM_INFINITY else soft // 4
    return max(1, min(MAX_OPEN_SHARDS, quarter))


def _open_shard(files: Folder, shards: tuple[Shard, ...], number: int) -> _Descriptor:
    shard = shards[number]
    return _Descriptor(files, shard.name, shard.bytes, shard.xxh3_128)
