"""A run and a site -> what cannot work refused, the job shown or sent, and what was sent kept in the run's directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pretrain.config import ConfigError, RunConfig, dump_config, num_parameters, writing
from pretrain.launcher import slurm
from pretrain.launcher.cluster import Site
from pretrain.launcher.job import (
    Job,
    check_path,
    check_time,
    job_name,
    launcher_command,
)
from pretrain.rundir.attempts import is_finished, read_attempts
from pretrain.rundir.jobs import JobRecord, LaunchRecord, append_job, read_jobs
from pretrain.rundir.paths import RunPaths, claim_version
from pretrain.rundir.states import JobKind, Phase

BYTES_PER_PARAMETER = 12  # fp32 master weight and two Adam moments
BYTES_PER_SECOND = 200e6  # a modest shared file system's
EARLY_SECONDS = 60  # Slurm may signal so much too early
STEP_SECONDS = 60.0  # of a run that has not made one yet
DATA = ("train/manifest.json", "validation/manifest.json")  # what `pretrain data build` writes last


@dataclass(frozen=True)
class TrainingRun:
    """A run with its place on the site: `nodes` x `tasks_per_node` ranks."""

    config: RunConfig
    directory: Path
    nodes: int
    tasks_per_node: int
    over: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """In a sweep: the keys and values that make this run."""

    @property
    def num_tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def name(self) -> str:
        """runs/demo/alibi -> demo.alibi"""
        return job_name(".".join(self.directory.parts[-2:]))


def submit(
    config: RunConfig,
    site: Site,
    *,
    nodes: int | None = None,
    time_limit: str | None = None,
    save_before: int | None = None,
    dry_run: bool = False,
    plan: Callable[[TrainingRun, Job], str] | None = None,
) -> None:
    """Sends one run as one job, or with `dry_run` shows what would be sent and writes nothing.

    `plan` makes the text of RUN/evaluations/plan.json, by which checkpoints are evaluated while the run trains. Raises
    ConfigError for what cannot work, before anything is written or sent, and SlurmError when Slurm refuses the job.
    """
    run = place(config, site, nodes)
    check_runs([run], site, dry_run)
    job = training_job([run], site, time_limit, save_before)
    more = {RunPaths(run.directory).evaluation_plan: plan(run, job)} if plan else {}
    if dry_run:
        show([run], job, more)
        return
    [job_id] = send([run], job, more)
    where = shlex.quote(config.run.directory)
    limit = (
        f"time limit {job.time_limit}{' minutes' if job.time_limit.isdigit() else ''}, saves {job.signal_seconds} s before"
        if job.time_limit
        else "the partition's time"
    )
    print(
        f"job {job_id}: {run.directory} on {run.nodes} nodes x {run.tasks_per_node} ranks, {limit}"
    )
    print(f"next: launcher status {where}\n      launcher logs {where} --follow")


# ---- what cannot work ------------------------------------------------------------------------------------------------
def place(
    config: RunConfig, site: Site, nodes: int | None, over: Mapping[str, Any] | None = None
) -> TrainingRun:
    """The run's share of the site: `nodes`, else as many as parallel.world_size needs, else one.

    Raises ConfigError when the site has no such share, cannot compute the run's precision, or Slurm cannot use its
    directory, and when the ranks cannot share the work.
    """
    world, most = config.parallel.world_size, site.max_tasks_per_node
    ranks = f"{most} GPUs" if site.gpus_per_node else f"{most} ranks"
    count = nodes or math.ceil((world or most) / most)
    if count > site.nodes:
        raise ConfigError(
            f"nodes = {count}: site {site.name} has {site.nodes} of {ranks} each. Ask for fewer with --nodes"
            + (f" or --set parallel.world_size={site.nodes * most}" if world else "")
        )
    tasks = most if world is None else world // count
    if world is not None and (world % count or not 0 < tasks <= most):
        raise ConfigError(
            f"parallel.world_size = {world}: not {count} times 1 to {most}, the {ranks} of a node of site "
            f"{site.name}. Choose --nodes, or --set parallel.world_size={count * most}"
        )
    if config.train.precision not in site.precisions:
        raise ConfigError(
            f"train.precision = {config.train.precision}: the {site.gpu or 'processors'} of site {site.name} "
            f"compute in {', '.join(site.precisions)}. Set train.precision={site.precisions[-1]}"
        )
    config.layout(count * tasks)
    directory = Path.cwd() / config.directory
    check_path("run.directory", directory)
    return TrainingRun(config, directory, count, tasks, over or {})


def check_runs(runs: Sequence[TrainingRun], site: Site, dry_run: bool = False) -> None:
    """Raises ConfigError when a run is finished or in a job, or its data is not built.

    A `dry_run` only warns of the data: that is looked at before the corpus is there.
    """
    check_path("the directory you are in", Path.cwd())
    for run in runs:
        if is_finished(run.directory, run.config.train.num_steps):
            raise ConfigError(
                f"run.directory = {run.config.run.directory}: this run is finished. Train it further with "
                "more train.num_steps, or choose another directory"
            )
    _check_not_in_a_job(runs)
    for data in dict.fromkeys(run.config.data_directory for run in runs):
        missing = [data / name for name in DATA if not (data / name).is_file()]
        if missing and not dry_run:
            raise ConfigError(
                f"data.directory = {data}: no built data set there (no {missing[0]}). Make it first with "
                "`pretrain data build CONFIG`"
            )
        if missing:
            print(
                f"warning: data.directory = {data}: not built yet; `pretrain data build CONFIG` before you submit",
                file=sys.stderr,
            )


def _check_not_in_a_job(runs: Sequence[TrainingRun]) -> None:
    sent = {
        record.job_id: run
        for run in runs
        for record in read_jobs(run.directory)
        if record.kind == JobKind.TRAIN
    }
    states = slurm.jobs(sent)
    if states is None:
        raise slurm.SlurmAway(
            f"squeue: slurmctld does not answer, so whether job {list(sent)[-1]} still trains "
            f"{sent[list(sent)[-1]].directory} cannot be seen. Try again later"
        )
    for job_id, run in sent.items():
        if job_id in states and not states[job_id].is_over:
            raise ConfigError(
                f"run.directory = {run.config.run.directory}: job {job_id} ({states[job_id].state}) trains "
                f"this run. Wait for it, or end it (scancel {job_id})"
            )


# ---- the job ---------------------------------------------------------------------------------------------------------
def training_job(
    runs: Sequence[TrainingRun],
    site: Site,
    time_limit: str | None = None,
    save_before: int | None = None,
    concurrent: int | None = None,
    name: str | None = None,
    logs: Path | None = None,
) -> Job:
    """One job for one run, or with `concurrent` an array for several of the same size. Raises ConfigError."""
    time_limit, lead = (
        time_limit or site.time_limit,
        save_before or max(signal_seconds(run) for run in runs),
    )
    check_time(time_limit, lead)
    return Job(
        name=name or runs[0].name,
        site=site,
        directory=Path.cwd(),
        logs=logs or RunPaths(runs[0].directory).logs,
        commands=tuple(launcher_command("attempt", str(run.directory)) for run in runs),
        nodes=runs[0].nodes,
        tasks_per_node=runs[0].tasks_per_node,
        time_limit=time_limit,
        signal_seconds=lead,
        concurrent=concurrent,
    )


def signal_seconds(run: TrainingRun) -> int:
    """How long before the time limit to ask for a checkpoint: two checkpoint times, a step, and Slurm's own 60 s.

    Times are the longest that the run's attempts have seen; before that a checkpoint is 12 bytes a parameter at 200 MB/s
    and a step a minute.
    """
    saves, steps = [], []
    for attempt in read_attempts(run.directory):
        for begin, end in zip(attempt.phases, attempt.phases[1:]):
            if begin.phase == Phase.SAVING and end.saved is not None:
                saves.append(end.at - begin.at)
            elif begin.phase == Phase.TRAINING and end.step > begin.step:
                steps.append((end.at - begin.at) / (end.step - begin.step))
    save = max(saves, default=num_parameters(run.config) * BYTES_PER_PARAMETER / BYTES_PER_SECOND)
    return EARLY_SECONDS + math.ceil(2 * save + max(steps, default=STEP_SECONDS))


def show(
    runs: Sequence[TrainingRun], job: Job, more: Mapping[Path, str] = MappingProxyType({})
) -> None:
    """Prints each run's layout, the script, the command line, `more` files, and what Slurm says of the job's start."""
    for run in runs:
        layout = run.config.layout(run.num_tasks)
        print(
            f"# {run.directory}\n# {run.nodes} nodes x {run.tasks_per_node} ranks = tensor {layout.tensor} x pipeline "
            f"{layout.pipeline} x data {layout.data}, {layout.num_microbatches} micro batches of "
            f"{run.config.batch.micro_batch_size} a step, ZeRO {run.config.parallel.zero_stage}"
        )
    print(f"\n{job.script()}")
    print(f"# sent with\n{shlex.join(['sbatch', *job.arguments()])} < train.sbatch\n")
    print(
        f"# its ranks are started with\n{shlex.join([*job.step(), _python(job.site)])} -m pretrain train ...\n"
    )
    for path, text in more.items():
        print(f"# {path}\n{text}")
    sys.stdout.flush()
    try:
        print(f"# sbatch --test-only: {slurm.test(job.arguments(), job.script())}")
    except ConfigError as error:  # no sbatch here
        print(f"# sbatch --test-only: not asked: {error}")


def send(
    runs: Sequence[TrainingRun], job: Job, more: Mapping[Path, str] = MappingProxyType({})
) -> list[str]:
    """Writes RUN/launch and `more` files, sends the job, adds to each RUN/jobs.jsonl; returns each run's job id.

    When sbatch refuses, all files are left as they were before. Raises SlurmError.
    """
    files = dict(more)
    for run in runs:
        files |= dict(_frozen(run, job))
    with _written(files, [job.logs, *(RunPaths(run.directory).logs for run in runs)]):
        job_id = slurm.submit(job.arguments(), job.script())
    ids = [f"{job_id}_{index}" if job.is_array else job_id for index in range(len(runs))]
    for index, (each, run) in enumerate(zip(ids, runs)):
        claim_version(run.directory)
        record = JobRecord(
            each,
            JobKind.TRAIN,
            run.name,
            time.time(),
            job.site.name,
            run.nodes,
            run.num_tasks,
            str(run.directory),
            index if job.is_array else None,
        )
        append_job(run.directory, record)
        if job.is_array:  # its tasks have their logs in one folder, and each run shows its own
            link = RunPaths(run.directory).slurm_log(each)
            with contextlib.suppress(OSError):
                link.symlink_to(os.path.relpath(job.logs / link.name, link.parent))
    return ids


def _frozen(run: TrainingRun, job: Job) -> Iterator[tuple[Path, str]]:
    """What the job reads, so that edits while it waits change nothing: names and texts of the files in RUN/launch."""
    record = LaunchRecord(
        command=tuple(job.step()),
        python=_python(job.site),
        num_tasks=run.num_tasks,
        nodes=run.nodes,
        over=dict(run.over),
        sbatch=tuple(job.arguments()),
        site=job.site.model_dump(mode="json"),
    )
    paths = RunPaths(run.directory)
    yield paths.launch_config, dump_config(run.config)
    yield paths.launch_record, json.dumps(dataclasses.asdict(record), indent=1) + "\n"
    yield paths.launch_script, job.script()


@contextmanager
def _written(files: Mapping[Path, str], folders: Sequence[Path]) -> Iterator[None]:
    """Makes `folders` and writes `files`; when the block fails, all is again what it was."""
    before = {path: path.read_text() if path.exists() else None for path in files}
    wanted = {
        parent
        for path in (*files, *(folder / "file" for folder in folders))
        for parent in path.parents
    }
    made = sorted(
        (folder for folder in wanted if not folder.exists()), key=lambda folder: len(folder.parts)
    )
    try:
        for folder in made:
            with writing(folder):
                folder.mkdir(exist_ok=True)
        for path, text in files.items():
            with writing(path):
                path.write_text(text)
        yield
    except BaseException:
        for path, old in before.items():
            with contextlib.suppress(OSError):
                path.unlink() if old is None else path.write_text(old)
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # another put something there
                folder.rmdir()
        raise


def _python(site: Site) -> str:
    return site.ranks_python or sys.executable
