"""Damage files, and detect whether a command has changed any."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every path below `folder`: a write changes one."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def replace(path: Path, content: bytes) -> None:
    """Put a new file in the place of one that may be hard-linked elsewhere."""
    path.unlink()
    path.write_bytes(content)


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file, which keeps its size."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    replace(path, bytes(raw))


def truncate(path: Path) -> None:
    """Cut off the last hundred bytes of a file."""
    replace(path, path.read_bytes()[:-100])
