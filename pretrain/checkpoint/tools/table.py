"""Format what the commands print: tables, sizes and times."""

from __future__ import annotations

import time
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows below a header, in columns.

    Args:
        header: The columns' names.
        rows: The cells, as many in each row.
        left: Number of first columns that begin at the left; the others end at the right.
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def size(count: int) -> str:
    """Return a number of bytes for people: 4212 -> "4.2 kB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def moment(at: float) -> str:
    """Return Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
