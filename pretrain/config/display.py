"""Show tables, sizes and times as people read them in a terminal."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from pretrain.config.errors import in_bytes


def columns(rows: Sequence[Sequence[str]], right: Collection[int], gap: str = "  ") -> list[str]:
    """Return the lines of a table.

    Args:
        rows: The cells of each row, as many in each, the head first.
        right: Numbers of the columns that are aligned to the right.
        gap: What stands between two columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        gap.join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def size(count: int) -> str:
    """Return a number of bytes for people: 4212 -> "4.2 kB"."""
    return in_bytes(count).partition(" (")[0]


def moment(at: float) -> str:
    """Return Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
