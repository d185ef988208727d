"""Plan the evaluation of a run's checkpoints, from the login node.

The plan says what is measured and with what kind of job (`pretrain.launcher.evaluations.Plan`).
Training's supervisor, and each evaluation job when it ends, read it and send the next jobs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError, EvaluationRequest, RunConfig, load_config
from pretrain.launcher.evaluations import Plan, submit_waiting, write_plan
from pretrain.launcher.login.submit import TrainingRun
from pretrain.launcher.script import Job, check_path, check_time, job_name
from pretrain.launcher.site import Site
from pretrain.launcher.terminal import say
from pretrain.rundir.checkpoints import checkpoints_awaiting_evaluation, named_by_step
from pretrain.rundir.paths import RunPaths, check_version
from pretrain.rundir.trust import check_trusted


@dataclass(frozen=True)
class EvaluationOptions:
    """Hold the user's options for the evaluation of checkpoints."""

    request: EvaluationRequest
    """The lengths and protocols to measure."""
    tasks: int | None = None
    """GPUs of one evaluation, on one node; None: as many as training has on each of its nodes."""
    time_limit: str | None = None
    """Time limit of one evaluation; None: training's."""

    def plan(self, run: TrainingRun, training: Job) -> str:
        """Return the text of RUN/evaluations/plan.json for a run that the job `training` trains."""
        return make_plan(run.config, run.directory, training, self).dump()


def check_options(
    config: Path,
    overrides: Sequence[str],
    request: EvaluationRequest,
    tasks: int | None,
    time_limit: str | None,
) -> EvaluationOptions:
    """Return the options, after checking that the run's model can be evaluated so.

    Args:
        config: The config of the run whose checkpoints will be evaluated.
        overrides: The run's settings, as --set takes them.
        request: What is measured.
        tasks: GPUs of one evaluation; None: as training has on each node.
        time_limit: Time limit of one evaluation; None: training's.

    Raises:
        ConfigError: The model cannot be evaluated as `request` says, for example at a length beyond
            its position embeddings.
    """
    # An evaluation does not split sequences between ranks, even where training does.
    run = load_config(config, [*overrides, "parallel.sequence_parallel=false"])
    request.applied_to(run, str(config))
    return EvaluationOptions(request, tasks, time_limit)


def make_plan(config: RunConfig, run: Path, training: Job, options: EvaluationOptions) -> Plan:
    """Return the plan for the checkpoints of a run.

    A model that training splits by tensor parallelism stays split where the evaluation's tasks
    allow it, because it may not fit on one GPU otherwise. The remaining ranks are data-parallel.
    Pipeline stages are not needed: weights alone are a small part of what a GPU holds in training.

    Args:
        config: The run's config.
        run: The run's directory.
        training: The job that trains the run. Its site, directory and, by default, its tasks per
            node and time limit are used.
        options: What the user asked for.

    Raises:
        ConfigError: A node of the site has fewer GPUs than were asked for, or the time limit is
            malformed.
    """
    max_tasks = training.site.max_tasks_per_node
    tasks = options.tasks or training.tasks_per_node
    if tasks > max_tasks:
        raise ConfigError(
            f"evaluation tasks = {tasks}: a node of site {training.site.name} takes {max_tasks}. "
            "Request fewer"
        )
    overrides: tuple[str, ...] = ()
    tensor = config.parallel.tensor_model_parallel_size
    if tensor > 1 and tasks % tensor == 0:
        overrides = (f"parallel.tensor_model_parallel_size={tensor}",)
    # The jobs are sent with --dependency=singleton, so jobs of one name wait for each other. The
    # hash keeps runs apart whose shortened names agree.
    name = f"eval-{training.name[:40]}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:8]}"
    job = Job(
        name=job_name(name),
        site=training.site,
        directory=training.directory,
        logs=RunPaths(run).logs,
        commands=(),
        tasks_per_node=tasks,
        time_limit=options.time_limit or training.time_limit,
    )
    # An evaluation saves nothing before its time limit, so it needs no time before the signal.
    check_time(job.time_limit, 0)
    return Plan(options.request, job, overrides)


def evaluate_run(run: Path, site: Site, options: EvaluationOptions) -> None:
    """Plan the evaluation of a run that was submitted, and send jobs for the checkpoints it has.

    Checkpoints that were given up after failed evaluations are tried again. The jobs start in the
    current directory, where relative paths of the run's config must begin, as training's did.

    Args:
        run: The run's directory, absolute.
        site: The cluster.
        options: What the user asked for.

    Raises:
        ConfigError: `run` is not a run's directory, or the plan does not fit the site.
        SlurmError: Slurm refused a job.
    """
    check_path("RUN", run)
    check_trusted(run)
    check_version(run)
    config = load_config(run_config(run))
    # The run's own job may be long over, so this stands in for it: whole nodes of the site.
    training = Job(
        job_name(".".join(run.parts[-2:])),
        site,
        Path.cwd(),
        RunPaths(run).logs,
        (),
        tasks_per_node=site.max_tasks_per_node,
        time_limit=site.time_limit,
    )
    plan = make_plan(config, run, training, options)
    # Written before the jobs are sent: they read it when they start.
    write_plan(run, plan)
    # A folder with failed.json stands in the place of a result; without it the checkpoint counts
    # as not evaluated again.
    for result in named_by_step(RunPaths(run).evaluations):
        if (result / "failed.json").exists():
            shutil.rmtree(result)
    if waiting := [path.name for path in checkpoints_awaiting_evaluation(run)]:
        submit_waiting(run, plan, waiting)
    else:
        say(
            f"{run}: no checkpoint is waiting for an evaluation; those that training saves from "
            "now on will be evaluated"
        )


def run_config(run: Path) -> Path:
    """Return the config that a run was submitted or started with.

    Raises:
        ConfigError: The directory has none, so it is not a run's.
    """
    config = RunPaths(run).newest_config()
    if config is None:
        raise ConfigError(
            f"{run}: not a run's directory (no config.toml). Give the run.directory of its config"
        )
    return config
