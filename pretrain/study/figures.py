"""Draw the figures of a study, and write out the numbers that are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pretrain.evaluation.curves import Curve, Value, position_curves, relative_length
from pretrain.evaluation.figures import (
    Frame,
    Line,
    Pictures,
    draw,
    lines_by_length,
    lines_by_position,
)
from pretrain.evaluation.judge import gap
from pretrain.evaluation.records import grouped, to_csv
from pretrain.study import published
from pretrain.study.published import RATIOS_FROM, Cost
from pretrain.study.reading import Study

COLUMNS = ("panel", "line", "group", "x", "value", "low", "high")
"""Columns of a figure's CSV: the panel, the words in the legend for the marker and for the colour,
and what is drawn. An end of an interval that is not known is empty."""
FORMATS = ("png", "svg")
AT_L = "At the training length L"
"""The first panel of the figure of growth."""
NOTHING = math.nan


class Figure(NamedTuple):
    """A figure with the words below it."""

    caption: str
    lines: Sequence[Line]
    frame: Frame

    def in_words(self) -> str:
        """Return what is drawn, for those who do not see it."""
        panels = "; ".join(dict.fromkeys(line.panel for line in self.lines if line.panel))
        named = dict.fromkeys(
            line.mark if line.mark == line.colour else f"{line.mark} ({line.colour})"
            for line in self.lines
        )
        axes = f"{self.frame.y_label} over {self.frame.x_label[:1].lower()}{self.frame.x_label[1:]}"
        return f"Chart: {axes}. Panels: {panels or 'one'}. Lines: {', '.join(named)}."

    def pictures(self) -> Pictures:
        """Return the figure in all formats."""
        return draw(self.lines, self.frame, FORMATS)

    def csv(self) -> bytes:
        """Return the numbers that are drawn, each as it is."""
        return to_csv(
            COLUMNS,
            (
                [line.panel, line.mark, line.colour, x, *map(_or_empty, value)]
                for line in self.lines
                for x, value in zip(line.xs, line.values)
            ),
        )


def figures(study: Study, costs: Sequence[Cost]) -> dict[str, Figure]:
    """Return the figures that a study has numbers for, by the names of their files.

    Args:
        study: The study.
        costs: Speed and memory as ratios to sinusoidal positions.
    """
    found = {}
    if study.curves:
        caption = (
            "Perplexity by the length of validation windows. Dotted lines mark training lengths."
        )
        found["extrapolation"] = Figure(caption, *lines_by_length(study.curves))
        lines, frame = _ratios(study)
        if lines:
            caption = (
                "Perplexity as a ratio to that at the training length, by length in training "
                "lengths; below, the same of the published numbers."
            )
            found["ratio"] = Figure(caption, lines, frame)
    positions = position_curves(study.curves, study.positions)
    if positions:
        caption = (
            "Loss by position in the longest window of each curve, over ranges that widen with the "
            "position."
        )
        found["position"] = Figure(caption, *lines_by_position(positions))
    if costs:
        caption = (
            "Speed and memory as ratios to sinusoidal positions, by training length. Bars are the "
            "least and the largest of the rounds."
        )
        found["efficiency"] = Figure(caption, *_efficiency(costs))
    if grown := _growth(study):
        found["growth"] = grown
    return found


def _ratios(study: Study) -> tuple[list[Line], Frame]:
    """Return the lines of perplexities as ratios to those at L, this study's and the paper's."""
    mine = study.curves
    theirs = _nearest(mine, study.published or RATIOS_FROM)
    groups = {"this study": mine, f"published ({study.published or RATIOS_FROM})": theirs}
    lines = []
    for whose, curves in groups.items():
        for curve in sorted(curves, key=lambda c: c.train_length):
            trained = curve.train_length
            lengths = [n for n in curve.records if n >= trained]
            if trained not in curve.records or len(lengths) < 2:
                continue
            xs = [n / trained for n in lengths]
            values = [_ratio(curve, n, trained) for n in lengths]
            name = curve.name if curves is mine else curve.method
            lines.append(Line(f"{curve.kind}, {whose}", name, f"L = {trained}", xs, values))
    # Colours go from dark to light with L, in the order of the lines.
    lines.sort(key=lambda line: int(line.colour.removeprefix("L = ")))
    drawn = {line.panel for line in lines}
    panels = [panel for whose in groups for panel in sorted(drawn) if panel.endswith(whose)]
    powers = sorted({2 ** round(math.log2(x)) for line in lines for x in line.xs})
    frame = Frame(
        "Evaluation length (in training lengths L)",
        "Perplexity / perplexity at L",
        ticks={float(x): relative_length(x) for x in powers},
        bars="range in which\nnoise puts it",
        panels=panels,
    )
    return lines, frame


def _nearest(mine: Sequence[Curve], model: str) -> list[Curve]:
    """Return the published curves that reach beyond L, of the training lengths nearest to ours."""
    found: dict[Curve, None] = {}
    for curve in mine:
        alike = [
            other
            for other in published.evidence(model).curves
            if (other.method, other.kind) == (curve.method, curve.kind)
            and max(other.records) > other.train_length
        ]
        if alike:
            trained = curve.train_length
            nearest = min(alike, key=lambda c: abs(math.log(c.train_length / trained)))
            found[nearest] = None
    return list(found)


def _ratio(curve: Curve, length: int, trained: int) -> Value:
    """Return the ratio of a perplexity to that at L, with its range."""
    low, value, high = gap(curve, length, curve, trained).ratios()
    return Value(value, NOTHING, NOTHING) if low == high else Value(value, low, high)


def _efficiency(costs: Sequence[Cost]) -> tuple[list[Line], Frame]:
    """Return the lines of speed and memory, this study's and the paper's."""
    panels = {
        "training": "Tokens/s in training",
        "evaluation": "Tokens/s in evaluation",
        "memory": "Peak memory",
    }
    lines = []
    numbers = published.efficiency()
    for quantity, panel in panels.items():
        for method in dict.fromkeys(cost.method for cost in costs):
            mine = [cost for cost in costs if (cost.method, cost.quantity) == (method, quantity)]
            xs = [float(cost.train_length) for cost in mine]
            ranges = [(c.low, c.high) if c.high > c.low else (NOTHING, NOTHING) for c in mine]
            values = [Value(cost.value, *ends) for cost, ends in zip(mine, ranges)]
            if mine:
                lines.append(Line(panel, method, "this study", xs, values))
            theirs = {
                float(length): number.value / numbers["sinusoidal", length, quantity].value
                for (of, length, what), number in numbers.items()
                if (of, what) == (method, quantity)
            }
            values = [Value(value, NOTHING, NOTHING) for value in theirs.values()]
            if theirs:
                lines.append(Line(panel, method, "published, one V100", list(theirs), values))
    lengths = sorted({x for line in lines for x in line.xs})
    ticks = {x: str(int(x)) for x in lengths}
    frame = Frame(
        "Training length L (tokens)",
        "Ratio to sinusoidal",
        ticks=ticks,
        bars="least to largest\nof the rounds",
    )
    return lines, frame


# ---- growth --------------------------------------------------------------------------------------
def _growth(study: Study) -> Figure | None:
    """Return the figure of validation perplexity over training steps, the seeds as one."""
    grown = [run for run in study.runs if study.growth.get(run.name)]
    groups = grouped(grown, lambda run: (run.method, run.train_length))
    lengths = {
        key: set.intersection(*(set(study.growth[run.name]) for run in runs))
        for key, runs in groups.items()
    }
    multiple = _longest_multiple(lengths)
    panels = {AT_L: 1} | ({f"At {multiple} L": multiple} if multiple > 1 else {})
    several = len({length for _, length in groups}) > 1
    lines = []
    for (method, trained), runs in sorted(groups.items(), key=lambda item: item[0][1]):
        colour = f"L = {trained}" if several else method
        for panel, times in panels.items():
            length = times * trained
            if length in lengths[method, trained]:
                values = _mean([study.growth[run.name][length] for run in runs])
                xs = [float(step) for step in values]
                lines.append(Line(panel, method, colour, xs, list(values.values()), len(runs) > 1))
    if not lines:
        return None
    caption = "Validation perplexity over training, at the training length L"
    if multiple > 1:
        caption += (
            f" and at {multiple} L, the longest multiple of L at which all of these runs were "
            "evaluated while training. It is another length for each L."
        )
    else:
        caption += ". There is no longer multiple of L at which all of these runs were evaluated."
    drawn = {line.panel for line in lines}
    panels_drawn = [panel for panel in panels if panel in drawn]
    return Figure(caption, lines, Frame("Training step", "Perplexity", panels=panels_drawn))


def _longest_multiple(lengths: Mapping[tuple[str, int], set[int]]) -> int:
    """Return the longest multiple of L that all have, 1 where they have none.

    One length in tokens would be far beyond L for some and near it for others; as multiples of
    their own L, runs of several training lengths are asked for the same extrapolation.

    Args:
        lengths: (method, L) -> window lengths.
    """
    each = [
        {length // trained for length in found if length % trained == 0}
        for (_, trained), found in lengths.items()
    ]
    return max(set.intersection(*each), default=1) if each else 1


def _mean(by_seed: Sequence[Mapping[int, float]]) -> dict[int, Value]:
    """Return step -> the geometric mean of the seeds with the least and the largest."""
    found = {}
    for step in sorted(set.intersection(*(set(each) for each in by_seed))):
        values = [each[step] for each in by_seed]
        if not all(math.isfinite(value) and value > 0 for value in values):
            found[step] = Value(NOTHING, NOTHING, NOTHING)
        elif len(values) == 1:
            found[step] = Value(values[0], NOTHING, NOTHING)
        else:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            found[step] = Value(mean, min(values), max(values))
    return found


def _or_empty(value: float) -> float | str:
    return "" if math.isnan(value) else value
