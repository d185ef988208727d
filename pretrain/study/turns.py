"""Run a function in processes of its own, which join each other and end with it.

A comparison of speed and memory lets its contestants take turns. Each turn has new processes:
memory is then that of one contestant alone, a GPU is empty when the next one begins, and no idle
process of another contestant takes time from the one that is measured. Between turns nothing is
kept but compiled kernels on the disk.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from pretrain import platform
from pretrain.config import ConfigError, RunConfig, RunFailed
from pretrain.topology import Process, Topology, initialize

T = TypeVar("T")
ADDRESS = "127.0.0.1"
"""All processes of a turn are on this machine."""


def interleave(
    names: Sequence[str], rounds: int, turn: Callable[[int], T], shown: Callable[[T], str]
) -> tuple[list[list[T]], dict[int, str]]:
    """Let contestants take turns, round by round, back and forth. Progress goes to stderr.

    Args:
        names: What to call each contestant.
        rounds: How often each takes its turn.
        turn: Lets the contestant of a number take one turn. A RunFailed that it raises is that
            contestant's end, and the others go on.
        shown: What to print of a turn.

    Returns:
        (what each contestant measured in each round, number -> why a contestant failed)

    Raises:
        RunFailed: All contestants failed.
    """
    taken: list[list[T]] = [[] for _ in names]
    failed: dict[int, str] = {}
    for number in range(1, rounds + 1):
        # Back and forth, so that a drift during the job favours no contestant.
        order = range(len(names)) if number % 2 else reversed(range(len(names)))
        for contestant in order:
            if contestant in failed:
                continue
            said = f"round {number} of {rounds}: {names[contestant]}"
            try:
                result = turn(contestant)
            except RunFailed as error:
                failed[contestant] = str(error)
                print(f"{said} failed: {error}", file=sys.stderr, flush=True)
                continue
            taken[contestant].append(result)
            print(f"{said}: {shown(result)}", file=sys.stderr, flush=True)
    if len(failed) == len(names):
        raise RunFailed("nothing could be measured:\n" + "\n".join(failed.values()))
    return taken, failed


def take_turn(task: Callable[[RunConfig, Topology], T], config: RunConfig, nproc: int) -> list[T]:
    """Call task(config, topology) in `nproc` new processes of this machine.

    Args:
        task: A function of a module, since it is found by its name, or functools.partial of one.
            Called on all ranks together; it, what it returns and `config` are pickled.
        config: The run, whose layout the processes join in.
        nproc: Number of processes, one for each GPU or a few on CPU cores.

    Returns:
        What the task returned on each rank.

    Raises:
        RunFailed: The task failed on a rank, or a process was killed. All have ended then.
    """
    context = _context(getattr(task, "func", task).__module__)
    with tempfile.TemporaryDirectory(prefix="turn-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(nproc):
                ours, theirs = context.Pipe()
                place = Process(rank, nproc, rank, ADDRESS, 0, Path(folder) if nproc > 1 else None)
                # The task in a pickle of its own: reading it imports what may warn.
                arguments = theirs, pickle.dumps(task), config, place
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                # The process alone keeps its end open, so that its death reads as an end of file.
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            results = _results(pipes)
            for pipe in pipes:
                # Ranks leave together: one that has gone breaks a collective of the others.
                pipe.send(None)
            for process in processes:
                process.join()
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _context(module: str) -> ForkServerContext | SpawnContext:
    """Return how processes are started; `module` is what they will need.

    Without GPUs they are forked from a server that has imported everything, in a tenth of a second;
    imports alone would take longer than what is measured. With GPUs each process imports for
    itself, since a library that asks for the GPUs at import would leave forked ones without them.
    """
    if platform.has_cuda():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretrain.study.quiet", __name__, module])
    return context


def _results(pipes: list[Connection]) -> list[Any]:
    """Wait for the result of every rank; RunFailed as soon as one has none."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        for pipe in wait(waiting):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                ok, value = False, "the process was killed, often because memory ran out"
            if not ok:
                raise RunFailed(f"rank {rank}: {value}" if len(pipes) > 1 else value)
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _work(pipe: Connection, task: bytes, config: RunConfig, process: Process) -> None:
    """Do a task and send (True, result) or (False, why there is none); for a process of a turn.

    Args:
        pipe: Where to send it; afterwards the word to leave comes from there.
        task: The task, pickled.
        config: The run.
        process: This process.
    """
    # Ctrl-C is for the process that started the turns, and this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    warnings.simplefilter("ignore")
    # Its own lock is one of the system's, which a process that leaves at once would leave behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(max(1, torch.get_num_threads() // process.world_size))
    try:
        outcome = True, pickle.loads(task)(config, initialize(config, process))
    except (ConfigError, RunFailed, MemoryError, torch.OutOfMemoryError) as error:
        outcome = False, str(error) or type(error).__name__
    except Exception:
        outcome = False, traceback.format_exc()
    with contextlib.suppress(EOFError, OSError):
        pipe.send(outcome)
        pipe.recv()
    # An ordinary exit would take seconds to unload the imported libraries.
    os._exit(0)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
