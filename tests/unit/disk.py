"""A disk that refuses, whose user is killed, or whose power is cut, at any file operation.

The operations are the real ones, below one folder. Each is noted, so that what the disk may hold
after a power cut can be built in another folder:

- the content of a file counts up to the last fsync of that file,
- a name that was made, moved or removed counts once its folder has had an fsync,
- of everything else any part may have reached the disk, in any order: a rename without the content,
  the end of a file without its beginning, the removal of a file without the move of its folder.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pretrain.rundir import files


class Killed(BaseException):
    """The process is dead; nothing that it still tries happens."""


@dataclass(frozen=True)
class Names:
    """Names that one operation makes and removes, together or not at all."""

    changes: tuple[tuple[int, str, int | None], ...]
    """Folder, name, and what has the name now."""


@dataclass(frozen=True)
class Write:
    """Bytes that are appended to a file."""

    file: int
    data: bytes


@dataclass(frozen=True)
class Flush:
    """An fsync of a file or a folder."""

    of: int


Effect = Names | Write | Flush | None
Survives = Callable[[], bool]
ROOT = 0


@dataclass
class Disk:
    """The folder `root` as a disk. Use it within `with disk.watched():`."""

    root: Path
    fail_at: int | None = None
    """Number of the operation that does not happen, counted from 0."""
    error: int | None = None
    """The errno with which it fails; None kills the process."""
    done: list[tuple[str, Effect]] = field(default_factory=list)
    """Every operation that was asked for, in words, with its effect."""
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    """What is in each folder now. Files are numbered with them."""
    _count: int = 0
    _descriptors: dict[int, int] = field(default_factory=dict)
    _is_full: bool = False

    @property
    def has_failed(self) -> bool:
        """True if the operation that was to fail has been asked for."""
        return self.fail_at is not None and len(self.done) > self.fail_at

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take every operation below the root for the block's time."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "write", "fsync", "close", "mkdir", "rmdir", "listdir"):
                patch.setattr(os, name, self._shim(name))
            for name in ("rename", "replace", "unlink", "remove"):
                patch.setattr(os, name, self._shim(name))
            # Python's own file objects write without os.write.
            patch.setattr(files, "open", self._open_file, raising=False)
            patch.setattr(io, "open", self._open_to_read)
            yield

    def after_power_cut(self, at: int, survives: Survives) -> dict[str, bytes | None]:
        """Return path -> content of what is left when the power is cut before operation `at`.

        Args:
            at: Number of operations that were done.
            survives: Asked about each effect that was not flushed.

        Returns:
            None as content stands for a folder.
        """
        effects = [effect for _, effect in self.done[:at]]
        flushed = {e.of: number for number, e in enumerate(effects) if isinstance(e, Flush)}
        tree: dict[int, dict[str, int | None]] = {number: {} for number in self.folders}
        content: dict[int, bytearray] = {}
        sizes: dict[int, int] = {}
        for number, effect in enumerate(effects):
            if isinstance(effect, Names):
                is_safe = any(flushed.get(each[0], -1) > number for each in effect.changes)
                if is_safe or survives():
                    for folder, name, entry in effect.changes:
                        tree[folder][name] = entry
            elif isinstance(effect, Write):
                file, start = effect.file, sizes.get(effect.file, 0)
                sizes[file] = start + len(effect.data)
                if flushed.get(file, -1) > number or survives():
                    held = content.setdefault(file, bytearray())
                    # What was lost before it reads as zeros.
                    held.extend(bytes(start - len(held)))
                    held.extend(effect.data)
        found: dict[str, bytes | None] = {}

        def collect(folder: int, path: str) -> None:
            for name, entry in tree[folder].items():
                if entry is None:
                    continue
                found[path + name] = None
                if entry in tree:
                    collect(entry, f"{path}{name}/")
                else:
                    found[path + name] = bytes(content.get(entry, b""))

        collect(ROOT, "")
        return found

    # ---- the operations ----
    def _shim(self, name: str) -> Callable[..., Any]:
        real, take = getattr(os, name), getattr(self, f"_{name}")

        def shim(*args: Any, **kwargs: Any) -> Any:
            return take(real, *args, **kwargs)

        return shim

    def _ask(self, words: str) -> None:
        """Note that an operation is asked for, and fail it if its time has come."""
        number = len(self.done)
        self.done.append((words, None))
        if self.fail_at is not None and number >= self.fail_at and self.error is None:
            raise Killed(words)
        if number == self.fail_at and self.error is not None:
            raise OSError(self.error, os.strerror(self.error), words)

    def _did(self, effect: Effect) -> None:
        self.done[-1] = (self.done[-1][0], effect)

    def _inside(self, path: Any, dir_fd: int | None = None) -> Path | None:
        """Return a path relative to the root; None for one that is elsewhere."""
        if isinstance(path, int):
            return None
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        whole = Path(os.path.abspath(path))
        return whole.relative_to(self.root) if whole.is_relative_to(self.root) else None

    def _find(self, path: Path) -> tuple[int, str]:
        """Return the folder that a path is in, and its name there."""
        folder = ROOT
        for name in path.parts[:-1]:
            folder = self.folders[folder][name]
        return folder, path.name

    def _entry(self, path: Path) -> int:
        folder, name = self._find(path)
        return self.folders[folder][name] if name else ROOT

    def _change(self, *changes: tuple[int, str, int | None]) -> None:
        for folder, name, entry in changes:
            if entry is None:
                del self.folders[folder][name]
            else:
                self.folders[folder][name] = entry
        self._did(Names(changes))

    def _new(self) -> int:
        self._count += 1
        return self._count

    def _open(self, real: Any, path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        inside = self._inside(path, kwargs.get("dir_fd"))
        if inside is None:
            return real(path, flags, mode, **kwargs)
        # A file is opened like this to read it; a folder to flush it.
        is_read = not flags & (os.O_WRONLY | os.O_RDWR) and os.path.isfile(path)
        self._ask(f"{'read' if is_read else 'open'} {inside}")
        descriptor = real(path, flags, mode, **kwargs)
        folder, name = self._find(inside)
        if name and name not in self.folders[folder]:
            self._change((folder, name, self._new()))
        self._descriptors[descriptor] = self._entry(inside)
        return descriptor

    def _close(self, real: Any, descriptor: int) -> None:
        # Also of the dead: the kernel does it for them.
        self._descriptors.pop(descriptor, None)
        real(descriptor)

    def _write(self, real: Any, descriptor: int, data: Any) -> int:
        if descriptor not in self._descriptors:
            return real(descriptor, data)
        try:
            self._ask(f"write {len(data)} bytes")
            if self._is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # A disk that becomes full takes a part first.
            if error.errno != errno.ENOSPC or self._is_full or len(data) < 2:
                raise
            self._is_full = True
            data = bytes(data)[: len(data) // 2]
        else:
            self._is_full = False
        count = real(descriptor, data)
        self._did(Write(self._descriptors[descriptor], bytes(data)[:count]))
        return count

    def _fsync(self, real: Any, descriptor: int) -> None:
        if descriptor not in self._descriptors:
            return real(descriptor)
        opened = os.readlink(f"/proc/self/fd/{descriptor}")
        self._ask(f"fsync {self._inside(opened)}")
        real(descriptor)
        self._did(Flush(self._descriptors[descriptor]))

    def _mkdir(self, real: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        inside = self._inside(path)
        if inside is None:
            return real(path, *args, **kwargs)
        self._ask(f"mkdir {inside}")
        real(path, *args, **kwargs)
        folder, name = self._find(inside)
        made = self._new()
        self.folders[made] = {}
        self._change((folder, name, made))

    def _rename(self, real: Any, source: Any, target: Any, **kwargs: Any) -> None:
        before, after = self._inside(source), self._inside(target)
        if before is None or after is None:
            return real(source, target, **kwargs)
        self._ask(f"rename {before} {after}")
        real(source, target, **kwargs)
        entry = self._entry(before)
        self._change((*self._find(after), entry), (*self._find(before), None))

    _replace = _rename

    def _unlink(self, real: Any, path: Any, **kwargs: Any) -> None:
        inside = self._inside(path, kwargs.get("dir_fd"))
        if inside is None:
            return real(path, **kwargs)
        self._ask(f"unlink {inside}")
        real(path, **kwargs)
        self._change((*self._find(inside), None))

    _remove = _rmdir = _unlink

    def _listdir(self, real: Any, path: Any = ".") -> list[str]:
        if (inside := self._inside(path)) is not None:
            self._ask(f"list {inside}")
        return real(path)

    def _open_to_read(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        inside = self._inside(path)
        if inside is not None:
            assert not set(mode) & set("wax+"), f"{path}: written to, and not noted"
            self._ask(f"read {inside}")
        return builtins.open(path, mode, *args, **kwargs)

    def _open_file(
        self,
        path: Any,
        mode: str,
        buffering: int = -1,
        *,
        opener: Callable[[Any, int], int] | None = None,
    ) -> Any:
        if opener is None and mode == "ab":
            # A descriptor of `open_own`.
            return _File(path)
        if opener is None:
            # A descriptor of `open_regular`, to read from.
            assert mode == "rb" and isinstance(path, int)
            return builtins.open(path, mode)
        assert mode == "xb"
        return _File(opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


class _File:
    """A file object that writes with os.write, and buffers nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def writelines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def fileno(self) -> int:
        return self._descriptor

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def build(folder: Path, tree: dict[str, bytes | None]) -> None:
    """Make the files and folders that `Disk.after_power_cut` gives, in an existing folder."""
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
