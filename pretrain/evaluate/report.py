"""Write evaluation results as tables and plots.

A report is curve.json, curve.csv, curve.png and report.md and, where losses by position were
measured, positions.csv and positions.png.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.evaluate import plots
from pretrain.evaluate.plots import Series
from pretrain.evaluate.records import FIELDS, PositionLosses, Record, completed
from pretrain.rundir.files import replace_file

POSITION_FIELDS = ("method", "length", "first_position", "last_position", "loss_nats")
"""Columns of positions.csv. Positions count from 0; both ends of a range are included."""
BINS_PER_OCTAVE = 3
"""Loss by position is averaged over this many ranges each time the position doubles."""
PROTOCOLS_EXPLAINED = (
    "At each length, *nonoverlapping* evaluation cuts the text into consecutive windows and scores "
    "each without the text before it. *Sliding* evaluation moves a window through the text by the "
    "stride, and scores only the last tokens of each window, as many as the stride. Both score "
    "every token exactly once."
)
"""The protocols in report.md."""


def write_report(
    out: Path,
    records: Sequence[Record],
    positions: Mapping[tuple[str, int], PositionLosses] | None = None,
) -> None:
    """Write a report to `out` (FILE.json) and, beside it, FILE.csv, FILE.png and report.md.

    Each file appears whole. Perplexities and losses that are not finite are null in the JSON.

    Args:
        out: Path of the JSON file; its directory is created.
        records: Evaluations in the order in which they should be listed.
        positions: (checkpoint, window length) -> losses by position. Adds positions.csv and
            positions.png.

    Raises:
        ConfigError: `out` does not end in .json, or there are no records.
    """
    check_report_path(out)
    if not records:
        raise ConfigError(
            f"--out {out}: nothing was evaluated. Name at least one run and at least one length"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    train_length = int(records[0]["train_length"] or 1)
    methods = {record["checkpoint"]: record["method"] for record in records}
    by_method = {(methods[c], n): p.losses for (c, n), p in (positions or {}).items()}
    series = _series(records)
    picture = out.with_suffix(".png")
    replace_file(picture, plots.plot_by_length(train_length, series))
    position_picture = _write_positions(out, train_length, by_method) if positions else None
    rows = (list(completed(record).values()) for record in records)
    replace_file(out.with_suffix(".csv"), to_csv(FIELDS, rows))
    report = _markdown(train_length, series, picture.name, position_picture)
    replace_file(out.with_name("report.md"), report.encode())
    # The JSON comes last: where it exists, the report is complete.
    replace_file(out, to_json(train_length, records, FIELDS))


def check_report_path(out: Path) -> None:
    """Raise ConfigError unless `out` is the name of a .json file."""
    if out.suffix != ".json":
        raise ConfigError(
            f"--out {out}: the file name must end in .json. The report's other files are written "
            "beside it"
        )


def _write_positions(
    out: Path,
    train_length: int,
    positions: Mapping[tuple[str, int], Sequence[float] | NDArray[np.float64]],
) -> str:
    """Write positions.csv and positions.png beside `out`; return the name of the picture."""
    binned = [_Binned.of(method, length, losses) for (method, length), losses in positions.items()]
    rows = (row for b in binned for row in b.rows())
    replace_file(out.with_name("positions.csv"), to_csv(POSITION_FIELDS, rows))
    # The plot has one curve for each method. A longer window replaces the shorter ones before it.
    longest = {b.method: b for b in sorted(binned, key=lambda b: b.length)}
    lines = [(b.method, b.centres(), b.losses) for b in longest.values()]
    picture = out.with_name("positions.png")
    replace_file(picture, plots.plot_by_position(train_length, lines))
    return picture.name


def format_table(records: Sequence[Record]) -> str:
    """Return a title and a table: a row for each method and protocol, a column for each length."""
    train_length = int(records[0]["train_length"] or 1)
    lines = plain_table(*perplexity_table(train_length, _series(records)))
    title = f"Perplexity by length in tokens (training length L = {train_length})"
    return "\n".join([title, *lines])


def plain_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table for a terminal: two columns of names, then numbers.

    Names are aligned to the left, numbers to the right, with a rule under the header.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        lines.append("  ".join([*names, *numbers]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _series(records: Sequence[Record]) -> list[Series]:
    """Return one curve for each method and protocol, in the order of the records.

    Where several checkpoints of a method were evaluated, each has its own curve, named after the
    method and the checkpoint.
    """
    checkpoints: dict[str, set[str]] = {}
    for record in records:
        checkpoints.setdefault(record["method"], set()).add(record["checkpoint"])
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        name = record["method"]
        if len(checkpoints[name]) > 1:
            name += f" ({_short_path(record['checkpoint'])})"
        curve = curves.setdefault((name, protocol_name(record)), {})
        curve[record["length"]] = record["perplexity"]
    return [Series(*key, dict(sorted(points.items()))) for key, points in curves.items()]


def protocol_name(record: Record) -> str:
    """Return a record's protocol, with the stride if it slides: other strides, other protocols."""
    sliding = record["protocol"] == "sliding"
    return f"sliding by {record['stride']}" if sliding else record["protocol"]


def _short_path(checkpoint: str) -> str:
    """Return run and step: runs/demo/alibi/checkpoints/step-00000100 -> alibi/step-00000100."""
    return "/".join([part for part in Path(checkpoint).parts if part != "checkpoints"][-2:])


def perplexity_table(
    train_length: int, series: Sequence[Series], first_column: str = "method"
) -> tuple[list[str], list[list[str]]]:
    """Return a table of perplexities as strings, one row for each curve.

    Args:
        train_length: Training length L in tokens.
        series: Curves by window length in tokens.
        first_column: What the curves are named after.

    Returns:
        (header, rows). A length at which a curve has no value is "-".
    """
    lengths = sorted({length for s in series for length in s.perplexities})
    labels = [plots.length_label(length, train_length) for length in lengths]
    rows = []
    for s in series:
        points = s.perplexities
        cells = [format_perplexity(points[n]) if n in points else "-" for n in lengths]
        rows.append([s.name, s.protocol, *cells])
    return [first_column, "protocol", *labels], rows


def format_perplexity(perplexity: float) -> str:
    """Return a perplexity with two decimals, or in scientific notation from 100,000 on."""
    if perplexity < 1e5 or not math.isfinite(perplexity):
        return f"{perplexity:.2f}"
    return f"{perplexity:.3e}"


def _markdown(
    train_length: int, series: Sequence[Series], picture: str, position_picture: str | None
) -> str:
    """Return report.md, which shows the pictures with these file names."""
    parts = [
        "# Perplexity by length",
        f"Trained at L = {train_length} tokens and evaluated at the lengths below. "
        + PROTOCOLS_EXPLAINED,
        f"![perplexity by length]({picture})",
        markdown_table(*perplexity_table(train_length, series)),
        "\n".join(f"- {describe_by_length(train_length, s)}" for s in series),
    ]
    if position_picture is not None:
        parts += [
            "## Loss by position",
            "Mean loss at each position of the longest nonoverlapping window. Tokens at early "
            "positions are predicted from little context.",
            f"![loss by position]({position_picture})",
        ]
    return "\n\n".join(parts) + "\n"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table: two columns of names, then numbers aligned to the right."""
    alignment = ["---", "---", *["---:"] * (len(header) - 2)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, alignment, *rows])


def describe_by_length(train_length: int, series: Series) -> str:
    """Return a sentence that compares a curve's longest length and training length with its best.

    Args:
        train_length: Training length L in tokens.
        series: Curve by window length in tokens.
    """
    name = f"{series.name}, {series.protocol}"
    finite = {n: p for n, p in series.perplexities.items() if math.isfinite(p)}
    if not finite:
        return f"{name}: no finite perplexity."
    best = min(finite, key=finite.__getitem__)
    best_label = _length_in_words(best, train_length)
    sentence = f"{name}: best perplexity {format_perplexity(finite[best])} at {best_label}"
    longest = max(series.perplexities)
    longest_label = _length_in_words(longest, train_length)
    if longest not in finite:
        return f"{sentence}; not finite at {longest_label}, the longest length."
    if longest != best:
        ratio = finite[longest] / finite[best]
        sentence += f"; {ratio:.3f} times that at {longest_label}, the longest length"
    if train_length in finite and train_length not in (best, longest):
        sentence += f"; {finite[train_length] / finite[best]:.3f} times that at L"
    return sentence + "."


def _length_in_words(length: int, train_length: int) -> str:
    """Return a length as in "256 tokens (2 L)"."""
    return f"{length} tokens ({plots.relative_length(length, train_length)})"


class _Binned(NamedTuple):
    """Losses by position, averaged over ranges of positions that widen with the position."""

    method: str
    length: int
    """Tokens in the window."""
    edges: NDArray[np.int64]
    """[bins + 1] first positions of the ranges, counted from 0, and the end of the last range."""
    losses: list[float]
    """[bins] mean loss in nats; nan where no token of the range was scored."""

    @staticmethod
    def of(method: str, length: int, losses: Sequence[float] | NDArray[np.float64]) -> _Binned:
        """Average `losses` [length] over BINS_PER_OCTAVE ranges for each doubling of the position.

        Single positions are noisy, and a logarithmic axis shows ranges of a constant ratio at a
        constant distance.
        """
        values = np.asarray(losses, dtype=np.float64)
        count = BINS_PER_OCTAVE * max(1, math.ceil(math.log2(len(values) + 1)))
        # Rounding makes the first edges, less than one position apart, equal; unique() drops them.
        edges = np.unique(np.geomspace(1, len(values) + 1, count + 1).round().astype(int)) - 1
        bins = (values[first:end] for first, end in itertools.pairwise(edges))
        means = [float(b[~np.isnan(b)].mean()) if not np.isnan(b).all() else math.nan for b in bins]
        return _Binned(method, length, edges, means)

    def centres(self) -> list[float]:
        """Return the geometric mean of each range, with positions counted from 1 for a log axis."""
        return [math.sqrt((first + 1) * end) for first, end in itertools.pairwise(self.edges)]

    def rows(self) -> Iterable[list[Any]]:
        """Yield the rows of positions.csv."""
        for first, end, loss in zip(self.edges, self.edges[1:], self.losses):
            yield [self.method, self.length, int(first), int(end) - 1, loss]


def to_csv(fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a CSV file with these columns, with \\n at the end of lines."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    return text.getvalue().encode()


def to_json(train_length: int, records: Sequence[Record], fields: Sequence[str]) -> bytes:
    """Return curve.json: {"train_length": L, "records": [...]}.

    Args:
        train_length: Training length L in tokens.
        records: Evaluations.
        fields: Keys of the records to write.
    """
    # JSON has neither nan nor infinity (RFC 8259, section 6), and strict readers refuse them.
    rows = [{field: _finite_or_none(record.get(field)) for field in fields} for record in records]
    curve = {"train_length": train_length, "records": rows}
    return (json.dumps(curve, indent=1, allow_nan=False) + "\n").encode()


def _finite_or_none(value: Any) -> Any:
    """Return None for a float that is not finite, and any other value as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
