"""Do all that a published experiment takes: data, training, evaluations and their report.

Each part looks at what is there and leaves out what is done, so the same command goes on where an
earlier one was: data that is built stays, a job in the queue is followed, a finished run is
reported. The jobs need nobody to watch them; Ctrl-C ends the watching alone.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import EvaluationRequest, RunConfig, RunFailed, load_config
from pretrain.launcher.evaluations import submit_pending
from pretrain.launcher.login import evaluations, look
from pretrain.launcher.login.status import RunStatus, read_statuses
from pretrain.launcher.login.submit import allocate, check_with_slurm, submit, training_job
from pretrain.launcher.script import launcher_command
from pretrain.launcher.site import Site, load_site
from pretrain.launcher.slurm import run_command
from pretrain.launcher.terminal import say
from pretrain.rundir.checkpoints import checkpoints_awaiting_evaluation, named_by_step
from pretrain.rundir.jobs import is_done, missing_data
from pretrain.rundir.paths import STARTED_AGAIN, ExitCode, RunPaths, check_version, is_run

LOOK_SECONDS = 2.0
"""From one look at the queue, or at the evaluations, to the next."""


@dataclass(frozen=True)
class Experiment:
    """A run on a site, from its text to its report."""

    config_file: Path
    overrides: tuple[str, ...]
    site_file: Path
    config: RunConfig
    site: Site
    nodes: int | None
    time_limit: str | None
    options: evaluations.EvaluationOptions
    """The plan of its evaluations, unless the run has one already."""

    @property
    def directory(self) -> Path:
        """Return the run's directory, absolute."""
        return Path.cwd() / self.config.directory

    @property
    def is_finished(self) -> bool:
        """Return True if all steps of the config are done."""
        return is_done(self.config)


def run(
    config: Path,
    overrides: Sequence[str],
    site_file: Path,
    nodes: int | None,
    time_limit: str | None,
    request: EvaluationRequest,
) -> None:
    """Build the data, train, evaluate and report, each where that is not done yet.

    Args:
        config: The config's file.
        overrides: Its --set options.
        site_file: The site's file.
        nodes: Nodes of the run and of the build; by default as parallel.world_size needs, else one.
        time_limit: Of the training job; by default the site's.
        request: What the evaluations of its checkpoints measure.

    Raises:
        ConfigError: The run cannot work.
        RunFailed: Slurm refused or training did not finish.
        SystemExit: The build failed, or Ctrl-C.
    """
    options = evaluations.check_options(config, overrides, request, None, None)
    loaded = load_config(config, overrides)
    experiment = Experiment(
        config,
        tuple(overrides),
        site_file,
        loaded,
        load_site(site_file),
        nodes,
        time_limit,
        options,
    )
    check_version(experiment.directory)
    try:
        if not experiment.is_finished:
            _train(experiment)
        _evaluate(experiment)
    except KeyboardInterrupt:
        print(
            "not following any more; jobs go on, and the same command follows them again",
            file=sys.stderr,
        )
        raise SystemExit(ExitCode.INTERRUPTED) from None


# ---- data ----------------------------------------------------------------------------------------
def _build_data(experiment: Experiment, nodes: int) -> None:
    """Build the data set on the cluster, with `launcher data build`, unless there is one.

    Ctrl-C goes to that command as well, which cancels its jobs, keeps what is done and says so.

    Args:
        experiment: The run.
        nodes: As many tasks run at the same time as these have cores.

    Raises:
        SystemExit: The build ended with an error, which it has printed.
    """
    config = experiment.config
    if missing_data(config) is None:
        return
    say(f"{config.data_directory}: not built yet; building it with {nodes} nodes")
    settings = [word for override in experiment.overrides for word in ("--set", override)]
    words = [str(experiment.config_file), "--site", str(experiment.site_file), *settings]
    process = subprocess.Popen(launcher_command("data", "build", *words, f"--nodes={nodes}"))
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue
    if code:
        raise SystemExit(ExitCode.INTERRUPTED if code < 0 else code)


# ---- training ------------------------------------------------------------------------------------
def _train(experiment: Experiment) -> None:
    """Submit the run unless it has a job, and follow it until it is over.

    Raises:
        RunFailed: It is over, and not finished.
    """
    status = _status(experiment) if is_run(experiment.directory) else None
    if status is None or status.is_over:
        # Checked before data is built, which may take hours.
        allocated = allocate(experiment.config, experiment.site, experiment.nodes)
        job = training_job([allocated], experiment.site, experiment.time_limit)
        check_with_slurm([allocated], job)
        _build_data(experiment, allocated.nodes)
        submit(
            experiment.config,
            experiment.site,
            nodes=experiment.nodes,
            time_limit=experiment.time_limit,
            plan=experiment.options.plan,
        )
    else:
        say(f"{experiment.directory}: {status.state}; following it")
    status = _follow(experiment)
    if not experiment.is_finished:
        how = f"{status.state}: {status.reason}" if status.reason else status.state
        command = shlex.join(["launcher", "logs", str(experiment.directory)])
        raise RunFailed(
            f"{experiment.directory}: not finished ({how}). `{command}` shows why; the same "
            "command goes on from the newest checkpoint"
        )


def _follow(experiment: Experiment) -> RunStatus:
    """Print what the ranks print until the run is over, and return how it stands then."""
    printed = ""
    while True:
        status = _status(experiment)
        ended = status.attempts[-1].ended if status.attempts else None
        is_final = ended is not None and ended.outcome not in STARTED_AGAIN
        if status.is_over:
            return status
        # The last attempt of an earlier job is not what is to be followed, nor one whose job is
        # about to leave the queue.
        if not is_final or not status.attempts:
            print(look.follow(experiment.directory), file=sys.stderr, flush=True)
            continue
        line = f"{status.state} {status.reason}".strip()
        if line != printed:
            say(f"{experiment.directory}: {line}")
        printed = line
        time.sleep(LOOK_SECONDS)


def _status(experiment: Experiment) -> RunStatus:
    """Return how the run stands, waiting for slurmctld where it does not answer.

    Raises:
        NoSlurm: There is nothing to wait for on this machine.
    """
    printed = ""
    while True:
        [status], away = read_statuses([experiment.directory])
        if not away:
            return status
        run_command("squeue", ["--version"])
        if away != printed:
            say(f"{away}; it is asked again, and jobs go on meanwhile")
        printed = away
        time.sleep(LOOK_SECONDS)


# ---- evaluations ---------------------------------------------------------------------------------
def _evaluate(experiment: Experiment) -> None:
    """Wait until every checkpoint is evaluated, and print the report of all of them.

    Raises:
        RunFailed: The evaluation of a checkpoint was given up.
        SystemExit: The report could not be made, which it has said.
    """
    run = experiment.directory
    paths = RunPaths(run)
    # A plan that was given up, or never made, is made now, with new tries for every checkpoint.
    if not paths.evaluation_plan.exists() or _given_up(run):
        evaluations.evaluate_run(run, experiment.site, experiment.options)
    printed = 0
    while waiting := checkpoints_awaiting_evaluation(run):
        if len(waiting) != printed:
            say(f"{run}: {len(waiting)} checkpoints wait for their evaluation")
        printed = len(waiting)
        submit_pending(run)
        time.sleep(LOOK_SECONDS)
    report = [sys.executable, "-m", "pretrain", "report", str(run)]
    if code := subprocess.run(report, check=False).returncode:
        raise SystemExit(code)
    print(f"report: {paths.evaluations / 'report.md'}")
    if given_up := _given_up(run):
        raise RunFailed(
            f"{', '.join(given_up)}: not evaluated; see failed.json in {paths.evaluations}. The "
            "same command tries again"
        )


def _given_up(run: Path) -> list[str]:
    """Return the names of the checkpoints whose evaluation was given up."""
    results = named_by_step(RunPaths(run).evaluations)
    return [result.name for result in results if (result / "failed.json").exists()]
