"""Compare curves and rule on claims: the only code that says what results show.

A study and the report of two runs ask the same questions here. `gap` says how far two values are
apart and in which range noise puts that; `judge` gives each claim of "Train Short, Test Long" a
verdict: it passes, it fails, or it cannot be judged from these curves. A claim is one function with
its words, its source and its threshold, which is the same for all results.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pretrain.config.run import MASKED
from pretrain.evaluation.records import (
    EVALUATED_WITH,
    Curve,
    Part,
    Record,
    bounded_exp,
    cell,
    full_name,
    grouped,
    length_in_words,
    lengths_of,
    number,
    paired_interval,
)
from pretrain.evaluation.windows import NONOVERLAPPING, SLIDING

SPEEDS = ("training", "evaluation")
"""What a method's speed is measured in."""


# ---- how far two values are apart ----------------------------------------------------------------
# Noise is what the evaluation and the seeds show of it: values of one text are compared block by
# block, and of several seeds each of one curve is compared with each of the other.
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
    """Difference of two losses in nats, and the range in which noise puts it."""

    low: float
    value: float
    high: float

    @property
    def is_shown(self) -> bool | None:
        """Return True for a difference that noise does not explain; None where it is not known."""
        if math.isnan(self.low) or math.isnan(self.high):
            return None
        return self.low > 0 or self.high < 0

    def at_most(self, ratio: float) -> Verdict:
        """Judge that the one perplexity is at most `ratio` times the other."""
        return self._judge(math.log(ratio), is_below=True)

    def at_least(self, ratio: float) -> Verdict:
        """Judge that the one perplexity is at least `ratio` times the other."""
        return self._judge(math.log(ratio), is_below=False)

    def within(self, ratio: float) -> Verdict:
        """Judge that the two perplexities are at most a factor of `ratio` apart."""
        return combined([self.at_most(ratio), self.at_least(1 / ratio)])

    def ratios(self) -> tuple[float, float, float]:
        """Return the ratio of the perplexities, between the ends of its range."""
        return bounded_exp(self.low), bounded_exp(self.value), bounded_exp(self.high)

    def ratio_in_words(self, of: str = "times") -> str:
        """Return the ratio with its range, as in "0.868 times (0.861 to 0.875)"."""
        low, value, high = self.ratios()
        if not low < high:
            return f"{value:.3f} {of}"
        # A range that three decimals would hide is what the verdict stands on.
        digits = 3 if high - low >= 0.002 else 5
        return f"{value:.{digits}f} {of} ({low:.{digits}f} to {high:.{digits}f})"

    def _judge(self, bound: float, is_below: bool) -> Verdict:
        if math.isnan(self.low) or math.isnan(self.high):
            return Verdict.MISSING if math.isnan(self.value) else Verdict.NO_INTERVAL
        # Logarithms round: a ratio that is printed as the threshold itself lies on it.
        margin = 1e-12
        if self.high <= bound + margin:
            return Verdict.PASSES if is_below or self.low >= bound - margin else Verdict.FAILS
        if self.low >= bound - margin:
            return Verdict.FAILS if is_below else Verdict.PASSES
        return Verdict.NOISE


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim of which these are the parts.

    One part that fails refutes it. What lies inside the noise leaves it open, whatever else passes,
    and so does a run that has learned nothing. A part that was not measured says nothing.
    """
    open_or_not = (Verdict.NOISE, Verdict.NO_INTERVAL, Verdict.UNTRAINED, Verdict.PASSES)
    for verdict in (Verdict.FAILS, *open_or_not):
        if verdict in verdicts:
            return verdict
    return Verdict.MISSING


def gap(a: Curve, at_a: int, b: Curve, at_b: int) -> Gap:
    """Return how far the loss of a curve lies above that of another, or of itself elsewhere.

    The range is that of the paired intervals, or where losses by block are not known, of the two
    intervals. Of several seeds it holds the ranges of all pairs; of one curve at two lengths, each
    seed is paired with itself. What is not finite is infinitely bad.

    Args:
        a: A curve.
        at_a: Length of its value.
        b: The curve to compare with, of the same tokenizer and text; it may be the same.
        at_b: Length of its value.
    """
    of_a, of_b = a.records[at_a], b.records[at_b]
    pairs = list(zip(of_a, of_b)) if a is b else list(itertools.product(of_a, of_b))
    apart = _mean_loss(of_a) - _mean_loss(of_b)
    if not math.isfinite(apart):
        return Gap(apart, apart, apart)
    ranges = [paired_interval(x, y) or _unpaired(x, y) for x, y in pairs]
    if any(math.isnan(end) for ends in ranges for end in ends):
        return Gap(math.nan, apart, math.nan)
    return Gap(min(low for low, _ in ranges), apart, max(high for _, high in ranges))


def _mean_loss(records: Sequence[Record]) -> float:
    """Return the mean loss of seeds: infinite where one is not finite."""
    losses = [number(record["loss_nats"]) for record in records]
    return sum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf


def _unpaired(a: Record, b: Record) -> tuple[float, float]:
    """Return the range of a difference of two values whose intervals alone are known."""
    low_a, high_a, low_b, high_b = (
        number(record[key]) for record in (a, b) for key in ("loss_low", "loss_high")
    )
    return low_a - high_b, high_a - low_b


# ---- cases ---------------------------------------------------------------------------------------
class Unigram(NamedTuple):
    """The best that a prediction can do that is the same at every position."""

    loss_nats: float
    """The entropy of the frequencies of the scored tokens: no other fixed distribution has a lower
    loss on this text."""
    tokens: int
    """How many were counted."""


@dataclass(frozen=True)
class Case:
    """A claim at one training length, with the numbers that its verdict stands on."""

    verdict: Verdict
    words: str
    train_length: int | None = None
    ratio: tuple[float, float, float] | None = None
    """(low, value, high) of the ratio that was compared with the threshold."""
    tokens: int | None = None
    """Tokens scored for each of the values."""
    seeds: int | None = None
    """Seeds of the curve that has fewer of them."""
    curves: tuple[Curve, ...] = ()
    """The curves that were compared."""


@dataclass(frozen=True)
class Row:
    """Speed and memory of one method at one training length, measured in turns with the others."""

    method: str
    train_length: int
    speeds: Mapping[str, Sequence[float]]
    """ "training" and "evaluation" -> tokens per second in each round."""
    memory: float | None
    """Largest peak memory of a process in bytes; None where it was not measured."""

    def shares(self, base: Row, quantity: str) -> list[float]:
        """Return the ratios to another method's "memory", or speed in one of SPEEDS.

        Speeds are compared round by round, because both of a round ran under the same load.
        """
        if quantity == "memory":
            return [self.memory / base.memory] if self.memory and base.memory else []
        mine, other = (row.speeds.get(quantity, ()) for row in (self, base))
        return [a / b for a, b in zip(mine, other) if b]


@dataclass(frozen=True)
class Evidence:
    """All that claims are judged on: curves of one text and tokenizer, speeds and memory."""

    curves: Sequence[Curve]
    rows: Sequence[Row] = ()
    device: str = ""
    """What the speeds and memory were measured on."""
    unigram: Unigram | None = None
    """How well the text can be predicted without context; None where that was not counted."""

    def of(self, method: str, *kinds: str) -> list[Curve]:
        """Return the curves of a method, those trained at the shortest length first.

        Args:
            method: The method's name.
            kinds: NONOVERLAPPING or SLIDING, with whatever stride; first one, then the other.
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
            kinds: As of `of`.
            multiple: Training length of the second in training lengths of the first.
        """
        for a, b in itertools.product(self.of(method, *kinds), self.of(other, *kinds)):
            if a.protocol == b.protocol and a.train_length * multiple == b.train_length:
                yield a, b

    def timed(
        self, method: str | None = None, base: str = "sinusoidal", multiple: int = 1
    ) -> Iterator[tuple[Row, Row]]:
        """Yield a method, or each, and another where both were timed.

        Args:
            method: The method of the first; None for all.
            base: The method of the second.
            multiple: Training length of the second in training lengths of the first.
        """
        others = {row.train_length: row for row in self.rows if row.method == base}
        for row in self.rows:
            if row.method == (method or row.method) and row.train_length * multiple in others:
                yield row, others[row.train_length * multiple]

    def untrained(self, curve: Curve) -> str:
        """Return why a run has learned nothing that a claim speaks of; empty where it has.

        The loss at L is compared with that of token frequencies, of each seed by itself. A value
        that is not finite is not below it either.
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
        """Return a case, or one without a verdict if a run of it has learned nothing."""
        why = [words for curve in dict.fromkeys(case.curves) if (words := self.untrained(curve))]
        if not why:
            return case
        words = f"{'; '.join(why)} ({case.words})"
        return dataclasses.replace(case, verdict=Verdict.UNTRAINED, words=words)


Rule = Callable[[Gap, float], Verdict]
"""How a gap is compared with a threshold: Gap.at_most, Gap.at_least or Gap.within."""


def compare(a: Curve, at_a: int, b: Curve, at_b: int, rule: Rule, ratio: float) -> Case:
    """Return the case of two values, or one that says which of them was not measured.

    Args:
        a: A curve.
        at_a: Length of its value.
        b: The curve to compare with; it may be the same.
        at_b: Length of its value.
        rule: Judges how far they are apart.
        ratio: The threshold.
    """
    for curve, length in ((a, at_a), (b, at_b)):
        if length not in curve.records:
            return missing(curve, length)
    trained = b.train_length
    if trained in b.records and math.isinf(_mean_loss(b.records[trained])):
        # A run that has diverged makes any other look good, and its own longer lengths too.
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
        rule(found, ratio),
        words,
        a.train_length,
        found.ratios(),
        min(record["tokens"] or 0 for record in (*of_a, *of_b)) or None,
        min(len(of_a), len(of_b)),
        (a, b),
    )


def compare_alike(a: Curve, b: Curve, length: int, ratio: float) -> Case:
    """Compare two methods of one training length after equal numbers of steps, and only then."""
    steps = a.sources[0].step, b.sources[0].step
    if steps[0] == steps[1]:
        return compare(a, length, b, length, Gap.at_most, ratio)
    words = f"{a.name} was trained for {steps[0]} steps and {b.name} for {steps[1]}"
    return Case(Verdict.MISSING, f"{words}, L = {a.train_length}", a.train_length)


def missing(curve: Curve, length: int) -> Case:
    """Return the case of a value that is not there."""
    at = length_in_words(length, curve.train_length)
    words = f"{full_name(curve)} was not evaluated at {at}, {curve.protocol}"
    return Case(Verdict.MISSING, words, curve.train_length)


def _value(curve: Curve, length: int, than: Curve | None = None) -> str:
    """Return a value in words; of the curve that was named just before without its name."""
    at = f"{curve.value(length).value:.2f} at {length_in_words(length, curve.train_length)}"
    return at if curve is than else f"{full_name(curve)}: {at}"


# ---- claims --------------------------------------------------------------------------------------
Predicate = Callable[[Evidence, float], Iterator[Case]]
"""(what was measured, threshold) -> a case for each training length that it can speak of."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    id: str
    statement: str
    source: str
    """Where the paper says it, and which of the tables in published.toml show it."""
    threshold: float
    """The ratio that the measured one is compared with."""
    threshold_source: str
    judge: Predicate


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict and the cases that it stands on."""

    claim: Claim
    verdict: Verdict
    cases: tuple[Case, ...]

    @property
    def deciding(self) -> list[Case]:
        """Return the cases that made the verdict."""
        return [case for case in self.cases if case.verdict == self.verdict]


CLAIMS: list[Claim] = []
"""All claims, in the order of the report."""


def claim(threshold: float) -> Callable[[Predicate], Predicate]:
    """Make the function below it the judge of the claim of its name.

    Its docstring has three paragraphs: the claim's statement, where it is published, and where the
    threshold comes from.

    Args:
        threshold: The ratio that the measured one is compared with.
    """

    def add(predicate: Predicate) -> Predicate:
        paragraphs = (predicate.__doc__ or "").split("\n\n")
        statement, source, reason = (" ".join(words.split()) for words in paragraphs)
        source, reason = source.partition("Source: ")[2], reason.partition("Threshold: ")[2]
        name = predicate.__name__
        CLAIMS.append(Claim(name, statement, source, threshold, reason, predicate))
        return predicate

    return add


def judge(evidence: Evidence) -> list[Judgement]:
    """Return the verdict on every claim.

    A claim fails when it fails at one training length. It cannot be judged when it lies inside the
    noise at one of them, when a run of it predicts no better than token frequencies, or when
    nothing that it needs was measured.
    """
    found = []
    for each in CLAIMS:
        cases = tuple(map(evidence.checked, each.judge(evidence, each.threshold)))
        found.append(Judgement(each, combined([case.verdict for case in cases]), cases))
    return found


TRAINED_SLOPES = "alibi_trained_slopes"
"""The method of runs with position.trainable_slopes."""
ORDER = ("alibi", "t5", "rotary", "sinusoidal")
"""Methods by how far they extrapolate, the farthest first."""
FARTHEST = 16
"""Longest length that claims of the paper speak of, in training lengths."""
EQUAL = 1.05
"""A perplexity has held up to this many times its value at L, and has degraded from there on."""
EQUAL_TIME = 0.03
"""Two runs took the same time if one took at most this much more or less."""


@claim(1.0)
def alibi_falls_to_2L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi trained at L has a lower perplexity at 2 L than at L (nonoverlapping).

    Source: Figure 1; table 5 (wikitext103.alibi_nonoverlapping)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    for curve in evidence.of("alibi", NONOVERLAPPING):
        length = curve.train_length
        yield compare(curve, 2 * length, curve, length, Gap.at_most, ratio)


@claim(1.0)
def alibi_falls_to_3L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi trained at L has a lower perplexity at 3 L than at 2 L (nonoverlapping).

    Source: Section 4.1, of WikiText-103; table 5 (wikitext103.alibi_nonoverlapping). The 1.3B
    models are best at about 2 L (figure 6)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    for curve in evidence.of("alibi", NONOVERLAPPING):
        length = curve.train_length
        yield compare(curve, 3 * length, curve, 2 * length, Gap.at_most, ratio)


@claim(1.03)
def alibi_stays_near_best_to_16L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """From 2 L to 16 L, the perplexity of ALiBi trained at L rises at most 3 % above its best at
    any shorter length (nonoverlapping).

    Source: Figure 1; table 5 (wikitext103.alibi_nonoverlapping)

    Threshold: The largest published rise above the best is 2.6 %, of the 1.3B model trained at 512
    (9.54 at 2048, 9.30 at 1024; cc100_roberta.equal_updates.alibi_512).
    """
    for curve in evidence.of("alibi", NONOVERLAPPING):
        trained = curve.train_length
        lengths = _lengths(curve, trained, FARTHEST * trained)
        beyond = [n for n in lengths if n > 2 * trained]
        if not beyond or lengths[0] == beyond[0]:
            yield missing(curve, 2 * trained if beyond else FARTHEST * trained)
            continue
        best = {
            length: min((n for n in lengths if n < length), key=lambda n: _loss(curve, n))
            for length in beyond
        }
        worst = max(beyond, key=lambda n: gap(curve, n, curve, best[n]).value)
        case = compare(curve, worst, curve, best[worst], Gap.at_most, ratio)
        if case.verdict == Verdict.PASSES and beyond[-1] < FARTHEST * trained:
            case = missing(curve, FARTHEST * trained)
        yield case


@claim(1.03)
def alibi_is_flat_when_sliding(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """With sliding windows, ALiBi stays within 3 % of its perplexity at L at every longer length up
    to 16 L that was evaluated.

    Source: Figure 11; table 15 (wikitext103.sliding_stride1)

    Threshold: The largest published change is 2.6 %, trained at 1024 (17.92 at 3072, 17.46 at
    1024).
    """
    for curve in evidence.of("alibi", SLIDING):
        trained = curve.train_length
        beyond = [n for n in _lengths(curve, trained, FARTHEST * trained) if n > trained]
        if trained not in curve.records or not beyond:
            yield missing(curve, trained if beyond else FARTHEST * trained)
            continue
        stride = curve.records[trained][0]["stride"]
        if 2 * stride > trained:
            words = (
                f"{curve.name}, L = {trained}: a stride of {stride} leaves too many early tokens "
                "in the windows of L; slide by at most half of L"
            )
            yield Case(Verdict.MISSING, words, trained)
            continue
        farthest = max(beyond, key=lambda n: abs(gap(curve, n, curve, trained).value))
        yield compare(curve, farthest, curve, trained, Gap.within, ratio)


@claim(EQUAL)
def alibi_is_flat_to_1024L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At every length up to 1,024 L that was evaluated, the perplexity of ALiBi trained at L is at
    most 5 % above that at L.

    Source: This project; the paper's tables end at 48 L (wikitext103.alibi_nonoverlapping.64)

    Threshold: Chosen: the same line between holding and degrading for every method.
    """
    for curve in evidence.of("alibi"):
        trained, farthest = curve.train_length, 1024 * curve.train_length
        beyond = _lengths(curve, trained + 1, farthest)
        if trained not in curve.records or not beyond:
            yield missing(curve, trained if beyond else farthest)
            continue
        worst = max(beyond, key=lambda n: gap(curve, n, curve, trained).value)
        case = compare(curve, worst, curve, trained, Gap.at_most, ratio)
        if case.verdict == Verdict.PASSES and beyond[-1] < farthest:
            case = missing(curve, farthest)
        yield case


def _against(
    evidence: Evidence, other: str, ratio: float, *kinds: str, multiple: int = 1
) -> Iterator[Case]:
    """Compare ALiBi with another method trained at a multiple of L, at that length."""
    for alibi, curve in evidence.pairs("alibi", other, *kinds, multiple=multiple):
        yield compare_alike(alibi, curve, curve.train_length, ratio)


@claim(1.0)
def alibi_beats_sinusoidal_at_L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At the training length, ALiBi has a lower perplexity than sinusoidal positions.

    Source: Section 4.1, "for every L"; tables 5 to 10 (wikitext103, wikitext103_test, bookcorpus
    and bookcorpus_test). Of the 1.3B models it says "similarly" (table 12)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    return _against(evidence, "sinusoidal", ratio)


@claim(1.02)
def alibi_no_worse_than_sinusoidal_at_L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At the training length, ALiBi's perplexity is at most 2 % above that of sinusoidal positions
    (nonoverlapping).

    Source: Table 5 (wikitext103.same_length_nonoverlapping and .alibi_nonoverlapping); table 12
    (cc100_roberta.equal_updates)

    Threshold: The largest published excess is 1.5 % (28.46 against 28.03 at L = 64); from L = 256
    on ALiBi is ahead there.
    """
    return _against(evidence, "sinusoidal", ratio, NONOVERLAPPING)


@claim(1.0)
def alibi_beats_rotary_at_L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At the training length, ALiBi has a lower perplexity than rotary positions.

    Source: Section 4.1, of L = 1024 and 3072; tables 5 to 7 (wikitext103 and wikitext103_test)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    return _against(evidence, "rotary", ratio)


@claim(1.0)
def alibi_beats_t5_at_L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At the training length, ALiBi has a lower perplexity than the T5 bias.

    Source: Section 4.1, of L = 1024 and 3072; tables 5 to 7, 14 and 15 (wikitext103 and
    wikitext103_test)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    return _against(evidence, "t5", ratio)


@claim(1.0)
def alibi_at_2L_beats_sinusoidal_of_2L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At 2 L, ALiBi trained at L has a lower perplexity than sinusoidal positions trained at 2 L
    for as many steps (nonoverlapping).

    Source: Caption of figure 4, of L = 512 and longer; tables 5 and 8
    (wikitext103.alibi_nonoverlapping and bookcorpus.alibi_nonoverlapping)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    return _against(evidence, "sinusoidal", ratio, NONOVERLAPPING, multiple=2)


@claim(1.04)
def alibi_at_2L_matches_sinusoidal_trained_at_2L(
    evidence: Evidence, ratio: float
) -> Iterator[Case]:
    """At 2 L, ALiBi trained at L is at most 4 % above sinusoidal positions trained at 2 L for as
    many steps (nonoverlapping).

    Source: Abstract (L = 1024, 1.3B parameters); tables 5 and 12
    (wikitext103.alibi_nonoverlapping and cc100_roberta.equal_updates)

    Threshold: The largest published excess is 3.7 % (24.70 against 23.81 at L = 64); from L = 256
    on ALiBi is ahead in the WikiText-103 tables, and at most 1.6 % behind in the 1.3B models.
    """
    return _against(evidence, "sinusoidal", ratio, NONOVERLAPPING, multiple=2)


@claim(1.0)
def alibi_at_2L_beats_sinusoidal_in_equal_time(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At 2 L, ALiBi trained at L has a lower perplexity than sinusoidal positions trained at 2 L
    for the same time, which is steps by the measured speed and equal up to 3 % (nonoverlapping).

    Source: Section 4.2 of L = 1024, which says of L = 512 that it is 0.06 behind; figure 5, table
    11 (cc100_roberta_equal_time.equal_time)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    timed = {
        row.train_length: row.shares(b, "training")
        for row, b in evidence.timed("alibi", multiple=2)
    }
    for alibi, other in evidence.pairs("alibi", "sinusoidal", NONOVERLAPPING, multiple=2):
        length, steps = alibi.train_length, (alibi.sources[0].step, other.sources[0].step)
        if not timed.get(length) or 0 in steps:
            words = f"L = {length}: how long the runs were trained is not known"
            yield Case(Verdict.MISSING, words, length)
            continue
        times = steps[0] / steps[1] / statistics.median(timed[length])
        if abs(times - 1) <= EQUAL_TIME:
            yield compare(alibi, 2 * length, other, 2 * length, Gap.at_most, ratio)
        else:
            words = f"L = {length}: {alibi.name} was trained for {times:.2f} times as long"
            yield Case(Verdict.MISSING, f"{words} as {other.name} at {2 * length}", length)


@claim(1.0)
def alibi_of_a_sixth_beats_sinusoidal(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At T, the longest training length of sinusoidal positions, ALiBi trained at a sixth of T or
    more, and below T, has a lower perplexity than they have (nonoverlapping).

    Source: Section 4.1: L = 512 to 2048, at 3072; figure 8, tables 5, 6, 8 and 9 (18.40 against
    18.67, wikitext103.alibi_nonoverlapping.512.3072)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    for other in evidence.of("sinusoidal", NONOVERLAPPING)[-1:]:
        longest = other.train_length
        for alibi in evidence.of("alibi", NONOVERLAPPING):
            if longest <= 6 * alibi.train_length < 6 * longest:
                yield compare_alike(alibi, other, longest, ratio)


@claim(EQUAL)
def sinusoidal_degrades_at_once(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Sinusoidal positions get worse at once: perplexity at 2 L is at least 5 % above that at L.

    Source: Figure 1; tables 12 and 13 (wikitext103.sliding_stride1.sinusoidal_512,
    cc100_roberta.equal_updates.sinusoidal_512 and .sinusoidal_1024)

    Threshold: Chosen for small models, which have less to lose; the published perplexities are 3.8
    to 11 times those at L.
    """
    for curve in evidence.of("sinusoidal"):
        length = curve.train_length
        yield compare(curve, 2 * length, curve, length, Gap.at_least, ratio)


def _gains(evidence: Evidence, method: str, tokens: int, ratio: float) -> Iterator[Case]:
    """Compare the best length beyond L + `tokens` with the best one from L up to there."""
    for curve in evidence.of(method, NONOVERLAPPING):
        trained = curve.train_length
        near = _lengths(curve, trained, trained + tokens)
        beyond = [length for length in curve.records if length > trained + tokens]
        if near and beyond:
            best, later = (min(found, key=lambda n: _loss(curve, n)) for found in (near, beyond))
            yield compare(curve, later, curve, best, Gap.at_least, ratio)
        else:
            yield missing(curve, trained if beyond else trained + tokens + 1)


@claim(1.0)
def sinusoidal_gains_for_50_tokens(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Sinusoidal positions gain from 50 tokens beyond L at most: no length beyond L + 50 has a
    lower perplexity than the best one up to there (nonoverlapping).

    Source: Section 2.2, "20 to 50 tokens"; tables 2 to 4
    (wikitext103.extrapolation_nonoverlapping)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    return _gains(evidence, "sinusoidal", 50, ratio)


@claim(1.0)
def rotary_gains_for_200_tokens(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Rotary positions gain from 200 tokens beyond L at most: no length beyond L + 200 has a lower
    perplexity than the best one up to there (nonoverlapping).

    Source: Section 2.2, of L = 512 (200 tokens) and 1024 (100); tables 2 to 4
    (wikitext103.extrapolation_nonoverlapping)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    return _gains(evidence, "rotary", 200, ratio)


@claim(1.0)
def t5_gains_for_800_tokens(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """The T5 bias gains from 800 tokens beyond L at most: no length beyond L + 800 has a lower
    perplexity than the best one up to there (nonoverlapping).

    Source: Section 2.2, of L = 512 (600 tokens) and 1024 (800); tables 2 to 4
    (wikitext103.extrapolation_nonoverlapping)

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    return _gains(evidence, "t5", 800, ratio)


def _holds(evidence: Evidence, method: str, tokens: int, ratio: float) -> Iterator[Case]:
    """Compare the longest length up to L + `tokens` with L."""
    for curve in evidence.of(method):
        trained = curve.train_length
        if near := _lengths(curve, trained + 1, trained + tokens):
            yield compare(curve, near[-1], curve, trained, Gap.at_most, ratio)
        else:
            words = (
                f"{curve.name}, L = {trained}: no length from {trained + 1} to "
                f"{trained + tokens} tokens was evaluated, {curve.protocol}"
            )
            yield Case(Verdict.MISSING, words, trained)


@claim(EQUAL)
def rotary_holds_for_100_tokens(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Rotary positions hold for 100 to 200 tokens beyond L: perplexity at most 5 % above that at L,
    at the longest length up to L + 128.

    Source: Figure 1; tables 2 to 4 (wikitext103.extrapolation_nonoverlapping)

    Threshold: Chosen: the same line between holding and degrading for every method.
    """
    return _holds(evidence, "rotary", 128, ratio)


@claim(EQUAL)
def rotary_degrades(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Rotary positions degrade beyond that: perplexity at the longest length from L + 400 on is at
    least 5 % above that at L.

    Source: Figure 1; tables 2 to 4 (wikitext103.extrapolation_nonoverlapping)

    Threshold: Chosen: the same line between holding and degrading for every method.
    """
    for curve in evidence.of("rotary"):
        trained, longest = curve.train_length, max(curve.records)
        if longest < trained + 400:
            yield missing(curve, trained + 400)
        else:
            yield compare(curve, longest, curve, trained, Gap.at_least, ratio)


@claim(EQUAL)
def t5_holds_for_500_tokens(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """The T5 bias holds for some hundreds of tokens beyond L: perplexity at most 5 % above that at
    L, at the longest length up to L + 512.

    Source: Figure 1; tables 2 to 4 and 14 (wikitext103.sliding_stride1.t5_512)

    Threshold: The published rise at L + 512 is 3.3 % (18.51 at 1024, 17.92 at 512).
    """
    return _holds(evidence, "t5", 512, ratio)


@claim(1.0)
def order_of_extrapolation(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At the longest length from 4 L to 16 L, ALiBi has the lowest perplexity, then the T5 bias,
    then rotary and then sinusoidal positions, all trained at L.

    Source: Figure 1; tables 2 to 4 (wikitext103.extrapolation_nonoverlapping). Tables 13 to 15 have
    no rotary positions

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    ordered = [curve for method in ORDER for curve in evidence.of(method)]
    groups = grouped(ordered, lambda curve: (curve.protocol, curve.train_length))
    for (protocol, trained), group in groups.items():
        methods = list(dict.fromkeys(curve.method for curve in group))
        if 1 < len(methods) < len(ORDER):
            without = ", ".join(method for method in ORDER if method not in methods)
            words = f"the order holds no {without}, L = {trained}, {protocol}"
            yield Case(Verdict.MISSING, words, trained)
        # Each method with the next one that was trained.
        for method, following in itertools.pairwise(methods):
            for a in (curve for curve in group if curve.method == method):
                for b in (curve for curve in group if curve.method == following):
                    yield _far_beyond(a, b, ratio)


@claim(1.0)
def trained_slopes_extrapolate_worse(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At the longest length from 4 L to 16 L, ALiBi with fixed slopes has a lower perplexity than
    with trained ones.

    Source: Section 3, on trainable slopes; no table

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    for a, b in evidence.pairs("alibi", TRAINED_SLOPES):
        yield _far_beyond(a, b, ratio)


@claim(1.0)
def smaller_slopes_extrapolate_better(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """At the longest evaluated length beyond L, ALiBi has a lower perplexity if that evaluation
    multiplies its slopes by a factor below 1.

    Source: "Position Interpolation Improves ALiBi Extrapolation" (Al-Khateeb and others, 2023,
    arXiv 2310.13017), abstract; published.toml has no numbers of it

    Threshold: Equality: any difference that the noise does not hide counts.
    """
    smaller = re.compile(rf"alibi{EVALUATED_WITH}position\.slopes = {{factor = 0?\.\d")
    changed = [curve for curve in evidence.curves if smaller.match(curve.method)]
    for own, curve in itertools.product(evidence.of("alibi"), changed):
        models = [[(s.run, s.checkpoint) for s in each.sources] for each in (own, curve)]
        if own.protocol == curve.protocol and models[0] == models[1]:
            length = max(set(own.records) & set(curve.records), default=0)
            if length > own.train_length:
                yield compare(curve, length, own, length, Gap.at_most, ratio)


def _far_beyond(a: Curve, b: Curve, ratio: float) -> Case:
    """Compare two methods at the longest length of both, which must be at least 4 L."""
    trained = a.train_length
    common = set(_lengths(a, trained, FARTHEST * trained)) & set(b.records)
    length = max(common, default=0)
    if length < 4 * trained:
        return missing(b if set(a.records) > set(b.records) else a, 4 * trained)
    return compare_alike(a, b, length, ratio)


def _lengths(curve: Curve, first: int, last: int) -> list[int]:
    """Return the lengths of a curve in a range, both ends included, ascending."""
    return [n for n in curve.records if first <= n <= last]


def _loss(curve: Curve, length: int) -> float:
    """Return a value to rank a curve's lengths by; what is not finite is the worst."""
    value = curve.value(length).value
    return value if value == value else math.inf


def _costs(
    evidence: Evidence,
    method: str,
    quantity: str,
    rule: Rule,
    ratio: float,
    base: str = "sinusoidal",
    multiple: int = 1,
) -> Iterator[Case]:
    """Compare speeds, as ratios within a round, or memory with that of another method."""
    for row, other in evidence.timed(method, base, multiple):
        shares, length = row.shares(other, quantity), row.train_length
        if not shares:
            yield Case(Verdict.MISSING, f"L = {length}: {quantity} was not measured", length)
            continue
        low, share, high = min(shares), statistics.median(shares), max(shares)
        what = "memory" if quantity == "memory" else f"tokens/s in {quantity}"
        words = f"{method}, L = {length}: {share:.4g} times the {what} of {base}"
        words += f" at L = {other.train_length}" if multiple > 1 else ""
        if quantity != "memory":
            words += f" ({low:.3f} to {high:.3f} in {len(shares)} rounds)"
        elif re.search(r"\bcpu\b", evidence.device, re.IGNORECASE):
            # A process's resident memory holds libraries and what the allocator has not given back.
            words += ", of whole processes on a CPU, which says nothing of the method"
            yield Case(Verdict.MISSING, words, length, (low, share, high))
            continue
        # One round does not say how far rounds are apart.
        is_known = quantity == "memory" or len(shares) > 1
        ends = (math.log(low), math.log(high)) if is_known else (math.nan, math.nan)
        verdict = rule(Gap(ends[0], math.log(share), ends[1]), ratio)
        yield Case(verdict, words, length, (low, share, high))


@claim(0.97)
def alibi_trains_as_fast(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi trains at 97 % of the tokens per second of sinusoidal positions or more.

    Source: Table 1 (efficiency_v100)

    Threshold: The lowest published share is 99.2 % in training and 98.2 % in evaluation.
    """
    return _costs(evidence, "alibi", "training", Gap.at_least, ratio)


@claim(0.97)
def alibi_evaluates_as_fast(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi evaluates at 97 % of the tokens per second of sinusoidal positions or more.

    Source: Table 1 (efficiency_v100)

    Threshold: The lowest published share is 99.2 % in training and 98.2 % in evaluation.
    """
    return _costs(evidence, "alibi", "evaluation", Gap.at_least, ratio)


@claim(1.007)
def alibi_needs_no_more_memory(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi needs at most 0.7 % more memory than sinusoidal positions.

    Source: Table 1 (efficiency_v100)

    Threshold: The published increase is 0 to 0.7 %.
    """
    return _costs(evidence, "alibi", "memory", Gap.at_most, ratio)


@claim(1.84)
def alibi_of_a_sixth_trains_faster(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi trained at L trains at 1.84 times the tokens per second of sinusoidal positions trained
    at 6 L or more.

    Source: Section 4.1, of L = 512 and 3072; table 1 (efficiency_v100)

    Threshold: The text's number; the table's speeds make 1.85.
    """
    return _costs(evidence, "alibi", "training", Gap.at_least, ratio, multiple=6)


@claim(1.07)
def alibi_trains_faster_than_sinusoidal_of_2L(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi trained at L trains at 1.07 times the tokens per second of sinusoidal positions trained
    at 2 L or more.

    Source: Section 4.2: 7 % at L = 512, and 11 % at 1024, which is the time to a given perplexity;
    table 12 (cc100_roberta.equal_updates)

    Threshold: The smaller of the two. The GPU hours of table 12 make 1.07 and 1.14.
    """
    return _costs(evidence, "alibi", "training", Gap.at_least, ratio, multiple=2)


@claim(0.94)
def alibi_needs_less_memory_than_sinusoidal_of_2L(
    evidence: Evidence, ratio: float
) -> Iterator[Case]:
    """ALiBi trained at L needs at most 0.94 times the memory of sinusoidal positions trained at
    2 L.

    Source: Figure 5, "6 to 11 % less" (1.6 GB at L = 512, 3.1 GB at 1024); table 12
    (cc100_roberta.equal_updates)

    Threshold: The smaller of the two savings.
    """
    return _costs(evidence, "alibi", "memory", Gap.at_most, ratio, multiple=2)


@claim(0.51)
def t5_trains_at_half_the_speed(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """The T5 bias trains at 51 % of the tokens per second of sinusoidal positions or less.

    Source: Section 2.2, "at least twice as slow to train"; table 1 (efficiency_v100)

    Threshold: The published shares are 28 to 51 %.
    """
    return _costs(evidence, "t5", "training", Gap.at_most, ratio)


@claim(0.27)
def t5_evaluates_at_a_quarter_of_the_speed(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """The T5 bias evaluates at 27 % of the tokens per second of sinusoidal positions or less.

    Source: Table 1 (efficiency_v100)

    Threshold: The published shares are 12 to 27 %.
    """
    return _costs(evidence, "t5", "evaluation", Gap.at_most, ratio)


@claim(0.76)
def rotary_trains_slower(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Rotary positions train at 76 % of the tokens per second of sinusoidal positions or less.

    Source: Table 1 (efficiency_v100)

    Threshold: The published shares are 68 to 75 %.
    """
    return _costs(evidence, "rotary", "training", Gap.at_most, ratio)


@claim(0.7)
def rotary_evaluates_slower(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Rotary positions evaluate at 70 % of the tokens per second of sinusoidal positions or less.

    Source: Table 1 (efficiency_v100)

    Threshold: The published shares are 51 to 70 %.
    """
    return _costs(evidence, "rotary", "evaluation", Gap.at_most, ratio)


@claim(1.0)
def trained_slopes_train_slower(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """ALiBi with trained slopes trains at fewer tokens per second than with fixed ones.

    Source: Section 3, "3 %"; no table

    Threshold: Equality: any difference that the rounds do not hide counts.
    """
    return _costs(evidence, TRAINED_SLOPES, "training", Gap.at_most, ratio, base="alibi")


# ---- what a report of some runs says -------------------------------------------------------------
EXPLAINED = (
    "Two values of one text are compared block by block: the range behind a ratio is that in which "
    "noise puts it, and of several seeds each of one is compared with each of the other. Where "
    "losses by block are not known, it is made of the two 95 % intervals. A range that holds 1 "
    "shows no difference."
)
CLAIMS_EXPLAINED = (
    "The claims are those of `pretrain study`, most of them of the paper (Press, Smith and Lewis, "
    "2022). Its report says where each comes from, and what it is compared with."
)


def what_stands_out(parts: Sequence[Part]) -> str:
    """Return the rankings of the methods and what the claims say of them, in Markdown.

    Curves of one training length are ranked among each other, in each part of a report.
    """
    blocks = [words for part in parts for words in (*_rankings(part), *_claims(part))]
    curves = [curve for part in parts for curve in part.curves]
    # The paper's models predict the next token.
    is_masked = any(curve.kind == MASKED for curve in curves)
    return "\n\n".join([*blocks, EXPLAINED if is_masked else f"{EXPLAINED} {CLAIMS_EXPLAINED}"])


def _claims(part: Part) -> Iterator[str]:
    """Yield what these curves say of the claims: those that fail, and which pass."""
    judged = judge(Evidence(part.curves))
    passed = [each.claim.id for each in judged if each.verdict == Verdict.PASSES]
    failed = [each for each in judged if each.verdict == Verdict.FAILS]
    noise = [each.claim.id for each in judged if each.verdict == Verdict.NOISE]
    lines = [
        f"**Fails, {each.claim.id}**: {each.claim.statement} Here {case.words}."
        for each in failed
        for case in each.deciding
    ]
    if passed and not failed:
        lines.append("No claim fails.")
    lines += [f"Pass: {', '.join(passed)}."] if passed else []
    lines += [f"Inside the noise: {', '.join(noise)}."] if noise else []
    if lines:
        yield _listed(["The claims", part.subject], lines)


def _rankings(part: Part) -> Iterator[str]:
    """Yield rankings at L and at the longest length for each training length and protocol."""
    groups = grouped(part.curves, lambda curve: (curve.train_length, curve.protocol))
    for (trained, protocol), group in groups.items():
        if len(group) > 1:
            lengths = dict.fromkeys([trained, lengths_of(group)[-1]])
            lines = [_ranking(group, length) for length in lengths]
            yield _listed([f"Trained at L = {trained}", protocol, part.subject], lines)


def _listed(opening: Iterable[str], lines: Iterable[str]) -> str:
    return f"{', '.join(filter(None, opening))}:\n\n" + "\n".join(f"- {line}" for line in lines)


def _ranking(curves: Sequence[Curve], length: int) -> str:
    """Return a ranking at one length, in which everything that was not measured is named too."""
    present = [curve for curve in curves if length in curve.records]
    values = {curve: curve.value(length).value for curve in present}
    ranked = sorted((c for c in present if math.isfinite(values[c])), key=values.__getitem__)
    words = []
    for place, curve in enumerate(ranked, 1):
        word = f"{place}. {curve.name} {cell(curve, length)}"
        if place > 1:
            found = gap(ranked[place - 2], length, curve, length).is_shown
            said = {True: "", None: " (the noise is not known)"}
            word += said.get(found, f" (no difference from {place - 1}. is shown)")
        words.append(word)
    words += [f"not finite: {c.name}" for c in present if c not in ranked]
    words += [f"not evaluated: {c.name}" for c in curves if c not in present]
    return f"At {length_in_words(length, curves[0].train_length)}: " + "; ".join(words) + "."
