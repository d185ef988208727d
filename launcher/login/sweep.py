"""Submit several runs as one job array: one for each combination of values, or for each config.

`launcher.local_sweep` trains the same runs on this machine.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import ConfigError
from pretrain.launcher import slurm
from pretrain.launcher.cluster import Site
from pretrain.launcher.job import job_name
from pretrain.launcher.login.allocation import TrainingRun, allocate, check_runs, jobs_of
from pretrain.launcher.login.submit import print_dry_run, send, training_job
from pretrain.launcher.login.sweep_runs import wanted_runs
from pretrain.launcher.request import NO_REQUEST, SlurmRequest
from pretrain.rundir.starts import is_done

LOGS = ".logs"
"""Folder of the array's logs, beside the runs; hidden, so that a shell's `*` gives only runs."""


def sweep(
    paths: Sequence[Path],
    site: Site,
    axes: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    nodes: int | None = None,
    time_limit: str | None = None,
    save_before: int | None = None,
    concurrent: int | None = None,
    dry_run: bool = False,
    allow_changed: Sequence[str] = (),
    request: SlurmRequest = NO_REQUEST,
) -> None:
    """Submit one run for each combination of values, or for each config, as one job array.

    Finished runs and those that a job trains are left out, so a sweep may be repeated, also with
    more values. All other runs are checked before anything is sent.

    Args:
        paths: The config that the runs have in common, or several, each of which is a run.
        site: The cluster.
        axes: The keys and their values, as "section.key=value,value"; none in a list of configs.
        overrides: Settings of all runs, as --set takes them.
        nodes: Nodes per run; by default as many as parallel.world_size needs, else one.
        time_limit: Time limit per run; by default the site's.
        save_before: Seconds before the time limit at which to save.
        concurrent: How many runs may train at the same time; by default all.
        dry_run: Only print the array.
        allow_changed: Keys that may differ from the checkpoints' although they change training.
        request: What this command asks of Slurm.

    Raises:
        ConfigError: The axes are malformed, or a run cannot work; nothing was sent.
        SlurmError: Slurm refused the array; nothing is left of it on disk.
    """
    site = request.site(site)
    wanted, shared = wanted_runs(paths, axes, overrides)
    folder = Path.cwd() / shared
    allocated = [allocate(each.config, site, nodes, each.over) for each in wanted]
    allowed = tuple(allow_changed)
    runs = [dataclasses.replace(run, allow_changed=allowed) for run in allocated]
    if not (runs := _to_send(runs, dry_run)):
        return
    _check_same_size(runs)
    check_runs(runs, site, dry_run)
    job = training_job(
        runs,
        site,
        time_limit,
        save_before,
        concurrent or len(runs),
        job_name(folder.name if axes else ".".join(folder.parts[-2:])),
        folder / LOGS,
        request,
    )
    if dry_run:
        print_dry_run(runs, job)
        return
    # squeue shows one name for all tasks of an array. Names of their own would take a call of
    # scontrol each, and split the array's one record in slurmctld into as many.
    for job_id, run in zip(ids := send(runs, job), runs):
        print(f"job {job_id}: {run.config.run.directory}")
    print(
        f"submitted {len(ids)} runs of {runs[0].nodes} nodes x {runs[0].tasks_per_node} ranks, at "
        f"most {job.concurrent} at the same time"
    )
    folders = sorted({str(Path(each.config.run.directory).parent) for each in wanted})
    print("next: launcher status", *(f"{shlex.quote(folder)}/*" for folder in folders))


def _to_send(runs: Sequence[TrainingRun], dry_run: bool) -> list[TrainingRun]:
    """Return the runs that need a job, and say which do not.

    Raises:
        ConfigError: A run cannot go on.
        SlurmAway: slurmctld does not answer, and it is no dry run, which goes on with a warning.
    """
    left_out = {run.directory: "finished" for run in runs if is_done(run.config, run.allow_changed)}
    left = [run for run in runs if run.directory not in left_out]
    try:
        left_out |= {run: f"{job} trains it" for run, job in jobs_of(left).items()}
    except slurm.SlurmAway:
        # `check_runs` warns of it in a dry run.
        if not dry_run:
            raise
    for run in runs:
        if run.directory in left_out:
            print(f"{run.config.run.directory}: {left_out[run.directory]}, left out")
    return [run for run in left if run.directory not in left_out]


def _check_same_size(runs: Sequence[TrainingRun]) -> None:
    """Raise ConfigError unless all runs have the same allocation, as a job array requires."""
    sizes = {(run.nodes, run.spare_nodes, run.tasks_per_node) for run in runs}
    if len(sizes) > 1:
        shown = " and ".join(
            f"{nodes} x {tasks}" + (f" and {spare} spare nodes" if spare else "")
            for nodes, spare, tasks in sorted(sizes)
        )
        raise ConfigError(
            f"these runs need {shown} ranks (nodes x ranks per node), but all tasks of a "
            "job array have the same size. Sweep over each size separately"
        )
