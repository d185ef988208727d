"""Report how perplexity at each length develops over a run's checkpoints.

Each evaluation job leaves one directory, RUN/evaluations/step-########/, with the files that
`pretrain evaluate --out` writes, or with a failed.json once the launcher has given up on that
checkpoint. Every report is made anew from all of them, so the jobs may finish in any order.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError
from pretrain.evaluate import plots, report
from pretrain.evaluate.comparison import describe_by_length, describe_by_step, what_stands_out
from pretrain.evaluate.curves import (
    BITS_PER_BYTE,
    Curve,
    by_text,
    has_bits,
    make_curves,
    make_step_curves,
)
from pretrain.evaluate.reading import read_records
from pretrain.evaluate.report import show
from pretrain.evaluate.tables import records_to_csv, records_to_json, step_table
from pretrain.rundir.checkpoints import checkpoint_step, named_by_step
from pretrain.rundir.files import replace_file
from pretrain.rundir.paths import check_version

CURVES_SHOWN = 5
"""Largest number of checkpoints in the plot by length: the first, the last and some between."""


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
    return "\n\n".join(
        step_table(_named_by_step(part.records)).plain() for part in _parts(evaluated.records)
    )


@dataclass(frozen=True)
class _Part:
    """Records of one tokenizer and one validation set, whose perplexities are comparable."""

    records: list[Mapping[str, Any]]
    tokenizer: str
    validation: str


def _parts(records: Sequence[Mapping[str, Any]]) -> list[_Part]:
    """Return the records by validation set and tokenizer, in the order of the records."""
    found: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault((record["tokenizer"], record["validation"]), []).append(record)
    return [_Part(part, *key) for key, part in found.items()]


def _write(directory: Path, evaluated: Evaluated) -> None:
    """Write the files of the report. The JSON comes last: where it exists, the rest does."""
    parts = _parts(evaluated.records)
    sections, pictures = ["# Perplexity by training step"], {}
    sections.append(report.protocols_explained(evaluated.records))
    if len(parts) > 1:
        sections.append(
            "The checkpoints were evaluated on several validation sets or with several tokenizers. "
            "Perplexities of different ones are not comparable, so each has its own section."
        )
    for part in parts:
        section = _section(part, len(parts) > 1)
        sections.append(section.markdown)
        pictures.update(section.pictures)
    if evaluated.missing:
        reasons = "\n".join(f"- {name}: {why}" for name, why in evaluated.missing.items())
        sections += ["## Not evaluated", reasons]
    sections += ["## How to read it", report.INTERVALS_EXPLAINED]
    was_there = (directory / "curve.json").exists()
    for stem in ("steps", "curve"):
        mine = {name: kinds for name, kinds in pictures.items() if name.startswith(stem)}
        report.write_pictures(directory, stem, mine, was_there)
    replace_file(directory / "curve.csv", records_to_csv(evaluated.records))
    replace_file(directory / "report.md", ("\n\n".join(sections) + "\n").encode())
    replace_file(directory / "curve.json", records_to_json(evaluated.records))


def _section(part: _Part, is_one_of_several: bool) -> report.Section:
    """Return the section of report.md about one tokenizer and validation set."""
    subject, end = "", ""
    if is_one_of_several:
        subject = f"validation set {part.validation}"
        subject += f", tokenizer {part.tokenizer}"
        end = report.label(part.validation) + report.label(part.tokenizer)
    by_length, by_step = _named_by_step(part.records), make_step_curves(part.records)
    steps = sorted({record["step"] for record in part.records})
    chosen = set(_evenly_spaced(steps))
    shown = [_in_words(curve) for curve in by_length if curve.sources[0].step in chosen]
    newest = [_in_words(curve) for curve in by_length if curve.sources[0].step == steps[-1]]
    pictures = {
        f"steps{end}": plots.plot_by_step(by_step, subject),
        f"curve{end}": plots.plot_by_length(shown, subject=subject),
    }
    markdown = [
        *([f"## {subject.capitalize()}"] if subject else []),
        show(f"steps{end}", "perplexity by training step"),
        step_table(by_length).markdown(),
        *([step_table(by_length, BITS_PER_BYTE).markdown()] if has_bits(by_length) else []),
        "\n".join(f"- {describe_by_step(curve, curve.name)}" for curve in by_step),
        "## By length",
        show(f"curve{end}", "perplexity by length"),
        "\n".join(f"- {describe_by_length(curve, curve.name)}" for curve in newest),
        f"## What stands out at step {steps[-1]}",
        what_stands_out(by_text(newest)),
    ]
    return report.Section("\n\n".join(markdown), pictures)


def _named_by_step(records: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return perplexity by length, one curve for each checkpoint, named by its step."""
    named = []
    for curve in make_curves(records):
        source = curve.sources[0]
        again = f", evaluation {source.evaluation}" if source.evaluation > 1 else ""
        named.append(dataclasses.replace(curve, name=f"{source.step}{again}"))
    return named


def _in_words(curve: Curve) -> Curve:
    """Return a curve that is named by its step under a name that says so."""
    return dataclasses.replace(curve, name=f"step {curve.name}")


def _evenly_spaced(steps: Sequence[int]) -> list[int]:
    """Return at most CURVES_SHOWN of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= CURVES_SHOWN:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(i * last / (CURVES_SHOWN - 1))] for i in range(CURVES_SHOWN)]
