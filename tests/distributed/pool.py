"""Worker processes that stay: starting and importing costs seconds each, so one pool of ranks serves many checks.

Workers are real processes that form a real group once; each check re-splits it into its own layout. They run on the CPU
(gloo) also where there are GPUs, which are rarely as many as ranks; the tests marked cuda ask for `cuda=True` (NCCL).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_SECONDS = 240


class WorkerFailed(AssertionError):
    """A task raised on some rank; the message is that rank's traceback."""


class Pool:
    """`world_size` ranks; `run(task, ...)` calls a module-level function on all and returns the results by rank."""

    def __init__(self, world_size: int, cuda: bool = False) -> None:
        self.world_size, self.cuda = world_size, cuda
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, rank, self.world_size, port, self.cuda), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Results of task(*args, **kwargs), by rank. Raises WorkerFailed; the pool is then made anew."""
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
                    ok, value = False, "the process died"
                if not ok:
                    self._restart()
                    raise WorkerFailed(f"rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _restart(self) -> None:
        self.close()
        self._start()


def _work(pipe: Connection, rank: int, world_size: int, port: int, cuda: bool) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, task(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
