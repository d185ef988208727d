"""Submit runs to Slurm: create the job, submit it, and record it.

RUN/launch keeps a copy of all that the job uses, so that edits of the config have no effect while
the job waits, and `launcher requeue` can submit exactly the same job again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import (
    ConfigError,
    RunConfig,
    dump_config,
    load_config,
    num_parameters,
    writing,
)
from pretrain.launcher import agent, slurm, slurm_job
from pretrain.launcher.site import Site, SlurmRequest
from pretrain.launcher.slurm_job import Job
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.files import let_nobody_write, make_directory, read_text, replace_file
from pretrain.rundir.jobs import (
    LaunchRecord,
    Source,
    already_done,
    append_job,
    check_data,
    check_goes_on,
    is_done,
    read_jobs,
    read_source,
)
from pretrain.rundir.paths import JobKind, Outcome, Phase, RunPaths, claim_version
from pretrain.rundir.trust import check_own_directory

# ---- Allocate runs on a site, and refuse those that cannot work there ----
# Runs are refused on the login node, before anything is written or submitted, because the error
# would otherwise come after hours in the queue.


@dataclass(frozen=True)
class TrainingRun:
    """A run and its allocation on the site: `nodes` x `tasks_per_node` ranks."""

    config: RunConfig
    directory: Path
    """The run's directory, absolute."""
    nodes: int
    tasks_per_node: int
    allow_changed: tuple[str, ...] = ()
    """The keys of --allow-changed."""

    @property
    def spare_nodes(self) -> int:
        """Nodes that the job holds in addition to `nodes`."""
        return self.config.recovery.spare_nodes

    @property
    def name(self) -> str:
        """Slurm's job name: "demo.alibi" for runs/demo/alibi."""
        return slurm_job.job_name(".".join(self.directory.parts[-2:]))


def allocate(
    config: RunConfig, site: Site, nodes: int | None, allow_changed: Sequence[str] = ()
) -> TrainingRun:
    """Choose the nodes and the tasks per node of a run.

    Args:
        config: The run.
        site: The cluster.
        nodes: Nodes to request; by default as many as parallel.world_size needs, else one.
        allow_changed: Keys that may differ from the checkpoint's although they change training.

    Returns:
        The run with its allocation. Every node gets the same number of tasks.

    Raises:
        ConfigError: The site has too few nodes, the ranks cannot be divided evenly, the site's
            processors do not support the run's precision, Slurm cannot use the run's directory, or
            the parallel layout does not fit the number of ranks.
    """
    world_size, max_tasks = config.parallel.world_size, site.max_tasks_per_node
    size = f"{max_tasks} GPUs" if site.gpus_per_node else f"room for {max_tasks} ranks"
    num_nodes = nodes or math.ceil((world_size or max_tasks) / max_tasks)
    if num_nodes + (spare := config.recovery.spare_nodes) > site.nodes:
        largest = f" or --set parallel.world_size={site.nodes * max_tasks}" if world_size else ""
        more = f", recovery.spare_nodes = {spare}" if spare else ""
        raise ConfigError(
            f"nodes = {num_nodes}{more}: site {site.name} has {site.nodes} nodes with {size} "
            f"each. Request fewer with --nodes{largest}"
        )
    tasks = max_tasks if world_size is None else world_size // num_nodes
    # sbatch and srun take one --ntasks-per-node for all nodes.
    if world_size is not None and (world_size % num_nodes or not 0 < tasks <= max_tasks):
        raise ConfigError(
            f"parallel.world_size = {world_size}: not {num_nodes} times 1 to {max_tasks}. Every "
            f"node takes the same number of ranks, and a node of site {site.name} has {size}. "
            f"Choose --nodes, or --set parallel.world_size={num_nodes * max_tasks}"
        )
    if config.train.precision not in site.precisions:
        processors = f"the {site.gpu} GPUs" if site.gpu else "the processors"
        raise ConfigError(
            f"train.precision = {config.train.precision}: not supported by {processors} of site "
            f"{site.name}, which compute in {', '.join(site.precisions)}. "
            f"Set train.precision={site.precisions[-1]}"
        )
    # Raises ConfigError if the parallel sizes or the batch size do not fit the number of ranks.
    config.layout(num_nodes * tasks)
    # Absolute, because the job gets this path and may start in another directory.
    directory = Path.cwd() / config.directory
    slurm_job.check_path("run.directory", directory)
    return TrainingRun(config, directory, num_nodes, tasks, tuple(allow_changed))


def check_runs(runs: Sequence[TrainingRun], dry_run: bool = False) -> None:
    """Check that runs may be submitted: they can resume, fit into an array, and have their data.

    Args:
        runs: The runs.
        dry_run: Print a warning instead of an error if data is missing or slurmctld does not
            answer, because a dry run is useful before everything is ready.

    Raises:
        ConfigError: Another user may write to a run's directory, a run cannot resume from its
            newest checkpoint with this config, its data is not built, or there are more runs than
            an array may have tasks.
        SlurmAway: slurmctld does not answer.
    """
    # This directory becomes the job's --chdir, since relative paths in the config start there.
    slurm_job.check_path("the directory you are in", Path.cwd())
    for run in runs:
        check_goes_on(run.config, run.allow_changed)
    with only_warned(dry_run, slurm.SlurmAway):
        if len(runs) > 1 and len(runs) > (most := slurm.array_size()):
            raise ConfigError(
                f"{len(runs)} runs: a job array of this cluster has at most {most} tasks. "
                "Submit fewer configs at a time"
            )
    # Each data set is checked once: usually all runs of a sweep share one.
    for config in {run.config.data.directory: run.config for run in runs}.values():
        with only_warned(dry_run):
            check_data(config)


@contextmanager
def only_warned(dry_run: bool, kind: type[Exception] = ConfigError) -> Iterator[None]:
    """In a dry run, print an error of the block as a warning."""
    try:
        yield
    except kind as error:
        if not dry_run:
            raise
        print(f"warning: {error}", file=sys.stderr)


def jobs_of(runs: Sequence[TrainingRun]) -> dict[Path, str]:
    """Return the directories of the runs that a job trains or will train, with that job.

    Raises:
        SlurmAway: slurmctld does not answer, so the jobs are unknown.
    """
    sent = {each.job_id: run for run in runs for each in read_jobs(run.directory, JobKind.TRAIN)}
    try:
        states = slurm.jobs(sent, slurm.TRIES)
    except slurm.SlurmAway as error:
        job_id, run = list(sent.items())[-1]
        raise slurm.SlurmAway(
            f"{error}, so it is unknown if job {job_id} still trains {run.directory}. Try again "
            "later"
        ) from None
    # squeue forgets a job minutes after its end (MinJobAge), so a job without a state is over.
    return {
        run.directory: f"job {job_id} ({states[job_id].state})"
        for job_id, run in sent.items()
        if job_id in states and not states[job_id].is_over
    }


# ---- Refuse a job that could not train before its time limit ----
# The times for saving and starting come from the run's earlier attempts; before the first attempt
# they are estimated.


MOST_SIGNAL_SECONDS = 65_535
"""The earliest time before the limit at which sbatch --signal can send a signal; see sbatch(1)."""
BYTES_PER_SECOND = 200e6
"""Assumed bandwidth of a modest shared file system."""
EARLY_SECONDS = 60
"""Slurm may send the signal of --signal up to 60 seconds earlier than specified, sbatch(1)."""
STEP_SECONDS = 60.0
"""Assumed duration of a step, for a run that has not taken one yet."""
START_SECONDS = 60.0
"""Assumed time to load Python and its libraries, and for the ranks to connect."""


def signal_seconds(run: TrainingRun) -> int:
    """Return how many seconds before the time limit Slurm should ask the run for a checkpoint.

    The time is 2 x save + step + 60 s: the signal may arrive during a regular save or a step, which
    are completed first; then the checkpoint itself must be written; and Slurm may signal early. The
    times are the longest that the run's attempts have recorded. Before the first attempt, a
    checkpoint is assumed to be written at 200 MB/s, and a step to take a minute.
    """
    saves, steps = [], []
    for attempt in read_attempts(run.directory):
        for number, (begin, end) in enumerate(zip(attempt.phases, attempt.phases[1:])):
            if begin.phase == Phase.SAVING:
                # A checkpoint is written while training continues, and completed some steps later.
                # An interrupted save has no `saved` and is left out, as it looks too fast.
                later = attempt.phases[number + 1 :]
                saves += [m.at - begin.at for m in later if (m.saved or -1) >= begin.step][:1]
            elif begin.phase == Phase.TRAINING and end.step > begin.step:
                steps.append((end.at - begin.at) / (end.step - begin.step))
    save_seconds = max(saves, default=_checkpoint_seconds(run.config))
    return EARLY_SECONDS + math.ceil(2 * save_seconds + max(steps, default=STEP_SECONDS))


def start_seconds(run: Path, config: RunConfig) -> int:
    """Return how many seconds an attempt takes until its first step.

    This is the longest time that the run's attempts took. An attempt that was asked to save before
    its first step counts with all its time, as it would have taken longer. Before the first attempt
    the estimate is a minute and the time to read a checkpoint.
    """
    taken = []
    for attempt in read_attempts(run):
        first = [mark.at for mark in attempt.phases if mark.phase == Phase.TRAINING][:1]
        if not first and attempt.ended and attempt.ended.outcome == Outcome.RESTART:
            first = [attempt.ended.at]
        taken += [at - attempt.owner.began_at for at in first if attempt.owner.began_at]
    return math.ceil(max(taken, default=START_SECONDS + _checkpoint_seconds(config)))


def _checkpoint_seconds(config: RunConfig) -> float:
    """Return the estimated seconds to write or read a checkpoint."""
    return num_parameters(config) * config.state_bytes / BYTES_PER_SECOND


def check_time(time_limit: str | None, lead_seconds: int, runs: Sequence[TrainingRun] = ()) -> None:
    """Check that a time limit leaves every run time to train before it has to save.

    Args:
        time_limit: As in sbatch --time; None for the partition's default.
        lead_seconds: The time between the signal to save and the limit.
        runs: The runs.

    Raises:
        ConfigError: The limit leaves no time before the signal, or Slurm cannot send the signal
            that early.
    """
    if lead_seconds > MOST_SIGNAL_SECONDS:
        raise ConfigError(
            f"two checkpoints may take {lead_seconds} s, but Slurm sends its signal at most "
            f"{MOST_SIGNAL_SECONDS} s before the time limit. Use --save-before "
            f"{MOST_SIGNAL_SECONDS}, or a faster file system"
        )
    limit = slurm_job.seconds_of(time_limit) if time_limit else None
    start = max((start_seconds(run.directory, run.config) for run in runs), default=0)
    needed = start + lead_seconds
    if limit is not None and (limit < needed or limit <= lead_seconds):
        raise ConfigError(
            f"time limit {time_limit}: nothing would be saved, as the run takes {start} s to start "
            f"and is asked to save {lead_seconds} s before the limit. Set at least "
            f"{needed // 60 + 1} minutes with --time, or save later with --save-before"
        )


def submit(
    config: RunConfig,
    site: Site,
    request: SlurmRequest,
    *,
    dry_run: bool = False,
    plan: Callable[[RunConfig, Path, Site, int, str | None], object] | None = None,
    allow_changed: Sequence[str] = (),
) -> None:
    """Submit one run as one job, or with `dry_run` print the job and write nothing.

    For a finished run nothing is submitted, and a message says so.

    Args:
        config: The run.
        site: The cluster.
        request: The options of this command for Slurm.
        dry_run: Only print the job.
        plan: Returns the content of RUN/evaluations/plan.json, by which the run's checkpoints are
            evaluated while it trains. If None, they are not evaluated.
        allow_changed: Keys that may differ from the checkpoint's although they change training.

    Raises:
        ConfigError: The run cannot work; nothing was written or submitted.
        SlurmError: Slurm refused the job; nothing of it is left in the run's directory.
    """
    site = request.site(site)
    run = allocate(config, site, request.nodes, allow_changed)
    if is_done(config, allow_changed):
        print(already_done(config))
        return
    argument = shlex.quote(config.run.directory)
    with only_warned(dry_run, slurm.SlurmAway):
        # A second job would do no damage, since the lock in RUN/attempts admits one attempt at a
        # time, but it would wait for its nodes only to fail.
        for job_id in jobs_of([run]).values():
            raise ConfigError(
                f"run.directory = {config.run.directory}: {job_id} trains this run. Wait until it "
                f"ends, or cancel it with `launcher cancel {argument}`"
            )
    check_runs([run], dry_run)
    job = training_job([run], site, request)
    files = {}
    if plan:
        planned = str(plan(config, run.directory, site, run.tasks_per_node, job.time_limit))
        files[RunPaths(run.directory).evaluation_plan] = planned
    if dry_run:
        print_dry_run([run], job, files)
        return
    [job_id] = send([run], job, files)
    spare = f" and {run.spare_nodes} spare" if run.spare_nodes else ""
    limit = "the partition's default time limit"
    if job.time_limit:
        limit = f"time limit {job.time_limit}, saves {job.signal_seconds} s before it"
    print(
        f"job {job_id}: submitted {run.directory} on {run.nodes} nodes x {run.tasks_per_node} "
        f"ranks{spare}, {limit}"
    )
    print(f"next: launcher status {argument}\n      launcher logs {argument} --follow")


# ---- the job ----
def training_job(
    runs: Sequence[TrainingRun],
    site: Site,
    request: SlurmRequest,
    concurrent: int | None = None,
    name: str | None = None,
    logs: Path | None = None,
) -> Job:
    """Return the job that trains a run, or with `concurrent` the job array that trains several.

    Args:
        runs: The runs, all with the same allocation, because all tasks of an array have one size.
        site: The cluster, with the options of the command.
        request: The options of the command for Slurm.
        concurrent: How many tasks of the array may run at the same time.
        name: The job's name; by default the first run's.
        logs: The folder of slurm-JOB.log; by default the first run's logs/.

    Raises:
        ConfigError: The time limit leaves no time to train before the signal.
    """
    time_limit = request.time or site.time_limit
    lead_seconds = request.save_before or max(signal_seconds(run) for run in runs)
    check_time(time_limit, lead_seconds, runs)
    return Job(
        name=name or runs[0].name,
        site=site,
        directory=Path.cwd(),
        logs=logs or RunPaths(runs[0].directory).logs,
        commands=tuple(slurm_job.launcher_command("attempt", str(run.directory)) for run in runs),
        nodes=runs[0].nodes,
        tasks_per_node=runs[0].tasks_per_node,
        spare_nodes=runs[0].spare_nodes,
        time_limit=time_limit,
        signal_seconds=lead_seconds,
        concurrent=concurrent,
        restarts=max(run.config.recovery.max_restarts for run in runs),
        dependency=request.dependency,
    )


def print_dry_run(runs: Sequence[TrainingRun], job: Job, files: Mapping[Path, str]) -> None:
    """Print everything that would be submitted, and Slurm's estimate of the job's start.

    Args:
        runs: The runs; the parallel layout of each is printed.
        job: Their job; its script and command lines are printed.
        files: Further files that would be written, with their texts.

    Raises:
        SlurmError: Slurm would refuse the job.
    """
    for run in runs:
        layout = run.config.layout(job.num_tasks)
        print(
            f"# {run.directory}\n# {run.nodes} nodes x {run.tasks_per_node} ranks = "
            f"{layout.sizes}, {layout.num_microbatches} micro batches of "
            f"{run.config.batch.micro_batch_size} a step, ZeRO {run.config.parallel.zero_stage}"
        )
    print(f"\n{job.script()}")
    print(f"# submitted with\n{job.command_line()} < train.sbatch\n")
    python = job.site.ranks_python
    srun = shlex.join([*job.step(), python, "-m", agent.MODULE, python])
    print(f"# the job starts its ranks with\n{srun} -m pretrain train ...\n")
    for path, text in files.items():
        print(f"# {path}\n{text}")
    # Flushed before sbatch runs, which may take a while or end this command with an error.
    sys.stdout.flush()
    try:
        print(slurm.ANSWER, job.test())
    except (slurm.SlurmAway, slurm.NoSlurm) as error:
        # The job is shown anyway, even on a machine without Slurm's commands.
        print(f"{slurm.ANSWER} not asked: {error}")


# ---- submitting it ----
def send(runs: Sequence[TrainingRun], job: Job, files: Mapping[Path, str]) -> list[str]:
    """Write RUN/launch, submit the job and record it in each RUN/jobs.jsonl.

    Args:
        runs: The runs that the job trains; in an array, run i is task i.
        job: The job.
        files: Further files to write before the job is submitted, with their texts.

    Returns:
        The job id of each run: "123", or "123_0" in an array.

    Raises:
        NoSlurm: There is no sbatch here.
        SlurmError: sbatch refused the job. If `sbatch --test-only` refused it, nothing was written.
        SlurmAway: slurmctld does not answer. It may have accepted the job, as the message says.
    """
    try:
        job.test()
    except slurm.SlurmAway as error:
        raise slurm.SlurmAway(f"{error}. Nothing was submitted; try again later") from None
    # Slurm writes to this folder as this user, and follows links.
    check_own_directory(job.logs)
    launch_files, source = dict(files), read_source()
    for index, run in enumerate(runs):
        launch_files |= _launch_files(run, job, source, index if job.is_array else None)
    folders = [job.logs, *(RunPaths(run.directory).logs for run in runs)]
    # Written before sbatch runs: on an idle cluster the job may start, and read the files, before
    # sbatch returns; and Slurm does not create the folder of --output, without which a job dies
    # with no message.
    before = {path: read_text(path) for path in launch_files}
    write_files(launch_files, folders)
    try:
        job_id = job.submit()
    except slurm.SlurmError as error:
        if not isinstance(error, slurm.SlurmAway):
            # `launcher requeue` submits what is there.
            write_files({path: text for path, text in before.items() if text})
            for path in (path for path, text in before.items() if not text):
                path.unlink(missing_ok=True)
        raise
    ids = [f"{job_id}_{index}" if job.is_array else job_id for index in range(len(runs))]
    for run_job_id, run in zip(ids, runs):
        claim_version(run.directory)
        record = job.record(run_job_id, JobKind.TRAIN, run.directory, name=run.name)
        append_job(run.directory, record)
        # Else the plan of a cancelled job would keep all checkpoints from deletion.
        RunPaths(run.directory).paused_evaluation_plan.unlink(missing_ok=True)
        if job.is_array:
            link_log(run.directory, run_job_id, job.logs)
    return ids


def link_log(run: Path, job_id: str, logs: Path) -> None:
    """Link to the log of a task of an array from the path where a single job has its log.

    An array has one --output for all tasks, so their logs share a folder.
    """
    link = RunPaths(run).slurm_log(job_id)
    with contextlib.suppress(OSError):
        link.symlink_to(os.path.relpath(logs / link.name, link.parent))


def _launch_files(
    run: TrainingRun, job: Job, source: Source, array_index: int | None
) -> dict[Path, str]:
    """Return the files of RUN/launch, which the job reads, with their texts.

    The job reads these copies only, so edits of the user's config and site files while the job
    waits in the queue have no effect on it.
    """
    record = LaunchRecord(
        command=tuple(job.step()),
        python=job.site.ranks_python,
        num_tasks=job.num_tasks,
        nodes=run.nodes,
        sbatch=tuple(job.arguments()),
        array_index=array_index,
        site=job.site.model_dump(mode="json"),
        allow_changed=run.allow_changed,
        commit=source.commit,
        diff_sha256=source.diff_sha256,
    )
    paths = RunPaths(run.directory)
    return {
        paths.launch_config: dump_config(run.config),
        paths.launch_record: json.dumps(dataclasses.asdict(record), indent=1) + "\n",
        paths.launch_script: job.script(),
    }


def write_files(files: Mapping[Path, str], folders: Sequence[Path] = ()) -> None:
    """Create folders and write files that nobody else may write to."""
    for folder in [*folders, *(path.parent for path in files)]:
        with writing(folder):
            make_directory(folder)
            # The folder may have existed before, with other permissions.
            let_nobody_write(folder)
    for path, text in files.items():
        with writing(path):
            replace_file(path, text)


# ---- Submit several runs as one job array, one task for each config ----
LOGS = ".logs"
"""Folder of the array's logs, beside the runs; hidden, so that a shell's `*` matches only runs."""


def _wanted_runs(paths: Sequence[Path], overrides: Sequence[str]) -> list[RunConfig]:
    """Return the runs of the configs. Raise ConfigError if two have the same directory."""
    runs: list[RunConfig] = []
    taken = set[tuple[str, str]]()
    for path in paths:
        config = load_config(path, overrides)
        directory, upload = config.run.directory, (config.checkpoint.upload_to or "").rstrip("/")
        for key, value, place, what in (
            ("run.directory", directory, os.path.realpath(directory), "directory"),
            ("checkpoint.upload_to", upload, upload, "URL"),
        ):
            if place and (key, place) in taken:
                raise ConfigError(
                    f"{path}: {key} = {value} is another run's of this sweep. "
                    f"Give each config a {what} of its own"
                )
            taken.add((key, place))
        runs.append(config)
    return runs


def sweep(
    paths: Sequence[Path],
    site: Site,
    overrides: Sequence[str],
    request: SlurmRequest,
    *,
    concurrent: int | None = None,
    dry_run: bool = False,
    allow_changed: Sequence[str] = (),
) -> None:
    """Submit one run for each config, as one job array.

    Finished runs and those that a job trains are left out, so a sweep may be repeated, also with
    more configs. All other runs are checked before anything is submitted.

    Args:
        paths: The configs.
        site: The cluster.
        overrides: Settings of all runs, as --set takes them.
        request: The options of this command for Slurm.
        concurrent: How many runs may train at the same time; by default all.
        dry_run: Only print the array.
        allow_changed: Keys that may differ from the checkpoints' although they change training.

    Raises:
        ConfigError: A run cannot work; nothing was submitted.
        SlurmError: Slurm refused the array; nothing of it is left on the disk.
    """
    site = request.site(site)
    wanted = _wanted_runs(paths, overrides)
    parents = [os.path.dirname(os.path.abspath(each.directory)) for each in wanted]
    folder = Path(os.path.commonpath(parents))
    runs = [allocate(each, site, request.nodes, allow_changed) for each in wanted]
    if not (runs := _to_send(runs, dry_run)):
        return
    _check_same_size(runs)
    check_runs(runs, dry_run)
    job = training_job(
        runs,
        site,
        request,
        concurrent or len(runs),
        slurm_job.job_name(".".join(folder.parts[-2:])),
        folder / LOGS,
    )
    if dry_run:
        print_dry_run(runs, job, {})
        return
    # squeue shows one name for all tasks of an array. Giving each task its own name would take one
    # call of scontrol per task, and split the array's record in slurmctld into one per task.
    for job_id, run in zip(ids := send(runs, job, {}), runs):
        print(f"job {job_id}: {run.config.run.directory}")
    print(
        f"submitted {len(ids)} runs of {runs[0].nodes} nodes x {runs[0].tasks_per_node} ranks, at "
        f"most {job.concurrent} at the same time"
    )
    folders = sorted({str(Path(each.run.directory).parent) for each in wanted})
    print("next: launcher status", *(f"{shlex.quote(folder)}/*" for folder in folders))


def _to_send(runs: Sequence[TrainingRun], dry_run: bool) -> list[TrainingRun]:
    """Return the runs that need a job, and print which do not.

    Raises:
        ConfigError: A run cannot resume.
        SlurmAway: slurmctld does not answer; in a dry run this is only a warning.
    """
    left_out = {run.directory: "finished" for run in runs if is_done(run.config, run.allow_changed)}
    left = [run for run in runs if run.directory not in left_out]
    with only_warned(dry_run, slurm.SlurmAway):
        left_out |= {run: f"{job} trains it" for run, job in jobs_of(left).items()}
    for run in runs:
        if run.directory in left_out:
            print(f"{run.config.run.directory}: {left_out[run.directory]}, left out")
    return [run for run in left if run.directory not in left_out]


def _check_same_size(runs: Sequence[TrainingRun]) -> None:
    """Raise ConfigError unless all runs have the same allocation, as a job array requires."""
    sizes = {(run.nodes + run.spare_nodes, run.tasks_per_node) for run in runs}
    if len(sizes) > 1:
        shown = " and ".join(f"{nodes} x {tasks}" for nodes, tasks in sorted(sizes))
        raise ConfigError(
            f"these runs need {shown} ranks (nodes x ranks per node), but all tasks of a "
            "job array have the same size. Sweep over each size separately"
        )
