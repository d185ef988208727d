"""Report how perplexity at each length develops over a run's checkpoints.

Each evaluation job leaves one directory, RUN/evaluations/step-########/, with the files that
`pretrain evaluate --out` writes, or with a failed.json once the launcher has given up on that
checkpoint. Every report is made anew from all of them, so the jobs may finish in any order.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError
from pretrain.evaluate import plots, report
from pretrain.evaluate.plots import Series
from pretrain.evaluate.records import FIELDS, completed
from pretrain.rundir.checkpoints import checkpoint_step, named_by_step
from pretrain.rundir.files import replace_file
from pretrain.rundir.paths import check_version

CURVES_SHOWN = 5
"""Largest number of checkpoints in the plot by length: the first, the last and some between."""


_NUMBER = (int, float, types.NoneType)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "protocol": str,
    "stride": int,
    "length": int,
    "perplexity": _NUMBER,
    "loss_nats": _NUMBER,
    "tokens": int,
    "checkpoint": str,
}
"""Types of a record's values; null stands for what is not finite."""


@dataclass(frozen=True)
class Evaluated:
    """The results of a run's evaluation jobs so far."""

    folders: tuple[str, ...]
    """Names of all the directories that were read, in the order of the steps."""
    train_length: int | None
    """Training length in tokens; None when no checkpoint has been evaluated."""
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
    train_length, records, missing = None, [], {}
    for folder in folders:
        try:
            if (failed := folder / "failed.json").is_file():
                missing[folder.name] = str(json.loads(failed.read_text())["reason"])
                continue
            curve = json.loads((folder / "curve.json").read_text())
            found = [
                {**completed(r), "step": checkpoint_step(folder.name)} for r in curve["records"]
            ]
            for record in found:
                _check_record(record)
            train_length = int(curve["train_length"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            missing[folder.name] = (
                f"{folder} cannot be read ({error}). Remove it to have the checkpoint evaluated "
                "again"
            )
            continue
        records += [
            {k: math.nan if v is None else v for k, v in record.items()} for record in found
        ]
    return Evaluated(tuple(p.name for p in folders), train_length, records, missing)


def _check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError unless every value of a record has its type."""
    for key, kinds in _KINDS.items():
        value = record[key]
        is_size = key in ("stride", "length")
        if not isinstance(value, kinds) or isinstance(value, bool) or (is_size and record[key] < 1):
            raise ValueError(f"{key} = {value!r}")


def report_run(run: Path) -> str:
    """Write curve.json, curve.csv, curve.png, steps.png and report.md in RUN/evaluations.

    Two processes may do this at the same time, as two evaluation jobs that end together. Each file
    is replaced atomically, and each process looks for new results after it has written and starts
    again if there are any. So the last one to write has included all results.

    Args:
        run: Run directory.

    Returns:
        The table of perplexities by training step and length, for the terminal. Folders that
        cannot be read are named on stderr and left out.

    Raises:
        ConfigError: No checkpoint has been evaluated, or the run's layout is of a later release.
    """
    check_version(run)
    directory = run / "evaluations"
    written = None
    while written != (evaluated := read_evaluations(directory)).folders:
        if evaluated.train_length is None:
            reasons = "".join(f"\n{name}: {reason}" for name, reason in evaluated.missing.items())
            raise ConfigError(
                f"{directory}: no checkpoint has been evaluated yet{reasons}\n"
                "Evaluation jobs write their results there; "
                "`launcher submit --evaluate-checkpoints` starts them"
            )
        _write(directory, evaluated.train_length, evaluated)
        written = evaluated.folders
    for name, reason in evaluated.missing.items():
        print(f"warning: {name}: {reason}", file=sys.stderr, flush=True)
    train_length = evaluated.train_length or 0
    table = report.perplexity_table(train_length, _by_length(evaluated.records), "step")
    title = f"Perplexity by training step and length in tokens (L = {train_length})"
    return "\n".join([title, *report.plain_table(*table)])


def _write(directory: Path, train_length: int, evaluated: Evaluated) -> None:
    """Write the five files of the report. The JSON comes last: where it exists, the rest does."""
    by_length, by_step = _by_length(evaluated.records), _by_step(evaluated.records, train_length)
    steps = sorted({record["step"] for record in evaluated.records})
    chosen = {str(step) for step in _evenly_spaced(steps)}
    shown = [s._replace(name=f"step {s.name}") for s in by_length if s.name in chosen]
    replace_file(directory / "steps.png", plots.plot_by_step(by_step))
    replace_file(directory / "curve.png", plots.plot_by_length(train_length, shown))
    rows = ([record[field] for field in FIELDS] for record in evaluated.records)
    replace_file(directory / "curve.csv", report.to_csv(FIELDS, rows))
    text = _markdown(train_length, by_length, by_step, evaluated.missing)
    replace_file(directory / "report.md", text.encode())
    curve = report.to_json(train_length, evaluated.records, FIELDS)
    replace_file(directory / "curve.json", curve)


def _markdown(
    train_length: int,
    by_length: Sequence[Series],
    by_step: Sequence[Series],
    missing: Mapping[str, str],
) -> str:
    """Return report.md.

    Args:
        train_length: Training length in tokens.
        by_length: One curve for each checkpoint and protocol, in the order of the steps.
        by_step: One curve for each length and protocol.
        missing: Checkpoint -> reason why it has no results.
    """
    newest = by_length[-1].name
    newest_curves = [s._replace(name=f"step {newest}") for s in by_length if s.name == newest]
    parts = [
        "# Perplexity by training step",
        f"Trained at L = {train_length} tokens. Each checkpoint is evaluated at the lengths below. "
        + report.PROTOCOLS_EXPLAINED,
        "![perplexity by training step](steps.png)",
        report.markdown_table(*report.perplexity_table(train_length, by_length, "step")),
        "\n".join(f"- {_describe_by_step(s)}" for s in by_step),
        "## By length",
        "![perplexity by length](curve.png)",
        "\n".join(f"- {report.describe_by_length(train_length, s)}" for s in newest_curves),
    ]
    if missing:
        reasons = "\n".join(f"- {name}: {reason}" for name, reason in missing.items())
        parts += ["## Not evaluated", reasons]
    return "\n\n".join(parts) + "\n"


def _describe_by_step(series: Series) -> str:
    """Return a sentence that compares the newest checkpoint at a length with the best one."""
    name = f"{series.name}, {series.protocol}"
    finite = {step: p for step, p in series.perplexities.items() if math.isfinite(p)}
    if not finite:
        return f"{name}: no finite perplexity."
    best, newest = min(finite, key=finite.__getitem__), max(series.perplexities)
    best_perplexity = report.format_perplexity(finite[best])
    sentence = f"{name}: best perplexity {best_perplexity} at step {best}"
    if newest == best:
        return f"{sentence}, the newest evaluated."
    if newest not in finite:
        return f"{sentence}; not finite at step {newest}, the newest evaluated."
    ratio = finite[newest] / finite[best]
    return f"{sentence}; {ratio:.3f} times that at step {newest}, the newest evaluated."


def _by_length(records: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Return perplexity by length, one curve for each checkpoint (named by step) and protocol."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for r in records:
        curve = curves.setdefault((str(r["step"]), report.protocol_name(r)), {})
        curve[r["length"]] = r["perplexity"]
    return [Series(*key, dict(sorted(points.items()))) for key, points in curves.items()]


def _by_step(records: Iterable[Mapping[str, Any]], train_length: int) -> list[Series]:
    """Return perplexity by training step, one curve for each length (ascending) and protocol."""
    curves: dict[tuple[int, str], dict[int, float]] = {}
    for r in records:
        curves.setdefault((r["length"], report.protocol_name(r)), {})[r["step"]] = r["perplexity"]
    return [
        Series(plots.length_label(length, train_length), protocol, dict(sorted(points.items())))
        for (length, protocol), points in sorted(curves.items())
    ]


def _evenly_spaced(steps: Sequence[int]) -> list[int]:
    """Return at most CURVES_SHOWN of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= CURVES_SHOWN:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(i * last / (CURVES_SHOWN - 1))] for i in range(CURVES_SHOWN)]
