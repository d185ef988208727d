"""Cancel a run's jobs (`launcher cancel`) or start them again (`launcher requeue`)."""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import ConfigError, RunFailed
from pretrain.launcher import evaluations, slurm
from pretrain.launcher.slurm import JobState
from pretrain.launcher.status import (
    Queue,
    ask_slurm,
    check_run,
    is_alive,
    queued,
)
from pretrain.launcher.supervise import Repeater
from pretrain.launcher.terminal import plain
from pretrain.rundir.attempts import (
    HEARTBEAT_SECONDS,
    AttemptRecord,
    Progress,
    is_finished,
    read_attempts,
)
from pretrain.rundir.checkpoints import checkpoint_name, newest_checkpoint_step
from pretrain.rundir.jobs import JobRecord, append_job, read_jobs, read_launch
from pretrain.rundir.paths import STARTED_AGAIN, ExitCode, JobKind, RunPaths, in_words
from pretrain.rundir.trust import check_trusted, read_trusted

POLL_SECONDS = 0.5
"""Between two looks at the files of an attempt."""
SQUEUE_SECONDS = 5.0
"""Between two calls of squeue."""


def cancel(run: Path, save: bool) -> None:
    """Cancel a run's jobs, or with `save` let its training write a checkpoint and stop.

    With `save` this waits until training has stopped. Pending training jobs are cancelled at once,
    and evaluation jobs go on.

    Args:
        run: The run's directory.
        save: Save first.

    Raises:
        ConfigError: The run has no job to cancel.
        RunFailed: Slurm refused or does not answer, or the checkpoint was not saved.
    """
    _check_readable(run)
    check_run(run)
    check_trusted(run)
    records = read_jobs(run)
    training, evaluating = _jobs_in_queue(run, records, JobKind.TRAIN, JobKind.EVALUATE)
    if not training and (save or not evaluating):
        raise ConfigError(f"{run}: {_why_no_job(run, 'nothing to cancel')}")
    if not save:
        # First, or the supervisor would send another job for each evaluation cancelled below.
        evaluations.pause(run)
    for job in training:
        if save and not job.is_starting:
            _save_and_stop(run, job)
            continue
        slurm.cancel(job.job_id)
        # Slurm sends SIGTERM to running processes, and SIGKILL after KillWait (30 s by default).
        # The ranks save on SIGTERM, which succeeds if it is faster than that.
        effect = "was waiting" if job.is_pending else "may save until Slurm kills it (KillWait)"
        print(f"job {job.job_id}: cancelled; it {effect}")
    for job in evaluating:
        if save:
            print(f"job {job.job_id}: evaluates a checkpoint, not cancelled")
        else:
            slurm.cancel(job.job_id)
            print(f"job {job.job_id}: cancelled; it was to evaluate a checkpoint")


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
    _check_readable(run)
    check_run(run)
    check_trusted(run)
    records = read_jobs(run)
    [training] = _jobs_in_queue(run, records, JobKind.TRAIN)
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
    attempts = read_attempts(run)
    sent = [record for record in records if record.kind == JobKind.TRAIN]
    # The attempt of a job that has left the queue is over, even if its lease has not expired yet.
    # One that runs outside Slurm goes on.
    trained_outside_slurm = (
        bool(attempts)
        and is_alive(attempts[-1], time.time())
        and attempts[-1].owner.slurm_job_id is None
    )
    if not sent or trained_outside_slurm:
        why = _why_no_job(run, "nothing to requeue")
        raise ConfigError(f"{run}: {why}. `launcher submit` submits a run to Slurm")
    _submit_again(run, sent[-1])


def _requeue_job(run: Path, job: JobState) -> None:
    """Let a job in the queue start again, or print that it will start anyway.

    Raises:
        RunFailed: The job is held, so Slurm will not start it.
    """
    if job.is_running or job.is_suspended:
        if not _attempts_of(run, job):
            print(
                f"job {job.job_id}: is starting, and no attempt has begun, so there is nothing to "
                "save. If it must start once more, ask again when it trains"
            )
            return
        _resume(run, job)
        # To the batch script alone, which passes it to the supervisor: that passes it on to the
        # ranks, and asks for the requeue when they have saved.
        slurm.signal(job.job_id, "USR1", batch=True)
        print(
            f"job {job.job_id}: asked to save and start again; follow it with `launcher logs "
            f"{shlex.quote(str(run))} --follow`"
        )
    elif job.is_held:
        release = slurm.order("release", job.job_id)
        raise RunFailed(f"job {job.job_id}: is held ({job.reason}). Release it with `{release}`")
    else:
        reason = f" ({job.reason})" if job.reason else ""
        print(f"job {job.job_id}: {job.state}{reason}, starts by itself")


def _jobs_in_queue(run: Path, records: Sequence[JobRecord], *kinds: str) -> list[list[JobState]]:
    """Return a run's jobs in Slurm's queue, one list per kind.

    Raises:
        SlurmAway: Slurm gave no answer.
    """
    queue = ask_slurm([record.job_id for record in records], slurm.TRIES)
    if queue.away:
        raise slurm.SlurmAway(
            f"{run}: the states of its jobs are unknown: {queue.away}. Try again later"
        )
    return [queued(records, queue, kind) for kind in kinds]


def _why_no_job(run: Path, consequence: str) -> str:
    """Return why a run has no job in the queue: it runs outside Slurm, or how it ended."""
    attempts = read_attempts(run)
    if attempts and is_alive(attempts[-1], time.time()):
        owner = attempts[-1].owner
        return (
            f"is trained by {owner}, and not by a job of this run. On that host, "
            f"`kill {owner.pid}` lets it save and stop"
        )
    ended = attempts[-1].ended if attempts else None
    how = f" ({ended.outcome}: {ended.reason})" if ended else ""
    return f"no job in the queue{how}; {consequence}"


# ---- save and stop ----
def _save_and_stop(run: Path, job: JobState) -> None:
    """Ask a job to save and stop, and wait until its attempt has ended.

    SIGTERM goes to the supervisor and not to the ranks, because the supervisor would take an end
    of ranks that it did not ask for as a failure, and start them again. A job that is COMPLETING
    is about to end, so this only waits for it.

    Raises:
        RunFailed: The attempt ended without a checkpoint, or the job is suspended and stays so.
    """
    if not job.is_ending:
        if not _attempts_of(run, job):
            slurm.cancel(job.job_id)
            print(f"job {job.job_id}: cancelled; no attempt had begun, so it had nothing to save")
            return
        _resume(run, job)
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


def _resume(run: Path, job: JobState) -> None:
    """Let a job go on if it is suspended: its processes stand still and could not save.

    Slurm answers before its nodes have done so, and a node drops signals to what is suspended. So
    this waits for a sign of life, for a time in which one is due.

    Raises:
        RunFailed: The user may not do that.
    """
    if not job.is_suspended:
        return
    before = _sign_of_life(run, job)
    try:
        slurm.resume(job.job_id)
    except slurm.SlurmAway:
        raise
    except slurm.SlurmError as error:
        order = slurm.order("resume", job.job_id)
        raise RunFailed(
            f"job {job.job_id}: is suspended, so it cannot save, and it was left as it is. Only an "
            f"operator of the cluster can resume it, with `{order}` ({error})"
        ) from None
    print(f"job {job.job_id}: was suspended; resumed", flush=True)
    deadline = time.monotonic() + 2 * HEARTBEAT_SECONDS
    while _sign_of_life(run, job) == before and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _sign_of_life(run: Path, job: JobState) -> tuple[float, Progress | None]:
    """Return what changes while a job with an attempt is not suspended."""
    attempt = _attempts_of(run, job)[-1]
    return attempt.last_heartbeat, attempt.progress


def _attempts_of(run: Path, job: JobState) -> list[AttemptRecord]:
    """Return the attempts that a job has begun since Slurm started it for the last time.

    Once there is one, the launcher in the job handles signals.

    Args:
        run: The run's directory.
        job: Its job.
    """
    # A requeued job keeps its id: attempts before that differ in the count.
    return [
        attempt
        for attempt in read_attempts(run)
        if attempt.owner.is_of_job(job.job_id)
        and (attempt.owner.slurm_restart_count or 0) == job.restarts
    ]


def _newest(run: Path) -> str:
    """Return the end of a message: the newest complete checkpoint of the run."""
    step = newest_checkpoint_step(run)
    if step is None:
        return "; it has no checkpoint"
    return f"; newest checkpoint {checkpoint_name(step)}"


def _wait_for_end(run: Path, job: JobState) -> AttemptRecord | None:
    """Print the phases of a job's attempt until no other attempt follows, or the job has ended.

    Returns:
        The last attempt, or None if the job ended before it began one.
    """
    printed = ""
    answers = Repeater(SQUEUE_SECONDS, lambda: ask_slurm([job.job_id]))
    answers.start()
    while True:
        # Slurm is asked as well, because a killed node leaves an attempt without an end. It is
        # asked before the files are read, so an end that was written until then is seen.
        job_is_over = _is_over(job, answers.new())
        attempts = _attempts_of(run, job)
        attempt = attempts[-1] if attempts else None
        # After another outcome the job may have begun the next attempt before it was asked to stop.
        settled = attempt and attempt.ended and attempt.ended.outcome not in STARTED_AGAIN
        if job_is_over or settled:
            return attempt
        progress = attempt.progress if attempt else None
        if progress and progress.phase != printed:
            printed = progress.phase
            print(f"  {printed}, step {progress.step}", flush=True)
        time.sleep(POLL_SECONDS)


def _is_over(job: JobState, queue: Queue | None) -> bool:
    """Return True if a job that was asked to stop has ended.

    One that had asked to be started again before is in the queue once more. It is cancelled.

    Args:
        job: The job as it was.
        queue: Slurm's new answer; None while there is none.
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


def _check_readable(run: Path) -> None:
    """Check that this user can read which jobs a run has.

    Raises:
        ConfigError: A file is another user's and cannot be read, which is not the same as missing.
    """
    paths = RunPaths(run)
    for path in (run, paths.jobs, paths.attempts, paths.launch, paths.launch_record):
        try:
            # A pipe in the place of a file must not be waited for.
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except PermissionError:
            raise ConfigError(
                f"{path}: you may not read it. Its jobs can be cancelled and requeued by its "
                "owner, and by an operator of the cluster"
            ) from None
        except OSError:
            continue


# ---- submit again ----
def _submit_again(run: Path, record: JobRecord) -> None:
    """Submit once more what `launcher submit` or `launcher sweep` left in RUN/launch.

    Args:
        run: The run's directory.
        record: The last training job that was sent for it.

    Raises:
        ConfigError: RUN/launch is incomplete.
        SlurmError: Slurm refused the job.
    """
    launch_script = RunPaths(run).launch_script
    arguments = list(read_launch(run).sbatch)
    try:
        script = read_trusted(launch_script)
    except OSError as error:
        raise ConfigError(
            f"{launch_script}: cannot be read ({error.strerror}). Submit the run again"
        ) from None
    index = record.array_index
    if index is not None:
        # Still an array, of this run's task alone: the script chooses the run by
        # SLURM_ARRAY_TASK_ID, and the other runs of the sweep may still have their jobs.
        arguments = slurm.of_one_task(arguments, index, record.name)
    number = slurm.submit_script(arguments, script)
    # Undo the pause of an earlier `launcher cancel`.
    evaluations.resume(run)
    job_id = number if index is None else f"{number}_{index}"
    append_job(run, dataclasses.replace(record, job_id=job_id, submitted_at=time.time()))
    print(plain(f"{run}: had no job any more; submitted again as job {job_id}{_newest(run)}"))
