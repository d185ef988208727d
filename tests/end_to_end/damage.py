"""Spoiling files, and seeing whether a command did."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """What would show a write: every path below `folder` with its size and the time of its last change."""
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file, whose size stays."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    replace(path, bytes(raw))


def truncate(path: Path) -> None:
    """Takes the last hundred bytes away."""
    replace(path, path.read_bytes()[:-100])
