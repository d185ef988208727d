"""Draw the results of the long-context tasks, as PNG and SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from pretrain.evaluate.drawing import COLOURS
from pretrain.evaluate.tasks.results import Record

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
