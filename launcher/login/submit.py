"""Submit a run to Slurm: make its job, send it and record what was sent.

What was sent is kept in RUN/launch, so that edits of the config while the job waits change nothing
and `launcher requeue` can send exactly the same again.
"""

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
from pathlib import Path
from types import MappingProxyType

from pretrain.config import ConfigError, RunConfig, dump_config, num_parameters, writing
from pretrain.launcher import slurm
from pretrain.launcher.cluster import Site
from pretrain.launcher.job import Job, check_time, launcher_command
from pretrain.launcher.login.allocation import TrainingRun, allocate, check_runs
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.files import DIRECTORY_MODE, replace_file
from pretrain.rundir.jobs import JobRecord, LaunchRecord, append_job
from pretrain.rundir.paths import RunPaths, claim_version
from pretrain.rundir.states import JobKind, Phase
from pretrain.rundir.trust import check_own_directory

BYTES_PER_PARAMETER = 12
"""Size of a checkpoint: an fp32 master weight and two fp32 Adam moments per parameter."""
BYTES_PER_SECOND = 200e6
"""Assumed write bandwidth of a modest shared file system."""
EARLY_SECONDS = 60
"""Slurm may send the signal of --signal up to 60 seconds earlier than specified, sbatch(1)."""
STEP_SECONDS = 60.0
"""Assumed duration of a step, for a run that has not taken one yet."""
NO_FILES: Mapping[Path, str] = MappingProxyType({})


def submit(
    config: RunConfig,
    site: Site,
    *,
    nodes: int | None = None,
    time_limit: str | None = None,
    save_before: int | None = None,
    dry_run: bool = False,
    plan: Callable[[TrainingRun, Job], str] | None = None,
    allow_changed: Sequence[str] = (),
) -> None:
    """Submit one run as one job, or with `dry_run` print what would be sent and write nothing.

    Args:
        config: The run.
        site: The cluster.
        nodes: Nodes to request; by default as many as parallel.world_size needs, else one.
        time_limit: As sbatch's --time takes it; by default the site's.
        save_before: Seconds before the time limit at which to save; by default `signal_seconds`.
        dry_run: Only print the job.
        plan: Makes the text of RUN/evaluations/plan.json, with which the run's checkpoints are
            evaluated while it trains. Without it they are not evaluated.
        allow_changed: Keys that may differ from the checkpoint's although they change training.

    Raises:
        ConfigError: The run cannot work; nothing was written or sent.
        SlurmError: Slurm refused the job; nothing is left of it in the run's directory.
    """
    run = dataclasses.replace(allocate(config, site, nodes), allow_changed=tuple(allow_changed))
    check_runs([run], site, dry_run)
    job = training_job([run], site, time_limit, save_before)
    files = {RunPaths(run.directory).evaluation_plan: plan(run, job)} if plan else NO_FILES
    if dry_run:
        print_dry_run([run], job, files)
        return
    [job_id] = send([run], job, files)
    limit = "the partition's default time limit"
    if job.time_limit:
        # A bare number is minutes to sbatch, which "time limit 90" would not tell.
        unit = " minutes" if job.time_limit.isdigit() else ""
        limit = f"time limit {job.time_limit}{unit}, saves {job.signal_seconds} s before it"
    print(
        f"job {job_id}: submitted {run.directory} on {run.nodes} nodes x {run.tasks_per_node} "
        f"ranks, {limit}"
    )
    argument = shlex.quote(config.run.directory)
    print(f"next: launcher status {argument}\n      launcher logs {argument} --follow")


# ---- the job ----
def training_job(
    runs: Sequence[TrainingRun],
    site: Site,
    time_limit: str | None = None,
    save_before: int | None = None,
    concurrent: int | None = None,
    name: str | None = None,
    logs: Path | None = None,
) -> Job:
    """Return the job that trains a run, or with `concurrent` the job array that trains several.

    Args:
        runs: The runs, all with the same allocation: the tasks of an array have one size.
        site: The cluster.
        time_limit: As sbatch's --time takes it; by default the site's.
        save_before: Seconds before the time limit at which to save; by default the longest
            `signal_seconds` of the runs.
        concurrent: How many tasks of the array may run at the same time.
        name: The job's name; by default the first run's.
        logs: The folder of slurm-JOB.log; by default the first run's logs/.

    Raises:
        ConfigError: The time limit leaves no time to train before the signal.
    """
    time_limit = time_limit or site.time_limit
    lead_seconds = save_before or max(signal_seconds(run) for run in runs)
    check_time(time_limit, lead_seconds)
    return Job(
        name=name or runs[0].name,
        site=site,
        directory=Path.cwd(),
        logs=logs or RunPaths(runs[0].directory).logs,
        commands=tuple(launcher_command("attempt", str(run.directory)) for run in runs),
        nodes=runs[0].nodes,
        tasks_per_node=runs[0].tasks_per_node,
        time_limit=time_limit,
        signal_seconds=lead_seconds,
        concurrent=concurrent,
    )


def signal_seconds(run: TrainingRun) -> int:
    """Return how many seconds before the time limit Slurm should ask the run for a checkpoint.

    It is 2 x save + step + 60 s: the signal may arrive during a regular save or a step, which are
    completed first, the checkpoint itself has to be written, and Slurm may signal early. The
    times are the longest that the run's attempts have recorded. Before any were, a checkpoint is
    assumed to have 12 bytes per parameter written at 200 MB/s, and a step to take a minute.
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
    estimate = num_parameters(run.config) * BYTES_PER_PARAMETER / BYTES_PER_SECOND
    save_seconds = max(saves, default=estimate)
    step_seconds = max(steps, default=STEP_SECONDS)
    return EARLY_SECONDS + math.ceil(2 * save_seconds + step_seconds)


def print_dry_run(
    runs: Sequence[TrainingRun], job: Job, files: Mapping[Path, str] = NO_FILES
) -> None:
    """Print all that would be sent, and what Slurm says about the job's start.

    Args:
        runs: The runs; the parallel layout of each is printed.
        job: Their job; its script and command lines are printed.
        files: Further files that would be written, with their texts.

    Raises:
        SlurmError: Slurm would refuse the job.
    """
    for run in runs:
        layout = run.config.layout(run.num_tasks)
        print(
            f"# {run.directory}\n# {run.nodes} nodes x {run.tasks_per_node} ranks = tensor "
            f"{layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, "
            f"{layout.num_microbatches} micro batches of {run.config.batch.micro_batch_size} a "
            f"step, ZeRO {run.config.parallel.zero_stage}"
        )
    print(f"\n{job.script()}")
    sbatch = shlex.join(["sbatch", *job.arguments()])
    print(f"# submitted with\n{sbatch} < train.sbatch\n")
    srun = shlex.join([*job.step(), _ranks_python(job.site)])
    print(f"# the job starts its ranks with\n{srun} -m pretrain train ...\n")
    for path, text in files.items():
        print(f"# {path}\n{text}")
    # Before sbatch, whose answer may take a while, or be the error that ends this command.
    sys.stdout.flush()
    try:
        print(f"# sbatch --test-only: {slurm.test(job.arguments(), job.script())}")
    except ConfigError as error:
        # A machine without Slurm's commands may show the job all the same.
        print(f"# sbatch --test-only: not asked: {error}")


# ---- sending it ----
def send(runs: Sequence[TrainingRun], job: Job, files: Mapping[Path, str] = NO_FILES) -> list[str]:
    """Write RUN/launch, submit the job and record it in each RUN/jobs.jsonl.

    Args:
        runs: The runs that the job trains; in an array, run i is task i.
        job: The job.
        files: Further files to write before the job is sent, with their texts.

    Returns:
        The job id of each run: "123", or "123_0" in an array.

    Raises:
        SlurmError: sbatch refused. All files are left as they were before.
    """
    # Slurm writes there as this user, and follows links.
    check_own_directory(job.logs)
    launch_files = dict(files)
    for run in runs:
        launch_files |= _launch_files(run, job)
    folders = [job.logs, *(RunPaths(run.directory).logs for run in runs)]
    # Before sbatch: on an idle cluster the job may start, and read them, before sbatch returns;
    # and Slurm does not make the folder of --output, without it a job dies with no message.
    with _files_unless_refused(launch_files, folders):
        job_id = slurm.submit(job.arguments(), job.script())
    ids = [f"{job_id}_{index}" if job.is_array else job_id for index in range(len(runs))]
    for index, (run_job_id, run) in enumerate(zip(ids, runs)):
        claim_version(run.directory)
        record = JobRecord(
            run_job_id,
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
        if job.is_array:
            # An array has one --output for all tasks, so their logs share a folder. The link shows
            # each run its own log, in the place where a single job has it.
            link = RunPaths(run.directory).slurm_log(run_job_id)
            with contextlib.suppress(OSError):
                link.symlink_to(os.path.relpath(job.logs / link.name, link.parent))
    return ids


def _launch_files(run: TrainingRun, job: Job) -> dict[Path, str]:
    """Return the files of RUN/launch, which the job reads, with their texts.

    The job reads these copies only, so edits of the user's config and site files while the job
    waits in the queue have no effect on it.
    """
    record = LaunchRecord(
        command=tuple(job.step()),
        python=_ranks_python(job.site),
        num_tasks=run.num_tasks,
        nodes=run.nodes,
        over=dict(run.over),
        sbatch=tuple(job.arguments()),
        site=job.site.model_dump(mode="json"),
        allow_changed=run.allow_changed,
    )
    paths = RunPaths(run.directory)
    return {
        paths.launch_config: dump_config(run.config),
        paths.launch_record: json.dumps(dataclasses.asdict(record), indent=1) + "\n",
        paths.launch_script: job.script(),
    }


@contextmanager
def _files_unless_refused(files: Mapping[Path, str], folders: Sequence[Path]) -> Iterator[None]:
    """Create `folders` and write `files`; when the block raises, restore what was there before."""
    before = {path: path.read_text() if path.exists() else None for path in files}
    wanted = {parent for path in files for parent in path.parents}
    wanted |= {ancestor for folder in folders for ancestor in (folder, *folder.parents)}
    missing = [folder for folder in wanted if not folder.exists()]
    # Parents first, so that mkdir finds them and so that the reverse order empties each folder.
    created = sorted(missing, key=lambda folder: len(folder.parts))
    try:
        for folder in created:
            with writing(folder):
                folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for path, text in files.items():
            with writing(path):
                replace_file(path, text)
        yield
    except BaseException:
        for path, old in before.items():
            with contextlib.suppress(OSError):
                path.unlink() if old is None else replace_file(path, old)
        for folder in reversed(created):
            # It stays when another process has put something there meanwhile.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _ranks_python(site: Site) -> str:
    """Return the Python that the ranks run: the site's, or the one that runs this command."""
    return site.ranks_python or sys.executable
