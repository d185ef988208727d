"""Send a study's results to Weights & Biases, as a run of their own beside those of training."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from pretrain.config.schema import LoggingSection
from pretrain.processes import Stopped
from pretrain.rundir.files import read_json, replace_json
from pretrain.study.summaries import Results
from pretrain.train.weights_and_biases import INSTALL, is_installed, settings

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
