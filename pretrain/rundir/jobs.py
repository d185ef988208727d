"""The Slurm jobs sent for a run (jobs.jsonl), and how it is started (launch.json, local.json)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, writing
from pretrain.rundir.credentials import redacted
from pretrain.rundir.files import (
    MAX_BYTES,
    append_json_line,
    from_json,
    make_directory,
    parse_json,
    read_json,
    read_json_lines,
    replace_json,
)
from pretrain.rundir.paths import RunPaths
from pretrain.rundir.trust import check_trusted, read_trusted


@dataclass(frozen=True)
class JobRecord:
    """A line of jobs.jsonl: a job that was sent for this run."""

    job_id: str
    """What squeue, scontrol and scancel take: "123", or an array's task "123_0"."""
    kind: str
    """A `JobKind`: train or evaluate."""
    name: str
    """Slurm's job name. A task of an array has the array's name there, and here the run's."""
    submitted_at: float
    """Unix seconds."""
    site: str
    """The site's name."""
    nodes: int
    """Nodes asked for."""
    num_tasks: int
    """Ranks on all of them."""
    run: str
    """The run's directory, absolute."""
    array_index: int | None = None
    """The index in a sweep's job array."""
    checkpoint: str | None = None
    """Of an evaluation: the checkpoint's name, step-########."""


@dataclass(frozen=True)
class LaunchRecord:
    """launch.json: how a submitted run is started, frozen when it was submitted."""

    command: tuple[str, ...]
    """The srun command line that starts the ranks, up to the Python."""
    python: str
    """The Python that each rank runs."""
    num_tasks: int
    """Ranks."""
    nodes: int
    """Nodes."""
    over: dict[str, Any]
    """Of a sweep: the keys and values that make this run."""
    sbatch: tuple[str, ...]
    """The arguments of sbatch."""
    site: dict[str, Any]
    """The site file, resolved."""
    allow_changed: tuple[str, ...] = ()
    """The keys of --allow-changed, which each attempt passes on to `pretrain train`."""


@dataclass(frozen=True)
class LocalLaunch:
    """local.json: how a run was last started on a single machine."""

    command: tuple[str, ...]
    """The command line, with *** for what looks like a secret."""
    directory: str
    """The directory in which it was given, from which relative paths in the config start."""
    num_tasks: int
    """Ranks."""
    over: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of a sweep: the keys and values that make this run."""


def job_id_of(environment: Mapping[str, str]) -> str | None:
    """Return the id of the Slurm job that a process with these variables runs in, or None.

    It is "123", or "123_4" for a task of an array. That is the one identity of a job in signals,
    records and messages. SLURM_JOB_ID of a task is another number, and for the last task that
    starts it is the number of the whole array, which every command would apply to all tasks.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


def append_job(run: Path, record: JobRecord) -> None:
    """Append a job to RUN/jobs.jsonl. Raises RunFailed when the disk refuses."""
    path = RunPaths(run).jobs
    with writing(path):
        append_json_line(path, dataclasses.asdict(record))


def read_jobs(run: Path) -> list[JobRecord]:
    """Return the jobs sent for a run, oldest first."""
    lines = read_json_lines(RunPaths(run).jobs, MAX_BYTES)
    records = (from_json(JobRecord, line) for line in lines)
    return [record for record in records if record is not None]


def write_local_launch(run: Path, launch: LocalLaunch) -> None:
    """Write RUN/launch/local.json. A run of a sweep stays one when it is started by itself.

    Raises:
        OSError: The disk refused.
    """
    path = RunPaths(run).local_launch
    before = read_local_launch(run)
    over = launch.over or (before.over if before else {})
    command = tuple(redacted(launch.command))
    make_directory(path.parent)
    replace_json(path, dataclasses.asdict(dataclasses.replace(launch, command=command, over=over)))


def read_local_launch(run: Path) -> LocalLaunch | None:
    """Return how a run was last started on a single machine; None if it never was."""
    return from_json(LocalLaunch, read_json(RunPaths(run).local_launch))


def read_over(run: Path) -> dict[str, Any]:
    """Return the keys and values of the sweep that made a run; {} if it is of no sweep."""
    over = read_json(RunPaths(run).launch_record).get("over")
    local = read_local_launch(run)
    return over if isinstance(over, dict) and over else local.over if local else {}


def read_launch(run: Path) -> LaunchRecord:
    """Return what `launcher submit` or `sweep` left in RUN/launch.

    Raises:
        ConfigError: The file is missing, damaged, or of another version, or somebody else may have
            put it there.
    """
    path = RunPaths(run).launch_record
    # The commands in this file are executed, so its owner must be trusted.
    check_trusted(run)
    try:
        content = parse_json(read_trusted(path))
    except OSError:
        content = {}
    record = from_json(LaunchRecord, content)
    if record is None:
        needed = [f for f in dataclasses.fields(LaunchRecord) if f.default is dataclasses.MISSING]
        names = {field.name for field in needed}
        missing = (
            ", ".join(sorted(names - content.keys())) or "none, but a value is of another type"
        )
        raise ConfigError(
            f"{path}: not what `launcher submit` writes; missing: {missing}. Submit the run again"
        )
    return record
