"""The Slurm jobs sent for a run (jobs.jsonl), and how it is started (launch.json)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, RunConfig, load_config, writing
from pretrain.config.run import is_url, recorded_protocol
from pretrain.config.trajectory import check_differences, differences
from pretrain.rundir.attempts import is_finished, is_idle, read_attempts
from pretrain.rundir.checkpoints import checkpoint_step, complete_checkpoints
from pretrain.rundir.files import (
    append_json_line,
    from_json,
    make_directory,
    parse_json,
    read_json,
    read_records,
    replace_json,
)
from pretrain.rundir.metrics import evaluations_at
from pretrain.rundir.paths import DATA_MANIFESTS, Outcome, RunPaths, check_apart, check_version
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
    return read_records(JobRecord, RunPaths(run).jobs)


def write_over(run: Path, over: Mapping[str, Any]) -> None:
    """Write RUN/launch/local.json: the keys and values of the sweep that made a run here.

    Raises:
        RunFailed: The disk refused.
    """
    path = RunPaths(run).local_launch
    with writing(path):
        make_directory(path.parent)
        replace_json(path, {"over": dict(over)})


def read_over(run: Path) -> dict[str, Any]:
    """Return the keys and values of the sweep that made a run; {} if it is of no sweep."""
    paths = RunPaths(run)
    found = (read_json(path).get("over") for path in (paths.launch_record, paths.local_launch))
    return next((over for over in found if over and isinstance(over, dict)), {})


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
        raise ConfigError(f"{path}: not what `launcher submit` writes. Submit the run again")
    return record


# ---- starts ----
# Check a start before anything is written, sent or begun: what it cannot do, and what is done.
#
# The ranks check the same and more, together with the data. But a start that is refused or has
# nothing to do should be known before: it would be an attempt of the run, and under Slurm a job.


def is_done(config: RunConfig, allow_changed: Collection[str] = ()) -> bool:
    """Return True if a start of the run would find nothing to train and nothing to evaluate.

    Args:
        config: The run, which would go on from its newest checkpoint.
        allow_changed: The keys of --allow-changed.

    Raises:
        ConfigError: The run cannot go on with this config; see `check_goes_on`.
    """
    check_goes_on(config, allow_changed)
    run, num_steps = config.directory, config.train.num_steps
    if not is_finished(run, num_steps):
        return False
    missing = _evaluations(config)
    # Cheaper than metrics.jsonl, and it knows which lengths the ranks left out of the default.
    ended = [each.ended for each in read_attempts(run) if not is_idle(each)]
    if ended and ended[-1] and ended[-1].outcome == Outcome.FINISHED:
        try:
            missing -= _evaluations(load_config(RunPaths(run).config))
        except ConfigError:
            # Damaged, or of another version. That the attempt finished is all that is known.
            return True
    if missing:
        missing -= evaluations_at(RunPaths(run).metrics, num_steps)
    return not missing


def already_done(config: RunConfig) -> str:
    """Return the line that says that a start of the run has nothing to do."""
    return (
        f"{config.run.directory}: finished already, at step {config.train.num_steps}; nothing to "
        "do. To train it further, increase train.num_steps; for a new run, choose another "
        "run.directory"
    )


def check_goes_on(config: RunConfig, allow_changed: Collection[str] = ()) -> None:
    """Check that the run may go on from its newest checkpoint, as far as its config tells.

    Args:
        config: The run.
        allow_changed: The keys of --allow-changed.

    Raises:
        ConfigError: The directory belongs to another user, has another layout or
            lies inside another run's or a data set's, or the run differs from the checkpoint in
            what may not change, or has done more steps.
    """
    check_trusted(config.directory)
    check_version(config.directory)
    check_apart(config.directory)
    found = complete_checkpoints(config.directory)
    if not found:
        return
    try:
        before = load_config(found[-1] / "config.toml")
    except ConfigError:
        # Damaged, which only reading all of it can tell; the ranks do.
        return
    check_differences(differences(before, config), found[-1], allow_changed)
    step, last = checkpoint_step(found[-1].name) or 0, config.train.num_steps
    if step > last:
        raise ConfigError(
            f"train.num_steps = {last}: {found[-1]} has done {step} steps already. Set {step} or "
            "more, or --resume an earlier checkpoint"
        )


def missing_data(config: RunConfig) -> Path | None:
    """Return the first file that the run's data set lacks, or None if it is built or lies at a URL.

    What lies at a URL is looked at by the ranks, which may have rights that this machine lacks.
    """
    if is_url(config.data.directory):
        return None
    needed = (config.data_directory / name for name in DATA_MANIFESTS)
    return next((path for path in needed if not path.is_file()), None)


def check_data(config: RunConfig) -> None:
    """Raise ConfigError unless the run's data set is built."""
    if missing := missing_data(config):
        raise ConfigError(
            f"data.directory = {config.data_directory}: no built data set ({missing} is missing). "
            "Build it first with `pretrain data build CONFIG`"
        )


def _evaluations(config: RunConfig) -> set[tuple[str, int, int]]:
    """Return protocol, stride and length of each evaluation that follows the last step."""
    return {
        (
            recorded_protocol(config, name),
            length if name == "nonoverlapping" else config.evaluation_stride,
            length,
        )
        for name in config.evaluation.protocols
        for length in config.evaluation_lengths
    }
