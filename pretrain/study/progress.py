"""Tell how the runs of a study stand, from their directories, and record it in study.json."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.files import make_directory, read_json, read_text, replace_file
from pretrain.rundir.starts import is_done
from pretrain.rundir.states import ENDED_WELL, Outcome, in_words
from pretrain.study.runs import Study, StudyRun, not_asked, other_differences

FINISHED, FAILED, WAITING = "finished", "failed", "waiting"
"""The states of a run in study.json."""


@dataclass(frozen=True)
class State:
    """State of a run, and the reason for it."""

    state: str
    """FINISHED, FAILED or WAITING."""
    reason: str = ""
    """Why it is not finished, in one line."""
    step: int = 0
    """The newest checkpoint's."""


def state_of(run: StudyRun, launched: str = "") -> State:
    """Return how a run stands: finished only where its last step's checkpoint is there.

    Args:
        run: The run.
        launched: How the launcher failed just now, for a run that has no attempt to say so.
    """
    directory, last = run.config.directory, run.config.train.num_steps
    step = newest_checkpoint_step(directory) or 0
    if is_done(run.config):
        if step == last:
            return State(FINISHED, step=step)
        # Nothing would train it again, and nothing is there to evaluate.
        gone = f"finished, but its checkpoints are gone; remove {directory} to train it again"
        return State(FAILED, gone, step)
    attempts = read_attempts(directory)
    ended = attempts[-1].ended if attempts else None
    if ended and ended.outcome not in (*ENDED_WELL, Outcome.SUPERSEDED):
        return State(FAILED, f"{in_words(ended.outcome)}: {ended.reason}", step)
    if launched:
        return State(FAILED, launched, step)
    if not attempts:
        return State(WAITING, "not started")
    how = "stopped" if ended else "running, or interrupted"
    return State(WAITING, f"{how}; saved at step {step}", step)


def states_of(
    study: Study, launched: Mapping[str, str] | None = None
) -> list[tuple[StudyRun, State]]:
    """Return every run with how it stands, in the study's order.

    Args:
        study: The study.
        launched: Name -> how the launcher failed just now.
    """
    failures = launched or {}
    return [(run, state_of(run, failures.get(run.name, ""))) for run in study.runs]


def write_study(study: Study, states: Sequence[tuple[StudyRun, State]]) -> None:
    """Write study.json, in one move and only when something has changed.

    Args:
        study: The study.
        states: Every run with how it stands.
    """
    content = {
        "title": study.asked.title,
        "command": shlex.join(["pretrain", "study", str(study.file)]),
        "published": study.asked.published,
        "differences": other_differences(study),
        "not_asked": not_asked(study),
        "runs": [
            {
                "name": run.name,
                "method": run.method,
                "train_length": run.train_length,
                "seed": run.seed,
                "directory": f"runs/{run.name}",
                "state": state.state,
                "reason": state.reason,
            }
            for run, state in states
        ],
    }
    write_changed(study.directory / "study.json", json.dumps(content, indent=1) + "\n")


def recorded_names(directory: Path) -> set[str]:
    """Return the names of the runs that a study's study.json has; none where it has no runs."""
    runs = read_json(directory / "study.json").get("runs")
    rows = runs if isinstance(runs, list) else []
    names = {row.get("name") for row in rows if isinstance(row, dict)}
    # A name that somebody wrote into the file may not lead out of a folder.
    return {name for name in names if isinstance(name, str) and Path(name).name == name}


def write_changed(path: Path, text: str) -> None:
    """Write a file in one move, unless it has this text already."""
    make_directory(path.parent)
    if read_text(path) != text:
        replace_file(path, text)


def table(states: Sequence[tuple[StudyRun, State]], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the runs: state, step, and perplexity at L and at the longest length.

    Args:
        states: Every run with how it stands.
        records: The evaluation's; of two protocols the first one's are shown.
    """
    rows = [("RUN", "STATE", "STEP", "PERPLEXITY AT L", "AT THE LONGEST LENGTH")]
    for run, state in states:
        own = [
            record
            for record in records
            # A study that was moved keeps its evaluation, whose records name where it was then.
            if PurePath(record["run"] or "").parts[-2:] == ("runs", run.name)
            and record["protocol"] == records[0]["protocol"]
        ]
        at_length = [record for record in own if record["length"] == run.train_length]
        longest = [max(own, key=lambda record: record["length"])] if own else []
        step = f"{state.step}/{run.config.train.num_steps}"
        rows.append((run.name, state.state, step, _shown(at_length), _shown(longest)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
    failed = [f"{run.name}: {state.reason}" for run, state in states if state.state == FAILED]
    return "\n".join([*lines, *failed])


def _shown(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a perplexity with its length and the tokens that it stands on."""
    if not records:
        return "-"
    [record] = records
    value = record["perplexity"]
    number = f"{value:.2f}" if value is not None and math.isfinite(value) else "not finite"
    return f"{number} at {record['length']:,} ({record['tokens']:,} tokens)"
