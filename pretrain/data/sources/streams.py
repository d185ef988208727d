"""Open files as streams of the bytes they hold, unpacked where they are compressed."""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from pretrain.config import ConfigError
from pretrain.data.sources.corpus import Piece
from pretrain.data.sources.locations import open_stored, stored_size

_STEP_BYTES = 2048
"""Packed bytes that are unpacked at once. At the highest ratio of any format (zstd: 1 to 32,768)
they unpack to 64 MiB."""


class Damaged(Exception):
    """The rest of a stream cannot be read."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason


class Compression(NamedTuple):
    """A format of compressed files."""

    suffix: str
    """End of the names of such files."""

    magic: tuple[bytes, ...]
    """What such files begin with."""

    unpacker: Callable[[], tuple[Any, type[Exception]]]
    """Returns a new decompressor of one member, and the error that it raises."""


def _zstandard() -> tuple[Any, type[Exception]]:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            ".zst files: the package zstandard is missing. Run `pip install 'pretrain[data]'`"
        ) from None
    # Files of `zstd --long=31` want the largest window that there is.
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    return unpacker, zstandard.ZstdError


_BZ2_BLOCKS = (b"\x31\x41\x59\x26\x53\x59", b"\x17\x72\x45\x38\x50\x90")

COMPRESSIONS = (
    Compression(".gz", (b"\x1f\x8b\x08",), lambda: (zlib.decompressobj(31), zlib.error)),
    Compression(".xz", (b"\xfd7zXZ\0",), lambda: (lzma.LZMADecompressor(), lzma.LZMAError)),
    Compression(
        ".zst",
        (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
        _zstandard,
    ),
    Compression(
        ".bz2",
        tuple(b"BZh%d" % level + block for level in range(1, 10) for block in _BZ2_BLOCKS),
        lambda: (bz2.BZ2Decompressor(), OSError),
    ),
)
_MAGIC_BYTES = max(len(magic) for c in COMPRESSIONS for magic in c.magic)


def compression_of(path: str) -> Compression | None:
    """Return the compression that the name of a file tells, or None."""
    return next((c for c in COMPRESSIONS if path.endswith(c.suffix)), None)


def end_of(piece: Piece) -> int:
    """Return the offset in the unpacked stream before which the documents of a piece start."""
    return sys.maxsize if compression_of(piece.path) else piece.end


def open_piece(piece: Piece) -> io.BufferedReader:
    """Open the file of a piece as a stream of the bytes that it holds, from its beginning.

    The stream raises Damaged where its compressed data are damaged or end too early.

    Raises:
        ConfigError: if the file is missing, is shorter than planned, or is not compressed as its
            name says.
    """
    check_size(piece)
    stored = open_stored(piece.path)
    named = compression_of(piece.path)
    head = stored.read(_MAGIC_BYTES)
    actual = next((c for c in COMPRESSIONS if head.startswith(c.magic)), None)
    if named is not actual:
        stored.close()
        is_now = f"holds {actual.suffix} data" if actual else f"does not hold {named.suffix} data"  # type: ignore[union-attr]
        raise ConfigError(
            f"{piece.path}:0: the file {is_now} (it begins with {head!r}), unlike its name says. "
            "Rename it after its content, or restore it"
        )
    stored.seek(0)
    if named is None:
        return stored
    return io.BufferedReader(_Unpacked(stored, named), 2**18)


def check_size(piece: Piece) -> None:
    """Raise ConfigError if the file of a piece no longer reaches to where the piece ends."""
    size = stored_size(piece.path)
    if size < piece.end:
        raise shrunk(piece, size)


def shrunk(piece: Piece, size: int) -> ConfigError:
    """Return the error that a file has become shorter than it was when the tasks were planned."""
    return ConfigError(
        f"{piece.path}:{size}: the file ends here, and had at least {piece.end} bytes when the "
        "build was planned. Restore it, or build the data set anew"
    )


class _Unpacked(io.RawIOBase):
    """The content of a compressed file, unpacked member after member.

    Python's own readers end silently at a damaged second member (lzma, bz2), and zstandard's at
    data that end too early.
    """

    def __init__(self, stored: io.BufferedReader, compression: Compression) -> None:
        self._stored = stored
        self._compression = compression
        self._unpacker: Any = None
        # None between two members.
        self._error: type[Exception] = OSError
        self._packed = b""
        self._unpacked = memoryview(b"")
        self._offset = 0
        # Bytes that were handed out.

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stored.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Unpack into `buffer` and return the number of bytes; 0 at the end."""
        while not self._unpacked:
            if not self._packed:
                self._packed = self._stored.read(_STEP_BYTES)
            if not self._packed:
                if self._unpacker is None:
                    return 0
                raise Damaged(self._offset, f"the {self._compression.suffix} data end too early")
            self._unpack()
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        self._offset += count
        return count

    def _unpack(self) -> None:
        """Unpack the packed bytes at hand, up to the end of their member."""
        if self._unpacker is None:
            # A file may be padded with zeros to the size of a tape block.
            self._packed = self._packed.lstrip(b"\0")
            if not self._packed:
                return
            self._unpacker, self._error = self._compression.unpacker()
        try:
            self._unpacked = memoryview(self._unpacker.decompress(self._packed))
        except self._error as error:
            suffix = self._compression.suffix
            raise Damaged(self._offset, f"the {suffix} data are damaged ({error})") from None
        if self._unpacker.eof:
            self._packed, self._unpacker = self._unpacker.unused_data, None
        else:
            self._packed = b""
