"""Draw the figures of a report: by window length, by training step and by position.

All figures share one style: each method has one color and its usual name, each training length has
its own panel, and the caption in the report says what a figure shows.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from pretrain.config.run import MASKED, STREAM
from pretrain.evaluation.judge import gap
from pretrain.evaluation.records import (
    BITS_PER_BYTE,
    PERPLEXITY,
    TITLES,
    Curve,
    PositionCurve,
    Value,
    grouped,
    known_lengths,
    length_label,
    train_lengths,
)
from pretrain.evaluation.windows import NONOVERLAPPING
from pretrain.positions.base import METHODS

# ---- Draw lines with intervals into panels, and return the figure as PNG and SVG ----
# Markers and dashes distinguish lines without color. Equal lines give equal bytes.


class Style(NamedTuple):
    """Sizes of a figure for one medium."""

    widths: tuple[float, float]
    """Width in inches of a figure with one panel, and with several side by side."""
    row: float
    """Height in inches of a row of panels."""
    type: float
    """Font size in points."""
    line: float
    """Line width in points."""
    dots: int
    """Resolution of the PNG in dots per inch."""


STYLES = {
    # The column and page width of a two-column paper, with the font size of captions.
    "paper": Style((3.3, 6.75), 2.1, 8, 1.2, 200),
    # A slide of 13.33 x 7.5 inches.
    "slides": Style((8.0, 12.5), 4.8, 18, 2.6, 110),
}
COLORS = (
    # Okabe and Ito's palette for color-blind readers (jfly.uni-koeln.de/color), without its yellow,
    # which is too pale for lines, and with a gray. Then Paul Tol's "muted"
    # (sronpersonalpages.nl/~pault). METHODS get colors in their order.
    *("#0072B2", "#7F7F7F", "#000000", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#332288", "#117733", "#882255", "#44AA99", "#999933", "#AA4499", "#CC6677", "#88CCEE"),
    "#DDCC77",
)
NEUTRAL = "#444444"
"""The color of everything that is not in METHODS."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (2.5, 1)))
"""Their number has no common factor with that of markers, so a combination repeats only after 45
lines."""
MARKERS_OF_A_LINE = 10
"""Approximate number of markers on a line with more values."""
DOTTED: dict[str, Any] = {"color": "#888888", "linestyle": ":"}
LOG_SPREAD = 3.0
"""The y axis is logarithmic when the largest value exceeds this multiple of the smallest."""
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}
"""Format -> metadata to leave out: the time and the version with which a file was drawn."""
CANVASES = {"png": FigureCanvasAgg, "svg": FigureCanvasSVG}


class Line(NamedTuple):
    """A line through values."""

    panel: str
    """Title of its panel."""
    name: str
    """Its name in the legend. If it begins with a method, this gives the color, and is replaced by
    the method's title."""
    xs: Sequence[float]
    values: Sequence[Value]
    """Values with the ends of their error bars, or of a band."""
    has_band: bool = False
    """Draw the ranges as a band, not as error bars."""


@dataclass(frozen=True)
class Frame:
    """The labels, axes and marks around the lines."""

    x_label: str
    y_label: str
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Position -> label on the x axis, which is then logarithmic to base 2."""
    marked: Mapping[str, Iterable[float]] = field(default_factory=dict)
    """Panel -> positions of dotted vertical lines."""
    marks: str = "training length"
    """Name of these vertical lines in the legend."""
    columns: int = 2
    """Number of panels in a row, at most three. A row shares its y axis."""
    top: float = math.inf
    """Upper limit of the y axis; larger values are cut off."""


@matplotlib.rc_context()
def draw(lines: Sequence[Line], frame: Frame, style: str = "paper") -> dict[str, bytes]:
    """Draw lines, one panel for each of their titles, and a legend below.

    Args:
        lines: The lines to draw, at least one.
        frame: Labels, axes and marks.
        style: One of STYLES.

    Returns:
        Format -> content of the figure's file.
    """
    # Ignore the user's matplotlibrc, which may change sizes and fonts, and so the bytes.
    matplotlib.rcdefaults()
    width = STYLES[style].line
    settings: dict[Any, Any] = {"font.size": STYLES[style].type, "axes.titlesize": "medium"}
    settings |= {"lines.linewidth": width, "lines.markersize": 2.8 * width}
    settings |= {"errorbar.capsize": 1.5 * width, "axes.linewidth": 0.5 * width}
    # A fixed salt, because the ids in an SVG would otherwise be random.
    matplotlib.rcParams.update(settings | {"svg.hashsalt": "pretrain"})
    by_panel = grouped(lines, lambda line: line.panel)
    looks = _looks(lines)
    handles = [Line2D([], [], label=_plain(titled(name)), **look) for name, look in looks.items()]
    if any(map(list, frame.marked.values())):
        handles.append(Line2D([], [], label=frame.marks, **DOTTED))
    figure, grid, layout = _panels(list(by_panel), frame, STYLES[style], handles)
    panels = iter(by_panel.items())
    for row in grid:
        values: list[float] = []
        for axes, (title, own) in zip(row, panels):
            for line in own:
                _draw_line(axes, line, looks[line.name])
                values += itertools.chain(*line.values)
            for x in frame.marked.get(title, ()):
                axes.axvline(x, **DOTTED, zorder=0)
        _scale_values(row[0], values, frame.top)
    # Compute the layout once for all formats, because it takes longer than drawing.
    layout.execute(figure)
    figure.set_layout_engine("none")
    return {kind: _save(figure, kind) for kind in FORMATS}


def _panels(
    titles: Sequence[str], frame: Frame, style: Style, handles: Sequence[Line2D]
) -> tuple[Figure, list[list[Axes]], ConstrainedLayoutEngine]:
    """Return a figure with its legend, its empty panels row by row, and what places them."""
    columns = min(len(titles), 3 if frame.columns % 3 == 0 else min(frame.columns, 2))
    rows = -(-len(titles) // columns)
    width, em = style.widths[columns > 1], style.type / 72
    # A letter is 0.56 em wide on average; the line sample and the spaces take 6 em.
    longest = max(len(str(handle.get_label())) for handle in handles)
    beside = max(1, min(len(handles), int(width / em / (0.56 * longest + 6))))
    height = style.row * rows + 1.5 * em * (-(-len(handles) // beside) + 1)
    layout = ConstrainedLayoutEngine(w_pad=0.5 * em, h_pad=0.5 * em)
    figure = Figure(figsize=(width, height), dpi=style.dots, layout=layout)
    # Choose the canvas here and do not use pyplot, so that no display is needed with any configured
    # backend of matplotlib.
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False)
    for i, axes in enumerate(grid.flat):
        if i >= len(titles):
            axes.remove()
            continue
        axes.set_title(_plain(titles[i]))
        if i % columns == 0:
            axes.set_ylabel(textwrap.fill(frame.y_label, int(style.row / em / 0.65)))
        if i + columns >= len(titles):
            axes.set_xlabel(frame.x_label)
            axes.tick_params(labelbottom=True)
        _style_axes(axes, frame, (width / columns) / em)
    figure.legend(handles=handles, loc="outside lower center", frameon=False, ncols=beside)
    return figure, grid.tolist(), layout


def _style_axes(axes: Axes, frame: Frame, ems: float) -> None:
    """Set the x axis, grid and borders of a panel, whose width with labels is `ems`."""
    if frame.ticks:
        ticks = _spread(frame.ticks, ems - 6)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.margins(y=0.08)
    axes.grid(True, color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _spread(ticks: Mapping[float, str], ems: float) -> dict[float, str]:
    """Return those ticks whose labels do not overlap on an axis that is `ems` wide."""
    octaves = math.log2(max(ticks) / min(ticks))
    chosen: dict[float, str] = {}
    for x, label in sorted(ticks.items()):
        # Digits are 0.64 em wide, and an em is left free.
        needed = (0.64 * max(map(len, label.split("\n"))) + 1) * octaves / ems
        if not chosen or math.log2(x / max(chosen)) >= needed:
            chosen[x] = label
    return chosen


def _looks(lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Return the look of the lines of each name.

    Names of the same method have its color, and later names are paler.
    """
    names = list(dict.fromkeys(line.name for line in lines))
    alike = grouped(names, method_of)
    looks = {}
    for i, name in enumerate(names):
        method = method_of(name)
        color = COLORS[[*METHODS].index(method) % len(COLORS)] if method else NEUTRAL
        white = 0.6 * alike[method].index(name) / max(1, len(alike[method]) - 1)
        looks[name] = {
            "color": to_hex(tuple(np.array(to_rgb(color)) * (1 - white) + white)),
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": DASHES[i % len(DASHES)],
        }
    return looks


def method_of(name: str) -> str:
    """Return the method of METHODS that the name of a result begins with, or ""."""
    found = [method for method in METHODS if re.match(rf"{re.escape(method)}(?![^\W_])", name)]
    return max(found, key=len, default="")


def titled(name: str) -> str:
    """Return the name of a result with the method's title: "ALiBi, 3 seeds"."""
    method = method_of(name)
    title = (METHODS[method].title or method) if method else name
    title = title[:1].upper() + title[1:]
    rest = re.sub("^_(.*)", lambda m: f", {m[1].replace('_', ' ')}", name[len(method) :])
    # The name of a leaderboard's entry may begin with the title itself.
    return title + re.sub(f"^, {re.escape(title)}(?=,|$)", "", rest) if method else title


def _draw_line(axes: Axes, line: Line, look: Mapping[str, Any]) -> None:
    """Draw one line with its intervals. Values that are not finite leave gaps."""
    ranges = np.array(line.values, np.float64).reshape(-1, 3)
    values, low, high = np.where(np.isfinite(ranges), ranges, np.nan).T
    # White edges separate overlapping markers, and few markers leave the dashes visible.
    axes.plot(
        line.xs,
        values,
        markeredgecolor="white",
        markeredgewidth=0.4,
        markevery=max(1, round(len(values) / MARKERS_OF_A_LINE)),
        **look,
    )
    if line.has_band:
        axes.fill_between(line.xs, low, high, color=look["color"], alpha=0.18, linewidth=0)
    elif not np.isnan(low).all():
        # Around the interval's middle, because with very little text a value may lie outside it.
        bars = {"yerr": (high - low) / 2, "fmt": "none", "ecolor": look["color"]}
        axes.errorbar(line.xs, (low + high) / 2, **bars)


def _scale_values(axes: Axes, values: Iterable[float], top: float) -> None:
    """Choose the y axis: logarithmic for a wide spread, never narrower than +-10 % otherwise.

    Without this minimum, matplotlib would zoom in on curves that differ only by noise.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    if high > top:
        axes.set_ylim(low - 0.08 * (top - low), top)
    elif low > 0 and high > LOG_SPREAD * low:
        axes.set_yscale("log")
        subs = (1, 1.5, 2, 3, 4, 5, 7) if high < 10 * low else (1, 2, 5)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    elif high < 1.1 * low:
        axes.set_ylim(0.9 * low, 1.1 * high)


def _plain(text: str) -> str:
    """Return text that matplotlib shows unchanged, with $ not starting a formula."""
    return text.replace("$", r"\$")


def _save(figure: Figure, kind: str) -> bytes:
    """Return the figure in a format, drawn once; savefig would draw it before, for the layout."""
    picture = io.BytesIO()
    getattr(CANVASES[kind](figure), f"print_{kind}")(picture, metadata=FORMATS[kind])
    return picture.getvalue()


# ---- Make the lines of curves ----
PROTOCOLS = {
    NONOVERLAPPING: "nonoverlapping windows",
    STREAM: "one pass over the text",
    MASKED: "masked tokens",
}
"""Protocol -> its name in the title of a panel. For sliding windows the stride is added."""
BARS = (
    "A bar is the 95 % interval of the difference from the first curve of its panel, which has "
    "none; a curve that stands alone has the interval of its value."
)
"""Explanation of the intervals of `lines_by_length` in captions."""
TOKENS_OF_A_VALUE = 256
"""Smallest number of tokens in a mean in figures by position. Losses of single tokens differ by 2
to 3 nats, so a mean of fewer tokens would depend on which tokens they are."""


def panel_of(curve: Curve) -> str:
    """Return the title of a curve's panel."""
    words = PROTOCOLS.get(curve.protocol, f"{curve.protocol} tokens")
    return f"L = {curve.train_length}, {words}"


def in_panels(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return the curves by panel: a row for each protocol, a column for each training length."""
    protocols = list(dict.fromkeys(curve.protocol for curve in curves))
    ordered = sorted(curves, key=lambda c: (protocols.index(c.protocol), c.train_length))
    return grouped(ordered, panel_of)


def line_name(curve: Curve, curves: Iterable[Curve]) -> str:
    """Return a curve's name, or one for all of a method's curves that have unequally many seeds."""
    counts = {len(each.sources) for each in curves if each.method == curve.method and each.is_mean}
    own, of_all = len(curve.sources), f"{min(counts, default=0)} to {max(counts, default=0)}"
    return curve.name.replace(f"{own} seeds", f"{own if len(counts) < 2 else of_all} seeds")


def lines_by_length(
    curves: Sequence[Curve], quantity: str = PERPLEXITY
) -> tuple[list[Line], Frame]:
    """Return a quantity against window length: a panel for each protocol and training length.

    Args:
        curves: Curves by window length in tokens, of one tokenizer and validation set. The
            intervals in a panel are for differences from its first curve.
        quantity: One of `records.TITLES`.
    """
    trained, panels = train_lengths(curves), in_panels(curves)
    lines = []
    for panel, own in panels.items():
        for curve in own:
            xs = known_lengths(curve, quantity)
            if quantity in (PERPLEXITY, BITS_PER_BYTE) and len(own) > 1:
                values = [_beside(curve, x, own[0], quantity) for x in xs]
            else:
                values = [curve.value(x, quantity) for x in xs]
            name = line_name(curve, curves)
            lines.append(Line(panel, name, xs, values, curve.is_mean and len(own) == 1))
    only = trained[0] if len(trained) == 1 else None
    ticks = {x: length_label(int(x), only, "\n") for line in lines for x in line.xs}
    marked = {panel: train_lengths(own) for panel, own in panels.items()}
    columns = len(trained) if only is None else len(panels)
    labels = "Evaluation length (tokens)", TITLES[quantity]
    return lines, Frame(*labels, ticks, marked, columns=columns)


def _beside(curve: Curve, length: int, first: Curve, quantity: str) -> Value:
    """Return a value with the interval of its difference from the first curve's value.

    If a bar does not reach the first curve's line, noise does not explain the difference. With
    different tokenizers, nats cannot be subtracted, and the interval is that of the value itself.
    """
    value = curve.value(length, quantity)
    if curve is first or length not in known_lengths(first, quantity):
        return Value(value.value, math.nan, math.nan)
    base, found = first.value(length, quantity).value, gap(curve, length, first, length)
    if quantity == PERPLEXITY:
        low, _, high = found.ratios()
        return Value(value.value, base * low, base * high)
    if curve.sources[0].tokenizer != first.sources[0].tokenizer:
        return value
    # The ratio of bits per byte to nats per token depends only on the text.
    bits = base / (statistics.fmean(r["loss_nats"] for r in first.records[length]) or math.nan)
    return Value(value.value, base + bits * found.low, base + bits * found.high)


def lines_by_step(
    curves: Sequence[Curve], borders: Sequence[float] = ()
) -> tuple[list[Line], Frame]:
    """Return perplexity against training step: a line for each length and a panel per protocol.

    Args:
        curves: Curves by window length, each of one checkpoint of a run, by one tokenizer.
        borders: Steps after which keys of the run changed, for example when a phase began.
    """
    trained = train_lengths(curves)
    only = trained[0] if len(trained) == 1 else None
    found: dict[tuple[int, str, str], dict[float, Value]] = {}
    for curve in sorted(curves, key=lambda curve: curve.sources[0].step):
        for length in curve.records:
            by_step = found.setdefault((length, panel_of(curve), curve.method), {})
            by_step[curve.sources[0].step] = curve.value(length)
    lines = [
        Line(panel, f"{method}, {length_label(length, only)}", list(steps), list(steps.values()))
        for (length, panel, method), steps in sorted(found.items())
    ]
    marked = {line.panel: borders for line in lines}
    return lines, Frame("Training step", "Perplexity", marked=marked, marks="keys changed")


def lines_by_position(curves: Sequence[PositionCurve]) -> tuple[list[Line], Frame]:
    """Return the lines of loss against position in the longest window of each curve.

    Args:
        curves: Losses by position, of one tokenizer.
    """
    lines, marked = [], {}
    for curve, length, binned in sorted(curves, key=lambda each: each.curve.train_length):
        panel = f"L = {curve.train_length}, windows of {length:,} tokens"
        marked[panel] = [curve.train_length]
        wide = [each.merged(TOKENS_OF_A_VALUE) for each in binned]
        values = [Value.of_seeds(losses) for losses in zip(*(each.losses for each in wide))]
        name = line_name(curve, (each.curve for each in curves))
        lines.append(Line(panel, name, wide[0].centers(), values, len(wide) > 1))
    longest = max(each.length for each in curves)
    powers = range(0, math.ceil(math.log2(longest + 1)) + 1, 2)
    ticks = {float(2**n): str(2**n) for n in powers}
    labels = "Position in the window (tokens)", "Loss (nats per token)"
    return lines, Frame(*labels, ticks, marked, columns=len(marked))
