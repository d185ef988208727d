"""Let the ranks of a run find each other: rank 0 listens on a free port and publishes it in a file.

The system chooses the port, so it cannot be taken already, as one that is derived from a job's
number can. Rank 0 writes address and port to rendezvous.json, in a directory that all ranks see.
The other ranks look for the file. All then hand in a card, and rank 0 judges the cards together.
So whatever is missing is named here, before NCCL or gloo begin to wait.

What ranks share from then on is a TCPStore of torch: rank 0's process serves keys and values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

# torch.distributed lists none of these in __all__.
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from pretrain.config import ConfigError, RunFailed, writing
from pretrain.rundir.files import from_json, parse_json, replace_file

T = TypeVar("T")

FILE = "rendezvous.json"
"""The file in which rank 0 publishes where it listens, until all ranks have come;
`rundir.paths.LAYOUT` has a row for it."""
FILE_MODE = 0o600
"""For the user alone: whoever knows address and port can talk to the ranks."""
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0
"""Between two looks for the file. 127 ranks that wait look 64 times a second together."""
PAUSE_FACTOR = 1.5
CONNECT_SECONDS = 60.0
"""The longest time to connect to rank 0 once it has published, which it does while it listens."""
VERDICT_SECONDS = 10.0
"""How long rank 0 waits for the others to read why the run cannot start."""
MOST_RANKS_NAMED = 8


@dataclass(frozen=True)
class Place:
    """The address at which rank 0 listens: the content of rendezvous.json."""

    address: str
    """A name or address of rank 0's host that the other hosts resolve."""
    port: int
    """The port that the system chose."""
    nonce: str
    """A random key that rank 0's store holds, which proves that it is the right store."""
    start: str
    """Which start of the ranks this is, as `Peer.start`."""


@dataclass(frozen=True)
class Peer:
    """A process among those that have to find each other."""

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


def meet(peer: Peer, card: str, judge: Callable[[list[str]], str], seconds: float) -> Store:
    """Find the other processes, and let rank 0 judge what each says of itself. All call it.

    Args:
        peer: This process.
        card: What this process says of itself.
        judge: Given the cards by rank, returns what is wrong with them, or "". Called on rank 0.
        seconds: How long to wait for the others.

    Returns:
        The store that all processes share. It is closed when nothing refers to it any more.

    Raises:
        ConfigError: On all ranks: `judge` found something wrong.
        RunFailed: A process did not come in time, or rank 0 cannot be reached.
    """
    if peer.directory is None:
        store = _join_at_port(peer, seconds)
    elif peer.rank == 0:
        store = _publish(peer, peer.directory, seconds)
    else:
        store = _find(peer, peer.directory, seconds)
    try:
        _hand_in(PrefixStore("cards", store), peer, card, judge, seconds)
    finally:
        if peer.directory is not None and peer.rank == 0:
            # All have read it, or the start failed. What does not lie there cannot be taken for the
            # address of a later start.
            with contextlib.suppress(OSError):
                (peer.directory / FILE).unlink()
    return store


# ---- where rank 0 listens ------------------------------------------------------------------------
def _publish(peer: Peer, directory: Path, seconds: float) -> Store:
    """Listen on a free port and publish it; for rank 0."""
    # Port 0 is a request for any free port. Not waiting for the workers, which cannot come before
    # the port is published.
    store = TCPStore(
        peer.address,
        0,
        peer.world_size,
        is_master=True,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    place = Place(peer.address, store.port, uuid.uuid4().hex, peer.start)
    store.set(place.nonce, "")
    path = directory / FILE
    with writing(path):
        replace_file(path, json.dumps(dataclasses.asdict(place)) + "\n", mode=FILE_MODE)
    return PrefixStore(place.nonce, store)


def _find(peer: Peer, directory: Path, seconds: float) -> Store:
    """Wait until rank 0 has published where it listens, and connect to it; for the other ranks."""
    place = _wait_for_place(directory, peer, seconds)
    where = f"rank 0 at {place.address}:{place.port} (published in {directory / FILE})"
    _check_reachable(place, peer, where)

    def connect() -> Store:
        store = TCPStore(
            place.address,
            place.port,
            peer.world_size,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        if not store.check([place.nonce]):
            raise RunFailed(f"{_host()}: {where} is another run's. Start the run again")
        return PrefixStore(place.nonce, store)

    return _within(CONNECT_SECONDS, connect, f"{_host()}: {where} does not answer")


def _join_at_port(peer: Peer, seconds: float) -> Store:
    """Join the other ranks at a port that the user, torchrun or the job's number has fixed."""
    timeout = datetime.timedelta(seconds=seconds)
    url = f"tcp://{peer.address}:{peer.port}"

    def join() -> Store:
        # torchrun's agent may hold the store; `rendezvous` knows.
        store, _, _ = next(rendezvous(url, peer.rank, peer.world_size, timeout=timeout))
        return cast(Store, store)

    try:
        return _within(
            seconds + CONNECT_SECONDS,
            join,
            f"{_host()}: no answer at {peer.address}:{peer.port}, where rank 0 should listen. "
            "Another program may have that port. Set MASTER_PORT to a free one on all ranks",
        )
    except RunFailed as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RunFailed(
            f"port {peer.port} of {_host()} is taken by another program, and rank 0 was to listen "
            "there. Set MASTER_PORT to a free one on all ranks; `launcher submit` and `launcher "
            "local` need no fixed port"
        ) from None


def _hand_in(
    store: Store, peer: Peer, card: str, judge: Callable[[list[str]], str], seconds: float
) -> None:
    """Hand in this rank's card and wait for rank 0's verdict over all cards; see `meet`."""
    if not peer.rank:
        store.set(_card(0), card)
        verdict = _judge(store, peer.world_size, judge, seconds)
        _announce(store, peer.world_size, verdict)
    else:
        # Twice the time, because rank 0 waits as long for the last rank and may have begun later.
        verdict = _within(
            2 * seconds,
            lambda: _ask(store, peer.rank, card, 2 * seconds),
            f"{_host()}: rank 0 no longer answers. Its output says why",
        )
    if verdict["missing"]:
        raise RunFailed(verdict["missing"])
    if verdict["wrong"]:
        raise ConfigError(verdict["wrong"])


# ---- the file ------------------------------------------------------------------------------------
def _wait_for_place(directory: Path, peer: Peer, seconds: float) -> Place:
    """Look for rank 0's file until it is there, less and less often."""
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        place, problem = _look(directory, peer)
        if place is not None:
            return place
        if time.monotonic() > deadline:
            raise RunFailed(
                f"{directory / FILE}: rank {peer.rank} on {_host()} waited {seconds:.0f} s for "
                f"rank 0 to write there where it listens ({problem}). Rank 0 ended or hangs (see "
                f"its output), or the directory is not on a file system that {_host()} shares "
                "with rank 0's node"
            )
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, pause * PAUSE_FACTOR)


def _look(directory: Path, peer: Peer) -> tuple[Place | None, str]:
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
            place = from_json(Place, parse_json(file.read()))
    except FileNotFoundError:
        return None, "there is no such file"
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


# ---- the connection ------------------------------------------------------------------------------
def _check_reachable(place: Place, peer: Peer, where: str) -> None:
    """Connect to rank 0 once and hang up.

    TCPStore by itself tries for as long as its timeout, prints pages of C++ stacks, and does not
    say which of these it was.
    """
    deadline, pause = time.monotonic() + CONNECT_SECONDS, FIRST_PAUSE_SECONDS
    while True:
        try:
            socket.create_connection((place.address, place.port), CONNECT_SECONDS).close()
            return
        except ConnectionRefusedError:
            raise RunFailed(
                f"{_host()}: {where} does not listen any more. Rank 0 has ended (its output says "
                f"why), or {place.address} is another machine for {_host()}"
            ) from None
        # UnicodeError: a name that cannot be a host's.
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"{_host()}: {where} cannot be reached ({error}). Every node must resolve "
                    "that name, and no firewall may stand between them. MASTER_ADDR on rank 0 sets "
                    "another name"
                ) from None
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, pause * PAUSE_FACTOR)


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
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if not errors:
        raise RunFailed(f"{complaint} (nothing for {seconds:.0f} s)")
    [error] = errors
    if isinstance(error, DistError):
        raise RunFailed(f"{complaint} ({str(error).splitlines()[0]})") from None
    raise error


# ---- cards and verdict ---------------------------------------------------------------------------
def _card(rank: int) -> str:
    return f"card/{rank}"


def _judge(
    store: Store, world_size: int, judge: Callable[[list[str]], str], seconds: float
) -> dict[str, str]:
    """Wait for all cards, and return what is missing or wrong: the two keys of a verdict."""
    cards = [_card(rank) for rank in range(world_size)]
    try:
        store.wait(cards, datetime.timedelta(seconds=seconds))
    except DistError:
        absent = [rank for rank, card in enumerate(cards) if not store.check([card])]
        named = ", ".join(map(str, absent[:MOST_RANKS_NAMED]))
        more = f" and {len(absent) - MOST_RANKS_NAMED} more" * (len(absent) > MOST_RANKS_NAMED)
        return {
            "missing": f"of {world_size} ranks these did not come within {seconds:.0f} s: "
            f"{named}{more}. Their output says why, or where they hang",
            "wrong": "",
        }
    return {"missing": "", "wrong": judge([card.decode() for card in store.multi_get(cards)])}


def _announce(store: Store, world_size: int, verdict: dict[str, str]) -> None:
    """Publish the verdict; when the run cannot start, wait until the others have read it."""
    store.set("verdict", json.dumps(verdict))
    if any(verdict.values()):
        # This process is about to end, and its store with it.
        read = [f"read/{rank}" for rank in range(1, world_size) if store.check([_card(rank)])]
        with contextlib.suppress(DistError):
            store.wait(read, datetime.timedelta(seconds=VERDICT_SECONDS))


def _ask(store: Store, rank: int, card: str, seconds: float) -> dict[str, str]:
    """Hand in a card and return rank 0's verdict."""
    store.set(_card(rank), card)
    store.wait(["verdict"], datetime.timedelta(seconds=seconds))
    verdict: dict[str, str] = json.loads(store.get("verdict"))
    if any(verdict.values()):
        store.set(f"read/{rank}", "")
    return verdict


def _host() -> str:
    return socket.gethostname()
