"""Draw the figures of a report: by window length, by training step and by position."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    LogLocator,
    NullFormatter,
    NullLocator,
    ScalarFormatter,
)

from pretrain.evaluation.records import (
    PERPLEXITY,
    TITLES,
    Curve,
    PositionCurve,
    Value,
    known_lengths,
    length_label,
    lengths_of,
    tokens_in_words,
    train_lengths,
)
from pretrain.positions.base import METHODS

# ---- Draw lines with intervals into panels, and return the figure as PNG and SVG ----
# Every line can be told apart without colour, by its marker and dashes. Equal lines give equal
# bytes.


# Okabe and Ito's palette, which colour-blind readers can tell apart (jfly.uni-koeln.de/color),
# without its yellow, which is too pale for a line, and with a grey. The methods of METHODS take the
# first ones, in their order, so that a method has one colour everywhere.
COLOURS = ("#0072B2", "#7F7F7F", "#000000", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (2.5, 1)))
"""Lengths without a common factor, so that a combination comes back after 360 lines only."""
MARKERS_OF_A_LINE = 10
"""A longer line has a marker at every n-th value only, about this many in all."""
NEUTRAL = "#444444"
DOTTED: dict[str, Any] = {"color": "#888888", "linestyle": ":", "linewidth": 1.2}
LOG_SPREAD = 3.0
"""The y axis is logarithmic when the largest value exceeds this multiple of the smallest."""
PANEL_INCHES = (4.3, 3.9)
LEGEND_INCHES = 2.4
FORMATS = ("png", "svg")


class Line(NamedTuple):
    """A line through values."""

    panel: str
    """Title of the axes that it stands in."""
    mark: str
    """Words in the legend for its marker, dashes and shade."""
    colour: str
    """Words in the legend for its colour; the same as `mark` if that alone tells lines apart. A
    method at their beginning has the same colour in every figure."""
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
    title: str = ""
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Position -> label on the x axis, which is then logarithmic to base 2."""
    marked: Sequence[float] = ()
    """Positions of dotted vertical lines."""
    marks: str = "training length"
    """What these lines are, in the legend."""
    panels: Sequence[str] = ()
    """The panels in their order; by default in the order of the lines."""
    bars: str = "95 % interval"
    """What error bars show."""


@matplotlib.rc_context()
def draw(lines: Sequence[Line], frame: Frame) -> dict[str, bytes]:
    """Draw lines, one panel for each of their titles, and a legend at the right.

    Args:
        lines: What to draw.
        frame: What to write around it.

    Returns:
        Format -> the figure's file.
    """
    # A user's matplotlibrc changes sizes and fonts, and equal lines would not give equal bytes.
    matplotlib.rcdefaults()
    titles = list(dict.fromkeys([*frame.panels, *(line.panel for line in lines)]))
    words = {word for line in lines for word in (line.mark, line.colour)}
    figure, panels = _panels(titles, frame, legend_inches=0.21 * (len(words) + 6))
    colours, marks = _looks(lines)
    for line in lines:
        _draw_line(panels[line.panel], line, marks[line.mark] | colours[line.colour])
    # The panels share their y axis.
    axes = next(iter(panels.values()))
    _scale_values(axes, [v for line in lines for value in line.values for v in value])
    for panel in panels.values():
        for x in frame.marked:
            panel.axvline(x, **DOTTED, zorder=0)
    _legend(figure, lines, colours, marks, frame)
    # The formats share one layout, which takes longer than drawing.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return {kind: _save(figure, kind) for kind in FORMATS}


def _panels(
    titles: Sequence[str], frame: Frame, legend_inches: float
) -> tuple[Figure, dict[str, Axes]]:
    """Return an empty figure and its axes by title, in one row or in rows of two.

    Args:
        titles: Titles of the panels.
        frame: What stands around the lines.
        legend_inches: Height that the legend needs; the figure is at least as high.
    """
    columns = min(len(titles), 2)
    rows = -(-len(titles) // columns)
    width, height = PANEL_INCHES
    figure = Figure(
        figsize=(width * columns + LEGEND_INCHES, max(height * rows, legend_inches)),
        dpi=144,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
    )
    # The canvas is chosen here and pyplot is not used, so that no display is needed, whatever
    # backend matplotlib is configured for.
    FigureCanvasAgg(figure)
    panels: dict[str, Axes] = {}
    for i, title in enumerate(titles):
        first = next(iter(panels.values()), None)
        axes = figure.add_subplot(rows, columns, i + 1, sharex=first, sharey=first)
        panels[title] = axes
        axes.set_title(_plain(title), fontsize=10)
        _style(axes, frame)
        if i % columns == 0:
            axes.set_ylabel(frame.y_label)
        axes.set_xlabel(frame.x_label)
    if frame.title:
        figure.suptitle(_plain(frame.title), fontsize=11)
    return figure, panels


def _style(axes: Axes, frame: Frame) -> None:
    """Set the x axis, the grid and the borders."""
    if frame.ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(frame.ticks), list(frame.ticks.values()))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.08)
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


Looks = dict[str, dict[str, Any]]
"""A word in the legend -> what matplotlib takes."""


def _looks(lines: Sequence[Line]) -> tuple[Looks, Looks]:
    """Return how each word of a colour looks, and each word of a mark, in order of appearance.

    Where marks say something else than colours (training lengths), their lines get darker and wider
    in ascending order, which a grayscale print keeps.
    """
    colours = {word: {"color": colour} for word, colour in _colours(lines).items()}
    words = dict.fromkeys(line.mark for line in lines)
    cycles = zip(words, itertools.cycle(MARKERS), itertools.cycle(DASHES))
    marks: Looks = {
        word: {"marker": marker, "linestyle": dashes} for word, marker, dashes in cycles
    }
    for i, look in enumerate(marks.values()):
        look |= {"linewidth": 1.6, "markersize": 5}
        if not _is_plain(lines):
            share = i / max(1, len(marks) - 1)
            look |= {"linewidth": 1.0 + 1.4 * share, "markersize": 4 + 2 * share}
            # The widest lines are drawn first, so that they do not hide others.
            look |= {"alpha": 0.45 + 0.55 * share, "zorder": 3 - share / 2}
    return colours, marks


def _colours(lines: Iterable[Line]) -> dict[str, str]:
    """Return the colour of each word: that of its method, or one that no method here has."""
    own = dict(zip(METHODS, COLOURS))
    words = dict.fromkeys(line.colour for line in lines)
    found: dict[str, str] = {}
    for word in words:
        method = word.partition(",")[0]
        if method in own and own[method] not in found.values():
            found[word] = own[method]
    free = itertools.cycle([c for c in COLOURS if c not in found.values()] or COLOURS)
    return {word: found.get(word) or next(free) for word in words}


def _is_plain(lines: Iterable[Line]) -> bool:
    """Return True where colours and marks say the same."""
    return all(line.colour == line.mark for line in lines)


def _draw_line(axes: Axes, line: Line, look: Mapping[str, Any]) -> None:
    """Draw one line with its intervals. What is not finite leaves a gap in it."""
    values = [v.value if math.isfinite(v.value) else math.nan for v in line.values]
    low = [v.low if math.isfinite(v.low) else math.nan for v in line.values]
    high = [v.high if math.isfinite(v.high) else math.nan for v in line.values]
    # White edges keep markers apart that lie on each other, and few markers let dashes be seen.
    axes.plot(
        line.xs,
        values,
        markeredgecolor="white",
        markeredgewidth=0.5,
        markevery=max(1, round(len(values) / MARKERS_OF_A_LINE)),
        **look,
    )
    shade = {"alpha": look.get("alpha", 1.0)}
    if line.has_band:
        axes.fill_between(line.xs, low, high, color=look["color"], alpha=0.18, linewidth=0)
    elif not all(map(math.isnan, low)):
        # Around its own middle: a value may lie outside its interval, as of very little text.
        middles = [(a + b) / 2 for a, b in zip(low, high)]
        halves = [(b - a) / 2 for a, b in zip(low, high)]
        bars = {"ecolor": look["color"], "elinewidth": 0.9, "capsize": 2.5, **shade}
        axes.errorbar(line.xs, middles, yerr=halves, fmt="none", **bars)


def _scale_values(axes: Axes, values: Iterable[float]) -> None:
    """Choose the y axis: logarithmic for a wide spread, never narrower than +-10 % otherwise.

    Without that minimum, matplotlib would zoom in on curves that are equal up to noise.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    if low > 0 and high > LOG_SPREAD * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if high < 10 * low else (1, 2, 5))
        )
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif high < 1.1 * low:
        axes.set_ylim(0.9 * low, 1.1 * high)


def _legend(
    figure: Figure,
    lines: Sequence[Line],
    colours: Looks,
    marks: Looks,
    frame: Frame,
) -> None:
    """Write a legend beside the panels, with the lines in the order of their right ends.

    Args:
        figure: Figure with the panels.
        lines: What was drawn.
        colours: Look of each word of a colour.
        marks: Look of each word of a mark.
        frame: What stands around the lines.
    """
    ends: dict[str, float] = {}
    for line in lines:
        last = [v.value for v in line.values if math.isfinite(v.value)]
        ends.setdefault(line.colour, last[-1] if last else math.inf)
    order = sorted(ends, key=lambda word: -ends[word])
    if _is_plain(lines):
        looks = {word: {**colours[word], **marks[word]} for word in order}
    else:
        looks = {word: {**colours[word], "linewidth": 3} for word in order}
        looks |= {word: {"color": NEUTRAL, **look} for word, look in marks.items()}
    handles = [Line2D([], [], label=_plain(word), **look) for word, look in looks.items()]
    if frame.marked:
        handles.append(Line2D([], [], label=frame.marks, **DOTTED))
    notes = []
    has_ranges = [any(math.isfinite(v.low) for v in line.values) for line in lines]
    if any(found and not line.has_band for found, line in zip(has_ranges, lines)):
        notes.append(f"bars: {frame.bars}")
    if any(found and line.has_band for found, line in zip(has_ranges, lines)):
        notes.append("band: least to largest\nof the seeds")
    handles += [Line2D([], [], linestyle="none", label=note) for note in notes]
    figure.legend(
        handles=handles,
        loc="outside right upper",
        frameon=False,
        fontsize=9,
        handlelength=3.2,
    )


def _plain(text: str) -> str:
    """Return text that matplotlib shows as it is, without taking $ for the start of a formula."""
    return text.replace("$", r"\$")


def _save(figure: Figure, kind: str) -> bytes:
    """Return the figure in a format, without dates, versions or random ids in it."""
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
    }
    picture = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "pretrain"}):
        figure.savefig(picture, format=kind, metadata=metadata[kind])
    return picture.getvalue()


TICKS = 8
"""Labels on an x axis at most, about as many as find room."""


def lines_by_length(
    curves: Sequence[Curve], subject: str = "", quantity: str = PERPLEXITY
) -> tuple[list[Line], Frame]:
    """Return the lines of a quantity against window length, with a panel for each protocol.

    Args:
        curves: Curves by window length in tokens, of one tokenizer.
        subject: What the figure is about, if the report has several: tokenizer, validation set.
        quantity: One of `records.TITLES`.
    """
    trained = train_lengths(curves)
    only = trained[0] if len(trained) == 1 else None
    lines = []
    # In the order of the training lengths, since marks are given in the order of the lines.
    for curve in sorted(curves, key=lambda curve: curve.train_length):
        words = words_of(curve.name, curve.train_length, len(trained) > 1)
        known = {float(x): curve.value(x, quantity) for x in known_lengths(curve, quantity)}
        xs, values = list(known), list(known.values())
        lines.append(Line(curve.protocol, *words, xs, values, curve.is_mean))
    ticks = {float(x): length_label(x, only, "\n") for x in _spread(lengths_of(curves))}
    labels = "Evaluation length (tokens)", TITLES[quantity]
    return lines, Frame(*labels, _title(curves, subject), ticks, trained)


def lines_by_step(
    curves: Sequence[Curve], subject: str = "", borders: Sequence[float] = ()
) -> tuple[list[Line], Frame]:
    """Return perplexity against training step: a line for each length and a panel per protocol.

    Args:
        curves: Curves by window length, each of one checkpoint of a run, by one tokenizer.
        subject: What the figure is about, if the report has several.
        borders: Steps after which keys of the run have changed, as where a phase begins.
    """
    trained = train_lengths(curves)
    only = trained[0] if len(trained) == 1 else None
    found: dict[tuple[int, str], dict[float, Value]] = {}
    for curve in sorted(curves, key=lambda curve: curve.sources[0].step):
        for length in curve.records:
            by_step = found.setdefault((length, curve.protocol), {})
            by_step[curve.sources[0].step] = curve.value(length)
    lines = []
    for (length, protocol), by_step in sorted(found.items()):
        name = length_label(length, only)
        lines.append(Line(protocol, name, name, list(by_step), list(by_step.values())))
    title = _title(curves, subject)
    return lines, Frame("Training step", "Perplexity", title, marked=borders, marks="keys changed")


def lines_by_position(
    curves: Sequence[PositionCurve], subject: str = ""
) -> tuple[list[Line], Frame]:
    """Return the lines of loss against position in the longest window of each curve.

    Args:
        curves: Losses by position, of one tokenizer.
        subject: What the figure is about, if the report has several.
    """
    trained = train_lengths(position.curve for position in curves)
    curves = sorted(curves, key=lambda position: position.curve.train_length)
    windows = sorted({position.length for position in curves})
    lines = [
        Line(
            f"Windows of {' and '.join(map(str, windows))} tokens",
            *words_of(position.curve.name, position.curve.train_length, len(trained) > 1),
            position.binned[0].centres(),
            position.values(),
            len(position.binned) > 1,
        )
        for position in curves
    ]
    powers = range(0, math.ceil(math.log2(windows[-1] + 1)) + 1, 2)
    ticks = {float(2**n): str(2**n) for n in powers}
    labels = "Position in the window (tokens)", "Loss (nats per token)"
    return lines, Frame(*labels, subject, ticks, trained)


def _title(curves: Sequence[Curve], subject: str) -> str:
    """Return the title of a figure: what it is about, and how many tokens it stands on."""
    return ", ".join(filter(None, [subject, f"{tokens_in_words(curves)} tokens scored"]))


def words_of(name: str, train_length: int, several: bool) -> tuple[str, str]:
    """Return the words in a legend for a curve's mark and for its colour.

    The colour is the method's. Where there are several training lengths the mark is the length's,
    with whatever else the curve's name says.
    """
    if not several:
        return name, name
    method, _, rest = name.partition(", ")
    return ", ".join(filter(None, [f"L = {train_length}", rest])), method


def _spread(lengths: Sequence[int]) -> list[int]:
    """Return at most about TICKS of the lengths, none so close that labels would overlap."""
    if not lengths:
        return []
    gap = math.log2(lengths[-1] / lengths[0]) / TICKS
    chosen: list[int] = []
    for length in lengths:
        if not chosen or math.log2(length / chosen[-1]) >= 0.95 * gap:
            chosen.append(length)
    return chosen
