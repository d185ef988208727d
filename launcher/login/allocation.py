"""Allocate runs on a site, and refuse those that cannot work there.

Refusing happens on the login node and before anything is written or sent, because the alternative
is an error after hours in the queue.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, RunConfig
from pretrain.launcher import slurm
from pretrain.launcher.cluster import Site
from pretrain.launcher.job import check_path, job_name
from pretrain.launcher.login.build import check_build
from pretrain.rundir.jobs import read_jobs
from pretrain.rundir.starts import check_data, check_goes_on, missing_data
from pretrain.rundir.states import JobKind


@dataclass(frozen=True)
class TrainingRun:
    """A run and its allocation on the site: `nodes` x `tasks_per_node` ranks."""

    config: RunConfig
    directory: Path
    """The run's directory, absolute."""
    nodes: int
    tasks_per_node: int
    over: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """In a sweep: the keys and values that distinguish this run from the others."""
    allow_changed: tuple[str, ...] = ()
    """The keys of --allow-changed."""

    @property
    def num_tasks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.tasks_per_node

    @property
    def spare_nodes(self) -> int:
        """Nodes that the job holds beside those."""
        return self.config.recovery.spare_nodes

    @property
    def name(self) -> str:
        """Slurm's job name: "demo.alibi" for runs/demo/alibi."""
        return job_name(".".join(self.directory.parts[-2:]))


def allocate(
    config: RunConfig, site: Site, nodes: int | None, over: Mapping[str, Any] | None = None
) -> TrainingRun:
    """Choose the nodes and the tasks per node of a run.

    Args:
        config: The run.
        site: The cluster.
        nodes: Nodes to request; by default as many as parallel.world_size needs, else one.
        over: In a sweep, the keys and values that distinguish this run.

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
    if num_nodes > site.nodes:
        largest = f" or --set parallel.world_size={site.nodes * max_tasks}" if world_size else ""
        raise ConfigError(
            f"nodes = {num_nodes}: site {site.name} has {site.nodes} nodes with {size} each. "
            f"Request fewer with --nodes{largest}"
        )
    if num_nodes + (spare := config.recovery.spare_nodes) > site.nodes:
        raise ConfigError(
            f"recovery.spare_nodes = {spare}: beside the {num_nodes} nodes that train, site "
            f"{site.name} has {site.nodes - num_nodes} more. Set "
            f"recovery.spare_nodes={site.nodes - num_nodes}, or request fewer nodes with --nodes"
        )
    tasks = max_tasks if world_size is None else world_size // num_nodes
    # sbatch and srun get --ntasks-per-node, one number for all nodes.
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
    # Refuses ranks that tensor x pipeline parallelism or the batch sizes cannot be divided among.
    config.layout(num_nodes * tasks)
    # Absolute, because the job gets this path whatever directory it starts in.
    directory = Path.cwd() / config.directory
    check_path("run.directory", directory)
    return TrainingRun(config, directory, num_nodes, tasks, over or {})


def check_runs(runs: Sequence[TrainingRun], site: Site, dry_run: bool = False) -> None:
    """Check that runs may be submitted: they can go on, are in no job, and their data is built.

    Args:
        runs: The runs.
        site: The cluster.
        dry_run: Print a warning instead of refusing when data is missing, slurmctld does not answer
            or torch was built for other GPUs, because a dry run is useful before all is there.

    Raises:
        ConfigError: torch was not built for the site's GPUs, a run is in a job already, another
            user may write to its directory, its newest checkpoint was trained with a config from
            which it cannot go on, or its data is not built.
        SlurmAway: slurmctld does not answer, so it is unknown if a run is in a job.
    """
    # It becomes the job's --chdir, since relative paths in the config begin there.
    check_path("the directory you are in", Path.cwd())
    try:
        check_build(site)
    except ConfigError as error:
        if not dry_run:
            raise
        print(f"warning: {error}", file=sys.stderr)
    for run in runs:
        check_goes_on(run.config, run.allow_changed)
    try:
        _check_not_in_a_job(runs)
    except slurm.SlurmAway as error:
        if not dry_run:
            raise
        print(f"warning: {error}", file=sys.stderr)
    # Usually one data set, which all runs of a sweep share.
    for config in {run.config.data.directory: run.config for run in runs}.values():
        if not dry_run:
            check_data(config)
        elif missing_data(config):
            print(
                f"warning: data.directory = {config.data_directory}: not built yet; run `pretrain "
                "data build CONFIG` before you submit",
                file=sys.stderr,
            )


def jobs_of(runs: Sequence[TrainingRun]) -> dict[Path, str]:
    """Return the directories of the runs that a job trains or will train, with that job.

    Raises:
        SlurmAway: slurmctld does not answer, so it is unknown.
    """
    sent = {
        record.job_id: run
        for run in runs
        for record in read_jobs(run.directory)
        if record.kind == JobKind.TRAIN
    }
    states = slurm.jobs(sent, slurm.TRIES)
    if states is None:
        job_id, run = list(sent.items())[-1]
        raise slurm.SlurmAway(
            f"squeue: slurmctld does not answer, so it is unknown if job {job_id} still trains "
            f"{run.directory}. Try again later"
        )
    # squeue forgets a job minutes after its end (MinJobAge), so one without a state is over.
    return {
        run.directory: f"job {job_id} ({states[job_id].state})"
        for job_id, run in sent.items()
        if job_id in states and not states[job_id].is_over
    }


def _check_not_in_a_job(runs: Sequence[TrainingRun]) -> None:
    """Raise ConfigError when a job of one of the runs is pending or running.

    A second job would do no damage, since the lock in RUN/attempts admits one attempt at a time,
    but it would hold its nodes only to fail.
    """
    jobs = jobs_of(runs)
    for run in runs:
        if job := jobs.get(run.directory):
            job_id = job.split()[1]
            raise ConfigError(
                f"run.directory = {run.config.run.directory}: {job} trains this run. Wait until it "
                f"ends, or cancel it with `scancel {job_id}`"
            )
