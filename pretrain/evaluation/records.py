"""Define the record of one evaluation, and put records together to curves and tables.

A record says what one checkpoint has lost on a text at one length. Records stand in curve.json, the
one file that holds the numbers of a report, and as far as they are not the run's own in the
evaluation events of metrics.jsonl. This module imports no torch, so reports, model cards and the
launcher can read records with it.

A record belongs to the curve of its run, step, protocol and stride. Nothing replaces anything: of
two records at one length of one curve, the second begins a curve of its own. Runs that differ in
their seed alone are one curve, with the mean and the spread of their values.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.config.errors import columns
from pretrain.config.run import STREAM

Record = Mapping[str, Any]
"""One evaluation of one checkpoint, with the keys of FIELDS and, where they are known, BLOCKS,
POSITIONS and one of COSTS."""

FIELDS = (
    *("run", "step", "method", "seed", "train_length", "settings", "tokenizer", "validation"),
    *("precision", "protocol", "stride", "length", "perplexity", "loss_nats", "loss_low"),
    *("loss_high", "bits_per_byte", "tokens", "bytes", "checkpoint"),
)
"""Keys of a record, in their order.

| key | type | what it says |
|---|---|---|
| run | str | the run's directory as the user gave it, or the checkpoint's path if it stands alone |
| step | int | optimizer steps that the checkpoint was trained for |
| method | str | RunConfig.position_name, then what the evaluation alone changed (EVALUATED_WITH) |
| seed | int | run.seed |
| train_length | int | data.sequence_length, the training length L in tokens |
| settings | str | first 12 hex digits of a hash of all that training depends on but the seed |
| tokenizer | str | first 12 hex digits of the SHA-256 of the tokenizer's file |
| validation | str | first 12 hex digits of the SHA-256 of the validation split that was scored |
| precision | str | "fp32", "bf16" or "fp16": what the model computed in, by train.precision |
| protocol | str | "nonoverlapping", "sliding" or "stream"; "masked" of masked tokens |
| stride | int | tokens by which a window moves on; equals length where windows do not overlap |
| length | int | tokens in a window; of a stream, those of the text |
| perplexity | float | exp(loss_nats), per token of this tokenizer |
| loss_nats | float | mean loss over all scored tokens, end-of-document tokens among them, in nats |
| loss_low, loss_high | float | 95 % confidence interval of loss_nats, over blocks of the text |
| bits_per_byte | float | all nats / ln 2 / bytes: comparable between tokenizers |
| tokens | int | tokens scored; masked: those that were masked |
| bytes | int | bytes of the text of these tokens, in UTF-8 |
| checkpoint | str | path of the checkpoint |
| blocks | | summed losses in nats, and tokens, of each block of the text |
| positions | | nonoverlapping: mean losses in nats, and tokens, by position in the window |
| text | str | first 12 hex digits of the SHA-256 of the scored text (`windows.ScoredText.sha256`) |
| code | str | commit of pretrain that evaluated, and whether it was changed; else its version |
| parameters | int | parameters of the model, embeddings among them |
| trained_tokens | int | tokens that the run trained on; not known of a model that was imported |
| training_flop | float | trained_tokens x (6 N + 12 n d L) of `pretrain.model.flops_per_token` |
| processor_seconds | float | on CPUs: processor time of all processes together |
| device_seconds | float | on GPUs: time that it took, times the GPUs |
| longppl | float | exp(mean loss) of the key tokens (`pretrain.evaluation.perplexity.find_keys`) |
| longppl_low, longppl_high | float | its 95 % confidence interval, over blocks of the text |
| key_tokens | int | how many they are |
| short_context | int | tokens that the short context of LongPPL has at least |

The interval is of the text: it says how far the mean would move if other text of the same kind
were scored, and nothing about another seed of the training. Masked tokens are predicted from both
sides, so their perplexity is no other protocol's; their bits_per_byte and bytes are None, and so
are those of a text for some of whose words a vocabulary of words has `<unk>`.
"""

EVALUATED_WITH = ", evaluated with "
"""Parts a record's method from the positions that an evaluation gave to a model trained with
others: "alibi, evaluated with position.slopes = {factor = 0.5}". No reader who knows the method
alone takes it for the run's own."""
BLOCKS, POSITIONS = "blocks", "positions"
"""Further keys of a record: its Losses by block and its Binned losses by position; in a file as
lists. Values are compared block by block, where both have losses by block."""
COSTS = PROCESSOR_SECONDS, DEVICE_SECONDS = "processor_seconds", "device_seconds"
"""What the scoring took; of which kind is said by the key. A record has one of them at most."""
LONGPPL = "longppl"
LONGPPL_FIELDS = LONGPPL, "longppl_low", "longppl_high", "key_tokens", "short_context"
"""What `pretrain evaluate --longppl` adds to a record."""
ORIGIN = "text", "code", "parameters", "trained_tokens", "training_flop"
"""Further keys of a record, where they are known, by which a stranger can repeat it. They tell no
two curves apart: another commit that scores the same has scored the same."""
HASH_DIGITS = 12
"""Hex digits of a SHA-256 in a record."""
PERPLEXITY, BITS_PER_BYTE = "perplexity", "bits_per_byte"
"""Quantities of a record that curves show, beside its COSTS per 1,000 scored tokens."""


T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by a key of theirs, in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def fields_of(record: Record) -> dict[str, Any]:
    """Return the FIELDS of a record in their order; of ORIGIN, costs and LongPPL what is known.

    Raises:
        KeyError: It lacks a field.
    """
    further = (*ORIGIN, *COSTS, *LONGPPL_FIELDS)
    known = [key for key in further if record.get(key) is not None]
    return {field: record[field] for field in (*FIELDS, *known)}


@dataclass(frozen=True)
class Losses:
    """Losses in nats, of one checkpoint under one protocol at one length.

    By block of the text they are sums. By position in the window they are means, nan at a position
    where no token was scored.
    """

    losses: NDArray[np.float64]
    """[n]"""
    counts: NDArray[Any]
    """[n] tokens scored."""


# ---- Estimate how far a mean loss would move if other text of the same kind were scored ----
# The losses of neighboring tokens depend on each other, so their standard error is not that of as
# many independent numbers. That of blocks of the text is taken instead, which depend on each other
# the less the longer they are. The blocks depend on the text alone: every length, protocol and
# checkpoint that scores the same text has the same ones, so that differences can be taken block by
# block.


GROUPS = 32
"""Neighboring blocks are taken together to at most so many groups for an interval. More make the
interval itself less noisy; fewer, longer ones cover dependence over a longer distance. Measured on
16,384 tokens of the demo's validation text (docs/decisions.md): 64 groups are 10 % too narrow."""
COVERAGE = 0.95


def confidence_interval(
    losses: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[float, float]:
    """Return a 95 % confidence interval of a mean loss over the blocks of a text.

    Args:
        losses: [blocks] summed losses of each block, in the order of the text.
        counts: [blocks] tokens of each block.

    Returns:
        Its ends; nan where a loss is not finite, or fewer than two blocks have tokens.
    """
    if len(losses) > GROUPS:
        starts = np.arange(GROUPS) * len(losses) // GROUPS
        losses, counts = np.add.reduceat(losses, starts), np.add.reduceat(counts, starts)
    return cluster_interval(losses, counts)


def cluster_interval(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[float, float]:
    """Return a 95 % confidence interval of a mean over values that come in clusters.

    The mean is a ratio, of all sums to all counts, whose variance is that of the residuals of the
    clusters (Cochran, "Sampling Techniques", 1977, section 6.3), with Student's t for as many. Of
    clusters of one size it is the interval of the t-test on their means.

    Args:
        sums: [clusters] sum of the values of each cluster; clusters do not depend on each other.
        counts: [clusters] how many values each has.

    Returns:
        Its ends; nan where a sum is not finite, or fewer than two clusters have values.
    """
    # Here: the import takes 0.2 s, which a rank that only trains need not spend.
    from scipy.special import stdtrit

    # A cluster without values says nothing about how far apart clusters are.
    clusters = int(np.count_nonzero(counts))
    if clusters < 2 or not np.isfinite(sums).all():
        return np.nan, np.nan
    mean = sums.sum() / counts.sum()
    squares = np.square(sums - mean * counts).sum() * clusters / (clusters - 1)
    half = stdtrit(clusters - 1, (1 + COVERAGE) / 2) * np.sqrt(squares) / counts.sum()
    return float(mean - half), float(mean + half)


def wilson_interval(right: NDArray[np.float64]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the share of ones among zeros and ones.

    Wilson's, from the score test, which has a width where all are right or none is (Wilson,
    "Probable Inference", JASA 22, 1927).

    Args:
        right: [n] zeros and ones that do not depend on each other.
    """
    from scipy.stats import binomtest

    found = binomtest(int(right.sum()), len(right)).proportion_ci(COVERAGE, "wilson")
    return float(found.low), float(found.high)


# ---- Compare two evaluations of one text block by block, which tells apart closer values ----
# A hard passage is hard for every model. The interval of one value holds how much passages differ;
# that of the difference between two values, taken block by block, does not.


def paired_interval(of_a: Sequence[Record], of_b: Sequence[Record]) -> tuple[float, float] | None:
    """Return the 95 % interval over text of mean loss a - mean loss b; None where not paired.

    All must be of one validation set and tokenizer, which have cut the text into the same blocks.
    """
    records = [*of_a, *of_b]
    blocks = [found for record in records if (found := record.get(BLOCKS)) is not None]
    texts = {(record["tokenizer"], record["validation"]) for record in records}
    if len(blocks) < len(records) or len(texts) > 1 or None in next(iter(texts)):
        return None
    if not all(np.array_equal(each.counts, blocks[0].counts) for each in blocks):
        return None
    losses = [each.losses for each in blocks]
    apart = np.mean(losses[: len(of_a)], axis=0) - np.mean(losses[len(of_a) :], axis=0)
    low, high = confidence_interval(apart, blocks[0].counts)
    return None if np.isnan(low) else (low, high)


# ---- Average losses by position over ranges that widen with the position ----


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
    def of(positions: Losses) -> Binned:
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

    def merged(self, tokens: int) -> Binned:
        """Return wider ranges, of so many scored tokens each, but for one alone with fewer."""
        starts, last = [0], len(self.counts)
        for i in range(1, last):
            if min(sum(self.counts[starts[-1] : i]), sum(self.counts[i:])) >= tokens:
                starts.append(i)
        ranges = [slice(*ends) for ends in itertools.pairwise([*starts, last])]
        counts = [sum(self.counts[each]) for each in ranges]
        sums = [n * loss if n else 0.0 for n, loss in zip(self.counts, self.losses)]
        losses = [sum(sums[each]) / n if n else math.nan for each, n in zip(ranges, counts)]
        return Binned(self.edges[[*starts, last]], losses, counts)

    def centers(self) -> list[float]:
        """Return the geometric mean of each range, with positions counted from 1 for a log axis."""
        return [math.sqrt((first + 1) * end) for first, end in itertools.pairwise(self.edges)]


# ---- Write and read the file of a report's records ----


def records_json(records: Iterable[Record]) -> bytes:
    """Return {"records": [...]}, a line for each; what is not finite is null (RFC 8259)."""
    lines = (json.dumps(as_json(record), allow_nan=False) for record in records)
    return ('{"records": [\n' + ",\n".join(lines) + "\n]}\n").encode()


def as_json(value: Any) -> Any:
    """Return what JSON can hold of a value."""
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, Losses):
        return {"losses": as_json(value.losses), "tokens": as_json(value.counts)}
    if isinstance(value, Binned):
        edges, losses, counts = map(as_json, value)
        return {"edges": edges, "losses": losses, "tokens": counts}
    if isinstance(value, list | np.ndarray):
        return [as_json(each) for each in np.asarray(value).tolist()]
    return finite_or_none(value)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a curve.json. Perplexities and losses that are null are nan.

    Raises:
        ConfigError: It cannot be read, or is not a curve.json.
    """
    try:
        return [_record(row) for row in json.loads(path.read_bytes())["records"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a curve.json that `pretrain evaluate --out` wrote, or damaged "
            f"({type(error).__name__}: {error})"
        ) from None


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a file."""
    record = fields_of(row)
    for key in ("perplexity", "loss_nats"):
        record[key] = number(record[key])
    if found := row.get(BLOCKS):
        losses, counts = (np.array(found[key], np.float64) for key in ("losses", "tokens"))
        record[BLOCKS] = Losses(losses, counts)
    if found := row.get(POSITIONS):
        edges = np.array(found["edges"], np.int64)
        record[POSITIONS] = Binned(edges, list(map(number, found["losses"])), found["tokens"])
    return record


def number(value: float | None) -> float:
    """Return nan for None, which stands in files for what is not finite or not known."""
    return math.nan if value is None else value


def bounded_exp(value: float) -> float:
    """Return exp(value), or infinity where it would overflow a float64; nan stays nan."""
    return math.inf if value >= 700 else math.exp(value)


def finite_or_none(value: Any) -> Any:
    """Return None for a float that is not finite, and any other value as it is.

    JSON has neither nan nor infinity (RFC 8259, section 6), and strict readers refuse them.
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- Put records together to curves ----


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
    evaluation: int = 1
    """1, or more where one checkpoint has several records at the same length and protocol."""


class Value(NamedTuple):
    """A value and the range around it; nan where it is not known."""

    value: float
    low: float
    high: float

    @classmethod
    def of_seeds(cls, values: Sequence[float], *, geometric: bool = False) -> Value:
        """Return the mean of the seeds' values and their range, which one value does not have.

        What is not finite has no range, and makes the mean infinite; nan makes it nan.
        """
        # Python's min and max would ignore some nan and return others.
        if not all(map(math.isfinite, values)):
            return cls(math.nan if any(map(math.isnan, values)) else math.inf, math.nan, math.nan)
        if len(values) == 1:
            return cls(values[0], math.nan, math.nan)
        low, high = min(values), max(values)
        mean = (statistics.geometric_mean if geometric else statistics.fmean)(values)
        # Rounding must not put the mean of equal values beside them.
        return cls(min(max(mean, low), high), low, high)


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
    records: dict[int, tuple[Record, ...]]
    """Window length in tokens, ascending -> one record for each source."""

    @property
    def method(self) -> str:
        return self.sources[0].method

    @property
    def train_length(self) -> int:
        """Return the training length L in tokens."""
        return self.sources[0].train_length

    @property
    def kind(self) -> str:
        """Return the protocol without its stride: "nonoverlapping", "sliding", MASKED or STREAM.

        Claims and published numbers are of language models. Nothing of theirs is MASKED.
        """
        return self.protocol.partition(" ")[0]

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
            return Value(_amount(records[0], quantity), *_interval(records[0], quantity))
        values = [_amount(record, quantity) for record in records]
        return Value.of_seeds(values, geometric=quantity in (PERPLEXITY, LONGPPL))

    def counts(self, unit: str) -> list[int]:
        """Return the different numbers of a record's unit that are known, ascending."""
        found = [record.get(unit) for records in self.records.values() for record in records]
        return sorted({count for count in found if count is not None})


class Part(NamedTuple):
    """The curves of one validation set and tokenizer, whose perplexities are comparable."""

    subject: str
    """What tells it from the other parts of a report, in words; empty where there are no others."""
    end: str
    """The same at the end of a file's name."""
    curves: list[Curve]


def parts_of(curves: Iterable[Curve]) -> list[Part]:
    """Return the parts of a report: perplexities of different ones are never put together."""
    groups = grouped(curves, lambda c: (c.sources[0].validation, c.sources[0].tokenizer))
    return [
        Part(
            f"validation set {validation}, tokenizer {tokenizer}" if len(groups) > 1 else "",
            f"_{number}" if number > 1 else "",
            found,
        )
        for number, ((validation, tokenizer), found) in enumerate(groups.items(), 1)
    ]


def make_curves(records: Sequence[Record]) -> list[Curve]:
    """Return the curves by window length, in the order of the records.

    Runs are averaged when they agree in method, training length, settings, tokenizer, validation
    set, precision, step, protocol, lengths and scored tokens, and each has another seed. Two runs
    with one seed differ in something else, and then none of them is averaged. Nor are models at
    step 0, of whose training nothing is known.

    Args:
        records: Evaluations with the keys of `records.FIELDS`.
    """
    found: dict[tuple[Source, str], dict[int, Record]] = {}
    seen: Counter[tuple[object, ...]] = Counter()
    again: dict[tuple[Source, str], int] = {}
    evaluations: dict[tuple[Source, str], dict[object, int]] = {}
    for record in _distinct(records):
        source = Source(*(record[key] for key in Source._fields if key != "evaluation"))
        place = source, protocol_name(record)
        # A stream is as long as its text. Else a part of the text is another evaluation.
        tokens = None if record["protocol"] == STREAM else record["tokens"]
        seen[*place, record["length"], tokens] += 1
        of_place = evaluations.setdefault(place, {})
        which = tokens, seen[*place, record["length"], tokens]
        key = source._replace(evaluation=of_place.setdefault(which, len(of_place) + 1)), place[1]
        found.setdefault(key, {})[record["length"]], again[key] = record, which[1]

    def but_the_seed(key: tuple[Source, str]) -> object:
        scored = frozenset((n, record["tokens"]) for n, record in found[key].items())
        # `scored` tells evaluations of other tokens apart, and `again` those of equal tokens.
        return key[0]._replace(seed=0, run="", checkpoint="", evaluation=again[key]), key[1], scored

    members: list[list[tuple[Source, str]]] = []
    for group in grouped(found, but_the_seed).values():
        # Two runs with one seed differ in something else.
        differ = len({source.seed for source, _ in group}) == len(group)
        is_known = group[0][0].step > 0
        members += [group] if differ and is_known else [[key] for key in group]
    names = _names([tuple(source for source, _ in keys) for keys in members])
    curves = []
    for keys in members:
        sources = tuple(source for source, _ in keys)
        points = {n: tuple(found[key][n] for key in keys) for n in sorted(found[keys[0]])}
        curves.append(Curve(names[sources], keys[0][1], sources, points))
    order = {key: i for i, key in enumerate(found)}
    return sorted(curves, key=lambda c: order[c.sources[0], c.protocol])


def _distinct(records: Iterable[Record]) -> Iterable[Record]:
    """Return records that differ in FIELDS; of equal ones the last that has losses by block."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = tuple(record[field] for field in FIELDS)
        if key not in found or record.get(BLOCKS) is not None:
            found[key] = record
    return found.values()


def protocol_name(record: Record) -> str:
    """Return a record's protocol, with the stride if it slides: other strides, other protocols."""
    sliding = record["protocol"] == "sliding"
    return f"sliding by {record['stride']}" if sliding else str(record["protocol"])


def train_lengths(curves: Iterable[Curve]) -> list[int]:
    """Return the different training lengths in tokens, ascending."""
    return sorted({curve.train_length for curve in curves})


def lengths_of(curves: Iterable[Curve]) -> list[int]:
    """Return the different window lengths at which there are values, ascending."""
    return sorted({x for curve in curves for x in curve.records})


def known_lengths(curve: Curve, quantity: str) -> list[int]:
    """Return the window lengths at which a curve has a quantity, ascending.

    A record may lack one, such as bytes of `<unk>`. A perplexity is always known: None stands for
    one that is not finite.
    """
    return [
        x
        for x, records in curve.records.items()
        if quantity == PERPLEXITY or all(r.get(quantity) is not None for r in records)
    ]


def quantities(curves: Iterable[Curve]) -> list[str]:
    """Return the quantities that are known anywhere on the curves, in the order of TITLES."""
    curves = list(curves)
    return [each for each in TITLES if any(known_lengths(curve, each) for curve in curves)]


def relative_length(multiple: float) -> str:
    """Return a multiple of the training length: "L", "1.5 L" or "1,024 L"."""
    shown = f"{multiple:.3g}" if multiple < 1000 else f"{multiple:,.0f}"
    return "L" if multiple == 1 else f"{shown} L"


def length_label(length: int, train_length: int | None, separator: str = " = ") -> str:
    """Return a length in tokens and, if L is given, in training lengths, as in "256 = 2 L"."""
    if train_length is None:
        return str(length)
    return f"{length}{separator}{relative_length(length / train_length)}"


def _amount(record: Record, quantity: str) -> float:
    """Return a quantity of a record; a cost is that of 1,000 scored tokens (0 may be masked)."""
    share = 1000 / max(1, record["tokens"]) if quantity in COSTS else 1.0
    return number(record[quantity]) * share


def _interval(record: Record, quantity: str) -> tuple[float, float]:
    """Return the 95 % interval of a record's quantity; nan where unknown."""
    if quantity in COSTS:
        return math.nan, math.nan
    if quantity == LONGPPL:
        return number(record.get("longppl_low")), number(record.get("longppl_high"))
    low, high = number(record["loss_low"]), number(record["loss_high"])
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.nan, math.nan
    if quantity == PERPLEXITY:
        return bounded_exp(low), bounded_exp(high)
    loss, bits = number(record["loss_nats"]), number(record[quantity])
    # Bits per byte are the loss times a number that the text fixes.
    return (low * bits / loss, high * bits / loss) if loss else (math.nan, math.nan)


# ---- names ---------------------------------------------------------------------------------------
def _names(groups: Iterable[tuple[Source, ...]]) -> dict[tuple[Source, ...], str]:
    """Return a name for each curve: its method, and what tells it from others of its length L.

    Qualifiers are added one after the other, each only to curves that still have the same name.
    """
    words = {group: [group[0].method] for group in groups}
    for group, found in words.items():
        if len(group) > 1:
            found.append(f"{len(group)} seeds")
    for key in ("settings", *Source._fields[2:]):
        same = grouped(words, lambda group: (group[0].train_length, tuple(words[group])))
        for alike in same.values():
            answers = _answers(alike, key)
            if len(set(answers)) > 1:
                for group, answer in zip(alike, answers):
                    words[group].append(answer)
    return {group: ", ".join(found) for group, found in words.items()}


def _answers(groups: Sequence[tuple[Source, ...]], key: str) -> list[str]:
    """Return what each group's sources say under a key, as in "step 400"."""
    if key == "settings":
        if len({group[0].settings for group in groups}) == 1:
            return [""] * len(groups)
        # Nobody knows settings by their hash.
        key = "run"
    found = [[str(getattr(source, key)) for source in group] for group in groups]
    if key in ("run", "checkpoint"):
        # From the first folder on in which they differ.
        paths = [[os.path.abspath(path) for path in group] for group in found]
        top = os.path.commonpath([os.path.dirname(path) for group in paths for path in group])
        found = [[os.path.relpath(path, top) for path in group] for group in paths]
    return [f"{key} {' and '.join(dict.fromkeys(group))}" for group in found]


class PositionCurve(NamedTuple):
    """Loss by position in the longest window of a curve; of seeds, of each."""

    curve: Curve
    length: int
    """Tokens in the window."""
    binned: list[Binned]
    """One for each seed that has losses by position."""


def position_curves(curves: Iterable[Curve]) -> list[PositionCurve]:
    """Return loss by position in the longest window of each curve that has it."""
    found = []
    for curve in curves:
        for length, records in reversed(curve.records.items()):
            if binned := [record[POSITIONS] for record in records if record.get(POSITIONS)]:
                found.append(PositionCurve(curve, length, binned))
                break
    return found


# ---- Make tables of curves, for the terminal and for Markdown ----


TITLES = {
    PERPLEXITY: "Perplexity",
    BITS_PER_BYTE: "Bits per byte",
    LONGPPL: "LongPPL, the perplexity of key tokens,",
    PROCESSOR_SECONDS: "Processor seconds per 1,000 scored tokens",
    DEVICE_SECONDS: "GPU seconds per 1,000 scored tokens",
}
"""Quantity -> what tables and figures call it."""


class Table(NamedTuple):
    """A table of strings under a title."""

    title: str
    header: list[str]
    rows: list[list[str]]
    names: int
    """Columns at the left that hold words; the others hold numbers."""

    def plain(self) -> str:
        """Return the table for a terminal, under its title, with a rule under the header.

        Words are aligned to the left, numbers to the right.
        """
        head, *rows = columns([self.header, *self.rows], range(self.names, len(self.header)))
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows)]
        return "\n".join([self.title, head, "  ".join("-" * width for width in widths), *rows])

    def markdown(self) -> str:
        """Return the table in Markdown, under its title, with numbers aligned to the right."""
        alignment = ["---" if i < self.names else "---:" for i in range(len(self.header))]
        # No cell ends early, whatever path it holds.
        rows = [[cell.replace("|", "\\|") for cell in row] for row in [self.header, *self.rows]]
        rows.insert(1, alignment)
        return f"{self.title}:\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def length_table(curves: Sequence[Curve], quantity: str = PERPLEXITY) -> Table:
    """Return a table with a row for each curve and a column for each window length in tokens.

    Args:
        curves: Curves of one tokenizer.
        quantity: One of TITLES.
    """
    trained = train_lengths(curves)
    only = trained[0] if len(trained) == 1 else None
    word = "lengths" if len(trained) > 1 else "length"
    known = ", ".join(map(str, trained))
    title = f"{TITLES[quantity]} by length in tokens (training {word} L = {known})"
    lengths = lengths_of(curves)
    # Checkpoints of different steps are no fair comparison of methods, and a model in bf16 is none
    # beside one in fp32, which rounds less: the table shows both where they differ.
    words = {
        "method": [curve.name for curve in curves],
        "L": [str(curve.train_length) for curve in curves],
        "step": [str(curve.sources[0].step) for curve in curves],
        "precision": [curve.sources[0].precision for curve in curves],
        "protocol": [curve.protocol for curve in curves],
    }
    for name in ("L", "step", "precision"):
        if len(set(words[name])) < 2:
            del words[name]
    unit = {BITS_PER_BYTE: "bytes", LONGPPL: "key_tokens"}.get(quantity, "tokens")
    rows = [
        [*row, _range(curve.counts(unit)), *(cell(curve, n, quantity) for n in lengths)]
        for row, curve in zip(zip(*words.values()), curves)
    ]
    header = [*words, f"{unit.replace('_', ' ')} scored", *(length_label(n, only) for n in lengths)]
    return Table(title, header, rows, names=len(words))


def source_table(curves: Iterable[Curve]) -> Table:
    """Return a table that says of each curve's name which run, step, seed and text it is of."""
    rows: dict[str, list[str]] = {}
    for curve in curves:
        for source in curve.sources:
            words = [full_name(curve), source.run, str(source.step), str(source.seed)]
            words += [str(source.train_length), source.tokenizer, source.validation]
            words += [source.precision]
            rows.setdefault("\0".join(words), words)
    header = ["curve", "run", "step", "seed", "L", "tokenizer", "validation set", "precision"]
    return Table("What was evaluated", header, list(rows.values()), names=len(header))


def tables_of(part: Part) -> list[Table]:
    """Return the tables of all values: perplexities, and what else is known of the same lengths."""
    return [length_table(part.curves, quantity) for quantity in quantities(part.curves)]


# ---- cells ---------------------------------------------------------------------------------------
def cell(curve: Curve, x: int, quantity: str = PERPLEXITY) -> str:
    """Return a curve's value: "20.00 +-0.40", or of seeds "20.00 (19.80 to 20.30)".

    The number after +- is the longer half of the 95 % interval; without one it is left out. A
    length at which there is no value is "-".
    """
    if x not in known_lengths(curve, quantity):
        return "-"
    value, low, high = curve.value(x, quantity)
    shown = format_value(value, quantity)
    if math.isnan(low) or not math.isfinite(value):
        return shown
    if curve.is_mean:
        return f"{shown} ({format_value(low, quantity)} to {format_value(high, quantity)})"
    return f"{shown} +-{format_value(max(value - low, high - value), quantity)}"


def format_value(value: float, quantity: str = PERPLEXITY) -> str:
    """Return a perplexity with two decimals, bits per byte with four, a cost with three digits.

    From 100,000 on it is in scientific notation.
    """
    if quantity in COSTS:
        return f"{value:#.3g}"
    if value < 1e5 or not math.isfinite(value):
        return f"{value:.2f}" if quantity in (PERPLEXITY, LONGPPL) else f"{value:.4f}"
    return f"{value:.3e}"


def full_name(curve: Curve) -> str:
    """Return a curve's name with its training length."""
    return f"{curve.name}, L = {curve.train_length}"


def length_in_words(length: int, train_length: int) -> str:
    """Return a length as in "256 tokens (2 L)"."""
    return f"{length} tokens ({relative_length(length / train_length)})"


def _range(counts: Sequence[int]) -> str:
    return " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))) if counts else "-"
