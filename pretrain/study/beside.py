"""Put a study's numbers beside the published ones, each of which is shown with its key."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pretrain.evaluate.curves import Curve, relative_length
from pretrain.evaluate.tables import Table, cell
from pretrain.study import published
from pretrain.study.evidence import SPEEDS, Evidence, Gap, Row, gap, kind_of
from pretrain.study.published import Perplexity, Published

RATIOS_FROM = "wikitext103"
"""The model family whose ratios stand beside a study that names no published numbers."""


class Beside(NamedTuple):
    """A perplexity of a study beside the published ones."""

    curve: Curve
    length: int
    ratio: Gap | None
    """The loss above that at L, which is the ratio to it; None where L was not measured."""
    same: Published | None
    """The published perplexity of the same method, lengths and protocol."""
    at_multiple: tuple[Published, Published] | None
    """The published perplexities at this multiple of L and at L: of the same L, or the nearest."""

    def difference(self) -> float | None:
        """Return the relative difference from the published perplexity."""
        if self.same is None:
            return None
        return self.curve.value(self.length).value / self.same.value - 1

    def published_ratio(self) -> float | None:
        """Return the published ratio to the perplexity at L."""
        return self.at_multiple[0].value / self.at_multiple[1].value if self.at_multiple else None

    def difference_of_ratios(self) -> float | None:
        """Return the relative difference from the published ratio."""
        theirs = self.published_ratio()
        if theirs is None or self.ratio is None:
            return None
        return self.ratio.ratios()[1] / theirs - 1


def perplexities(curves: Sequence[Curve], model: str | None) -> list[Beside]:
    """Return every value of the curves from L on beside the published ones.

    Args:
        curves: The study's curves.
        model: Model family of the published numbers; None for their ratios alone, which say how
            the perplexity goes with the length whatever the model and the text.
    """
    numbers = published.perplexities(model or RATIOS_FROM)
    found = []
    for curve in curves:
        trained = curve.train_length
        protocol = kind_of(curve)
        for length in (n for n in curve.records if n >= trained):
            of = Perplexity(curve.method, trained, protocol, length)
            ratio = gap(curve, length, curve, trained) if trained in curve.records else None
            same = numbers.get(of) if model else None
            found.append(Beside(curve, length, ratio, same, _at_multiple(numbers, of)))
    return found


def _at_multiple(
    numbers: Mapping[Perplexity, Published], of: Perplexity
) -> tuple[Published, Published] | None:
    """Return the published values at a multiple of L and at L, of the nearest L that has them."""
    found = []
    for number in numbers:
        if (number.method, number.protocol) != (of.method, of.protocol):
            continue
        is_multiple = number.length * of.train_length == of.length * number.train_length
        # At L itself the ratio is 1 by definition.
        is_multiple = is_multiple and number.length > number.train_length
        at_l = numbers.get(number._replace(length=number.train_length))
        if is_multiple and at_l is not None:
            distance = abs(math.log(number.train_length / of.train_length))
            found.append((distance, number.train_length, (numbers[number], at_l)))
    return min(found)[2] if found else None


def perplexity_table(rows: Sequence[Beside], model: str | None) -> Table:
    """Return the table of perplexities beside the published ones.

    Args:
        rows: What stands beside each other.
        model: Model family of the published perplexities, or None.
    """
    header = ["method", "L", "protocol", "length", "in L", "perplexity", "to L"]
    header += ["published", "difference"] if model else []
    header += ["published to L", "difference", "where in published.toml"]
    cells = []
    for row in rows:
        curve = row.curve
        trained = curve.train_length
        words = [curve.name, str(trained), curve.protocol, str(row.length)]
        words += [relative_length(row.length / trained), cell(curve, row.length)]
        words.append("-" if row.ratio is None else f"{row.ratio.ratios()[1]:.3f}")
        if model:
            words += [f"{row.same.value:.2f}" if row.same else "-", _percent(row.difference())]
        theirs = row.published_ratio()
        words += ["-" if theirs is None else f"{theirs:.3f}", _percent(row.difference_of_ratios())]
        keys = [row.same.key] if row.same else []
        keys += [" / ".join(number.key for number in row.at_multiple)] if row.at_multiple else []
        cells.append([*words, "; ".join(dict.fromkeys(keys)) or "-"])
    return Table("Perplexity beside the published numbers", header, cells, names=3)


class Cost(NamedTuple):
    """Costs of a method, as ratios to sinusoidal positions."""

    method: str
    train_length: int
    quantity: str
    """ "training", "evaluation" or "memory"."""
    value: float
    low: float
    high: float
    """Least and largest of the rounds."""
    rounds: int
    theirs: tuple[Published, Published] | None
    """The published numbers of the method and of sinusoidal positions, at the nearest L."""

    def published_ratio(self) -> float | None:
        """Return the published ratio to sinusoidal positions."""
        return self.theirs[0].value / self.theirs[1].value if self.theirs else None


def costs(evidence: Evidence) -> list[Cost]:
    """Return what each method costs beside sinusoidal positions, by training length."""
    base = {row.train_length: row for row in evidence.rows if row.method == "sinusoidal"}
    found = []
    for row in evidence.rows:
        if row.train_length in base:
            found += list(_costs(row, base[row.train_length]))
    return found


def _costs(row: Row, base: Row) -> Iterator[Cost]:
    """Yield the ratios of one method to sinusoidal positions at its training length."""
    for quantity in (*SPEEDS, "memory"):
        if quantity == "memory":
            measured = [row.memory / base.memory] if row.memory and base.memory else []
        else:
            # Compared round by round, because both of a round ran under the same load.
            rounds = zip(row.speeds[quantity], base.speeds[quantity])
            measured = [mine / other for mine, other in rounds if other]
        if measured:
            middle = statistics.median(measured)
            theirs = _nearest(row.method, row.train_length, quantity)
            ends = min(measured), max(measured)
            found = Cost(
                row.method, row.train_length, quantity, middle, *ends, len(measured), theirs
            )
            yield found


def _nearest(method: str, train_length: int, quantity: str) -> tuple[Published, Published] | None:
    """Return the published number of a method and of sinusoidal positions at the nearest L."""
    numbers = published.efficiency()
    lengths = {length for of, length, _ in numbers if of == method}
    if not lengths:
        return None
    nearest = min(sorted(lengths), key=lambda n: abs(math.log(n / train_length)))
    return numbers[method, nearest, quantity], numbers["sinusoidal", nearest, quantity]


def cost_table(rows: Sequence[Cost], device: str) -> Table:
    """Return the table of ratios to sinusoidal positions beside the published ones."""
    header = ["method", "L", "what", "to sinusoidal", "rounds", "published", "difference"]
    cells = []
    for row in rows:
        shown = f"{row.value:.3f}"
        shown += f" ({row.low:.3f} to {row.high:.3f})" if row.rounds > 1 else ""
        theirs = row.published_ratio()
        cells.append(
            [
                row.method,
                str(row.train_length),
                row.quantity if row.quantity == "memory" else f"{row.quantity}, tokens/s",
                shown,
                str(row.rounds) if row.quantity != "memory" else "-",
                "-" if theirs is None else f"{theirs:.3f}",
                _percent(None if theirs is None else row.value / theirs - 1),
                " / ".join(number.key for number in row.theirs) if row.theirs else "-",
            ]
        )
    title = f"Speed and memory beside sinusoidal positions, measured in turns on {device}"
    return Table(title, [*header, "where in published.toml"], cells, names=3)


def _percent(share: float | None) -> str:
    """Return a relative difference as in "+1.5 %"."""
    return "-" if share is None or not math.isfinite(share) else f"{100 * share:+.1f} %"
