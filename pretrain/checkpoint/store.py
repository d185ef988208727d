"""Checkpoints in an object store, or anywhere else that fsspec can reach by a URL.

A store holds the checkpoints of one run. Each has a folder, named by step and id, with the files of
the checkpoint, the run's run.json, and its metrics.jsonl up to that step. newest.json names the
last checkpoint of the run's current branch. A folder with a manifest.json is complete, because the
manifest is uploaded last. Everything that is read from a store is verified by the manifest, as on a
disk.

This module imports no torch, because the process that uploads checkpoints also runs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pretrain.checkpoint.format import (
    INDEX,
    PIECE_BYTES,
    BlockReader,
    BlockWriter,
    DamagedCheckpoint,
    FileRecord,
    Index,
    digest,
)
from pretrain.checkpoint.manifest import Manifest, open_checkpoint, small_files
from pretrain.config import ConfigError, RunFailed
from pretrain.config.secrets import credential_in_url
from pretrain.processes import start_beside
from pretrain.rundir.checkpoints import (
    MANIFEST,
    Lineage,
    abandoned_checkpoints,
    checkpoint_name,
    hold,
    read_lineage,
    saved_checkpoints,
)
from pretrain.rundir.files import (
    flush,
    parse_json,
    read_json,
    read_text,
    replace_file,
)
from pretrain.rundir.metrics import WarnOnce, lines_until
from pretrain.rundir.paths import RunPaths, is_of_copied, restore_version

# ---- Names of stores, which are URLs, and of the checkpoints in them ----


NAME = re.compile(r"(step-\d{8,})-([0-9a-f]{16})")


def stored_name(lineage: Lineage) -> str:
    """Return a checkpoint's folder name: step and id, because two branches may have one step."""
    return f"{checkpoint_name(lineage.step)}-{lineage.id}"


def split_checkpoint(url: str) -> tuple[str, str | None]:
    """Split a URL into that of the store, and the name of a checkpoint if the URL ends in one."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return (parent, name) if NAME.fullmatch(name) else (url.rstrip("/"), None)


NEWEST = "newest.json"
NUM_THREADS = 4
"""Number of files that are sent or received at the same time."""


class StoreError(RunFailed):
    """A store cannot be reached, or refuses a request; the message has the URL and its answer."""


@dataclass(frozen=True)
class Stored:
    """A complete checkpoint in a store."""

    name: str
    """Name of its folder: step-########-<id>."""
    manifest: Manifest
    content: bytes
    """The bytes of the manifest, read when the checkpoint was chosen."""

    @property
    def lineage(self) -> Lineage:
        return self.manifest.lineage

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def bytes(self) -> int:
        return sum(self.manifest.sizes.values())


class Store:
    """The checkpoints of one run behind a URL."""

    def __init__(self, url: str) -> None:
        """Load fsspec's client for the URL's protocol, without reading from the store.

        Raises:
            ConfigError: There is no such protocol, its package is not installed, or the URL holds a
                secret.
        """
        import fsspec

        self.url = url.rstrip("/")
        protocol, _, _ = url.partition("://")
        if credential_in_url(url):
            raise ConfigError(
                f"{protocol}://***: holds a secret, which would be copied to logs. Remove it from "
                f"the URL, and pass it by the settings of the package for {protocol}://"
            )
        with self._errors("open"):
            # Cached listings would not show later uploads from other hosts.
            options: dict[str, Any] = {"use_listings_cache": False}
            if url.startswith(("file:", "local:")):
                options["auto_mkdir"] = True
            try:
                self._fs, root = fsspec.core.url_to_fs(self.url, **options)
            except (ImportError, ValueError) as error:
                # fsspec's message names the missing package or the unknown protocol.
                raise ConfigError(f"{url}: {error}") from None
        self._root = str(root).rstrip("/")

    # ---- what there is ----
    def checkpoints(self) -> list[Stored]:
        """Return the complete checkpoints, ordered by step. Reads their manifests.

        A folder with a damaged manifest is left out, like a folder without one.

        Raises:
            StoreError: The store cannot be read.
        """
        found = (self.stored(name) for name in self.names())
        return sorted((s for s in found if s is not None), key=lambda s: (s.step, s.name))

    def names(self) -> list[str]:
        """Return the names of all checkpoint folders, complete or not, ordered by step."""
        with self._errors("list"):
            try:
                paths = self._fs.ls(self._root, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in paths]
        # By length first, because a step may have more than eight digits.
        return sorted(filter(NAME.fullmatch, names), key=lambda n: (len(n), n))

    def stored(self, name: str) -> Stored | None:
        """Return the checkpoint of this name, or None if it is incomplete or damaged.

        Raises:
            ConfigError: Another version wrote it, and falling back to an earlier checkpoint would
                be wrong.
            StoreError: The store cannot be read.
        """
        content = self._read(f"{name}/{MANIFEST}") or b""
        try:
            manifest = Manifest.parse(content, f"{self.url}/{name}")
        except DamagedCheckpoint:
            return None
        # The name differs from the content if a checkpoint was moved by hand.
        is_it = name == stored_name(manifest.lineage)
        return Stored(name, manifest, content) if is_it else None

    def newest(self) -> Stored | None:
        """Return the last checkpoint of the run's current branch.

        Raises:
            ConfigError: Another version wrote a checkpoint; or newest.json names no complete
                checkpoint, and there are several branches to choose from.
            StoreError: The store cannot be read.
        """
        named = parse_json(self._read(NEWEST) or b"").get("checkpoint")
        if isinstance(named, str) and NAME.fullmatch(named) and (found := self.stored(named)):
            return found
        # An upload was interrupted before newest.json named it.
        complete = self.checkpoints()
        for other in complete:
            if not other.lineage.is_ancestor_of(complete[-1].lineage):
                raise ConfigError(
                    f"{self.url}: holds several branches of checkpoints, and no {NEWEST} that "
                    "names a complete one. Choose the checkpoint to resume from "
                    f"(--resume {self.url}/{other.name} or {self.url}/{complete[-1].name})"
                )
        return complete[-1] if complete else None

    def line_to(self, newest: Stored) -> list[Stored]:
        """Return a checkpoint and its complete ancestors, newest first."""
        found = self.checkpoints()
        return [s for s in reversed(found) if s.lineage.is_ancestor_of(newest.lineage)]

    def check_is_of(self, run: Path, *, starts: bool = False) -> None:
        """Check that a copy of a run does not use the store of the original run.

        Args:
            run: The run. Nothing is read unless it is a copy.
            starts: Whether the run is about to start, which gives a copy its own id.

        Raises:
            ConfigError: The store is the original's.
            StoreError: The store cannot be read.
        """
        path = RunPaths(run).version
        record = read_json(path)
        is_new = starts and is_of_copied(record, run)
        if not is_new and not record.get("copy_of"):
            return
        stored = self.newest()
        theirs = self._read(f"{stored.name}/{path.name}") if stored else None
        identifier = parse_json(theirs or b"").get("id")
        if identifier and (is_new or identifier != record.get("id")):
            raise ConfigError(
                f"checkpoint.upload_to = {self.url}: holds the checkpoints of run {identifier}, "
                f"which {run} is a copy of. Set another URL for the copy"
            )

    # ---- sending ----
    def upload(self, checkpoint: Path, run: Path | None = None) -> None:
        """Upload a checkpoint unless the store has it: tensors first, the manifest last.

        Every block is verified when it is read, and the size of every object is compared after it
        was sent. Objects that an interrupted upload has sent completely are not sent again.

        Args:
            checkpoint: A complete checkpoint. The caller holds it, so that it is not deleted.
            run: The run, whose records are uploaded too, to restore them if its disk is lost.

        Raises:
            DamagedCheckpoint: The files on the disk differ from what was written.
            StoreError: The store refuses.
        """
        opened = open_checkpoint(checkpoint)
        name = stored_name(opened.lineage)
        sizes = self._sizes(name)
        if self.stored(name) is not None and opened.files.items() <= sizes.items():
            return
        missing = [f for f in opened.index.files if sizes.get(f.name) != f.bytes]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(lambda record: self._send_file(name, checkpoint, record), missing))
        expected = opened.files
        for small in small_files(expected):
            self._send(name, small, [(checkpoint / small).read_bytes()])
        if run is not None:
            paths = RunPaths(run)
            self._send(name, paths.metrics.name, lines_until(paths.metrics, opened.lineage.step))
            self._send(name, paths.version.name, [read_text(paths.version).encode()])
        sizes = self._sizes(name)
        for file, size in expected.items():
            if sizes.get(file) != size:
                raise StoreError(
                    f"{self.url}/{name}/{file}: {sizes.get(file, 0)} bytes arrived of {size}"
                )
        self._send(name, MANIFEST, [(checkpoint / MANIFEST).read_bytes()])

    def set_newest(self, lineage: Lineage) -> None:
        """Record the last checkpoint of the run's current branch."""
        content = {"checkpoint": stored_name(lineage), "step": lineage.step}
        if parse_json(self._read(NEWEST) or b"") != content:
            self._send("", NEWEST, [(json.dumps(content) + "\n").encode()])

    # ---- receiving ----
    def download(self, stored: Stored, directory: Path) -> None:
        """Download a checkpoint into an empty directory, verified, and flushed to the disk.

        Args:
            stored: The checkpoint.
            directory: Directory for its files.

        Raises:
            DamagedCheckpoint: The store's content differs from what was written.
            StoreError: The store cannot be read.
            OSError: The disk refused the write.
        """
        small, files = self._small_files(stored)

        def receive(record: FileRecord) -> None:
            with closing(BlockWriter(directory / record.name, record.block_bytes)) as file:
                for piece in self._pieces(f"{stored.name}/{record.name}"):
                    file.update(piece)
                if file.finish() != record:
                    raise self._damaged(stored, record.name)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(receive, files))
        for name, content in {**small, MANIFEST: stored.content}.items():
            replace_file(directory / name, content, durable=True)
        flush(directory)

    def verify(self, stored: Stored) -> list[str]:
        """Read every byte of a checkpoint in the store, and return what is damaged.

        Raises:
            StoreError: The store cannot be read.
        """

        def check(record: FileRecord) -> str | None:
            found = digest(record, self._pieces(f"{stored.name}/{record.name}"))
            return None if found == record else str(self._damaged(stored, record.name))

        try:
            _, files = self._small_files(stored)
        except DamagedCheckpoint as error:
            return [str(error)]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return [problem for problem in pool.map(check, files) if problem]

    def download_records(self, stored: Stored, run: Path) -> None:
        """Restore a run's metrics up to a checkpoint, and its id if the run had no metrics.

        Raises:
            StoreError: The store cannot be read.
            OSError: The disk refused the write.
        """
        paths = RunPaths(run)
        lines = self._read(f"{stored.name}/{paths.metrics.name}")
        if lines is not None:
            is_new = not paths.metrics.exists()
            replace_file(paths.metrics, lines, durable=True)
            if is_new:
                restore_version(run, self._read(f"{stored.name}/{paths.version.name}") or b"")

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
        """Return the sizes in bytes of the objects in a checkpoint's folder, by name."""
        with self._errors("list", name):
            try:
                entries = self._fs.ls(f"{self._root}/{name}", detail=True, refresh=True)
            except FileNotFoundError:
                return {}
        return {str(e["name"]).rpartition("/")[2]: e["size"] for e in entries}

    def _read(self, path: str) -> bytes | None:
        """Return the content of a small object, or None if it does not exist."""
        with self._errors("read", path):
            try:
                content: bytes = self._fs.cat_file(f"{self._root}/{path}")
            except FileNotFoundError:
                return None
            return content

    def _pieces(self, path: str) -> Iterator[bytes]:
        """Yield a large object in pieces; nothing if it is missing, which verification notices."""
        with self._errors("read", path):
            try:
                with self._fs.open(
                    f"{self._root}/{path}", "rb", block_size=PIECE_BYTES, cache_type="readahead"
                ) as file:
                    while piece := file.read(PIECE_BYTES):
                        yield piece
            except FileNotFoundError:
                return

    def _small_files(self, stored: Stored) -> tuple[dict[str, bytes], tuple[FileRecord, ...]]:
        """Return the verified contents of the small files by name, and the index's file records."""
        small = {}
        for name, sha256 in stored.manifest.digests.items():
            small[name] = self._read(f"{stored.name}/{name}") or b""
            if hashlib.sha256(small[name]).hexdigest() != sha256:
                raise self._damaged(stored, name)
        try:
            return small, Index.parse(small[INDEX], stored.manifest.sizes).files
        except DamagedCheckpoint:
            raise self._damaged(stored, INDEX) from None

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
            # Clients raise errors of their own libraries, which must not end training with a
            # traceback.
            said = f"{type(error).__name__}: {error}".strip(": ")
            where = f"{self.url}/{path}".rstrip("/")
            raise StoreError(f"{where}: cannot {what} ({said})") from error


# ---- Upload checkpoints while training continues, in a separate process ----
# The process looks for complete checkpoints in RUN/checkpoints that the store does not have, and
# uploads them, newest first. It therefore needs no message about new checkpoints, a save never
# waits for it, and it makes up for failed uploads of earlier attempts. It holds the checkpoint that
# it uploads, so that retention does not delete it.
#
# It reads lines of JSON on stdin: {"do": "finish"} asks it to upload everything missing once more,
# print what is still missing, and end. It ends at once when stdin is closed.


POLL_SECONDS = 2.0
"""Time between two looks into RUN/checkpoints."""


# ---- in the training process ---------------------------------------------------------------------
class Uploader:
    """The handle of the uploading process in the training process of rank 0."""

    def __init__(self, run: Path, url: str) -> None:
        """Start the process.

        Args:
            run: The run's directory.
            url: checkpoint.upload_to.
        """
        self._run, self._url = run, url
        self._process = start_beside(__name__, str(self._run), self._url)
        self._warn = WarnOnce()

    def check(self) -> None:
        """Warn, once, if the process has ended unexpectedly."""
        if self._process.poll() is not None:
            self._warn("end", f"{self._ended()}. Uploading is tried again when the run ends")

    def finish(self, may_wait: Callable[[], bool]) -> list[str]:
        """Wait until every checkpoint is uploaded, or has failed once more.

        Args:
            may_wait: Called about once a second; returns True while there is time left.

        Returns:
            A line for each checkpoint that is not in the store, with the reason.
        """
        if self._process.poll() is not None:
            self._process = start_beside(__name__, str(self._run), self._url)
        command: str | None = '{"do": "finish"}\n'
        while True:
            try:
                out, _ = self._process.communicate(command, timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                # Send the command only once; later calls only wait.
                command = None
                if not may_wait():
                    self.close()
                    return [f"{self._run}: there was no time to upload every checkpoint"]
        try:
            missing: list[str] = json.loads(out)["missing"]
        except (ValueError, KeyError, TypeError):
            return [self._ended()]
        return missing

    def close(self) -> None:
        """End the process at once. A later attempt finishes its upload."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _ended(self) -> str:
        code = self._process.poll()
        return (
            f"checkpoint.upload_to = {self._url}: the process that uploads "
            f"(process {self._process.pid}) ended with code {code}"
        )


# ---- in the uploading process --------------------------------------------------------------------
class Rounds:
    """Uploads the checkpoints that a store does not have, and names the newest one.

    Training may name an older one than before, to which it went back. Afterwards the store may have
    got newer ones from another node: then `may_go_back` is False, and the name stays.
    """

    def __init__(self, run: Path, store: Store, *, may_go_back: bool = True) -> None:
        self._run, self._store, self._may_go_back = run, store, may_go_back
        self._uploaded: set[str] = set()
        self._named = ""
        self._warn = WarnOnce()

    def found(self) -> list[tuple[Path, Lineage]]:
        """Return the run's checkpoints, newest first."""
        with contextlib.suppress(OSError, ConfigError):
            found = reversed(saved_checkpoints(self._run))
            return [(saved.path, saved.lineage) for saved in found if saved.lineage]
        return []

    def upload(self) -> list[str]:
        """Upload missing checkpoints, newest first; return a line for each one that failed."""
        missing, is_newest = [], True
        for number, (path, lineage) in enumerate(self.found()):
            # After a replay, the newest may be an older one than was named last.
            if lineage.id in self._uploaded and not (is_newest and lineage.id != self._named):
                is_newest = False
                continue
            try:
                with hold(path):
                    self._store.check_is_of(self._run)
                    self._store.upload(path, self._run)
                    if is_newest:
                        # An older one is named only where the store has no newer one of its line.
                        goes_back = self._may_go_back and number == 0
                        if goes_back or not self._is_continued(lineage):
                            self._store.set_newest(lineage)
                        self._named, is_newest = lineage.id, False
            except (ConfigError, RunFailed, OSError) as error:
                # It is gone if retention deleted it, or if the run abandoned its branch.
                if path.exists():
                    missing.append(f"{path}: not uploaded: {error}")
                    again = "It is tried again after the next save and at the end"
                    self._warn(lineage.id, f"{missing[-1]}. {again}")
            else:
                self._uploaded.add(lineage.id)
        return missing[::-1]

    def _is_continued(self, lineage: Lineage) -> bool:
        """Return True if the store's newest checkpoint continues this one, and was not left."""
        with contextlib.suppress(ConfigError):  # Several branches, of which none is named.
            newest = self._store.newest()
            left = [read_lineage(path) for path in abandoned_checkpoints(self._run)]
            if newest is not None and newest.lineage not in (*left, lineage):
                return lineage.is_ancestor_of(newest.lineage)
        return False


def main(answers: TextIO) -> None:
    """Upload until asked to finish; then try once more, and answer what is still missing."""
    run, url = Path(sys.argv[1]), sys.argv[2]
    commands: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    # A lower priority than training, because verifying and encrypting take processor time.
    with contextlib.suppress(OSError):
        os.nice(5)
    rounds, newest = Rounds(run, Store(url)), None
    while commands.empty():
        found = rounds.found()[:1]
        if found != newest:
            newest = found
            rounds.upload()
        with contextlib.suppress(queue.Empty):
            commands.put(commands.get(timeout=POLL_SECONDS))
    print(json.dumps({"missing": rounds.upload()}), file=answers, flush=True)
    # Exit without waiting for threads of the store's client.
    os._exit(0)


def _listen(commands: queue.Queue[str]) -> None:
    """Pass on the first line of stdin. At its end, the training process has ended."""
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    commands.put(line)
