"""Tasks of the tests of saving beside training, run on every rank of a pool."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pretrain.config import RunConfig


def digests_of_saves(
    config: RunConfig, late: bool = False, protect: bool = True
) -> dict[str, Any] | None:
    """Train a run and return the SHA-256 of what each of its checkpoints holds of the optimizer.

    Args:
        config: The run's config.
        late: Begin each copy of the state only when the next step has begun; without `protect` when
            that step is over.
        protect: False to let the state change before it has been copied.

    Returns:
        On rank 0, file name -> digest, for the files of tensors of all checkpoints, and "overlap":
        how many steps began their forward pass while a copy was still under way.
    """
    from pretrain import platform
    from pretrain import platform as queue
    from pretrain.checkpoint.save import Saver
    from pretrain.rundir.checkpoints import complete_checkpoints
    from pretrain.training import loop

    seen = {"overlap": 0}
    copies: list[Any] = []
    may_copy, is_stepping = threading.Event(), False
    copy_all, queue_step = queue._copy_all, loop.queue_step
    start, before_change = platform.HostCopy.__init__, Saver._before_change

    def copied(pairs: Any) -> None:
        if late:
            may_copy.wait()
        copy_all(pairs)

    def noted(self: Any, *args: Any) -> None:
        may_copy.clear()
        start(self, *args)
        copies.append(self._thread)

    def counted(*args: Any) -> Any:
        nonlocal is_stepping
        seen["overlap"] += bool(copies) and copies[-1].is_alive()
        if protect:
            may_copy.set()
        is_stepping = True
        try:
            return queue_step(*args)
        finally:
            is_stepping = False
            may_copy.set()

    def awaited(self: Any) -> None:
        # No step follows the last save: it is waited for at once.
        if not is_stepping:
            may_copy.set()
        if protect:
            before_change(self)

    queue._copy_all, loop.queue_step = copied, counted
    platform.HostCopy.__init__ = noted  # type: ignore[method-assign]
    Saver._before_change = awaited  # type: ignore[method-assign]
    try:
        assert loop.train(config) == 0
    finally:
        queue._copy_all, loop.queue_step = copy_all, queue_step
        platform.HostCopy.__init__ = start  # type: ignore[method-assign]
        Saver._before_change = before_change  # type: ignore[method-assign]
    if dist.get_rank():
        return None
    digests = {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for checkpoint in complete_checkpoints(config.directory)
        for path in sorted(checkpoint.glob("*.safetensors"))
    }
    return {**digests, **seen}


def train_with_a_bad_writer(config: RunConfig, how: str, rank: int) -> dict[str, Any]:
    """Train a run in which something befalls the writing process of one rank.

    Args:
        config: The run's config.
        how: "killed", "stopped for good before it publishes", "disk" (it cannot write), "nan" (a
            moment is not finite at the second save), or "signals" (all that a job gets, harmless).
        rank: The rank.

    Returns:
        "error": the message that ended the run, "" without; "step": steps done by then.
    """
    from pretrain.checkpoint import save
    from pretrain.checkpoint.save import Saver
    from pretrain.config import RunFailed
    from pretrain.training import loop

    begin = Saver.begin
    saves = {"count": 0, "step": 0}

    def disturbed(self: Any, *args: Any) -> Any:
        saves["count"] += 1
        is_second = saves["count"] == 2 and dist.get_rank() == rank
        if is_second and how == "nan":
            self._optimizer.state().fragments[0].tensors["exp_avg_sq"][0] = float("inf")
        if is_second and how == "disk":
            # The process has been started by the first save: it gets a directory that is not there.
            write = self._writer.write
            self._writer.write = lambda directory, part: write(directory / "gone", part)
        if saves["count"] == 2:
            self.finish()
        if is_second and how == "killed":
            # So that it is killed before it has written.
            self._writer._process.send_signal(signal.SIGSTOP)
        if is_second and how == "signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                os.kill(self._writer._process.pid, number)
        result = begin(self, *args)
        if is_second and how == "killed":
            self._writer._process.kill()
        return result

    queue_step = loop.queue_step

    def counted(run: Any, *args: Any) -> Any:
        # The failure may need a moment to arrive.
        time.sleep(0.05)
        step = queue_step(run, *args)
        saves["step"] = run.state.step
        return step

    Saver.begin, loop.queue_step = disturbed, counted  # type: ignore[method-assign]
    # A rank waits so long for the parts of others, which never come where a state is not finite.
    patience, save.CLOSE_SECONDS = save.CLOSE_SECONDS, 3
    error = ""
    try:
        loop.train(config)
    except RunFailed as failure:
        error = str(failure)
    finally:
        Saver.begin, loop.queue_step = begin, queue_step  # type: ignore[method-assign]
        save.CLOSE_SECONDS = patience
    return {"error": error, "step": saves["step"]}


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    from pretrain import platform

    available, free = platform.available_memory, platform.free_memory
    # Evaluations ask the same, and would be refused.
    platform.free_memory = lambda: 1 << 40
    platform.available_memory = lambda: 1000
    try:
        yield
    finally:
        platform.available_memory, platform.free_memory = available, free


def published_before_the_next_save(config: RunConfig) -> list[int] | None:
    """Train a run in which rank 0 alone has no memory for the copy of the state.

    Returns:
        On rank 0, how many checkpoints there are when each save begins.
    """
    from pretrain.checkpoint.save import Saver
    from pretrain.rundir.checkpoints import complete_checkpoints
    from pretrain.training import loop

    rank, begin, found = int(os.environ["RANK"]), Saver.begin, list[int]()

    def noted(self: Any, *args: Any) -> Any:
        found.append(len(complete_checkpoints(config.directory)))
        return begin(self, *args)

    Saver.begin = noted  # type: ignore[method-assign]
    try:
        with contextlib.nullcontext() if rank else _little_memory():
            assert loop.train(config) == 0
    finally:
        Saver.begin = begin  # type: ignore[method-assign]
    return None if rank else found


def digests_with_little_memory(config: RunConfig) -> dict[str, Any] | None:
    """Return `digests_of_saves` on a machine that has no memory for the copy."""
    with _little_memory():
        return digests_of_saves(config)


def nothing_of_the_writers_is_left() -> int:
    """Return how many child processes of this rank are left."""
    torch.empty(0)
    me = str(os.getpid())
    parents = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                with open(f"/proc/{entry}/stat") as file:
                    parents.append(file.read().rpartition(") ")[2].split()[1])
    return parents.count(me)


def save_and_take_a_step(config: RunConfig, resume: str, until: int) -> float:
    """Go on from a checkpoint to a step, save at once, then take one more step.

    Args:
        config: The run's config; its directory takes the save.
        resume: Value of --resume.
        until: The step to save at.

    Returns:
        The loss of the step after the save, in nats.
    """
    from pretrain import platform
    from pretrain.checkpoint.save import Saver
    from pretrain.training.loop import queue_step, step_batches
    from pretrain.training.reporter import AttemptReporter, Requests
    from pretrain.training.start import data_hashes, find_start_point, load_run, prepare

    streams, topology, checkpoint = prepare(config, resume)
    start_point = find_start_point(config, resume, checkpoint, data_hashes(streams))
    run = load_run(config, streams, topology, start_point, Requests(), AttemptReporter())
    steps = step_batches(run)
    for _ in range(until - run.state.step):
        queue_step(run, steps, platform.Moment()).read()
    saver = Saver(config, run.topology, run.optimizer)
    saver.begin(run.state, run.origin)
    saver.finish()
    saver.close()
    return float(queue_step(run, steps, platform.Moment()).read()["loss_nats"])
