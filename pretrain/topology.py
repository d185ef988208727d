"""Find this process's ranks in the parallel topology, and make its process groups.

The layout is Megatron's default order "tp-cp-ep-dp-pp" (megatron/core/parallel_state.py), without
expert parallelism:

    replica = context_rank + context_size * data_rank
    rank    = tensor_rank + tensor_size * (replica + context_size * data_size * pipeline_rank)

For tensor_model_parallel_size = 2, pipeline_model_parallel_size = 2 and 8 processes, the
data-parallel size is 8 / (2 * 2) = 2, and the ranks are (with context_parallel_size = 2 instead,
data rank 0 and 1 are context rank 0 and 1):

                           data rank 0        data rank 1
                           tensor 0  1        tensor 0  1
    pipeline rank 0               0  1               2  3
    pipeline rank 1               4  5               6  7

Tensor ranks communicate in every layer. They have consecutive numbers, so that they usually share a
node. Pipeline stages exchange only the activations at their borders, and are furthest apart.

    tensor rank    holds a slice of every matrix of its layers, and of the attention heads
    pipeline rank  holds a contiguous part of the layers (one per virtual stage, if interleaved)
    context rank   holds a contiguous part of every sequence, the first part on rank 0
    data rank      has its own share of the global batch

Context and data ranks together are the replicas: they hold the same parameters, see other tokens,
and ZeRO shards the optimizer state over them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hmac
import ipaddress
import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic_core import to_json

# torch.distributed lists none of these in __all__.
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from pretrain import platform
from pretrain.config import ConfigError, Layout, RunConfig, RunFailed, Unsound, writing
from pretrain.processes import in_background
from pretrain.rundir.attempts import Owner
from pretrain.rundir.files import adapter, from_json, parse_json, replace_file
from pretrain.rundir.jobs import owner_of

# ---- rendezvous ----
# Let the ranks of a run find each other: rank 0 listens on a free port and publishes it in a file.
#
# The system chooses the port, so it cannot be taken already. Rank 0 writes address and port to
# rendezvous.json, in a directory that all ranks see, and the other ranks look for the file. All
# then say that they are there, so that whoever is missing is named before NCCL or gloo wait.
#
# What ranks share from then on is a TCPStore of torch: rank 0's process serves keys and values.


T = TypeVar("T")
P = TypeVar("P", bound=Exception)

FILE = "rendezvous.json"
"""The file in which rank 0 publishes where it listens, until all ranks have come;
docs/run_directory.md has a row for it."""
FILE_MODE = 0o600
"""For the user alone: whoever knows address and port can talk to the ranks."""
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0
"""Between two looks for the file. 127 ranks that wait look 64 times a second together."""
PAUSE_FACTOR = 1.5
CONNECT_SECONDS = 60.0
"""The longest time to connect to rank 0 once it has published, which it does while it listens."""
MOST_RANKS_NAMED = 8


@dataclass(frozen=True)
class Place:
    """The address at which rank 0 listens: the content of rendezvous.json."""

    address: str
    """The address of rank 0's host that it listens at; its name where it listens at all."""
    port: int
    """The port that the system chose."""
    nonce: str
    """A secret of this start, which is never sent: what ranks say of themselves is proven by it."""
    start: str
    """Which start of the ranks this is, as `Process.start`."""


@dataclass(frozen=True)
class Process:
    """A process among those that have to find each other: the identity that its starter gives it.

    That is `launcher local`, torchrun or srun; a process started by itself is a run of one.
    """

    rank: int
    """Number of this process in the run, from 0."""

    world_size: int
    """Number of processes in the run."""

    local_rank: int
    """Number of this process on its machine, which selects its GPU."""

    address: str
    """Host name on which rank 0 listens."""

    port: int
    """Port on which rank 0 listens; 0 for one that is free, which it publishes."""

    directory: Path | None = None
    """Where rank 0 publishes the port; None with a fixed port."""

    start: str = ""
    """Names one start of the ranks, such as job and step under Slurm; empty where that is not
    known. What another start has published in the directory is passed over."""

    @staticmethod
    def from_environment() -> Process:
        """Read the identity from the variables of torchrun or srun; without them, a run of one.

        A port that is given (MASTER_PORT) wins over the directory in which rank 0 can publish one
        (PRETRAIN_RENDEZVOUS), which the launcher gives. MASTER_ADDR says in both cases where rank 0
        listens.

        Raises:
            ConfigError: if a step of srun that was started by hand does not say where to meet.
        """
        env = os.environ
        fixed = env.get("MASTER_PORT")
        named = None if fixed else env.get("PRETRAIN_RENDEZVOUS")
        directory = Path(named) if named else None
        # torchrun and `launcher local`.
        if "RANK" in env and "WORLD_SIZE" in env:
            return Process(
                int(env["RANK"]),
                int(env["WORLD_SIZE"]),
                int(env.get("LOCAL_RANK", 0)),
                env.get("MASTER_ADDR", "127.0.0.1"),
                0 if directory else int(fixed or 29500),
                directory,
            )
        # srun. A job step of one task is a run of one process, and so is a batch script.
        num_tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
        if "SLURM_PROCID" in env and num_tasks > 1:
            if directory is None and ("MASTER_ADDR" not in env or fixed is None):
                raise ConfigError(
                    "MASTER_ADDR, MASTER_PORT: a step of srun needs both, the name of the first "
                    "node and a free port on it. `launcher submit` needs neither"
                )
            is_alone = directory is not None and env.get("SLURM_STEP_NUM_NODES") == "1"
            return Process(
                int(env["SLURM_PROCID"]),
                num_tasks,
                int(env.get("SLURM_LOCALID", 0)),
                env.get("MASTER_ADDR") or ("127.0.0.1" if is_alone else _slurm_name()),
                int(fixed or 0),
                directory,
                _slurm_start(),
            )
        return ALONE


ALONE = Process(0, 1, 0, "127.0.0.1", 0)
"""A process of its own, whatever its environment says."""


def meet(peer: Process, seconds: float) -> Store:
    """Find the other processes. All call it.

    Args:
        peer: This process.
        seconds: How long to wait for the others.

    Returns:
        The store that all processes share. It is closed when nothing refers to it any more.

    Raises:
        RunFailed: A process did not come in time, or rank 0 cannot be reached.
    """
    if peer.directory is None:
        # No file that only this user can read, and so no secret.
        store, secret = _join_at_port(peer, seconds), ""
    elif peer.rank == 0:
        store, secret = _publish(peer, peer.directory, seconds)
    else:
        store, secret = _find(peer, peer.directory, seconds)
    present = PrefixStore("present", store)
    ranks = [str(rank) for rank in range(peer.world_size)]

    def absent() -> list[str]:
        """Return the ranks that have not come in time; RunFailed on one without the secret."""
        present.set(ranks[peer.rank], _proof(secret, ranks[peer.rank]))
        try:
            present.wait(ranks, datetime.timedelta(seconds=seconds))
        except DistError:
            return [rank for rank in ranks if not present.check([rank])]
        # Rank 0 looks at all, and all look at rank 0.
        for rank in ranks if peer.rank == 0 else ranks[:1]:
            if not hmac.compare_digest(present.get(rank), _proof(secret, rank).encode()):
                raise RunFailed(
                    f"{host_name()}: what came as rank {rank} does not know the secret in "
                    f"{FILE}, so it is no process of this run. Another user of the nodes may have "
                    "written to the store of the ranks: use whole nodes (--exclusive)"
                )
        return []

    try:
        answers = f"{host_name()}: rank 0 no longer answers. Its output says why"
        if missing := _within(seconds + CONNECT_SECONDS, absent, answers):
            more = len(missing) - MOST_RANKS_NAMED
            named = ", ".join(missing[:MOST_RANKS_NAMED]) + f" and {more} more" * (more > 0)
            raise RunFailed(
                f"of {peer.world_size} ranks these did not come within {seconds:.0f} s: {named}. "
                "Their output says why, or where they hang"
            )
    finally:
        if peer.directory is not None and peer.rank == 0:
            # All have read it, or the start failed. What does not lie there cannot be taken for the
            # address of a later start.
            with contextlib.suppress(OSError):
                (peer.directory / FILE).unlink()
    return store


# ---- where rank 0 listens ------------------------------------------------------------------------
def _proof(secret: str, of: str) -> str:
    """Return what only who knows the secret can say."""
    return hmac.new(secret.encode(), of.encode(), "sha256").hexdigest()


def _listening(address: str) -> socket.socket | None:
    """Return a socket that listens at one address of this host; None where `address` leads to none.

    torch listens at every address of the host.
    """
    # ValueError: a name that no host can have.
    with contextlib.suppress(OSError, ValueError):
        for family, _, _, _, place in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM):
            # Debian's /etc/hosts has 127.0.1.1 for this host's name, where no other host comes.
            found = ipaddress.ip_address(str(place[0]))
            if place[0] == address or not (found.is_loopback or found.is_link_local):
                with contextlib.suppress(OSError):
                    return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    return None


_BACKLOG = 2048
"""Connections that wait to be accepted, of all ranks at once."""


def _publish(peer: Process, directory: Path, seconds: float) -> tuple[Store, str]:
    """Listen on a free port and publish it; for rank 0."""
    # Port 0 is a request for any free port. Not waiting for the workers, which cannot come before
    # the port is published.
    listening = _listening(peer.address)
    # Not the name, which may lead to another address of this host elsewhere.
    address, port = listening.getsockname()[:2] if listening else (peer.address, 0)
    store = TCPStore(
        address,
        port,
        peer.world_size,
        is_master=True,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        # The store closes it.
        master_listen_fd=listening.detach() if listening else None,
    )
    place = Place(address, store.port, uuid.uuid4().hex, peer.start)
    name = _proof(place.nonce, "store")
    store.set(name, "")
    path = directory / FILE
    with writing(path):
        replace_file(path, json.dumps(dataclasses.asdict(place)) + "\n", mode=FILE_MODE)
    return PrefixStore(name, store), place.nonce


def _find(peer: Process, directory: Path, seconds: float) -> tuple[Store, str]:
    """Wait until rank 0 has published where it listens, and connect to it; for the other ranks."""
    place = _wait_for_place(directory, peer, seconds)
    where = f"rank 0 at {place.address}:{place.port} (published in {directory / FILE})"

    def connect() -> Store:
        store = TCPStore(
            place.address,
            place.port,
            peer.world_size,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        name = _proof(place.nonce, "store")
        if not store.check([name]):
            raise RunFailed(f"{host_name()}: {where} is another run's. Start the run again")
        return PrefixStore(name, store)

    complaint = (
        f"{host_name()}: {where} does not answer. Its output says if it has ended; every node must "
        "resolve that name, and MASTER_ADDR on rank 0 sets another one"
    )
    return _within(CONNECT_SECONDS, connect, complaint), place.nonce


def _join_at_port(peer: Process, seconds: float) -> Store:
    """Join the other ranks at a port that the user or torchrun has fixed."""
    timeout = datetime.timedelta(seconds=seconds)
    url = f"tcp://{peer.address}:{peer.port}"

    def join() -> Store:
        # torchrun's agent may hold the store; `rendezvous` knows.
        store, _, _ = next(rendezvous(url, peer.rank, peer.world_size, timeout=timeout))
        return cast(Store, store)

    return _within(
        seconds + CONNECT_SECONDS,
        join,
        f"{host_name()}: no answer at {peer.address}:{peer.port}, where rank 0 should listen. "
        "Another program may have that port. Set MASTER_PORT to a free one on all ranks; "
        "`launcher submit` and `launcher local` need no fixed port",
    )


# ---- the file ------------------------------------------------------------------------------------
def _wait_for_place(directory: Path, peer: Process, seconds: float) -> Place:
    """Look for rank 0's file until it is there, less and less often."""
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        place, problem = _look(directory, peer)
        if place is not None:
            return place
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{directory / FILE}: rank {peer.rank} on {host_name()} waited {seconds:.0f} s for "
                f"rank 0 to write there where it listens ({problem}). Rank 0 ended or hangs (see "
                f"its output), or the directory is not on a file system that {host_name()} shares "
                "with rank 0's node"
            )
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, pause * PAUSE_FACTOR)


def _look(directory: Path, peer: Process) -> tuple[Place | None, str]:
    """Return what rank 0 has published, or None and why there is nothing to use.

    It takes two calls while the file is missing. Opening the folder makes an NFS client ask the
    server if the folder has changed; by opening the file alone it would answer from its cache, for
    up to a minute, that there is none.
    """
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        return None, f"the directory cannot be opened: {error.strerror}"
    try:
        with open(os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None, "it is another user's"
            place = from_json(Place, parse_json(file.read()))
    except OSError as error:
        # Also a file that the server replaced in this moment.
        return None, f"it cannot be read: {error.strerror}"
    finally:
        os.close(folder)
    if place is None or not 0 < place.port < 2**16 or not place.nonce:
        return None, "it is damaged"
    if place.start != peer.start:
        return None, f"it is of another start, {place.start!r}; this one is {peer.start!r}"
    return place, ""


def _within(seconds: float, function: Callable[[], T], complaint: str) -> T:
    """Return what a function returns, unless it takes too long.

    TCPStore's own timeout does not hold where something accepts the connection and then says
    nothing: another program, or a process that was stopped. Measured with torch 2.13: it waited
    without end. The function goes on in its thread; the caller is about to end the process.

    Args:
        seconds: The longest time.
        function: Talks to a store.
        complaint: The message when it takes longer, or when the store reports an error.

    Raises:
        RunFailed: With the complaint.
    """
    answer = in_background(function)
    if not wait([answer], seconds).done:
        raise RunFailed(f"{complaint} (nothing for {seconds:.0f} s)")
    try:
        return answer.result()
    except DistError as error:
        raise RunFailed(f"{complaint} ({str(error).splitlines()[0]})") from None


# Long enough for a slow file system at a barrier. The launcher's watchdog handles processes that
# hang.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=15)


def _slurm_name() -> str:
    """Return the name of this node that other nodes are most likely to resolve.

    That is Slurm's name of it, where it resolves at all. A site may have given its nodes names for
    Slurm alone; and in a container with a host name of its own, only Slurm's name is the node's.
    """
    if node := os.environ.get("SLURMD_NODENAME"):
        with contextlib.suppress(OSError, UnicodeError):
            socket.getaddrinfo(node, None)
            return node
    return host_name()


def _slurm_start() -> str:
    """Return job, step and restart as one word, which no two starts of ranks share."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(os.environ.get(name, "0") for name in names)


def supervised_attempt() -> Path | None:
    """Return the directory of the attempt that this process belongs to, or None.

    The launcher's supervisor begins an attempt and names it in PRETRAIN_ATTEMPT. None means that
    the processes were started by hand.
    """
    directory = os.environ.get("PRETRAIN_ATTEMPT")
    return Path(directory) if directory else None


def owner() -> Owner:
    """Return this process as the owner of an attempt, with its Slurm job if it has one."""
    return owner_of(os.environ, num_processes=Process.from_environment().world_size)


@dataclass(frozen=True)
class Topology:
    """The sizes of the parallel axes and this process's rank along each of them."""

    rank: int
    """Rank among all processes."""

    layout: Layout
    """Number of processes along each axis."""

    tensor_rank: int
    """In [0, layout.tensor)."""

    pipeline_rank: int
    """In [0, layout.pipeline)."""

    data_rank: int
    """In [0, layout.data)."""

    context_rank: int = 0
    """In [0, layout.context)."""

    @property
    def replica(self) -> int:
        """Return this rank's number among its replicas, in [0, layout.replicas)."""
        return self.context_rank + self.layout.context * self.data_rank

    @property
    def is_main(self) -> bool:
        """Return True on rank 0, which prints, and writes what is written once per run."""
        return self.rank == 0


_STORES: dict[Process, Store] = {}
"""The store at which this process has met the others. It stays open for the next group: if rank 0
closed it, it could close it on ranks that already join that group."""

_GROUPS = itertools.count()
"""Numbers of the groups in the store, so that none reads the addresses of the one before."""


def initialize(config: RunConfig, process: Process | None = None) -> Topology:
    """Join the run's processes, split them by `config.parallel` and seed the random generators.

    A second call in the same processes splits them anew. Tests rely on this to check many layouts
    without restarting processes.

    Args:
        config: The run's config.
        process: This process; None reads the environment.

    Returns:
        The topology, with this process's ranks.

    Raises:
        ConfigError: if the number of processes does not fit the config, if torch was not built for
            the device, or if that cannot train in its precision.
        RunFailed: if the processes do not find each other.
    """
    process = process or Process.from_environment()
    layout = config.layout(process.world_size)
    platform.check_build()
    for phase in config.parts:
        platform.check_precision(phase.config.train.precision, phase.config.train.fp8)
    platform.prepare(process.local_rank)
    # After `prepare`, which must precede the first import of Megatron.
    from megatron.core import parallel_state

    if not dist.is_initialized():
        if process.world_size == 1:
            # A store in memory: a run of one process needs no port, which might be taken.
            # torch.distributed does not list HashStore in __all__.
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(platform.backend(), store=store, rank=0, world_size=1)
        else:
            # Half of the limit after which the watchdog ends a start, so that the error is printed
            # first.
            seconds = config.recovery.startup_seconds / 2
            shared = _met(process, seconds)
            dist.init_process_group(
                platform.backend(),
                # The name begins as that of a store that init_process_group makes itself.
                store=PrefixStore(f"default_pg/{next(_GROUPS)}", shared),
                rank=process.rank,
                world_size=process.world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
    _destroy_model_parallel_groups()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        config.parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    platform.seed_generators(config.run.seed)
    return Topology(
        process.rank,
        layout,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )


def _met(process: Process, seconds: float) -> Store:
    """Return the store of all processes, which meet within some seconds at the first call."""
    if process not in _STORES:
        _STORES[process] = meet(process, min(COLLECTIVE_TIMEOUT.total_seconds(), seconds))
        _STORES[process].set_timeout(COLLECTIVE_TIMEOUT)
    return _STORES[process]


def replica_group() -> dist.ProcessGroup:
    """Return the group of this rank's replicas: data x context ranks, in that order."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def context_group() -> dist.ProcessGroup:
    """Return the group of the ranks that share this rank's sequences, in the parts' order."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def own_part(length: int) -> slice:
    """Return the positions of a sequence of `length` tokens that this rank holds."""
    group = context_group()
    size = length // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


# ---- what the ranks tell each other ----
# As JSON in tensors, read as a type that both sides know: torch's object collectives unpickle, and
# so execute, whatever comes from the network.


_Told = tuple[str, str] | None
"""The class of an error and its message."""


def on_main(topology: Topology, function: Callable[[], T], kind: Any = NoneType) -> T:
    """Call `function` on rank 0 only, and return its result on every rank. A collective operation.

    Args:
        topology: This process's topology.
        function: The function.
        kind: The type of its result, as pydantic takes it.

    Raises:
        ConfigError, RunFailed: on every rank, if `function` raised it on rank 0. Raised on rank 0
            alone, it would leave the others waiting in their next collective.
    """
    result, problem, text = None, None, b""
    if topology.is_main:
        try:
            result = function()
        except (ConfigError, RunFailed) as error:
            problem = error
        text = to_json((_told(problem), result), inf_nan_mode="constants")
    size = platform.to_device(torch.tensor([len(text)]))
    dist.broadcast(size, 0)
    sent = _in_tensor(text, int(size))
    dist.broadcast(sent, 0)
    if not topology.is_main:
        told, result = adapter(tuple[_Told, kind | None]).validate_json(bytes(sent.tolist()))
        problem = _error(told)
    if problem is not None:
        raise problem
    return cast(T, result)


def on_first(function: Callable[[], None]) -> None:
    """Call a function that needs one process on the first one; the others wait for its end.

    Unlike `on_main`, it needs no process group and no limit of time: to build data takes hours.

    Raises:
        ConfigError, RunFailed: on every process, if `function` raised it on the first one.
    """
    process = Process.from_environment()
    if process.world_size == 1:
        return function()
    # A run that failed has left a group of all processes.
    finish()
    problem = None
    store = PrefixStore(f"first/{next(_GROUPS)}", _met(process, COLLECTIVE_TIMEOUT.total_seconds()))
    if process.rank == 0:
        try:
            function()
        except (ConfigError, RunFailed) as error:
            problem = error
        store.set("end", to_json(_told(problem)).decode())
    else:
        while not store.check(["end"]):
            time.sleep(LONGEST_PAUSE_SECONDS)
        problem = _error(adapter(_Told).validate_json(store.get("end")))
    # The first process may end after this, and the store with it: not before all have read there.
    store.add("read", 1)
    while process.rank == 0 and store.add("read", 0) < process.world_size:
        time.sleep(FIRST_PAUSE_SECONDS)
    if problem is not None:
        raise problem


def gather(own: T, kind: Any) -> list[T]:
    """Return what every rank passes, in the order of ranks. All ranks together.

    Args:
        own: What this rank passes.
        kind: Its type, as pydantic takes it.
    """
    text = to_json(own, inf_nan_mode="constants")
    size = platform.to_device(torch.tensor([len(text)]))
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = torch.cat(sizes).tolist()
    sent = _in_tensor(text, max(lengths))
    everyone = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(everyone, sent)
    pieces = zip(torch.stack(everyone).cpu().numpy(), lengths)
    return [adapter(kind).validate_json(row[:length].tobytes()) for row, length in pieces]


def first_problem(own: P | None) -> P | None:
    """Return the first problem that a rank has, on all ranks. All ranks together.

    One about numbers that cannot be right knows the rank then.
    """
    for rank, told in enumerate(gather(_told(own), _Told)):
        problem = _error(told)
        if isinstance(problem, Unsound):
            problem.ranks = (rank,)
        if problem is not None:
            return cast(P, problem)
    return None


def _in_tensor(text: bytes, size: int) -> torch.Tensor:
    """Return bytes on the device, uint8 [size]; behind the text are zeros."""
    return platform.to_device(
        torch.frombuffer(bytearray(text.ljust(size, b"\0")), dtype=torch.uint8)
    )


def _told(error: Exception | None) -> _Told:
    # A message may name a file whose name is no UTF-8.
    message = str(error).encode(errors="replace").decode()
    return None if error is None else (type(error).__name__, message)


def _error(told: _Told) -> Any:
    """Return an error that was told: of ours, by the name of its class; or None."""
    known: list[type[Exception]] = [ConfigError, RunFailed]
    for kind in known:
        known += kind.__subclasses__()
    names = {kind.__name__: kind for kind in known}
    return None if told is None else names.get(told[0], RunFailed)(told[1])


def ranks_per_node(group: dist.ProcessGroup) -> int:
    """Return the number of a group's ranks on each node, the same for all groups of its kind.

    All processes call this together, each with its own group, such as the data-parallel one. The
    number is 1 unless every node holds equally many ranks of each group, with consecutive numbers.
    """
    everyone = gather((host_name(), dist.get_process_group_ranks(group)), tuple[str, list[int]])
    sizes = set()
    for ranks in {tuple(ranks) for _, ranks in everyone}:
        hosts = [everyone[rank][0] for rank in ranks]
        blocks = [len(list(block)) for _, block in itertools.groupby(hosts)]
        sizes |= set(blocks) if len(blocks) == len(set(hosts)) else {1}
    return sizes.pop() if len(sizes) == 1 else 1


def make_groups(wanted: list[list[int]]) -> list[dist.ProcessGroup]:
    """Make process groups, which are closed together with Megatron's.

    All processes call this together, each with the groups that it belongs to.

    Args:
        wanted: The ranks, among all processes, of each group that this process belongs to.
    """
    from megatron.core import parallel_state

    # Every process makes every group, in one order. The alternative, in which members alone take
    # part (use_local_synchronization), names a group by its ranks. A group that is made a second
    # time then meets the first one's keys in the store, and can hang.
    distinct = sorted(
        {tuple(ranks) for groups in gather(wanted, list[list[int]]) for ranks in groups}
    )
    made = {ranks: dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT) for ranks in distinct}
    own = [made[tuple(ranks)] for ranks in wanted]
    parallel_state._global_process_group_list.extend(own)
    return own


def ranks_here() -> int:
    """Return the number of ranks on this node. All processes call this together."""
    return gather(host_name(), str).count(host_name())


def host_name() -> str:
    """Return the name of this process's node."""
    return socket.gethostname()


def finish() -> None:
    """Leave the process group. A second call does nothing."""
    if dist.is_initialized():
        _destroy_model_parallel_groups()
        dist.destroy_process_group()


def _destroy_model_parallel_groups() -> None:
    """Close the process groups that Megatron has made, if any.

    Megatron's `destroy_model_parallel` only forgets them (megatron/core/parallel_state.py). Left
    open, they keep their threads and sockets: 51 threads per initialization on a single gloo
    process. It does not forget the ranks that share a tied embedding: a middle stage that was a
    first or last one in the layout before would still take itself for one of them.
    """
    from megatron.core import parallel_state

    for group in parallel_state._global_process_group_list or []:
        # None stands for the default group, which stays.
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    parallel_state._EMBEDDING_GLOBAL_RANKS = None
