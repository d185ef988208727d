"""Run a stage's pipeline over its tasks with datatrove's executors.

The pipeline of a stage is made in one place, `pipeline`, and takes everything else from the build's
folder, so it travels pickled to other processes and, with SlurmPipelineExecutor, to other nodes.
`ProvenCompletion` is what any of datatrove's executors needs to run it.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, NamedTuple, NoReturn

import dill  # type: ignore[import-untyped]
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.stats import PipelineStats
from loguru import logger

from pretrain.config import ConfigError, NoSpace, RunFailed
from pretrain.data.build.folder import BuildFolder, is_done
from pretrain.data.build.plan import Stage, Stopped, Work
from pretrain.data.build.steps import (
    CleanDocuments,
    LeaveOut,
    ReadDocuments,
    ScanDocuments,
    TokenizeDocuments,
    WriteShards,
)
from pretrain.rundir.files import make_directory, open_own, read_json, replace_json


def pipeline(work: Work) -> list[Any]:
    """Return the steps of a stage, which share `work`."""
    if work.stage == "scan":
        return [ReadDocuments(work), CleanDocuments(work), ScanDocuments(work)]
    return [
        ReadDocuments(work),
        CleanDocuments(work),
        LeaveOut(work),
        TokenizeDocuments(work),
        WriteShards(work),
    ]


class ProvenCompletion(PipelineExecutor):  # type: ignore[misc]
    """Take a task for done if its output is whole, whatever files datatrove left.

    To be mixed into an executor before its own class. The steps of its pipeline share a `Work`.
    """

    @property
    def work(self) -> Work:
        """Return the object that the steps of the pipeline share."""
        found: Work = self.pipeline[0].work
        return found

    def is_rank_completed(self, rank: int) -> bool:
        """Return True if the output of a task is there and unchanged."""
        return is_done(self.work.final(rank))

    def get_incomplete_ranks(
        self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None
    ) -> list[int]:
        """Return the tasks that are not done. Reads every output that is there."""
        asked = range(self.world_size) if ranks is None else ranks
        return [rank for rank in asked if not self.is_rank_completed(rank)]

    def mark_rank_as_completed(self, rank: int) -> None:
        """Do nothing: the last step has published the output."""

    def _set_distributed_environment(self, node_rank: int) -> None:
        """Do nothing: the steps ask for none of datatrove's environment variables."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        """Do a task. datatrove's log goes to the build's folder, and nothing to the console."""
        console = Path(self.logging_dir.resolve_paths("console.log"))
        make_directory(console.parent)
        try:
            # datatrove adds the console to loguru's sinks at each task's beginning and end.
            with console.open("a") as file, contextlib.redirect_stderr(file):
                try:
                    return super()._run_for_rank(rank, local_rank, node_rank)
                finally:
                    logger.remove()
        finally:
            # A published output has another name by now.
            if hasattr(self.work, "output"):
                self.work.output.discard()


class LocalExecutor(ProvenCompletion, LocalPipelineExecutor):  # type: ignore[misc]
    """Run the tasks on this machine: in this process, or in several.

    LocalPipelineExecutor.run (datatrove/executor/local.py) hands the tasks to a multiprocessing
    Pool, which waits for ever when the system kills a worker, as it does when memory runs out. So
    the tasks are handed to concurrent.futures, which notices.
    """

    def run(self) -> None:
        """Do every task that is not done.

        Raises:
            RunFailed: A worker was killed. Errors of tasks are raised as they are.
        """
        ranks = self.get_incomplete_ranks()
        workers = min(self.workers, len(ranks))
        if workers > 1:
            self._run_in_pool(ranks, workers)
            return
        for rank in ranks:
            self._run_for_rank(rank)

    def _run_in_pool(self, ranks: list[int], workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # Imported once, and inherited by the workers.
        context.set_forkserver_preload([__name__])
        stop = self.work.folder.stop
        with ProcessPoolExecutor(workers, context, _begin_worker) as pool:
            try:
                tasks = [pool.submit(self._run_for_rank, rank) for rank in ranks]
                for done in as_completed(tasks):
                    done.result()
            except BrokenProcessPool:
                raise RunFailed(
                    f"{self.work.folder.path}: a worker process was killed, often because memory "
                    "ran out (`dmesg` says so). Use fewer --workers, or lower data.bytes_per_task "
                    "and start over; the same command goes on with the tasks that are not done"
                ) from None
            except BaseException:
                stop.touch()
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


def run_locally(folder: BuildFolder, stage: Stage, tasks: int, workers: int) -> None:
    """Do every task of a stage that is not done, on this machine.

    Args:
        folder: The build.
        stage: The stage.
        tasks: Number of its tasks.
        workers: Processes; one runs the tasks in this process.
    """
    # loguru prints to the console until it is told otherwise.
    logger.remove()
    executor = LocalExecutor(
        pipeline=pipeline(Work(folder, stage)),
        tasks=tasks,
        workers=workers,
        logging_dir=str(folder.logs / stage),
    )
    executor.run()


# ---- Run a stage's tasks as a Slurm job array, with datatrove's SlurmPipelineExecutor ----
# Whatever speaks to Slurm is another program (`launcher data array`), which is given as a command.
# It submits the array, waits for its end and prints what happens; when its stdin is closed, however
# this process ends, it cancels the array.


PICKLE, RANKS = "executor.pik", "ranks_to_run.json"
"""Files that datatrove's array tasks read (datatrove/executor/slurm.py)."""
LAST_CHARACTERS = 300
"""Of a log, in a message."""
READERS = 8
"""Threads that look for finished outputs."""
_ERRORS = {kind.__name__: kind for kind in (ConfigError, NoSpace, RunFailed)}


class Cluster(NamedTuple):
    """The command and the limits by which job arrays run on a cluster."""

    command: tuple[str, ...]
    """Runs an array when the number of its tasks and the file of the pickled executor are added."""
    workers: int
    """The most tasks of an array that run at the same time."""
    array_size: int
    """The most tasks that an array may have."""


class SlurmExecutor(ProvenCompletion, SlurmPipelineExecutor):  # type: ignore[misc]
    """Run the tasks of a stage as one job array.

    In place of `SlurmPipelineExecutor.launch_job` (datatrove 0.10.1, datatrove/executor/slurm.py):
    it writes the site's values into a script unquoted, asks for --qos=normal, adds a job after
    every array that merges statistics, needs `launch_pickled_pipeline` on the nodes' PATH, starts
    further arrays one after the other beyond max_array_size, and returns before the jobs have run.
    """

    def __init__(self, work: Work, tasks: int, cluster: Cluster) -> None:
        """Prepare to run all tasks of a stage.

        Args:
            work: What the steps of the pipeline share.
            tasks: Tasks of the stage.
            cluster: How to run job arrays.
        """
        super().__init__(
            pipeline=pipeline(work),
            tasks=tasks,
            # These three are the launcher's business.
            time="",
            partition="",
            qos=None,
            logging_dir=str(work.folder.logs / work.stage),
            # datatrove's handler requeues SLURM_JOB_ID, which in an array is another task's.
            requeue_signals=None,
            # One array has all tasks, so RUN_OFFSET, which a user's environment may hold, counts 0.
            max_array_size=0,
        )
        self._cluster = cluster

    def launch_job(self) -> None:
        """Do every task that is not done, and wait until that has happened.

        Raises:
            ConfigError: The text or a tokenizer cannot be used; the message is the task's.
            RunFailed: Slurm refused, or tasks ended without an output.
        """
        # An earlier command may have been killed with its jobs in the queue. They would meet what
        # is written below, and do tasks that new jobs do.
        make_directory(self._path(""))
        self._run_array(0)
        ranks = self.get_incomplete_ranks()
        if not ranks:
            return
        self.tasks_per_job = tasks_per_job(
            len(ranks), self._cluster.workers, self._cluster.array_size
        )
        replace_json(self._path(RANKS), ranks)
        with open_own(self._path(PICKLE), "wb") as file:
            dill.dump(self, file, fmode=dill.CONTENTS_FMODE)
        self._run_array(math.ceil(len(ranks) / self.tasks_per_job))
        if undone := self.get_incomplete_ranks(ranks):
            raise RunFailed(
                f"{self.work.folder.path}: {len(undone)} of {len(ranks)} tasks of the stage "
                f"{self.work.stage} ended without a result. Of task {undone[0]}, "
                f"{self._last_words(ranks.index(undone[0]) // self.tasks_per_job)}. Run the "
                "command again to go on; what is finished is kept"
            )

    def get_incomplete_ranks(
        self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None
    ) -> list[int]:
        """Return the tasks that are not done. Reads every output that is there."""
        asked = list(range(self.world_size) if ranks is None else ranks)
        # On NFS a name that was missing a moment ago may be remembered as missing. Opening the
        # folder asks the server.
        for folder in {self.work.final(rank).parent for rank in asked}:
            if folder.is_dir():
                os.listdir(folder)
        with ThreadPoolExecutor(READERS) as pool:
            done = list(pool.map(self.is_rank_completed, asked))
        return [rank for rank, is_done in zip(asked, done) if not is_done]

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        """Do a task, in the job. Writes down its error and asks all other tasks to give up."""
        if self.work.folder.stop.exists():
            sys.exit(1)
        try:
            return super()._run_for_rank(rank, local_rank, node_rank)
        except Stopped:
            sys.exit(1)
        except Exception as error:
            is_known = type(error).__name__ in _ERRORS
            replace_json(
                self._failure(rank),
                {
                    "kind": type(error).__name__,
                    "message": str(error)
                    if is_known
                    else f"task {rank} of the stage {self.work.stage}: {error!r}. Its traceback is "
                    f"in {self._path(f'logs/task_{rank:05d}.log')}",
                },
            )
            self.work.folder.stop.touch()
            if not is_known:
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    def _last_words(self, index: int) -> str:
        """Say how the newest log of an array task ends."""
        logs = sorted(self._path("").glob(f"slurm-*_{index}.log"), key=lambda p: p.stat().st_mtime)
        if not logs:
            return "there is no log, so it was never started"
        text = " ".join(logs[-1].read_text(errors="replace").split())[-LAST_CHARACTERS:]
        return f"the log {logs[-1]} ends with: {text}" if text else f"the log {logs[-1]} is empty"

    def _path(self, name: str) -> Path:
        return self.work.folder.logs / self.work.stage / name

    def _failure(self, rank: int) -> Path:
        return self.work.folder.progress / f"failed-{rank:06d}.json"

    def _run_array(self, tasks: int) -> None:
        """Run the command with an array of `tasks` tasks; 0 waits for an earlier command's jobs."""
        command = [*self._cluster.command, str(tasks), str(self._path(PICKLE))]
        command.append(str(self.work.folder.stop))
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
        self._raise_failure()
        if process.returncode:
            raise RunFailed(
                "\n".join(errors)
                or f"{self.work.folder.path}: the process that waits for the jobs was killed "
                f"(exit code {process.returncode}). Run the command again; it waits for jobs that "
                "still run"
            )

    def _raise_failure(self) -> None:
        """Raise the error of the first task that has written one down.

        Raises:
            ConfigError: Or another error of those in `_ERRORS`.
        """
        for path in sorted(self.work.folder.progress.glob("failed-*.json")):
            _raise(read_json(path))


def _raise(failure: dict[str, str]) -> NoReturn:
    kind = _ERRORS.get(failure.get("kind", ""), RunFailed)
    raise kind(failure.get("message", "a task failed"))


def _repeat(lines: Iterable[str], errors: list[str]) -> None:
    """Print lines as they come, and keep those that are an error instead."""
    for line in lines:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: ").rstrip())
        else:
            # Over a progress line.
            start = "\r" if sys.stderr.isatty() else ""
            print(f"{start}{line.rstrip():<80}".rstrip(), file=sys.stderr, flush=True)


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


def run_on_cluster(folder: BuildFolder, stage: Stage, tasks: int, cluster: Cluster) -> None:
    """Do every task of a stage that is not done, on a cluster.

    Args:
        folder: The build.
        stage: The stage.
        tasks: Number of its tasks.
        cluster: How to run job arrays.
    """
    # loguru prints to the console until it is told otherwise.
    logger.remove()
    executor = SlurmExecutor(Work(folder, stage), tasks, cluster)
    executor.launch_job()
