"""Determine the state of runs from their directories and Slurm's queue (`launcher status`).

The directory records what the attempts did; the queue shows what will happen next. Slurm forgets a
job minutes after its end and sometimes does not answer, so everything here also works without it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tqdm import tqdm

from pretrain.config import ConfigError
from pretrain.config.errors import columns, moment, say
from pretrain.launcher import slurm
from pretrain.launcher.slurm import JobState
from pretrain.launcher.supervise import failing_nodes
from pretrain.rundir.attempts import (
    LEASE_SECONDS,
    AttemptRecord,
    Owner,
    PhaseChange,
    is_idle,
    process_lives,
    read_attempts,
)
from pretrain.rundir.checkpoints import checkpoint_name, newest_checkpoint_step
from pretrain.rundir.files import MAX_NUMBER, read_text
from pretrain.rundir.jobs import JobRecord, read_jobs
from pretrain.rundir.metrics import PHASE, Record, is_evaluation, read_metrics
from pretrain.rundir.paths import (
    ENDED_WELL,
    RUN_MARKS,
    STARTED_AGAIN,
    WORK,
    ExitCode,
    JobKind,
    Outcome,
    Phase,
    RunPaths,
    check_version,
    in_words,
    is_run,
)
from pretrain.rundir.trust import check_readable


# ---- goodput -------------------------------------------------------------------------------------
def goodput(
    attempts: Sequence[AttemptRecord], checkpoint: int | None, running: bool = False
) -> float | None:
    """Return the time spent on training steps that a run kept / the time it held its nodes.

    Attempts that were refused or found every step done do not count.

    Args:
        attempts: All attempts, oldest first.
        checkpoint: The step of the newest complete checkpoint, from which the run would continue.
        running: The last attempt still runs.

    Returns:
        0 to 1; None if no node was held.
    """
    # An attempt with a damaged owner.json is left out, because its beginning is unknown.
    counted = [each for each in attempts if each.owner.began_at and not is_idle(each)]
    # While an attempt runs, all its work may still be saved.
    ended = counted[-1].ended if counted else None
    keeps_all = running or (ended is not None and ended.outcome == Outcome.FINISHED)
    kept_step = sys.maxsize if keeps_all else checkpoint or 0
    kept, held, later = 0.0, 0.0, Owner(began_at=math.inf)
    for attempt in reversed(counted):
        owner, marks = attempt.owner, attempt.phases
        last_sign = max(attempt.last_heartbeat, owner.began_at, *(mark.at for mark in marks))
        # An attempt may notice late that another one has replaced it, and record its end after the
        # other one's beginning.
        end = min(attempt.ended.at if attempt.ended else last_sign, later.began_at)
        # Between two attempts of the same start of a job, its nodes are still held.
        if owner.is_of_start(later.slurm_job_id, later.slurm_restart_count or 0):
            end = later.began_at
        # Not less than 0, because the clocks of different hosts may disagree.
        held += max(0.0, end - owner.began_at)
        # How far training came after the last mark is unknown, so this part counts only if all
        # steps are kept.
        last = PhaseChange(end, "", sys.maxsize)
        for mark, following in reversed([*pairwise([*marks, last])]):
            if mark.phase == Phase.TRAINING and following.step <= kept_step:
                kept += max(0.0, following.at - mark.at)
            if mark.phase in WORK:
                # Earlier attempts' work beyond this step is lost.
                kept_step = min(kept_step, mark.step)
        later = owner
    return min(1.0, kept / held) if held else None


# ---- progress ------------------------------------------------------------------------------------
RATE_STEPS = 50
"""Rates are means over this many of the latest steps."""
TAIL_BYTES = 256 * 1024
"""Bytes that are read at the end of metrics.jsonl, which may be huge: enough for `RATE_STEPS` steps
of about 300 bytes, with evaluations between them."""
NUM_STEPS = re.compile(r"num_steps *= *([0-9]{1,15})")
"""The line of a config that `dump_config` writes for train.num_steps."""


@dataclass(frozen=True)
class Rates:
    """The progress of training, from the end of metrics.jsonl."""

    step: int
    """The last step."""
    loss_nats: float
    """The last step's loss, which may be nan or infinite."""
    tokens_per_second: float
    """Mean over the last `RATE_STEPS` steps, weighted by their time."""
    phase: str = ""
    """The phase, " (phase 2)", of a run that has several."""
    slow: str = ""
    """The slowest rank, while one is slow (pretrain/training/stragglers.py)."""


def read_num_steps(run: Path) -> int | None:
    """Return train.num_steps as submitted, or else as started; None if neither can be read."""
    # Not `load_config`, because this must also work on the configs of other versions. Not tomllib,
    # whose time is quadratic in the size of a maliciously written file.
    paths = RunPaths(run)
    for path in (paths.launch_config, paths.config):
        section = ""
        for line in read_text(path).splitlines():
            section = line.strip() if line.startswith("[") else section
            if section == "[train]" and (found := NUM_STEPS.fullmatch(line.strip())):
                return int(found[1])
    return None


def read_rates(path: Path) -> Rates | None:
    """Return the rates at the end of a metrics.jsonl; None if there is no step in it."""
    records = read_metrics(path, TAIL_BYTES)
    steps = [r for r in records if not is_evaluation(r) and _number(r, "step_seconds") > 0]
    if not steps:
        return None
    last, latest = steps[-1], steps[-RATE_STEPS:]
    seconds = sum(record["step_seconds"] for record in latest)
    # Weighted by time: the tokens of all these steps over the seconds of all these steps.
    tokens = sum(record["step_seconds"] * _number(record, "tokens_per_second") for record in latest)
    judged = next((record for record in reversed(latest) if "slowest_rank" in record), {})
    loss = _number(last, "loss_nats", math.nan)
    phase = f" (phase {_number(last, PHASE):.0f})" if PHASE in last else ""
    return Rates(last["step"], loss, tokens / seconds, phase, _slow_rank(judged))


def _slow_rank(record: Record) -> str:
    """Return the rank for which the others wait, according to a step's record; "" if none."""
    if "slow_since_step" not in record:
        return ""
    keys = ("slowest_rank", "slowest_place", "slow_since_step")
    rank, place, since = (record.get(key) for key in keys)
    ratio = _number(record, "slowest_ratio")
    return f"rank {rank} ({place}) is slow since step {since}, busy {ratio:.3g} times as long"


def _number(record: Record, key: str, default: float = 0.0) -> float:
    """Return a number of a record; `default` when it is missing or something else."""
    value = record.get(key)
    if isinstance(value, float) or (type(value) is int and abs(value) < MAX_NUMBER):
        return value
    return default


def _estimated_end(
    attempt: AttemptRecord, step: int | None, num_steps: int | None, now: float
) -> float | None:
    """Return when the last step will be done, in unix seconds; None before the first step.

    The remaining steps take as long as those of this attempt, with the evaluations and the
    checkpoints between them.
    """
    first = next((mark for mark in attempt.phases if mark.phase in WORK), None)
    if first is None or step is None or num_steps is None or step <= first.step:
        return None
    return now + (num_steps - step) * (now - first.at) / (step - first.step)


# ---- the state -----------------------------------------------------------------------------------
UNREADABLE = "unreadable"
"""The state of a run whose files cannot be read, perhaps only for a moment."""
SEARCH_DEPTH = 4
"""Levels below runs/ that are searched for runs."""


@dataclass(frozen=True)
class Queue:
    """Slurm's answer about some jobs."""

    states: dict[str, JobState] = field(default_factory=dict)
    """By job id. Jobs that Slurm has forgotten are missing."""
    away: str | None = None
    """The reason why Slurm gave no answer; None if it did, or there was no job to ask about."""


@dataclass(frozen=True)
class RunStatus:
    """All that `launcher status` shows about a run. None means not known, or not known yet."""

    run: Path
    state: str
    """Slurm's state while a training job is in the queue (PENDING, RUNNING, ...). Otherwise:
    running, unknown, ended, died, copied, not started, not recorded, unreadable, or an outcome."""
    reason: str
    """Slurm's reason for the state, why the last attempt ended, or why the run cannot be read."""
    nodes: str = ""
    """Slurm's node list, or the host; empty if the run holds no nodes."""
    restarts: int = 0
    num_steps: int | None = None
    """train.num_steps."""
    rates: Rates | None = None
    ends_at: float | None = None
    """Unix seconds: when the last step will be done at the speed of this attempt."""
    checkpoint: int | None = None
    """The step of the newest complete checkpoint."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    goodput: float | None = None
    """0 to 1."""
    job: JobState | None = None
    """The training job in the queue."""

    @property
    def step(self) -> int | None:
        """Steps done."""
        if self.rates:
            return self.rates.step
        return self.attempts[-1].step if self.attempts else None

    @property
    def is_over(self) -> bool:
        """True if the run neither runs nor waits in the queue: only a user can restart it."""
        return self.job is None and self.state not in ("running", "unknown", UNREADABLE)


def read_statuses(
    runs: Sequence[Path], now: float | None = None
) -> tuple[list[RunStatus], str | None]:
    """Return the status of each run, and why Slurm did not answer (None if it did).

    All runs share one call of squeue, because squeue(1) warns that many calls in a row slow down
    slurmctld for everybody.

    Args:
        runs: The runs' directories. A directory that is not a run, or cannot be read, gets a status
            that says so, and the others get theirs.
        now: Unix seconds; by default the time of this call.
    """
    now = time.time() if now is None else now
    jobs: dict[Path, list[JobRecord]] = {}
    broken: dict[Path, RunStatus] = {}
    for run in runs:
        with _reading(run, broken):
            check_run(run)
            jobs[run] = read_jobs(run)
    queue = ask_slurm([record.job_id for sent in jobs.values() for record in sent])
    statuses: dict[Path, RunStatus] = {}
    for run, sent in jobs.items():
        with _reading(run, broken):
            statuses[run] = _status(run, sent, queue, now)
    return [broken.get(run) or statuses[run] for run in runs], queue.away


@contextlib.contextmanager
def _reading(run: Path, broken: dict[Path, RunStatus]) -> Iterator[None]:
    """Turn an error of the block into the status of a run that cannot be read."""
    try:
        yield
    # Any error at all, because files may be damaged in any way, and may be another user's.
    except Exception as error:
        said = " ".join(str(error).split())
        words = said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"
        broken[run] = RunStatus(run, UNREADABLE, words.removeprefix(f"{run}: "))


def ask_slurm(ids: Sequence[str], tries: int = 1) -> Queue:
    """Return what Slurm knows about these jobs. Never raises: see `Queue.away`."""
    try:
        return Queue(slurm.jobs(ids, tries))
    # NoSlurm: this machine may have no Slurm at all.
    except (slurm.NoSlurm, slurm.SlurmError) as error:
        return Queue(away=str(error))


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Return the runs in `given`, or if it is empty all runs below runs/ or the current directory.

    If several paths are given, existing paths that are not runs are left out.

    Raises:
        ConfigError: A single one of `given` is not a run's directory, or no run was found.
    """
    if len(given) == 1:
        check_run(given[0])
    if given:
        # A shell's `*` also gives other files and folders beside the runs.
        seen = [path for path in given if os.access(path, os.R_OK | os.X_OK) or not path.exists()]
        return [path for path in seen if is_run(path) or not path.exists()]
    root = Path("runs") if Path("runs").is_dir() else Path()
    found = []
    for folder, folders, _ in os.walk(root):
        path = Path(folder)
        is_deep = len(path.relative_to(root).parts) >= SEARCH_DEPTH
        names = {name for name in folders if not name.startswith(".") and not is_deep}
        if is_run(path):
            # A study's record also holds metrics, and is no run.
            if not (path / "record.json").is_file():
                found.append(path)
            # Not searched further: a run may hold thousands of files, but no other run.
            names = set()
        folders[:] = sorted(names)
    if not found:
        raise ConfigError(
            f"{root.resolve()}: no runs here. Name a run, as in `launcher status "
            "runs/demo/alibi`, or start one with `launcher submit` or `launcher local`"
        )
    return found


def check_run(run: Path) -> None:
    """Raise ConfigError unless `run` is a run's directory that this version can read."""
    check_readable(run)
    if not run.exists():
        raise ConfigError(f"{run}: no such run. `launcher status` lists the runs below runs/")
    if not is_run(run):
        raise ConfigError(
            f"{run}: not a run's directory, it contains none of {', '.join(RUN_MARKS)}. Give the "
            "run.directory of a config"
        )
    check_version(run)


def is_alive(attempt: AttemptRecord, now: float) -> bool:
    """Return True if an attempt has not ended and has sent a heartbeat within its lease.

    An attempt in a copy of a run's directory is not alive: it continues in the original. A local
    attempt is not alive if its process is gone from this host. An attempt of a job stays alive
    without its launcher, because its ranks may still save.
    """
    is_fresh = attempt.ended is None and now - attempt.last_heartbeat < LEASE_SECONDS
    if not is_fresh or attempt.is_copied:
        return False
    is_local = attempt.owner.slurm_job_id is None
    return not (is_local and process_lives(attempt.owner, Owner.here()) is False)


def attempts_of(attempts: Sequence[AttemptRecord], job: JobState) -> list[AttemptRecord]:
    """Return the attempts that a job has begun since Slurm last started it.

    A requeued job keeps its id, so earlier attempts are told apart by the count of restarts. Slurm
    raises the count while the job is still ending.
    """
    return [
        each
        for each in attempts
        if each.owner.is_of_start(job.job_id, job.restarts)
        or (job.is_ending and each.owner.is_of_job(job.job_id))
    ]


def queued(records: Sequence[JobRecord], queue: Queue, kind: str) -> list[JobState]:
    """Return the jobs of a kind that are in the queue, oldest first.

    Args:
        records: The jobs that were submitted for a run, oldest first.
        queue: Slurm's answer about them.
        kind: A `JobKind`.
    """
    states = [
        queue.states[r.job_id] for r in records if r.kind == kind and r.job_id in queue.states
    ]
    return [state for state in states if not state.is_over]


def _status(run: Path, sent: Sequence[JobRecord], queue: Queue, now: float) -> RunStatus:
    """Return the status of one run.

    Args:
        run: The run's directory.
        sent: The jobs that were submitted for it, oldest first.
        queue: Slurm's answer about these jobs.
        now: Unix seconds.
    """
    attempts = read_attempts(run)
    alive = bool(attempts) and is_alive(attempts[-1], now)
    if alive and (owner := queue.states.get(attempts[-1].owner.slurm_job_id or "")):
        # The lease of a launcher that was killed with its job has not expired yet.
        alive = not owner.is_over
    training = queued(sent, queue, JobKind.TRAIN)
    # If a user submitted one by hand, two jobs can be in the queue. The running one is shown.
    newest = training[-1] if training else None
    job = next((job for job in training if job.is_running), newest)
    if job:
        state, reason = job.state, job.reason
    else:
        state, reason = _state_without_a_job(run, sent, attempts, alive, queue)
    # A heartbeat may be late because the file system is slow, so Slurm's answer that the job is
    # running also counts.
    running = alive or bool(
        job
        and (job.is_running or job.is_suspended)
        and attempts[-1:] == attempts_of(attempts, job)[-1:] != []
        and attempts[-1].ended is None
    )
    rates, num_steps = read_rates(RunPaths(run).metrics), read_num_steps(run)
    step, checkpoint = rates.step if rates else None, newest_checkpoint_step(run)
    return RunStatus(
        run=run,
        state=state,
        reason=reason,
        nodes=job.nodes if job else attempts[-1].owner.nodes if alive else "",
        # Slurm's count includes starts that ended before an attempt began.
        restarts=max(sum(not is_idle(each) for each in attempts) - 1, job.restarts if job else 0),
        num_steps=num_steps,
        rates=rates,
        ends_at=_estimated_end(attempts[-1], step, num_steps, now) if running else None,
        checkpoint=checkpoint,
        attempts=attempts,
        goodput=goodput(attempts, checkpoint, running),
        job=job,
    )


def _state_without_a_job(
    run: Path,
    records: Sequence[JobRecord],
    attempts: Sequence[AttemptRecord],
    alive: bool,
    queue: Queue,
) -> tuple[str, str]:
    """Return (state, reason) of a run with no training job in the queue, as far as is known.

    Args:
        run: The run's directory.
        records: The jobs that were submitted for it, oldest first.
        attempts: Its attempts, oldest first.
        alive: The newest attempt has a fresh heartbeat.
        queue: Slurm's answer about the jobs; Slurm may have given none.
    """
    jobs = [record for record in records if record.kind == JobKind.TRAIN]
    newest = attempts[-1] if attempts else None
    # Trained by `launcher local`, or by a job while Slurm does not answer.
    if newest is not None and alive:
        return "running", ""
    if newest is None and not jobs:
        # With metrics but no attempt, only a part of the run's directory was copied here.
        return "not recorded" if RunPaths(run).metrics.exists() else "not started", ""
    # An attempt of the last job is newer than it, whatever the clock of its node says.
    job_is_newer = bool(jobs) and (
        newest is None
        or (
            not newest.owner.is_of_job(jobs[-1].job_id)
            and jobs[-1].submitted_at > newest.owner.began_at
        )
    )
    # Without Slurm, the state is known only if the last attempt ended for good, and began after the
    # last submission.
    is_final = newest and newest.ended and newest.ended.outcome not in STARTED_AGAIN
    if queue.away and jobs and (job_is_newer or not is_final):
        return "unknown", queue.away
    last = queue.states.get(jobs[-1].job_id) if jobs else None
    if newest is None or job_is_newer:
        # Slurm still knows how the job ended only for some minutes (MinJobAge).
        how = "left the queue"
        if last:
            how = f"{last.state} ({last.reason})" if last.reason else last.state
        return "ended", f"job {jobs[-1].job_id}: {how} before an attempt began"
    if newest.ended is not None:
        return in_words(newest.ended.outcome), newest.ended.reason
    if newest.is_copied:
        return "copied", f"while attempt {newest.number} trained in the original directory"
    job = f"job {last.job_id}: {last.state}, " if last else ""
    return "died", f"{job}no sign of life since {moment(newest.last_heartbeat, MINUTES)}"


# ---- what is printed -----------------------------------------------------------------------------
HEAD = "RUN STATE STEP LOSS TOKENS/S GOODPUT ENDS CHECKPOINT RESTARTS JOB NODES REASON"
"""The columns of the table, the most important ones first, as a terminal cuts off long lines."""
MINUTES = "%Y-%m-%d %H:%M"
NUMBERS = {"STEP", "LOSS", "TOKENS/S", "GOODPUT", "CHECKPOINT", "RESTARTS", "ATTEMPT"}
"""Columns that are aligned to the right."""


def show_status(given: Sequence[Path]) -> None:
    """Run `launcher status`.

    Args:
        given: The runs; if empty, all runs below runs/. A single run is printed in detail.

    Raises:
        ConfigError: One of `given` is not a run's directory, or there are no runs.
    """
    statuses, away = read_statuses(find_runs(given))
    # Only for these states: runs that have ended are shown from their own files, without Slurm.
    if away and any(status.state in ("running", "unknown") for status in statuses):
        print(f"Slurm gave no answer, so job states are missing ({away})")
    print(detail(statuses[0]) if len(given) == 1 else table(statuses))


def table(statuses: Sequence[RunStatus]) -> str:
    """Return a table with one line per run, cut to the width of the terminal."""
    width = shutil.get_terminal_size((0, 0)).columns or None
    return "\n".join(
        line[:width] for line in _lines(HEAD.split(), [_row(each) for each in statuses])
    )


def detail(status: RunStatus) -> str:
    """Return all about one run: the row of the table, its attempts and its faulty nodes."""
    job = status.job
    # Slurm estimates the start only of pending jobs that its backfill scheduler has considered.
    starts = job.started_at if job and job.is_pending else None
    limit = job.ends_at if job and job.is_running else None
    fields = {
        **dict(zip(HEAD.lower().split(), _row(status))),
        "starts": moment(starts, MINUTES) if starts else "",
        "time limit": moment(limit, MINUTES) if limit else "",
    }
    lines = columns([(name, _one_line(value)) for name, value in fields.items() if value], ())
    if status.attempts:
        # Only failures in the newest job count, as another job may get the same nodes again.
        newest = status.attempts[-1].owner.slurm_job_id
        same_job = [each for each in status.attempts if each.owner.slurm_job_id == newest]
        lines += ["", *_attempts(status)]
        lines += [
            f"node {node}: not used any more if Slurm has others: {why}"
            for node, why in failing_nodes(same_job).items()
        ]
    return "\n".join(lines)


def summary(run: Path) -> str:
    """Return how a run has ended: its outcome, step, newest checkpoint and goodput."""
    attempts = read_attempts(run)
    if not attempts:
        return f"{run}: no attempt yet"
    newest, num_steps, checkpoint = attempts[-1], read_num_steps(run), newest_checkpoint_step(run)
    outcome = in_words(newest.ended.outcome) if newest.ended else "not ended"
    step = f"step {newest.ended.step if newest.ended else newest.step}"
    step += f" of {num_steps}" if num_steps else ""
    saved = "no checkpoint"
    if checkpoint is not None:
        saved = f"newest checkpoint {checkpoint_name(checkpoint)}"
    plural = "" if len(attempts) == 1 else "s"
    said = f"{run}: {outcome} at {step}, {len(attempts)} attempt{plural}, {saved}"
    share = percent(goodput(attempts, checkpoint), 1)
    held = "held its nodes" if newest.owner.slurm_job_id else "ran"
    return f"{said}\ngoodput: {share} of the time it {held}"


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; line breaks in cells become spaces."""
    right = {number for number, head in enumerate(heads) if head in NUMBERS}
    return columns([heads, *([_one_line(cell) for cell in row] for row in rows)], right)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _row(status: RunStatus) -> Sequence[str]:
    """Return the cells of a run, in the order of `HEAD`."""
    rates = status.rates
    step = "" if status.step is None else str(status.step)
    if step and status.num_steps:
        step += f"/{status.num_steps}{rates.phase if rates else ''}"
    return (
        str(status.run),
        status.state,
        step,
        f"{rates.loss_nats:.3f}" if rates else "",
        tqdm.format_sizeof(rates.tokens_per_second) if rates else "",
        percent(status.goodput) if status.attempts else "",
        moment(status.ends_at, MINUTES) if status.ends_at else "",
        "" if status.checkpoint is None else str(status.checkpoint),
        str(status.restarts),
        status.job.job_id if status.job else "",
        status.nodes,
        status.reason or (rates.slow if rates and status.ends_at else ""),
    )


def _attempts(status: RunStatus) -> list[str]:
    """Return a table of the attempts: when each began, how it ended, and why if it failed."""
    rows = []
    for attempt in status.attempts:
        ended = attempt.ended
        rows.append(
            (
                str(attempt.number),
                moment(attempt.owner.began_at, MINUTES) if attempt.owner.began_at else "",
                str(ended.step if ended else attempt.step),
                in_words(ended.outcome) if ended else "",
                ended.reason if ended and ended.outcome not in ENDED_WELL else "",
            )
        )
    found = [(each.number, each.diagnosis.what) for each in status.attempts if each.diagnosis]
    replays = [f"attempt {number} replayed: {_one_line(what)}" for number, what in found]
    return [*_lines(["ATTEMPT", "BEGAN", "STEP", "END", "REASON"], rows), *replays]


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share as text: "91 %" for 0.912, "-" for None."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def print_end(run: Path, code: int, command: Sequence[str] = ()) -> None:
    """Print how a run has ended and, if it was stopped, the command that continues it.

    Nothing is printed for a run that failed: the error should be the last thing on the terminal.

    Args:
        run: The run's directory.
        code: The exit code of its last attempt.
        command: The command that continues the run.
    """
    if code in (ExitCode.FINISHED, ExitCode.STOPPED):
        print(summary(run), file=sys.stderr, flush=True)
    if command and code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
        saved = newest_checkpoint_step(run)
        words = "nothing is saved" if saved is None else f"{checkpoint_name(saved)} is saved"
        say(f"{run}: {words}; go on with:\n  {shlex.join(command)}")
