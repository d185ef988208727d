"""Evaluate one checkpoint inside a Slurm job: `launcher evaluation`, run by the batch script."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.launcher.evaluations import Plan, read_plan, submit_pending
from pretrain.launcher.node.job import job_is_over, job_owner
from pretrain.launcher.node.signals import Signals, job_signals
from pretrain.launcher.node.srun import SrunRanks
from pretrain.launcher.node.supervise import Ranks
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import Owner
from pretrain.rundir.checkpoints import checkpoint_step
from pretrain.rundir.files import publish_directory
from pretrain.rundir.jobs import job_id_of
from pretrain.rundir.lock import HEARTBEAT_SECONDS, Attempt, JobIsOver, RunBusy, unknown
from pretrain.rundir.paths import ExitCode, Outcome, RunPaths

POLL_SECONDS = 0.1
"""Time between two looks at the ranks."""


def run_job(run: Path, name: str) -> int:
    """Evaluate a checkpoint, update the run's report, and submit evaluations that are pending.

    Args:
        run: The run's directory.
        name: The checkpoint's name, step-########.

    Returns:
        The exit code of the job.

    Raises:
        ConfigError: No such checkpoint, no plan for evaluations, or not inside a Slurm job.
        RunFailed: The disk refused.
    """
    paths = RunPaths(run)
    checkpoint = paths.checkpoints / name
    if checkpoint_step(name) is None or not checkpoint.is_dir():
        raise ConfigError(
            f"{checkpoint}: no such checkpoint. Name one of the folders step-######## in "
            f"{paths.checkpoints}"
        )
    plan, job_id = read_plan(run), job_id_of(os.environ)
    if job_id is None:
        raise ConfigError(
            "launcher evaluation: SLURM_JOB_ID is not set; this command runs inside a Slurm job. "
            "Use `launcher evaluate-checkpoints`, or on this machine `pretrain evaluate`"
        )
    python = [plan.job.site.ranks_python or sys.executable, "-m", "pretrain"]

    def start(out: Path) -> Ranks:
        evaluate = _evaluate_arguments(plan, checkpoint, out)
        command = [*plan.job.step(), *python, *evaluate]
        # The directory of this claim, which no other evaluation of the checkpoint has.
        environment = {"PRETRAIN_RENDEZVOUS": str(out.parents[1])}
        return SrunRanks(command, job_id, name, environment, paths.evaluation_log(name))

    # SIGUSR1 asks to save and start again: an evaluation has nothing to save, and goes on.
    with job_signals() as signals:
        owner = job_owner(job_id, plan.job.num_tasks)
        code = evaluate_once(run, name, start, owner, job_is_over, signals)
        if signals.stops:
            return code
        return _finish(run, name, plan, code)


def _finish(run: Path, name: str, plan: Plan, code: int) -> int:
    """Update the run's report, and submit evaluations that are pending.

    Args:
        run: The run's directory.
        name: The checkpoint's name, step-########.
        plan: How the run's checkpoints are evaluated.
        code: The exit code of the evaluation.

    Returns:
        The exit code of the job.
    """
    python = [plan.job.site.ranks_python or sys.executable, "-m", "pretrain"]
    # Also when another job made the result: that job may have been killed before its report.
    if (RunPaths(run).evaluations / name).exists():
        report = [*plan.job.single(), *python, "report", str(run)]
        reported = subprocess.run(report, check=False).returncode
        code = code or reported
    submit_pending(run, at_once=True)
    return code


def _evaluate_arguments(plan: Plan, checkpoint: Path, out: Path) -> list[str]:
    """Return the arguments of `pretrain` that evaluate a checkpoint as planned.

    Args:
        plan: How the run's checkpoints are evaluated.
        checkpoint: The checkpoint's directory.
        out: The curve.json to write.
    """
    settings = [word for override in plan.overrides for word in ("--set", override)]
    options = [*plan.request.options(), *settings, "--out", str(out)]
    return ["evaluate", str(checkpoint), *options]


def evaluate_once(
    run: Path,
    name: str,
    start: Callable[[Path], Ranks],
    owner: Owner | None = None,
    job_is_over: JobIsOver = unknown,
    signals: Signals | None = None,
) -> int:
    """Evaluate a checkpoint, unless that was done before or another job is doing it.

    The claim on a checkpoint works like the lock of a run. The result is written in the directory
    of the claim and published in one move, so whenever this is killed, nothing is left that could
    be taken for a result. The next job starts from the beginning.

    Args:
        run: The run's directory.
        name: The checkpoint's name, step-########.
        start: Given the curve.json to write, starts the ranks that evaluate.
        owner: Who evaluates; this process by default.
        job_is_over: Asks Slurm about the job of another owner.
        signals: Signals to this process. One that asks to stop ends the ranks.

    Returns:
        The exit code: 0 also when there was nothing to do.
    """
    paths, step = RunPaths(run), checkpoint_step(name) or 0
    result = paths.evaluations / name
    if result.exists():
        say(f"{name}: evaluated before")
        return ExitCode.FINISHED
    try:
        claim = Attempt.begin(paths.evaluation_claim(name), owner, job_is_over)
    except RunBusy as busy:
        say(f"{name}: another job is evaluating it: {busy}")
        return ExitCode.FINISHED
    # Another job may have published between the look above and the claim.
    if result.exists():
        claim.end(Outcome.FINISHED, ExitCode.FINISHED, "evaluated before", step)
        say(f"{name}: evaluated before")
        return ExitCode.FINISHED
    out = claim.directory / "result"
    ranks = start(out / "curve.json")
    try:
        code = _wait(ranks, claim, signals or Signals())
    finally:
        if ranks.poll() is None:
            ranks.kill()
    if code is None:
        say(f"{name}: another job took over its evaluation, because this one sent no heartbeat")
        return ExitCode.FAILED
    if code and signals and signals.stops:
        claim.end(Outcome.STOPPED, code, "asked to stop", step)
        say(f"{name}: not evaluated: asked to stop")
        return code
    if code:
        claim.end(Outcome.FAILED, code, ranks.failure, step)
        say(f"{name}: not evaluated: {ranks.failure or f'exit code {code}'}")
        return code
    try:
        publish_directory(out, result)
    except OSError:
        # Publishing fails if a result is there already, which is as good as ours.
        if not result.exists():
            raise
    claim.end(Outcome.FINISHED, ExitCode.FINISHED, "evaluated", step)
    say(f"{name}: evaluated; see {result}/report.md")
    return ExitCode.FINISHED


def _wait(ranks: Ranks, claim: Attempt, signals: Signals) -> int | None:
    """Renew the claim until the ranks have ended, and end them on a signal to stop.

    Args:
        ranks: The ranks.
        claim: The claim on the checkpoint.
        signals: Signals to this process.

    Returns:
        Their exit code, or None when another job has taken the claim.
    """
    renewed = time.monotonic()
    while (code := ranks.poll()) is None:
        if signals.stops:
            ranks.kill()
            continue
        if time.monotonic() - renewed >= HEARTBEAT_SECONDS:
            renewed = time.monotonic()
            if not claim.heartbeat():
                return None
        time.sleep(POLL_SECONDS)
    # The claim may have been lost since the last heartbeat.
    return None if claim.superseded() else code
