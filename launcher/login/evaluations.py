"""Plan the evaluation of a run's checkpoints, from the login node."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError, EvaluationRequest, RunConfig, load_config
from pretrain.launcher.cluster import Site
from pretrain.launcher.evaluations import Plan, submit_waiting, write_plan
from pretrain.launcher.job import Job, check_path, check_time, job_name
from pretrain.launcher.login.submit import TrainingRun
from pretrain.launcher.terminal import say
from pretrain.rundir.checkpoints import checkpoints_awaiting_evaluation, named_by_step
from pretrain.rundir.paths import RunPaths


@dataclass(frozen=True)
class Asked:
    """What a person asks for with --evaluate-checkpoints."""

    request: EvaluationRequest
    tasks: int | None = None
    """GPUs of one node; None: as many as training has on each of its."""
    time_limit: str | None = None
    """None: training's."""

    def plan(self, run: TrainingRun, training: Job) -> str:
        """RUN/evaluations/plan.json for a run that `training` trains."""
        return make_plan(run.config, run.directory, training, self).dump()


def ask(
    config: Path,
    overrides: Sequence[str],
    request: EvaluationRequest,
    tasks: int | None,
    time_limit: str | None,
) -> Asked:
    """Raises ConfigError when the run's model cannot be evaluated as `request` says."""
    # One process holds whole sequences, however training shares them.
    load_config(config, [*overrides, *request.overrides(), "parallel.sequence_parallel=false"])
    return Asked(request, tasks, time_limit)


def make_plan(config: RunConfig, run: Path, training: Job, asked: Asked) -> Plan:
    """For a run that `training` trains.

    A model that tensor parallelism split stays split where these divide (it may not fit otherwise). The rest is
    data-parallel: weights alone are a small part of what a GPU holds in training, so pipeline stages are not needed.
    Raises ConfigError when a node has not so many.
    """
    most = training.site.max_tasks_per_node
    tasks = asked.tasks or training.tasks_per_node
    if tasks > most:
        raise ConfigError(
            f"evaluation tasks = {tasks}: a node of site {training.site.name} takes {most}. Ask for fewer"
        )
    tensor = config.parallel.tensor_model_parallel_size
    split = (
        (f"parallel.tensor_model_parallel_size={tensor}",)
        if tensor > 1 and tasks % tensor == 0
        else ()
    )
    # A name for this run alone: jobs of one name wait for each other.
    name = f"eval-{training.name[:40]}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:8]}"
    job = Job(
        name=job_name(name),
        site=training.site,
        directory=training.directory,
        logs=RunPaths(run).logs,
        commands=(),
        tasks_per_node=tasks,
        time_limit=asked.time_limit or training.time_limit,
    )
    check_time(job.time_limit, 0)
    return Plan(asked.request, job, split)


def evaluate_run(run: Path, site: Site, asked: Asked) -> None:
    """Plans for a run that was sent without --evaluate-checkpoints, or gives what was given up a new chance.

    Jobs start in the present directory, as training's did. Raises ConfigError, and SlurmError when Slurm refuses.
    """
    check_path("RUN", run)
    config = load_config(run_config(run))
    like = Job(
        job_name(".".join(run.parts[-2:])),
        site,
        Path.cwd(),
        RunPaths(run).logs,
        (),
        tasks_per_node=site.max_tasks_per_node,
        time_limit=site.time_limit,
    )
    plan = make_plan(config, run, like, asked)
    write_plan(run, plan)
    for result in named_by_step(RunPaths(run).evaluations):
        if (result / "failed.json").exists():
            shutil.rmtree(result)
    if waiting := [path.name for path in checkpoints_awaiting_evaluation(run)]:
        submit_waiting(run, plan, waiting)
    else:
        say(
            f"{run}: no checkpoint waits for an evaluation; those that training still saves will get theirs"
        )


def run_config(run: Path) -> Path:
    """The config that a run was sent or started with. Raises ConfigError."""
    config = RunPaths(run).newest_config()
    if config is None:
        raise ConfigError(
            f"{run}: not a run's directory (no config.toml). Give the run.directory of its config"
        )
    return config
