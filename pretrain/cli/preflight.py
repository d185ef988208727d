"""Try out the place where a rank is about to run: `pretrain preflight`, one process for each rank.

`launcher` starts these processes on all nodes of a Slurm job before the ranks
(pretrain/launcher/preflight.py), reads what they print, and judges. A process judges nothing:
it prints a line of JSON after each stage, so that after a hang or a death it is known which stage
it did not get past. It first checks what is its own (the run's directory, torch, the device, a
product of matrices). Then it waits for lines on stdin, each of which names groups of processes that
shall add up numbers together. Lines come and go through srun, so that the check also works where
the shared directory is what is broken.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from pretrain.cli import leave

TICK_SECONDS = 1.0
"""Time between two signs of life."""
SEEN_SECONDS = 3.0
"""How long an NFS client may take to see a file that another node has just made."""
MOST_WORDS = 300
"""Characters of an error that are printed: srun may break up a line of 1,024."""
GEMM_SIZE = {"cuda": 4096, "cpu": 512}
"""Rows and columns of the matrices that are multiplied."""
NUM_GEMMS = 20
"""Products, of which the fastest counts: the first loads libraries, and others may be disturbed."""
NUM_SUMMED = 1 << 18
"""Numbers that each process adds in an all-reduce: 1 MiB."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Place:
    """The description of itself and of the run that a process of the preflight is given."""

    node: str
    """Slurm's name of the node."""
    rank: int
    """Number of this process in the job step, from 0."""
    local_rank: int
    """Number of this process on its node."""
    token: Path
    """A file in the run's directory that the launcher has just written."""
    precision: str
    """A value of train.precision."""


def preflight(
    token: Annotated[Path, typer.Argument()],
    precision: Annotated[str, typer.Option()] = "fp32",
    # srun tells each of its processes these.
    node: Annotated[str, typer.Option(envvar="SLURMD_NODENAME")] = "localhost",
    rank: Annotated[int, typer.Option(envvar="SLURM_PROCID")] = 0,
    local_rank: Annotated[int, typer.Option(envvar="SLURM_LOCALID")] = 0,
) -> None:
    """Check the place of one rank for the launcher, which reads what this prints."""
    place = Place(node, rank, local_rank, token, precision)
    # The printed lines hold the findings, so the exit code is always 0.
    check(place, _Speaker(place))
    leave(0)


def check(place: Place, say: _Speaker) -> None:
    """Check this process's place stage by stage, then take part in the groups that stdin names."""
    say("started", host=socket.gethostname())
    stages: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("directory", lambda: _try_directory(place)),
        ("torch", _import_torch),
        ("device", lambda: _look_at_device(place)),
        ("gemm", lambda: _multiply(place)),
    ]
    for stage, try_out in stages:
        say.stage = stage
        try:
            say(stage, **try_out())
        # Every kind of error is reported as a finding.
        except Exception as error:
            say(stage, error=_words(error), number=getattr(error, "errno", None))
            return
    say.stage = "waiting"
    _serve(place, say)


# ---- what is printed -----------------------------------------------------------------------------
class _Speaker:
    """Print lines of JSON, and a sign of life every second."""

    def __init__(self, place: Place) -> None:
        self._node, self._lock = place.node, threading.Lock()
        self.stage = "started"
        # The processor time of the main thread grows while that works, and not while it hangs.
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        # Slurm warns the processes of a job's steps before the time limit. The launcher has to know
        # of it, and ends these processes whenever it wants to.
        self._warned: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: self._warned.append(number))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # The launcher starts processes with both blocked, because Python takes a while to get here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGUSR2))
        threading.Thread(target=self._tick, daemon=True).start()

    def __call__(self, stage: str, **found: Any) -> None:
        line = {"stage": stage, "node": self._node, **found}
        # In each line, because a check may be over before the next sign of life.
        line["warned"] = bool(self._warned) or None
        text = json.dumps({key: value for key, value in line.items() if value is not None})
        # One write, so that lines of the two threads do not mix. Without a reader there is nobody
        # to tell, and this process is about to be ended.
        with self._lock, contextlib.suppress(OSError):
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _tick(self) -> None:
        while True:
            busy = round(time.clock_gettime(self._clock), 3)
            self("alive", during=self.stage, busy=busy)
            time.sleep(TICK_SECONDS)


def _words(error: Exception) -> str:
    """Return an error in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


# ---- the stages ----------------------------------------------------------------------------------
def _try_directory(place: Place) -> dict[str, Any]:
    """Find the file that the launcher has written, and write one beside it.

    Raises:
        OSError: The directory cannot be seen or written to.
    """
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            os.stat(place.token)
            break
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    own = place.token.with_name(f"{place.token.name}-{place.rank}")
    try:
        with open(own, "wb") as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return {}


def _import_torch() -> dict[str, Any]:
    """Import torch, which is not imported before: on a bad node this fails, or takes forever."""
    import torch
    import torch.distributed

    return {"version": torch.__version__}


def _look_at_device(place: Place) -> dict[str, Any]:
    """Return what this process's GPU is, and how much memory is free on it or on the machine."""
    import torch

    from pretrain import platform

    if not platform.has_cuda():
        return {"count": 0, "why": _why_no_gpu(), "free": platform.available_memory()}
    count = torch.cuda.device_count()
    index = place.local_rank % count
    torch.cuda.set_device(index)
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(index)
    return {
        "count": count,
        "index": index,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "gpu": properties.name,
        "capability": list(torch.cuda.get_device_capability(index)),
        "architectures": torch.cuda.get_arch_list(),
        "free": free,
        "total": total,
    }


def _why_no_gpu() -> str | None:
    """Return why torch finds no GPU, in CUDA's words; None for a torch without CUDA."""
    import torch

    if torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch declares no types here
    except Exception as error:
        return _words(error)
    return None


def _multiply(place: Place) -> dict[str, Any]:
    """Multiply two matrices whose product is known exactly, and return the seconds it took.

    Raises:
        RuntimeError: The product is wrong.
    """
    import torch

    from pretrain import platform

    device = platform.device().type
    size = GEMM_SIZE[device]
    # The right-hand matrix moves column j to j + 1, so the product is known without computing it.
    # Numbers below 128 are exact in every dtype.
    left = (torch.arange(size * size, device=device) % 127).view(size, size)
    shift = torch.roll(torch.eye(size, device=device), 1, dims=1)
    dtype = getattr(torch, DTYPES[place.precision])
    a, b, expected = left.to(dtype), shift.to(dtype), torch.roll(left, 1, dims=1).to(dtype)
    seconds = []
    for _ in range(NUM_GEMMS):
        platform.synchronize()
        began = time.perf_counter()
        product = a @ b
        platform.synchronize()
        seconds.append(time.perf_counter() - began)
        if not torch.equal(product, expected):
            wrong = int((product != expected).sum())
            raise RuntimeError(f"a product of matrices has {wrong} wrong numbers of {size * size}")
    return {"seconds": min(seconds)}


# ---- together with others ------------------------------------------------------------------------
@dataclass
class _Groups:
    """The means with which this process forms groups, one after the other."""

    place: Place
    store: Any
    """The TCPStore that this process offers to the others."""
    kept: list[Any] = field(default_factory=list)
    """Groups are kept to the end: to destroy one that hangs would hang as well."""

    def add_up(self, name: str, ranks: list[int], address: tuple[str, int], seconds: float) -> None:
        """Form a group and add up a number of each process.

        Args:
            name: The group's name, which no other group has.
            ranks: The members, in order.
            address: Host and port of the first member's store.
            seconds: The longest time for it.

        Raises:
            RuntimeError: A connection failed, or the sum is wrong.
            TimeoutError: It took too long.
        """
        import torch
        import torch.distributed as dist

        from pretrain import platform

        timeout = datetime.timedelta(seconds=seconds)
        place, size = self.place, len(ranks)
        store: Any = self.store
        if place.rank != ranks[0]:
            store = _tcp_store(*address, is_master=False, timeout=timeout)
        # Behind a prefix of its own, because a store serves several groups.
        # torch.distributed does not list it in __all__.
        store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        group: Any
        if platform.has_cuda():
            # In this thread, which is not the one that has chosen the device.
            torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
            # torch without CUDA lacks the class. Its own timeout would abort the whole process.
            nccl: Any = dist.ProcessGroupNCCL
            group = nccl(store, ranks.index(place.rank), size, nccl.Options())
        else:
            group = dist.ProcessGroupGloo(store, ranks.index(place.rank), size, timeout)
        self.kept.append((store, group))
        own = float(ranks.index(place.rank) + 1)
        numbers = torch.full([NUM_SUMMED], own, device=platform.device())
        group.allreduce([numbers]).wait()
        platform.synchronize()
        if not bool((numbers == size * (size + 1) // 2).all()):
            raise RuntimeError("the sum is wrong")


def _tcp_store(host: str, port: int, **options: Any) -> Any:
    """Return a TCPStore, a class that torch.distributed does not list in __all__."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]


def _serve(place: Place, say: _Speaker) -> None:
    """Offer a store to the other processes, then form the groups that stdin asks for until it ends.

    A line is {"round": name, "seconds": s, "groups": [[[rank, ...], host, port], ...]}.
    """
    try:
        store = _tcp_store(place.node, 0, is_master=True, wait_for_workers=False)
    except Exception as error:
        say("ready", error=_words(error))
        return
    groups = _Groups(place, store)
    say("ready", address=place.node, port=store.port)
    for line in sys.stdin:
        asked = json.loads(line)
        for ranks, host, port in asked["groups"]:
            if place.rank not in ranks:
                continue
            began, name, seconds = time.perf_counter(), asked["round"], asked["seconds"]
            first = ranks[0]
            say.stage = name

            def add_up() -> None:
                groups.add_up(f"{name}-{first}", ranks, (host, port), seconds)  # noqa: B023

            try:
                _within(seconds, add_up)
                say(f"round {name}", seconds=round(time.perf_counter() - began, 4))
            except Exception as error:
                late = isinstance(error, TimeoutError)
                say(f"round {name}", error=_words(error), late=late)
        say.stage = "waiting"


def _within(seconds: float, function: Callable[[], None]) -> None:
    """Call a function in a thread, which is left behind when it takes too long.

    Raises:
        TimeoutError: It took too long.
        Exception: What the function raised.
    """
    raised: list[Exception] = []

    def call() -> None:
        try:
            function()
        except Exception as error:
            raised.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    # gloo and the store give up by themselves at the same time, in words of their own.
    late = time.monotonic() - began >= 0.95 * seconds
    if thread.is_alive() or (raised and late):
        raise TimeoutError(f"not complete within {seconds:.1f} s")
    if raised:
        raise raised[0]
