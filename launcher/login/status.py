"""What a run does now: from its directory, and from Slurm's queue where it has jobs there."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.attempts import LEASE_SECONDS, AttemptRecord, newest_checkpoint, read_attempts
from pretrain.config import ConfigError
from pretrain.launcher import slurm
from pretrain.launcher.job import JOBS, JobRecord, read_jobs
from pretrain.launcher.login.accounting import Account, account
from pretrain.launcher.slurm import JobState

RATE_STEPS = 50  # rates are means over so many latest steps
TAIL_BYTES = (
    256 * 1024
)  # of metrics.jsonl, which may be huge; room for that many steps and some evaluations
SEARCH_DEPTH = 4  # how far below runs/ a run may lie
RUN_FILES = (JOBS, "attempts", "launch", "metrics.jsonl")
TO_BE_MADE_AGAIN = (
    "restart",
    "failed",
    "hung",
)  # outcomes after which the supervisor or Slurm starts another attempt


@dataclass(frozen=True)
class Queue:
    """What Slurm says of the jobs asked for. `away`: why it does not answer; None when it did, or was not asked."""

    states: dict[str, JobState] = field(default_factory=dict)
    away: str | None = None


@dataclass(frozen=True)
class Rates:
    """The end of metrics.jsonl: the last step's number and loss; means of the last `RATE_STEPS` steps."""

    step: int
    loss_nats: float
    """nan or infinite where the step's was."""
    tokens_per_second: float
    step_seconds: float


@dataclass(frozen=True)
class RunStatus:
    """All that `launcher status` shows of a run. None: not known (yet)."""

    run: Path
    state: str
    """Slurm's while a training job is in the queue (PENDING, RUNNING, ...); else, in small letters, how it stands."""
    reason: str
    nodes: str
    restarts: int
    num_steps: int | None
    rates: Rates | None
    ends_at: float | None
    """Unix seconds: when the last step will be done at the present rate, evaluations and checkpoints included."""
    checkpoint: int | None
    """The step of the newest complete one."""
    attempts: list[AttemptRecord]
    accounts: list[Account]
    """One an attempt."""
    job: JobState | None
    """The training job in the queue."""
    evaluations: list[JobState]
    """Evaluation jobs in the queue."""

    @property
    def step(self) -> int | None:
        """Steps done."""
        return (
            self.rates.step if self.rates else (self.attempts[-1].step if self.attempts else None)
        )

    @property
    def is_over(self) -> bool:
        """Nothing is under way, and nothing will be unless somebody starts it."""
        return self.job is None and self.state not in ("running", "unknown")


def look(runs: Sequence[Path], now: float | None = None) -> tuple[list[RunStatus], str | None]:
    """The state of each run, with one question to Slurm for all; and why Slurm did not answer, if it did not."""
    now = time.time() if now is None else now
    jobs = {run: read_jobs(run) for run in runs}
    queue = ask([record.job_id for records in jobs.values() for record in records])
    return [_status(run, jobs[run], queue, now) for run in runs], queue.away


def ask(ids: Sequence[str]) -> Queue:
    """What Slurm knows of these jobs."""
    try:
        states = slurm.jobs(ids)
    except (ConfigError, slurm.SlurmError) as error:  # no Slurm here; or it answered with an error
        return Queue(away=str(error))
    return Queue(away="slurmctld does not answer") if states is None else Queue(states)


def find_runs(given: Sequence[Path]) -> list[Path]:
    """The runs asked for; with none given, all below runs/ or else the current directory. Raises ConfigError."""
    for run in given:
        check_run(run)
    if given:
        return list(given)
    root = Path("runs") if Path("runs").is_dir() else Path()
    found = []
    for folder, folders, files in os.walk(root):
        path = Path(folder)
        if JOBS in files or "attempts" in folders:
            found.append(path)
            folders.clear()
        elif len(path.relative_to(root).parts) >= SEARCH_DEPTH:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    if not found:
        raise ConfigError(
            f"{root.resolve()}: no runs here. Name them, as in `launcher status runs/demo/alibi`, or start one "
            "with `launcher submit` or `launcher local`"
        )
    return found


def check_run(run: Path) -> None:
    """Raises ConfigError for what is no run's directory."""
    if not run.exists():
        raise ConfigError(f"{run}: no such run. `launcher status` lists those below runs/")
    if not any((run / name).exists() for name in RUN_FILES):
        raise ConfigError(
            f"{run}: not a run, it has none of {', '.join(RUN_FILES)}. Give a run.directory"
        )


def is_alive(attempt: AttemptRecord, now: float) -> bool:
    """Whether an attempt is under way, as far as its files tell: not ended, and a heartbeat within the lease."""
    return attempt.ended is None and now - attempt.last_heartbeat < LEASE_SECONDS


def _status(run: Path, records: Sequence[JobRecord], queue: Queue, now: float) -> RunStatus:
    attempts = read_attempts(run)
    alive = bool(attempts) and is_alive(attempts[-1], now)
    training = queued(records, queue, "train")
    job = next(
        (job for job in training if job.state == "RUNNING"), training[-1] if training else None
    )
    state, reason = (
        (job.state, job.reason)
        if job
        else _state_without_a_job(run, records, attempts, alive, queue)
    )
    # A job that runs while its attempt has no fresh heartbeat: the node's disk may be slow; Slurm knows better.
    running = alive or bool(
        job and attempts and attempts[-1].ended is None and _is_of(attempts[-1], job)
    )
    accounts = account(attempts, now if running else None)
    rates, num_steps = read_rates(run / "metrics.jsonl"), read_num_steps(run)
    nodes = job.nodes if job else attempts[-1].owner.nodes if alive else ""
    return RunStatus(
        run,
        state,
        reason,
        nodes,
        max(len(attempts) - 1, job.restarts if job else 0),
        num_steps,
        rates,
        _estimated_end(rates, num_steps, accounts, now) if running else None,
        newest_checkpoint(run),
        attempts,
        accounts,
        job,
        queued(records, queue, "evaluate"),
    )


def queued(records: Sequence[JobRecord], queue: Queue, kind: str) -> list[JobState]:
    """The jobs of a kind that are in the queue, oldest first."""
    states = [
        queue.states[r.job_id] for r in records if r.kind == kind and r.job_id in queue.states
    ]
    return [state for state in states if not state.is_over]


def _is_of(attempt: AttemptRecord, job: JobState) -> bool:
    return (
        job.state == "RUNNING"
        and attempt.owner.slurm_job_id == job.raw_id
        and ((attempt.owner.slurm_restart_count or 0) == job.restarts)
    )


def _state_without_a_job(
    run: Path,
    records: Sequence[JobRecord],
    attempts: Sequence[AttemptRecord],
    alive: bool,
    queue: Queue,
) -> tuple[str, str]:
    """(state, reason) of a run that has no training job in the queue, or of whose jobs Slurm does not tell."""
    trained = [record for record in records if record.kind == "train"]
    newest = attempts[-1] if attempts else None
    if newest is not None and alive:
        return "running", ""
    if newest is None and not trained:
        return "not recorded" if (run / "metrics.jsonl").exists() else "not started", ""
    last = queue.states.get(trained[-1].job_id) if trained else None
    is_newer = bool(trained) and (
        newest is None or trained[-1].submitted_at > newest.owner.began_at
    )
    if queue.away and trained and (is_newer or newest is None or not _is_final(newest)):
        return "unknown", queue.away
    if newest is None or is_newer:
        how = (
            f"{last.state}{f' ({last.reason})' if last.reason else ''}"
            if last
            else "left the queue"
        )
        return "ended", f"job {trained[-1].job_id}: {how} before an attempt began"
    if newest.ended is not None:
        return newest.ended.outcome.replace("_", " "), newest.ended.reason
    seen = time.strftime("%b %d %H:%M", time.localtime(newest.last_heartbeat))
    return (
        "died",
        f"{f'job {last.job_id}: {last.state}, ' if last else ''}no sign of life since {seen}",
    )


def _is_final(attempt: AttemptRecord) -> bool:
    return attempt.ended is not None and attempt.ended.outcome not in TO_BE_MADE_AGAIN


def _estimated_end(
    rates: Rates | None, num_steps: int | None, accounts: Sequence[Account], now: float
) -> float | None:
    if rates is None or num_steps is None:
        return None
    spent = {
        part: sum(each.parts[part] for each in accounts)
        for part in ("training", "evaluating", "saving")
    }
    besides = sum(spent.values()) / spent["training"] if spent["training"] else 1.0
    return now + (num_steps - rates.step) * rates.step_seconds * besides


# ---- files of the run ------------------------------------------------------------------------------------------------
def read_num_steps(run: Path) -> int | None:
    """train.num_steps of what was sent, else of what the run wrote."""
    for path in (run / "launch" / "config.toml", run / "config.toml"):
        try:
            return int(tomllib.loads(path.read_text())["train"]["num_steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def read_rates(path: Path) -> Rates | None:
    """From the last `TAIL_BYTES` of metrics.jsonl; None when there is no step in it."""
    steps = [
        record
        for record in _tail(path)
        if "evaluation" not in record and record.get("step_seconds")
    ]
    if not steps:
        return None
    last, latest = steps[-1], steps[-RATE_STEPS:]
    seconds = sum(record["step_seconds"] for record in latest)
    tokens = sum(
        record["step_seconds"] * (record.get("tokens_per_second") or 0.0) for record in latest
    )
    loss = last.get("loss_nats")
    if loss is None:  # JSON has no nan: see pretrain/train/metrics.py
        loss = float(last.get("non_finite", {}).get("loss_nats", "nan"))
    return Rates(last["step"], loss, tokens / seconds, seconds / len(latest))


def _tail(path: Path) -> list[dict[str, Any]]:
    """The records at the end of a file of JSON lines. Lines cut at either end are left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()[1 if size > TAIL_BYTES else 0 :]
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in records if isinstance(record, dict) and "step" in record]
