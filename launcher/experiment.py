"""Do what an experiment takes on a cluster: build its data, train, evaluate, report.

Each part looks at what is there and leaves out what is done, so the same command goes on where an
earlier one was: data that is built stays, a job in the queue is followed, a finished run is
reported. The jobs need nobody to watch them; Ctrl-C ends the watching alone.

`pretrain data build` plans, merges and finishes in one process on this machine, which holds the
build's lock. For each of the two stages that work in parallel it runs `launcher data array`, which
submits the tasks as a job array and waits for its end. When that command's stdin is closed, because
the builder has ended in whatever way, it cancels the array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.config import ConfigError, EvaluationRequest, RunConfig, RunFailed, load_config
from pretrain.launcher import evaluations, look, slurm
from pretrain.launcher.site import Site, SlurmRequest, load_site
from pretrain.launcher.status import RunStatus, read_statuses
from pretrain.launcher.submit import allocate, check_time, check_with_slurm, submit, training_job
from pretrain.launcher.terminal import say
from pretrain.rundir.checkpoints import checkpoints_awaiting_evaluation, named_by_step
from pretrain.rundir.jobs import is_done, missing_data
from pretrain.rundir.paths import STARTED_AGAIN, ExitCode, RunPaths, check_version, is_run

RUN_JOB = ("-m", "pretrain.data.build")
"""Arguments of Python, before the path of the file that says what the jobs do."""
LOOK_SECONDS = 2.0
"""From one look at the queue, or at the evaluations, to the next."""
CANCEL_SECONDS = 60
"""The longest wait for jobs to be gone after they were cancelled; Slurm's KillWait is 30 s."""


def build(
    config: Path,
    overrides: Sequence[str],
    site_file: Path,
    nodes: int,
    time_limit: str | None,
    dry_run: bool,
) -> None:
    """Become the process that builds the data set; with `dry_run` print what would be done.

    Args:
        config: The config's file.
        overrides: Its --set options.
        site_file: The site's file.
        nodes: As many tasks run at the same time as these have cores.
        time_limit: Of each job; by default the site's.
        dry_run: Print a job, and the files, bytes and tasks of each corpus; submit nothing.

    Raises:
        ConfigError: The site does not have these nodes, or the directory cannot be used.
        SlurmError: Slurm does not answer or has no job arrays.
    """
    run, site = load_config(config, overrides), load_site(site_file)
    if nodes > site.nodes:
        raise ConfigError(
            f"nodes = {nodes}: site {site.name} has {site.nodes} nodes. Request fewer with --nodes"
        )
    directory = run.data_directory.absolute()
    slurm.check_path("data.directory", directory)
    workers = nodes * site.cpus_per_node
    check_time(time_limit or site.time_limit, 0)
    name = build_name(directory)
    options = ["--site", str(site_file.absolute()), "--name", name, "--concurrent", str(workers)]
    if time_limit:
        options += ["--time", time_limit]
    words = [str(config), *(word for each in overrides for word in ("--set", each))]
    command = [sys.executable, "-m", "pretrain", "data", "build", *words, f"--workers={workers}"]
    if dry_run:
        _print_dry_run(data_job(site, name, Path("array"), workers, workers, time_limit))
        command.append("--dry-run")
    else:
        command.append(f"--array-size={slurm.array_size()}")
        command.append(
            f"--job-array={json.dumps(slurm.launcher_command('data', 'array', *options))}"
        )
    sys.stdout.flush()
    os.execv(command[0], command)


def build_name(directory: Path) -> str:
    """Return the name of all jobs that build a data set, by which they are found again.

    Args:
        directory: data.directory, absolute.
    """
    digest = hashlib.sha256(os.fsencode(os.path.normpath(directory))).hexdigest()[:12]
    # ASCII alone, because squeue looks for the jobs by this name.
    readable = directory.name[:40].encode("ascii", "ignore").decode()
    return slurm.job_name(f"data-{readable}-{digest}")


def data_job(
    site: Site, name: str, array: Path, tasks: int, concurrent: int, time_limit: str | None
) -> slurm.Job:
    """Return the job array that builds a part of a data set, with one core for each of its tasks.

    Args:
        site: The cluster. Of its nodes no GPU is asked for, and memory by the core.
        name: The jobs' name.
        array: The file that says what the tasks do. The jobs' logs go to its folder.
        tasks: Tasks of the array.
        concurrent: The most of them that run at the same time.
        time_limit: Of each task; by default the site's.
    """
    cores = site.model_copy(
        update={
            "gpus_per_node": 0,
            "gpu_type": None,
            "tasks_per_node": site.cpus_per_node,
            # "0" is all of a node's memory, which a task on one core must not take.
            "memory_per_node": None if site.memory_per_node == "0" else site.memory_per_node,
            # A tokenizer would start a thread for each core that it sees.
            "environment": {"RAYON_NUM_THREADS": "1"} | site.environment,
        }
    )
    python = site.ranks_python or sys.executable
    job = slurm.Job(
        name=name,
        site=cores,
        directory=Path.cwd(),
        logs=array.parent,
        commands=(),
        time_limit=time_limit or site.time_limit,
        concurrent=concurrent,
        repeats=tasks,
    )
    return dataclasses.replace(job, commands=((*job.single(), python, *RUN_JOB, str(array)),))


def _print_dry_run(job: slurm.Job) -> None:
    """Print a job array as it would be sent, and what Slurm says about its start.

    Raises:
        SlurmError: Slurm would refuse the job.
    """
    print(job.script())
    print(
        f"# each of the two stages is submitted with\n{job.command_line()}\n"
        "# where the size of the array, its logs and the path above follow from the stage\n"
    )
    try:
        print(slurm.answer(slurm.test(job.arguments(), job.script())), end="\n\n")
    except ConfigError as error:
        # A machine without Slurm's commands may show the job all the same.
        print(slurm.answer(f"not asked: {error}"), end="\n\n")


# ---- a job array ---------------------------------------------------------------------------------
def run_array(job: slurm.Job, stop: Path) -> None:
    """Submit a job array, and wait until no job of its name is in the queue.

    An array of 0 tasks is not submitted: then this waits for jobs that an earlier command left. The
    jobs are cancelled when stdin is closed, and when the file `stop` appears. While slurmctld does
    not answer it is asked again.

    Args:
        job: The array.
        stop: The file with which a task says that it has failed.

    Raises:
        SlurmError: Slurm refused the array.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # They also come to the builder, whose end closes stdin. Inherited by sbatch and scancel,
        # which a Ctrl-C must not end half-way either.
        signal.signal(number, signal.SIG_IGN)
    job_id = None
    if job.repeats:
        job_id = slurm.submit(job)
        say(
            f"job {job_id}: {job.repeats} array tasks, at most {job.concurrent} at the same time. "
            "Ctrl-C cancels it"
        )
    is_wanted = _wait(job.name, stop, job_id)
    if bad := slurm.array_failures(job_id) if job_id else None:
        say(f"job {job_id}: {', '.join(f'{n} tasks {state}' for state, n in bad.items())}")
    if not is_wanted:
        say("What is finished is kept; run the same command to go on")
        raise SystemExit(ExitCode.INTERRUPTED)


def _wait(name: str, stop: Path, ours: str | None) -> bool:
    """Wait until no job of a name is in the queue. Return False if stdin was closed before.

    Args:
        name: The jobs' name.
        stop: The file with which a task says that it has failed.
        ours: The job that was submitted here; None for those that an earlier command left.
    """
    said = ""
    seen = {ours} if ours else set()
    while (live := slurm.jobs_named(name)) != {}:
        seen |= set(live or ())
        line = _in_words(live, ours)
        if line and line != said:
            say(line)
        said = line
        # Nobody writes to it, so it is readable at its end alone.
        is_closed = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
        if is_closed or stop.exists():
            _cancel(name, seen)
            return not is_closed
    return True


def _in_words(live: dict[str, set[str]] | None, ours: str | None) -> str:
    """Say what is worth knowing about the jobs; nothing about a job of ours that runs."""
    if live is None:
        return f"{slurm.AWAY}; it is asked again, and jobs go on meanwhile"
    ids = ", ".join(sorted(live))
    if not ours:
        return f"job {ids}: left by an earlier command. Waiting for its end; Ctrl-C cancels it"
    # Slurm has not yet looked at a job whose reason is None.
    waits_for = sorted(set().union(*live.values()) - {"None"})
    if not waits_for or "" in waits_for:
        return ""
    return f"job {ids}: waits in the queue ({', '.join(waits_for)})"


def _cancel(name: str, seen: set[str]) -> None:
    """End jobs, and wait until they are gone.

    Args:
        name: Their name.
        seen: Their ids. The jobs of a command that was started meanwhile have the same name.
    """
    deadline = time.monotonic() + CANCEL_SECONDS
    asked: set[str] = set()
    while time.monotonic() < deadline:
        live = slurm.jobs_named(name)
        if live is not None and not live.keys() & seen:
            return
        # Whatever the queue shows: it may not show yet what sbatch took a moment ago.
        for job_id in seen - asked:
            with contextlib.suppress(slurm.SlurmError):
                slurm.cancel(job_id)
                asked.add(job_id)
                say(f"job {job_id}: cancelled")
        time.sleep(LOOK_SECONDS)
    say(f"jobs named {name} are still in the queue; the next command waits for them")


@dataclass(frozen=True)
class Experiment:
    """A run on a site, from its text to its report."""

    config_file: Path
    overrides: Sequence[str]
    site_file: Path
    config: RunConfig
    site: Site
    request: SlurmRequest
    """What its training job asks of Slurm."""
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
    request: SlurmRequest,
    evaluation: EvaluationRequest,
) -> None:
    """Build the data, train, evaluate and report, each where that is not done yet.

    Args:
        config: The config's file.
        overrides: Its --set options.
        site_file: The site's file.
        request: What its training job asks of Slurm. As many nodes build the data.
        evaluation: What the evaluations of its checkpoints measure.

    Raises:
        ConfigError: The run cannot work.
        RunFailed: Slurm refused or training did not finish.
        SystemExit: The build failed, or Ctrl-C.
    """
    options = evaluations.EvaluationOptions(evaluation)
    options.check(config, overrides)
    loaded, site = load_config(config, overrides), load_site(site_file)
    experiment = Experiment(config, overrides, site_file, loaded, site, request, options)
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
    process = subprocess.Popen(slurm.launcher_command("data", "build", *words, f"--nodes={nodes}"))
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
        request, site = experiment.request, experiment.request.site(experiment.site)
        allocated = allocate(experiment.config, site, request.nodes)
        check_with_slurm([allocated], training_job([allocated], site, request))
        _build_data(experiment, allocated.nodes)
        submit(experiment.config, experiment.site, request, plan=experiment.options.plan_text)
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
        slurm.check_installed()
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
    submit_pending, printed = evaluations.PendingEvaluations(run), 0
    while waiting := checkpoints_awaiting_evaluation(run):
        if len(waiting) != printed:
            say(f"{run}: {len(waiting)} checkpoints wait for their evaluation")
        printed = len(waiting)
        submit_pending()
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
