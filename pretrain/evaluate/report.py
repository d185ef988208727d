"""Numbers to tables and plots: curve.json, curve.csv, curve.png, report.md and, by position, positions.csv and .png."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrain.config import ConfigError
from pretrain.evaluate import plots
from pretrain.evaluate.plots import Series

Record = Mapping[str, Any]
FIELDS = (
    "method",
    "protocol",
    "stride",
    "length",
    "perplexity",
    "loss_nats",
    "tokens",
    "checkpoint",
)
POSITION_FIELDS = ("method", "length", "first_position", "last_position", "loss_nats")
BINS_PER_OCTAVE = 3


def write_report(
    out: Path,
    train_length: int,
    records: Sequence[Record],
    positions: Mapping[tuple[str, int], Sequence[float] | np.ndarray] | None = None,
) -> None:
    """Writes `out` (FILE.json) and, beside it, FILE.csv, FILE.png and report.md, each file in one move.

    A record has the keys of FIELDS: tokens for stride and length, the mean loss in nats; `train_length` is in tokens.
    `positions` maps (method, window length) to the mean loss in nats at every position of the window, nan where no
    token was scored; it adds positions.csv and positions.png. A number that is not finite is null in the JSON.
    Raises ConfigError when `out` is no .json file or there is no record.
    """
    if out.suffix != ".json":
        raise ConfigError(
            f"--out {out}: want a file that ends in .json; the report's other files stand beside it"
        )
    if not records:
        raise ConfigError(f"--out {out}: nothing was evaluated. Name a run and at least one length")
    out.parent.mkdir(parents=True, exist_ok=True)
    series = _series(records)
    picture, position_picture = out.with_suffix(".png"), out.with_name("positions.png")
    publish(picture, plots.curve(train_length, series))
    if positions:
        binned = [
            _Binned.of(method, length, losses) for (method, length), losses in positions.items()
        ]
        publish(
            out.with_name("positions.csv"),
            to_csv(POSITION_FIELDS, (row for b in binned for row in b.rows())),
        )
        longest = {b.method: b for b in sorted(binned, key=lambda b: b.length)}
        lines = [(b.method, b.centres(), b.losses) for b in longest.values()]
        publish(position_picture, plots.by_position(train_length, lines))
    rows = ([record[field] for field in FIELDS] for record in records)
    publish(out.with_suffix(".csv"), to_csv(FIELDS, rows))
    report = _markdown(
        train_length, series, picture.name, position_picture.name if positions else None
    )
    publish(out.with_name("report.md"), report.encode())
    publish(out, to_json(train_length, records, FIELDS))


def format_table(train_length: int, records: Sequence[Record]) -> str:
    """Perplexities as plain text: a row for each method and protocol, a column for each length in tokens and in L."""
    lines = plain_table(*table(train_length, _series(records)))
    return "\n".join(
        [f"Perplexity by length in tokens (training length L = {train_length})", *lines]
    )


def plain_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines for a terminal: two columns of words, then numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        lines.append("  ".join([*names, *numbers]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _series(records: Sequence[Record]) -> list[Series]:
    """One for each curve, in the order of the records. A method met in several checkpoints names its checkpoint."""
    checkpoints: dict[str, set[str]] = {}
    for record in records:
        checkpoints.setdefault(record["method"], set()).add(record["checkpoint"])
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        name = record["method"]
        if len(checkpoints[name]) > 1:
            name += f" ({_short(record['checkpoint'])})"
        curves.setdefault((name, protocol_name(record)), {})[record["length"]] = record[
            "perplexity"
        ]
    return [Series(*key, dict(sorted(points.items()))) for key, points in curves.items()]


def protocol_name(record: Record) -> str:
    """Sliding windows of another stride are another protocol."""
    return (
        f"sliding by {record['stride']}" if record["protocol"] == "sliding" else record["protocol"]
    )


def _short(checkpoint: str) -> str:
    """runs/demo/alibi/checkpoints/step-00000100 -> alibi/step-00000100."""
    return "/".join([part for part in Path(checkpoint).parts if part != "checkpoints"][-2:])


def table(
    train_length: int, series: Sequence[Series], first: str = "method"
) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of strings; a length that a curve lacks is a dash. `first` says what a series' name is."""
    lengths = sorted({length for s in series for length in s.perplexities})
    header = [first, "protocol", *(plots.in_tokens_and_lengths(n, train_length) for n in lengths)]
    cells = [
        [number(s.perplexities[n]) if n in s.perplexities else "-" for n in lengths] for s in series
    ]
    return header, [[s.name, s.protocol, *row] for s, row in zip(series, cells)]


def number(perplexity: float) -> str:
    return (
        f"{perplexity:.2f}"
        if perplexity < 1e5 or not math.isfinite(perplexity)
        else f"{perplexity:.3e}"
    )


def _markdown(
    train_length: int, series: Sequence[Series], picture: str, position_picture: str | None
) -> str:
    parts = [
        "# Perplexity by length",
        f"Trained at L = {train_length} tokens, evaluated at the lengths below. Nonoverlapping: pieces of that length, "
        "each from scratch. Sliding: windows of that length, of which the last predictions (the stride) count. "
        "Every token is scored once.",
        f"![perplexity by length]({picture})",
        markdown_table(*table(train_length, series)),
        "\n".join(f"- {finding(train_length, s)}" for s in series),
    ]
    if position_picture is not None:
        parts += [
            "## Loss by position",
            "Mean loss at each position of the longest window, nonoverlapping. Early positions have little context.",
            f"![loss by position]({position_picture})",
        ]
    return "\n\n".join(parts) + "\n"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Two columns of words, then numbers."""
    right = ["---", "---", *["---:"] * (len(header) - 2)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, right, *rows])


def finding(train_length: int, series: Series) -> str:
    """Where a curve is best and how its longest length and its training length compare, in a sentence."""
    name = f"{series.name}, {series.protocol}"
    finite = {n: p for n, p in series.perplexities.items() if math.isfinite(p)}
    if not finite:
        return f"{name}: no finite perplexity."
    best = min(finite, key=finite.__getitem__)
    sentence = f"{name}: best {number(finite[best])} at {_length(best, train_length)}"
    longest = max(series.perplexities)
    if longest not in finite:
        return f"{sentence}; not finite at {_length(longest, train_length)}."
    if longest != best:
        sentence += f"; {finite[longest] / finite[best]:.3f} times that at {_length(longest, train_length)}, the longest"
    if train_length in finite and train_length not in (best, longest):
        sentence += f"; {finite[train_length] / finite[best]:.3f} times that at L"
    return sentence + "."


def _length(length: int, train_length: int) -> str:
    return f"{length} tokens ({plots.in_lengths(length, train_length)})"


class _Binned(NamedTuple):
    """Losses by position, averaged over ranges of positions that widen with the position."""

    method: str
    length: int
    edges: np.ndarray
    losses: list[float]

    @staticmethod
    def of(method: str, length: int, losses: Sequence[float] | np.ndarray) -> _Binned:
        values = np.asarray(losses, dtype=np.float64)
        count = BINS_PER_OCTAVE * max(1, math.ceil(math.log2(len(values) + 1)))
        edges = np.unique(np.geomspace(1, len(values) + 1, count + 1).round().astype(int)) - 1
        bins = (values[first:end] for first, end in itertools.pairwise(edges))
        means = [float(b[~np.isnan(b)].mean()) if not np.isnan(b).all() else math.nan for b in bins]
        return _Binned(method, length, edges, means)

    def centres(self) -> list[float]:
        """The geometric middle of every range, positions counted from 1 as a logarithmic axis needs."""
        return [math.sqrt((first + 1) * end) for first, end in itertools.pairwise(self.edges)]

    def rows(self) -> Iterable[list[Any]]:
        for first, end, loss in zip(self.edges, self.edges[1:], self.losses):
            yield [self.method, self.length, int(first), int(end) - 1, loss]


def to_csv(fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    return text.getvalue().encode()


def to_json(train_length: int, records: Sequence[Record], fields: Sequence[str]) -> bytes:
    """curve.json. JSON has no nan and no infinity, they become null."""
    rows = [{field: _finite(record[field]) for field in fields} for record in records]
    return (
        json.dumps({"train_length": train_length, "records": rows}, indent=1, allow_nan=False)
        + "\n"
    ).encode()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def publish(path: Path, content: bytes) -> None:
    """The file appears whole or stays as it was, also when two processes write it at once."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
