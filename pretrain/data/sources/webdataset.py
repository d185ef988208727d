"""Read documents from webdataset tars: one per sample, in the member with a given extension.

Adjacent members are one sample if their names agree up to the first dot of the base name. The tar
is read as a stream, and nothing is written to a disk.
"""

from __future__ import annotations

import codecs
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from pretrain.data import sources
from pretrain.data.sources import (
    Corpus,
    Damaged,
    Found,
    Piece,
    Source,
    decoded,
    open_piece,
    register,
)
from pretrain.data.sources.plain import parse_json


@register
class Webdataset(Source):
    """A tar of samples. A document's field is the extension of the member that holds it."""

    name = "webdataset"
    endings = (".tar",)
    text_field = "txt"

    def read(self, piece: Piece, corpus: Corpus) -> Iterator[Found]:
        """Yield the documents of a tar, whose offsets are sample numbers."""
        wanted = self.field(corpus).lower()
        number, key = -1, None
        sample: Found | None = None
        try:
            with open_piece(piece) as stream, _open(stream) as tar:
                for member in _members(tar):
                    if member.isdir():
                        continue
                    new_key, extension = _split(member.name)
                    if new_key != key:
                        if key is not None:
                            yield sample or _without_text(number, key, wanted)
                        number, key, sample = number + 1, new_key, None
                    if extension == wanted and sample is not None:
                        fault = f"its sample has two members .{wanted}. Remove one"
                        sample = Found(number, "", fault)
                    elif extension == wanted:
                        sample = _document(number, member, tar, wanted)
        except tarfile.TarError as error:
            raise Damaged(max(number, 0), f"the tar is damaged or truncated ({error})") from None
        except Damaged as error:
            reason = f"{error.reason} at byte {error.offset} of the tar"
            raise Damaged(max(number, 0), reason) from None
        if key is not None:
            yield sample or _without_text(number, key, wanted)


class _Header(tarfile.TarInfo):
    """A member's header. A damaged or missing one is an error; tarfile takes that for the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except (tarfile.HeaderError, ValueError, LookupError, RecursionError) as error:
            raise tarfile.ReadError(f"bad header: {error}") from None


def _open(stream: IO[bytes]) -> Any:
    """Open a tar that is read once, from its beginning to its end."""
    return tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header)


def _members(tar: Any) -> Iterator[tarfile.TarInfo]:
    """Yield the members.

    Raises:
        tarfile.TarError: Anything but empty blocks follows the end mark.
    """
    while (member := tar.next()) is not None:
        yield member
        # tarfile would keep every header that it has read in memory.
        tar.members.clear()
    while rest := tar.fileobj.read(2**16):
        if rest.strip(b"\0"):
            raise tarfile.ReadError(
                "it goes on after its end mark; split tars that were joined with cat into separate "
                "files"
            )


def _split(name: str) -> tuple[str, str]:
    """Return the sample that a member belongs to, and its extension, in lower case."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _document(number: int, member: tarfile.TarInfo, tar: Any, wanted: str) -> Found:
    """Return the text of the member that was yielded last."""
    if not member.isreg() or member.issparse():
        return Found(number, "", f"its member {member.name!r} is no regular file. Remove it")
    if member.size > sources.MAX_DOCUMENT_BYTES:
        return decoded(number, None)
    with tar.extractfile(member) as content:
        raw = content.read().removeprefix(codecs.BOM_UTF8)
    return parse_json(number, raw, "text") if wanted == "json" else decoded(number, raw)


def _without_text(number: int, key: str, wanted: str) -> Found:
    return Found(
        number,
        "",
        f"the sample {key!r} has no member .{wanted}. Set text_field to the extension of the text",
    )
