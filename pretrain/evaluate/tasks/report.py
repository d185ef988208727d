"""Write the results of the long-context tasks: tables, JSON, CSV, figures and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError
from pretrain.evaluate.drawing import FORMATS
from pretrain.evaluate.tables import Table, to_csv
from pretrain.evaluate.tasks.plots import Curve, draw
from pretrain.evaluate.tasks.results import FIELDS, Record
from pretrain.evaluate.tasks.rows import CUTS, PLANTED, QUERY
from pretrain.rundir.files import replace_file

INTERVALS = (
    "In brackets: the 95 % confidence interval of the mean of n samples, by Student's t over the "
    "documents that they are from (of random tokens: over the samples); none where all are from "
    "one document. It is about other such samples, not about another seed of the training."
)
EXPLAINED = {
    "needle": f"**needle**: {PLANTED} tokens of validation text stand at a depth of other "
    f"validation text (0: at its beginning, 1: right before the query), and are repeated at the "
    f"end. The first {QUERY} tokens of the repetition are the query, the loss is that of the other "
    f"{PLANTED - QUERY}. The gain is how much lower it is than without the needle in the context.",
    "induction": f"**induction**: the same with {PLANTED} random tokens, all different, whose two "
    "copies begin a distance apart, with text between and before. Accuracy is the share of tokens "
    "of the second copy that the model holds for the most probable ones.",
    "documents": "**documents**: the second half of pieces of validation documents. The gain is "
    "how much lower the loss is with all of the piece before each token than with the last "
    f"L tokens alone (at least L - L/{CUTS}).",
}
"""The tasks in the report."""
TABLES = (
    ("needle", "gain_nats", "depth", "needle: gain in nats per token"),
    ("induction", "gain_nats", "distance", "induction: gain in nats per token"),
    ("induction", "accuracy", "distance", "induction: accuracy on the second copy"),
    ("documents", "gain_nats", None, "documents: gain in nats per token"),
)
"""(task, measure, what rows are told apart by, title)."""

SUFFIXES = (".csv", *(f".{kind}" for kind in FORMATS), ".md")
"""Endings of the files that are written beside FILE.json."""


def check_out(out: Path) -> None:
    """Check that a report may be written to `out`.

    Raises:
        ConfigError: It is no .json file, or holds something else, which would be lost.
    """
    if out.suffix != ".json":
        raise ConfigError(
            f"--out {out}: the file name must end in .json. The other files are written beside it"
        )
    if not out.exists():
        # Without the JSON nothing says that the others are of an earlier report.
        for path in (out.with_suffix(suffix) for suffix in SUFFIXES):
            if path.exists():
                raise ConfigError(
                    f"--out {out}: {path} would be overwritten, and no report of tasks lies "
                    "beside it. Choose another name"
                )
        return
    try:
        records = json.loads(out.read_text())["records"]
        is_ours = all("task" in record for record in records)
    except (OSError, ValueError, TypeError, KeyError):
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"--out {out}: is there already, and no report of tasks. Choose another name, as in "
            f"--out {out.with_name('tasks.json')}"
        )


def curve_labels(records: Sequence[Record]) -> dict[Curve, str]:
    """Return a name for each run and step: the method, with both where it is not the only one."""
    methods: dict[Curve, str] = {(r["run"], r["step"]): r["method"] for r in records}
    names = list(methods.values())
    return {
        (run, step): method if names.count(method) == 1 else f"{method} ({run}, step {step})"
        for (run, step), method in methods.items()
    }


def make_tables(records: Sequence[Record]) -> list[tuple[str, Table]]:
    """Return (task, table) of what was measured: a column for each length."""
    labels = curve_labels(records)
    found = []
    for task, name, key, title in TABLES:
        own = [r for r in records if (r["task"], r["measure"]) == (task, name)]
        if not own:
            continue
        lengths = sorted({record["length"] for record in own})
        counts = sorted({record["n"] for record in own})
        if len(counts) == 1:
            title += f", n = {counts[0]}"
        documents = sorted({record["documents"] for record in own} - {None})
        if documents:
            few, many = documents[0], documents[-1]
            title += f" from {few if few == many else f'{few} to {many}'} documents"
        cells: dict[tuple[str, Any], dict[int, str]] = {}
        for record in own:
            row = labels[record["run"], record["step"]], record[key] if key else None
            cells.setdefault(row, {})[record["length"]] = _cell(record, len(counts) > 1)
        order = list(labels.values())
        rows = [
            [label, "" if place is None else f"{place:g}", *(of.get(n, "-") for n in lengths)]
            for (label, place), of in sorted(
                cells.items(), key=lambda item: (order.index(item[0][0]), item[0][1] or 0)
            )
        ]
        header = ["method", key or "", *_length_labels(lengths, own)]
        found.append((task, Table(title, header, rows, 2)))
    return found


def _length_labels(lengths: Sequence[int], records: Sequence[Record]) -> list[str]:
    """Return lengths in tokens, and as multiples of L if all were trained at the same."""
    trained = {record["train_length"] for record in records}
    if len(trained) > 1:
        return [str(length) for length in lengths]
    [own] = trained
    return [f"{n} = {'L' if n == own else f'{n / own:.3g} L'}" for n in lengths]


def _cell(record: Record, with_count: bool) -> str:
    """Return a value with its interval, and its number of samples where that varies."""
    text = f"{record['value']:.3f}"
    if record["low"] is not None:
        text += f" [{record['low']:.3f}, {record['high']:.3f}]"
    return text + (f" n={record['n']}" if with_count else "")


def format_tables(records: Sequence[Record]) -> str:
    """Return all tables as plain text, with what the brackets mean."""
    parts = [table.plain() for _, table in make_tables(records)]
    return "\n\n".join([*parts, *_warnings(records), INTERVALS])


def _warnings(records: Sequence[Record]) -> list[str]:
    """Return sentences about what must not be compared."""
    found = []
    if len({record["tokenizer"] for record in records}) > 1:
        found.append(
            "Not all runs have the same tokenizer: nats are per token, and each has its own."
        )
    if len({record["validation"] for record in records}) > 1:
        found.append("Not all runs were measured on the same validation text.")
    precisions = sorted({record["precision"] for record in records})
    if len(precisions) > 1:
        by_run = (f"{r['run']} in {r['precision']}" for r in records)
        found.append(
            "Not all runs were measured in the same precision, which is a difference of its own: "
            f"{', '.join(dict.fromkeys(by_run))}."
        )
    return found


def write_report(out: Path, records: Sequence[Record], left_out: Sequence[str]) -> list[str]:
    """Write FILE.json and, beside it, FILE.csv, FILE.png, FILE.svg and FILE.md.

    Each file appears whole; the JSON comes last. Values that are not finite are null in it.

    Args:
        out: FILE.json, in a directory that exists.
        records: With the keys of `results.FIELDS`.
        left_out: Sentences about what was not measured.

    Returns:
        The names of the files.
    """
    contents: dict[str, bytes] = {
        ".csv": to_csv(FIELDS, ([record[field] for field in FIELDS] for record in records)),
        **draw(records, curve_labels(records)),
        ".md": _markdown(records, left_out, out.with_suffix(".png").name).encode(),
        ".json": _json(records),
    }
    for suffix, content in contents.items():
        replace_file(out.with_suffix(suffix), content)
    return [out.with_suffix(suffix).name for suffix in contents]


def _json(records: Sequence[Record]) -> bytes:
    # JSON has neither nan nor infinity (RFC 8259, section 6), and strict readers refuse them.
    rows = [{field: _finite_or_none(record[field]) for field in FIELDS} for record in records]
    return (json.dumps({"records": rows}, indent=1, allow_nan=False) + "\n").encode()


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _markdown(records: Sequence[Record], left_out: Sequence[str], picture: str) -> str:
    """Return the report as Markdown, which shows the picture of this name."""
    tables = make_tables(records)
    tasks = dict.fromkeys(task for task, _ in tables)
    lengths: Mapping[str, int] = {r["run"]: r["train_length"] for r in records}
    trained = ", ".join(f"{run} at {length}" for run, length in lengths.items())
    parts = [
        "# Long-context tasks",
        "A gain is in nats per token; 0 means that the model makes no use of the context that "
        f"could help. L is the training length in tokens: {trained}.",
        "\n".join(f"- {EXPLAINED[task]}" for task in tasks),
        INTERVALS,
        *_warnings(records),
        f"![long-context tasks]({picture})",
    ]
    parts += [table.markdown() for _, table in tables]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {sentence}" for sentence in left_out)]
    return "\n\n".join(parts) + "\n"
