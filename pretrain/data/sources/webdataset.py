"""Read documents from webdataset tars: one a sample, in the member with a given extension.

Adjacent members whose names agree up to the first dot of their last part are one sample. The tar is
read as a stream, and nothing is ever written to a disk.
"""

from __future__ import annotations

import codecs
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from pretrain.data.sources import base
from pretrain.data.sources.base import (
    Corpus,
    Damaged,
    Found,
    Piece,
    Source,
    decoded,
    register,
    too_long,
)
from pretrain.data.sources.files import open_piece
from pretrain.data.sources.plain import parse_json

_PICKLES = ("pickle", "pkl", "pyd", "pt", "pth")
"""Extensions of members that run code when they are loaded. They are refused, though no member but
the text is looked at: no corpus of text has a reason to hold one."""

_MAX_HEADER_BYTES = 2**20
"""Longest name or extended header that is read."""

_LONG_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


@register
class Webdataset(Source):
    """A tar of samples. A document's field is the extension of the member that holds it."""

    name = "webdataset"
    endings = (".tar",)
    text_field = "txt"
    text_per_byte = 1.0

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield the documents of a tar, whose offsets are sample numbers."""
        wanted = self.field(corpus).lower()
        number, key = -1, None
        sample: Found | None = None
        with open_piece(piece) as stream:
            tar = _Tar(stream)
            try:
                for member in tar.members():
                    if member.isdir():
                        continue
                    new_key, extension = _split(member.name)
                    if new_key != key:
                        if key is not None:
                            yield sample or _without_text(number, key, wanted)
                        number, key, sample = number + 1, new_key, None
                    fault = _refusal(member, extension)
                    if sample is not None and sample.fault:
                        continue
                    if fault:
                        sample = Found(number, "", fault)
                    elif extension == wanted and sample is not None:
                        sample = Found(
                            number, "", f"it has two members {member.name!r}. Remove one"
                        )
                    elif extension == wanted:
                        sample = _document(number, member, tar, wanted)
            except tarfile.TarError as error:
                raise Damaged(
                    max(number, 0), f"the tar is damaged or truncated ({error})"
                ) from None
            except Damaged as error:
                reason = f"{error.reason} at byte {error.offset} of the tar"
                raise Damaged(max(number, 0), reason) from None
            if key is not None:
                yield sample or _without_text(number, key, wanted)


class _Header(tarfile.TarInfo):
    """A member's header. A damaged or missing one is an error; tarfile takes it for the end."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        """Refuse a header that asks for memory.

        tarfile calls this for each header, also those before a member's own, and says that it may
        be overridden. Python's security fixes (Debian's 3.11.2-6+deb12u8) no longer call frombuf.
        """
        if self.type in _LONG_HEADERS and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        member: tarfile.TarInfo = super()._proc_member(tarfile_)  # type: ignore[misc]  # untyped
        return member

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Header:
        try:
            header = super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except (tarfile.HeaderError, ValueError, LookupError, RecursionError) as error:
            raise tarfile.ReadError(f"bad header: {error}") from None
        if header.size < 0:
            raise tarfile.ReadError(f"a member of {header.size} bytes")
        return header


class _Tar:
    """A tar that is read once, from its beginning to its end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._tar: Any = None

    def members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the members.

        Raises:
            tarfile.TarError: if the tar does not end as a tar does, in empty blocks alone.
        """
        with tarfile.open(fileobj=self._stream, mode="r|", tarinfo=_Header) as self._tar:
            while (member := self._tar.next()) is not None:
                yield member
                # tarfile keeps every header that it has read.
                self._tar.members.clear()
            while rest := self._tar.fileobj.read(2**16):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError(
                        "it goes on behind its end mark; tars that were put together with cat are "
                        "read one by one"
                    )

    def read(self, member: tarfile.TarInfo) -> bytes:
        """Return the content of the member that was yielded last."""
        with self._tar.extractfile(member) as content:
            return bytes(content.read())


def _split(name: str) -> tuple[str, str]:
    """Return the sample that a member belongs to, and its extension, in lower case."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _refusal(member: tarfile.TarInfo, extension: str) -> str:
    """Return why a member does not belong into a tar of text, or ""."""
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts:
        reason = "leads out of the folder that the tar is unpacked in"
    elif not member.isreg() or member.issparse():
        reason = "is a link, a device or a sparse file"
    elif extension.split(".")[-1] in _PICKLES:
        reason = "is a pickle, which runs code when it is loaded"
    else:
        return ""
    return f"its member {member.name!r} {reason}. Write the tar anew without it"


def _document(number: int, member: tarfile.TarInfo, tar: _Tar, wanted: str) -> Found:
    if member.size > base.MAX_DOCUMENT_BYTES:
        return too_long(number, base.MAX_DOCUMENT_BYTES)
    raw = tar.read(member).removeprefix(codecs.BOM_UTF8)
    return parse_json(number, raw, "text") if wanted == "json" else decoded(number, raw)


def _without_text(number: int, key: str, wanted: str) -> Found:
    return Found(
        number,
        "",
        f"the sample {key!r} has no member .{wanted}. Set text_field to the extension of the text",
    )
