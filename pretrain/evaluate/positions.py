"""Average losses by position over ranges that widen with the position."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.evaluate.curves import Curve, Value
from pretrain.evaluate.records import PositionLosses, Record

POSITION_FIELDS = (
    "run",
    "step",
    "method",
    "seed",
    "train_length",
    "length",
    "first_position",
    "last_position",
    "loss_nats",
    "tokens",
    "checkpoint",
)
"""Columns of positions.csv. Positions count from 0; both ends of a range are included."""
BINS_PER_OCTAVE = 3
"""Loss by position is averaged over this many ranges each time the position doubles."""


class Binned(NamedTuple):
    """Losses by position of one window length, averaged over ranges of positions."""

    edges: NDArray[np.int64]
    """[bins + 1] first positions of the ranges, counted from 0, and the end of the last range."""
    losses: list[float]
    """[bins] mean loss in nats of the tokens of a range; nan where none was scored."""
    counts: list[int]
    """[bins] tokens scored in a range."""

    @staticmethod
    def of(positions: PositionLosses) -> Binned:
        """Average losses over BINS_PER_OCTAVE ranges for each doubling of the position.

        Single positions are noisy, and a logarithmic axis shows ranges of a constant ratio at a
        constant distance.
        """
        counts = np.asarray(positions.counts, dtype=np.int64)
        # A position at which nothing was scored has the loss nan, and no weight.
        sums = np.where(counts > 0, np.asarray(positions.losses, np.float64), 0.0) * counts
        bins = BINS_PER_OCTAVE * max(1, math.ceil(math.log2(len(counts) + 1)))
        # Rounding makes the first edges, less than one position apart, equal; unique() drops them.
        edges = np.unique(np.geomspace(1, len(counts) + 1, bins + 1).round().astype(int)) - 1
        ranges = list(itertools.pairwise(edges))
        tokens = [int(counts[first:end].sum()) for first, end in ranges]
        total = [float(sums[first:end].sum()) for first, end in ranges]
        losses = [loss / n if n else math.nan for loss, n in zip(total, tokens)]
        return Binned(edges, losses, tokens)

    def centres(self) -> list[float]:
        """Return the geometric mean of each range, with positions counted from 1 for a log axis."""
        return [math.sqrt((first + 1) * end) for first, end in itertools.pairwise(self.edges)]

    def ranges(self) -> list[tuple[float, float, int]]:
        """Return (first position, position after the last, tokens), counted from 1."""
        ends = [(float(first + 1), float(end + 1)) for first, end in itertools.pairwise(self.edges)]
        return [(*pair, count) for pair, count in zip(ends, self.counts)]


class PositionCurve(NamedTuple):
    """Loss by position in the longest window of a curve; of seeds, of each."""

    curve: Curve
    length: int
    """Tokens in the window."""
    binned: list[Binned]
    """One for each seed that has losses by position."""

    def values(self) -> list[Value]:
        """Return the mean loss of each range of positions, with the range of the seeds."""
        result = []
        for losses in zip(*(b.losses for b in self.binned)):
            known = [loss for loss in losses if not math.isnan(loss)]
            if len(known) < len(losses):
                result.append(Value(math.nan, math.nan, math.nan))
            elif len(known) == 1:
                result.append(Value(known[0], math.nan, math.nan))
            else:
                result.append(Value(sum(known) / len(known), min(known), max(known)))
        return result


Positions = Mapping[tuple[str, int], PositionLosses]
"""(checkpoint as in its record, window length) -> losses by position, without overlap."""


def position_curves(curves: Iterable[Curve], positions: Positions) -> list[PositionCurve]:
    """Return loss by position in the longest window of each nonoverlapping curve that has it."""
    return binned_curves(curves, {key: Binned.of(found) for key, found in positions.items()})


def binned_curves(
    curves: Iterable[Curve], positions: Mapping[tuple[str, int], Binned]
) -> list[PositionCurve]:
    """Return the curves of losses that are averaged over ranges already; see `position_curves`."""
    found = []
    for curve in curves:
        if curve.protocol != "nonoverlapping":
            continue
        for length in sorted(curve.records, reverse=True):
            keys = [(source.checkpoint, length) for source in curve.sources]
            binned = [positions[key] for key in keys if key in positions]
            if binned:
                found.append(PositionCurve(curve, length, binned))
                break
    return found


def position_rows(records: Sequence[Record], positions: Positions) -> Iterable[list[Any]]:
    """Yield the rows of positions.csv, of every checkpoint and length.

    Args:
        records: Evaluations, which say the run of each checkpoint.
        positions: Losses by position.
    """
    by_checkpoint = {record["checkpoint"]: record for record in records}
    for (checkpoint, length), losses in positions.items():
        # A checkpoint without a record is no mistake of the losses: they are written all the same.
        record = by_checkpoint.get(checkpoint, {})
        said = [record.get(key) for key in POSITION_FIELDS[:5]]
        binned = Binned.of(losses)
        for (first, end), loss, n in zip(
            itertools.pairwise(binned.edges), binned.losses, binned.counts
        ):
            yield [*said, length, int(first), int(end) - 1, loss, n, checkpoint]


def read_positions(path: Path) -> dict[tuple[str, int], Binned]:
    """Return (checkpoint, window length) -> losses of a positions.csv; none without a file.

    Raises:
        ValueError: The file is no table of losses by position.
    """
    rows: dict[tuple[str, int], list[tuple[int, int, float, int]]] = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                ends = int(row["first_position"]), int(row["last_position"]) + 1
                values = *ends, float(row["loss_nats"]), int(row["tokens"])
                rows.setdefault((row["checkpoint"], int(row["length"])), []).append(values)
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
    return {
        key: Binned(
            np.array([found[0][0], *(end for _, end, _, _ in found)], dtype=np.int64),
            [loss for _, _, loss, _ in found],
            [tokens for _, _, _, tokens in found],
        )
        for key, found in rows.items()
    }
