"""Write evaluation results as tables and plots.

A report is curve.json, curve.csv, report.md and the figures as PNG, SVG and PDF; where losses by
position were measured, positions.csv and their figures too. A table or a figure never holds
perplexities of two tokenizers or two validation sets.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError
from pretrain.config.run import MASKED
from pretrain.evaluation.curves import (
    POSITION_FIELDS,
    Positions,
    format_tables,
    full_name,
    make_curves,
    parts_of,
    position_curves,
    position_rows,
    source_table,
    tables_of,
    train_lengths,
)
from pretrain.evaluation.figures import (
    FORMATS,
    Frame,
    Line,
    Pictures,
    draw,
    lines_by_length,
    lines_by_position,
    lines_by_step,
)
from pretrain.evaluation.judge import describe, what_stands_out
from pretrain.evaluation.records import (
    BLOCK_FIELDS,
    KEY,
    BlockKey,
    BlockLosses,
    Record,
    block_key,
    block_rows,
    blocks_path,
    check_objectives,
    curve_json,
    fields_of,
    read_records,
    records_to_csv,
    to_csv,
)
from pretrain.rundir.checkpoints import checkpoint_step, named_by_step
from pretrain.rundir.files import make_directory, replace_file
from pretrain.rundir.paths import check_version

# ---- Refuse to write a report over files that are no earlier report of ours ----


def check_overwrites(out: Path) -> None:
    """Check that what `pretrain evaluate --out` would write over is an earlier report.

    Args:
        out: FILE.json of the report.

    Raises:
        ConfigError: A file is something else. Nothing has been written.
    """
    positions, keys = out.with_name("positions.csv"), {"protocol", "length", "loss_nats"}
    pictures = [path.with_suffix(f".{kind}") for path in (out, positions) for kind in FORMATS]
    report = out.with_name("report.md")
    # report.md and positions.csv have one name in a folder, and no other file holds what they say.
    for other in sorted(out.parent.glob("*.json")):
        if other.name != out.name and report.exists() and _is_report(other, keys):
            raise ConfigError(
                f"--out {out}: {out.parent} holds the report {other.name}, whose report.md and "
                "positions.csv would be overwritten. Choose a folder of its own"
            )
    check_ours(out, keys, [report, positions, blocks_path(out), *pictures])


def check_ours(out: Path, keys: set[str], others: Iterable[Path]) -> None:
    """Check that all files of a report that are there are of an earlier report.

    It is known by its JSON, or where that was not written any more, by the CSV of its records,
    which is written first.

    Args:
        out: FILE.json of the report.
        keys: Keys that every record has.
        others: The report's files beside FILE.json and FILE.csv.

    Raises:
        ConfigError: A file is something else.
    """
    check_report_path(out)
    table = out.with_suffix(".csv")
    is_ours = _is_report(out, keys) if out.exists() else _has_columns(table, keys)
    for path in (out, table, *others):
        # Every table of a report has the length; another CSV of the same name is a user's.
        foreign = path.suffix == ".csv" and not _has_columns(path, {"length"})
        if path.exists() and (foreign or not is_ours):
            raise ConfigError(
                f"--out {out}: {path} would be overwritten, and it is no report that --out wrote. "
                "Move it elsewhere, or choose another --out"
            )


def _is_report(path: Path, keys: set[str]) -> bool:
    """Return True for a JSON file of records with these keys."""
    try:
        records = json.loads(path.read_bytes())["records"]
        return all(record.keys() >= keys for record in records)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _has_columns(path: Path, columns: set[str]) -> bool:
    """Return True for a CSV file with these columns; False for one that cannot be read."""
    try:
        with path.open("rb") as file:
            header = file.readline(4096).decode(errors="replace")
    except OSError:
        return False
    return columns <= set(header.strip().split(","))


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


PARTS_EXPLAINED = (
    "These evaluations are of several validation sets, or by several tokenizers, which cut a text "
    "into different tokens. Their perplexities are not comparable, so each has its own section. "
    "Bits per byte of one text are comparable; look at the bytes that were scored."
)


class Page:
    """A report in Markdown, and the figures that it shows."""

    def __init__(self, *parts: str) -> None:
        self.parts = list(parts)
        self.pictures: dict[str, Pictures] = {}
        """File name without its ending -> the figure's formats."""

    def add(self, *parts: str) -> None:
        """Add what is not empty, each as a paragraph of its own."""
        self.parts += filter(None, parts)

    def show(self, name: str, caption: str, lines: Sequence[Line], frame: Frame) -> None:
        """Draw a figure, and add it with links to its other formats."""
        self.pictures[name] = draw(lines, frame)
        others = ", ".join(f"[{kind.upper()}]({name}.{kind})" for kind in FORMATS if kind != "png")
        self.add(f"![{caption}]({name}.png)", others)

    def content(self) -> bytes:
        """Return the report's file."""
        return ("\n\n".join(self.parts) + "\n").encode()


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
    page = Page("# Perplexity by length", protocols_explained(records))
    _add_by_length(page, records, out.stem, positions or {})
    page.add("## How to read it", INTERVALS_EXPLAINED)
    page.add(source_table(make_curves(records)).markdown())
    rows_of_blocks = list(block_rows(records))
    files = {blocks_path(out): to_csv(BLOCK_FIELDS, rows_of_blocks)} if rows_of_blocks else {}
    if positions:
        rows = position_rows(records, positions)
        files[out.with_name("positions.csv")] = to_csv(POSITION_FIELDS, rows)
    if not rows_of_blocks and out.exists():
        # An earlier report's: they are not those of these records.
        blocks_path(out).unlink(missing_ok=True)
    _save(out, (out.stem,), page, records, files)


def _save(
    out: Path,
    figures: Sequence[str],
    page: Page,
    records: Sequence[Record],
    others: Mapping[Path, bytes] | None = None,
) -> None:
    """Write a report's files, and remove figures that an earlier report of its name has left.

    Args:
        out: FILE.json.
        figures: What the names of this kind of report's figures begin with.
        page: The text and the figures.
        records: The evaluations.
        others: What else belongs to the report.
    """
    was_there = out.exists()
    replace_file(out.with_suffix(".csv"), records_to_csv(records))
    for path, content in (others or {}).items():
        replace_file(path, content)
    for name, kinds in page.pictures.items():
        for kind, content in kinds.items():
            replace_file(out.with_name(f"{name}.{kind}"), content)
    # Only names that a report gives: another file of the user's stays.
    stems, kinds_of_files = "|".join(map(re.escape, figures)), "|".join(FORMATS)
    ours = re.compile(rf"({stems})(_[0-9a-f]{{12}})*\.({kinds_of_files})")
    for path in out.parent.iterdir() if was_there else ():
        if ours.fullmatch(path.name) and path.stem not in page.pictures:
            path.unlink(missing_ok=True)
    replace_file(out.with_name("report.md"), page.content())
    # The JSON comes last: where it exists, the report is complete.
    replace_file(out, curve_json(records))


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
    return format_tables(parts_of(make_curves([fields_of(record) for record in records])))


def _add_by_length(page: Page, records: Sequence[Record], stem: str, positions: Positions) -> None:
    """Add what stands out, and the figures and tables of each part.

    Args:
        page: The report.
        records: The evaluations.
        stem: What the names of the figures begin with.
        positions: Losses by position.
    """
    parts = parts_of(make_curves(records))
    page.add("## What stands out", what_stands_out(parts))
    if len(parts) > 1:
        page.add(PARTS_EXPLAINED)
    for part in parts:
        curves, subject = part.curves, part.subject
        page.add(f"## {subject.capitalize()}" if subject else "")
        drawn = lines_by_length(curves, subject)
        page.show(f"{stem}{part.end}", "perplexity by length", *drawn)
        page.add(*(table.markdown() for table in tables_of(part)))
        several = len(train_lengths(curves)) > 1
        names = [full_name(curve) if several else curve.name for curve in curves]
        page.add("\n".join(f"- {describe(c, name)}" for c, name in zip(curves, names)))
        if found := position_curves(curves, positions):
            page.add(
                "## Loss by position",
                "Mean loss at each position of the longest nonoverlapping window of each "
                "curve, over ranges of positions that widen with the position; positions.csv has "
                "the numbers of all runs and lengths, and the tokens of each range. Tokens at "
                "early positions are predicted from little context.",
            )
            drawn = lines_by_position(found, subject)
            page.show(f"positions{part.end}", "loss by position", *drawn)


# ---- Report how perplexity at each length develops over a run's checkpoints ----
# Each evaluation job leaves one directory, RUN/evaluations/step-########/, with the files that
# `pretrain evaluate --out` writes, or with a failed.json once the launcher has given up on that
# checkpoint. Every report is made anew from all of them, so the jobs may finish in any order.


@dataclass(frozen=True)
class Evaluated:
    """The results of a run's evaluation jobs so far."""

    folders: tuple[str, ...]
    """Names of all the directories that were read, in the order of the steps."""
    records: list[dict[str, Any]]
    """Records with the keys of FIELDS, in the order of the steps."""
    missing: dict[str, str]
    """Checkpoint -> reason why it has no results."""


def read_evaluations(directory: Path) -> Evaluated:
    """Read every step-######## directory in RUN/evaluations.

    A directory that cannot be read is reported as missing and does not stop the others.

    Args:
        directory: RUN/evaluations.

    Returns:
        All results. Perplexities and losses that are null in the files (not finite) are nan.
    """
    folders = named_by_step(directory)
    records: list[dict[str, Any]] = []
    missing = {}
    for folder in folders:
        try:
            if (failed := folder / "failed.json").is_file():
                missing[folder.name] = str(json.loads(failed.read_text())["reason"])
                continue
            found = read_records(folder / "curve.json")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            missing[folder.name] = (
                f"{folder} cannot be read ({error}). Remove it to have the checkpoint evaluated "
                "again"
            )
            continue
        # The folder's name is the step, whatever a copy of the checkpoint was called.
        step = checkpoint_step(folder.name)
        records += [{**record, "step": step} for record in found]
    return Evaluated(tuple(p.name for p in folders), records, missing)


def report_run(run: Path) -> str:
    """Write curve.json, curve.csv, report.md and the figures of curve and steps in RUN/evaluations.

    Two processes may do this at the same time, as two evaluation jobs that end together. Each file
    is replaced atomically, and each process looks for new results after it has written and starts
    again if there are any. So the last one to write has included all results.

    Args:
        run: Run directory.

    Returns:
        The table of perplexities by training step and length, for the terminal. Folders that
        cannot be read are named on stderr and left out.

    Raises:
        ConfigError: No checkpoint has been evaluated, or the run has another layout.
    """
    check_version(run)
    directory = run / "evaluations"
    written = None
    while written != (evaluated := read_evaluations(directory)).folders:
        if not evaluated.records:
            reasons = "".join(f"\n{name}: {reason}" for name, reason in evaluated.missing.items())
            raise ConfigError(
                f"{directory}: no checkpoint has been evaluated yet{reasons}\n"
                "Evaluation jobs write their results there; "
                "`launcher submit --evaluate-checkpoints` starts them"
            )
        _write(directory, evaluated)
        written = evaluated.folders
    for name, reason in evaluated.missing.items():
        print(f"warning: {name}: {reason}", file=sys.stderr, flush=True)
    return format_table(evaluated.records)


def _write(directory: Path, evaluated: Evaluated) -> None:
    """Write the files of the report."""
    records = evaluated.records
    page = Page("# Perplexity by training step", protocols_explained(records))
    for part in parts_of(make_curves(records)):
        page.add(f"## {part.subject.capitalize()}" if part.subject else "")
        drawn = lines_by_step(part.curves, part.subject)
        page.show(f"steps{part.end}", "perplexity by training step", *drawn)
        page.add(*(table.markdown() for table in tables_of(part)))
    if evaluated.missing:
        reasons = "\n".join(f"- {name}: {why}" for name, why in evaluated.missing.items())
        page.add("## Not evaluated", reasons)
    newest = records[-1]["step"]
    page.add(f"# Step {newest} by length")
    _add_by_length(page, [r for r in records if r["step"] == newest], "curve", {})
    page.add("## How to read it", INTERVALS_EXPLAINED)
    _save(directory / "curve.json", ("curve", "steps"), page, records)


# ---- combine ----
# Make one report of several: of runs that were evaluated, and of reports that were written.


def combine(sources: Sequence[Path], out: Path | None) -> str:
    """Write one report of the results of several sources; return its tables for the terminal.

    Losses by position stay in the sources' own reports.

    Args:
        sources: Runs, of which the newest evaluated checkpoint is taken, or curve.json files.
        out: FILE.json of the report, whose other files are written beside it; None for no report.

    Raises:
        ConfigError: A source has no results, some predict masked tokens and some next ones, or the
            report cannot be written to `out`.
    """
    found = [(source, record) for source in sources for record in _records(source)]
    check_objectives((str(source), record["protocol"]) for source, record in found)
    records = [record for _, record in found]
    if out is not None:
        check_overwrites(out)
        make_directory(out.parent)
        write_report(out, records)
    return format_table(records)


def _records(source: Path) -> list[dict[str, Any]]:
    """Return the records of a run's newest evaluated checkpoint, or of a curve.json."""
    if source.is_dir():
        check_version(source)
        evaluated = read_evaluations(source / "evaluations")
        for name, reason in evaluated.missing.items():
            print(f"warning: {source}: {name}: {reason}", file=sys.stderr, flush=True)
        if not evaluated.records:
            raise ConfigError(
                f"{source}: none of its checkpoints has been evaluated. Name a curve.json that "
                "`pretrain evaluate --out` wrote, or evaluate the run first"
            )
        newest = evaluated.records[-1]["step"]
        print(f"{source}: step {newest}, the newest evaluated")
        found = [record for record in evaluated.records if record["step"] == newest]
        return [{**record, "run": record["run"] or str(source)} for record in found]
    try:
        records = read_records(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source}: neither a run's directory nor a curve.json that `pretrain evaluate --out` "
            f"wrote ({error})"
        ) from None
    if not records:
        raise ConfigError(f"{source}: holds no results. Leave it out")
    return records
