"""A run's evaluated checkpoints, put together: perplexity at each length over training steps.

Evaluation jobs leave one folder a checkpoint, RUN/evaluations/step-########/, as `pretrain evaluate --out` writes it (or
failed.json, where the launcher gave up). All of them are read every time, so the order of the jobs does not matter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError
from pretrain.evaluate import plots, report
from pretrain.evaluate.plots import Series

FIELDS = ("step", *report.FIELDS)
STEP = re.compile(r"step-(\d+)")
CURVES_SHOWN = 5
"""Checkpoints in the picture by length: the first, the last, and some between."""


@dataclass(frozen=True)
class Evaluated:
    """What a run's evaluations say: records have the keys of FIELDS, in the order of the steps."""

    folders: tuple[str, ...]
    train_length: int | None
    records: list[dict[str, Any]]
    missing: dict[str, str]
    """Checkpoints that could not be evaluated, with the reason."""


def read_evaluations(directory: Path) -> Evaluated:
    """Reads every step-######## in RUN/evaluations. A perplexity or loss that was not finite is nan."""
    folders = sorted((p for p in directory.glob("step-*") if STEP.fullmatch(p.name)), key=_step)
    train_length, records, missing = None, [], {}
    for folder in folders:
        try:
            if (failed := folder / "failed.json").is_file():
                missing[folder.name] = str(json.loads(failed.read_text())["reason"])
                continue
            curve = json.loads((folder / "curve.json").read_text())
            found = [
                {"step": _step(folder), **{key: r[key] for key in report.FIELDS}}
                for r in curve["records"]
            ]
            train_length = int(curve["train_length"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            missing[folder.name] = (
                f"{folder} cannot be read ({error}); remove it to have the checkpoint evaluated again"
            )
            continue
        records += [
            {k: math.nan if v is None else v for k, v in record.items()} for record in found
        ]
    return Evaluated(tuple(p.name for p in folders), train_length, records, missing)


def report_run(run: Path) -> str:
    """Writes RUN/evaluations/curve.json, curve.csv, curve.png, steps.png and report.md anew; returns the table.

    Safe beside another that does the same: whoever writes last looks again at what there is to write. Raises ConfigError
    when no checkpoint has been evaluated.
    """
    directory = run / "evaluations"
    written = None
    while written != (evaluated := read_evaluations(directory)).folders:
        if evaluated.train_length is None:
            reasons = "".join(f"\n{name}: {reason}" for name, reason in evaluated.missing.items())
            raise ConfigError(
                f"{directory}: no checkpoint has been evaluated yet{reasons}\nEvaluation jobs leave their "
                "results there; see `launcher submit --evaluate-checkpoints`"
            )
        _write(directory, evaluated.train_length, evaluated)
        written = evaluated.folders
    lines = report.plain_table(
        *report.table(evaluated.train_length or 0, _by_length(evaluated.records), "step")
    )
    return "\n".join(
        [f"Perplexity by training step and length in tokens (L = {evaluated.train_length})", *lines]
    )


def _write(directory: Path, train_length: int, evaluated: Evaluated) -> None:
    by_length, by_step = _by_length(evaluated.records), _by_step(evaluated.records, train_length)
    chosen = {
        str(step) for step in _spread(sorted({record["step"] for record in evaluated.records}))
    }
    shown = [s._replace(name=f"step {s.name}") for s in by_length if s.name in chosen]
    report.publish(directory / "steps.png", plots.by_step(by_step))
    report.publish(directory / "curve.png", plots.curve(train_length, shown))
    report.publish(
        directory / "curve.csv",
        report.to_csv(FIELDS, ([r[field] for field in FIELDS] for r in evaluated.records)),
    )
    text = _markdown(train_length, by_length, by_step, evaluated.missing)
    report.publish(directory / "report.md", text.encode())
    report.publish(
        directory / "curve.json", report.to_json(train_length, evaluated.records, FIELDS)
    )


def _markdown(
    train_length: int,
    by_length: Sequence[Series],
    by_step: Sequence[Series],
    missing: Mapping[str, str],
) -> str:
    newest = by_length[-1].name
    parts = [
        "# Perplexity by training step",
        f"Trained at L = {train_length} tokens, every checkpoint evaluated at the lengths below. Nonoverlapping: pieces "
        "of that length, each from scratch. Sliding: windows of that length, of which the last predictions (the stride) "
        "count. Every token is scored once.",
        "![perplexity by training step](steps.png)",
        report.markdown_table(*report.table(train_length, by_length, "step")),
        "\n".join(f"- {_finding(s)}" for s in by_step),
        "## By length",
        "![perplexity by length](curve.png)",
        "\n".join(
            f"- {report.finding(train_length, s._replace(name=f'step {newest}'))}"
            for s in by_length
            if s.name == newest
        ),
    ]
    if missing:
        parts += [
            "## Not evaluated",
            "\n".join(f"- {name}: {reason}" for name, reason in missing.items()),
        ]
    return "\n\n".join(parts) + "\n"


def _finding(series: Series) -> str:
    """Where a length is best over training, and how the newest checkpoint compares, in a sentence."""
    name = f"{series.name}, {series.protocol}"
    finite = {step: p for step, p in series.perplexities.items() if math.isfinite(p)}
    if not finite:
        return f"{name}: no finite perplexity."
    best, newest = min(finite, key=finite.__getitem__), max(series.perplexities)
    sentence = f"{name}: best {report.number(finite[best])} at step {best}"
    if newest == best:
        return f"{sentence}, the newest."
    if newest not in finite:
        return f"{sentence}; not finite at step {newest}, the newest."
    return (
        f"{sentence}; {finite[newest] / finite[best]:.3f} times that at step {newest}, the newest."
    )


def _by_length(records: Iterable[Mapping[str, Any]]) -> list[Series]:
    """One for each checkpoint and protocol, named by its step."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for r in records:
        curves.setdefault((str(r["step"]), report.protocol_name(r)), {})[r["length"]] = r[
            "perplexity"
        ]
    return [Series(*key, dict(sorted(points.items()))) for key, points in curves.items()]


def _by_step(records: Iterable[Mapping[str, Any]], train_length: int) -> list[Series]:
    """One for each length and protocol, in ascending lengths, over training steps."""
    curves: dict[tuple[int, str], dict[int, float]] = {}
    for r in records:
        curves.setdefault((r["length"], report.protocol_name(r)), {})[r["step"]] = r["perplexity"]
    return [
        Series(
            f"{plots.in_tokens_and_lengths(length, train_length)}",
            protocol,
            dict(sorted(points.items())),
        )
        for (length, protocol), points in sorted(curves.items())
    ]


def _spread(steps: Sequence[int]) -> list[int]:
    """At most CURVES_SHOWN of them, evenly, with the first and the last."""
    if len(steps) <= CURVES_SHOWN:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(i * last / (CURVES_SHOWN - 1))] for i in range(CURVES_SHOWN)]


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
