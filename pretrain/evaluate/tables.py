"""Make tables of curves, for the terminal and for Markdown, and the files of records."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pretrain.evaluate.curves import (
    BITS_PER_BYTE,
    PERPLEXITY,
    Curve,
    Text,
    has_bits,
    is_known,
    length_label,
    lengths_of,
    precisions,
    relative_length,
    train_lengths,
)
from pretrain.evaluate.records import FIELDS, Record

TITLES = {PERPLEXITY: "Perplexity", BITS_PER_BYTE: "Bits per byte"}


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
        widths = [max(len(row[i]) for row in [self.header, *self.rows]) for i in self._columns()]
        lines = [self.title]
        for row in [self.header, *self.rows]:
            words = [c.ljust(w) for c, w in zip(row[: self.names], widths)]
            numbers = [c.rjust(w) for c, w in zip(row[self.names :], widths[self.names :])]
            lines.append("  ".join([*words, *numbers]).rstrip())
        lines.insert(2, "  ".join("-" * width for width in widths))
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the table in Markdown, under its title, with numbers aligned to the right."""
        alignment = ["---" if i < self.names else "---:" for i in self._columns()]
        rows = [[_escaped(cell) for cell in row] for row in [self.header, *self.rows]]
        rows.insert(1, alignment)
        return f"{self.title}:\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def _columns(self) -> range:
        return range(len(self.header))


def length_table(
    curves: Sequence[Curve], quantity: str = PERPLEXITY, with_steps: bool = True
) -> Table:
    """Return a table with a row for each curve and a column for each window length in tokens.

    Args:
        curves: Curves by window length. Perplexities must be of one tokenizer.
        quantity: PERPLEXITY or BITS_PER_BYTE.
        with_steps: Add a column of the steps where curves are of several.
    """
    trained = train_lengths(curves)
    only = trained[0] if len(trained) == 1 else None
    word = "lengths" if len(trained) > 1 else "length"
    known = ", ".join(map(str, trained))
    title = f"{TITLES[quantity]} by length in tokens (training {word} L = {known})"
    lengths = lengths_of(curves)
    labels = [length_label(n, only) for n in lengths]
    rows = [[cell(curve, n, quantity) for n in lengths] for curve in curves]
    return _table(title, curves, labels, rows, quantity, with_steps)


def relative_table(curves: Sequence[Curve], quantity: str = PERPLEXITY) -> Table:
    """Return a table with a column for each multiple of the curves' own training lengths.

    Args:
        curves: Curves by window length.
        quantity: PERPLEXITY or BITS_PER_BYTE.
    """
    by_multiple = [{n / curve.train_length: n for n in curve.records} for curve in curves]
    multiples = sorted({multiple for found in by_multiple for multiple in found})
    rows = [
        [cell(curve, found[m], quantity) if m in found else "-" for m in multiples]
        for curve, found in zip(curves, by_multiple)
    ]
    title = f"{TITLES[quantity]} by length in multiples of the training length L"
    return _table(title, curves, [relative_length(m) for m in multiples], rows, quantity)


def step_table(curves: Sequence[Curve], quantity: str = PERPLEXITY) -> Table:
    """Return a table of one run's curves: a row for each step, named by it, and protocol.

    Args:
        curves: Curves by window length, named by their steps.
        quantity: PERPLEXITY or BITS_PER_BYTE.
    """
    table = length_table(curves, quantity, with_steps=False)
    (trained, *_) = train_lengths(curves)
    title = f"{TITLES[quantity]} by training step and length in tokens (L = {trained})"
    return table._replace(title=title, header=["step", *table.header[1:]])


def source_table(curves: Iterable[Curve]) -> Table:
    """Return a table that says of each curve's name which run, step, seed and text it is of."""
    rows: dict[str, list[str]] = {}
    for curve in curves:
        for source in curve.sources:
            words = [full_name(curve), source.run, str(source.step), str(source.seed)]
            words += [str(source.train_length), source.tokenizer, source.validation]
            words.append(source.precision)
            rows.setdefault("\0".join(words), words)
    header = ["curve", "run", "step", "seed", "L", "tokenizer", "validation set", "precision"]
    return Table("What was evaluated", header, list(rows.values()), names=len(header))


def _table(
    title: str,
    curves: Sequence[Curve],
    labels: list[str],
    rows: list[list[str]],
    quantity: str,
    with_steps: bool = True,
) -> Table:
    """Return a table with these cells, behind the curves' names, protocols and tokens scored."""
    heads = ["method", "protocol"]
    words = [[curve.name, curve.protocol] for curve in curves]
    if len(train_lengths(curves)) > 1:
        heads.insert(1, "L")
        for row, curve in zip(words, curves):
            row.insert(1, str(curve.train_length))
    # Checkpoints of different steps are no fair comparison of methods, so the table shows steps.
    if with_steps and len(steps_of(curves)) > 1:
        heads.insert(-1, "step")
        for row, curve in zip(words, curves):
            row.insert(-1, str(curve.sources[0].step))
    # Nor is a model in bf16 beside one in fp32, which rounds less.
    if len(precisions(curves)) > 1:
        heads.insert(-1, "precision")
        for row, curve in zip(words, curves):
            row.insert(-1, curve.sources[0].precision)
    count = "tokens" if quantity == PERPLEXITY else "bytes"
    counts = [tokens_in_words([c]) if quantity == PERPLEXITY else _range(c.bytes()) for c in curves]
    table_rows = [[*w, n, *row] for w, n, row in zip(words, counts, rows)]
    return Table(title, [*heads, f"{count} scored", *labels], table_rows, names=len(heads))


def format_tables(texts: Sequence[Text]) -> str:
    """Return all values for the terminal: tables of perplexities and of bits per byte."""
    blocks = []
    for text in texts:
        if len(texts) > 1:
            blocks.append(f"Validation set {text.validation}:")
        for tokenizer, curves in text.by_tokenizer.items():
            table = length_table(curves)
            if len(text.by_tokenizer) > 1:
                table = table._replace(title=f"{table.title}, tokenizer {tokenizer}")
            blocks.append(table.plain())
        if has_bits(text.curves):
            blocks.append(length_table(text.curves, BITS_PER_BYTE).plain())
    return "\n\n".join(blocks)


# ---- cells ---------------------------------------------------------------------------------------
def cell(curve: Curve, x: int, quantity: str = PERPLEXITY) -> str:
    """Return a curve's value: "20.00 +-0.40", or of seeds "20.00 (19.80 to 20.30)".

    The number after +- is the longer half of the 95 % interval; without one it is left out. A
    length at which there is no value is "-".
    """
    if x not in curve.records or not is_known(curve, x, quantity):
        return "-"
    value, low, high = curve.value(x, quantity)
    shown = format_value(value, quantity)
    if math.isnan(low) or not math.isfinite(value):
        return shown
    if curve.is_mean:
        return f"{shown} ({format_value(low, quantity)} to {format_value(high, quantity)})"
    return f"{shown} +-{format_value(max(value - low, high - value), quantity)}"


def format_value(value: float, quantity: str = PERPLEXITY) -> str:
    """Return a perplexity with two decimals, or bits per byte with four.

    From 100,000 on it is in scientific notation.
    """
    if value < 1e5 or not math.isfinite(value):
        return f"{value:.2f}" if quantity == PERPLEXITY else f"{value:.4f}"
    return f"{value:.3e}"


def full_name(curve: Curve) -> str:
    """Return a curve's name with its training length."""
    return f"{curve.name}, L = {curve.train_length}"


def length_in_words(length: int, train_length: int | None) -> str:
    """Return a length as in "256 tokens (2 L)"."""
    relative = f" ({relative_length(length / train_length)})" if train_length else ""
    return f"{length} tokens{relative}"


def tokens_in_words(curves: Iterable[Curve]) -> str:
    """Return how many tokens were scored: "50,000", or "1,000 to 50,000" where it differs."""
    return _range(sorted({count for curve in curves for count in curve.tokens()}))


def steps_of(curves: Iterable[Curve]) -> list[int]:
    """Return the different training steps of curves by window length, ascending."""
    return sorted({curve.sources[0].step for curve in curves})


def _range(counts: Sequence[int]) -> str:
    return " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))) if counts else "-"


def _escaped(cell: str) -> str:
    """Return a cell that cannot end early, whatever path it holds."""
    return cell.replace("|", "\\|")


# ---- files ---------------------------------------------------------------------------------------
def to_csv(fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return a CSV file with these columns, with \\n at the end of lines."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    return text.getvalue().encode()


def records_to_csv(records: Iterable[Record]) -> bytes:
    """Return curve.csv; what is not known is empty, what is not finite is "nan" or "inf"."""
    return to_csv(FIELDS, ([record[field] for field in FIELDS] for record in records))


def records_to_json(records: Sequence[Record]) -> bytes:
    """Return curve.json: {"train_length": L, or null for several, "records": [...]}."""
    trained = {record["train_length"] for record in records}
    # JSON has neither nan nor infinity (RFC 8259, section 6), and strict readers refuse them.
    rows = [{field: _finite_or_none(record[field]) for field in FIELDS} for record in records]
    curve = {"train_length": trained.pop() if len(trained) == 1 else None, "records": rows}
    return (json.dumps(curve, indent=1, allow_nan=False) + "\n").encode()


def _finite_or_none(value: Any) -> Any:
    """Return None for a float that is not finite, and any other value as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
