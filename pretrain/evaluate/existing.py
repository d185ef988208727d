"""Refuse to write a report over files that are no earlier report of ours."""

from __future__ import annotations

import json
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.evaluate.blocks import BLOCK_FIELDS, blocks_path

TITLE = "# Perplexity"
"""Every report.md begins with it."""
PICTURES = (".png", ".svg", ".pdf")
_COLUMNS = {"protocol", "length", "loss_nats"}
"""Columns of curve.csv by which it is known."""
_POSITION_COLUMNS = {"length", "first_position", "loss_nats"}


def check_overwrites(out: Path) -> None:
    """Check that what `pretrain evaluate --out` would write over is an earlier report.

    Tables and text are known by their content. A picture is known by the table beside it.

    Args:
        out: FILE.json of the report.

    Raises:
        ConfigError: A file is something else. Nothing has been written.
    """
    report, positions = out.with_name("report.md"), out.with_name("positions.csv")
    curve = out.with_suffix(".csv")
    ours = {
        out: _is_curve(out),
        curve: _has_columns(curve, _COLUMNS),
        report: _start(report).startswith(TITLE),
        positions: _has_columns(positions, _POSITION_COLUMNS),
        blocks_path(out): _has_columns(blocks_path(out), set(BLOCK_FIELDS)),
    }
    ours |= {curve.with_suffix(p): ours[out] or ours[curve] for p in PICTURES}
    ours |= {positions.with_suffix(p): ours[positions] for p in PICTURES}
    for path, is_ours in ours.items():
        if path.exists() and not is_ours:
            raise ConfigError(
                f"--out {out}: {path} would be overwritten, and it is no report that `pretrain "
                "evaluate --out` wrote. Move it elsewhere, or choose another --out"
            )
    # report.md and positions.csv have one name in a folder, and no other file holds what they say.
    for other in sorted(out.parent.glob("*.json")):
        if other.name != out.name and report.exists() and _is_curve(other):
            raise ConfigError(
                f"--out {out}: {out.parent} holds the report {other.name}, whose report.md and "
                "positions.csv would be overwritten. Choose a folder of its own"
            )


def _is_curve(path: Path) -> bool:
    """Return True for a curve.json."""
    try:
        records = json.loads(path.read_bytes())["records"]
        return all(record.keys() >= _COLUMNS for record in records)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _has_columns(path: Path, columns: set[str]) -> bool:
    """Return True for a CSV file with these columns."""
    return columns <= set(_start(path).partition("\n")[0].strip().split(","))


def _start(path: Path) -> str:
    """Return the first characters of a file; nothing of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(4096).decode(errors="replace")
    except OSError:
        return ""
