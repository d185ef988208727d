"""Refuse a job that could not train before its time limit, or that Slurm could never start.

How long saving and starting take is measured by the run's earlier attempts; before the first one
it is estimated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.config import ConfigError, num_parameters
from pretrain.launcher import slurm
from pretrain.launcher.cluster import seconds_of
from pretrain.launcher.job import Job, check_time
from pretrain.launcher.login.allocation import TrainingRun
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.states import Outcome, Phase

BYTES_PER_SECOND = 200e6
"""Assumed bandwidth of a modest shared file system."""
EARLY_SECONDS = 60
"""Slurm may send the signal of --signal up to 60 seconds earlier than specified, sbatch(1)."""
STEP_SECONDS = 60.0
"""Assumed duration of a step, for a run that has not taken one yet."""
START_SECONDS = 60.0
"""Assumed time in which Python and its libraries are loaded and the ranks find each other."""


@dataclass(frozen=True)
class Partition:
    """A partition, as scontrol shows it."""

    name: str
    is_default: bool
    """Jobs that name no partition go here."""
    default_seconds: int | None
    """The time limit of a job that names none; None: no limit."""
    max_seconds: int | None
    """The longest time limit; None: no limit."""
    nodes: int
    """All its nodes, whatever their state."""


def signal_seconds(run: TrainingRun) -> int:
    """Return how many seconds before the time limit Slurm should ask the run for a checkpoint.

    It is 2 x save + step + 60 s: the signal may arrive during a regular save or a step, which are
    completed first, the checkpoint itself has to be written, and Slurm may signal early. The
    times are the longest that the run's attempts have recorded. Before any were, a checkpoint is
    assumed to be written at 200 MB/s, and a step to take a minute.
    """
    saves, steps = [], []
    for attempt in read_attempts(run.directory):
        for number, (begin, end) in enumerate(zip(attempt.phases, attempt.phases[1:])):
            if begin.phase == Phase.SAVING:
                # A checkpoint is written beside training, and completed some steps later. A save
                # that was cut off has no `saved`, and would make saving look too fast.
                later = attempt.phases[number + 1 :]
                saves += [m.at - begin.at for m in later if (m.saved or -1) >= begin.step][:1]
            elif begin.phase == Phase.TRAINING and end.step > begin.step:
                steps.append((end.at - begin.at) / (end.step - begin.step))
    save_seconds = max(saves, default=_checkpoint_seconds(run))
    step_seconds = max(steps, default=STEP_SECONDS)
    return EARLY_SECONDS + math.ceil(2 * save_seconds + step_seconds)


def start_seconds(run: TrainingRun) -> tuple[int, bool]:
    """Return how long an attempt takes until its first step, and True if that was measured.

    It is the longest time that the run's attempts took. An attempt that was asked to save before
    its first step took longer than it had. Before the first attempt it is a minute, and the time
    in which a checkpoint is read.
    """
    taken = []
    for attempt in read_attempts(run.directory):
        first = [mark.at for mark in attempt.phases if mark.phase == Phase.TRAINING][:1]
        if not first and attempt.ended and attempt.ended.outcome == Outcome.RESTART:
            first = [attempt.ended.at]
        taken += [at - attempt.owner.began_at for at in first if attempt.owner.began_at]
    if taken:
        return math.ceil(max(taken)), True
    return math.ceil(START_SECONDS + _checkpoint_seconds(run)), False


def _checkpoint_seconds(run: TrainingRun) -> float:
    """Return the estimated time in which a checkpoint is written or read."""
    return num_parameters(run.config) * run.config.state_bytes / BYTES_PER_SECOND


def check_times(runs: Sequence[TrainingRun], time_limit: str | None, lead_seconds: int) -> None:
    """Check that a time limit leaves every run time to train before it has to save.

    Args:
        runs: The runs.
        time_limit: As sbatch's --time takes it; None is no limit that is known.
        lead_seconds: The time between the signal to save and the limit.

    Raises:
        ConfigError: Nothing would be saved before the limit.
    """
    starts = [start_seconds(run) for run in runs]
    seconds, is_measured = max(starts, default=(0, False))
    check_time(time_limit, lead_seconds, seconds, is_measured)


# ---- what Slurm could never start ----------------------------------------------------------------
def check_with_slurm(runs: Sequence[TrainingRun], job: Job) -> str:
    """Ask Slurm whether it would take a job and could ever start it.

    Args:
        runs: The runs that the job trains.
        job: The job.

    Returns:
        What `sbatch --test-only` prints.

    Raises:
        ConfigError: The partition's time limits leave no time to train, or are shorter than the
            job's; or there is no sbatch here.
        SlurmError: Slurm would refuse the job.
        SlurmAway: slurmctld does not answer.
    """
    arguments = [*job.waiting(), *job.arguments()]
    try:
        said = slurm.test(arguments, job.script())
    except slurm.SlurmAway:
        raise
    except slurm.SlurmError as error:
        if not _waits_for_drained_nodes(job):
            raise
        said = f"{error}: nodes are drained. The job waits until they are back"
        print(f"warning: {said}", file=sys.stderr)
    found = _partitions(job.site.partition)
    if found:
        _check_limits(runs, job, found)
    return said


def _check_limits(runs: Sequence[TrainingRun], job: Job, partitions: Sequence[Partition]) -> None:
    """Raise ConfigError when the job does not fit into the time limits of its partitions."""
    names = ", ".join(partition.name for partition in partitions)
    if job.time_limit is None:
        limits = [p.default_seconds for p in partitions if p.default_seconds is not None]
        if limits and job.signal_seconds:
            # "H:MM:SS", which sbatch would take.
            limit = _clock(min(limits))
            try:
                check_times(runs, limit, job.signal_seconds)
            except ConfigError as error:
                raise ConfigError(f"{error}. This is the default of partition {names}") from None
        return
    wanted = seconds_of(job.time_limit)
    longest = [partition.max_seconds for partition in partitions]
    # A quality of service may allow more than its partition does.
    if job.site.qos or None in longest:
        return
    most = max(limit for limit in longest if limit is not None)
    if wanted is None or wanted > most:
        raise ConfigError(
            f"time limit {job.time_limit}: longer than partition {names} allows, which is "
            f"{_clock(most)}, so the job would never start. Set a shorter one with --time"
        )


def _partitions(names: str | None) -> list[Partition]:
    """Return the partitions of these names, or the default one; none when Slurm does not say."""
    wanted = (names or "").split(",")
    answer = slurm.ask("scontrol", "--oneliner", "show", "partition") or ""
    found = []
    for line in answer.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        longest = _seconds(fields.get("MaxTime", ""))
        default = fields.get("DefaultTime", "NONE")
        partition = Partition(
            fields.get("PartitionName", ""),
            fields.get("Default") == "YES",
            longest if default == "NONE" else _seconds(default),
            longest,
            int(fields["TotalNodes"]) if fields.get("TotalNodes", "").isdigit() else 0,
        )
        if partition.name in wanted or (not names and partition.is_default):
            found.append(partition)
    return found


def _waits_for_drained_nodes(job: Job) -> bool:
    """Return True if the job needs nodes that are drained, as all may be before a maintenance.

    `sbatch --test-only` then gives the answer that it gives for what can never run.
    """
    found = _partitions(job.site.partition)
    total = max((partition.nodes for partition in found), default=0)
    names = ",".join(partition.name for partition in found)
    query = ["--noheader", "--Node", f"--partition={names}", "--format=%N %T"]
    states = dict(
        line.split()
        for line in (slurm.ask("sinfo", *query) or "").splitlines()
        if len(line.split()) == 2
    )
    usable = sum("drain" not in state for state in states.values())
    return bool(states) and usable < job.nodes <= total


def _seconds(limit: str) -> int | None:
    """Return a time limit as scontrol shows it, in seconds; None where there is none."""
    try:
        return seconds_of(limit)
    except ConfigError:
        return None


def _clock(seconds: int) -> str:
    """Return seconds as "H:MM:SS", a time limit of sbatch."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
