"""Test how ranks find each other, with real processes, real stores and real ports.

The ranks are forked from a process that has imported torch and nothing else of weight.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from pretrain import platform, topology
from pretrain.config import RunFailed
from pretrain.rundir.files import replace_file
from pretrain.topology import FILE, Process, meet
from tests.end_to_end.commands import wait_for

FORK = multiprocessing.get_context("fork")


def peer(
    rank: int, world_size: int, directory: Path | None, start: str = "", port: int = 0
) -> Process:
    return Process(rank, world_size, rank, "127.0.0.1", port, directory, start)


class Ranks:
    """Forked processes that call a function and hand back what it returned or raised."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self._ends = [FORK.Pipe() for _ in functions]
        self.processes = [
            FORK.Process(target=_call, args=(function, sender))
            for function, (_, sender) in zip(functions, self._ends)
        ]
        for process in self.processes:
            process.start()
        for _, sender in self._ends:
            sender.close()

    def results(self) -> list[Any]:
        """Wait for the end of all; None for one that was killed."""
        found: list[Any] = []
        for receiver, _ in self._ends:
            try:
                found.append(receiver.recv() if receiver.poll(60) else "hangs")
            except EOFError:
                found.append(None)
        return found

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _call(function: Callable[[], Any], sender: Any) -> None:
    try:
        sender.send(function())
    except RunFailed as error:
        sender.send(error)
    sender.close()
    # As `leave` does: a rank ends in the middle, whatever its threads do.
    os._exit(0)


@contextmanager
def running(*functions: Callable[[], Any]) -> Iterator[Ranks]:
    ranks = Ranks(*functions)
    try:
        yield ranks
    finally:
        ranks.kill()


def run(*functions: Callable[[], Any]) -> list[Any]:
    with running(*functions) as ranks:
        return ranks.results()


def ranks_that_meet(world_size: int, **options: Any) -> list[Callable[[], int]]:
    """Return a function for each rank, which meets the others and returns how many have met."""

    def rank(number: int) -> Callable[[], int]:
        def call() -> int:
            store = meet(peer(number, world_size, **options), 30)
            store.add("met", 1)
            # The store is rank 0's, so that has to stay until the last one has used it.
            while not number and store.add("met", 0) < world_size:
                time.sleep(0.01)
            return world_size if number else int(store.add("met", 0))

        return call

    return [rank(number) for number in range(world_size)]


# ---- the file ------------------------------------------------------------------------------------
def test_ranks_meet_on_a_free_port(tmp_path):
    assert run(*ranks_that_meet(3, directory=tmp_path)) == [3, 3, 3]
    assert os.listdir(tmp_path) == []


def test_what_rank_0_publishes(tmp_path):
    with running(publish_and_wait(tmp_path)):
        wait_for(lambda: (tmp_path / FILE).exists())
        content = json.loads((tmp_path / FILE).read_text())
        assert content.keys() == {"address", "port", "nonce", "start"}
        socket.create_connection((content["address"], content["port"])).close()
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
        assert os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "it cannot be read: No such file or directory"),
        ("", "it is damaged"),
        ('{"address": "127.0.0.1", "port": 65536, "nonce": "a", "start": "7.0.0"}', "damaged"),
        ('{"address": "127.0.0.1", "port": "80", "nonce": "a", "start": "7.0.0"}', "damaged"),
        (
            '{"address": "127.0.0.1", "port": 80, "nonce": "a", "start": "7.0.0"}',
            "it is of another start, '7.0.0'; this one is '7.1.0'",
        ),
    ],
)
def test_what_is_no_address_of_this_start_is_not_used(tmp_path, content, why):
    if content is not None:
        replace_file(tmp_path / FILE, content)
    with pytest.raises(RunFailed) as failed:
        meet(peer(1, 2, tmp_path, "7.1.0"), 0.2)
    message = str(failed.value)
    assert why in message and f"{tmp_path / FILE}: rank 1 on {socket.gethostname()}" in message
    assert "not on a file system" in message


def test_a_link_is_not_followed_and_no_directory_is_named(tmp_path):
    with pytest.raises(RunFailed, match="the directory cannot be opened: No such file"):
        meet(peer(1, 2, tmp_path / "none"), 0.2)
    replace_file(tmp_path / "real", '{"address": "a", "port": 80, "nonce": "a", "start": ""}')
    (tmp_path / FILE).symlink_to("real")
    with pytest.raises(RunFailed, match="it cannot be read"):
        meet(peer(1, 2, tmp_path), 0.2)


def test_the_address_of_an_earlier_start_is_passed_over_while_it_stands_there(tmp_path):
    """Its rank 0 still listens, as when a step is killed while the next one starts."""
    old, _ = topology._publish(peer(0, 2, tmp_path, "7.0.0"), tmp_path, 5)

    first, second = ranks_that_meet(2, directory=tmp_path, start="7.1.0")

    def late() -> int:
        time.sleep(0.3)
        return first()

    assert run(late, second) == [2, 2]
    # Nobody has handed anything in at the old one, which holds its nonce and no other key.
    assert old.num_keys() == 1


# ---- rank 0 ends, hangs or is somebody else ------------------------------------------------------
def publish_and_wait(directory: Path) -> Callable[[], None]:
    def rank_0() -> None:
        store = topology._publish(peer(0, 2, directory), directory, 60)
        time.sleep(60)
        del store

    return rank_0


def other_rank(directory: Path, seconds: float = 20) -> Callable[[], str]:
    def rank_1() -> str:
        meet(peer(1, 2, directory), seconds)
        return "met"

    return rank_1


def test_a_rank_0_that_is_stopped_holds_nobody_longer_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(topology, "CONNECT_SECONDS", 1.0)
    with running(publish_and_wait(tmp_path)) as first:
        wait_for(lambda: (tmp_path / FILE).exists())
        os.kill(first.processes[0].pid, signal.SIGSTOP)
        [error] = run(other_rank(tmp_path))
    assert "does not answer" in str(error) and "(nothing for 1 s)" in str(error)


@contextmanager
def listener() -> Iterator[int]:
    """Yield a port on which a program accepts connections and says nothing."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_another_run_s_store_at_the_port_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    store, _ = topology._publish(peer(0, 2, tmp_path), tmp_path / "other", 5)
    place = json.loads((tmp_path / "other" / FILE).read_text()) | {"nonce": "of this run"}
    replace_file(tmp_path / FILE, json.dumps(place))
    with pytest.raises(RunFailed, match="is another run's"):
        meet(peer(1, 2, tmp_path), 5)
    assert store.num_keys() > 0


def test_a_stranger_who_has_joined_the_store_is_no_rank(tmp_path):
    """He lists the keys of rank 0's store, and hands in what he finds there."""

    def stranger() -> str:
        wait_for(lambda: (tmp_path / FILE).exists())
        place = json.loads((tmp_path / FILE).read_text())
        store = TCPStore(place["address"], place["port"], wait_for_workers=False)
        wait_for(lambda: any(key.endswith("present/0") for key in store.list_keys()))
        [own] = [k.removeprefix("/") for k in store.list_keys() if k.endswith("present/0")]
        assert not any(place["nonce"] in key for key in store.list_keys())
        assert place["nonce"].encode() not in store.get(own)
        store.set(own.removesuffix("0") + "1", store.get(own))
        return "joined"

    def first() -> None:
        meet(peer(0, 2, tmp_path), 30)

    ranks = Ranks(first, stranger)
    refused, joined = ranks.results()
    ranks.kill()
    assert joined == "joined"
    assert "what came as rank 1 does not know the secret" in str(refused)


@pytest.mark.skipif(os.geteuid() != 0, reason="an /etc/hosts of its own needs root")
def test_a_name_is_listened_at_where_it_leads_to_on_rank_0(tmp_path):
    """Other hosts are given the address; Debian's 127.0.1.1 for the own name is given to nobody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        try:
            out.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address that others reach")
        own = out.getsockname()[0]
    (tmp_path / "hosts").write_text(f"127.0.1.1 debian\n{own} node\n")

    def listens() -> list[tuple[str, bool, bool]]:
        libc = ctypes.CDLL(None, use_errno=True)
        # CLONE_NEWNS; MS_REC and MS_PRIVATE; MS_BIND.
        assert libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 0x44000, None) == 0
        hosts = os.fsencode(tmp_path / "hosts")
        assert libc.mount(hosts, b"/etc/hosts", None, 0x1000, None) == 0
        found = []
        for name in ("node", "debian", own, "127.0.0.1"):
            store, _ = topology._publish(Process(0, 2, 0, name, 0, tmp_path), tmp_path, 20)
            place = json.loads((tmp_path / FILE).read_text())
            reached = []
            for address in (own, "127.0.0.2"):
                with socket.socket() as client:
                    reached.append(client.connect_ex((address, place["port"])) == 0)
            found.append((place["address"], *reached))
            del store
        return found

    [found] = run(listens)
    alone = (own, True, False)
    assert found == [alone, ("debian", True, True), alone, ("127.0.0.1", False, False)]


def test_ranks_that_do_not_come_are_named_on_all(tmp_path):
    def rank(number: int) -> Callable[[], Any]:
        return lambda: meet(peer(number, 12, tmp_path), 2)

    first, second = run(rank(0), rank(7))
    # The other one may find that rank 0, which has the store, is gone.
    assert isinstance(first, RunFailed) and isinstance(second, RunFailed)
    assert "of 12 ranks these did not come within 2 s: 1, 2, 3, 4, 5, 6, 8, 9 and 2" in str(first)


# ---- a fixed port --------------------------------------------------------------------------------
def test_a_fixed_port_that_is_taken_is_named(monkeypatch):
    monkeypatch.setattr(topology, "CONNECT_SECONDS", 1.0)

    def rank(number: int, port: int) -> Callable[[], Any]:
        return lambda: meet(peer(number, 2, None, port=port), 1)

    with listener() as port:
        first, second = run(rank(0, port), rank(1, port))
    for error in (first, second):
        assert f"no answer at 127.0.0.1:{port}" in str(error) and "MASTER_PORT" in str(error)


# ---- what a process reads from its environment ---------------------------------------------------
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURMD_NODENAME": "localhost",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            SLURM | {"PRETRAIN_RENDEZVOUS": "/run/attempts/0001", "SLURM_RESTART_COUNT": "1"},
            ("localhost", 0, Path("/run/attempts/0001"), "4711.2.1"),
        ),
        (
            SLURM | {"PRETRAIN_RENDEZVOUS": "/r", "SLURMD_NODENAME": "no.such.host.invalid"},
            (socket.gethostname(), 0, Path("/r"), "4711.2.0"),
        ),
        (
            SLURM | {"PRETRAIN_RENDEZVOUS": "/r", "MASTER_ADDR": "ib0"},
            ("ib0", 0, Path("/r"), "4711.2.0"),
        ),
        (
            SLURM | {"MASTER_ADDR": "n1", "MASTER_PORT": "5", "PRETRAIN_RENDEZVOUS": "/r"},
            ("n1", 5, None, "4711.2.0"),
        ),
        (TORCHRUN, ("127.0.0.1", 29500, None, "")),
        (
            TORCHRUN | {"MASTER_ADDR": "n1", "MASTER_PORT": "5", "PRETRAIN_RENDEZVOUS": "/r"},
            ("n1", 5, None, ""),
        ),
        (TORCHRUN | {"PRETRAIN_RENDEZVOUS": "/r"}, ("127.0.0.1", 0, Path("/r"), "")),
        (SLURM | TORCHRUN | {"MASTER_PORT": "5"}, ("127.0.0.1", 5, None, "")),
        ({}, ("127.0.0.1", 0, None, "")),
        ({"PRETRAIN_RENDEZVOUS": "/r"}, ("127.0.0.1", 0, None, "")),
        # A batch script has these two, and is no step of srun.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, ("127.0.0.1", 0, None, "")),
    ],
)
def test_where_the_ranks_meet(monkeypatch, variables, expected):
    for name in (*SLURM, *TORCHRUN, "MASTER_ADDR", "MASTER_PORT", "PRETRAIN_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = Process.from_environment()
    assert (found.address, found.port, found.directory, found.start) == expected


# ---- devices -------------------------------------------------------------------------------------


def test_deepspeed_is_told_the_number_of_the_visible_gpu(monkeypatch):
    """deepspeed/runtime/engine.py calls set_device(LOCAL_RANK)."""

    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    platform._select_device(3)
    assert chosen == [0] and os.environ["LOCAL_RANK"] == "0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    platform._select_device(3)
    assert chosen == [0] and os.environ["LOCAL_RANK"] == "3"
