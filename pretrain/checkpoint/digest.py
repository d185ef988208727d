"""Hash a stream in blocks, as `BlockWriter` hashes a file, for what is read from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash

from pretrain.checkpoint.blocks import BLOCK_BYTES, FileRecord


class _Hasher:
    """Hash a stream in blocks, as `BlockWriter` does, without a file."""

    def __init__(self) -> None:
        self.bytes, self.digests = 0, list[str]()
        self._block = xxhash.xxh3_128()

    def update(self, data: bytes) -> None:
        """Add bytes to the stream."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            self._block.update(part)
            self.bytes += len(part)
            if self.bytes % BLOCK_BYTES == 0:
                self._end()
            view = view[len(part) :]

    def finish(self, name: str) -> FileRecord:
        """Return the record of a file that holds the stream."""
        if self.bytes % BLOCK_BYTES:
            self._end()
        return FileRecord(name, self.bytes, tuple(self.digests))

    def _end(self) -> None:
        self.digests.append(self._block.hexdigest())
        self._block.reset()


def digest(
    name: str, pieces: Iterable[bytes], done: Callable[[int], None] | None = None
) -> FileRecord:
    """Return the record that a file with this content has.

    Args:
        name: The file's name.
        pieces: Its content, in pieces of any size.
        done: Is told how many bytes have been hashed since the last call.
    """
    hasher = _Hasher()
    for piece in pieces:
        hasher.update(piece)
        if done is not None:
            done(len(piece))
    return hasher.finish(name)
