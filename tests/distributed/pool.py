"""Keep worker processes between tests.

Starting a process and importing the libraries costs seconds, so one pool of ranks serves many
checks, and ranks on the CPU are forked from the server that has made the imports
(tests/end_to_end/preload.py). Workers are real processes that form one torch.distributed group;
each check splits it into the layout that it needs. Workers run on the CPU (gloo) even where there
are GPUs, since there are rarely as many GPUs as ranks. The tests marked `cuda` ask for `cuda=True`
(NCCL).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.end_to_end import forks
from tests.end_to_end.commands import SERVER

# Longest time without a result from any rank. A rank that waits in a collective for one that failed
# would otherwise wait for as long as the collective's own timeout.
TIMEOUT_SECONDS = 240


class WorkerFailed(AssertionError):
    """Raised when a task fails on some rank. The message is that rank's traceback."""


class Pool:
    """A group of `world_size` worker processes that run a task on every rank."""

    def __init__(self, world_size: int, cuda: bool = False) -> None:
        """Start the workers.

        Args:
            world_size: Number of ranks.
            cuda: Let the workers see the GPUs.
        """
        self.world_size, self.cuda = world_size, cuda
        self._start()

    def _start(self) -> None:
        # CUDA must not have been initialized before a fork.
        context = multiprocessing.get_context("spawn") if self.cuda else SERVER
        # Where rank 0 publishes its port.
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, rank, self.world_size, self._folder.name, self.cuda),
                daemon=True,
            )
            process.start()
            # Only the worker keeps its end open, so that its death reads as end of file on ours.
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call task(*args, **kwargs) on every rank and return the results in the order of ranks.

        Args:
            task: A module-level function, since it is pickled.
            *args: Positional arguments, the same on every rank.
            **kwargs: Keyword arguments, the same on every rank.

        Raises:
            WorkerFailed: if a rank raises, dies or does not answer in time. The workers are then
                replaced by new ones.
        """
        for pipe in self._pipes:
            pipe.send((task, args, kwargs))
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            ready = wait(
                [p for r, p in enumerate(self._pipes) if r not in results], timeout=TIMEOUT_SECONDS
            )
            if not ready:
                self._restart()
                raise WorkerFailed(f"{task.__name__}: no answer within {TIMEOUT_SECONDS} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the worker process died"
                if not ok:
                    self._restart()
                    raise WorkerFailed(f"rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the workers and wait for their end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _restart(self) -> None:
        self.close()
        self._start()


def _work(pipe: Connection, rank: int, world_size: int, folder: str, cuda: bool) -> None:
    """Serve tasks from a pipe until it is closed. This is the main function of a worker process.

    Args:
        pipe: Receives (task, args, kwargs) and sends (True, result) or (False, traceback).
        rank: Rank of this worker.
        world_size: Number of workers.
        folder: Where rank 0 publishes its port.
        cuda: Leave the GPUs visible.
    """
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "PRETRAIN_RENDEZVOUS": folder,
    }
    os.environ.pop("MASTER_PORT", None)
    # Before CUDA is asked for devices: it reads this variable once.
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        forks.fork_programs()
    import torch

    # Ranks share the cores of one machine.
    torch.set_num_threads(1)
    groups = _Groups()
    while True:
        try:
            task, args, kwargs = pipe.recv()
        except EOFError:
            return
        groups.begin_task()
        try:
            pipe.send((True, task(*args, **kwargs)))
        # Also SystemExit and KeyboardInterrupt: every end of a task is reported.
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class _Groups:
    """Give the process groups that a task has made to the next ones, which ask for the same.

    To make the groups of a layout takes a third of a second. All ranks run the same tasks, so they
    agree on which groups are new. Groups of one task are different ones even if they have the same
    ranks. Gloo would give each group a device, whose thread wakes a hundred times a second until
    the process ends, and hundreds of them take a part of a core. Here all groups share one device.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        gloo = dist.ProcessGroupGloo
        make, device = gloo.__init__, gloo.create_default_device()

        def on_one_device(group: Any, *of_group: Any, timeout: Any) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            make(group, *of_group, options)

        gloo.__init__ = on_one_device  # type: ignore[method-assign]  # a patch
        self._new_group, self._destroy = dist.new_group, dist.destroy_process_group
        self._made: dict[tuple[str, int], Any] = {}
        self._asked: Counter[str] = Counter()
        dist.new_group = self._group  # type: ignore[assignment]  # a patch
        dist.destroy_process_group = self._leave_open  # type: ignore[assignment]  # a patch

    def begin_task(self) -> None:
        """Give out all groups again."""
        self._asked.clear()

    def _group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if name != "group_desc"}
        wanted = repr((ranks and list(ranks), args, sorted(options.items())))
        key = (wanted, self._asked[wanted])
        self._asked[wanted] += 1
        if key not in self._made:
            self._made[key] = self._new_group(ranks, *args, **kwargs)
        return self._made[key]

    def _leave_open(self, group: Any = None) -> None:
        if group is None:
            self._made.clear()
            self._destroy()
