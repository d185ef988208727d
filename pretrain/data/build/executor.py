"""Do the tasks of a stage that are not done: in a pool of processes here, or as a Slurm job array.

A task is done if its output is there and whole (`folder.is_done`), whoever did it and however that
process ended.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from pretrain.config import ConfigError, NoSpace, RunFailed
from pretrain.data.build.folder import BuildFolder, Stage, is_done
from pretrain.data.build.tasks import Stopped, do_task
from pretrain.rundir.files import make_directory, read_json, replace_json

READERS = 8
"""Threads that look for finished outputs."""


def undone(finals: list[Path]) -> list[int]:
    """Return the numbers of the tasks that are not done. Reads every output that is there.

    Args:
        finals: Where the output of each task is published.
    """
    # On NFS a name that was missing a moment ago may be remembered as missing. Opening the folder
    # asks the server.
    for folder in {final.parent for final in finals}:
        if folder.is_dir():
            os.listdir(folder)
    with ThreadPoolExecutor(READERS) as pool:
        return [rank for rank, done in enumerate(pool.map(is_done, finals)) if not done]


def run_locally(folder: BuildFolder, stage: Stage, finals: list[Path], workers: int) -> None:
    """Do every task of a stage that is not done, on this machine.

    Args:
        folder: The build.
        stage: The stage.
        finals: Where the output of each task is published.
        workers: Processes; one runs the tasks in this process.

    Raises:
        RunFailed: A worker was killed. Errors of tasks are raised as they are.
    """
    ranks = undone(finals)
    if min(workers, len(ranks)) <= 1:
        for rank in ranks:
            do_task(folder, stage, rank)
        return
    context = multiprocessing.get_context("forkserver")
    # Imported once, and inherited by the workers.
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(workers, len(ranks)), context, _begin_worker) as pool:
        try:
            tasks = [pool.submit(do_task, folder, stage, rank) for rank in ranks]
            for done in as_completed(tasks):
                done.result()
        except BrokenProcessPool:
            raise RunFailed(
                f"{folder.path}: a worker process was killed, often because memory ran out "
                "(`dmesg` says so). Use fewer --workers, or lower data.bytes_per_task and start "
                "over; the same command goes on with the tasks that are not done"
            ) from None
        except BaseException:
            folder.stop.touch()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    """Leave Ctrl-C to the builder, and end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


# ---- a job array ---------------------------------------------------------------------------------
# Whatever speaks to Slurm is another program (`launcher data array`), which is given as a command.
# It submits the array, waits for its end and prints what happens; when its stdin is closed, however
# this process ends, it cancels the array. A job runs `python -m pretrain.data.build ARRAY`.


ARRAY = "array.json"
"""File that says which tasks the jobs of an array do. Their logs lie beside it."""
LAST_CHARACTERS = 300
"""Of a log, in a message."""
_ERRORS = {kind.__name__: kind for kind in (ConfigError, NoSpace, RunFailed)}


class Cluster(NamedTuple):
    """The command and the limits by which job arrays run on a cluster."""

    command: tuple[str, ...]
    """Runs an array when the number of its jobs, the file ARRAY and the file that asks it to stop
    are added."""
    workers: int
    """The most jobs of an array that run at the same time."""
    array_size: int
    """The most jobs that an array may have."""


def run_on_cluster(folder: BuildFolder, stage: Stage, finals: list[Path], cluster: Cluster) -> None:
    """Do every task of a stage that is not done, as one job array, and wait for its end.

    Args:
        folder: The build.
        stage: The stage.
        finals: Where the output of each task is published.
        cluster: How to run job arrays.

    Raises:
        ConfigError: The text or a tokenizer cannot be used; the message is the task's.
        RunFailed: Slurm refused, or tasks ended without an output.
    """
    path = folder.logs / stage / ARRAY
    make_directory(path.parent)
    # An earlier command may have been killed with its jobs in the queue. They would meet what is
    # written below, and do tasks that new jobs do.
    _run_array(folder, cluster, path, 0)
    ranks = undone(finals)
    if not ranks:
        return
    each = tasks_per_job(len(ranks), cluster.workers, cluster.array_size)
    jobs = [ranks[first : first + each] for first in range(0, len(ranks), each)]
    replace_json(path, {"folder": str(folder.path), "stage": stage, "jobs": jobs})
    _run_array(folder, cluster, path, len(jobs))
    if left := undone([finals[rank] for rank in ranks]):
        raise RunFailed(
            f"{folder.path}: {len(left)} of {len(ranks)} tasks of the stage {stage} ended without "
            f"a result. Of task {ranks[left[0]]}, {_last_words(path.parent, left[0] // each)}. Run "
            "the command again to go on; what is finished is kept"
        )


def tasks_per_job(tasks: int, workers: int, array_size: int) -> int:
    """Return how many tasks each job of an array does, one after the other.

    As few as fit into one array and let the workers end together: where every task takes as long
    as the next, no other number is faster.

    Args:
        tasks: Tasks to do.
        workers: Jobs that run at the same time.
        array_size: The most jobs of an array.
    """
    least = math.ceil(tasks / array_size)

    def time_of(each: int) -> int:
        jobs = math.ceil(tasks / each)
        rounds, beside_the_last = divmod(jobs - 1, workers)
        return rounds * each + (each if beside_the_last else tasks - (jobs - 1) * each)

    # So many leave one round, which is no longer than some worker needs at least.
    most = max(least, math.ceil(tasks / workers))
    return min(range(least, most + 1), key=time_of)


def run_job(path: Path, index: int) -> None:
    """Do the tasks of one job of an array, in the job.

    An error is written down for the builder, and asks all other tasks to give up.

    Args:
        path: The file ARRAY.
        index: The job's number in the array.
    """
    array = read_json(path, most=None)
    folder, stage = BuildFolder(Path(array["folder"])), array["stage"]
    for rank in array["jobs"][index]:
        if folder.stop.exists():
            sys.exit(1)
        try:
            # One that Slurm has requeued may have been done before.
            if not is_done(folder.final(stage, rank)):
                do_task(folder, stage, rank)
        except Stopped:
            sys.exit(1)
        except Exception as error:
            kind, message = type(error).__name__, str(error)
            if kind not in _ERRORS:
                logs = f"the newest slurm-*_{index}.log in {path.parent}"
                message = f"task {rank} of the stage {stage}: {error!r}. Its traceback is in {logs}"
            failure = {"kind": kind, "message": message}
            replace_json(folder.progress / f"failed-{rank:06d}.json", failure)
            folder.stop.touch()
            if kind not in _ERRORS:
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)


def _last_words(logs: Path, index: int) -> str:
    """Say how the newest log of a job ends."""
    found = sorted(logs.glob(f"slurm-*_{index}.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        return "there is no log, so it was never started"
    text = " ".join(found[-1].read_text(errors="replace").split())[-LAST_CHARACTERS:]
    return f"the log {found[-1]} ends with: {text}" if text else f"the log {found[-1]} is empty"


def _run_array(folder: BuildFolder, cluster: Cluster, path: Path, jobs: int) -> None:
    """Run the command with an array of `jobs` jobs; 0 waits for an earlier command's jobs."""
    command = [*cluster.command, str(jobs), str(path), str(folder.stop)]
    errors: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            _repeat(process.stderr, errors)
        finally:
            # It cancels the array if that is not over.
            process.stdin.close()
            _repeat(process.stderr, errors)
    # The error of a task says more than that the array was cancelled.
    for failed in sorted(folder.progress.glob("failed-*.json")):
        failure = read_json(failed)
        kind = _ERRORS.get(failure.get("kind", ""), RunFailed)
        raise kind(failure.get("message", "a task failed"))
    if process.returncode:
        raise RunFailed(
            "\n".join(errors)
            or f"{folder.path}: the process that waits for the jobs was killed "
            f"(exit code {process.returncode}). Run the command again; it waits for jobs that "
            "still run"
        )


def _repeat(lines: Iterable[str], errors: list[str]) -> None:
    """Print lines as they come, and keep those that are an error instead."""
    for line in lines:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").rstrip())
        else:
            # Over a progress line.
            start = "\r" if sys.stderr.isatty() else ""
            print(f"{start}{line.rstrip():<80}".rstrip(), file=sys.stderr, flush=True)
