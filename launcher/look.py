"""Print what a run's ranks print: the log of an attempt, or follow all attempts until the run ends.

Under Slurm all ranks of an attempt share one log, in which srun --label begins each line with the
rank. `launcher local` writes a log for each rank, to which all attempts append.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO

from tqdm import tqdm

from pretrain.config import ConfigError
from pretrain.config.errors import columns
from pretrain.launcher import slurm, terminal
from pretrain.launcher.status import (
    PARTS,
    WAITING,
    RunStatus,
    TimeSplit,
    check_run,
    find_runs,
    read_num_steps,
    read_statuses,
    time_splits,
    total,
)
from pretrain.launcher.supervise import Repeater, failing_nodes
from pretrain.launcher.terminal import plain, plain_output, say
from pretrain.rundir.attempts import AttemptRecord, read_attempt, read_attempts
from pretrain.rundir.checkpoints import checkpoint_name, named_by_step, newest_checkpoint_step
from pretrain.rundir.files import open_regular
from pretrain.rundir.history import steps_lost
from pretrain.rundir.jobs import read_jobs, read_local_launch
from pretrain.rundir.paths import (
    ENDED_WELL,
    STARTED_AGAIN,
    ExitCode,
    JobKind,
    RunPaths,
    attempt_directory,
    attempt_numbers,
    in_words,
)

# ---- Format what `launcher status` prints: a table of runs, or one run ----


HEAD = "RUN STATE STEP LOSS TOKENS/S GOODPUT ENDS CHECKPOINT RESTARTS JOB NODES REASON"
"""The columns of the table, the most important ones first: a terminal cuts off what is too long."""
RIGHT = {"STEP", "LOSS", "TOKENS/S", "GOODPUT", "CHECKPOINT", "RESTARTS"}
"""Columns that are aligned to the right."""


def show_status(given: Sequence[Path]) -> None:
    """Run `launcher status`.

    Args:
        given: The runs; with none given, all below runs/. A single one is printed in detail.

    Raises:
        ConfigError: One of `given` is not a run's directory, or there are no runs.
    """
    statuses, away = read_statuses(find_runs(given))
    # Runs that have ended are shown from their own files, so Slurm's absence is of no interest.
    live = ("running", WAITING, "unknown")
    if away and any(status.state in live for status in statuses):
        print(f"Slurm gave no answer, so job states are missing ({plain(away)})")
    print(detail(statuses[0]) if len(given) == 1 else table(statuses))


def table(statuses: Sequence[RunStatus]) -> str:
    """Return a table with one line per run, which a terminal that is narrow cuts off."""
    heads = HEAD.split()
    right = {number for number, head in enumerate(heads) if head in RIGHT}
    width = shutil.get_terminal_size((0, 0)).columns or None
    return "\n".join(line[:width] for line in columns([heads, *map(_row, statuses)], right))


def detail(status: RunStatus) -> str:
    """Return all about one run: its state, its progress, its attempts and where their time went."""
    lines = [plain(str(status.run))]
    lines += _field("state", ", ".join([status.state, *_job_and_nodes(status)]))
    lines += _field("reason", status.reason)
    lines += _field("started by", _started_by(status))
    lines += _field("step", _progress(status))
    if status.checkpoint is not None:
        lines += _field("checkpoint", checkpoint_name(status.checkpoint))
    for line in status.passed_over:
        lines += _field("passed over", line)
    lines += _field("evaluations", _evaluations(status))
    if status.splits:
        attempts = _attempts(status.attempts, status.splits)
        lines += ["", *attempts, "", *_failures(status.attempts)]
        lines += [goodput_line(total(status.splits))]
    return "\n".join(lines)


def summary(run: Path) -> str:
    """Return three lines on a run that has ended: its progress, its time split and its goodput."""
    attempts = read_attempts(run)
    splits = time_splits(attempts)
    if not attempts:
        return f"{plain(str(run))}: no attempt yet"
    newest, num_steps, checkpoint = attempts[-1], read_num_steps(run), newest_checkpoint_step(run)
    outcome = in_words(newest.ended.outcome) if newest.ended else "not ended"
    step = str(newest.ended.step if newest.ended else newest.step)
    if num_steps:
        step += f" of {num_steps}"
    plural = "" if len(attempts) == 1 else "s"
    saved = "no checkpoint"
    if checkpoint is not None:
        saved = f"newest checkpoint {checkpoint_name(checkpoint)}"
    whole = total(splits)
    spent = ", ".join(
        f"{part} {duration(whole.parts[part])}" for part in PARTS if whole.parts[part]
    )
    return "\n".join(
        [
            plain(f"{run}: {outcome} at step {step}, {len(attempts)} attempt{plural}, {saved}"),
            f"time: {spent or '0:00:00'}; {duration(whole.wall)} in total",
            goodput_line(whole),
        ]
    )


def print_end(run: Path, code: int, command: Sequence[str] = ()) -> None:
    """Print what the time of a run was spent on, and how one that was stopped goes on.

    Nothing is printed for a run that failed: the error should be the last thing on the terminal.

    Args:
        run: The run's directory.
        code: The exit code of its last attempt.
        command: The command that goes on with it.
    """
    if code in (ExitCode.FINISHED, ExitCode.STOPPED):
        print(summary(run), file=sys.stderr, flush=True)
    if command and code in STOPPED_BY_USER:
        print_stopped(run, command)


def print_stopped(run: Path, command: Sequence[str]) -> None:
    """Print what a run that was stopped has saved and lost, and the command that goes on."""
    saved = newest_checkpoint_step(run)
    attempts = read_attempts(run)
    ended = attempts[-1].ended if attempts else None
    lost = steps_lost(ended.step, saved) if ended else ""
    words = "nothing is saved" if saved is None else f"{checkpoint_name(saved)} is saved"
    line = plain(f"{run}: {words}" + (f", and {lost} lost" if lost else ""))
    say(f"{line}; go on with:\n  {shlex.join(command)}")


def goodput_line(whole: TimeSplit) -> str:
    """Return "goodput: 91.2 % of the time it held its nodes, 60.3 % of the wall time"."""
    held, wall = percent(whole.goodput, 1), percent(whole.goodput_of_wall, 1)
    return f"goodput: {held} of the time it held its nodes, {wall} of the wall time"


# ---- the table's cells ----
def _row(status: RunStatus) -> tuple[str, ...]:
    """Return the cells of a run, in the order of `COLUMNS`."""
    rates = status.rates
    step = "" if status.step is None else str(status.step)
    if step and status.num_steps:
        step += f"/{status.num_steps}"
    return (
        plain(str(status.run)),
        plain(status.state),
        step,
        f"{rates.loss_nats:.3f}" if rates else "",
        tqdm.format_sizeof(rates.tokens_per_second) if rates else "",
        percent(total(status.splits).goodput) if status.splits else "",
        moment(status.ends_at) if status.ends_at else "",
        "" if status.checkpoint is None else str(status.checkpoint),
        str(status.restarts),
        status.job.job_id if status.job else "",
        plain(status.nodes),
        plain(status.reason),
    )


# ---- the details of one run ----
def _field(name: str, text: str) -> list[str]:
    """Return a line with a name and its value; no line if there is no value."""
    return [f"  {name:<12}{plain(text)}"] if text else []


def _started_by(status: RunStatus) -> str:
    """Return the command that last started the run on a single machine, and where it was given."""
    attempts = [each for each in status.attempts if each.owner.slurm_job_id is None]
    launch = read_local_launch(status.run) if attempts else None
    return f"{shlex.join(launch.command)} (in {launch.directory})" if launch else ""


def _job_and_nodes(status: RunStatus) -> list[str]:
    """Return the job, its nodes, and when it will end or start, as far as they are known."""
    job, words = status.job, []
    if job:
        words.append(f"job {job.job_id}")
    if status.nodes:
        words.append(f"on {status.nodes}")
    if job and job.is_running and job.ends_at:
        words.append(f"time limit at {moment(job.ends_at)}")
    # Slurm has an estimate only for pending jobs that its backfill scheduler has looked at.
    if job and job.is_pending and job.started_at:
        words.append(f"estimated start {moment(job.started_at)}")
    return words


def _progress(status: RunStatus) -> str:
    """Return the steps done, the rates, and what the run does now."""
    if status.step is None:
        return f"none of {status.num_steps} yet" if status.num_steps else ""
    words = [str(status.step)]
    if status.num_steps:
        percentage = f"{100 * status.step / status.num_steps:.1f} %"
        words = [f"{status.step} of {status.num_steps} ({percentage})"]
    if status.rates:
        words.append(f"{tqdm.format_sizeof(status.rates.tokens_per_second)} tokens/s")
        words.append(f"loss {status.rates.loss_nats:.3f}")
    if status.attempts and status.ends_at and status.attempts[-1].phases:
        words.append(f"now {status.attempts[-1].phases[-1].phase}")
        words.append(f"estimated end {moment(status.ends_at)}")
    return ", ".join(words)


def _evaluations(status: RunStatus) -> str:
    """Return how many checkpoints --evaluate-checkpoints has evaluated, and the jobs for others."""
    paths = RunPaths(status.run)
    if not paths.evaluation_plan.exists():
        return ""
    results = named_by_step(paths.evaluations)
    done = sum((result / "curve.json").exists() for result in results)
    jobs = [f"job {job.job_id} {job.state}" for job in status.evaluations]
    return ", ".join([f"{done} done", *jobs])


def _attempts(attempts: Sequence[AttemptRecord], splits: Sequence[TimeSplit]) -> list[str]:
    """Return a table of attempts with their time splits, and the sum if there are several."""
    heads = ["attempt", "began", "end", *PARTS, "sum"]
    rows = []
    for attempt, split in zip(attempts, splits):
        outcome = plain(in_words(attempt.ended.outcome)) if attempt.ended else ""
        began = moment(attempt.owner.began_at)
        rows.append([str(attempt.number), began, outcome, *_split(split)])
    if len(rows) > 1:
        rows.append(["all", "", "", *_split(total(splits))])
    right = {number for number, head in enumerate(heads) if head not in ("began", "end")}
    lines = columns([[head.upper() for head in heads], *rows], right, gap=" ")
    return [f"  {line}" for line in lines]


def _split(split: TimeSplit) -> list[str]:
    """Return the cells of a time split, in the order of `PARTS`, and their sum."""
    return [
        *(duration(split.parts[part]) if split.parts[part] else "-" for part in PARTS),
        duration(split.wall),
    ]


def _failures(attempts: Sequence[AttemptRecord]) -> list[str]:
    """Return why attempts failed and which nodes are excluded, a line each, then an empty line."""
    lines = [
        f"  attempt {attempt.number}: {plain(attempt.ended.reason)}"
        for attempt in attempts
        if attempt.ended and attempt.ended.outcome not in ENDED_WELL
    ]
    # Of the newest job alone: another one may be given these nodes again.
    job = attempts[-1].owner.slurm_job_id if attempts else None
    excluded = failing_nodes([each for each in attempts if each.owner.slurm_job_id == job])
    lines += [
        f"  node {node}: not used any more if Slurm has others: {why}"
        for node, why in excluded.items()
    ]
    return [*lines, ""] if lines else []


# ---- numbers and times ----
def duration(milliseconds: int) -> str:
    """Return a duration: 0:00:42, 3:59:00, 12 days, 4:00:00; "ages" beyond all clocks."""
    try:
        return str(timedelta(seconds=round(milliseconds / 1000)))
    except OverflowError:
        return "ages"


def moment(at: float) -> str:
    """Return a local time; "never" for one that no calendar has, as in a damaged file."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "never"


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share as text: "91 %" for 0.912, "-" for None."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


STOPPED_BY_USER = (ExitCode.STOPPED, ExitCode.INTERRUPTED)
"""Exit codes of a run that its user stopped."""
FIRST_LINES = 20
"""The number of last lines that --follow prints first."""
TAIL_BYTES = 1024 * 1024
"""Bytes at the end of a log that are searched for these lines."""
CHUNK_BYTES = 1024 * 1024
"""Bytes of a log that are read at a time."""
POLL_SECONDS = 0.5
"""Between two looks at a log that has not grown."""
SQUEUE_SECONDS = 5.0
"""Between two calls of squeue that ask if the run is over."""


def print_log(run: Path, rank: int | None, number: int | None, following: bool) -> None:
    """Run `launcher logs`. Ctrl-C, or a closed pipe (to `head` or a pager), is no error.

    Args:
        run: The run's directory.
        rank: Print only this rank's lines; None: all.
        number: The attempt; None: the newest.
        following: Follow the newest attempt, and those after it, until the run ends.

    Raises:
        ConfigError: There is no such log.
    """
    try:
        if following:
            print(plain(follow(run, rank)), file=sys.stderr)
        else:
            show_log(run, rank, number)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Python flushes stdout at exit, and would report the closed pipe there once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_log(run: Path, rank: int | None = None, number: int | None = None) -> None:
    """Write the log of an attempt to stdout.

    Args:
        run: The run's directory.
        rank: Only this rank's lines; None: all.
        number: The attempt; None: the newest.

    Raises:
        ConfigError: There is no such attempt or rank, or it has no log yet.
    """
    check_run(run)
    attempts = read_attempts(run)
    if not attempts:
        raise ConfigError(f"{run}: no attempt has begun, so there is no log. {_why_no_log(run)}")
    attempt = attempts[-1]
    if number is not None:
        found = [a for a in attempts if a.number == number]
        if not found:
            raise ConfigError(
                f"--attempt {number}: no such attempt. {run} has attempts {attempts[0].number} to "
                f"{attempts[-1].number}"
            )
        attempt = found[0]
    path, label = _find_log(run, attempt, rank)
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file, because the attempt's ranks have not started. "
            f"{_why_no_log(run)}"
        )
    part = None if attempt.owner.slurm_job_id else terminal.find_attempt(path, attempt.number)
    if part is None and number is not None and not attempt.owner.slurm_job_id:
        raise ConfigError(
            f"--attempt {number}: {path} has no line with which it begins, so the file was changed "
            "since. Remove --attempt"
        )
    log = LogReader(path, label, part=part or (0, None))
    while lines := log.read():
        _write(lines)
    _write(log.last_line())


def follow(run: Path, rank: int | None = None) -> str:
    """Write the last lines of the newest attempt's log, then all new lines until the run ends.

    Later attempts are followed as well, so this goes on across restarts and requeues.

    Args:
        run: The run's directory.
        rank: Only this rank's lines; None: all.

    Returns:
        How the run ended.

    Raises:
        ConfigError: There is no such rank, or its output goes to a terminal.
    """
    check_run(run)
    end_of_run = _EndOfRun(run)
    end_of_run.asking.start()
    try:
        return _follow(run, rank, end_of_run)
    finally:
        end_of_run.asking.stop(0)


def _follow(run: Path, rank: int | None, end_of_run: _EndOfRun) -> str:
    """Do what `follow` says."""
    log: LogReader | None = None
    attempt: AttemptRecord | None = None
    if _newest_attempt(run) is None:
        print(
            plain(f"{run}: no attempt has begun; waiting for the first one. {_why_no_log(run)}"),
            file=sys.stderr,
            flush=True,
        )
    while True:
        newest = _newest_attempt(run)
        # Before the log is read, so that it contains all that was printed until this end.
        end = end_of_run.reason(newest)
        lines = log.read() if log else []
        _write(lines)
        # The old log is read to its end before the next attempt's is begun.
        if newest and (attempt is None or (newest.number > attempt.number and not lines)):
            path, label = _find_log(run, newest, rank)
            # Without Slurm, a rank has one log of all attempts, which is simply read on.
            if log is None or path != log.path:
                if log is not None:
                    _write(log.last_line())
                log = LogReader(path, label, FIRST_LINES if log is None else None)
            if attempt is not None:
                print(f"attempt {newest.number}:", file=sys.stderr, flush=True)
            attempt = newest
        elif end and not lines:
            if log is not None:
                _write(log.last_line())
            return end
        elif not lines:
            time.sleep(POLL_SECONDS)


class LogReader:
    """Read a growing log in whole lines, of all ranks or of one."""

    def __init__(
        self,
        path: Path,
        rank: int | None,
        last_lines: int | None = None,
        part: tuple[int, int | None] = (0, None),
    ) -> None:
        """Prepare to read a log, which need not exist yet.

        Args:
            path: The log.
            rank: Only lines with this rank's label are returned, without the label; None: all.
            last_lines: Begin with this many of the last lines; None: begin with the first line.
            part: Where to begin, and where to end; None: at the end of the file.
        """
        self.path, self._rank = path, rank
        # The beginning of a line of which the end has not been written yet.
        self._rest = b""
        self._file: IO[bytes] | None = None
        self._first: list[bytes] = []
        self._begin, self._left = part[0], None if part[1] is None else part[1] - part[0]
        if last_lines is not None and self._open():
            self._first = self._last(last_lines)

    def read(self) -> list[bytes]:
        """Return new lines, about `CHUNK_BYTES` of them; [] at the end of the log."""
        lines, self._first = self._first, []
        size = sum(map(len, lines))
        # Lines of other ranks alone would be taken for the end.
        while (not lines or size < CHUNK_BYTES) and (text := self._readline()):
            size += len(text)
            self._rest += text
            # A line that is as long as a chunk is not one of text. It must not fill the memory.
            if self._rest.endswith(b"\n") or len(self._rest) >= CHUNK_BYTES:
                lines += self.last_line()
        return lines

    def last_line(self) -> list[bytes]:
        """Return what there is of a line, or []; call it when nothing more is written.

        It may be what a rank printed just before it was killed.
        """
        if not self._rest:
            return []
        line, self._rest = self._rest.removesuffix(b"\n"), b""
        rank, text = slurm.labelled(line) or (None, line)
        if self._rank is None:
            return [line + b"\n"]
        return [text + b"\n"] if rank == self._rank else []

    def _readline(self) -> bytes:
        """Return the next line, or what there is of it; b"" at the end."""
        if self._file is None and not self._open():
            return b""
        assert self._file is not None
        size = CHUNK_BYTES if self._left is None else min(CHUNK_BYTES, self._left)
        text = self._file.readline(size)
        if self._left is not None:
            self._left -= len(text)
        return text

    def _open(self) -> bool:
        """Open the log if it exists; return True if it is open."""
        if self._file is None and self.path.is_file():
            self._file = open_regular(self.path)
            self._file.seek(self._begin)
        return self._file is not None

    def _last(self, count: int) -> list[bytes]:
        """Return the last `count` lines, and move to the end of the log."""
        assert self._file is not None
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - TAIL_BYTES))
        if size > TAIL_BYTES:
            # Most likely the second part of a line.
            self._file.readline()
        lines: list[bytes] = []
        while more := self.read():
            lines += more
        return lines[-count:]


class _EndOfRun:
    """Find out if a run is over, from its newest attempt or else from Slurm.

    Slurm has to say so in two answers in a row: between an attempt and its restart there is a
    moment in which no attempt is alive and no job is running.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        # In a thread, because Slurm may take long to answer.
        self.asking = Repeater(SQUEUE_SECONDS, lambda: read_statuses([run])[0][0])
        self._last_answer = ""

    def reason(self, newest: AttemptRecord | None) -> str:
        """Return how the run ended; "" while it goes on."""
        ended = newest.ended if newest else None
        if newest and ended and ended.outcome not in STARTED_AGAIN and not self._is_sent(newest):
            return f"{self._run}: {in_words(ended.outcome)}: {ended.reason}"
        status: RunStatus | None = self.asking.new()
        if status is None:
            return ""
        answer = f"{self._run}: {status.state}: {status.reason}" if status.is_over else ""
        confirmed = bool(answer) and answer == self._last_answer
        self._last_answer = answer
        return answer if confirmed else ""

    def _is_sent(self, newest: AttemptRecord) -> bool:
        """Return True if a training job was sent after the newest attempt had begun."""
        owner = newest.owner
        return any(
            record.kind == JobKind.TRAIN
            and record.job_id != owner.slurm_job_id
            and record.submitted_at > owner.began_at
            for record in read_jobs(self._run)
        )


def _newest_attempt(run: Path) -> AttemptRecord | None:
    """Return the newest attempt at a run; None before the first."""
    number = max(attempt_numbers(RunPaths(run).attempts), default=0)
    return read_attempt(attempt_directory(run, number)) if number else None


def _find_log(run: Path, attempt: AttemptRecord, rank: int | None) -> tuple[Path, int | None]:
    """Find the log of an attempt.

    Args:
        run: The run's directory.
        attempt: The attempt.
        rank: The rank whose lines are wanted; None: all, and without Slurm those of rank 0.

    Returns:
        The log, and the rank whose label to look for in it; None if all its lines are wanted.

    Raises:
        ConfigError: The attempt has no such rank.
    """
    paths, num_ranks = RunPaths(run), attempt.owner.num_processes
    if rank is not None and rank >= num_ranks:
        raise ConfigError(
            f"--rank {rank}: no such rank. Attempt {attempt.number} of {run} has ranks 0 to "
            f"{num_ranks - 1}"
        )
    if attempt.owner.slurm_job_id is not None:
        return paths.attempt_log(attempt.number), rank
    return paths.rank_log(rank or 0), None


def _why_no_log(run: Path) -> str:
    """Return what a run without a log is waiting for, and which other log may say more."""
    [status], away = read_statuses([run])
    reason = status.reason or away
    words = [f"It is {status.state} ({reason})" if reason else f"It is {status.state}"]
    jobs = [record for record in read_jobs(run) if record.kind == JobKind.TRAIN]
    if jobs and (path := RunPaths(run).slurm_log(jobs[-1].job_id)).exists():
        words.append(f"the output of its batch script is in {path}")
    return "; ".join(words)


def _write(lines: list[bytes]) -> None:
    """Write lines to stdout: to a file or a pipe byte for byte, to a terminal what it may get."""
    if lines:
        is_terminal = sys.stdout.isatty()
        sys.stdout.buffer.writelines(map(plain_output, lines) if is_terminal else lines)
        sys.stdout.buffer.flush()
