"""Find out how runs stand, from their directories and from Slurm's queue.

The directory says what the attempts did, the queue what will happen next. Slurm forgets a job
minutes after its end and is away at times, so each answer also has to work without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pretrain.config import ConfigError
from pretrain.launcher import slurm
from pretrain.launcher.slurm import JobState
from pretrain.launcher.terminal import say
from pretrain.rundir.attempts import (
    LEASE_SECONDS,
    PROGRESS,
    AttemptRecord,
    Suspension,
    is_idle,
    read_attempts,
    read_waiting,
)
from pretrain.rundir.checkpoints import (
    MANIFEST,
    checkpoint_step,
    headless_checkpoints,
    newest_checkpoint_step,
)
from pretrain.rundir.files import MAX_NUMBER, read_text
from pretrain.rundir.history import read_abandoned
from pretrain.rundir.jobs import JobRecord, read_jobs
from pretrain.rundir.metrics import Record, is_evaluation, read_metrics
from pretrain.rundir.paths import (
    RUN_MARKS,
    STARTED_AGAIN,
    WORK,
    JobKind,
    Outcome,
    Phase,
    RunPaths,
    check_version,
    in_words,
    is_run,
)

WAITING, SUSPENDED, LOST, IDLE = "waiting", "suspended", "lost", "idle"
"""Parts that are no phase of an attempt. A run between two attempts, about whose job Slurm says
nothing, is `WAITING` as well."""
PARTS = {
    WAITING: "before an attempt: in the queue, or between two attempts without a job",
    Phase.STARTING: "the processes start and find each other; nodes are chosen and checked",
    Phase.LOADING: "the model is built and a checkpoint is loaded",
    Phase.TRAINING: "training steps that the run kept",
    Phase.EVALUATING: "evaluations while training",
    Phase.SAVING: "checkpoints are written",
    Phase.ENDING: "the processes shut down",
    SUSPENDED: "Slurm had suspended the job, and its processes stood still",
    LOST: "training, evaluating and saving after the checkpoint that the next attempt resumed from",
    IDLE: "while nothing was to be trained: the run was finished and no later start was submitted, "
    "or an attempt was refused its input or found every step done",
}
"""The parts of the wall time, in the order in which an attempt goes through them."""
GOODPUT = (
    "Goodput is the time spent on training steps that the run kept, as a share of the time it held "
    "its nodes (the wall time without the waiting and without suspensions of its job). Time in "
    "which nothing was to be trained does not count: while the run is finished, and attempts that "
    "were refused or found every step done."
)


class Interval(NamedTuple):
    """The time [begin, end) that an attempt spent in one phase."""

    begin: int
    """Milliseconds since 1970."""
    end: int
    """Milliseconds since 1970."""
    phase: str
    step: int
    """Steps done when the phase began."""


@dataclass(frozen=True)
class TimeSplit:
    """Milliseconds in each part of `PARTS`, of an attempt with the wait before it or of a run."""

    parts: dict[str, int]

    @property
    def wall(self) -> int:
        """Milliseconds in all parts together."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """Training that was kept / time in which nodes were held, 0 to 1; None if none were."""
        held = self._meant - self.parts[WAITING] - self.parts[SUSPENDED]
        return self.parts[Phase.TRAINING] / held if held else None

    @property
    def goodput_of_wall(self) -> float | None:
        """Training that was kept / wall time without idle time, 0 to 1; None if that is empty."""
        return self.parts[Phase.TRAINING] / self._meant if self._meant else None

    @property
    def _meant(self) -> int:
        """Milliseconds in which the run was meant to train."""
        return self.wall - self.parts[IDLE]


def time_splits(attempts: Sequence[AttemptRecord], now: float | None = None) -> list[TimeSplit]:
    """Split the wall time of a run by attempts and parts.

    An attempt that left no ended.json ends at its last sign of life. The clocks of different hosts
    may disagree, so an interval is cut to the time that earlier ones have left free.

    Args:
        attempts: All attempts, oldest first.
        now: Unix seconds if the last attempt still runs, else None.

    Returns:
        One split per attempt, oldest first. Their sum (`total`) is the run's wall time.
    """
    splits = []
    # The end of what is accounted for: each attempt gets the time from here to its own end.
    free_from = _first_moment(attempts)
    is_finished = False
    for index, attempt in enumerate(attempts):
        last = index == len(attempts) - 1
        running = last and now is not None
        begin = max(free_from, _begin(attempt))
        end = _milliseconds(now) if running and now is not None else _end(attempt)
        if not last:
            # A superseded attempt notices it late, and records an end after the next one's begin.
            end = min(end, _begin(attempts[index + 1]))
        end = max(begin, end)
        intervals = _intervals(attempt, begin, end)
        # While an attempt runs, all its work may still be saved.
        kept_until = end if running else _kept_until(intervals, attempt, attempts[index + 1 :])
        parts = dict.fromkeys(PARTS, 0)
        # Between two attempts of one start of a job its nodes are held.
        held = index > 0 and _is_same_start(attempts[index - 1], attempt)
        wanted = _wanted_from(attempt, free_from, begin) if is_finished else free_from
        parts[IDLE] += wanted - free_from
        parts[Phase.STARTING if held else WAITING] += begin - wanted
        if is_idle(attempt):
            parts[IDLE] += end - begin
            intervals = []
        for interval in intervals:
            lost = interval.phase in WORK and interval.begin >= kept_until
            suspended = _suspended(interval, attempt.suspensions)
            parts[SUSPENDED] += suspended
            parts[LOST if lost else interval.phase] += interval.end - interval.begin - suspended
        if not is_idle(attempt):
            ended = attempt.ended
            is_finished = ended is not None and ended.outcome == Outcome.FINISHED
        splits.append(TimeSplit(parts))
        free_from = end
    return splits


def total(splits: Sequence[TimeSplit]) -> TimeSplit:
    """Return the sum of the splits, part by part."""
    return TimeSplit({part: sum(split.parts[part] for split in splits) for part in PARTS})


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _is_same_start(before: AttemptRecord, attempt: AttemptRecord) -> bool:
    """Return True if one start of one Slurm job made both attempts."""
    job = before.owner.slurm_job_id, before.owner.slurm_restart_count
    return job == (attempt.owner.slurm_job_id, attempt.owner.slurm_restart_count) != (None, None)


def _first_moment(attempts: Sequence[AttemptRecord]) -> int:
    """Return when the wall time begins: at the submission if it is known and was earlier."""
    if not attempts:
        return 0
    submitted, began = attempts[0].owner.submitted_at, _begin(attempts[0])
    return began if submitted is None else min(_milliseconds(submitted), began)


def _wanted_from(attempt: AttemptRecord, free_from: int, begin: int) -> int:
    """Return when a run that was finished is meant to train again: at the submission, if known.

    Args:
        attempt: The first attempt since.
        free_from: The end of the time that is accounted for.
        begin: When the attempt began.
    """
    submitted = attempt.owner.submitted_at
    if submitted is None or is_idle(attempt):
        return begin
    return min(max(free_from, _milliseconds(submitted)), begin)


def _begin(attempt: AttemptRecord) -> int:
    """Return when an attempt began; by its first sign of life if owner.json is damaged."""
    signs = [attempt.owner.began_at, *(mark.at for mark in attempt.phases), attempt.last_heartbeat]
    return _milliseconds(next((at for at in signs if at), 0.0))


def _end(attempt: AttemptRecord) -> int:
    """Return when an attempt ended; by its last sign of life if it left no ended.json."""
    if attempt.ended is not None:
        return _milliseconds(attempt.ended.at)
    phase_changes = (mark.at for mark in attempt.phases)
    return _milliseconds(max(attempt.owner.began_at, attempt.last_heartbeat, *phase_changes))


def _intervals(attempt: AttemptRecord, begin: int, end: int) -> list[Interval]:
    """Cut [begin, end) at each phase change; before the first one the attempt was starting."""
    intervals, since, step = [], begin, 0
    phase: str = Phase.STARTING
    # A phase that a later version added is counted as part of the phase before it.
    for mark in (mark for mark in attempt.phases if mark.phase in PARTS):
        # Never backwards, whatever a clock that was set did to the times in phases.jsonl.
        at = min(max(_milliseconds(mark.at), since), end)
        intervals.append(Interval(since, at, phase, step))
        since, phase, step = at, mark.phase, mark.step
    return [*intervals, Interval(since, end, phase, step)]


def _suspended(interval: Interval, suspensions: Sequence[Suspension]) -> int:
    """Return how many milliseconds of an interval its job was suspended."""
    suspended, counted_to = 0, interval.begin
    for each in sorted(suspensions, key=lambda each: each.at):
        # Two that overlap, as in a damaged file, count once.
        begin = max(_milliseconds(each.at), counted_to)
        end = min(_milliseconds(each.at) + _milliseconds(each.seconds), interval.end)
        suspended += max(0, end - begin)
        counted_to = max(counted_to, end)
    return suspended


def _kept_until(
    intervals: Sequence[Interval], attempt: AttemptRecord, later: Sequence[AttemptRecord]
) -> int:
    """Return the moment from which on the work of an attempt that is over was lost.

    It is the end of the newest save that every later attempt has resumed from or from beyond. A
    user may resume from an old checkpoint by hand, so all later attempts count, not only the next.

    Args:
        intervals: The attempt's time, oldest first.
        attempt: The attempt.
        later: All attempts after it.

    Returns:
        Milliseconds since 1970.
    """
    resumed = [step for each in later if (step := resumed_from(each)) is not None]
    if not resumed and attempt.ended is not None and attempt.ended.outcome == Outcome.FINISHED:
        return intervals[-1].end
    saved = [mark.saved for mark in attempt.phases if mark.saved is not None]
    # If no attempt has resumed it yet, the next one will, from its newest checkpoint.
    step = min(resumed) if resumed else max(saved, default=-1)
    return max(
        (i.end for i in intervals if i.phase == Phase.SAVING and i.step <= step),
        default=intervals[0].begin,
    )


def resumed_from(attempt: AttemptRecord) -> int | None:
    """Return the number of steps that an attempt had when its work began.

    If it never got that far, return the step of the checkpoint that it would have loaded, or None
    if there was none.
    """
    return next(
        (mark.step for mark in attempt.phases if mark.phase in WORK), attempt.owner.checkpoint_step
    )


# ---- progress ----
# Read a run's progress from its files: its steps, how fast it does them, and what it waits for.


RATE_STEPS = 50
"""Rates are means over this many of the latest steps."""
TAIL_BYTES = 256 * 1024
"""Bytes at the end of metrics.jsonl that are read, which may be huge: `RATE_STEPS` steps of some
300 bytes, and some evaluations between them."""
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
    step_seconds: float
    """Mean over the last `RATE_STEPS` steps."""


def read_num_steps(run: Path) -> int | None:
    """Return train.num_steps as submitted, or else as started; None if neither can be read."""
    # Not `load_config`: this has to work on the configs of other versions, too. Nor tomllib, whose
    # time grows with the square of the file in one that was made for it.
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
    return Rates(
        step=last["step"],
        loss_nats=_number(last, "loss_nats", math.nan),
        tokens_per_second=tokens / seconds,
        step_seconds=seconds / len(latest),
    )


def waits_for(attempt: Path, now: float) -> str:
    """Return what the process that made an attempt waits for, and since when; "" if for nothing.

    Args:
        attempt: RUN/attempts/#### of the newest attempt.
        now: Unix seconds.
    """
    waiting, seen = read_waiting(attempt)
    if waiting is None or now - seen > LEASE_SECONDS:
        return ""
    since = time.strftime("%b %d %H:%M:%S", time.localtime(waiting.at))
    return f"waits since {since} for {waiting.what}"


def _number(record: Record, key: str, default: float = 0.0) -> float:
    """Return a number of a record; `default` when it is missing or something else."""
    value = record.get(key)
    if isinstance(value, float) or (type(value) is int and abs(value) < MAX_NUMBER):
        return value
    return default


UNREADABLE = "unreadable"
"""The state of a run whose files cannot be read, which may be so for a moment only."""
SEARCH_DEPTH = 4
"""Levels below runs/ in which a run is looked for."""


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
    """Slurm's state while a training job is in the queue (PENDING, RUNNING, ...). Otherwise one of
    ours: running, waiting, unknown, ended, died, not started, not recorded, unreadable, an outcome.
    """
    reason: str
    """Slurm's reason for the state, the reason for which the last attempt ended, or what keeps the
    run from being read."""
    nodes: str
    """Slurm's node list, or the host; empty if the run holds no nodes."""
    restarts: int
    num_steps: int | None
    """train.num_steps."""
    rates: Rates | None
    ends_at: float | None
    """Unix seconds: when the last step will be done at the current rate, with evaluations and
    checkpoints in between."""
    checkpoint: int | None
    """The step of the newest complete checkpoint."""
    attempts: list[AttemptRecord]
    splits: list[TimeSplit]
    """One per attempt."""
    job: JobState | None
    """The training job in the queue."""
    evaluations: list[JobState]
    """Evaluation jobs in the queue."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that have lost their manifest, and what the last start that did not go on
    from the newest one has set aside, each with the reason."""

    @property
    def step(self) -> int | None:
        """Steps done."""
        if self.rates:
            return self.rates.step
        return self.attempts[-1].step if self.attempts else None

    @property
    def is_over(self) -> bool:
        """True if the run neither runs nor waits, and will not unless somebody starts it again."""
        return self.job is None and self.state not in ("running", "unknown", WAITING, UNREADABLE)


def read_statuses(
    runs: Sequence[Path], now: float | None = None
) -> tuple[list[RunStatus], str | None]:
    """Return the status of each run, and why Slurm did not answer (None if it did).

    All runs share one call of squeue, because squeue(1) warns that many calls in a row slow down
    slurmctld for everybody.

    Args:
        runs: The runs' directories. One that is no run, or cannot be read, gets a status that says
            so, and does not keep the others from theirs.
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
    # Any error at all: files may be damaged in any way, and may be another user's.
    except Exception as error:
        said = " ".join(str(error).split())
        words = said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"
        reason = words.removeprefix(f"{run}: ")
        broken[run] = RunStatus(
            run, UNREADABLE, reason, "", 0, None, None, None, None, [], [], None, []
        )


def ask_slurm(ids: Sequence[str], tries: int = 1) -> Queue:
    """Return what Slurm knows about these jobs. Never raises: see `Queue.away`."""
    try:
        return Queue(slurm.jobs(ids, tries))
    # There may be no Slurm here at all.
    except (slurm.NoSlurm, slurm.SlurmError) as error:
        return Queue(away=str(error))


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Return the runs in `given`, or if it is empty all runs below runs/ or the current directory.

    Of several, what is there and is no run is left out, and named on stderr: a shell's `*` gives
    everything that lies beside the runs.

    Raises:
        ConfigError: A single one of `given` is not a run's directory, or no run was found.
    """
    if len(given) == 1:
        check_run(given[0])
    if given:
        others = [path for path in given if path.exists() and not is_run(path)]
        if len(others) == len(given):
            check_run(others[0])
        if others:
            say(f"no runs: {', '.join(map(str, others))}")
        return [path for path in given if path not in others]
    root = Path("runs") if Path("runs").is_dir() else Path()
    found = []
    for folder, folders, _ in os.walk(root):
        path = Path(folder)
        is_deep = len(path.relative_to(root).parts) >= SEARCH_DEPTH
        names = {name for name in folders if not name.startswith(".") and not is_deep}
        if is_run(path):
            found.append(path)
            # A run may hold thousands of files, and no other run.
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
    if not run.exists():
        raise ConfigError(f"{run}: no such run. `launcher status` lists the runs below runs/")
    if not is_run(run):
        raise ConfigError(
            f"{run}: not a run's directory, it contains none of {', '.join(RUN_MARKS)}. Give the "
            "run.directory of a config"
        )
    check_version(run)


def is_alive(attempt: AttemptRecord, now: float) -> bool:
    """Return True if an attempt has not ended and has sent a heartbeat within its lease."""
    return attempt.ended is None and now - attempt.last_heartbeat < LEASE_SECONDS


def _status(run: Path, sent: Sequence[JobRecord], queue: Queue, now: float) -> RunStatus:
    """Return the status of one run.

    Args:
        run: The run's directory.
        sent: The jobs that were sent for it, oldest first.
        queue: Slurm's answer about these jobs.
        now: Unix seconds.
    """
    attempts = read_attempts(run)
    alive = bool(attempts) and is_alive(attempts[-1], now)
    training = queued(sent, queue, JobKind.TRAIN)
    # Two can be in the queue when one was sent by hand. The running one is of interest.
    newest = training[-1] if training else None
    job = next((job for job in training if job.is_running), newest)
    waits = waits_for(attempts[-1].directory, now) if attempts else ""
    if job:
        state, reason = job.state, (job.reason or waits) + _why_not_launched(run, job)
    elif waits:
        state, reason = WAITING, waits
    else:
        state, reason = _state_without_a_job(run, sent, attempts, alive, queue)
    # A heartbeat may be late because the file system is slow, so Slurm's word that the job runs
    # also counts.
    is_made_by_job = bool(
        job and attempts and attempts[-1].ended is None and _is_attempt_of(attempts[-1], job)
    )
    running = alive or is_made_by_job
    if job and job.is_suspended and running:
        # The supervisor stands still too, and records it when it goes on.
        attempts[-1] = _suspended_since(attempts[-1], now)
    splits = time_splits(attempts, now if running else None)
    rates = read_rates(RunPaths(run).metrics)
    num_steps = read_num_steps(run)
    return RunStatus(
        run=run,
        state=state,
        reason=reason,
        nodes=job.nodes if job else attempts[-1].owner.nodes if alive else "",
        # Slurm's count includes starts that ended before an attempt began.
        restarts=max(sum(not is_idle(each) for each in attempts) - 1, job.restarts if job else 0),
        num_steps=num_steps,
        rates=rates,
        ends_at=_estimated_end(rates, num_steps, splits, now) if running else None,
        checkpoint=newest_checkpoint_step(run),
        attempts=attempts,
        splits=splits,
        job=job,
        evaluations=queued(sent, queue, JobKind.EVALUATE),
        passed_over=(*_damaged(run), *_set_aside(run)),
    )


def _damaged(run: Path) -> Iterator[str]:
    """Yield a line for each checkpoint after the newest complete one that lost its manifest."""
    newest = newest_checkpoint_step(run)
    for path in headless_checkpoints(run):
        if (checkpoint_step(path.name) or 0) > (newest or 0):
            after = "" if newest is None else f"; training would go on from step {newest}"
            yield f"{path.name} is damaged, it has no {MANIFEST}{after}"


def _set_aside(run: Path) -> Iterator[str]:
    """Yield the line about the last turn that the run took away from its checkpoints, if any."""
    turns = [(folder, why) for folder, why in read_abandoned(run) if why.checkpoints]
    for folder, why in turns[-1:]:
        names = ", ".join(sorted(why.checkpoints))
        yield f"{names} is in abandoned/{folder.name}: {why.reason}"


def queued(records: Sequence[JobRecord], queue: Queue, kind: str) -> list[JobState]:
    """Return the jobs of a kind that are in the queue, oldest first.

    Args:
        records: The jobs that were sent for a run, oldest first.
        queue: Slurm's answer about them.
        kind: A `JobKind`.
    """
    states = [
        queue.states[r.job_id] for r in records if r.kind == kind and r.job_id in queue.states
    ]
    return [state for state in states if not state.is_over]


def _is_attempt_of(attempt: AttemptRecord, job: JobState) -> bool:
    """Return True if a running job makes this attempt.

    A requeued job keeps its id, so the restart count has to agree as well.
    """
    return (
        (job.is_running or job.is_suspended)
        and attempt.owner.is_of_job(job.job_id)
        and (attempt.owner.slurm_restart_count or 0) == job.restarts
    )


def _suspended_since(attempt: AttemptRecord, now: float) -> AttemptRecord:
    """Return an attempt whose job is suspended now, since its last sign of life."""
    last = attempt.last_heartbeat
    with contextlib.suppress(OSError):
        last = max(last, (attempt.directory / PROGRESS).stat().st_mtime)
    suspension = Suspension(last, max(0.0, now - last))
    return dataclasses.replace(attempt, suspensions=(*attempt.suspensions, suspension))


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
        records: The jobs that were sent for it, oldest first.
        attempts: Its attempts, oldest first.
        alive: The newest attempt has a fresh heartbeat.
        queue: Slurm's answer about the jobs, which may be none.
    """
    jobs = [record for record in records if record.kind == JobKind.TRAIN]
    newest = attempts[-1] if attempts else None
    # `launcher local`, or a job while Slurm is away.
    if newest is not None and alive:
        return "running", ""
    if newest is None and not jobs:
        # Metrics without an attempt: only a part of the run's directory was copied here.
        return "not recorded" if RunPaths(run).metrics.exists() else "not started", ""
    job_is_newer = bool(jobs) and (newest is None or jobs[-1].submitted_at > newest.owner.began_at)
    # Only an attempt that ended for good, after the last submission, settles it without Slurm.
    if queue.away and jobs and (job_is_newer or newest is None or not _is_final(newest)):
        return "unknown", queue.away
    last = queue.states.get(jobs[-1].job_id) if jobs else None
    if newest is None or job_is_newer:
        # Slurm still knows how the job ended only for some minutes (MinJobAge).
        how = "left the queue"
        if last:
            how = f"{last.state} ({last.reason})" if last.reason else last.state
        ended = f"job {jobs[-1].job_id}: {how} before an attempt began"
        return "ended", ended + (_why_not_launched(run, last) if last else "")
    if newest.ended is not None:
        return in_words(newest.ended.outcome), newest.ended.reason
    seen = time.strftime("%b %d %H:%M", time.localtime(newest.last_heartbeat))
    job = f"job {last.job_id}: {last.state}, " if last else ""
    return "died", f"{job}no sign of life since {seen}"


def _why_not_launched(run: Path, job: JobState) -> str:
    """Return what Slurm's "JobLaunchFailure" most likely means, as the end of a sentence.

    Slurm's own log on the node says it; a user sees only that the job's log was never opened.
    """
    log = RunPaths(run).slurm_log(job.job_id)
    if not job.was_not_launched or log.exists():
        return ""
    return (
        f": node {job.nodes or 'of the job'} could not open {log}. Put run.directory on a file "
        "system that all nodes share, or leave out a node that lacks it (--sbatch exclude=NODE)"
    )


def _is_final(attempt: AttemptRecord) -> bool:
    """Return True if an attempt ended in a way after which no other is made automatically."""
    return attempt.ended is not None and attempt.ended.outcome not in STARTED_AGAIN


def _estimated_end(
    rates: Rates | None, num_steps: int | None, splits: Sequence[TimeSplit], now: float
) -> float | None:
    """Return when the last step will be done, in unix seconds; None before the first step.

    The remaining steps take `rates.step_seconds` each, and evaluations and checkpoints the same
    share of the time as so far: (training + evaluating + saving) / training.

    Args:
        rates: The current progress.
        num_steps: train.num_steps.
        splits: One per attempt.
        now: Unix seconds.
    """
    if rates is None or num_steps is None:
        return None
    spent = {part: sum(split.parts[part] for split in splits) for part in WORK}
    overhead = sum(spent.values()) / spent[Phase.TRAINING] if spent[Phase.TRAINING] else 1.0
    return now + (num_steps - rates.step) * rates.step_seconds * overhead
