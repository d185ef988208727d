"""Run a stage's pipeline over its tasks with datatrove's executors.

The pipeline of a stage is made in one place, `pipeline`, and takes everything else from the build's
folder, so it travels pickled to other processes and, with SlurmPipelineExecutor, to other nodes.
`ProvenCompletion` is what any of datatrove's executors needs to run it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.utils.stats import PipelineStats
from loguru import logger

from pretrain.config import RunFailed
from pretrain.data.build.folder import BuildFolder
from pretrain.data.build.output import is_done
from pretrain.data.build.steps import (
    CleanDocuments,
    LeaveOut,
    ReadDocuments,
    ScanDocuments,
    TokenizeDocuments,
    WriteShards,
)
from pretrain.data.build.work import Stage, Work
from pretrain.rundir.files import make_directory


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
