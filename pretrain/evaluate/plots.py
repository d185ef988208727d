"""The pictures of a report, as PNG bytes: perplexity by length, perplexity by training step, loss by position."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

# Okabe and Ito's colours, told apart by colour-blind readers; without their yellow, too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LOG_SPREAD = 3.0
"""From this ratio of the largest to the smallest value on, the y axis is logarithmic."""


class Series(NamedTuple):
    """One curve: perplexities by window length in tokens, or by training step, ascending."""

    name: str
    protocol: str
    perplexities: dict[int, float]


def curve(train_length: int, series: Sequence[Series]) -> bytes:
    """Perplexity against length: a colour a method, nonoverlapping solid, sliding dashed, the training length marked."""
    figure, axes = _axes("Evaluation length (tokens, and in training lengths L)", "Perplexity")
    colours, ends = _draw_perplexities(axes, series)
    lengths = sorted({n for s in series for n in s.perplexities})
    axes.set_xticks(lengths, [in_tokens_and_lengths(n, train_length, "\n") for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    _mark_training_length(axes, train_length)
    _label_ends(figure, axes, max(lengths), ends, colours)
    return _png(figure)


def by_step(series: Sequence[Series]) -> bytes:
    """Perplexity against training step: a colour an evaluation length, nonoverlapping solid, sliding dashed."""
    figure, axes = _axes("Training step", "Perplexity", log_x=False)
    colours, ends = _draw_perplexities(axes, series)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _label_ends(figure, axes, max(step for s in series for step in s.perplexities), ends, colours)
    return _png(figure)


def by_position(
    train_length: int, lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]
) -> bytes:
    """Loss against position for (name, positions from 1 on, losses in nats), the training length marked."""
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


def in_lengths(length: int, train_length: int) -> str:
    """A length as a multiple of the training length: L, 2 L, 1.5 L."""
    return "L" if length == train_length else f"{length / train_length:.3g} L"


def in_tokens_and_lengths(length: int, train_length: int, between: str = " = ") -> str:
    """256 = 2 L."""
    return f"{length}{between}{in_lengths(length, train_length)}"


def _draw_perplexities(
    axes: Axes, series: Sequence[Series]
) -> tuple[dict[str, str], dict[str, float]]:
    """(colours, values at the right end) by name; a legend says which protocol is which."""
    colours = _colours(s.name for s in series)
    ends: dict[str, float] = {}
    for s in series:
        values = [_drawable(p) for p in s.perplexities.values()]
        solid = s.protocol == "nonoverlapping"
        axes.plot(
            list(s.perplexities),
            values,
            color=colours[s.name],
            linestyle="-" if solid else (0, (4, 2)),
            linewidth=2,
            marker="o",
            markersize=5,
            markerfacecolor=colours[s.name] if solid else "white",
        )
        last = [v for v in values if not math.isnan(v)]
        if last and (solid or s.name not in ends):
            ends[s.name] = last[-1]
    _scale_values(axes, [p for s in series for p in s.perplexities.values() if math.isfinite(p)])
    protocols = list(dict.fromkeys(s.protocol for s in series))
    if len(protocols) > 1:
        styles = [
            Line2D(
                [],
                [],
                color="#444444",
                linewidth=2,
                linestyle="-" if p == "nonoverlapping" else (0, (4, 2)),
                marker="o",
                markersize=5,
                markerfacecolor="#444444" if p == "nonoverlapping" else "white",
            )
            for p in protocols
        ]
        axes.legend(styles, protocols, frameon=False, loc="best", handlelength=3.5)
    return colours, ends


def _axes(x_label: str, y_label: str, log_x: bool = True) -> tuple[Figure, Axes]:
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    figure = Figure(figsize=(8, 4.6), dpi=144, layout=layout)
    FigureCanvasAgg(figure)  # no display, whatever matplotlib is configured to use
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
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


def _drawable(value: float) -> float:
    """An infinite value is a gap, as nan is."""
    return value if math.isfinite(value) else math.nan


def _scale_values(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where the spread asks for it, and never so close that noise fills the picture."""
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
    """Each name beside the end of its line, moved apart where lines end close together."""
    figure.draw_without_rendering()  # the limits are final from here on
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    pixels = {name: axes.transData.transform((right, value))[1] for name, value in ends.items()}
    gap, previous = 14 * figure.dpi / 72, -math.inf
    for name in sorted(pixels, key=pixels.__getitem__):
        place = max(pixels[name], previous + gap)
        previous = place
        shift = (place - pixels[name]) * 72 / figure.dpi
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
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()
