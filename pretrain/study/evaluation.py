"""Evaluate all finished runs of a study together, unless that is done already."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import ConfigError, EvaluationRequest
from pretrain.config.trajectory import VALIDATION
from pretrain.data.stream import open_stream
from pretrain.evaluate.reading import read_records
from pretrain.processes import Processes
from pretrain.rundir.checkpoints import find_checkpoint
from pretrain.rundir.files import make_directory, read_json, replace_json
from pretrain.study.runs import Study, StudyRun
from pretrain.study.schema import request_of

CURVE = "curve.json"
DONE = "evaluated.json"
"""What was evaluated, and the SHA-256 of each file that came of it; written last."""


def evaluate(study: Study, runs: Sequence[StudyRun], processes: Processes, nproc: int) -> int:
    """Evaluate runs with one `pretrain evaluate`.

    Args:
        study: The study.
        runs: Its finished runs.
        processes: Starts the command.
        nproc: Processes that share the work.

    Returns:
        0, or the exit code of `pretrain evaluate`.

    Raises:
        ConfigError: The text is shorter than a length that the study file names.
    """
    folder = study.directory / "evaluation"
    asked = _asked(study, runs)
    make_directory(folder)
    (folder / DONE).unlink(missing_ok=True)
    request = _request(study, runs[0])
    command = [
        *(sys.executable, "-m", "pretrain", "evaluate"),
        *(run.config.run.directory for run in runs),
        *request.options(),
        *("--out", str(folder / CURVE)),
    ]
    with tempfile.TemporaryDirectory(prefix="pretrain-study-") as rendezvous:
        code = processes.run(ranks(command, nproc, rendezvous))
    if not code:
        replace_json(folder / DONE, {"asked": asked, "files": _digests(folder)}, indent=1)
    return code


def is_done(study: Study, runs: Sequence[StudyRun]) -> bool:
    """Return True if the evaluation that is there is of these runs, as the study file asks now.

    It is known by its content: the ids of the checkpoints, what was asked for, and the digests of
    the files. Without runs there is nothing to evaluate, and what is there is no longer current.
    """
    folder = study.directory / "evaluation"
    if not runs:
        (folder / DONE).unlink(missing_ok=True)
        (folder / CURVE).unlink(missing_ok=True)
        return True
    done = read_json(folder / DONE)
    return done == {"asked": _asked(study, runs), "files": _digests(folder)}


def records_of(study: Study) -> list[dict[str, Any]]:
    """Return the records of the evaluation that is there; none without one."""
    path = study.directory / "evaluation" / CURVE
    if not (path.with_name(DONE)).is_file():
        return []
    return read_records(path)


def ranks(command: Sequence[str], nproc: int, rendezvous: str) -> list[list[str]]:
    """Return the command lines of `nproc` processes that do one command's work together.

    Args:
        command: The command.
        nproc: Processes on this machine.
        rendezvous: A folder in which rank 0 says where it listens.
    """
    if nproc == 1:
        return [list(command)]
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    return [
        [
            # env(1) adds to the environment, which only the launcher reads. A port of the user's is
            # dropped: a second run on this machine would meet the first one there.
            *("env", "--unset=MASTER_PORT", f"RANK={rank}", f"LOCAL_RANK={rank}"),
            *(f"WORLD_SIZE={nproc}", f"LOCAL_WORLD_SIZE={nproc}", "MASTER_ADDR=127.0.0.1"),
            *(f"OMP_NUM_THREADS={threads}", f"PRETRAIN_RENDEZVOUS={rendezvous}"),
            *command,
        ]
        for rank in range(nproc)
    ]


def _asked(study: Study, runs: Sequence[StudyRun]) -> dict[str, Any]:
    """Return what decides the result of an evaluation, as JSON has it."""
    evaluation = study.asked.evaluation
    checkpoints = {run.name: open_checkpoint(find_checkpoint(run.config.directory)) for run in runs}
    return {
        "runs": {
            name: {"checkpoint": each.lineage.id, "validation": each.origin.data.get(VALIDATION)}
            for name, each in checkpoints.items()
        },
        **json.loads(evaluation.model_dump_json()),
        "lengths": list(study.lengths),
    }


def _request(study: Study, run: StudyRun) -> EvaluationRequest:
    """Return what `pretrain evaluate` is asked for: the default lengths as far as the text reaches.

    Args:
        study: The study.
        run: Any of its runs, for the validation text.
    """
    request = request_of(study.asked.evaluation, study.lengths)
    if study.asked.evaluation.lengths is not None:
        return request
    tokens = len(open_stream(run.config, "validation"))
    tokens = min(tokens, request.max_tokens or tokens)
    reached = tuple(length for length in study.lengths if length <= tokens)
    if not reached:
        raise ConfigError(
            f"{study.file}: the {tokens:,} tokens that are scored are less than one window of "
            f"{study.lengths[0]}. Hold out more text, or raise evaluation.max_tokens"
        )
    for length in study.lengths[len(reached) :]:
        print(f"length {length:,} left out: the text that is scored has {tokens:,} tokens")
    return dataclasses.replace(request, lengths=reached)


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that an evaluation has written, by its name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if path.is_file() and path.name != DONE and not path.name.startswith(".")
    }
