"""Write the results of the long-context tasks: tables, JSON, CSV, figures and Markdown."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.evaluate.curves import Table, to_csv
from pretrain.evaluate.figures import COLOURS, FORMATS
from pretrain.evaluate.records import cluster_interval
from pretrain.evaluate.tasks.rows import CUTS, PLANTED, QUERY, Arm, Cell
from pretrain.evaluate.tasks.scoring import Score
from pretrain.rundir.files import replace_file

# ---- results ----
# Turn losses of sequences into records: means over samples, with their confidence intervals.


FIELDS = (
    "run",
    "step",
    "method",
    "seed",
    "train_length",
    "tokenizer",
    "validation",
    "precision",
    "task",
    "length",
    "depth",
    "distance",
    "measure",
    "value",
    "low",
    "high",
    "n",
    "documents",
    "tokens",
    "checkpoint",
)
"""Keys of a record in tasks.json and columns of tasks.csv."""
MEASURES = ("gain_nats", "loss_nats", "accuracy")
"""What is measured of every cell: the gain from the context, the loss with it, and the share of
scored tokens that the model then holds for the most probable ones. In nats per token."""
Record = Mapping[str, Any]
Samples = NDArray[np.float64]


def measure(cell: Cell, score: Score) -> Iterator[dict[str, Any]]:
    """Yield the records of a cell, with the keys of FIELDS from "task" to "tokens".

    Args:
        cell: A task at one length.
        score: Scores one arm.
    """
    losses = {name: _by_sample(arm, score(arm), cell.samples) for name, arm in cell.arms.items()}
    for place in cell.places:
        helped, alone = losses[place.helped], losses[place.alone]
        # The gain is a mean of differences within samples, which share all but the context.
        values = dict(zip(MEASURES, (alone[:, 0] - helped[:, 0], helped[:, 0], helped[:, 1])))
        arm = cell.arms[place.helped]
        for name, samples in values.items():
            low, high = interval(samples, cell.clusters)
            yield {
                "task": cell.task,
                "length": cell.length,
                "depth": place.depth,
                "distance": place.distance,
                "measure": name,
                "value": float(samples.mean()),
                "low": low,
                "high": high,
                "n": len(samples),
                "documents": cell.documents,
                "tokens": len(arm.rows) * arm.scored,
            }


def _by_sample(arm: Arm, scores: NDArray[np.float64], samples: int) -> Samples:
    """Return the means [samples, 2] of [rows, 2], whose rows all score as many tokens."""
    sums, counts = np.zeros((samples, 2)), np.zeros(samples)
    owners = np.array([row.sample for row in arm.rows])
    np.add.at(sums, owners, scores)
    np.add.at(counts, owners, 1)
    return sums / counts[:, None]


def interval(samples: Samples, clusters: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of the mean of samples that come in clusters.

    Args:
        samples: [n] values.
        clusters: [n] the cluster of each. Samples of one document are alike, so that many of them
            know little more than one.

    Returns:
        (low, high); (None, None) with a single cluster, and (nan, nan) if a value is not finite.
    """
    if not np.isfinite(samples).all():
        return math.nan, math.nan
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    sums, counts = np.bincount(cluster, samples), np.bincount(cluster).astype(np.float64)
    low, high = cluster_interval(sums.astype(np.float64), counts)
    return (None, None) if math.isnan(low) else (low, high)


# ---- Draw the results of the long-context tasks, as PNG and SVG ----


Curve = tuple[str, int]
"""A run and a step."""
DISTANCE = "Tokens from one copy to the other"


def draw(records: Sequence[Record], labels: Mapping[Curve, str]) -> dict[str, bytes]:
    """Draw all tasks, a row of panels for each: by length, and at the longest length by place.

    Args:
        records: With the keys of `results.FIELDS`.
        labels: Name of each curve, in the order of the legend.

    Returns:
        The figure by the suffix of its file: .png and .svg.
    """
    tasks = list(dict.fromkeys(record["task"] for record in records))
    figure = Figure(figsize=(10.5, 3.6 * len(tasks) + 0.5), dpi=144, layout="constrained")
    # The canvas is chosen here and pyplot is not used, so that no display is needed.
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(tasks), 2, squeeze=False)
    colours = {curve: COLOURS[i % len(COLOURS)] for i, curve in enumerate(labels)}
    for (left, right), task in zip(grid, tasks):
        of_task = [record for record in records if record["task"] == task]
        _PANELS[task](left, right, of_task, colours)
    samples = [Line2D([], [], color=colours[curve], linewidth=2, marker="o") for curve in labels]
    figure.legend(
        samples, list(labels.values()), loc="outside upper center", ncols=4, frameon=False
    )
    pictures = {}
    # Equal figures are equal bytes: without versions, dates and random ids.
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        content = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "pretrain"}):
            figure.savefig(content, format=kind, metadata=metadata)
        pictures[f".{kind}"] = content.getvalue()
    return pictures


def _needle(
    left: Axes, right: Axes, records: Sequence[Record], colours: Mapping[Curve, str]
) -> None:
    first = [r for r in records if r["depth"] == 0]
    _panel(left, first, "length", "gain_nats", colours, "needle at the beginning")
    longest = _longest(records)
    _panel(right, longest, "depth", "gain_nats", colours, f"needle in {_tokens(longest)}")


def _induction(
    left: Axes, right: Axes, records: Sequence[Record], colours: Mapping[Curve, str]
) -> None:
    farthest: dict[tuple[Curve, int], int] = {}
    for record in records:
        key = _curve(record), record["length"]
        farthest[key] = max(farthest.get(key, 0), record["distance"])
    far = [r for r in records if r["distance"] == farthest[_curve(r), r["length"]]]
    _panel(left, far, "length", "gain_nats", colours, "copy across the context")
    longest = _longest(records)
    _panel(right, longest, "distance", "accuracy", colours, f"copy in {_tokens(longest)}")


def _documents(
    left: Axes, right: Axes, records: Sequence[Record], colours: Mapping[Curve, str]
) -> None:
    _panel(left, records, "length", "gain_nats", colours, "second half of documents")
    right.set_visible(False)


_PANELS = {"needle": _needle, "induction": _induction, "documents": _documents}
_X_LABELS = {
    "length": "Context (tokens)",
    "depth": "Depth of the needle (0: beginning, 1: right before the query)",
    "distance": DISTANCE,
}
_Y_LABELS = {"gain_nats": "Gain (nats per token)", "accuracy": "Accuracy (most probable token)"}


def _panel(
    axes: Axes,
    records: Sequence[Record],
    x: str,
    name: str,
    colours: Mapping[Curve, str],
    title: str,
) -> None:
    """Draw one measure with its intervals, a curve for each checkpoint.

    Args:
        axes: Where to draw.
        records: Of one task.
        x: The key whose values go along the x axis.
        name: The measure.
        colours: Colour of each curve.
        title: What is shown.
    """
    points = [r for r in records if r["measure"] == name and _is_finite(r["value"])]
    if x != "depth":
        axes.set_xscale("log", base=2)
        ticks = sorted({record[x] for record in points})
        axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
    for curve, colour in colours.items():
        own = sorted((r for r in points if _curve(r) == curve), key=lambda r: float(r[x]))
        places = [record[x] for record in own]
        axes.plot(places, [r["value"] for r in own], color=colour, linewidth=2, marker="o")
        known = [r for r in own if _is_finite(r["low"]) and _is_finite(r["high"])]
        low, high = [r["low"] for r in known], [r["high"] for r in known]
        axes.fill_between([r[x] for r in known], low, high, color=colour, alpha=0.2, linewidth=0)
    if x == "length":
        for trained in {record["train_length"] for record in points}:
            axes.axvline(trained, color="#888888", linewidth=1.2, linestyle=":")
    if name == "accuracy":
        axes.set_ylim(-0.03, 1.03)
    else:
        axes.axhline(0, color="#888888", linewidth=1)
    counts = sorted({record["n"] for record in points})
    several = "" if not counts else f", n = {counts[0]}"
    several += f" to {counts[-1]}" if len(counts) > 1 else ""
    axes.set_title(title + several, fontsize=10)
    axes.set_xlabel(_X_LABELS[x])
    axes.set_ylabel(_Y_LABELS[name])
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _longest(records: Sequence[Record]) -> list[Record]:
    """Return the records at the longest length."""
    longest = max(record["length"] for record in records)
    return [record for record in records if record["length"] == longest]


def _tokens(records: Sequence[Record]) -> str:
    return f"{records[0]['length']} tokens"


def _curve(record: Record) -> Curve:
    return record["run"], record["step"]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


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
