"""Compare curves: the difference of two values, its confidence range, and a verdict.

Studies and reports of several runs both use this file. `claims` declares the claims: a claim
passes, fails, or cannot be judged from the given curves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from pretrain.evaluation.records import (
    Curve,
    Record,
    bounded_exp,
    full_name,
    length_in_words,
    number,
    paired_interval,
)
from pretrain.evaluation.windows import NONOVERLAPPING, SLIDING

SPEEDS = ("training", "evaluation")
"""The tasks in which a method's speed is measured."""
ROUNDING = 1e-12
"""Covers the rounding of logarithms, so that a ratio equal to the threshold counts as on it."""


# ---- The difference of two values ----------------------------------------------------------------
# Noise is estimated from blocks of text, which are compared in pairs, and from seeds.
class Verdict(Enum):
    """Verdict of the measured values on a claim."""

    PASSES = "passes"
    FAILS = "fails"
    NOISE = "cannot be judged: inside the noise"
    NO_INTERVAL = "cannot be judged: the noise is not known"
    MISSING = "cannot be judged: not measured"
    UNTRAINED = "cannot be judged: no better than token frequencies"

    @property
    def short(self) -> str:
        """Return "passes", "fails" or "cannot be judged"."""
        return self.value.partition(":")[0]


class Gap(NamedTuple):
    """Difference of two losses in nats, with its confidence range."""

    low: float
    value: float
    high: float

    @property
    def is_shown(self) -> bool | None:
        """Return True if noise does not explain the difference; None if the range is not known."""
        if math.isnan(self.low) or math.isnan(self.high):
            return None
        return self.low > 0 or self.high < 0

    def below(self, ratio: float) -> Verdict:
        """Judge the claim that the first perplexity is less than `ratio` times the second."""
        bound = math.log(ratio) - ROUNDING
        return self._judge(self.high < bound, self.low >= bound)

    def leads(self, ratio: float) -> Verdict:
        """Judge the claim that the first perplexity is lower, by as much as a published ratio.

        Any lead that noise does not explain passes. Without one, the claim fails if the published
        lead lies outside the range: otherwise two methods that are equal would never be judged.
        """
        of_any_size = self.below(1.0)
        is_smaller = of_any_size == Verdict.NOISE and self.low > math.log(ratio) + ROUNDING
        return Verdict.FAILS if is_smaller else of_any_size

    def at_most(self, ratio: float) -> Verdict:
        """Judge the claim that the first perplexity is at most `ratio` times the second."""
        bound = math.log(ratio) + ROUNDING
        return self._judge(self.high <= bound, self.low > bound)

    def at_least(self, ratio: float) -> Verdict:
        """Judge the claim that the first perplexity is at least `ratio` times the second."""
        bound = math.log(ratio) - ROUNDING
        return self._judge(self.low >= bound, self.high < bound)

    def within(self, ratio: float) -> Verdict:
        """Judge the claim that the perplexities differ by at most a factor of `ratio`."""
        return combined([self.at_most(ratio), self.at_least(1 / ratio)])

    def ratios(self) -> tuple[float, float, float]:
        """Return (low end, ratio of the perplexities, high end)."""
        return bounded_exp(self.low), bounded_exp(self.value), bounded_exp(self.high)

    def ratio_in_words(self) -> str:
        """Return the ratio with its range, as in "0.868 times (0.861 to 0.875)"."""
        low, value, high = self.ratios()
        if not low < high:
            return f"{value:.3f} times"
        # More digits for a range that three decimals would hide, because it decides the verdict.
        digits = 3 if high - low >= 0.002 else 5
        return f"{value:.{digits}f} times ({low:.{digits}f} to {high:.{digits}f})"

    def _judge(self, is_so: bool, is_not: bool) -> Verdict:
        if math.isnan(self.low) or math.isnan(self.high):
            return Verdict.MISSING if math.isnan(self.value) else Verdict.NO_INTERVAL
        return Verdict.PASSES if is_so else Verdict.FAILS if is_not else Verdict.NOISE


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim from the verdicts on its parts.

    The claim fails if a part fails. Otherwise it cannot be judged if a part is inside the noise or
    belongs to a run that has learned nothing. Parts that were not measured do not count.
    """
    open_or_not = (Verdict.NOISE, Verdict.NO_INTERVAL, Verdict.UNTRAINED, Verdict.PASSES)
    for verdict in (Verdict.FAILS, *open_or_not):
        if verdict in verdicts:
            return verdict
    return Verdict.MISSING


def gap(a: Curve, at_a: int, b: Curve, at_b: int) -> Gap:
    """Return the loss of one curve minus that of another, or of the same curve at another length.

    It is the difference of the means over all seeds; non-finite losses count as infinite. Its noise
    has two independent parts, whose squares are added: the paired confidence interval over blocks
    of text, or, if losses by block are not known, the two separate intervals; and that of seeds.

    Args:
        a: A curve.
        at_a: Length of its value.
        b: The curve to compare with, of the same tokenizer and text; may be the same curve.
        at_b: Length of its value.
    """
    of_a, of_b = a.records[at_a], b.records[at_b]
    apart = _mean_loss(of_a) - _mean_loss(of_b)
    if not math.isfinite(apart):
        return Gap(apart, apart, apart)
    low, high = paired_interval(of_a, of_b) or _unpaired(of_a, of_b)
    if math.isnan(low) or math.isnan(high):
        return Gap(math.nan, apart, math.nan)
    seeds = _noise_of_seeds(a, at_a, b, at_b)
    below, above = (math.hypot(end - apart, seeds) for end in (low, high))
    return Gap(apart - below, apart, apart + above)


def _noise_of_seeds(a: Curve, at_a: int, b: Curve, at_b: int) -> float:
    """Return half of the 95 % interval of the difference of means over seeds, by Student's t.

    Seeds are independent of each other, but runs of one seed may vary together, as they read the
    same text in the same order. So the difference of the means is a sum of independent terms, one
    for each seed, whose variances add. The variance of common seeds, if there are two or more, is
    that of their terms; that of other seeds is the mean variance of both curves. With equal seeds
    this is the paired interval, with no common seed that of two samples of one variance. With 8
    seeds of which the other curve has 3, it covers 93 % instead of 95 (simulated). One seed of each
    shows no noise: 0.
    """
    # Here, as in `cluster_interval`.
    from scipy.special import stdtrit

    of_a, of_b = (
        {source.seed: number(r["loss_nats"]) for source, r in zip(c.sources, c.records[at])}
        for c, at in ((a, at_a), (b, at_b))
    )
    pairs = [(of_a[seed] / len(of_a), of_b[seed] / len(of_b)) for seed in of_a.keys() & of_b.keys()]
    pairs = pairs if len(pairs) > 1 else []
    alone = sum((len(each) - len(pairs)) / len(each) ** 2 for each in (of_a, of_b))
    # Variances and their degrees of freedom.
    parts = []
    if pairs:
        terms = np.subtract(*np.transpose(pairs))
        parts.append((len(pairs) * terms.var(ddof=1), len(pairs) - 1))
    degrees = len(of_a) + len(of_b) - 2
    if alone and degrees:
        squares = sum(len(each) * np.var([*each.values()]) for each in (of_a, of_b))
        parts.append((alone * squares / degrees, degrees))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return 0.0
    # The degrees of freedom of a sum of variances, after Welch and Satterthwaite.
    effective = variance**2 / sum(part**2 / freedom for part, freedom in parts)
    return float(stdtrit(effective, 0.975) * np.sqrt(variance))


def _mean_loss(records: Sequence[Record]) -> float:
    """Return the mean loss of seeds: infinite if one is not finite."""
    losses = [number(record["loss_nats"]) for record in records]
    return sum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf


def _unpaired(of_a: Sequence[Record], of_b: Sequence[Record]) -> tuple[float, float]:
    """Return the range of the difference of two means from the mean separate intervals."""
    (low_a, high_a), (low_b, high_b) = (
        [
            statistics.fmean(number(record[key]) for record in records)
            for key in ("loss_low", "loss_high")
        ]
        for records in (of_a, of_b)
    )
    return low_a - high_b, high_a - low_b


# ---- cases ---------------------------------------------------------------------------------------
class Unigram(NamedTuple):
    """The best possible prediction that is the same at every position."""

    loss_nats: float
    """Entropy of the frequencies of the scored tokens, the lowest loss of any fixed distribution on
    this text."""
    tokens: int
    """Number of counted tokens."""


@dataclass(frozen=True)
class Case:
    """A claim at one training length, with the numbers that decide its verdict."""

    verdict: Verdict
    words: str
    train_length: int | None = None
    ratio: tuple[float, float, float] | None = None
    """(low, value, high) of the ratio that was compared with the threshold."""
    tokens: int | None = None
    """Tokens scored for each of the values."""
    seeds: int | None = None
    """Number of seeds of the curve with fewer seeds."""
    curves: tuple[Curve, ...] = ()
    """The curves that were compared."""


@dataclass(frozen=True)
class Row:
    """Speed and memory of a method at one training length, measured in turns with other methods."""

    method: str
    train_length: int
    speeds: Mapping[str, Sequence[float]]
    """ "training" and "evaluation" -> tokens per second in each round."""
    memory: float | None
    """Largest peak memory of a process in bytes; None if it was not measured."""

    def shares(self, base: Row, quantity: str) -> list[float]:
        """Return the ratios to another method's "memory", or speed in one of SPEEDS.

        Speeds are compared round by round, because within a round the machine's load is the same.
        """
        if quantity == "memory":
            return [self.memory / base.memory] if self.memory and base.memory else []
        mine, other = (row.speeds.get(quantity, ()) for row in (self, base))
        return [a / b for a, b in zip(mine, other) if b]


@dataclass(frozen=True)
class Evidence:
    """The basis for judging claims: curves of one text and tokenizer, speeds and memory."""

    curves: Sequence[Curve]
    rows: Sequence[Row] = ()
    device: str = ""
    """The device on which speeds and memory were measured."""
    unigram: Unigram | None = None
    """How well the text can be predicted without context; None if tokens were not counted."""

    def of(self, method: str, *kinds: str) -> list[Curve]:
        """Return the curves of a method, ordered by kind and then by training length.

        Args:
            method: The method's name.
            kinds: NONOVERLAPPING and SLIDING (with any stride), in the order of the result.
                Default: both.
        """
        kinds = kinds or (NONOVERLAPPING, SLIDING)
        found = (curve for curve in self.curves if curve.method == method and curve.kind in kinds)
        return sorted(found, key=lambda curve: (kinds.index(curve.kind), curve.train_length))

    def pairs(
        self, method: str, other: str, *kinds: str, multiple: int = 1
    ) -> Iterator[tuple[Curve, Curve]]:
        """Yield curves of two methods under one protocol.

        Args:
            method: The method of the first.
            other: The method of the second.
            kinds: As for `of`.
            multiple: Training length of the second, in training lengths of the first.
        """
        for a, b in itertools.product(self.of(method, *kinds), self.of(other, *kinds)):
            if a.protocol == b.protocol and a.train_length * multiple == b.train_length:
                yield a, b

    def timed(
        self, method: str | None = None, base: str = "sinusoidal", multiple: int = 1
    ) -> Iterator[tuple[Row, Row]]:
        """Yield pairs of rows of two methods that were both timed.

        Args:
            method: The method of the first; None for all methods.
            base: The method of the second.
            multiple: Training length of the second, in training lengths of the first.
        """
        others = {row.train_length: row for row in self.rows if row.method == base}
        for row in self.rows:
            if row.method == (method or row.method) and row.train_length * multiple in others:
                yield row, others[row.train_length * multiple]

    def untrained(self, curve: Curve) -> str:
        """Return why claims about a run mean nothing; "" if it has learned from context.

        The loss of each seed at L is compared with that of token frequencies. A non-finite loss
        counts as not below it.
        """
        lengths = [n for n in curve.records if n == curve.train_length] or list(curve.records)
        losses = [number(record["loss_nats"]) for record in curve.records[lengths[0]]]
        if self.unigram is None or all(loss < self.unigram.loss_nats for loss in losses):
            return ""
        worst = max(losses, key=lambda loss: math.inf if math.isnan(loss) else loss)
        at = length_in_words(lengths[0], curve.train_length)
        loss = f"{worst:.4f} nats a token" if math.isfinite(worst) else "a loss that is not finite"
        return (
            f"{full_name(curve)}: {loss} at {at}, {curve.protocol}, which is not below the "
            f"{self.unigram.loss_nats:.4f} nats of the frequencies of the "
            f"{self.unigram.tokens:,} scored tokens alone"
        )

    def checked(self, case: Case) -> Case:
        """Return the case, or one that cannot be judged if one of its runs has learned nothing."""
        why = [words for curve in dict.fromkeys(case.curves) if (words := self.untrained(curve))]
        if not why:
            return case
        words = f"{'; '.join(why)} ({case.words})"
        return dataclasses.replace(case, verdict=Verdict.UNTRAINED, words=words)


Judge = Callable[[Gap], Verdict]
"""A rule with a threshold, such as: the first perplexity is at most 1.05 times the second."""


def compare(a: Curve, at_a: int, b: Curve, at_b: int, judge: Judge) -> Case:
    """Return the case of two values, or one that says which value was not measured.

    Args:
        a: A curve.
        at_a: Length of its value.
        b: The curve to compare with; may be the same curve.
        at_b: Length of its value.
        judge: Decides whether the difference is as claimed.
    """
    for curve, length in ((a, at_a), (b, at_b)):
        if length not in curve.records:
            return missing(curve, length)
    trained = b.train_length
    if trained in b.records and math.isinf(_mean_loss(b.records[trained])):
        # Compared with a run that has diverged, everything would look good.
        words = f"{full_name(b)} is not finite at its training length, {b.protocol}"
        words += ": nothing compares with it"
        return Case(Verdict.MISSING, words, a.train_length, curves=(a, b))
    found = gap(a, at_a, b, at_b)
    words = f"{_value(a, at_a)} against {_value(b, at_b, a)}, {a.protocol}: "
    words += found.ratio_in_words()
    steps = a.sources[0].step, b.sources[0].step
    if steps[0] != steps[1]:
        words += f", after {steps[0]} and {steps[1]} steps"
    of_a, of_b = a.records[at_a], b.records[at_b]
    return Case(
        judge(found),
        words,
        a.train_length,
        found.ratios(),
        min(record["tokens"] or 0 for record in (*of_a, *of_b)) or None,
        min(len(of_a), len(of_b)),
        (a, b),
    )


def compare_alike(a: Curve, b: Curve, length: int, judge: Judge) -> Case:
    """Compare two methods, but only after equal numbers of steps and, where known, of tokens."""
    tokens = [each.counts("trained_tokens") for each in (a, b)]
    steps = [[each.sources[0].step] for each in (a, b)]
    for unit, (of_a, of_b) in (("steps", steps), ("tokens", tokens)):
        if of_a and of_b and of_a != of_b:
            words = f"{a.name} was trained for {of_a[0]:,} {unit} and {b.name} for {of_b[0]:,}"
            return Case(Verdict.MISSING, f"{words}, L = {a.train_length}", a.train_length)
    return compare(a, length, b, length, judge)


def missing(curve: Curve, length: int) -> Case:
    """Return the case of a value that was not measured."""
    at = length_in_words(length, curve.train_length)
    words = f"{full_name(curve)} was not evaluated at {at}, {curve.protocol}"
    return Case(Verdict.MISSING, words, curve.train_length)


def _value(curve: Curve, length: int, than: Curve | None = None) -> str:
    """Return a value in words, without the curve's name if `than` has the same name."""
    at = f"{curve.value(length).value:.2f} at {length_in_words(length, curve.train_length)}"
    return at if curve is than else f"{full_name(curve)}: {at}"
