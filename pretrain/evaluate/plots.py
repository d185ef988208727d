"""Draw the figures of a report: by window length, by training step and by position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pretrain.evaluate.curves import (
    PERPLEXITY,
    Curve,
    is_known,
    length_label,
    relative_length,
    train_lengths,
)
from pretrain.evaluate.drawing import Frame, Line, Pictures, draw
from pretrain.evaluate.positions import PositionCurve
from pretrain.evaluate.tables import TITLES, tokens_in_words

TICKS = 8
"""Labels on an x axis at most, about as many as find room."""


def plot_by_length(
    curves: Sequence[Curve],
    quantity: str = PERPLEXITY,
    relative: bool = False,
    subject: str = "",
) -> Pictures:
    """Plot values against window length: see `lines_by_length`."""
    return draw(*lines_by_length(curves, quantity, relative, subject))


def plot_by_position(curves: Sequence[PositionCurve], subject: str = "") -> Pictures:
    """Plot loss against the position in the window: see `lines_by_position`."""
    return draw(*lines_by_position(curves, subject))


def lines_by_length(
    curves: Sequence[Curve],
    quantity: str = PERPLEXITY,
    relative: bool = False,
    subject: str = "",
) -> tuple[list[Line], Frame]:
    """Return the lines of values against window length, with a panel for each protocol.

    Of one training length each curve has its colour. Of several, colours are training lengths and
    markers are methods, as in the paper's figures.

    Args:
        curves: Curves by window length in tokens. Perplexities must be of one tokenizer.
        quantity: PERPLEXITY or BITS_PER_BYTE.
        relative: Draw lengths as multiples of each curve's own training length.
        subject: What the figure is about, if the report has several: tokenizer, validation set.
    """
    trained = train_lengths(curves)
    only = trained[0] if len(trained) == 1 else None
    # In the order of the training lengths, since colours are given in the order of the lines.
    curves = sorted(curves, key=lambda curve: curve.train_length)
    lines = []
    for curve in curves:
        unit = curve.train_length if relative else 1
        known = [x for x in curve.records if is_known(curve, x, quantity)]
        lines.append(
            Line(
                curve.protocol,
                curve.name,
                _colour_of(curve, trained),
                [x / unit for x in known],
                [curve.value(x, quantity) for x in known],
                curve.is_mean,
            )
        )
    xs = sorted({x for line in lines for x in line.xs})
    if relative:
        label, marked = "Evaluation length (in training lengths L)", {1.0: ""}
        ticks = {x: relative_length(x) for x in _spread(xs)}
    else:
        label = "Evaluation length (tokens)"
        marked = {float(n): _colour_word(n) for n in trained}
        ticks = {x: length_label(int(x), only, "\n") for x in _spread(xs)}
    title = _title(curves, subject)
    return lines, Frame(label, TITLES[quantity], title, ticks, marked, "training length")


def plot_by_step(curves: Sequence[Curve], subject: str = "") -> Pictures:
    """Plot perplexity against training step: a line for each length and a panel per protocol.

    Args:
        curves: Curves by training step, of one tokenizer.
        subject: What the figure is about, if the report has several.
    """
    lines = [
        Line(
            curve.protocol,
            curve.name,
            curve.name,
            list(curve.records),
            [curve.value(x) for x in curve.records],
        )
        for curve in curves
    ]
    return draw(lines, Frame("Training step", TITLES[PERPLEXITY], _title(curves, subject)))


def lines_by_position(
    curves: Sequence[PositionCurve], subject: str = ""
) -> tuple[list[Line], Frame]:
    """Return the lines of loss against position, above a strip with the tokens of each range.

    The tokens are those of the longest window.

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
            position.curve.name,
            _colour_of(position.curve, trained),
            position.binned[0].centres(),
            position.values(),
            len(position.binned) > 1,
        )
        for position in curves
    ]
    longest = max(curves, key=lambda position: position.length)
    right = longest.length
    ticks = {float(2**n): str(2**n) for n in range(0, math.ceil(math.log2(right + 1)) + 1, 2)}
    marked = {float(n): _colour_word(n) for n in trained}
    counts = longest.binned[0].ranges()
    frame = Frame(
        "Position in the window (tokens)",
        "Loss (nats per token)",
        subject,
        ticks,
        marked,
        "training length",
        counts,
    )
    return lines, frame


def _title(curves: Sequence[Curve], subject: str) -> str:
    """Return the title of a figure: what it is about, and how many tokens it stands on."""
    return ", ".join(filter(None, [subject, f"{tokens_in_words(curves)} tokens scored"]))


def _colour_word(train_length: int) -> str:
    """Return the word in a legend for the colour of a training length."""
    return f"L = {train_length}"


def _colour_of(curve: Curve, trained: Sequence[int]) -> str:
    """Return what the colour of a curve stands for: its training length if there are several."""
    return _colour_word(curve.train_length) if len(trained) > 1 else curve.name


def _spread(xs: Sequence[float]) -> list[float]:
    """Return at most about TICKS of the positions, none so close that labels would overlap."""
    if not xs:
        return []
    gap = math.log2(xs[-1] / xs[0]) / TICKS if xs[-1] > xs[0] else 0.0
    chosen: list[float] = []
    for x in xs:
        if not chosen or math.log2(x / chosen[-1]) >= 0.95 * gap:
            chosen.append(x)
    return chosen
