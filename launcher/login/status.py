"""What a run does now: from its directory, and from Slurm's queue where it has jobs there."""

from __future__ import annotations

import math
import os
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.launcher import slurm
from pretrain.launcher.login.accounting import WORK, TimeSplit, time_splits
from pretrain.launcher.slurm import JobState
from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.jobs import JobRecord, read_jobs
from pretrain.rundir.lock import LEASE_SECONDS
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import RUN_MARKS, RunPaths, check_version, is_run
from pretrain.rundir.states import STARTED_AGAIN, JobKind, Phase, in_words

RATE_STEPS = 50  # rates are means over so many latest steps
TAIL_BYTES = (
    256 * 1024
)  # of metrics.jsonl, which may be huge; room for that many steps and some evaluations
SEARCH_DEPTH = 4  # how far below runs/ a run may lie


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
    splits: list[TimeSplit]
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
        if "jobs.jsonl" in files or "attempts" in folders:
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
    if not is_run(run):
        raise ConfigError(
            f"{run}: not a run, it has none of {', '.join(RUN_MARKS)}. Give a run.directory"
        )
    check_version(run)


def is_alive(attempt: AttemptRecord, now: float) -> bool:
    """Whether an attempt is under way, as far as its files tell: not ended, and a heartbeat within the lease."""
    return attempt.ended is None and now - attempt.last_heartbeat < LEASE_SECONDS


def _status(run: Path, records: Sequence[JobRecord], queue: Queue, now: float) -> RunStatus:
    attempts = read_attempts(run)
    alive = bool(attempts) and is_alive(attempts[-1], now)
    training = queued(records, queue, JobKind.TRAIN)
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
    splits = time_splits(attempts, now if running else None)
    rates, num_steps = read_rates(RunPaths(run).metrics), read_num_steps(run)
    nodes = job.nodes if job else attempts[-1].owner.nodes if alive else ""
    return RunStatus(
        run,
        state,
        reason,
        nodes,
        max(len(attempts) - 1, job.restarts if job else 0),
        num_steps,
        rates,
        _estimated_end(rates, num_steps, splits, now) if running else None,
        newest_checkpoint_step(run),
        attempts,
        splits,
        job,
        queued(records, queue, JobKind.EVALUATE),
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
    trained = [record for record in records if record.kind == JobKind.TRAIN]
    newest = attempts[-1] if attempts else None
    if newest is not None and alive:
        return "running", ""
    if newest is None and not trained:
        return "not recorded" if RunPaths(run).metrics.exists() else "not started", ""
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
        return in_words(newest.ended.outcome), newest.ended.reason
    seen = time.strftime("%b %d %H:%M", time.localtime(newest.last_heartbeat))
    return (
        "died",
        f"{f'job {last.job_id}: {last.state}, ' if last else ''}no sign of life since {seen}",
    )


def _is_final(attempt: AttemptRecord) -> bool:
    return attempt.ended is not None and attempt.ended.outcome not in STARTED_AGAIN


def _estimated_end(
    rates: Rates | None, num_steps: int | None, splits: Sequence[TimeSplit], now: float
) -> float | None:
    if rates is None or num_steps is None:
        return None
    spent = {part: sum(each.parts[part] for each in splits) for part in WORK}
    besides = sum(spent.values()) / spent[Phase.TRAINING] if spent[Phase.TRAINING] else 1.0
    return now + (num_steps - rates.step) * rates.step_seconds * besides


# ---- files of the run ------------------------------------------------------------------------------------------------
def read_num_steps(run: Path) -> int | None:
    """train.num_steps of what was sent, else of what the run wrote."""
    paths = RunPaths(run)
    for path in (paths.launch_config, paths.config):
        try:
            return int(tomllib.loads(path.read_text())["train"]["num_steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def read_rates(path: Path) -> Rates | None:
    """From the last `TAIL_BYTES` of metrics.jsonl; None when there is no step in it."""
    records = read_metrics(path, TAIL_BYTES)
    steps = [r for r in records if not is_evaluation(r) and r.get("step_seconds")]
    if not steps:
        return None
    last, latest = steps[-1], steps[-RATE_STEPS:]
    seconds = sum(record["step_seconds"] for record in latest)
    tokens = sum(
        record["step_seconds"] * (record.get("tokens_per_second") or 0.0) for record in latest
    )
    loss = last.get("loss_nats")
    return Rates(
        last["step"], math.nan if loss is None else loss, tokens / seconds, seconds / len(latest)
    )
