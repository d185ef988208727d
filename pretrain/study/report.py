"""Write the report of a study: its curves beside the published ones, and a verdict per claim."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.config import writing
from pretrain.rundir.files import make_directory, replace_file
from pretrain.study import beside, claims, early, sections, summaries
from pretrain.study.claims import Judgement
from pretrain.study.figures import FORMATS, Figure, figures
from pretrain.study.pages import to_page
from pretrain.study.reading import read_study
from pretrain.study.summaries import Results

FIGURES = ("extrapolation", "ratio", "position", "efficiency", "growth")
"""Names of all figures that a report may have."""
TABLES = ("perplexity", "early_tokens")
"""Names of the tables that are written as CSV beside the numbers of the figures."""

RATIO = ("low", "value", "high")
"""Keys of a case's ratio in claims.json."""


def write_study_report(directory: Path, *, tensorboard: bool = True) -> Results:
    """Write STUDY/report/ from what the study has so far.

    Reads STUDY/study.json, STUDY/evaluation/ and, where they are there, STUDY/efficiency.json and
    the metrics.jsonl of the runs. What is missing or has failed is said in the report. Equal files
    give an equal report, byte for byte.

    Args:
        directory: STUDY, the study's directory.
        tensorboard: Write event files for TensorBoard, too.

    Returns:
        What TensorBoard and W&B show of it.

    Raises:
        ConfigError: `directory` holds no study.json, or a file in it cannot be read.
        RunFailed: The report cannot be written.
    """
    study = read_study(directory)
    judged = claims.judge(study.evidence)
    costs = beside.costs(study.evidence)
    gains = early.gains(study.curves, study.positions)
    drawn = figures(study, costs)
    assert set(drawn) <= set(FIGURES)
    rows = beside.perplexities(study.curves, study.published)
    text = sections.report(study, judged, rows, costs, gains, drawn)
    files = _files(drawn)
    files["claims.json"] = claims_json(judged)
    if rows:
        files["data/perplexity.csv"] = sections.perplexity_csv(rows)
    if gains:
        files["data/early_tokens.csv"] = sections.gains_csv(gains)
    pictures = {name: files[f"figures/{name}.png"] for name in drawn}
    results = summaries.results(study.curves, judged, pictures)
    for path, content in (summaries.event_files(results) if tensorboard else {}).items():
        files[f"tensorboard/{path}"] = content
    files["report.html"] = to_page(study.title, text, files).encode()
    # The text comes last: where it exists, the files that it shows do.
    files["report.md"] = text.encode()
    with writing(directory / "report"):
        _write(directory / "report", files)
    return results


def _files(drawn: Mapping[str, Figure]) -> dict[str, bytes]:
    """Return the files of the figures and their numbers, by their paths in the report."""
    files: dict[str, bytes] = {}
    for name, figure in drawn.items():
        pictures = figure.pictures()
        files |= {f"figures/{name}.{kind}": pictures[kind] for kind in FORMATS}
        files[f"data/{name}.csv"] = figure.csv()
    return files


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a report's files, and remove those that an earlier report of the study left.

    Files of other names, which a user may have put there, stay.
    """
    for path, content in files.items():
        make_directory((folder / path).parent)
        replace_file(folder / path, content)
    ours = {f"figures/{name}.{kind}" for name in FIGURES for kind in FORMATS}
    ours |= {f"data/{name}.csv" for name in (*FIGURES, *TABLES)}
    found = folder.glob(f"tensorboard/*/{summaries.NAME}")
    ours |= {path.relative_to(folder).as_posix() for path in found}
    for name in sorted(ours - set(files)):
        (folder / name).unlink(missing_ok=True)


def claims_json(judged: Sequence[Judgement]) -> bytes:
    """Return claims.json: every claim with its verdict and all of its cases.

    An end of a ratio that is not known or not finite is null.

    Args:
        judged: The verdicts.
    """
    rows = []
    for each in judged:
        claim = {
            field.name: getattr(each.claim, field.name)
            for field in dataclasses.fields(each.claim)
            if field.name != "judge"
        }
        cases = [
            {
                "train_length": case.train_length,
                "verdict": case.verdict.value,
                "ratio": case.ratio and dict(zip(RATIO, map(_or_none, case.ratio))),
                "tokens": case.tokens,
                "seeds": case.seeds,
                "words": case.words,
            }
            for case in each.cases
        ]
        rows.append(claim | {"verdict": each.verdict.value, "cases": cases})
    return (json.dumps(rows, indent=1, allow_nan=False) + "\n").encode()


def _or_none(value: float) -> Any:
    """Return None for what JSON cannot hold."""
    return value if math.isfinite(value) else None
