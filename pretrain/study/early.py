"""Separate what a longer window gains: fewer tokens with little context, or more of it for others.

A window of k L tokens has as many early tokens as one of L, so a text that is cut into longer
windows has fewer of them. Three measurements score the same tokens: windows of L, windows of k L,
and windows of L that slide, in which every token has close to L tokens of context. Were no context
beyond L of any use, windows of k L would have the loss

    capped = (windows of L) / k + (1 - 1 / k) (sliding windows of L),

since one in k of their tokens stands where a window of L has them, and the others have L tokens
before them. From windows of L to `capped` there are only fewer early tokens; from there to what
windows of k L really have, there is only longer context.

Windows of L that slide by S leave their tokens L - S to L - 1 tokens of context. Where the loss
falls with the context, `capped` is then too high: fewer early tokens gain at least as much as is
shown, and longer context at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pretrain.evaluate.blocks import KEY, BlockLosses
from pretrain.evaluate.curves import Curve, number
from pretrain.evaluate.positions import Binned
from pretrain.evaluate.records import Record
from pretrain.evaluate.spread import confidence_interval
from pretrain.study.evidence import NONOVERLAPPING, SLIDING, Gap

EARLY, CONTEXT, TOTAL = "fewer early tokens", "longer context", "in all"


class Full(NamedTuple):
    """The loss of a checkpoint with close to L tokens of context for every token."""

    loss: float
    record: Record | None
    """Its record, if it is of all tokens."""
    how: str


@dataclass(frozen=True)
class Gain:
    """Gain of one curve in windows of `length` over windows of its training length."""

    curve: Curve
    length: int
    parts: Mapping[str, Gap]
    """EARLY, CONTEXT and TOTAL -> nats by which the loss falls; negative where it rises."""
    how: str
    """What the loss with L tokens of context was taken from."""
    tokens: int


def gains(curves: Sequence[Curve], positions: Mapping[tuple[str, int], Binned]) -> list[Gain]:
    """Return the gains of all curves at all lengths beyond their training length.

    Args:
        curves: Curves by window length, under both protocols as far as they were measured.
        positions: (checkpoint, window length) -> losses by position. They stand in where there are
            no sliding windows of L; an interval is not known then.
    """
    sliding: dict[tuple[str, int], Record] = {}
    for curve in curves:
        for record in (r for rs in curve.records.values() for r in rs):
            key = record["checkpoint"], record["length"]
            if record["protocol"] == SLIDING and 2 * record["stride"] <= record["length"]:
                shortest = sliding.get(key)
                if shortest is None or record["stride"] < shortest["stride"]:
                    sliding[key] = record
    found = []
    for curve in (c for c in curves if c.protocol == NONOVERLAPPING):
        trained = curve.train_length
        for length in (n for n in curve.records if n > trained and trained in curve.records):
            parts, how = [], ""
            for at_l, beyond in zip(curve.records[trained], curve.records[length]):
                full = _full(at_l, sliding, positions)
                if full is not None:
                    parts.append(_parts(at_l, beyond, full))
                    how = full.how
            if len(parts) == len(curve.sources):
                tokens = min(record["tokens"] for record in curve.records[length])
                found.append(Gain(curve, length, _of_seeds(parts), how, tokens))
    return found


def _full(
    at_l: Record,
    sliding: Mapping[tuple[str, int], Record],
    positions: Mapping[tuple[str, int], Binned],
) -> Full | None:
    """Return the loss with close to L tokens of context, or None where nothing says it.

    Args:
        at_l: The record of windows of L that do not overlap.
        sliding: (checkpoint, length) -> the record of sliding windows.
        positions: (checkpoint, length) -> losses by position.
    """
    key = at_l["checkpoint"], at_l["length"]
    if key in sliding:
        record = sliding[key]
        how = f"windows of L that slide by {record['stride']}"
        return Full(number(record["loss_nats"]), record, how)
    if key not in positions or math.isnan(positions[key].losses[-1]):
        return None
    binned = positions[key]
    first, end = (int(edge) for edge in binned.edges[-2:])
    return Full(binned.losses[-1], None, f"positions {first} to {end - 1} of windows of L")


def _parts(at_l: Record, beyond: Record, full: Full) -> dict[str, Gap]:
    """Return the parts of one checkpoint's gain.

    Args:
        at_l: The record of windows of L that do not overlap.
        beyond: The record of longer windows.
        full: The loss with close to L tokens of context.
    """
    share = 1 - at_l["length"] / beyond["length"]
    weights = {
        EARLY: (share, 0.0, -share),
        CONTEXT: (1 - share, -1.0, share),
        TOTAL: (1.0, -1.0, 0.0),
    }
    losses = [number(at_l["loss_nats"]), number(beyond["loss_nats"]), full.loss]
    blocks = [r.get(KEY) if r else None for r in (at_l, beyond, full.record)]
    parts = {}
    for name, factors in weights.items():
        value = sum(f * loss for f, loss in zip(factors, losses) if f)
        low, high = _interval([(f, found) for f, found in zip(factors, blocks) if f])
        parts[name] = Gap(low, value, high)
    return parts


def _interval(weighted: Sequence[tuple[float, BlockLosses | None]]) -> tuple[float, float]:
    """Return the 95 % interval of a weighted sum of losses of the same blocks; nan without them."""
    known = [(factor, blocks) for factor, blocks in weighted if blocks is not None]
    counts = known[0][1].counts if known else np.zeros(0)
    # Blocks of another amount of text are not the same blocks.
    if len(known) < len(weighted) or not all(np.array_equal(b.counts, counts) for _, b in known):
        return math.nan, math.nan
    sums = np.sum([factor * blocks.losses for factor, blocks in known], axis=0)
    return confidence_interval(sums, counts)


def _of_seeds(parts: Sequence[Mapping[str, Gap]]) -> dict[str, Gap]:
    """Return the mean of the seeds with a range that holds all of theirs."""
    found = {}
    for name in parts[0]:
        gaps = [each[name] for each in parts]
        value = sum(each.value for each in gaps) / len(gaps)
        if any(math.isnan(each.low) for each in gaps):
            found[name] = Gap(math.nan, value, math.nan)
        else:
            found[name] = Gap(min(g.low for g in gaps), value, max(g.high for g in gaps))
    return found
