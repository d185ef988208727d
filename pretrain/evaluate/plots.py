"""Draw the figures of a report as PNG: perplexity by length and by step, loss by position."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

# Okabe and Ito's palette, which colour-blind readers can tell apart (jfly.uni-koeln.de/color),
# without its yellow, which is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LOG_SPREAD = 3.0
"""The y axis is logarithmic when the largest value exceeds this multiple of the smallest."""
LABEL_POINTS = 14
"""Smallest vertical distance between the labels at the ends of two curves, in points."""
POINTS_PER_INCH = 72


class Series(NamedTuple):
    """One curve of perplexities."""

    name: str
    """Label of the curve: a method, a checkpoint's step, or a window length."""
    protocol: str
    """Either "nonoverlapping" or "sliding by S", with the stride S in tokens."""
    perplexities: dict[int, float]
    """Perplexity by window length in tokens, or by training step, in ascending order of the key."""


def plot_by_length(train_length: int, series: Sequence[Series]) -> bytes:
    """Plot perplexity against window length, one colour for each name.

    Nonoverlapping curves are solid, sliding ones dashed, and the training length is marked.

    Args:
        train_length: Training length L in tokens.
        series: Curves by window length in tokens.

    Returns:
        The figure as PNG.
    """
    figure, axes = _axes("Evaluation length (tokens, and in training lengths L)", "Perplexity")
    colours, ends = _draw_perplexities(axes, series)
    lengths = sorted({n for s in series for n in s.perplexities})
    axes.set_xticks(lengths, [length_label(n, train_length, "\n") for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    _mark_training_length(axes, train_length)
    _label_ends(figure, axes, max(lengths), ends, colours)
    return _png(figure)


def plot_by_step(series: Sequence[Series]) -> bytes:
    """Plot perplexity against training step, one colour for each window length, and return a PNG.

    Nonoverlapping curves are solid, sliding ones dashed.
    """
    figure, axes = _axes("Training step", "Perplexity", log_x=False)
    colours, ends = _draw_perplexities(axes, series)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _label_ends(figure, axes, max(step for s in series for step in s.perplexities), ends, colours)
    return _png(figure)


def plot_by_position(
    train_length: int, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]
) -> bytes:
    """Plot loss against the position in the window, with the training length marked.

    Args:
        train_length: Training length L in tokens.
        lines: (name, positions counted from 1, losses in nats) of each curve.

    Returns:
        The figure as PNG.
    """
    figure, axes = _axes("Position in the window (tokens)", "Loss (nats per token)")
    colours = _colours(name for name, _, _ in lines)
    ends: dict[str, float] = {}
    for name, positions, losses in lines:
        values = [_drawable(loss) for loss in losses]
        axes.plot(positions, values, color=colours[name], linewidth=2)
        last = [v for v in values if not math.isnan(v)]
        if last:
            ends[name] = last[-1]
    right = max(max(positions) for _, positions, _ in lines)
    ticks = [2**n for n in range(0, math.ceil(math.log2(right + 1)) + 1, 2)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    _mark_training_length(axes, train_length)
    _label_ends(figure, axes, right, ends, colours)
    return _png(figure)


def relative_length(length: int, train_length: int) -> str:
    """Return a length as a multiple of the training length: "L", "2 L" or "1.5 L"."""
    return "L" if length == train_length else f"{length / train_length:.3g} L"


def length_label(length: int, train_length: int, separator: str = " = ") -> str:
    """Return a length in tokens and in training lengths, as in "256 = 2 L"."""
    return f"{length}{separator}{relative_length(length, train_length)}"


def _draw_perplexities(
    axes: Axes, series: Sequence[Series]
) -> tuple[dict[str, str], dict[str, float]]:
    """Draw the curves, and a legend of the protocols if there are several.

    Returns:
        The colour of each name, and the value at the right end of its curve. Where a name has both
        protocols, its label goes to the end of the nonoverlapping curve.
    """
    colours = _colours(s.name for s in series)
    ends: dict[str, float] = {}
    for s in series:
        values = [_drawable(p) for p in s.perplexities.values()]
        style = _line_style(s.protocol, colours[s.name])
        axes.plot(list(s.perplexities), values, **style)
        last = [v for v in values if not math.isnan(v)]
        if last and (s.protocol == "nonoverlapping" or s.name not in ends):
            ends[s.name] = last[-1]
    _scale_values(axes, [p for s in series for p in s.perplexities.values() if math.isfinite(p)])
    protocols = list(dict.fromkeys(s.protocol for s in series))
    if len(protocols) > 1:
        # The colour tells the names apart, so the legend's samples are grey.
        samples = [Line2D([], [], **_line_style(protocol, "#444444")) for protocol in protocols]
        axes.legend(samples, protocols, frameon=False, loc="best", handlelength=3.5)
    return colours, ends


def _line_style(protocol: str, colour: str) -> dict[str, Any]:
    """Return Line2D properties: solid with filled markers, or dashed with open ones if sliding."""
    solid = protocol == "nonoverlapping"
    return {
        "color": colour,
        "linestyle": "-" if solid else (0, (4, 2)),
        "linewidth": 2,
        "marker": "o",
        "markersize": 5,
        "markerfacecolor": colour if solid else "white",
    }


def _axes(x_label: str, y_label: str, log_x: bool = True) -> tuple[Figure, Axes]:
    """Return an empty figure and its labelled axes; a logarithmic x axis has base 2."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    figure = Figure(figsize=(8, 4.6), dpi=144, layout=layout)
    # The canvas is chosen here and pyplot is not used, so that no display is needed, whatever
    # backend matplotlib is configured for.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if log_x:
        axes.set_xscale("log", base=2)
    axes.margins(y=0.08)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, in order of first appearance."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


def _drawable(value: float) -> float:
    """Return nan for an infinite value, so that matplotlib leaves a gap in the curve."""
    return value if math.isfinite(value) else math.nan


def _scale_values(axes: Axes, values: Sequence[float]) -> None:
    """Choose the y axis: logarithmic for a wide spread, never narrower than +-10 % otherwise.

    Without that minimum, matplotlib would zoom in on curves that are equal up to noise.
    """
    if not values:
        return
    low, high = min(values), max(values)
    if high > LOG_SPREAD * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if high < 10 * low else (1, 2, 5))
        )
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif high < 1.1 * low:
        axes.set_ylim(0.9 * low, 1.1 * high)


def _mark_training_length(axes: Axes, train_length: int) -> None:
    """Draw a dotted vertical line at the training length."""
    axes.axvline(train_length, color="#888888", linewidth=1.2, linestyle=":")
    axes.annotate(
        "training length",
        (train_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(5, -3),
        textcoords="offset points",
        rotation=90,
        va="top",
        color="#666666",
        fontsize=9,
    )


def _label_ends(
    figure: Figure, axes: Axes, right: float, ends: dict[str, float], colours: dict[str, str]
) -> None:
    """Write each name beside the end of its curve, and move labels up where they would overlap.

    Args:
        figure: Figure to draw on.
        axes: Its axes, with all curves drawn.
        right: x of the right end of the curves.
        ends: y at the right end of each name's curve.
        colours: Colour of each name.
    """
    # A draw fixes the layout. Axis limits must not change after it, or the pixels would be wrong.
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    pixels = {name: axes.transData.transform((right, value))[1] for name, value in ends.items()}
    gap, previous = LABEL_POINTS * figure.dpi / POINTS_PER_INCH, -math.inf
    for name in sorted(pixels, key=pixels.__getitem__):
        height = max(pixels[name], previous + gap)
        previous = height
        shift = (height - pixels[name]) * POINTS_PER_INCH / figure.dpi
        axes.annotate(
            name,
            (right, ends[name]),
            xytext=(10, shift),
            textcoords="offset points",
            va="center",
            color=colours[name],
            fontweight="bold",
            annotation_clip=False,
        )


def _png(figure: Figure) -> bytes:
    """Return the figure as PNG, without matplotlib's version in it: equal plots are equal bytes."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()
