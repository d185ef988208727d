"""Put a study's results into the forms that TensorBoard and Weights & Biases show."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# TensorBoard's modules have no types.
from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard.summary import text

from pretrain.config.schema import LoggingSection
from pretrain.evaluation.curves import Curve, Table
from pretrain.evaluation.judge import Judgement
from pretrain.evaluation.records import finite_or_none
from pretrain.processes import Stopped
from pretrain.rundir.files import read_json, replace_json
from pretrain.training.metrics import INSTALL, is_installed, settings

NAME = "events.out.tfevents.0.study"
"""Name of an event file. TensorBoard takes every file with "tfevents" in its name."""
REPORT = "report"
"""The run of TensorBoard's that has the figures and the tables."""


class Point(NamedTuple):
    """A finite value of a curve."""

    run: str
    """METHOD-L, or what else tells the curve from others."""
    tag: str
    """perplexity/PROTOCOL."""
    length: int
    value: float


@dataclass(frozen=True)
class Results:
    """Curves, tables and figures of a report, for W&B and TensorBoard alike."""

    points: Sequence[Point]
    tables: Mapping[str, tuple[list[str], list[list[Any]]]]
    """Name -> header and rows."""
    figures: Mapping[str, bytes]
    """Name -> PNG."""

    def digest(self) -> str:
        """Return the SHA-256 of all of it."""
        pictures = {k: hashlib.sha256(v).hexdigest() for k, v in self.figures.items()}
        content = json.dumps([self.points, self.tables, pictures])
        return hashlib.sha256(content.encode()).hexdigest()


def results(
    curves: Sequence[Curve], judged: Sequence[Judgement], figures: Mapping[str, bytes]
) -> Results:
    """Return what is shown of a report.

    Args:
        curves: The study's curves.
        judged: The verdicts.
        figures: Name -> PNG.
    """
    points, rows = [], []
    for curve in curves:
        name = re.sub(r"[^\w.-]", "-", f"{curve.name}-{curve.train_length}")
        for length, records in curve.records.items():
            value = curve.value(length)
            if math.isfinite(value.value):
                points.append(Point(name, f"perplexity/{curve.kind}", length, value.value))
            words = [curve.method, curve.train_length, len(curve.sources), curve.protocol, length]
            tokens = min(record["tokens"] or 0 for record in records) or None
            rows.append([*words, *map(finite_or_none, value), tokens])
    header = ["method", "train_length", "seeds", "protocol", "length"]
    header += ["perplexity", "low", "high", "tokens"]
    claims = [[each.claim.id, each.verdict.value, each.claim.statement] for each in judged]
    tables = {
        "perplexity": (header, rows),
        "claims": (["claim", "verdict", "statement"], claims),
    }
    return Results(points, tables, figures)


def event_files(results: Results) -> dict[str, bytes]:
    """Return TensorBoard's event files, by their paths below its log directory.

    Each curve is a run of TensorBoard's with the tag perplexity/PROTOCOL and the window length as
    the step; those of one model under both protocols share a run. REPORT has the figures and the
    tables. Equal
    results give equal files, which have no times in them.
    """
    events: dict[str, list[Event]] = {}
    for run, tag, length, value in results.points:
        found = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        events.setdefault(run, []).append(Event(step=length, summary=found))
    for name, png in results.figures.items():
        # The first chunk of a PNG is IHDR: length, type, width and height.
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        found = Summary(value=[Summary.Value(tag=f"figures/{name}", image=image)])
        events.setdefault(REPORT, []).append(Event(summary=found))
    for name, (header, rows) in results.tables.items():
        cells = [["-" if cell is None else _shown(cell) for cell in row] for row in rows]
        table = Table(name, header, cells, len(header)).markdown()
        # It is protobuf's Summary, as above; torch does not say so.
        words = text(f"tables/{name}", table)  # type: ignore[no-untyped-call]
        events.setdefault(REPORT, []).append(Event(summary=words))
    return {f"{run}/{NAME}": _file(found) for run, found in events.items()}


def _shown(cell: Any) -> str:
    return f"{cell:.4f}" if isinstance(cell, float) else str(cell)


def _file(events: Sequence[Event]) -> bytes:
    """Return an event file."""
    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in (Event(file_version="brain.Event:2"), *events):
        writer.write(event.SerializeToString())
    return content.getvalue()


# ---- weights and biases ----
# Send a study's results to Weights & Biases, as a run of their own beside those of training.


SENT = "wandb.json"
"""The id under which W&B continues the study's run, and the digest of what was sent last."""

LENGTH = "length"
"""The axis of the curves."""


def offer(study: Path, results: Results, asked: Sequence[LoggingSection]) -> str:
    """Send a report to W&B if one of the runs logs there. What fails harms nothing.

    Args:
        study: The study's directory, whose report is written.
        results: What is shown.
        asked: [logging] of each run.

    Returns:
        Why it was not sent, in words; empty where it was, or where nobody asks for it.

    Raises:
        Stopped: The user asked the study to end.
    """
    wanted = [logging for logging in asked if logging.wandb != "disabled"]
    if not wanted:
        return ""
    if not is_installed():
        return (
            "wandb: not installed, so the report is not sent to W&B. Install it with "
            f'{INSTALL}, or set logging.wandb = "disabled"'
        )
    try:
        send(study, results, wanted[0])
    except Stopped:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"wandb: {reason}; the report was not sent, and is in {study / 'report'}"
    return ""


def send(study: Path, results: Results, logging: LoggingSection) -> bool:
    """Write curves, tables and figures of a report to W&B, unless it has them already.

    Args:
        study: The study's directory, whose report is written. W&B keeps its files in STUDY/wandb.
        results: What is shown.
        logging: Says whether W&B writes for a later `wandb sync` or sends at once, and the project.

    Returns:
        True if something was sent.
    """
    before, digest = read_json(study / SENT), results.digest()
    if before.get("sent") == digest:
        return False
    # Importing wandb takes about a second.
    import wandb

    identifier = before.get("id") or uuid.uuid4().hex[:12]
    run = wandb.init(
        project=logging.wandb_project,
        name=study.resolve().name,
        dir=str(study),
        id=identifier,
        job_type="study",
        mode=logging.wandb,
        resume="allow" if logging.wandb == "online" else None,
        settings=settings(),
    )
    try:
        run.define_metric(LENGTH)
        run.define_metric("perplexity/*", step_metric=LENGTH)
        for length in sorted({point.length for point in results.points}):
            at = [point for point in results.points if point.length == length]
            run.log({LENGTH: length, **{f"{p.tag}/{p.run}": p.value for p in at}})
        shown = {
            f"tables/{name}": wandb.Table(columns=[*header], data=rows)
            for name, (header, rows) in results.tables.items()
        }
        figures = study / "report" / "figures"
        pictures = {
            f"figures/{name}": wandb.Image(str(figures / f"{name}.png")) for name in results.figures
        }
        run.log({**shown, **pictures})
    finally:
        # wandb loses what it has buffered unless it is closed.
        run.finish()
    replace_json(study / SENT, {"id": identifier, "sent": digest})
    return True
