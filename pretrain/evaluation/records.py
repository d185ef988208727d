"""Define the record of one evaluation: its keys, and what each of them says.

The same keys stand in curve.json, as the columns of curve.csv and, as far as they are not the
run's own, in the evaluation events of metrics.jsonl. This module imports no torch, so reports,
model cards and the launcher can read records with it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError
from pretrain.config.run import MASKED

Record = Mapping[str, Any]
"""One evaluation of one checkpoint, with the keys of FIELDS."""

_NUMBER = int | float | None
_TYPES: dict[str, type | types.UnionType] = {
    "run": str,
    "step": int,
    "method": str,
    "seed": int,
    "train_length": int,
    "settings": str,
    "tokenizer": str,
    "validation": str,
    "precision": str,
    "protocol": str,
    "stride": int,
    "length": int,
    "perplexity": _NUMBER,
    "loss_nats": _NUMBER,
    "loss_low": _NUMBER,
    "loss_high": _NUMBER,
    "bits_per_byte": _NUMBER,
    "tokens": int,
    "bytes": int | None,
    "checkpoint": str,
}
"""Keys of a record -> type of the value. None stands for what is not finite or not known."""
FIELDS = tuple(_TYPES)
"""Keys of a record, in the order of the columns of curve.csv.

| key | type | what it says |
|---|---|---|
| run | str | the run's directory as the user gave it, or the checkpoint's path if it stands alone |
| step | int | optimizer steps that the checkpoint was trained for |
| method | str | position.method |
| seed | int | run.seed |
| train_length | int | data.sequence_length, the training length L in tokens |
| settings | str | first 12 hex digits of a hash of all that training depends on but the seed |
| tokenizer | str | first 12 hex digits of the SHA-256 of the tokenizer's file |
| validation | str | first 12 hex digits of the SHA-256 of the validation split that was scored |
| precision | str | "fp32", "bf16" or "fp16": what the model computed in, by train.precision |
| protocol | str | "nonoverlapping" or "sliding"; "masked" if the model predicts masked tokens |
| stride | int | tokens by which a window moves on; equals length where windows do not overlap |
| length | int | tokens in a window |
| perplexity | float | exp(loss_nats), per token of this tokenizer |
| loss_nats | float | mean loss over all scored tokens, end-of-document tokens among them, in nats |
| loss_low, loss_high | float | 95 % confidence interval of loss_nats, over blocks of the text |
| bits_per_byte | float | all nats / ln 2 / bytes: comparable between tokenizers |
| tokens | int | tokens scored; masked: those that were masked |
| bytes | int | bytes of the text of these tokens, in UTF-8 |
| checkpoint | str | path of the checkpoint |

The interval is of the text: it says how far the mean would move if other text of the same kind
were scored, and nothing about another seed of the training. Masked tokens are predicted from both
sides, so their perplexity is no other protocol's; their bits_per_byte and bytes are None, and so
are those of a text for some of whose words a vocabulary of words has `<unk>`.
"""

HASH_DIGITS = 12
"""Hex digits of a SHA-256 in a record."""


T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by a key of theirs, in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def fields_of(record: Record) -> dict[str, Any]:
    """Return the FIELDS of a record in their order. Raises KeyError for one that it lacks."""
    return {field: record[field] for field in FIELDS}


@dataclass(frozen=True)
class PositionLosses:
    """Losses by position in the window, of one checkpoint at one length."""

    losses: NDArray[np.float64]
    """[length] mean loss in nats; nan at a position where no token was scored."""

    counts: NDArray[np.int64]
    """[length] tokens scored at each position."""


def check_objectives(found: Iterable[tuple[str, str]]) -> None:
    """Check that a report is of language models alone, or of models of masked tokens alone.

    A masked token is predicted from both sides, so that its perplexity is lower whatever the model
    is worth.

    Args:
        found: The source and the protocol of each record.

    Raises:
        ConfigError: There are both.
    """
    sources: dict[bool, str] = {}
    for source, protocol in found:
        sources.setdefault(protocol == MASKED, source)
    if len(sources) > 1:
        raise ConfigError(
            f"{sources[True]}: predicts masked tokens, and {sources[False]} next ones "
            "(train.objective). Their perplexities do not compare. Make a report of each"
        )


# ---- Estimate how far a mean loss would move if other text of the same kind were scored ----
# The losses of neighbouring tokens depend on each other, so their standard error is not that of as
# many independent numbers. That of blocks of the text is taken instead, which depend on each other
# the less the longer they are. The blocks depend on the text alone: every length, protocol and
# checkpoint that scores the same text has the same ones, so that differences can be taken block by
# block.


GROUPS = 32
"""Neighbouring blocks are taken together to at most so many groups for an interval. More make the
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


# ---- Compare two evaluations of one text block by block, which tells apart closer values ----
# A hard passage is hard for every model. The interval of one value holds how much passages differ;
# that of the difference between two values, taken block by block, does not.


BLOCK_FIELDS = (
    "checkpoint",
    "protocol",
    "stride",
    "length",
    "precision",
    "block",
    "tokens",
    "loss_nats",
)
"""Columns of curve_blocks.csv. The loss is summed over the tokens of the block."""
KEY = "blocks"
"""Key of a record in memory that holds its BlockLosses, where they are known."""


@dataclass(frozen=True)
class BlockLosses:
    """Losses of the blocks of a text, of one checkpoint under one protocol at one length."""

    losses: NDArray[np.float64]
    """[blocks] summed losses in nats."""
    counts: NDArray[np.float64]
    """[blocks] tokens scored."""


BlockKey = tuple[str, str, int, int, str]
"""(checkpoint, protocol, stride, length, precision) as in the record."""


def blocks_path(out: Path) -> Path:
    """Return the path of the losses by block of a report.

    Args:
        out: FILE.json of the report.
    """
    return out.with_name(f"{out.stem}_blocks.csv")


def block_key(record: Record) -> BlockKey:
    """Return the key of a record's losses by block."""
    checkpoint, protocol = record["checkpoint"], record["protocol"]
    return checkpoint, protocol, record["stride"], record["length"], record["precision"]


def with_blocks(record: Record, blocks: Mapping[BlockKey, BlockLosses]) -> dict[str, Any]:
    """Return a record that holds its losses by block, or None."""
    return {**record, KEY: blocks.get(block_key(record))}


def paired_interval(a: Record, b: Record) -> tuple[float, float] | None:
    """Return the 95 % interval of loss a - loss b, or None where they cannot be paired.

    The two must be of one validation set and tokenizer, which have cut the text into the same
    blocks.
    """
    mine, other = a.get(KEY), b.get(KEY)
    if mine is None or other is None:
        return None
    if any(a[key] is None or a[key] != b[key] for key in ("tokenizer", "validation")):
        return None
    if not np.array_equal(mine.counts, other.counts):
        return None
    low, high = confidence_interval(mine.losses - other.losses, mine.counts)
    return None if np.isnan(low) else (low, high)


def block_rows(records: Iterable[Record]) -> Iterable[list[Any]]:
    """Yield the rows of curve_blocks.csv, of the records whose losses by block are known."""
    for record in records:
        blocks = record.get(KEY)
        if blocks is not None:
            for i, (count, loss) in enumerate(zip(blocks.counts, blocks.losses)):
                yield [*block_key(record), i, int(count), float(loss)]


def read_table(path: Path, add: Callable[[Mapping[str, str]], None]) -> None:
    """Call `add` with each row of a CSV file; not at all without a file.

    Raises:
        ValueError: The file is no such table.
    """
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                add(row)
    except FileNotFoundError:
        return
    except (KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None


def read_blocks(path: Path) -> dict[BlockKey, BlockLosses]:
    """Return the losses by block of a report; none where it has no such file.

    Raises:
        ValueError: The file is no table of losses by block.
    """
    rows: dict[BlockKey, list[tuple[float, float]]] = {}

    def add(row: Mapping[str, str]) -> None:
        sizes = int(row["stride"]), int(row["length"])
        key = (row["checkpoint"], row["protocol"], *sizes, row["precision"])
        rows.setdefault(key, []).append((float(row["loss_nats"]), float(row["tokens"])))

    read_table(path, add)
    return {key: BlockLosses(*np.array(found).T) for key, found in rows.items()}


# ---- Read the curve.json of a report, and write one ----


_SIZES = ("train_length", "stride", "length")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a curve.json with the keys of FIELDS.

    Perplexities and losses that are null (not finite) are nan. Losses by block are read from the
    table beside the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a curve.json.
    """
    try:
        rows = json.loads(path.read_bytes())["records"]
        blocks = read_blocks(blocks_path(path))
        return [_with_its_blocks(_record(row), blocks) for row in rows]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _with_its_blocks(
    record: dict[str, Any], blocks: Mapping[BlockKey, BlockLosses]
) -> dict[str, Any]:
    """Return a record with its losses by block, or without where those in the table are not its.

    The table does not say which evaluation of a checkpoint a block is of. One of more text, or of
    another run whose checkpoint had the same path, has other sums.
    """
    found = blocks.get(block_key(record))
    if found is not None:
        tokens, loss = found.counts.sum(), found.losses.sum()
        is_its = tokens == record["tokens"] and math.isclose(
            loss, record["loss_nats"] * tokens, rel_tol=1e-6
        )
        if not is_its:
            return with_blocks(record, {})
    return with_blocks(record, blocks)


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one record, checked."""
    record = fields_of(row)
    for key in FIELDS:
        value, kinds = record[key], _TYPES[key]
        is_bad_size = key in _SIZES and isinstance(value, int) and value < 1
        if not isinstance(value, kinds) or isinstance(value, bool) or is_bad_size:
            raise ValueError(f"{key} = {value!r}")
    for key in ("perplexity", "loss_nats"):
        record[key] = math.nan if record[key] is None else record[key]
    return record


def bounded_exp(value: float) -> float:
    """Return exp(value), or infinity where it would overflow a float64; nan stays nan."""
    return math.inf if value >= 700 else math.exp(value)


def to_csv(fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a CSV file with these columns, with \\n at the end of lines."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    return text.getvalue().encode()


def records_to_csv(records: Iterable[Record], fields: Sequence[str] = FIELDS) -> bytes:
    """Return curve.csv; what is not known is empty, what is not finite is "nan" or "inf"."""
    return to_csv(fields, ([record[field] for field in fields] for record in records))


def records_to_json(
    records: Sequence[Record], fields: Sequence[str] = FIELDS, **beside: Any
) -> bytes:
    """Return curve.json: what stands beside the records, and {"records": [...]}."""
    rows = [{field: finite_or_none(record[field]) for field in fields} for record in records]
    return (json.dumps({**beside, "records": rows}, indent=1, allow_nan=False) + "\n").encode()


def curve_json(records: Sequence[Record]) -> bytes:
    """Return curve.json: {"train_length": L, or null for several, "records": [...]}."""
    trained = {record["train_length"] for record in records}
    return records_to_json(records, train_length=trained.pop() if len(trained) == 1 else None)


def finite_or_none(value: Any) -> Any:
    """Return None for a float that is not finite, and any other value as it is.

    JSON has neither nan nor infinity (RFC 8259, section 6), and strict readers refuse them.
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value
