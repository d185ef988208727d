"""Read what a run's ranks print (`launcher logs`), cancel its jobs or start them again.

Under Slurm all ranks of an attempt share one log, in which srun --label begins each line with the
rank. `launcher local` writes a log for each rank, to which all attempts append.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from pretrain.config import ConfigError, RunFailed
from pretrain.config.errors import plain_output
from pretrain.launcher import evaluations, slurm, slurm_job
from pretrain.launcher.slurm import JobState
from pretrain.launcher.status import (
    Queue,
    RunStatus,
    ask_slurm,
    attempts_of,
    check_run,
    is_alive,
    queued,
    read_statuses,
)
from pretrain.launcher.submit import link_log
from pretrain.processes import Repeater
from pretrain.rundir.attempts import AttemptRecord, is_finished, read_attempt, read_attempts
from pretrain.rundir.checkpoints import checkpoint_name, newest_checkpoint_step
from pretrain.rundir.files import open_regular
from pretrain.rundir.jobs import JobRecord, append_job, read_jobs, read_launch
from pretrain.rundir.paths import (
    STARTED_AGAIN,
    ExitCode,
    JobKind,
    Phase,
    RunPaths,
    attempt_directory,
    attempt_numbers,
    in_words,
)
from pretrain.rundir.trust import check_trusted, read_trusted

POLL_SECONDS = 0.5
"""Between two looks at the files of an attempt."""
SQUEUE_SECONDS = 5.0
"""Between two calls of squeue."""
ASK_AGAIN_SECONDS = 10.0
"""Between two signals to a job that does not save yet."""
SAVES = (Phase.SAVING, Phase.ENDING)
FIRST_LINES = 20
"""The number of existing lines that --follow prints first."""
CHUNK_BYTES = 1024 * 1024
"""A longer line is printed in pieces of this size."""


# ---- logs ----------------------------------------------------------------------------------------
def print_log(run: Path, rank: int | None, following: bool) -> None:
    """Run `launcher logs`. Ctrl-C, or a closed pipe (to `head` or a pager), is no error.

    Args:
        run: The run's directory.
        rank: Print only this rank's lines; None: all.
        following: Follow the newest attempt, and those after it, until the run ends.

    Raises:
        ConfigError: There is no such log.
    """
    check_run(run)
    # In a thread, because Slurm may take long to answer.
    asking = Repeater(SQUEUE_SECONDS, lambda: read_statuses([run])[0][0])
    try:
        if following:
            asking.start()
            print(_follow(run, rank, asking), file=sys.stderr)
        else:
            show_log(run, rank)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Python flushes stdout at exit, and would report the closed pipe there once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        asking.stop(0)


def show_log(run: Path, rank: int | None = None) -> None:
    """Write the log of the newest attempt to stdout; without Slurm, the log of all attempts.

    Args:
        run: The run's directory.
        rank: Only this rank's lines; None: all.

    Raises:
        ConfigError: There is no such rank, or no log yet.
    """
    check_run(run)
    attempts = read_attempts(run)
    if not attempts:
        raise ConfigError(f"{run}: no attempt has begun, so there is no log. {_why_no_log(run)}")
    log = _find_log(run, attempts[-1], rank)
    if not log.path.is_file():
        raise ConfigError(
            f"{log.path}: no such file. Only ranks that a launcher has started write one. "
            f"{_why_no_log(run)}"
        )
    _write(log.read(to_end=True))


def _follow(run: Path, rank: int | None, asking: Repeater) -> str:
    """Write the last lines of the newest attempt's log, then all new lines until the run ends.

    Later attempts are followed as well, so this goes on across restarts and requeues.

    Returns:
        How the run ended.
    """
    log: LogReader | None = None
    attempt: AttemptRecord | None = None
    last_answer = ""
    while True:
        number = max(attempt_numbers(RunPaths(run).attempts), default=0)
        newest = read_attempt(attempt_directory(run, number)) if number else None
        # Asked before the log is read, so that the log contains everything printed before this end.
        status: RunStatus | None = asking.new()
        end = ""
        if status is not None:
            answer = f"{run}: {status.state}: {status.reason}" if status.is_over else ""
            # Two answers in a row must say that the run is over: between an attempt and its restart
            # there is a moment in which no attempt is alive and no job is running.
            end, last_answer = answer if answer == last_answer else "", answer
            if not number and answer != end:
                print(f"{run}: no attempt has begun. {_why_no_log(run)}", file=sys.stderr)
        # The old log is read to its end before the next attempt's is begun.
        is_new = newest is not None and (attempt is None or newest.number > attempt.number)
        if log:
            _write(log.read(to_end=is_new or bool(end)))
        if newest is not None and is_new:
            found = _find_log(run, newest, rank)
            if log is None:
                _write(deque(found.read(), FIRST_LINES))
            # Without Slurm, a rank has one log for all attempts, and the reader keeps its place.
            log = log if log and found.path == log.path else found
            if attempt is not None:
                print(f"attempt {newest.number}:", file=sys.stderr, flush=True)
            attempt = newest
        elif end:
            return end
        else:
            time.sleep(POLL_SECONDS)


class LogReader:
    """Read a growing log in whole lines, of all ranks or of one."""

    def __init__(self, path: Path, rank: int | None) -> None:
        """Prepare to read a log, which need not exist yet.

        Args:
            path: The log.
            rank: Only lines with this rank's label are returned, without the label; None: all.
        """
        self.path, self._rank = path, rank
        # The beginning of a line of which the end has not been written yet.
        self._rest = b""
        self._file: IO[bytes] | None = None

    def read(self, to_end: bool = False) -> Iterator[bytes]:
        """Yield the new lines.

        Args:
            to_end: Nothing more will be written, so also yield an incomplete last line: a rank may
                have printed it just before it was killed.
        """
        if self._file is None and self.path.is_file():
            try:
                self._file = open_regular(self.path)
            except OSError as error:
                raise ConfigError(f"{error.filename}: {error.strerror}") from None
        while self._file and (text := self._file.readline(CHUNK_BYTES)):
            self._rest += text
            # A line as long as a chunk is not text, and keeping more of it could fill the memory.
            if self._rest.endswith(b"\n") or len(self._rest) >= CHUNK_BYTES:
                yield from self._line()
        if to_end and self._rest:
            yield from self._line()

    def _line(self) -> Iterator[bytes]:
        """Yield the line that was read, if it belongs to the rank."""
        line, self._rest = self._rest.removesuffix(b"\n"), b""
        rank, text = slurm.labelled(line) or (None, line)
        if self._rank is None:
            yield line + b"\n"
        elif rank == self._rank:
            yield text + b"\n"


def _find_log(run: Path, attempt: AttemptRecord, rank: int | None) -> LogReader:
    """Return the log of an attempt.

    Args:
        run: The run's directory.
        attempt: The attempt.
        rank: The rank whose lines are wanted; None: all, and without Slurm those of rank 0.

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
        return LogReader(paths.attempt_log(attempt.number), rank)
    return LogReader(paths.rank_log(rank or 0), None)


def _why_no_log(run: Path) -> str:
    """Return the state of a run without a log, and which other log may say more."""
    [status], away = read_statuses([run])
    reason = status.reason or away
    words = [f"State: {status.state} ({reason})" if reason else f"State: {status.state}"]
    jobs = read_jobs(run, JobKind.TRAIN)
    if jobs and (path := RunPaths(run).slurm_log(jobs[-1].job_id)).exists():
        words.append(f"the output of its batch script is in {path}")
    return "; ".join(words)


def _write(lines: Iterable[bytes]) -> None:
    """Write lines to stdout: unchanged to a file or a pipe, made harmless for a terminal."""
    sys.stdout.buffer.writelines(map(plain_output, lines) if sys.stdout.isatty() else lines)
    sys.stdout.buffer.flush()


# ---- cancel and requeue --------------------------------------------------------------------------
def cancel(run: Path, save: bool) -> None:
    """Cancel a run's jobs, or with `save` let its training write a checkpoint and stop.

    With `save` this waits until training has stopped. Pending training jobs are cancelled at once,
    and evaluation jobs go on.

    Args:
        run: The run's directory.
        save: Save a checkpoint first.

    Raises:
        ConfigError: The run has no job to cancel.
        RunFailed: Slurm refused or does not answer, or the checkpoint was not saved.
    """
    training, evaluating = _jobs_in_queue(run, JobKind.TRAIN, JobKind.EVALUATE)
    if not training and (save or not evaluating):
        raise ConfigError(f"{run}: {_why_no_job(run, 'nothing to cancel')}")
    with contextlib.ExitStack() as undo:
        if not save:
            # First, or the supervisor would send another job for each evaluation cancelled below.
            evaluations.pause(run)
            undo.callback(evaluations.resume, run)
        for job in training:
            if save and not job.is_starting:
                _save_and_stop(run, job)
                continue
            slurm.cancel(job.job_id)
            # Slurm sends SIGTERM to running processes, and SIGKILL after KillWait (30 s by
            # default). The ranks save on SIGTERM, which succeeds if it is faster than that.
            effect = "was waiting" if job.is_pending else "may save until Slurm kills it (KillWait)"
            print(f"job {job.job_id}: cancelled; it {effect}")
        for job in evaluating:
            if save:
                print(f"job {job.job_id}: evaluates a checkpoint, not cancelled")
            else:
                slurm.cancel(job.job_id)
                print(f"job {job.job_id}: cancelled; it was to evaluate a checkpoint")
        undo.pop_all()


def requeue(run: Path) -> None:
    """Let a run's running job save and start again, or submit another job if the run has none.

    A running job gets SIGUSR1, as before its time limit, and not `scontrol requeue`, which would
    kill it without a checkpoint.

    Args:
        run: The run's directory.

    Raises:
        ConfigError: The run was never submitted, or is trained outside Slurm.
        RunFailed: Slurm refused or does not answer, or the job is held.
    """
    [training] = _jobs_in_queue(run, JobKind.TRAIN)
    for job in training:
        _requeue_job(run, job)
    if training:
        return
    if is_finished(run):
        print(
            f"{run}: is finished; nothing to do. To train it further, increase train.num_steps and "
            "submit it again"
        )
        return
    sent = read_jobs(run, JobKind.TRAIN)
    # The attempt of a job that has left the queue is over, even if its lease has not expired yet,
    # but an attempt outside Slurm may still be training.
    holder = _holder(read_attempts(run))
    if not sent or (holder and holder.owner.slurm_job_id is None):
        why = _why_no_job(run, "nothing to requeue")
        raise ConfigError(f"{run}: {why}. `launcher submit` submits a run to Slurm")
    _submit_again(run, sent[-1])


def _holder(attempts: Sequence[AttemptRecord]) -> AttemptRecord | None:
    """Return the newest attempt if it is alive."""
    return attempts[-1] if attempts and is_alive(attempts[-1], time.time()) else None


def _requeue_job(run: Path, job: JobState) -> None:
    """Let a job in the queue start again, or print that it will start anyway.

    Raises:
        RunFailed: The job is held, suspended or ending.
    """
    if job.is_running or job.is_suspended:
        if not attempts_of(read_attempts(run), job):
            print(
                f"job {job.job_id}: is starting, and no attempt has begun, so there is nothing to "
                "save. If it must start once more, ask again when it trains"
            )
            return
        _check_not_suspended(job)
        # Only to the batch script, which passes the signal to the supervisor. The supervisor passes
        # it on to the ranks, and asks for the requeue when they have saved.
        slurm.signal(job.job_id, "USR1", batch=True)
        print(
            f"job {job.job_id}: asked to save and start again; follow it with `launcher logs "
            f"{shlex.quote(str(run))} --follow`"
        )
    elif job.is_held:
        release = slurm.order("release", job.job_id)
        raise RunFailed(f"job {job.job_id}: is held ({job.reason}). Release it with `{release}`")
    elif job.is_starting or _starts_again(run, job):
        reason = f" ({job.reason})" if job.reason else ""
        print(f"job {job.job_id}: {job.state}{reason}, starts by itself")
    else:
        raise RunFailed(f"job {job.job_id}: {job.state}. Ask again when it has ended")


def _starts_again(run: Path, job: JobState) -> bool:
    """Return True for a job that is ending to be requeued: Slurm counts its next start already."""
    last = [each.owner for each in read_attempts(run) if each.owner.is_of_job(job.job_id)][-1:]
    return bool(last) and not last[0].is_of_start(job.job_id, job.restarts)


def _jobs_in_queue(run: Path, *kinds: str) -> list[list[JobState]]:
    """Return the jobs of one of this user's runs in Slurm's queue, one list per kind.

    Raises:
        ConfigError: This is not a run, or it is another user's.
        SlurmAway: Slurm gave no answer.
    """
    check_run(run)
    check_trusted(run)
    records = read_jobs(run)
    queue = ask_slurm([record.job_id for record in records], slurm.TRIES)
    if queue.away:
        raise slurm.SlurmAway(
            f"{run}: the states of its jobs are unknown: {queue.away}. Try again later"
        )
    return [queued(records, queue, kind) for kind in kinds]


def _why_no_job(run: Path, consequence: str) -> str:
    """Return why a run has no job in the queue: it is trained outside Slurm, or has ended."""
    attempts = read_attempts(run)
    if holder := _holder(attempts):
        owner = holder.owner
        return (
            f"is trained by {owner}, and not by a job of this run. On that host, "
            f"`kill {owner.pid}` lets it save and stop"
        )
    ended = attempts[-1].ended if attempts else None
    how = f" ({ended.outcome}: {ended.reason})" if ended else ""
    return f"no job in the queue{how}; {consequence}"


def _save_and_stop(run: Path, job: JobState) -> None:
    """Ask a job to save and stop, and wait until its attempt has ended.

    SIGTERM goes to the supervisor and not to the ranks, because if ranks ended without its request,
    the supervisor would take that for a failure and start them again. A job that is COMPLETING is
    about to end, so this only waits for it.

    Raises:
        RunFailed: The attempt ended without a checkpoint, or the job is suspended.
    """
    if not job.is_ending:
        if not attempts_of(read_attempts(run), job):
            slurm.cancel(job.job_id)
            print(f"job {job.job_id}: cancelled; no attempt had begun, so it had nothing to save")
            return
        _check_not_suspended(job)
        slurm.signal(job.job_id, "TERM", batch=True)
    print(
        f"job {job.job_id}: asked to save and stop; waiting for it (Ctrl-C only stops the waiting)",
        flush=True,
    )
    try:
        attempt = _wait_for_end(run, job)
    except KeyboardInterrupt:
        print(f"not waiting any more; `launcher status {shlex.quote(str(run))}` shows how it ends")
        return
    if attempt is None or attempt.ended is None:
        raise RunFailed(
            f"job {job.job_id}: ended without recording how, so nothing was saved{_newest(run)}"
        )
    ended = attempt.ended
    if ended.code not in (ExitCode.FINISHED, ExitCode.RESTART, ExitCode.STOPPED):
        raise RunFailed(f"{run}: {in_words(ended.outcome)}: {ended.reason}{_newest(run)}")
    print(f"{run}: {ended.outcome} after step {ended.step}{_newest(run)}")


def _check_not_suspended(job: JobState) -> None:
    """Raise RunFailed for a suspended job, whose processes are stopped and cannot save."""
    if job.is_suspended:
        resume = slurm.order("resume", job.job_id)
        raise RunFailed(
            f"job {job.job_id}: is suspended, so it cannot save. An operator of the cluster can "
            f"resume it, with `{resume}`"
        )


def _newest(run: Path) -> str:
    """Return the end of a message: the newest complete checkpoint of the run."""
    step = newest_checkpoint_step(run)
    if step is None:
        return "; it has no checkpoint"
    return f"; newest checkpoint {checkpoint_name(step)}"


def _wait_for_end(run: Path, job: JobState) -> AttemptRecord | None:
    """Print the phases of a job's attempt until no other attempt follows, or the job has ended.

    A node drops signals to a job that is still suspended there: `scontrol resume` returns before
    the nodes have resumed the job, and scancel reports no error. So the signal is repeated until
    the job saves.

    Returns:
        The last attempt, or None if the job ended before it began an attempt.
    """
    printed, asked_at = "", time.monotonic()
    answers = Repeater(SQUEUE_SECONDS, lambda: ask_slurm([job.job_id]))
    answers.start()
    while True:
        # Slurm is asked as well, because a killed node leaves an attempt without a recorded end.
        # Slurm is asked before the files are read, so that an end written before is always seen.
        job_is_over = _is_over(job, answers.new())
        attempts = attempts_of(read_attempts(run), job)
        attempt = attempts[-1] if attempts else None
        # After outcomes in STARTED_AGAIN the job may have begun another attempt before the signal.
        settled = attempt and attempt.ended and attempt.ended.outcome not in STARTED_AGAIN
        if job_is_over or settled:
            return attempt
        progress = attempt.progress if attempt else None
        if progress and progress.phase != printed:
            printed = progress.phase
            print(f"  {printed}, step {progress.step}", flush=True)
        if time.monotonic() - asked_at > ASK_AGAIN_SECONDS and printed not in SAVES:
            # Slurm refuses the signal if the job is ending.
            with contextlib.suppress(slurm.SlurmError):
                slurm.signal(job.job_id, "TERM", batch=True)
            asked_at = time.monotonic()
        time.sleep(POLL_SECONDS)


def _is_over(job: JobState, queue: Queue | None) -> bool:
    """Return True if a job that was asked to stop has ended.

    A job that had already asked to be requeued is back in the queue. It is cancelled.

    Args:
        job: The job as it was.
        queue: Slurm's new answer; None if there is no new answer.
    """
    if queue is None or queue.away:
        return False
    now = queue.states.get(job.job_id)
    if now is None or now.is_over:
        return True
    starts_again = now.is_starting or now.restarts > job.restarts
    if starts_again:
        slurm.cancel(job.job_id)
    return starts_again


def _submit_again(run: Path, record: JobRecord) -> None:
    """Submit again the job that `launcher submit` or `launcher sweep` left in RUN/launch.

    Args:
        run: The run's directory.
        record: The last training job that was submitted for the run.

    Raises:
        ConfigError: RUN/launch is incomplete, or the run was moved since RUN/launch was written.
        SlurmError: Slurm refused the job.
    """
    if os.path.realpath(record.run) != os.path.realpath(run):
        # The batch script has the former path, and would start whatever is there now.
        config = RunPaths(run).launch_config
        raise ConfigError(
            f"{run}: was submitted as {record.run}, and moved since. Submit it from its new path: "
            f"`launcher submit {shlex.quote(str(config))} --set run.directory={run} ...`"
        )
    launch_script = RunPaths(run).launch_script
    launch = read_launch(run)
    arguments, index = list(launch.sbatch), launch.array_index
    try:
        script = read_trusted(launch_script)
    except OSError as error:
        raise ConfigError(
            f"{launch_script}: cannot be read ({error.strerror}). Submit the run again"
        ) from None
    # Undo the pause of an earlier `launcher cancel`.
    evaluations.resume(run)
    if index is not None:
        # Still an array, but with this run's task alone: the script chooses the run by
        # SLURM_ARRAY_TASK_ID, and the other runs of the sweep may still have their jobs.
        arguments = slurm_job.of_one_task(arguments, index, record.name)
    number = slurm.submit_script(arguments, script)
    job_id = number if index is None else f"{number}_{index}"
    append_job(run, dataclasses.replace(record, job_id=job_id, submitted_at=time.time()))
    if index is not None:
        link_log(run, job_id, slurm_job.log_folder(arguments))
    print(f"{run}: had no job any more; submitted again as job {job_id}{_newest(run)}")
