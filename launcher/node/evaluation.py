"""Evaluate one checkpoint, inside the Slurm job that was sent for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.launcher.evaluations import read_plan, submit_pending
from pretrain.launcher.node.ranks import Step
from pretrain.launcher.node.srun import SrunStep, job_is_over, job_owner
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import Owner
from pretrain.rundir.checkpoints import checkpoint_step
from pretrain.rundir.files import publish_directory
from pretrain.rundir.lock import HEARTBEAT_SECONDS, Attempt, RunBusy, unknown
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import ExitCode, Outcome

POLL_SECONDS = 0.1


def run_job(run: Path, name: str) -> int:
    """Evaluates a checkpoint, if nobody did; brings the run's curve up to date; sends what is left. The exit code."""
    paths = RunPaths(run)
    checkpoint, result = paths.checkpoints / name, paths.evaluations / name
    if checkpoint_step(name) is None or not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint}: no such checkpoint")
    plan, job_id = read_plan(run), os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise ConfigError(
            "launcher evaluation: runs in a Slurm job. Use `launcher evaluate-checkpoints`, or on this machine "
            "`pretrain evaluate`"
        )
    python = [plan.job.site.ranks_python or sys.executable, "-m", "pretrain"]

    def start(out: Path) -> Step:
        settings = [word for override in plan.overrides for word in ("--set", override)]
        evaluate = [
            "evaluate",
            str(checkpoint),
            *plan.request.options(),
            *settings,
            "--out",
            str(out),
        ]
        return SrunStep(
            [*plan.job.step(), *python, *evaluate], job_id, name, {}, paths.evaluation_log(name)
        )

    code = evaluate_once(run, name, start, job_owner(job_id, plan.job.num_tasks), job_is_over)
    if result.exists():  # another's too: it may have been killed before this
        reported = subprocess.run(
            [*plan.job.site.container, *python, "report", str(run)], check=False
        ).returncode
        code = code or reported
    submit_pending(run, at_once=True)
    return code


def evaluate_once(
    run: Path,
    name: str,
    start: Callable[[Path], Step],
    owner: Owner | None = None,
    job_is_over: Callable[[Owner], bool | None] = unknown,
) -> int:
    """Evaluates a checkpoint of `run` unless that is done, or another is at it; returns the exit code.

    `start` is given the curve.json to write and returns the ranks that do it. Killed at any moment this leaves nothing
    that the next one, which begins anew, would take for a result.
    """
    paths, step = RunPaths(run), checkpoint_step(name) or 0
    result = paths.evaluations / name
    if result.exists():
        say(f"{name}: evaluated before")
        return 0
    try:
        claim = Attempt.begin(paths.evaluation_claim(name), owner, job_is_over)
    except RunBusy as busy:
        say(f"{name}: left to another: {busy}")
        return 0
    if result.exists():  # since we looked
        claim.end(Outcome.FINISHED, ExitCode.FINISHED, "evaluated before", step)
        say(f"{name}: evaluated before")
        return 0
    out = claim.directory / "result"
    ranks = start(out / "curve.json")
    try:
        code = _wait(ranks, claim)
    finally:
        if ranks.poll() is None:
            ranks.kill()
    if code is None:
        say(f"{name}: another job took this one for dead and evaluates it")
        return 1
    if code:
        claim.end(Outcome.FAILED, code, ranks.failure, step)
        say(f"{name}: not evaluated: {ranks.failure or f'exit code {code}'}")
        return code
    try:
        publish_directory(out, result)
    except OSError:
        if not result.exists():
            raise
    claim.end(Outcome.FINISHED, ExitCode.FINISHED, "evaluated", step)
    say(f"{name}: evaluated; {result}/report.md")
    return 0


def _wait(ranks: Step, claim: Attempt) -> int | None:
    """The ranks' exit code; None when the claim is lost."""
    beat = time.monotonic()
    while (code := ranks.poll()) is None:
        if time.monotonic() - beat >= HEARTBEAT_SECONDS:
            beat = time.monotonic()
            if not claim.heartbeat():
                return None
        time.sleep(POLL_SECONDS)
    return None if claim.superseded() else code
