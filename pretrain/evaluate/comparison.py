"""Say in words what evaluation results show: rankings, and what is against the paper's picture.

Values that the text does not tell apart are not called different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pretrain.config.evaluation import MASKED
from pretrain.evaluate.curves import (
    BITS_PER_BYTE,
    PERPLEXITY,
    Curve,
    Text,
    cell,
    full_name,
    has_bits,
    length_in_words,
    lengths_of,
    number,
    precisions,
)
from pretrain.evaluate.records import paired_interval

EXPLAINED = (
    "Two values of one text are compared block by block: the interval is that of their difference, "
    "and of several seeds each of one is compared with each of the other. Where losses by block "
    'are not known, or the tokenizers differ, "within the intervals" means that the two 95 % '
    "intervals overlap. What lies within is no difference that this text shows."
)
DEGRADES = {"sinusoidal": "sinusoidal", "rotary": "rotary", "t5": "T5-bias"}
"""Methods that get worse beyond their training length in the paper -> how to write them."""
BASELINE = "alibi"
PAPER = (
    "In the paper (Press, Smith and Lewis, 2022; WikiText-103, 247M parameters, nonoverlapping) "
    "the perplexities at L = 512 are 19.65 with T5 bias, 19.73 with ALiBi, 20.05 with sinusoidal "
    "and 20.07 with rotary positions; beyond L, ALiBi's falls and stays low, and that of the "
    "others rises, soonest for sinusoidal positions."
)


class Difference(NamedTuple):
    """The verdict on two values: a difference, or none that the text can show."""

    is_shown: bool | None
    """None where the intervals are not known."""
    words: str


def difference(a: Curve, at_a: int, b: Curve, at_b: int, quantity: str = PERPLEXITY) -> Difference:
    """Compare two values, block by block where that is possible, else by their intervals.

    Args:
        a: A curve.
        at_a: Length (or step) of its value.
        b: The curve to compare with; it may be the same.
        at_b: Length (or step) of its value.
        quantity: PERPLEXITY or BITS_PER_BYTE.
    """
    pairs = [(x, y) for x in a.records[at_a] for y in b.records[at_b]]
    found = [paired_interval(x, y) for x, y in pairs]
    paired = [interval for interval in found if interval is not None]
    if len(paired) == len(pairs):
        is_shown = all(low > 0 for low, _ in paired) or all(high < 0 for _, high in paired)
        where = "outside" if is_shown else "within"
        if len(pairs) > 1:
            return Difference(is_shown, f"{where} the paired intervals of the seeds")
        ((low, high),) = paired
        apart = number(pairs[0][0]["loss_nats"]) - number(pairs[0][1]["loss_nats"])
        half = max(high - apart, apart - low)
        words = f"{where} the paired interval: {abs(apart):.4f} +-{half:.4f} nats apart"
        return Difference(is_shown, words)
    (low_a, high_a), (low_b, high_b) = a.interval(at_a, quantity), b.interval(at_b, quantity)
    if any(map(math.isnan, (low_a, high_a, low_b, high_b))):
        return Difference(None, "intervals unknown")
    overlap = low_a <= high_b and low_b <= high_a
    return Difference(not overlap, f"{'within' if overlap else 'outside'} the intervals")


# ---- one curve -----------------------------------------------------------------------------------
def describe_by_length(curve: Curve, name: str) -> str:
    """Return a sentence that compares a curve's longest length and training length with its best.

    Args:
        curve: Curve by window length in tokens.
        name: What to call it.
    """
    train_length = curve.train_length
    finite = _finite(curve)
    opening = f"{name}, {curve.protocol}"
    if not finite:
        return f"{opening}: no finite perplexity."
    best, longest = min(finite, key=finite.__getitem__), max(curve.records)
    at_best = length_in_words(best, train_length)
    sentence = f"{opening}: best perplexity {cell(curve, best)} at {at_best}"
    at_longest = length_in_words(longest, train_length)
    if longest not in finite:
        return f"{sentence}; not finite at {at_longest}, the longest length."
    if longest != best:
        sentence += f"; {_ratio(curve, longest, best)} at {at_longest}, the longest length"
    if train_length in finite and train_length not in (best, longest):
        sentence += f"; {_ratio(curve, train_length, best)} at L"
    return sentence + "."


def describe_by_step(curve: Curve, name: str) -> str:
    """Return a sentence that compares the newest checkpoint at a length with the best one.

    Args:
        curve: Curve by training step.
        name: What to call it.
    """
    finite = _finite(curve)
    opening = f"{name}, {curve.protocol}"
    if not finite:
        return f"{opening}: no finite perplexity."
    best, newest = min(finite, key=finite.__getitem__), max(curve.records)
    sentence = f"{opening}: best perplexity {cell(curve, best)} at step {best}"
    if newest == best:
        return f"{sentence}, the newest evaluated."
    if newest not in finite:
        return f"{sentence}; not finite at step {newest}, the newest evaluated."
    return f"{sentence}; {_ratio(curve, newest, best)} at step {newest}, the newest evaluated."


def _finite(curve: Curve) -> dict[int, float]:
    """Return the perplexities that are finite."""
    values = {x: curve.value(x).value for x in curve.records}
    return {x: value for x, value in values.items() if math.isfinite(value)}


def _ratio(curve: Curve, x: int, best: int) -> str:
    """Return how many times the best value another one is, and whether the intervals overlap."""
    ratio = curve.value(x).value / curve.value(best).value
    return f"{ratio:.3f} times that ({difference(curve, x, curve, best).words})"


# ---- several curves ------------------------------------------------------------------------------
def what_stands_out(texts: Sequence[Text]) -> str:
    """Return the rankings of the methods and what is against the paper's picture, in Markdown.

    Perplexities are ranked among curves of one tokenizer: those of one training length, and at
    the lengths where models of several were evaluated, those of all. Curves of several tokenizers
    of one text are ranked by bits per byte.
    """
    blocks = []
    for text in texts:
        for tokenizer, curves in text.by_tokenizer.items():
            where = []
            if len(texts) > 1:
                where.append(f"validation set {text.validation or 'not recorded'}")
            if len(text.by_tokenizer) > 1:
                where.append(f"tokenizer {tokenizer or 'not recorded'}")
            blocks += _of_one_tokenizer(curves, where)
        if len(text.by_tokenizer) > 1 and has_bits(text.curves):
            blocks += _across_tokenizers(text.curves)
        if len(found := precisions(text.curves)) > 1:
            blocks.append(
                f"These models were evaluated in several precisions ({', '.join(found)}), which is "
                "a difference of its own: see the tables."
            )
    is_masked = any(curve.protocol == MASKED for text in texts for curve in text.curves)
    # The paper's models predict the next token.
    return "\n\n".join([*blocks, EXPLAINED if is_masked else f"{EXPLAINED} {PAPER}"])


def _of_one_tokenizer(curves: Sequence[Curve], where: Sequence[str]) -> list[str]:
    """Return a list of findings for each training length and protocol."""
    groups: dict[tuple[int, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.train_length, curve.protocol), []).append(curve)
    blocks = []
    for (train_length, protocol), group in groups.items():
        opening = ", ".join([f"Trained at L = {train_length}", protocol, *where])
        lines = rankings(group, train_length)
        if protocol != MASKED:
            lines += against_the_paper(group, train_length)
        if lines:
            blocks.append(f"{opening}:\n\n" + "\n".join(f"- {line}" for line in lines))
    for protocol in dict.fromkeys(curve.protocol for curve in curves):
        lines = _between_training_lengths([c for c in curves if c.protocol == protocol])
        if lines:
            opening = ", ".join(["Between training lengths", protocol, *where])
            blocks.append(f"{opening}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return blocks


def _between_training_lengths(curves: Sequence[Curve]) -> list[str]:
    """Return rankings of models trained short beside models trained long, as the paper has them.

    They are made at the training lengths and at the longest length, as far as models of several
    training lengths were evaluated there.

    Args:
        curves: Curves of one tokenizer and protocol.
    """
    common = [
        length
        for length in lengths_of(curves)
        if len({c.train_length for c in curves if length in c.records}) > 1
    ]
    trained = {curve.train_length for curve in curves}
    chosen = [n for n in common if n in trained or n == common[-1]]
    return [_ranking(curves, n, None, PERPLEXITY) for n in chosen]


def _across_tokenizers(curves: Sequence[Curve]) -> list[str]:
    """Return rankings by bits per byte for each training length and protocol."""
    groups: dict[tuple[int, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.train_length, curve.protocol), []).append(curve)
    blocks = []
    for (train_length, protocol), group in groups.items():
        lines = rankings(group, train_length, BITS_PER_BYTE)
        opening = f"Trained at L = {train_length}, {protocol}, in bits per byte"
        blocks.append(f"{opening}:\n\n" + "\n".join(f"- {line}" for line in lines))
    return blocks


def rankings(curves: Sequence[Curve], train_length: int, quantity: str = PERPLEXITY) -> list[str]:
    """Return rankings at the training length and at the longest length; none of a single curve.

    Args:
        curves: Curves of one training length and protocol.
        train_length: Training length L in tokens.
        quantity: PERPLEXITY or BITS_PER_BYTE.
    """
    if len(curves) < 2:
        return []
    lengths = dict.fromkeys([train_length, lengths_of(curves)[-1]])
    return [_ranking(curves, n, train_length, quantity) for n in lengths]


def _ranking(curves: Sequence[Curve], length: int, train_length: int | None, quantity: str) -> str:
    """Return a ranking at one length, in which everything that was not measured is named too."""
    at = f"At {length_in_words(length, train_length)}"
    present = [curve for curve in curves if length in curve.records]
    values = {curve: curve.value(length, quantity).value for curve in present}
    ranked = sorted((c for c in present if math.isfinite(values[c])), key=values.__getitem__)
    words = []
    for place, curve in enumerate(ranked, 1):
        word = f"{place}. {_named(curve, curves)} {cell(curve, length, quantity)}"
        if place > 1:
            before = ranked[place - 2]
            found = difference(before, length, curve, length, quantity)
            if found.is_shown is None:
                word += f" ({found.words})"
            elif not found.is_shown:
                word += f" (no difference from {place - 1}. is shown)"
        words.append(word)
    words += [f"not finite: {_named(c, curves)}" for c in present if c not in ranked]
    words += [f"not evaluated: {_named(c, curves)}" for c in curves if c not in present]
    return f"{at}: " + "; ".join(words) + "."


def _named(curve: Curve, among: Iterable[Curve]) -> str:
    """Return a curve's name, with training length, precision and step where others have others."""
    step, among = curve.sources[0].step, list(among)
    name = full_name(curve) if len({c.train_length for c in among}) > 1 else curve.name
    precision = curve.sources[0].precision
    if len(precisions(among)) > 1 and f"precision {precision}" not in name:
        name += f", precision {precision}"
    if len({c.sources[0].step for c in among}) == 1 or f"step {step}" in name:
        return name
    return f"{name}, step {step}"


def against_the_paper(curves: Sequence[Curve], train_length: int) -> list[str]:
    """Return a sentence for each result that the paper does not lead one to expect.

    Args:
        curves: Curves of one tokenizer, training length and protocol.
        train_length: Training length L in tokens.
    """
    lines, checked = [], 0
    for length in dict.fromkeys([train_length, lengths_of(curves)[-1]]):
        for base, other in _pairs(curves, length):
            checked += 1
            lines += _ahead_of_baseline(base, other, length, train_length)
    for curve in curves:
        if train_length in curve.records and max(curve.records) > train_length:
            checked += curve.method == BASELINE or curve.method in DEGRADES
            lines += _beyond_training_length(curve, train_length)
    return lines if lines or not checked else ["Nothing here is against the paper's picture."]


def _pairs(curves: Sequence[Curve], length: int) -> Iterator[tuple[Curve, Curve]]:
    """Yield (ALiBi, another method) with values at a length, after equal numbers of steps."""
    present = [curve for curve in curves if length in curve.records]
    for base in (c for c in present if c.method == BASELINE):
        for other in (c for c in present if c.method != BASELINE):
            if other.sources[0].step == base.sources[0].step:
                yield base, other


def _ahead_of_baseline(base: Curve, other: Curve, length: int, train_length: int) -> list[str]:
    """Return a sentence if another method has a lower perplexity than ALiBi at a length."""
    if not other.value(length).value < base.value(length).value:
        return []
    at = length_in_words(length, train_length)
    values = f"{cell(other, length)} against {cell(base, length)}"
    found = difference(base, length, other, length)
    if found.is_shown:
        return [f"**{other.name} is better than {base.name} at {at}**: {values} ({found.words})."]
    return [
        f"{other.name} has a lower value than {base.name} at {at}, but no difference is shown: "
        f"{values} ({found.words})."
    ]


def _beyond_training_length(curve: Curve, train_length: int) -> list[str]:
    """Return a sentence if a curve goes another way beyond L than in the paper."""
    longest = max(curve.records)
    at_l, beyond = curve.value(train_length).value, curve.value(longest).value
    values = f"{cell(curve, longest)} against {cell(curve, train_length)} at L"
    found = difference(curve, longest, curve, train_length)
    where = length_in_words(longest, train_length)
    if curve.method == BASELINE and not beyond <= at_l and found.is_shown is not False:
        return [f"**{curve.name} is worse at {where} than at L**: {values} ({found.words})."]
    if curve.method in DEGRADES and (beyond <= at_l or found.is_shown is False):
        return [
            f"**{curve.name} does not degrade at {where}**: {values} ({found.words}); in the paper "
            f"{DEGRADES[curve.method]} positions do."
        ]
    return []
