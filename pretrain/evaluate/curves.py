"""Put evaluation records together to curves: by run, with seeds averaged, each under its own name.

A record belongs to the curve of its run, step, protocol and stride. Nothing replaces anything: of
two records at one length of one curve, the second begins a curve of its own. Runs that differ in
their seed alone are one curve, with the mean and the spread of their values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.evaluate.records import Record

PERPLEXITY, BITS_PER_BYTE = "perplexity", "bits_per_byte"
"""The quantities of a record that curves show."""


class Source(NamedTuple):
    """The checkpoint of a curve and its text."""

    method: str
    train_length: int
    seed: int
    settings: str
    tokenizer: str
    validation: str
    precision: str
    step: int
    run: str
    checkpoint: str
    evaluation: int
    """1, or more where one checkpoint has several records at the same length and protocol."""


class Value(NamedTuple):
    """A value and the range around it; nan where it is not known."""

    value: float
    low: float
    high: float


# Curves with equal values are different curves, so they are compared by identity.
@dataclass(frozen=True, eq=False)
class Curve:
    """The values of one source, or the mean of several that differ in the seed alone."""

    name: str
    """The method and, where other curves have the same, what tells it from them."""
    protocol: str
    """Either "nonoverlapping" or "sliding by S", with the stride S in tokens."""
    sources: tuple[Source, ...]
    """One, or one for each seed."""
    records: Mapping[int, tuple[Record, ...]]
    """Window length in tokens, or training step, ascending -> one record for each source."""

    @property
    def method(self) -> str:
        return self.sources[0].method

    @property
    def train_length(self) -> int:
        """Return the training length L in tokens."""
        return self.sources[0].train_length

    @property
    def is_mean(self) -> bool:
        """Return True for the mean of several seeds."""
        return len(self.sources) > 1

    def value(self, x: int, quantity: str = PERPLEXITY) -> Value:
        """Return the value at `x` with its 95 % interval, or the mean of seeds and their range.

        The mean of perplexities is that of the losses, so a geometric one.
        """
        records = self.records[x]
        if len(records) == 1:
            return Value(number(records[0][quantity]), *_interval(records[0], quantity))
        values = [number(record[quantity]) for record in records]
        # Python's min and max would ignore some nan and return others.
        if not all(map(math.isfinite, values)):
            return Value(math.nan if any(map(math.isnan, values)) else math.inf, math.nan, math.nan)
        if quantity == PERPLEXITY:
            mean = math.exp(sum(map(math.log, values)) / len(values))
        else:
            mean = sum(values) / len(values)
        # Rounding must not put the mean of equal values beside them.
        return Value(min(max(mean, min(values)), max(values)), min(values), max(values))

    def interval(self, x: int, quantity: str = PERPLEXITY) -> tuple[float, float]:
        """Return the 95 % interval at `x`; of seeds the range that holds all their intervals."""
        intervals = [_interval(record, quantity) for record in self.records[x]]
        if any(map(math.isnan, (end for pair in intervals for end in pair))):
            return math.nan, math.nan
        return min(low for low, _ in intervals), max(high for _, high in intervals)

    def tokens(self) -> list[int]:
        """Return the different numbers of scored tokens of the records, ascending."""
        return _known(record["tokens"] for rs in self.records.values() for record in rs)

    def bytes(self) -> list[int]:
        """Return the different numbers of scored bytes of the records, ascending."""
        return _known(record["bytes"] for rs in self.records.values() for record in rs)


class Text(NamedTuple):
    """The curves of one validation text, by tokenizer."""

    validation: str
    """Hash of the validation split, or of its first one if several tokenizers have split it."""
    by_tokenizer: dict[str, list[Curve]]

    @property
    def curves(self) -> list[Curve]:
        return [curve for curves in self.by_tokenizer.values() for curve in curves]


def make_curves(records: Sequence[Record]) -> list[Curve]:
    """Return the curves by window length, in the order of the records.

    Runs are averaged when they agree in method, training length, settings, tokenizer, validation
    set, precision, step, protocol and lengths, and each has another seed. Two runs with one seed
    differ in something else, and then none of them is averaged.

    Args:
        records: Evaluations with the keys of `records.FIELDS`.
    """
    found: dict[tuple[Source, str], dict[int, Record]] = {}
    seen: Counter[tuple[Source, str, int]] = Counter()
    for record in records:
        source, protocol = _source(record), protocol_name(record)
        place = (source, protocol, record["length"])
        seen[place] += 1
        key = source._replace(evaluation=seen[place]), protocol
        found.setdefault(key, {})[record["length"]] = record
    groups: dict[Any, list[tuple[Source, str]]] = {}
    for key, by_length in found.items():
        alike = key[0]._replace(seed=0, run="", checkpoint="")
        groups.setdefault((alike, key[1], frozenset(by_length)), []).append(key)
    members: list[list[tuple[Source, str]]] = []
    for group in groups.values():
        members += [group] if _differ_in_seed(group) else [[key] for key in group]
    names = _names([tuple(source for source, _ in keys) for keys in members])
    curves = []
    for keys in members:
        sources = tuple(source for source, _ in keys)
        lengths = sorted(found[keys[0]])
        points = {n: tuple(found[key][n] for key in keys) for n in lengths}
        curves.append(Curve(names[sources], keys[0][1], sources, points))
    order = {key: i for i, key in enumerate(found)}
    return sorted(curves, key=lambda c: order[c.sources[0], c.protocol])


def make_step_curves(records: Sequence[Record]) -> list[Curve]:
    """Return the curves by training step: one for each window length (ascending) and protocol.

    Args:
        records: Evaluations of one run's checkpoints, with one tokenizer on one text.
    """
    found: dict[tuple[int, str, int], dict[int, Record]] = {}
    seen: Counter[tuple[int, str, int]] = Counter()
    for record in records:
        place = (record["length"], protocol_name(record))
        seen[*place, record["step"]] += 1
        found.setdefault((*place, seen[*place, record["step"]]), {})[record["step"]] = record
    curves = []
    for (length, protocol, evaluation), by_step in sorted(found.items()):
        source = _source(next(iter(by_step.values())))
        name = length_label(length, source.train_length)
        name += f", evaluation {evaluation}" if evaluation > 1 else ""
        curves.append(Curve(name, protocol, (source,), {x: (by_step[x],) for x in sorted(by_step)}))
    return curves


def protocol_name(record: Record) -> str:
    """Return a record's protocol, with the stride if it slides: other strides, other protocols."""
    sliding = record["protocol"] == "sliding"
    return f"sliding by {record['stride']}" if sliding else str(record["protocol"])


def by_text(curves: Iterable[Curve]) -> list[Text]:
    """Return the curves by validation text and, within each, by tokenizer.

    Each tokenizer cuts a text into a split of its own, with its own hash. Two splits are taken for
    one text when no tokenizer made both and the same number of bytes was scored of each.
    """
    splits: dict[str, list[Curve]] = {}
    for curve in curves:
        splits.setdefault(curve.sources[0].validation, []).append(curve)
    texts: list[tuple[str, list[Curve]]] = []
    for validation, found in splits.items():
        for _, earlier in texts:
            if _tokenizers(earlier).isdisjoint(_tokenizers(found)) and _bytes(earlier) & _bytes(
                found
            ):
                earlier += found
                break
        else:
            texts.append((validation, list(found)))
    result = []
    for validation, found in texts:
        by_tokenizer: dict[str, list[Curve]] = {}
        for curve in found:
            by_tokenizer.setdefault(curve.sources[0].tokenizer, []).append(curve)
        result.append(Text(validation, by_tokenizer))
    return result


def train_lengths(curves: Iterable[Curve]) -> list[int]:
    """Return the different training lengths in tokens, ascending."""
    return sorted({curve.train_length for curve in curves})


def precisions(curves: Iterable[Curve]) -> list[str]:
    """Return the different precisions of the evaluations."""
    return sorted({curve.sources[0].precision for curve in curves})


def lengths_of(curves: Iterable[Curve]) -> list[int]:
    """Return the different window lengths (or steps) at which there are values, ascending."""
    return sorted({x for curve in curves for x in curve.records})


def is_known(curve: Curve, x: int, quantity: str) -> bool:
    """Return False where a record does not have the quantity, such as bytes of `<unk>`.

    A perplexity is always known: None stands for one that is not finite.
    """
    return quantity == PERPLEXITY or all(r[quantity] is not None for r in curve.records[x])


def has_bits(curves: Iterable[Curve]) -> bool:
    """Return True if bits per byte are known anywhere on the curves."""
    return any(is_known(curve, x, BITS_PER_BYTE) for curve in curves for x in curve.records)


def relative_length(multiple: float) -> str:
    """Return a multiple of the training length: "L", "2 L" or "1.5 L"."""
    return "L" if multiple == 1 else f"{multiple:.3g} L"


def length_label(length: int, train_length: int | None, separator: str = " = ") -> str:
    """Return a length in tokens and, if L is given, in training lengths, as in "256 = 2 L"."""
    if train_length is None:
        return str(length)
    return f"{length}{separator}{relative_length(length / train_length)}"


def _source(record: Record) -> Source:
    """Return what a record evaluates."""
    fields = {key: record[key] for key in Source._fields if key != "evaluation"}
    return Source(**fields, evaluation=1)


def number(value: float | None) -> float:
    """Return nan for None, which stands in files for what is not finite or not known."""
    return math.nan if value is None else value


def _interval(record: Record, quantity: str) -> tuple[float, float]:
    """Return the 95 % interval of a record's perplexity or bits per byte; nan where unknown."""
    low, high = number(record["loss_low"]), number(record["loss_high"])
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.nan, math.nan
    if quantity == PERPLEXITY:
        return _exp(low), _exp(high)
    loss, bits = number(record["loss_nats"]), number(record[quantity])
    # Bits per byte are the loss times a number that the text fixes.
    return (low * bits / loss, high * bits / loss) if loss else (math.nan, math.nan)


def _exp(loss: float) -> float:
    """Return exp(loss), or infinity where it would overflow a float64 (beyond 709 nats)."""
    return math.exp(loss) if loss < 700 else math.inf


def _known(values: Iterable[int | None]) -> list[int]:
    """Return the different values that are not None, ascending."""
    return sorted({value for value in values if value is not None})


def _differ_in_seed(keys: Sequence[tuple[Source, str]]) -> bool:
    """Return True for several sources of which each has a seed of its own."""
    return len(keys) > 1 and len({source.seed for source, _ in keys}) == len(keys)


def _tokenizers(curves: Iterable[Curve]) -> set[str]:
    return {curve.sources[0].tokenizer for curve in curves}


def _bytes(curves: Iterable[Curve]) -> set[int]:
    return {count for curve in curves for count in curve.bytes()}


# ---- names ---------------------------------------------------------------------------------------
def _names(groups: Iterable[tuple[Source, ...]]) -> dict[tuple[Source, ...], str]:
    """Return a name for each curve: its method, and what tells it from others of its length L.

    Qualifiers are added one after the other, each only to curves that still have the same name.
    """
    words = {group: [group[0].method] for group in groups}
    for group, found in words.items():
        if len(group) > 1:
            found.append(f"{len(group)} seeds")
    for qualifier in _QUALIFIERS:
        same: dict[Any, list[tuple[Source, ...]]] = {}
        for group, found in words.items():
            same.setdefault((group[0].train_length, tuple(found)), []).append(group)
        for alike in same.values():
            answers = qualifier(alike)
            if len(set(answers)) > 1:
                for group, answer in zip(alike, answers):
                    words[group].append(answer)
    return {group: ", ".join(found) for group, found in words.items()}


_Groups = Sequence[tuple[Source, ...]]


def _field(name: str) -> Callable[[_Groups], list[str]]:
    """Return a qualifier that says a field of the sources, as in "step 400"."""

    def qualifier(groups: _Groups) -> list[str]:
        found = [[getattr(source, name) for source in group] for group in groups]
        return [
            f"{name} " + " and ".join(str(value) for value in dict.fromkeys(values))
            for values in found
        ]

    return qualifier


def _path(name: str) -> Callable[[_Groups], list[str]]:
    """Return a qualifier that says the ends of paths, as long as needed to tell them apart."""

    def qualifier(groups: _Groups) -> list[str]:
        paths = [[Path(getattr(source, name)).parts for source in group] for group in groups]
        longest = max(len(path) for group in paths for path in group)
        for count in range(1, longest + 1):
            ends = [" and ".join("/".join(p[-count:]) for p in group) for group in paths]
            if len(set(ends)) == len({tuple(group) for group in paths}):
                break
        return [f"{name} {end}" for end in ends]

    return qualifier


def _settings(groups: _Groups) -> list[str]:
    """Return the run where settings differ, since nobody knows settings by their hash."""
    is_one = len({group[0].settings for group in groups}) == 1
    return [""] * len(groups) if is_one else _path("run")(groups)


_QUALIFIERS = (
    _settings,
    _field("seed"),
    _field("tokenizer"),
    _field("validation"),
    _field("precision"),
    _field("step"),
    _path("run"),
    _path("checkpoint"),
    _field("evaluation"),
)
