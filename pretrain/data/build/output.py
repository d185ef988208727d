"""Publish a task's output as one folder, and prove later that it is still what was written.

A task writes into a folder of its own, hidden and unique, so that two processes that happen to do
the same task do not meet. It writes record.json last, with the size and the XXH3-128 of every file,
flushes everything to the disk and gives the folder its name in one rename. Whether a task is done
is answered by the record and by the files themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

from pretrain.rundir.files import Json, flush_directory, flush_file, read_json, replace_json

RECORD = "record.json"
_SEAL = "xxh3_128"
_HIDDEN = ".partial"
_CHUNK = 1 << 22


class Output:
    """The folder that a task writes to, before it is published."""

    def __init__(self, final: Path) -> None:
        """Make a hidden folder beside `final`."""
        self.final = final
        self.path = final.with_name(f".{final.name}.{uuid.uuid4().hex}{_HIDDEN}")
        final.parent.mkdir(exist_ok=True)
        self.path.mkdir()

    def publish(self, record: Json) -> None:
        """Write the record and give the folder its final name.

        Whoever published the same task before has written the same bytes: then this one is removed.
        """
        files = sorted(p for p in self.path.rglob("*") if p.is_file())
        described = {
            str(path.relative_to(self.path)): [path.stat().st_size, digest(path)] for path in files
        }
        for path in files:
            flush_file(path)
        for directory in {path.parent for path in files} - {self.path}:
            flush_directory(directory)
        content = record | {"files": described}
        replace_json(self.path / RECORD, content | {_SEAL: _seal(content)}, durable=True)
        flush_directory(self.path)
        try:
            self.path.rename(self.final)
        except OSError:
            if not is_done(self.final):
                raise
            self.discard()
        flush_directory(self.final.parent)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def output(final: Path) -> Iterator[Output]:
    """Yield the folder of a task's output, which is removed unless the block publishes it."""
    made = Output(final)
    try:
        yield made
    finally:
        made.discard()


def is_done(final: Path) -> bool:
    """Return True if a task's output is there and every file is as it was written."""
    record = read_json(final / RECORD, most=None)
    if record.pop(_SEAL, None) != _seal(record):
        return False
    files = record["files"]
    try:
        return all(
            (final / name).stat().st_size == size and digest(final / name) == expected
            for name, (size, expected) in files.items()
        )
    except OSError:
        return False


def _seal(record: Json) -> str:
    """Return a digest of a record, so that a damaged number is not believed."""
    return xxhash.xxh3_128_hexdigest(json.dumps(record).encode())


def clear(final: Path) -> None:
    """Remove a task's output that cannot be used, and what killed processes left of it."""
    for path in [final, *final.parent.glob(f".{final.name}.*{_HIDDEN}")]:
        shutil.rmtree(path, ignore_errors=True)


def digest(path: Path, start: int = 0, end: int | None = None) -> str:
    """Return the hex XXH3-128 of the bytes of a file from `start` to `end`."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        file.seek(start)
        left = (file.seek(0, os.SEEK_END) if end is None else end) - start
        file.seek(start)
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            found.update(chunk)
            left -= len(chunk)
    return found.hexdigest()
