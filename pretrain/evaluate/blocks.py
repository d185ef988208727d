"""Compare two evaluations of one text block by block, which tells apart closer values.

A hard passage is hard for every model. The interval of one value holds how much passages differ;
that of the difference between two values, taken block by block, does not.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.evaluate.records import Record
from pretrain.evaluate.spread import confidence_interval

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


def read_blocks(path: Path) -> dict[BlockKey, BlockLosses]:
    """Return the losses by block of a report; none where it has no such file.

    Raises:
        ValueError: The file is no table of losses by block.
    """
    rows: dict[BlockKey, list[tuple[float, float]]] = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                sizes = int(row["stride"]), int(row["length"])
                key = (row["checkpoint"], row["protocol"], *sizes, row["precision"])
                rows.setdefault(key, []).append((float(row["loss_nats"]), float(row["tokens"])))
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None
    return {key: BlockLosses(*np.array(found).T) for key, found in rows.items()}
