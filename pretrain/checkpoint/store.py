"""Checkpoints in an object store, or anywhere else that fsspec reaches by a URL.

A store holds the checkpoints of one run: a folder for each, named by step and id, with the files of
the checkpoint, and newest.json, which names the checkpoint that the run went on to last. A folder
that has a manifest.json is complete, because that is uploaded last. What is read from a store is
verified by that manifest, as on a disk.

This module imports no torch: it also runs in the process that uploads beside training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint.blocks import (
    BLOCK_BYTES,
    BlockReader,
    BlockWriter,
    DamagedCheckpoint,
    FileRecord,
    digest,
)
from pretrain.checkpoint.content import FORMAT, INDEX, REQUIRED, is_manifest, small_files
from pretrain.checkpoint.index import FILE_NAME, Index
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.store_names import NAME, check_protocol, stored_name, stored_step
from pretrain.config import ConfigError, RunFailed
from pretrain.rundir.checkpoints import MANIFEST
from pretrain.rundir.files import flush_directory, parse_json, replace_file
from pretrain.rundir.lineage import Lineage, parse_lineage

NEWEST = "newest.json"
NUM_THREADS = 4
"""Files that are sent or received at once."""
PIECE_BYTES = 16 * BLOCK_BYTES
"""About as much of each of them is in memory."""


class StoreError(RunFailed):
    """A store cannot be reached, or refuses; the message names the URL and what it said."""


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint in a store."""

    name: str
    """Its folder: step-########-<id>."""
    content: dict[str, Any]
    """Its manifest."""
    lineage: Lineage

    @property
    def step(self) -> int:
        return self.lineage.step

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.content["files"].values())


class Store:
    """The checkpoints of one run behind a URL."""

    def __init__(self, url: str) -> None:
        """Find the program that speaks the URL's protocol; nothing is read yet.

        Raises:
            ConfigError: There is no such protocol, or its package is not installed.
        """
        self.url = url.rstrip("/")
        check_protocol(url)
        import fsspec

        with self._errors("open"):
            # A listing that was cached does not show what another host has uploaded since.
            options: dict[str, Any] = {"use_listings_cache": False}
            if url.startswith(("file:", "local:")):
                options["auto_mkdir"] = True
            self._fs, root = fsspec.core.url_to_fs(self.url, **options)
        self._root = str(root).rstrip("/")

    # ---- what there is ----
    def checkpoints(self) -> list[Stored]:
        """Return the complete checkpoints, by steps. Of each the manifest is read.

        A folder whose manifest is damaged is left out, as one that has none.

        Raises:
            StoreError: The store cannot be read.
        """
        found = (self.stored(name) for name in self.names())
        return sorted((s for s in found if s is not None), key=lambda s: (s.step, s.name))

    def names(self) -> list[str]:
        """Return the names of all checkpoints' folders, complete or not, by steps."""
        with self._errors("list"):
            try:
                paths = self._fs.ls(self._root, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        return sorted((n for n in names if NAME.fullmatch(n)), key=lambda n: (stored_step(n), n))

    def stored(self, name: str) -> Stored | None:
        """Return a checkpoint by its name, or None when it is not complete, or damaged."""
        content = parse_json(self._read(f"{name}/{MANIFEST}") or b"")
        lineage = parse_lineage(content)
        # Checked as on a disk: what it holds is printed and added up.
        if lineage is None or not is_manifest(content) or not _are_files(content.get("files")):
            return None
        # Its name is its content's, or a checkpoint was moved by hand.
        return Stored(name, content, lineage) if name == stored_name(lineage) else None

    def newest(self) -> Stored | None:
        """Return the checkpoint that the run went on to last.

        Raises:
            ConfigError: newest.json is missing or names one that is not there, and it cannot be
                known which of several lines of checkpoints is the run's.
            StoreError: The store cannot be read.
        """
        named = parse_json(self._read(NEWEST) or b"").get("checkpoint")
        if isinstance(named, str) and NAME.fullmatch(named) and (found := self.stored(named)):
            return found
        if isinstance(named, str) and NAME.fullmatch(named):
            self._check_format(named)
        complete = self.checkpoints()
        if not complete:
            return None
        last = complete[-1]
        if all(stored.lineage.is_ancestor_of(last.lineage) for stored in complete):
            return last
        raise ConfigError(
            f"{self.url}: holds several lines of checkpoints, and no {NEWEST} that says which to "
            f"go on from. Name one, as in --resume {self.url}/{last.name}"
        )

    def _check_format(self, name: str) -> None:
        """Refuse a checkpoint of another format: to go on from an earlier one would be wrong."""
        found = parse_json(self._read(f"{name}/{MANIFEST}") or b"").get("format")
        if isinstance(found, int) and not isinstance(found, bool) and found != FORMAT:
            raise ConfigError(
                f"{self.url}/{name}: format = {found}, this version reads {FORMAT}. Use the "
                "version that saved it"
            )

    def line_to(self, newest: Stored) -> list[Stored]:
        """Return a checkpoint and its ancestors that are complete, newest first."""
        found = self.checkpoints()
        return [s for s in reversed(found) if s.lineage.is_ancestor_of(newest.lineage)]

    # ---- sending ----
    def upload(self, checkpoint: Path) -> None:
        """Upload a checkpoint: the tensors first, the manifest last. Does nothing if it is there.

        Every block is verified as it is read, and every object's size is compared when it has been
        sent. What an upload that was broken off has sent completely is not sent again.

        Args:
            checkpoint: A complete checkpoint. The caller holds it, so that it is not deleted.

        Raises:
            DamagedCheckpoint: What lies on the disk is not what was written.
            StoreError: The store refuses.
        """
        opened = open_checkpoint(checkpoint)
        name = stored_name(opened.lineage)
        if self.stored(name) is not None:
            return
        sizes = self._sizes(name)
        missing = [f for f in opened.index.files if sizes.get(f.name) != f.bytes]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(lambda record: self._send_file(name, checkpoint, record), missing))
        expected = opened.files
        for small in small_files(expected):
            self._send(name, small, [(checkpoint / small).read_bytes()])
        sizes = self._sizes(name)
        for file, size in expected.items():
            if sizes.get(file) != size:
                raise StoreError(
                    f"{self.url}/{name}/{file}: {sizes.get(file, 0)} bytes arrived of {size}"
                )
        self._send(name, MANIFEST, [(checkpoint / MANIFEST).read_bytes()])

    def set_newest(self, lineage: Lineage) -> None:
        """Record which checkpoint the run went on to last."""
        content = {"checkpoint": stored_name(lineage), "step": lineage.step}
        if parse_json(self._read(NEWEST) or b"") != content:
            self._send("", NEWEST, [(json.dumps(content) + "\n").encode()])

    # ---- receiving ----
    def download(
        self, stored: Stored, directory: Path, done: Callable[[int], None] | None = None
    ) -> None:
        """Download a checkpoint into an empty directory, verified, and flushed to the disk.

        Args:
            stored: The checkpoint.
            directory: Where its files are put.
            done: Is told from several threads how many bytes have arrived since the last call.

        Raises:
            DamagedCheckpoint: What the store holds is not what was written.
            StoreError: The store cannot be read.
            OSError: The disk refused.
        """
        small = self._verified_files(stored)
        files = Index.parse(small[INDEX]).files
        self._check_listed(stored, files)

        def receive(record: FileRecord) -> None:
            with closing(BlockWriter(directory / record.name)) as file:
                for piece in self._pieces(f"{stored.name}/{record.name}"):
                    file.write(piece)
                    if done is not None:
                        done(len(piece))
                if file.finish() != record:
                    raise self._damaged(stored, record.name)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(receive, files))
        for name, content in small.items():
            replace_file(directory / name, content, durable=True)
        # As it was read when the checkpoint was chosen.
        manifest = json.dumps(stored.content, indent=2) + "\n"
        replace_file(directory / MANIFEST, manifest, durable=True)
        flush_directory(directory)

    def verify(self, stored: Stored, done: Callable[[int], None] | None = None) -> list[str]:
        """Read every byte of a checkpoint in the store, and return what is damaged.

        Args:
            stored: The checkpoint.
            done: As for `download`.

        Raises:
            StoreError: The store cannot be read.
        """

        def check(record: FileRecord) -> str | None:
            found = digest(record.name, self._pieces(f"{stored.name}/{record.name}"), done)
            return None if found == record else str(self._damaged(stored, record.name))

        try:
            small = self._verified_files(stored)
            files = Index.parse(small[INDEX]).files
            self._check_listed(stored, files)
        except DamagedCheckpoint as error:
            return [str(error)]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return [problem for problem in pool.map(check, files) if problem]

    # ---- objects ----
    def _send_file(self, name: str, checkpoint: Path, record: FileRecord) -> None:
        with closing(BlockReader(checkpoint, record)) as file:
            self._send(name, record.name, (piece.data for piece in file.pieces()))

    def _send(self, name: str, file: str, pieces: Any) -> None:
        with self._errors("write", f"{name}/{file}".strip("/")):
            path = "/".join(part for part in (self._root, name, file) if part)
            with self._fs.open(path, "wb") as target:
                for piece in pieces:
                    target.write(piece)

    def _sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of the objects in a checkpoint's folder, by name."""
        with self._errors("list", name):
            try:
                entries = self._fs.ls(f"{self._root}/{name}", detail=True, refresh=True)
            except FileNotFoundError:
                return {}
        return {str(e["name"]).rpartition("/")[2]: e["size"] for e in entries}

    def _read(self, path: str) -> bytes | None:
        """Return the content of a small object, or None when there is none."""
        with self._errors("read", path):
            try:
                content: bytes = self._fs.cat_file(f"{self._root}/{path}")
            except FileNotFoundError:
                return None
            return content

    def _pieces(self, path: str) -> Iterator[bytes]:
        """Yield a large object in pieces; nothing when it is missing, which its reader notices."""
        with self._errors("read", path):
            try:
                with self._fs.open(
                    f"{self._root}/{path}", "rb", block_size=PIECE_BYTES, cache_type="readahead"
                ) as file:
                    while piece := file.read(PIECE_BYTES):
                        yield piece
            except FileNotFoundError:
                return

    def _verified_files(self, stored: Stored) -> dict[str, bytes]:
        """Return the contents of the small files by name, verified."""
        return {name: self._verified(stored, name) for name in small_files(stored.content["files"])}

    def _verified(self, stored: Stored, name: str) -> bytes:
        """Return the content of a small file, verified."""
        entry = stored.content["files"].get(name)
        content = self._read(f"{stored.name}/{name}")
        digest = hashlib.sha256(content or b"").hexdigest()
        if entry is None or content is None or digest != entry.get("sha256"):
            raise self._damaged(stored, name)
        return content

    def _check_listed(self, stored: Stored, files: tuple[FileRecord, ...]) -> None:
        """Check that the index names the manifest's files."""
        listed = {
            name: entry["bytes"]
            for name, entry in stored.content["files"].items()
            if FILE_NAME.fullmatch(name)
        }
        if {file.name: file.bytes for file in files} != listed:
            raise self._damaged(stored, INDEX)

    def _damaged(self, stored: Stored, name: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.url}/{stored.name}/{name}: missing, or not what was saved")

    @contextlib.contextmanager
    def _errors(self, what: str, path: str = "") -> Iterator[None]:
        """Turn whatever a client of a store raises into a StoreError."""
        try:
            yield
        except (ConfigError, RunFailed):
            raise
        except Exception as error:
            # Clients raise errors of their own libraries; none of them is to end training with a
            # traceback.
            said = f"{type(error).__name__}: {error}".strip(": ")
            where = f"{self.url}/{path}".rstrip("/")
            raise StoreError(f"{where}: cannot {what} ({said})") from error


def _are_files(files: Any) -> bool:
    """Return True if a manifest's "files" lists what a checkpoint has, and nothing else."""
    return (
        isinstance(files, dict)
        and files.keys() >= set(REQUIRED)
        and all(FILE_NAME.fullmatch(name) for name in files.keys() - set(small_files(files)))
        and all(isinstance(e, dict) and type(e.get("bytes")) is int for e in files.values())
    )
