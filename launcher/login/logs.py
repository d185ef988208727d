"""Print what a run's ranks print: the log of an attempt, or follow all attempts until the run ends.

Under Slurm all ranks of an attempt share one log, in which srun --label begins each line with the
rank. `launcher local` writes a log for each rank, to which all attempts append.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError
from pretrain.launcher import rank_logs
from pretrain.launcher.login.records import Records, Repeated
from pretrain.launcher.login.status import check_run, read_statuses
from pretrain.launcher.terminal import plain, plain_output
from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.files import open_regular
from pretrain.rundir.jobs import read_jobs
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import STARTED_AGAIN, JobKind, in_words

FIRST_LINES = 20
"""The number of last lines that --follow prints first."""
TAIL_BYTES = 1024 * 1024
"""Bytes at the end of a log that are searched for these lines."""
CHUNK_BYTES = 1024 * 1024
"""Bytes of a log that are read at a time."""
POLL_SECONDS = 0.3
"""Between two looks at a log that has not grown."""
SQUEUE_SECONDS = 5.0
"""Between two calls of squeue that ask if the run is over."""
LABEL = re.compile(rb" {0,9}(\d{1,9}): ?")
"""The label of srun --label before a line: the rank, padded to the width of the largest."""


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
            show(run, rank, number)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Python flushes stdout at exit, and would report the closed pipe there once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(run: Path, rank: int | None = None, number: int | None = None) -> None:
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
    part = None if attempt.owner.slurm_job_id else rank_logs.find_attempt(path, attempt.number)
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
    records = Records()
    end_of_run = _EndOfRun(run, records)
    log: LogReader | None = None
    attempt: AttemptRecord | None = None
    if records.newest_attempt(run) is None:
        print(
            plain(f"{run}: no attempt has begun; waiting for the first one. {_why_no_log(run)}"),
            file=sys.stderr,
            flush=True,
        )
    while True:
        newest = records.newest_attempt(run)
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
            self._first = list(self._last(last_lines))

    def read(self) -> list[bytes]:
        """Return new lines, about `CHUNK_BYTES` of them at most; [] at the end of the log."""
        if self._first:
            lines, self._first = self._first, []
            return lines
        # A chunk may hold lines of other ranks only: [] would be taken for the end.
        while self._open() and (chunk := self._chunk()):
            if lines := list(self._select(chunk)):
                return lines
        return []

    def last_line(self) -> list[bytes]:
        """Return the last line if it has no end, or []; call it when nothing more is written.

        It may be what a rank printed just before it was killed.
        """
        return list(self._select(b"\n")) if self._rest else []

    def _chunk(self) -> bytes:
        assert self._file is not None
        size = CHUNK_BYTES if self._left is None else min(CHUNK_BYTES, self._left)
        chunk = self._file.read(size)
        if self._left is not None:
            self._left -= len(chunk)
        return chunk

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
        return list(self._select(self._file.read()))[-count:]

    def _select(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the complete lines of the rank, and keep the rest for the next chunk."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > CHUNK_BYTES:
            # Not a line of text. It must not fill the memory.
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            label = LABEL.match(line)
            if self._rank is None:
                yield line + b"\n"
            elif label and int(label[1]) == self._rank:
                yield line[label.end() :] + b"\n"


class _EndOfRun:
    """Find out if a run is over, from its newest attempt or else from Slurm.

    Slurm has to say so in two answers in a row: between an attempt and its restart there is a
    moment in which no attempt is alive and no job is running.
    """

    def __init__(self, run: Path, records: Records) -> None:
        self._run, self._records = run, records
        self._status = Repeated(lambda: read_statuses([run], records=records)[0][0], SQUEUE_SECONDS)
        self._last_answer = ""

    def reason(self, newest: AttemptRecord | None) -> str:
        """Return how the run ended; "" while it goes on."""
        ended = newest.ended if newest else None
        if newest and ended and ended.outcome not in STARTED_AGAIN and not self._is_sent(newest):
            return f"{self._run}: {in_words(ended.outcome)}: {ended.reason}"
        status = self._status.new()
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
            for record in self._records.read(read_jobs, self._run, RunPaths(self._run).jobs)
        )


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
