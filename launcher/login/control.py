"""Ending a run's jobs, or starting them again."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import ConfigError, RunFailed
from pretrain.launcher import evaluations, slurm
from pretrain.launcher.login.status import ask, check_run, is_alive, queued
from pretrain.launcher.slurm import JobState
from pretrain.rundir.attempts import AttemptRecord, is_finished, read_attempts
from pretrain.rundir.checkpoints import checkpoint_name, newest_checkpoint_step
from pretrain.rundir.jobs import JobRecord, append_job, read_jobs, read_launch
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.states import ExitCode, JobKind, in_words

POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0  # between two questions to Slurm


def cancel(run: Path, save: bool) -> None:
    """Ends a run: all its jobs at once, or with `save` its training after a checkpoint, for which this waits.

    Raises ConfigError when it has no job, RunFailed when Slurm refuses or a checkpoint was asked for and not saved.
    """
    check_run(run)
    records = read_jobs(run)
    training, evaluating = _in_queue(run, records, JobKind.TRAIN, JobKind.EVALUATE)
    if not training and (save or not evaluating):
        raise ConfigError(f"{run}: {_no_job(run, 'nothing to cancel')}")
    if not save:
        evaluations.pause(run)  # or those cancelled would be sent again
    for job in training:
        if save and job.state in ("RUNNING", "COMPLETING"):
            _save_and_stop(run, job)
        else:
            slurm.cancel(job.job_id)
            waited = job.state == "PENDING"
            print(
                f"job {job.job_id}: cancelled; it {'was waiting' if waited else 'may save in the time Slurm leaves it'}"
            )
    for job in evaluating:
        if save:
            print(f"job {job.job_id}: evaluates a checkpoint, left alone")
        else:
            slurm.cancel(job.job_id)
            print(f"job {job.job_id}: cancelled; it was to evaluate a checkpoint")


def requeue(run: Path) -> None:
    """Has a run's job save and start again; sends another when it has none. Raises ConfigError, RunFailed as `cancel`."""
    check_run(run)
    records = read_jobs(run)
    [training] = _in_queue(run, records, JobKind.TRAIN)
    for job in training:
        if job.state == "RUNNING":
            slurm.signal(job.job_id, "USR1", batch=True)
            print(
                f"job {job.job_id}: asked to save and start again; see `launcher logs {shlex.quote(str(run))} --follow`"
            )
        elif "held" in job.reason.lower():
            raise RunFailed(
                f"job {job.job_id}: is held ({job.reason}). Release it with `scontrol release {job.job_id}`"
            )
        else:
            print(
                f"job {job.job_id}: {job.state}{f' ({job.reason})' if job.reason else ''}, starts by itself"
            )
    if training:
        return
    if is_finished(run):
        raise ConfigError(
            f"{run}: is finished. To train it further, submit it with more train.num_steps"
        )
    attempts = read_attempts(run)
    sent = [record for record in records if record.kind == JobKind.TRAIN]
    if not sent or (
        attempts and is_alive(attempts[-1], time.time()) and attempts[-1].owner.slurm_job_id is None
    ):
        raise ConfigError(
            f"{run}: {_no_job(run, 'nothing to requeue')}. `launcher submit` sends a run to Slurm"
        )
    _submit_again(run, sent[-1])


def _in_queue(run: Path, records: Sequence[JobRecord], *kinds: str) -> list[list[JobState]]:
    """The jobs in Slurm's queue, a list a kind. Raises SlurmAway when Slurm does not say."""
    queue = ask([record.job_id for record in records])
    if queue.away:
        raise slurm.SlurmAway(f"{run}: its jobs cannot be seen: {queue.away}. Try again later")
    return [queued(records, queue, kind) for kind in kinds]


def _no_job(run: Path, nothing: str) -> str:
    attempts = read_attempts(run)
    if attempts and is_alive(attempts[-1], time.time()):
        owner = attempts[-1].owner
        return f"is made by {owner}, in no job of this run. There, `kill {owner.pid}` lets it save and stop"
    ended = attempts[-1].ended if attempts else None
    return f"no job in the queue{f' ({ended.outcome}: {ended.reason})' if ended else ''}; {nothing}"


# ---- save and stop ---------------------------------------------------------------------------------------------------
def _save_and_stop(run: Path, job: JobState) -> None:
    """The supervisor is told, not the ranks alone: it then takes no end of theirs for a failure to be mended."""
    if job.state == "RUNNING":
        slurm.signal(job.job_id, "TERM", batch=True)
    print(
        f"job {job.job_id}: asked to save and stop; waiting for it (Ctrl-C ends only the waiting)",
        flush=True,
    )
    try:
        attempt = _wait_for_end(run, job)
    except KeyboardInterrupt:
        print(f"no longer waiting; `launcher status {shlex.quote(str(run))}` shows how it ends")
        return
    if attempt is None or attempt.ended is None:
        raise RunFailed(
            f"job {job.job_id}: ended without a word, so nothing was saved{_newest(run)}"
        )
    ended = attempt.ended
    if ended.code not in (ExitCode.FINISHED, ExitCode.RESTART, ExitCode.STOPPED):
        raise RunFailed(f"{run}: {in_words(ended.outcome)}: {ended.reason}{_newest(run)}")
    print(f"{run}: {ended.outcome} after step {ended.step}{_newest(run)}")


def _newest(run: Path) -> str:
    step = newest_checkpoint_step(run)
    return (
        "; it has no checkpoint" if step is None else f"; newest checkpoint {checkpoint_name(step)}"
    )


def _wait_for_end(run: Path, job: JobState) -> AttemptRecord | None:
    """Says what it does until its attempt has ended, or its job has. None: the job made no attempt."""
    said, looked = "", time.monotonic()
    while True:
        over = False
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            state = ask([job.job_id])
            over = not state.away and (
                job.job_id not in state.states or state.states[job.job_id].is_over
            )
        made = [
            a
            for a in read_attempts(run)
            if a.owner.slurm_job_id == job.raw_id
            and (a.owner.slurm_restart_count or 0) == job.restarts
        ]
        attempt = made[-1] if made else None
        if over or (attempt and attempt.ended):
            return attempt
        phase = attempt.progress if attempt else None
        if phase and phase.phase != said:
            said = phase.phase
            print(f"  {said}, step {phase.step}", flush=True)
        time.sleep(POLL_SECONDS)


# ---- once more -------------------------------------------------------------------------------------------------------
def _submit_again(run: Path, record: JobRecord) -> None:
    """Sends what `launcher submit` or `sweep` left in RUN/launch; of an array, this run's task alone."""
    paths = RunPaths(run)
    arguments = list(read_launch(run).sbatch)
    try:
        script = paths.launch_script.read_text()
    except OSError as error:
        raise ConfigError(
            f"{paths.launch_script}: cannot be read ({error.strerror}). Submit the run again"
        ) from None
    index = record.array_index
    if index is not None:
        arguments = [
            f"--array={index}" if word.startswith("--array=") else word for word in arguments
        ]
    number = slurm.submit(arguments, script)
    evaluations.resume(run)
    job_id = number if index is None else f"{number}_{index}"
    append_job(run, dataclasses.replace(record, job_id=job_id, submitted_at=time.time()))
    if index is not None:
        try:
            slurm.rename(job_id, record.name)
        except slurm.SlurmError as error:
            print(f"warning: job {job_id} keeps the array's name: {error}")
    print(f"{run}: had no job any more; sent again as job {job_id}{_newest(run)}")
