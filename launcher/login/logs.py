"""What a run's ranks print: the log of an attempt, of all ranks or one, followed across restarts until the run ends."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError
from pretrain.launcher.login.status import check_run, look
from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.jobs import read_jobs
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import STARTED_AGAIN, JobKind, in_words

FIRST_LINES = 20  # what --follow shows of the past
FIRST_BYTES = 1024 * 1024  # it looks for them in the last of the log
CHUNK_BYTES = 1024 * 1024
POLL_SECONDS = 0.3
LOOK_SECONDS = 5.0  # between two questions to Slurm whether the run is over
LABEL = re.compile(rb" *(\d+): ?")  # srun --label


def print_log(run: Path, rank: int | None, number: int | None, following: bool) -> None:
    """`launcher logs`: ends quietly on Ctrl-C, and when who reads it (a pager, head) has enough."""
    try:
        if following:
            print(follow(run, rank), file=sys.stderr)
        else:
            show(run, rank, number)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # nothing is left to be flushed into the pipe


def show(run: Path, rank: int | None = None, number: int | None = None) -> None:
    """Writes an attempt's log to stdout: the newest's, or that of attempt `number`. Raises ConfigError without one."""
    check_run(run)
    attempts = read_attempts(run)
    if not attempts:
        raise ConfigError(f"{run}: no attempt has begun, so there is no log. {_waiting(run)}")
    attempt = attempts[-1]
    if number is not None:
        found = [a for a in attempts if a.number == number]
        if not found:
            raise ConfigError(
                f"--attempt {number}: {run} has attempts {attempts[0].number} to {attempts[-1].number}"
            )
        attempt = found[0]
    path, wanted = _log(run, attempt, rank, number is not None)
    if not path.exists():
        raise ConfigError(
            f"{path}: not there; the attempt's ranks have not started. {_waiting(run)}"
        )
    log = Log(path, wanted)
    while lines := log.read():
        _write(lines)


def follow(run: Path, rank: int | None = None) -> str:
    """Writes the last lines of the newest attempt's log, then all that comes, of later attempts too, until the run ends.

    Returns how it ended. Raises ConfigError where there is no log to follow.
    """
    check_run(run)
    over, log, attempt = _Over(run), None, None  # type: _Over, Log | None, AttemptRecord | None
    if not read_attempts(run):
        print(
            f"{run}: no attempt has begun; waiting for the first. {_waiting(run)}",
            file=sys.stderr,
            flush=True,
        )
    while True:
        attempts = read_attempts(run)
        end = over.why(
            attempts
        )  # asked before the log is read: what was printed until then is in it
        newest = attempts[-1] if attempts else None
        lines = log.read() if log else []
        _write(lines)
        if newest and (attempt is None or (newest.number > attempt.number and not lines)):
            path, wanted = _log(run, newest, rank, False)
            if log is None or path != log.path:
                log = Log(path, wanted, FIRST_LINES if log is None else None)
            if attempt is not None:
                print(f"attempt {newest.number}:", file=sys.stderr, flush=True)
            attempt = newest
        elif end and not lines:
            return end
        elif not lines:
            time.sleep(POLL_SECONDS)


class Log:
    """Reads a growing log in whole lines; of one rank, without its label, when `rank` is given."""

    def __init__(self, path: Path, rank: int | None, last_lines: int | None = None) -> None:
        """Begins at the first line, or with the last `last_lines`. The file need not be there yet."""
        self.path, self._rank, self._rest = path, rank, b""
        self._file: IO[bytes] | None = None
        self._first: list[bytes] = []
        if last_lines is not None and self._open():
            self._first = list(self._last(last_lines))

    def read(self) -> list[bytes]:
        """The lines that have come since, at most about `CHUNK_BYTES` of them; none: at the end for now."""
        if self._first:
            lines, self._first = self._first, []
            return lines
        while self._open() and self._file is not None and (chunk := self._file.read(CHUNK_BYTES)):
            if lines := list(self._select(chunk)):
                return lines
        return []

    def _open(self) -> bool:
        if self._file is None and self.path.exists():
            self._file = self.path.open("rb")
        return self._file is not None

    def _last(self, count: int) -> list[bytes]:
        assert self._file is not None
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - FIRST_BYTES))
        if size > FIRST_BYTES:
            self._file.readline()  # cut
        return list(self._select(self._file.read()))[-count:]

    def _select(self, chunk: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            label = LABEL.match(line)
            if self._rank is None:
                yield line + b"\n"
            elif label and int(label[1]) == self._rank:
                yield line[label.end() :] + b"\n"


class _Over:
    """Whether a run is over: its newest attempt says so, or Slurm does, twice in a row: a restart takes a moment."""

    def __init__(self, run: Path) -> None:
        self._run, self._looked, self._said = run, time.monotonic(), ""

    def why(self, attempts: list[AttemptRecord]) -> str:
        """How the run ended; "" while it goes on."""
        ended = attempts[-1].ended if attempts else None
        if ended and ended.outcome not in STARTED_AGAIN:
            return f"{self._run}: {in_words(ended.outcome)}: {ended.reason}"
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return ""
        [status], _ = look([self._run])
        said = f"{self._run}: {status.state}: {status.reason}" if status.is_over else ""
        certain = bool(said) and said == self._said
        self._looked, self._said = time.monotonic(), said
        return said if certain else ""


def _log(
    run: Path, attempt: AttemptRecord, rank: int | None, one_attempt: bool
) -> tuple[Path, int | None]:
    """An attempt's log, and the rank to look for in it."""
    paths, ranks = RunPaths(run), attempt.owner.num_processes
    if rank is not None and rank >= ranks:
        raise ConfigError(
            f"--rank {rank}: attempt {attempt.number} of {run} has ranks 0 to {ranks - 1}"
        )
    if attempt.owner.slurm_job_id is not None:
        return paths.attempt_log(attempt.number), rank
    if not rank:
        others = f"; --rank 1 to {ranks - 1} have logs" if ranks > 1 else ""
        raise ConfigError(
            f"{run}: attempt {attempt.number} runs without Slurm, and its rank 0 writes to the terminal where "
            f"it was started{others}"
        )
    if one_attempt:
        raise ConfigError(
            f"--attempt: without Slurm a rank has one log of all attempts, {paths.rank_log(rank)}"
        )
    return paths.rank_log(rank), None


def _waiting(run: Path) -> str:
    """What a run without a log is waiting for, and where else to look."""
    [status], away = look([run])
    words = [
        f"It is {status.state}" + (f" ({status.reason or away})" if status.reason or away else "")
    ]
    jobs = [record for record in read_jobs(run) if record.kind == JobKind.TRAIN]
    if jobs:
        # The jobs of a sweep's array write into the folder above.
        found = [RunPaths(folder).slurm_log(jobs[-1].job_id) for folder in (run, run.parent)]
        words += [f"what its job said is in {path}" for path in found if path.exists()]
    return "; ".join(words)


def _write(lines: list[bytes]) -> None:
    if lines:
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()
