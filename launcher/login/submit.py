"""Submit a run to Slurm: make its job, send it and record what was sent.

What was sent is kept in RUN/launch, so that edits of the config while the job waits change nothing
and `launcher requeue` can send exactly the same again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from pretrain.config import ConfigError, RunConfig, dump_config, writing
from pretrain.launcher import slurm
from pretrain.launcher.cluster import Site
from pretrain.launcher.job import Job, launcher_command
from pretrain.launcher.login.allocation import TrainingRun, allocate, check_runs
from pretrain.launcher.login.limits import check_times, check_with_slurm, signal_seconds
from pretrain.launcher.login.status import check_run, read_statuses
from pretrain.launcher.request import NO_REQUEST, SlurmRequest
from pretrain.rundir.access import let_nobody_write
from pretrain.rundir.attempts import is_finished
from pretrain.rundir.files import make_directory, replace_file
from pretrain.rundir.jobs import JobRecord, LaunchRecord, append_job
from pretrain.rundir.paths import RunPaths, claim_version
from pretrain.rundir.starts import already_done, is_done
from pretrain.rundir.states import JobKind
from pretrain.rundir.trust import check_own_directory

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
    request: SlurmRequest = NO_REQUEST,
    after: Path | None = None,
) -> None:
    """Submit one run as one job, or with `dry_run` print what would be sent and write nothing.

    Nothing is sent for a run that is finished, which is said.

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
        request: What this command asks of Slurm.
        after: Another run, which has to end well before this one starts.

    Raises:
        ConfigError: The run cannot work; nothing was written or sent.
        SlurmError: Slurm refused the job; nothing is left of it in the run's directory.
    """
    site = request.site(site)
    run = dataclasses.replace(allocate(config, site, nodes), allow_changed=tuple(allow_changed))
    if is_done(config, allow_changed):
        print(already_done(config))
        return
    check_runs([run], site, dry_run)
    job = training_job([run], site, time_limit, save_before, request=request)
    if after is not None:
        try:
            job = dataclasses.replace(job, dependency=chained(after, job.dependency))
        except slurm.SlurmAway as error:
            if not dry_run:
                raise
            print(f"warning: {error}", file=sys.stderr)
    files = {RunPaths(run.directory).evaluation_plan: plan(run, job)} if plan else NO_FILES
    if dry_run:
        print_dry_run([run], job, files)
        return
    [job_id] = send([run], job, files)
    spare = f" and {run.spare_nodes} spare" if run.spare_nodes else ""
    limit = "the partition's default time limit"
    if job.time_limit:
        # A bare number is minutes to sbatch, which "time limit 90" would not tell.
        unit = " minutes" if job.time_limit.isdigit() else ""
        limit = f"time limit {job.time_limit}{unit}, saves {job.signal_seconds} s before it"
    print(
        f"job {job_id}: submitted {run.directory} on {run.nodes} nodes x {run.tasks_per_node} "
        f"ranks{spare}, {limit}"
    )
    if job.dependency:
        print(f"it starts after {job.dependency}, and is cancelled if that cannot happen any more")
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
    request: SlurmRequest = NO_REQUEST,
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
        request: What the command asks of Slurm; `site` holds its partition and the like already.

    Raises:
        ConfigError: The time limit leaves no time to train before the signal.
    """
    time_limit = time_limit or site.time_limit
    lead_seconds = save_before or max(signal_seconds(run) for run in runs)
    check_times(runs, time_limit, lead_seconds)
    return Job(
        name=name or runs[0].name,
        site=site,
        directory=Path.cwd(),
        logs=logs or RunPaths(runs[0].directory).logs,
        commands=tuple(launcher_command("attempt", str(run.directory)) for run in runs),
        nodes=runs[0].nodes,
        tasks_per_node=runs[0].tasks_per_node,
        spare_nodes=runs[0].spare_nodes,
        time_limit=time_limit,
        signal_seconds=lead_seconds,
        concurrent=concurrent,
        dependency=request.dependency,
        mail=request.mail,
    )


def chained(run: Path, dependency: str | None) -> str | None:
    """Return the dependency on the end of another run, beside a dependency that was asked for.

    The job of that run keeps its id when it is requeued, so its restarts are waited for. A run
    that is finished is not waited for.

    Args:
        run: The other run's directory.
        dependency: As in sbatch --dependency.

    Raises:
        ConfigError: There is no such run, or it is not finished and has no job.
        SlurmAway: slurmctld does not answer.
    """
    check_run(run)
    [status], away = read_statuses([run])
    if status.job is not None:
        return ",".join(filter(None, (f"afterok:{status.job.job_id}", dependency)))
    if away:
        raise slurm.SlurmAway(
            f"--after {run}: {away}, so it is unknown if a job trains this run. Try again later"
        )
    if is_finished(run):
        print(f"--after {run}: is finished, so nothing is waited for")
        return dependency
    how = f"{status.state}: {status.reason}" if status.reason else status.state
    raise ConfigError(
        f"--after {run}: is not finished ({how}) and has no job that could be waited for. Start it "
        f"first with `launcher requeue {shlex.quote(str(run))}`"
    )


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
    sbatch = shlex.join(["sbatch", *job.waiting(), *job.arguments()])
    print(f"# submitted with\n{sbatch} < train.sbatch\n")
    srun = shlex.join([*job.step(), _ranks_python(job.site)])
    print(f"# the job starts its ranks with\n{srun} -m pretrain train ...\n")
    for path, text in files.items():
        print(f"# {path}\n{text}")
    # Before sbatch, whose answer may take a while, or be the error that ends this command.
    sys.stdout.flush()
    try:
        print(f"# sbatch --test-only: {check_with_slurm(runs, job)}")
    except (slurm.SlurmAway, slurm.NoSlurm) as error:
        # The job may be shown all the same, also on a machine without Slurm's commands.
        print(f"# sbatch --test-only: not asked: {error}")
        if isinstance(error, slurm.SlurmAway):
            print(
                f"warning: Slurm was not asked whether it takes the job: {error}", file=sys.stderr
            )


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
        ConfigError: The job does not fit into the time limits of its partition.
        SlurmError: sbatch refused. All files are left as they were before.
        SlurmAway: Nobody knows if Slurm has taken the job. The files stay.
    """
    try:
        check_with_slurm(runs, job)
    except slurm.SlurmAway as error:
        raise slurm.SlurmAway(f"{error}. Nothing was submitted; try again later") from None
    # Slurm writes there as this user, and follows links.
    check_own_directory(job.logs)
    launch_files = dict(files)
    for run in runs:
        launch_files |= _launch_files(run, job)
    folders = [job.logs, *(RunPaths(run.directory).logs for run in runs)]
    # Before sbatch: on an idle cluster the job may start, and read them, before sbatch returns;
    # and Slurm does not make the folder of --output, without it a job dies with no message.
    with _files_unless_refused(launch_files, folders):
        job_id = slurm.submit([*job.waiting(), *job.arguments()], job.script())
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
    """Create `folders` and write `files`; when the block fails, restore what was there before.

    They stay when it is unknown if Slurm has taken the job.
    """
    before = {path: path.read_text() if path.exists() else None for path in files}
    wanted = {parent for path in files for parent in path.parents}
    wanted |= {ancestor for folder in folders for ancestor in (folder, *folder.parents)}
    missing = [folder for folder in wanted if not folder.exists()]
    # Parents first, so that mkdir finds them and so that the reverse order empties each folder.
    created = sorted(missing, key=lambda folder: len(folder.parts))
    try:
        for folder in created:
            with writing(folder):
                make_directory(folder)
        for folder in folders:
            # One that was there before.
            let_nobody_write(folder)
        for path, text in files.items():
            with writing(path):
                replace_file(path, text)
        yield
    except (slurm.SlurmAway, KeyboardInterrupt):
        # Slurm may have taken the job, which reads these files.
        raise
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
