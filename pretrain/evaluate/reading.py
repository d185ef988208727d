"""Read the curve.json of a report."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.evaluate.blocks import (
    BlockKey,
    BlockLosses,
    block_key,
    blocks_path,
    read_blocks,
    with_blocks,
)
from pretrain.evaluate.records import FIELDS, fields_of

_NUMBER = int | float | None
_KINDS: dict[str, type | types.UnionType] = {
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
"""Types of a record's values. None stands for what is not finite or not known."""
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
        value, kinds = record[key], _KINDS[key]
        is_bad_size = key in _SIZES and isinstance(value, int) and value < 1
        if not isinstance(value, kinds) or isinstance(value, bool) or is_bad_size:
            raise ValueError(f"{key} = {value!r}")
    for key in ("perplexity", "loss_nats"):
        record[key] = math.nan if record[key] is None else record[key]
    return record
