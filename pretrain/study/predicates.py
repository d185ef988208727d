"""Judge what a study has measured against a threshold: one function for each published claim.

Each yields a case for every training length that it can speak of, with the numbers in words.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator

from pretrain.evaluate.curves import Curve
from pretrain.study.evidence import (
    NONOVERLAPPING,
    SLIDING,
    Case,
    Evidence,
    Gap,
    Row,
    Verdict,
    compare,
    gap,
    missing,
)

TRAINED_SLOPES = "alibi_trained_slopes"
"""The method of runs with position.trainable_slopes."""
ORDER = ("alibi", "t5", "rotary", "sinusoidal")
"""Methods by how far they extrapolate, the farthest first."""
FARTHEST = 16
"""Longest length that claims speak of, in training lengths."""
Predicate = Callable[[Evidence, float], Iterator[Case]]
"""(what was measured, threshold) -> a case for each training length."""


# ---- ALiBi by length -----------------------------------------------------------------------------
def falls(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare ALiBi at 2 L with L."""
    for curve in evidence.of("alibi", NONOVERLAPPING):
        length = curve.train_length
        yield compare(curve, 2 * length, curve, length, lambda g: g.at_most(ratio))


def stays(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare ALiBi's largest rise between 2 L and 16 L with the best at shorter lengths."""
    for curve in evidence.of("alibi", NONOVERLAPPING):
        trained = curve.train_length
        lengths = _lengths(curve, trained, FARTHEST * trained)
        beyond = [n for n in lengths if n > 2 * trained]
        if not beyond or lengths[0] == beyond[0]:
            yield missing(curve, 2 * trained if beyond else FARTHEST * trained)
            continue
        best = {}
        for length in beyond:
            shorter = [n for n in lengths if n < length]
            best[length] = min(shorter, key=lambda n: _loss(curve, n))
        worst = max(beyond, key=lambda n: gap(curve, n, curve, best[n]).value)
        case = compare(curve, worst, curve, best[worst], lambda g: g.at_most(ratio))
        if case.verdict == Verdict.PASSES and beyond[-1] < FARTHEST * trained:
            case = missing(curve, FARTHEST * trained)
        yield case


def is_flat(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare the length beyond L at which ALiBi differs most from L, with sliding windows."""
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
        yield compare(curve, farthest, curve, trained, lambda g: g.within(ratio))


# ---- against sinusoidal positions ----------------------------------------------------------------
def no_worse(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare ALiBi with sinusoidal positions at the training length of both."""
    for alibi, other in evidence.pairs("alibi", "sinusoidal"):
        if alibi.protocol == NONOVERLAPPING:
            length = alibi.train_length
            yield _alike(alibi, length, other, length, lambda g: g.at_most(ratio))


def short_for_long(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare ALiBi trained at L with sinusoidal positions trained at 2 L, both at 2 L."""
    for alibi, other in evidence.pairs("alibi", "sinusoidal", multiple=2):
        if alibi.protocol == NONOVERLAPPING:
            length = other.train_length
            yield compare(alibi, length, other, length, lambda g: g.at_most(ratio))


# ---- the other methods beyond L ------------------------------------------------------------------
def degrades_at_once(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare sinusoidal positions at 2 L with L."""
    for curve in evidence.both("sinusoidal"):
        length = curve.train_length
        yield compare(curve, 2 * length, curve, length, lambda g: g.at_least(ratio))


def holds(method: str, tokens: int) -> Predicate:
    """Return a judge that compares the longest length up to L + `tokens` with L."""

    def judge_holds(evidence: Evidence, ratio: float) -> Iterator[Case]:
        for curve in evidence.both(method):
            trained = curve.train_length
            near = [n for n in _lengths(curve, trained, trained + tokens) if n > trained]
            if near:
                yield compare(curve, near[-1], curve, trained, lambda g: g.at_most(ratio))
            else:
                words = (
                    f"{curve.name}, L = {trained}: no length from {trained + 1} to "
                    f"{trained + tokens} tokens was evaluated, {curve.protocol}"
                )
                yield Case(Verdict.MISSING, words, trained)

    return judge_holds


def rotary_degrades(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare the longest length, if it is at least L + 400 tokens, with L."""
    for curve in evidence.both("rotary"):
        trained, longest = curve.train_length, max(curve.records)
        if longest < trained + 400:
            yield missing(curve, trained + 400)
        else:
            yield compare(curve, longest, curve, trained, lambda g: g.at_least(ratio))


def in_order(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare each method with the next one that was trained at its length, far beyond L."""
    groups: dict[tuple[str, int], list[Curve]] = {}
    for method in ORDER:
        for curve in evidence.both(method):
            groups.setdefault((curve.protocol, curve.train_length), []).append(curve)
    for group in groups.values():
        methods = list(dict.fromkeys(curve.method for curve in group))
        if 1 < len(methods) < len(ORDER):
            without = ", ".join(method for method in ORDER if method not in methods)
            trained = group[0].train_length
            words = f"the order holds no {without}, L = {trained}, {group[0].protocol}"
            yield Case(Verdict.MISSING, words, trained)
        for method, following in itertools.pairwise(methods):
            for a in (curve for curve in group if curve.method == method):
                for b in (curve for curve in group if curve.method == following):
                    yield _far_beyond(a, b, ratio)


def trained_slopes(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare fixed slopes with trained ones, far beyond L."""
    for a, b in evidence.pairs("alibi", TRAINED_SLOPES):
        yield _far_beyond(a, b, ratio)


def _far_beyond(a: Curve, b: Curve, ratio: float) -> Case:
    """Compare two methods at the longest length of both, which must be at least 4 L."""
    trained = a.train_length
    common = set(_lengths(a, trained, FARTHEST * trained)) & set(b.records)
    length = max(common, default=0)
    if length < 4 * trained:
        return missing(b if set(a.records) > set(b.records) else a, 4 * trained)
    return _alike(a, length, b, length, lambda g: g.at_most(ratio))


def _alike(a: Curve, at_a: int, b: Curve, at_b: int, judge_gap: Callable[[Gap], Verdict]) -> Case:
    """Compare two methods of one training length after equal numbers of steps, and only then."""
    steps = a.sources[0].step, b.sources[0].step
    if steps[0] != steps[1]:
        words = f"{a.name} was trained for {steps[0]} steps and {b.name} for {steps[1]}"
        return Case(Verdict.MISSING, f"{words}, L = {a.train_length}", a.train_length)
    return compare(a, at_a, b, at_b, judge_gap)


def _lengths(curve: Curve, first: int, last: int) -> list[int]:
    """Return the lengths of a curve in a range, both ends included, ascending."""
    return [n for n in curve.records if first <= n <= last]


def _loss(curve: Curve, length: int) -> float:
    """Return a value to rank a curve's lengths by; what is not finite is the worst."""
    value = curve.value(length).value
    return value if value == value else float("inf")


# ---- what it costs -------------------------------------------------------------------------------
def as_fast(work: str) -> Predicate:
    """Return a judge that compares ALiBi's speed with sinusoidal positions', round by round."""

    def judge_speed(evidence: Evidence, ratio: float) -> Iterator[Case]:
        """Compare the speeds of each training length, as ratios within a round."""
        for alibi, other in _rows(evidence):
            shares = [a / b for a, b in zip(alibi.speeds[work], other.speeds[work]) if b]
            length = alibi.train_length
            if not shares:
                yield Case(Verdict.MISSING, f"L = {length}: {work} was not timed", length)
                continue
            share, low, high = statistics.median(shares), min(shares), max(shares)
            words = f"L = {length}: {share:.3f} times the tokens/s of sinusoidal"
            words += f" ({low:.3f} to {high:.3f} in {len(shares)} rounds)"
            verdict = Verdict.PASSES if low >= ratio else Verdict.FAILS
            if len(shares) == 1:
                verdict = Verdict.NO_INTERVAL
            elif low < ratio <= high:
                verdict = Verdict.NOISE
            yield Case(verdict, words, length, (low, share, high))

    return judge_speed


def as_small(evidence: Evidence, ratio: float) -> Iterator[Case]:
    """Compare ALiBi's peak memory with sinusoidal positions'."""
    for alibi, other in _rows(evidence):
        length = alibi.train_length
        if not alibi.memory or not other.memory:
            yield Case(Verdict.MISSING, f"L = {length}: memory was not measured", length)
            continue
        share = alibi.memory / other.memory
        words = f"L = {length}: {share:.4f} times the memory of sinusoidal"
        if re.search(r"\bcpu\b", evidence.device, re.IGNORECASE):
            # A process's resident memory holds libraries and what the allocator has not given back.
            words += ", of whole processes on a CPU, which says nothing of the method"
            yield Case(Verdict.MISSING, words, length, (share, share, share))
            continue
        verdict = Verdict.PASSES if share <= ratio else Verdict.FAILS
        yield Case(verdict, words, length, (share, share, share))


def _rows(evidence: Evidence) -> Iterator[tuple[Row, Row]]:
    """Yield ALiBi and sinusoidal positions at each training length at which both were timed."""
    others = {row.train_length: row for row in evidence.rows if row.method == "sinusoidal"}
    for row in evidence.rows:
        if row.method == "alibi" and row.train_length in others:
            yield row, others[row.train_length]
