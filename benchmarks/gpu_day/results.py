"""Files in which a part keeps its results: rows as JSON lines, and whether the part is complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pretrain.rundir.files import append_json_line, read_json_lines

Row = dict[str, Any]


class Rows:
    """The rows of a part, on disk as soon as they are known, so that a part can be cut off."""

    def __init__(self, out: Path, part: str) -> None:
        """Open the part's file.

        Args:
            out: Directory of all results.
            part: Name of the part.
        """
        self.path = out / f"{part}.jsonl"
        out.mkdir(parents=True, exist_ok=True)

    def add(self, row: Row) -> None:
        """Append one row to the file, and print it."""
        append_json_line(self.path, row)
        print(json.dumps(row), flush=True)

    def has(self, **key: Any) -> bool:
        """Return True if a row with these values is there, from this run or an earlier one."""
        return any(key.items() <= row.items() for row in self)

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows written so far."""
        return read_json_lines(self.path)


def state(out: Path, part: str) -> Row:
    """Return what is known of the part's last run; {} if it has not run."""
    path = out / f"{part}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def markdown(rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table, whose columns are all keys in the order of appearance."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
