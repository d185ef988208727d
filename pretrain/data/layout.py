"""Compute where the tokens of a split lie in its files, and how their bytes are checksummed.

A shard is a plain tar of webdataset samples, one block of tokens each. Every size in it follows
from the number of tokens, so no index is stored and none is read:

    header of the member (512 bytes), header of NumPy (128), tokens, zeros up to a multiple of 512

The checksums of a split are XXH3-64 of every 4 KiB of every block's tokens, in stream order. They
are kept beside the shards, so that the shards remain what any tool for webdatasets expects.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xxhash

PIECE_BYTES = 4096
"""Bytes of tokens under one checksum. The last piece of a block may be shorter. A random sample of
1,025 tokens of two bytes touches 1.5 pieces: larger ones would be read in vain."""

CHECKSUM_BYTES = 8

_TAR_UNIT = 512
_TAR_RECORD = 10_240
"""Tar files are padded to a multiple of this."""

_NPY_HEADER = 128

HEADER_BYTES = _TAR_UNIT + _NPY_HEADER
"""Bytes of a block before its tokens."""


class Layout(NamedTuple):
    """The arithmetic of one split."""

    dtype: np.dtype[np.unsignedinteger]
    """uint16 or uint32, little-endian."""

    tokens_per_block: int

    @classmethod
    def of(cls, vocab_size: int, tokens_per_block: int) -> Layout:
        """Return the layout for a vocabulary: two bytes a token up to 65,536 ids, else four."""
        return cls(np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4"), tokens_per_block)

    @property
    def tokens_per_piece(self) -> int:
        """Return the number of tokens under one checksum."""
        return PIECE_BYTES // self.dtype.itemsize

    @property
    def pieces_per_block(self) -> int:
        """Return the number of checksums of a full block."""
        return -(-self.tokens_per_block // self.tokens_per_piece)

    @property
    def block_bytes(self) -> int:
        """Return the bytes from one full block of a shard to the next."""
        return self._member_bytes(self.tokens_per_block)

    def shard_bytes(self, tokens: int) -> int:
        """Return the size of a tar with so many tokens, whose last block may be short."""
        blocks, rest = divmod(tokens, self.tokens_per_block)
        size = blocks * self.block_bytes + (self._member_bytes(rest) if rest else 0)
        # Two empty units end a tar.
        return _round_up(size + 2 * _TAR_UNIT, _TAR_RECORD)

    def pieces(self, tokens: int) -> int:
        """Return the number of checksums of so many tokens, cut into blocks."""
        blocks, rest = divmod(tokens, self.tokens_per_block)
        return blocks * self.pieces_per_block - (-rest // self.tokens_per_piece)

    def _member_bytes(self, tokens: int) -> int:
        return (
            HEADER_BYTES
            + _round_up(_NPY_HEADER + tokens * self.dtype.itemsize, _TAR_UNIT)
            - (_NPY_HEADER)
        )


def task_seed(split: str, corpus: str, task: int) -> int:
    """Return the number that the checksums of a task's pieces are seeded with.

    The seed of a piece is this plus its number in the task. Bytes that are sound but stand in the
    wrong place (two shards or two blocks swapped) therefore fail.
    """
    # 63 bits, so that adding the number of a piece never exceeds 64.
    return xxhash.xxh3_64_intdigest(f"{split}/{corpus}/{task}".encode()) >> 1


def checksums(block: np.ndarray, seed: int) -> np.ndarray:
    """Return the checksums of a block's pieces.

    Args:
        block: The tokens as stored, [n].
        seed: The seed of the block's first piece.

    Returns:
        uint64 [pieces], little-endian.
    """
    content = block.tobytes()
    return np.array(
        [
            xxhash.xxh3_64_intdigest(content[start : start + PIECE_BYTES], seed + number)
            for number, start in enumerate(range(0, len(content), PIECE_BYTES))
        ],
        dtype="<u8",
    )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
