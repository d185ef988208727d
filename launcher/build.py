"""Build a data set on a cluster.

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
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import ConfigError, load_config
from pretrain.config.errors import say
from pretrain.launcher import slurm
from pretrain.launcher.site import Site, load_site
from pretrain.launcher.submit import check_time
from pretrain.rundir.paths import ExitCode

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
        dry_run: Print an estimate of the data set, and submit nothing.

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
