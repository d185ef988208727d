"""Write evaluation results as tables and plots.

A report is FILE.json, which holds all numbers, report.md and the figures as PNG and SVG. A table or
a figure never mixes perplexities of different tokenizers or validation sets.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError
from pretrain.config.run import MASKED, STREAM
from pretrain.evaluation.claims import judge
from pretrain.evaluation.figures import (
    BARS,
    FORMATS,
    TOKENS_OF_A_VALUE,
    Frame,
    Line,
    draw,
    lines_by_length,
    lines_by_position,
    lines_by_step,
)
from pretrain.evaluation.judge import Evidence, Verdict, gap
from pretrain.evaluation.records import (
    COSTS,
    LONGPPL,
    TITLES,
    Curve,
    Part,
    Record,
    cell,
    fields_of,
    grouped,
    length_in_words,
    lengths_of,
    make_curves,
    parts_of,
    position_curves,
    quantities,
    read_records,
    records_json,
    source_table,
    tables_of,
)
from pretrain.rundir.checkpoints import checkpoint_step, named_by_step
from pretrain.rundir.files import make_directory, replace_file
from pretrain.rundir.metrics import is_change, read_metrics
from pretrain.rundir.paths import RunPaths, check_version

TEXT = "report.md"
PROTOCOLS_EXPLAINED = (
    "At each length, *nonoverlapping* evaluation cuts the text into consecutive windows and scores "
    "each without the text before it. *Sliding* evaluation moves a window through the text by the "
    "stride, and scores only the last tokens of each window, as many as the stride. Both score "
    "every token exactly once."
)
"""Explanation of the protocols in report.md."""
STREAM_EXPLAINED = (
    " A *stream* is one pass over the whole text, whose length it has: each token is scored with "
    "all tokens before it as context."
)
"""Addition for a text that was read in one pass."""
MASKED_EXPLAINED = (
    "These models predict masked tokens (`train.objective`): each window is read as a whole, 15 % "
    "of its tokens are hidden, the same at every length, and the perplexity is that of these "
    "tokens, predicted from both sides. It does not compare with a perplexity of next tokens."
)
"""Explanation for models that predict masked tokens."""
INTERVALS_EXPLAINED = (
    "The number after +- is the longer half of the 95 % confidence interval, by Student's t over "
    "blocks of the text: it says how far the value would move on other text of the same documents, "
    "and nothing about another seed of the training. Text of a few long documents says less about "
    "other documents than that. Values of several seeds, of runs that agree in "
    "all other settings of training, are the geometric mean of their perplexities (the mean of "
    "their bits per byte) and, in brackets, the least and the "
    'largest; the value of each seed is in the JSON. A value that is not known is "-".'
)
"""Explanation of the numbers beside a value in report.md."""
POSITIONS_EXPLAINED = (
    "Mean loss at each position of the longest nonoverlapping window of each curve, over ranges of "
    f"positions that widen with the position and have {TOKENS_OF_A_VALUE} scored tokens or more; "
    "the JSON has narrower ranges, the tokens of each, and all runs and lengths. Tokens at early "
    "positions are predicted from little context."
)
LONGPPL_EXPLAINED = (
    "LongPPL (arXiv 2410.23771) is the perplexity of key tokens: those that the model which was "
    "evaluated first loses more than 2 nats less, and fewer than 2 nats, in windows of this length "
    "than with a short context; the JSON has its tokens (`short_context`). A model that finds its "
    "own key tokens has a LongPPL below e^2 = 7.39 for that reason alone: compare models by the "
    "key tokens of one."
)
PARTS_EXPLAINED = (
    "These evaluations are of several validation sets, or by several tokenizers, which cut a text "
    "into different tokens. Their perplexities are not comparable, so each has its own section. "
    "Bits per byte of one text are comparable; look at the bytes that were scored."
)


class Page:
    """A report in Markdown, and the figures that it shows."""

    def __init__(self, *parts: str, style: str = "paper") -> None:
        self.parts, self.style = list(parts), style
        self.files: dict[str, bytes] = {}
        """Path, as written in the text -> content, for each figure in each format."""

    def add(self, *parts: str) -> None:
        """Add each part that is not empty as a paragraph."""
        self.parts += filter(None, parts)

    def show(self, name: str, caption: str, lines: Sequence[Line], frame: Frame) -> None:
        """Draw a figure, and add it with its caption.

        Args:
            name: Path of the figure without its file extension.
            caption: Text below the figure.
            lines: The lines to draw.
            frame: Title, labels and axes.
        """
        drawn = draw(lines, frame, self.style)
        self.files |= {f"{name}.{kind}": content for kind, content in drawn.items()}
        self.add(f"![{caption}]({name}.png)", f"{caption} [SVG]({name}.svg)")

    def text(self) -> str:
        """Return the report's text."""
        return "\n\n".join(self.parts) + "\n"


def plain(text: str) -> str:
    """Return text, escaped so that Markdown shows it unchanged on one line."""
    return "".join(
        f"\\{each}" if each in r"\`*_[]<>#&" else each for each in " ".join(text.split())
    )


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


def check_out(out: Path, keys: Collection[str], beside: Iterable[str]) -> None:
    """Check that a report would overwrite nothing but an earlier report.

    An earlier report is recognized by its JSON, which is written first.

    Args:
        out: FILE.json.
        keys: Keys that every record has.
        beside: The names of the report's other files.

    Raises:
        ConfigError: `out` does not end in .json, or a file is not part of a report.
    """
    if out.suffix != ".json":
        raise ConfigError(
            f"--out {out}: the file name must end in .json. The report's other files are written "
            "beside it"
        )
    try:
        if all(record.keys() >= set(keys) for record in json.loads(out.read_bytes())["records"]):
            return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    for path in (out, *map(out.with_name, beside)):
        if path.exists():
            raise ConfigError(
                f"--out {out}: {path} would be overwritten, and belongs to no report of that name. "
                "Move it elsewhere, or choose another folder for --out"
            )


def check_overwrites(out: Path) -> None:
    """Check what `pretrain evaluate --out` would overwrite. Raises ConfigError."""
    # How many figures there will be depends on what is measured.
    figures = (path.name for path in out.parent.glob("*") if path.suffix[1:] in FORMATS)
    names = (name for name in figures if name.startswith((f"{out.stem}.", f"{out.stem}_")))
    check_out(out, {"protocol", "length", "loss_nats"}, [TEXT, *names])


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files below a folder, each atomically."""
    for name, content in files.items():
        make_directory((folder / name).parent)
        replace_file(folder / name, content)


def write_report(out: Path, records: Sequence[Record], style: str = "paper") -> None:
    """Write a report to `out` (FILE.json) and, beside it, figures and report.md.

    Args:
        out: Path of the JSON file; its directory is created.
        records: Evaluations in the order of the listing, which may be of several runs, training
            lengths, seeds, tokenizers and validation sets.
        style: Style of the figures, one of `figures.STYLES`.

    Raises:
        ConfigError: There are no records.
    """
    if not records:
        raise ConfigError(
            f"--out {out}: nothing was evaluated. Name at least one run and at least one length"
        )
    page = Page("# Perplexity by length", style=style)
    _add_by_length(page, records, out.stem)
    page.add("## How to read it", protocols_explained(records), INTERVALS_EXPLAINED)
    page.add(LONGPPL_EXPLAINED if any(record.get(LONGPPL) for record in records) else "")
    page.add(source_table(make_curves(records)).markdown())
    save(out, records, page)


def save(out: Path, records: Sequence[Record], page: Page, text: str = TEXT) -> None:
    """Write a report's files: the numbers first, and last the text that refers to all others.

    Args:
        out: The file of the numbers.
        records: The numbers.
        page: The text, and its figures.
        text: The name of the text's file, beside `out`.
    """
    files = {out.name: records_json(records), **page.files, text: page.text().encode()}
    write_files(out.parent, files)


def protocols_explained(records: Sequence[Record]) -> str:
    """Return report.md's explanation of how these evaluations score a text."""
    is_masked = any(record["protocol"] == MASKED for record in records)
    is_stream = any(record["protocol"] == STREAM for record in records)
    return MASKED_EXPLAINED if is_masked else PROTOCOLS_EXPLAINED + STREAM_EXPLAINED * is_stream


def format_table(records: Sequence[Record]) -> str:
    """Return perplexities and bits per byte as plain text.

    There is one table of perplexities for each tokenizer and validation set, with a row for each
    curve and a column for each length.
    """
    blocks = []
    for part in parts_of(make_curves(records)):
        blocks += [f"{part.subject.capitalize()}:"] if part.subject else []
        blocks += [table.plain() for table in tables_of(part)]
    return "\n\n".join(blocks)


def _add_by_length(page: Page, records: Sequence[Record], stem: str) -> None:
    """Add what stands out, and the figures and tables of each part.

    Args:
        page: The report.
        records: The evaluations.
        stem: Prefix of the names of the figures.
    """
    parts = parts_of(make_curves(records))
    page.add("## What stands out", what_stands_out(parts))
    if len(parts) > 1:
        page.add(PARTS_EXPLAINED)
    for part in parts:
        curves = part.curves
        page.add(f"## {part.subject.capitalize()}" if part.subject else "")
        caption = f"Perplexity by length. {BARS}"
        page.show(f"{stem}{part.end}", caption, *lines_by_length(curves))
        page.add(*(table.markdown() for table in tables_of(part)))
        for cost in filter(COSTS.__contains__, quantities(curves)):
            name = f"{stem}_{cost}{part.end}"
            page.show(name, f"{TITLES[cost]}, by length.", *lines_by_length(curves, cost))
        if found := position_curves(curves):
            page.add("## Loss by position", POSITIONS_EXPLAINED)
            name = f"{stem}_positions{part.end}"
            page.show(name, "Loss by position.", *lines_by_position(found))


# ---- Say what stands out ----
EXPLAINED = (
    "Two values of one text are compared block by block: the range behind a ratio is its 95 % "
    "interval. With several seeds, their noise is added to the text's, as a sum of squares: "
    "Student's t, in pairs for seeds that both have, if two or more. Where losses by block are not "
    "known, the two 95 % intervals take the text's place. A range that holds 1 shows no "
    "difference. Between a mean of seeds and one run, the noise of seeds counts. Between two "
    "evaluations of one model there is none, and between two single runs it is not known."
)
CLAIMS_EXPLAINED = (
    "The claims are those of `pretrain study`, most of them of the paper (Press, Smith and Lewis, "
    "2022). Its report says where each comes from, and what it is compared with."
)


def what_stands_out(parts: Sequence[Part]) -> str:
    """Return the rankings of the methods and the verdicts on claims, in Markdown.

    In each part of a report, the curves of each training length are ranked separately.
    """
    blocks = [words for part in parts for words in (*_rankings(part), *_claims(part))]
    curves = [curve for part in parts for curve in part.curves]
    # The claims are about models that predict the next token.
    is_masked = any(curve.kind == MASKED for curve in curves)
    return "\n\n".join([*blocks, EXPLAINED if is_masked else f"{EXPLAINED} {CLAIMS_EXPLAINED}"])


def _claims(part: Part) -> Iterator[str]:
    """Yield the verdicts of these curves on the claims: which fail, and which pass."""
    judged = judge(Evidence(part.curves))
    passed = [each.claim.id for each in judged if each.verdict == Verdict.PASSES]
    failed = [each for each in judged if each.verdict == Verdict.FAILS]
    noise = [each.claim.id for each in judged if each.verdict == Verdict.NOISE]
    lines = [
        f"**Fails, {each.claim.id}**: {each.claim.statement} Here {case.words}."
        for each in failed
        for case in each.deciding
    ]
    if passed and not failed:
        lines.append("No claim fails.")
    lines += [f"Pass: {', '.join(passed)}."] if passed else []
    lines += [f"Inside the noise: {', '.join(noise)}."] if noise else []
    if lines:
        yield _listed(["The claims", part.subject], lines)


def _rankings(part: Part) -> Iterator[str]:
    """Yield rankings at L and at the longest length for each training length and protocol."""
    groups = grouped(part.curves, lambda curve: (curve.train_length, curve.protocol))
    for (trained, protocol), group in groups.items():
        if len(group) > 1:
            lengths = dict.fromkeys([trained, lengths_of(group)[-1]])
            lines = [_ranking(group, length) for length in lengths]
            yield _listed([f"Trained at L = {trained}", protocol, part.subject], lines)


def _listed(opening: Iterable[str], lines: Iterable[str]) -> str:
    return f"{', '.join(filter(None, opening))}:\n\n" + "\n".join(f"- {line}" for line in lines)


def _ranking(curves: Sequence[Curve], length: int) -> str:
    """Return a ranking at one length, which also names all curves that were not measured."""
    present = [curve for curve in curves if length in curve.records]
    values = {curve: curve.value(length).value for curve in present}
    ranked = sorted((c for c in present if math.isfinite(values[c])), key=values.__getitem__)
    words = []
    for place, curve in enumerate(ranked, 1):
        word = f"{place}. {curve.name} {cell(curve, length)}"
        if place > 1:
            found = gap(ranked[place - 2], length, curve, length).is_shown
            said = {True: "", None: " (the noise is not known)"}
            word += said.get(found, f" (no difference from {place - 1}. is shown)")
        words.append(word)
    words += [f"not finite: {c.name}" for c in present if c not in ranked]
    words += [f"not evaluated: {c.name}" for c in curves if c not in present]
    return f"At {length_in_words(length, curves[0].train_length)}: " + "; ".join(words) + "."


# ---- Report how perplexity at each length develops over a run's checkpoints ----
# Each evaluation job writes one directory, RUN/evaluations/step-########/, with the files of
# `pretrain evaluate --out`, or with a failed.json if the launcher has given up on that checkpoint.
# Every report is made from all of these directories, so the jobs may finish in any order.


@dataclass(frozen=True)
class Evaluated:
    """The results of a run's evaluation jobs so far."""

    folders: tuple[str, ...]
    """Names of all directories that were read, in the order of steps."""
    records: list[dict[str, Any]]
    """All records, in the order of steps."""
    missing: dict[str, str]
    """Checkpoint -> reason why it has no results."""


def read_evaluations(directory: Path) -> Evaluated:
    """Read every step-######## directory in RUN/evaluations.

    A directory that cannot be read is reported as missing and does not stop the others.
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
        except (OSError, ValueError, TypeError, KeyError) as error:
            missing[folder.name] = (
                f"{folder} cannot be read ({error}). Remove it to have the checkpoint evaluated "
                "again"
            )
            continue
        # The folder's name gives the step, even if a copy of the checkpoint has another name.
        step = checkpoint_step(folder.name)
        records += [{**record, "step": step} for record in found]
    return Evaluated(tuple(p.name for p in folders), records, missing)


def report_run(run: Path) -> str:
    """Write curve.json, report.md and the figures of curve and steps in RUN/evaluations.

    Two processes may do this at the same time, for example when two evaluation jobs end together.
    Each file is replaced atomically. After writing, each process looks for new results and starts
    again if there are any, so the last process to write has included all results.

    Args:
        run: Run directory.

    Returns:
        The table of perplexities by training step and length, for the terminal. Folders that
        cannot be read are named on stderr and left out.

    Raises:
        ConfigError: No checkpoint has been evaluated, or the run has another layout.
    """
    if not run.exists():
        raise ConfigError(f"{run}: no such file or directory. Give runs, or files of --out")
    check_version(run)
    directory = run / "evaluations"
    written = None
    while written != (evaluated := read_evaluations(directory)).folders:
        if not evaluated.records:
            reasons = "".join(f"\n{name}: {reason}" for name, reason in evaluated.missing.items())
            raise ConfigError(
                f"{directory}: no checkpoint has been evaluated yet{reasons}\n"
                "Evaluation jobs write their results there; "
                "`launcher submit --evaluate-checkpoints` starts them. Without Slurm, evaluate the "
                "run with `pretrain evaluate RUN --out FILE.json` and report that file"
            )
        _write(directory, evaluated)
        written = evaluated.folders
    _warn(run, evaluated)
    return format_table(evaluated.records)


def _warn(run: Path, evaluated: Evaluated) -> None:
    """List on stderr the checkpoints without results."""
    for name, reason in evaluated.missing.items():
        print(f"warning: {run}: {name}: {reason}", file=sys.stderr, flush=True)


def _write(directory: Path, evaluated: Evaluated) -> None:
    """Write the files of the report."""
    records = evaluated.records
    changes = filter(is_change, read_metrics(RunPaths(directory.parent).metrics))
    borders = sorted({float(record["step"]) for record in changes} - {0.0})
    page = Page("# Perplexity by training step")
    for part in parts_of(make_curves(records)):
        page.add(f"## {part.subject.capitalize()}" if part.subject else "")
        drawn = lines_by_step(part.curves, borders)
        page.show(f"steps{part.end}", "Perplexity by training step.", *drawn)
        page.add(*(table.markdown() for table in tables_of(part)))
    if evaluated.missing:
        reasons = "\n".join(f"- {name}: {why}" for name, why in evaluated.missing.items())
        page.add("## Not evaluated", reasons)
    newest = records[-1]["step"]
    page.add(f"# Step {newest} by length")
    _add_by_length(page, [r for r in records if r["step"] == newest], "curve")
    page.add("## How to read it", protocols_explained(records), INTERVALS_EXPLAINED)
    # Losses by block and by position are only in the folders of the steps.
    save(directory / "curve.json", [fields_of(record) for record in records], page)


# ---- Combine evaluated runs and earlier reports into one report ----


def combine(sources: Sequence[Path], out: Path | None, style: str = "paper") -> str:
    """Write one report of the results of several sources; return its tables for the terminal.

    Args:
        sources: Runs, whose newest evaluated checkpoint is taken, or curve.json files.
        out: FILE.json of the report, whose other files are written beside it; None for no report.
        style: Style of the figures, one of `figures.STYLES`.

    Raises:
        ConfigError: A source has no results, masked models are mixed with others, or the report
            cannot be written to `out`.
    """
    found = [(source, record) for source in sources for record in records_of(source)]
    check_objectives((str(source), record["protocol"]) for source, record in found)
    records = [record for _, record in found]
    if out is not None:
        check_overwrites(out)
        write_report(out, records, style)
    return format_table(records)


def records_of(source: Path) -> list[dict[str, Any]]:
    """Return the records of a run's newest evaluated checkpoint, or of a curve.json.

    Raises:
        ConfigError: The source is neither, or none of the run's checkpoints has been evaluated.
    """
    if source.is_dir():
        check_version(source)
        evaluated = read_evaluations(source / "evaluations")
        _warn(source, evaluated)
        if not evaluated.records:
            raise ConfigError(
                f"{source}: none of its checkpoints has been evaluated. Name a curve.json that "
                "`pretrain evaluate --out` wrote, or evaluate the run first"
            )
        newest = evaluated.records[-1]["step"]
        print(f"{source}: step {newest}, the newest evaluated")
        return [record for record in evaluated.records if record["step"] == newest]
    return read_records(source)
