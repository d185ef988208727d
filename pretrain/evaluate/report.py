"""Write evaluation results as tables and plots.

A report is curve.json, curve.csv, report.md and the figures as PNG, SVG and PDF; where losses by
position were measured, positions.csv and their figures too. A table or a figure never holds
perplexities of two tokenizers or two validation sets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pretrain.config import ConfigError
from pretrain.config.evaluation import MASKED
from pretrain.evaluate import plots
from pretrain.evaluate.blocks import (
    BLOCK_FIELDS,
    KEY,
    BlockKey,
    BlockLosses,
    block_key,
    block_rows,
    blocks_path,
)
from pretrain.evaluate.comparison import describe_by_length, what_stands_out
from pretrain.evaluate.curves import (
    BITS_PER_BYTE,
    Curve,
    Text,
    by_text,
    has_bits,
    make_curves,
    train_lengths,
)
from pretrain.evaluate.drawing import FORMATS, Pictures
from pretrain.evaluate.positions import (
    POSITION_FIELDS,
    Positions,
    position_curves,
    position_rows,
)
from pretrain.evaluate.records import FIELDS, Record, fields_of
from pretrain.evaluate.tables import (
    format_tables,
    full_name,
    length_table,
    records_to_csv,
    records_to_json,
    relative_table,
    source_table,
    to_csv,
)
from pretrain.rundir.files import replace_file

__all__ = ["FIELDS", "check_report_path", "format_table", "write_report"]

PROTOCOLS_EXPLAINED = (
    "At each length, *nonoverlapping* evaluation cuts the text into consecutive windows and scores "
    "each without the text before it. *Sliding* evaluation moves a window through the text by the "
    "stride, and scores only the last tokens of each window, as many as the stride. Both score "
    "every token exactly once."
)
"""The protocols in report.md."""
MASKED_EXPLAINED = (
    "These models predict masked tokens (`train.objective`): each window is read as a whole, 15 % "
    "of its tokens are hidden, the same at every length, and the perplexity is that of these "
    "tokens, predicted from both sides. It does not compare with a perplexity of next tokens."
)
"""The same of models that predict masked tokens."""
INTERVALS_EXPLAINED = (
    "The number after +- is the longer half of the 95 % confidence interval, by Student's t over "
    "blocks of the text: it says how far the value would move on other text of the same documents, "
    "and nothing about another seed of the training. Text of a few long documents says less about "
    "other documents than that. Values of several seeds, of runs that agree in "
    "all other settings of training, are the geometric mean of their perplexities (the mean of "
    "their bits per byte) and, in brackets, the least and the "
    'largest; the value of each seed is in the CSV. A value that is not known is "-".'
)
"""What stands beside a value in report.md."""


class Section(NamedTuple):
    """A part of report.md, with the figures that it shows."""

    markdown: str
    pictures: dict[str, Pictures]
    """File name without its ending -> the figure's formats."""


def write_report(
    out: Path,
    records: Sequence[Record],
    positions: Positions | None = None,
    blocks: Mapping[BlockKey, BlockLosses] | None = None,
) -> None:
    """Write a report to `out` (FILE.json) and, beside it, FILE.csv, figures and report.md.

    Each file appears whole. Perplexities and losses that are not finite are null in the JSON.

    Args:
        out: Path of the JSON file; its directory is created.
        records: Evaluations in the order in which they should be listed. They may be of several
            runs, training lengths, seeds, tokenizers and validation sets.
        positions: (checkpoint as in its record, window length) -> losses at each position of the
            window, without overlap. Adds positions.csv and its figure.
        blocks: (checkpoint, protocol, stride, length) -> losses by block of the text, by which
            values are compared. Adds FILE_blocks.csv. Records that were read from a report hold
            theirs.

    Raises:
        ConfigError: `out` does not end in .json, or there are no records.
    """
    check_report_path(out)
    if not records:
        raise ConfigError(
            f"--out {out}: nothing was evaluated. Name at least one run and at least one length"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    records = [
        {**fields_of(record), KEY: record.get(KEY) or (blocks or {}).get(block_key(record))}
        for record in records
    ]
    texts = by_text(make_curves(records))
    if positions:
        rows = position_rows(records, positions)
        replace_file(out.with_name("positions.csv"), to_csv(POSITION_FIELDS, rows))
    sections = sections_by_length(texts, out.stem, positions or {})
    pictures = {name: kinds for section in sections for name, kinds in section.pictures.items()}
    write_pictures(out.parent, out.stem, pictures, was_there=out.exists())
    if rows_of_blocks := list(block_rows(records)):
        replace_file(blocks_path(out), to_csv(BLOCK_FIELDS, rows_of_blocks))
    elif out.exists():
        # An earlier report's: they are not those of these records.
        blocks_path(out).unlink(missing_ok=True)
    replace_file(out.with_suffix(".csv"), records_to_csv(records))
    report = "\n\n".join(
        [
            "# Perplexity by length",
            protocols_explained(records),
            "## What stands out",
            what_stands_out(texts),
            *(section.markdown for section in sections),
            "## How to read it",
            INTERVALS_EXPLAINED,
            source_table([curve for text in texts for curve in text.curves]).markdown(),
        ]
    )
    replace_file(out.with_name("report.md"), (report + "\n").encode())
    # The JSON comes last: where it exists, the report is complete.
    replace_file(out, records_to_json(records))


def protocols_explained(records: Sequence[Record]) -> str:
    """Return what report.md says about how these evaluations score a text."""
    is_masked = any(record["protocol"] == MASKED for record in records)
    return MASKED_EXPLAINED if is_masked else PROTOCOLS_EXPLAINED


def check_report_path(out: Path) -> None:
    """Raise ConfigError unless `out` is the name of a .json file."""
    if out.suffix != ".json":
        raise ConfigError(
            f"--out {out}: the file name must end in .json. The report's other files are written "
            "beside it"
        )


def format_table(records: Sequence[Record]) -> str:
    """Return perplexities and bits per byte as plain text.

    Args:
        records: Evaluations, with the keys of FIELDS.

    Returns:
        Tables under titles, with a row for each curve and a column for each length. There is one
        table of perplexities for each tokenizer and validation set.
    """
    return format_tables(by_text(make_curves([fields_of(record) for record in records])))


def write_pictures(
    directory: Path, stem: str, pictures: dict[str, Pictures], was_there: bool
) -> None:
    """Write figures, and remove those that an earlier report of the same name left.

    Args:
        directory: The report's directory.
        stem: What the names of the report's figures begin with.
        pictures: File name without its ending -> the figure's formats.
        was_there: An earlier report of this name is there.
    """
    for name, kinds in pictures.items():
        for kind, content in kinds.items():
            replace_file(directory / f"{name}.{kind}", content)
    if not was_there:
        return
    # Only names that a report gives: another file of the user's stays.
    views = r"(_[0-9a-f]{12})*(_relative|_bits_per_byte)?"
    ours = re.compile(rf"{re.escape(stem)}{views}\.({'|'.join(FORMATS)})")
    for path in directory.iterdir():
        if ours.fullmatch(path.name) and path.stem not in pictures:
            path.unlink(missing_ok=True)


# ---- report.md -----------------------------------------------------------------------------------
def sections_by_length(texts: Sequence[Text], stem: str, positions: Positions) -> list[Section]:
    """Return the sections of report.md with tables and figures, one or more for each text.

    Args:
        texts: The curves.
        stem: What the names of the figures begin with.
        positions: Losses by position.
    """
    sections = []
    if len(texts) > 1:
        sections.append(
            Section(
                f"These are evaluations of {len(texts)} different validation sets. A perplexity on "
                "one text says nothing beside a perplexity on another, so each has its own tables "
                "and figures below.",
                {},
            )
        )
    for text in texts:
        several = len(texts) > 1
        end = label(text.validation) if several else ""
        subject = f"validation set {text.validation}" if several else ""
        if subject:
            sections.append(Section(f"## {subject.capitalize()}", {}))
        if len(text.by_tokenizer) > 1:
            sections.append(_across_tokenizers(text, stem + end, subject))
        for tokenizer, curves in text.by_tokenizer.items():
            name, about, heading = end, subject, ""
            if len(text.by_tokenizer) > 1:
                word = f"tokenizer {tokenizer}"
                heading = f"### {word.capitalize()}"
                name, about = name + label(tokenizer), ", ".join(filter(None, [about, word]))
            sections.append(_of_one_tokenizer(curves, heading, stem + name, about))
            by_position = position_curves(curves, positions)
            if by_position:
                pictures = plots.plot_by_position(by_position, about)
                sections.append(_by_position(pictures, f"positions{name}"))
    return sections


def _of_one_tokenizer(curves: Sequence[Curve], heading: str, name: str, subject: str) -> Section:
    """Return the section with the perplexities of one tokenizer and text.

    Args:
        curves: Curves by window length.
        heading: The section's heading, or nothing.
        name: File name of the figure, without its ending.
        subject: What the figure is about, if the report has several.
    """
    pictures = {name: plots.plot_by_length(curves, subject=subject)}
    parts = [heading, show(name, "perplexity by length")]
    several = len(train_lengths(curves)) > 1
    if several:
        relative = f"{name}_relative"
        pictures[relative] = plots.plot_by_length(curves, relative=True, subject=subject)
        parts += [
            length_table(curves).markdown(),
            show(relative, "perplexity by length in training lengths"),
            relative_table(curves).markdown(),
        ]
    else:
        parts.append(length_table(curves).markdown())
    if has_bits(curves):
        parts.append(length_table(curves, BITS_PER_BYTE).markdown())
    names = [full_name(curve) if several else curve.name for curve in curves]
    parts.append("\n".join(f"- {describe_by_length(c, n)}" for c, n in zip(curves, names)))
    return Section("\n\n".join(filter(None, parts)), pictures)


def _across_tokenizers(text: Text, name: str, subject: str) -> Section:
    """Return the section that compares curves of several tokenizers, by bits per byte alone."""
    parts = [
        f"{len(text.by_tokenizer)} tokenizers have cut this text into different tokens. "
        "Perplexities are per token, so those of different tokenizers are not comparable, and each "
        "tokenizer has its own tables below. Bits per byte of the text are comparable."
    ]
    bytes_scored = {count for curve in text.curves for count in curve.bytes()}
    if len(bytes_scored) > 1:
        parts.append("Different amounts of the text were scored: see the bytes in the table.")
    if not has_bits(text.curves):
        parts.append("They are not recorded here, so nothing can be compared.")
        return Section("\n\n".join(parts), {})
    name += "_bits_per_byte"
    parts += [
        show(name, "bits per byte by length"),
        length_table(text.curves, BITS_PER_BYTE).markdown(),
    ]
    picture = plots.plot_by_length(text.curves, BITS_PER_BYTE, subject=subject)
    return Section("\n\n".join(parts), {name: picture})


def _by_position(pictures: Pictures, name: str) -> Section:
    """Return the section about losses by position."""
    parts = [
        "## Loss by position",
        "Mean loss at each position of the longest nonoverlapping window of each curve, over "
        "ranges of positions that widen with the position. The strip below says how many tokens "
        "each range stands on; positions.csv has the numbers of all runs and lengths. Tokens at "
        "early positions are predicted from little context.",
        show(name, "loss by position"),
    ]
    return Section("\n\n".join(parts), {name: pictures})


def show(name: str, caption: str) -> str:
    """Return Markdown that shows a figure and links its other formats."""
    others = ", ".join(f"[{kind.upper()}]({name}.{kind})" for kind in FORMATS if kind != "png")
    return f"![{caption}]({name}.png)\n\n{others}"


def label(digits: str) -> str:
    """Return the end of a file's name for a tokenizer or a validation set."""
    return "_" + re.sub(r"\W", "", digits)
