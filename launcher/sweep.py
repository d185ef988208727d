"""Submit several runs as one job array, one for each config."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.launcher import slurm
from pretrain.launcher.site import Site, SlurmRequest
from pretrain.launcher.submit import (
    TrainingRun,
    allocate,
    check_runs,
    jobs_of,
    only_warned,
    print_dry_run,
    send,
    training_job,
)
from pretrain.rundir.jobs import is_done

LOGS = ".logs"
"""Folder of the array's logs, beside the runs; hidden, so that a shell's `*` gives only runs."""


def _wanted_runs(paths: Sequence[Path], overrides: Sequence[str]) -> list[RunConfig]:
    """Return the runs of the configs. Raise ConfigError if two have the same directory."""
    runs: dict[str, RunConfig] = {}
    for path in paths:
        config = load_config(path, overrides)
        directory = os.path.realpath(config.directory)
        if directory in runs:
            raise ConfigError(
                f"{path}: run.directory = {config.run.directory} is another run's of this sweep. "
                "Give each config a directory of its own"
            )
        runs[directory] = config
    return list(runs.values())


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
    more configs. All other runs are checked before anything is sent.

    Args:
        paths: The configs.
        site: The cluster.
        overrides: Settings of all runs, as --set takes them.
        request: What this command asks of Slurm.
        concurrent: How many runs may train at the same time; by default all.
        dry_run: Only print the array.
        allow_changed: Keys that may differ from the checkpoints' although they change training.

    Raises:
        ConfigError: A run cannot work; nothing was sent.
        SlurmError: Slurm refused the array; nothing is left of it on disk.
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
        slurm.job_name(".".join(folder.parts[-2:])),
        folder / LOGS,
    )
    if dry_run:
        print_dry_run(runs, job, {})
        return
    # squeue shows one name for all tasks of an array. Names of their own would take a call of
    # scontrol each, and split the array's one record in slurmctld into as many.
    for job_id, run in zip(ids := send(runs, job, {}), runs):
        print(f"job {job_id}: {run.config.run.directory}")
    print(
        f"submitted {len(ids)} runs of {runs[0].nodes} nodes x {runs[0].tasks_per_node} ranks, at "
        f"most {job.concurrent} at the same time"
    )
    folders = sorted({str(Path(each.run.directory).parent) for each in wanted})
    print("next: launcher status", *(f"{shlex.quote(folder)}/*" for folder in folders))


def _to_send(runs: Sequence[TrainingRun], dry_run: bool) -> list[TrainingRun]:
    """Return the runs that need a job, and say which do not.

    Raises:
        ConfigError: A run cannot go on.
        SlurmAway: slurmctld does not answer, and it is no dry run, which goes on with a warning.
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
