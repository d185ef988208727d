"""Print the tables of the model, or replace them in docs/performance.md."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.step_model.tables import tables


def updated(page: str) -> str:
    """Return the page with each table between its markers replaced by the model's.

    A table stands between `<!-- table: NAME -->` and `<!-- end -->`.

    Raises:
        SystemExit: The page has a marker for a table that the model does not make.
    """
    made = tables()

    def replacement(marker: re.Match[str]) -> str:
        if marker[1] not in made:
            raise SystemExit(f"table {marker[1]}: the model makes {', '.join(made)}")
        return f"<!-- table: {marker[1]} -->\n\n{made[marker[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) -->\n.*?<!-- end -->", replacement, page, flags=re.DOTALL)


def main() -> None:
    """Print every table, or write them into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_model", description=__doc__)
    parser.add_argument(
        "--update", type=Path, metavar="PAGE", help="Replace the tables of this Markdown page."
    )
    arguments = parser.parse_args()
    if arguments.update is None:
        for name, text in tables().items():
            print(f"{name}\n\n{text}\n")
    else:
        arguments.update.write_text(updated(arguments.update.read_text()))


if __name__ == "__main__":
    main()
