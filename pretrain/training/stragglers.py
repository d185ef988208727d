"""Measure how long each rank is busy in a step, and name the rank that holds up the others.

All ranks take equally long for a step, because they wait for each other in its collectives. So a
slow rank is known by its waits: of the ranks that do the same work, it waits least. What it does
not wait for other ranks it is busy: it computes, waits for data, or is stopped or without a
processor.

Nothing is synchronised for it. Waits lie between two `platform.Moment`s around each collective that
the present queue of work waits for: on a CPU the host's clock, on a GPU events that are read with
the step's other numbers. The seconds travel with the loss, in no collective of their own.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from pretrain import platform
from pretrain.rundir.metrics import Record
from pretrain.topology import Topology, gather, host_name

WINDOW_STEPS = 8
"""After so many steps the ranks tell each other the mean of their busy seconds in these steps,
without the longest one, so that what happens once leaves no trace."""
SLOW_RATIO = 1.1
"""A rank is slow if it is busy so many times as long as its peers, in two windows in a row or
more,"""
LOST_SECONDS = 3.0
"""and if the others have waited for it so long in them. Two ranks among a dozen busy processes on
two cores get uneven shares for seconds, in which one rank waited for the other for up to 1.3 s."""

SHARED = "shared_seconds"
"""The key under which a step's record brings what all ranks shared to `Stragglers`."""
Waits = list[tuple[platform.Moment, platform.Moment]]


_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "alltoall"),
    *("_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "alltoall_base", "all_to_all_single"),
)
"""Methods of torch's ProcessGroup, of several releases."""


class StepTimes:
    """The seconds that this rank was busy in its latest steps. Every rank makes one."""

    def __init__(self) -> None:
        self._waits: Waits = []
        self._begin: platform.Moment | None = None
        self._latest: deque[float] = deque(maxlen=WINDOW_STEPS)
        # As the classes hold them, which is not as they give them out.
        calls = {name: vars(dist.ProcessGroup).get(name) for name in _COLLECTIVES}
        self._measured: list[tuple[type, str, Any, Any]] = [
            (dist.ProcessGroup, name, call, self._begun(getattr(dist.ProcessGroup, name)))
            for name, call in calls.items()
            if call is not None
        ]
        wait = vars(dist.Work)["wait"]
        self._measured += [(dist.Work, "wait", wait, self._waited(dist.Work.wait))]

    @contextlib.contextmanager
    def measuring(self, topology: Topology, step: int) -> Iterator[None]:
        """Note how long the step of the block waits for other ranks: in torch's collectives."""
        if topology.layout.world_size == 1 or step % _interval(topology):
            yield
            return
        for owner, name, _, measured in self._measured:
            setattr(owner, name, measured)
        try:
            yield
        finally:
            for owner, name, original, _ in self._measured:
                setattr(owner, name, original)

    def _begun(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            # NCCL runs one that is not asynchronous in the present queue, before it is waited for.
            if not all(getattr(each, "asyncOp", True) for each in (*args, *named.values())):
                self._begin = platform.Moment()
            return function(*args, **named)

        return call

    def _waited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **named: Any) -> Any:
            begin, self._begin = self._begin or platform.Moment(), None
            done = function(*args, **named)
            # Of another queue's events nobody knows that they have passed when they are read.
            if platform.is_main_queue():
                self._waits.append((begin, platform.Moment()))
            return done

        return wait

    def take(self) -> Waits:
        """Return the waits of the step that is over, and begin another."""
        waits, self._waits = self._waits, []
        return waits

    def add(self, step_seconds: float, waits: Waits) -> None:
        """Note a step that is over, and so are its waits. One without any was not measured."""
        if waits:
            waited = sum(end.seconds_since(begin) for begin, end in waits)
            self._latest.append(max(0.0, step_seconds - waited))

    def shared(self, topology: Topology, step: int) -> list[float]:
        """Return what to add up over the ranks in a step: a number of each rank, or nothing.

        Args:
            topology: This process's coordinates.
            step: The step, counted from 1.
        """
        num_ranks = topology.layout.world_size
        if num_ranks == 1 or step % window_steps(topology):
            return []
        cells = [0.0] * num_ranks
        if self._latest:
            ordered = sorted(self._latest)
            cells[topology.rank] = statistics.mean(ordered[:-1] or ordered)
            self._latest.clear()
        return cells


def _interval(topology: Topology) -> int:
    """Return how often a step is measured: the first of so many.

    On a GPU a wait costs the host two events, and tensor ranks wait four times a layer in every
    micro batch, as context ranks do.
    """
    layout = topology.layout
    return 4 if platform.has_cuda() and layout.tensor * layout.context > 1 else 1


def window_steps(topology: Topology) -> int:
    """Return after how many steps the ranks share what `WINDOW_STEPS` of these have taken."""
    return WINDOW_STEPS * _interval(topology)


# ---- Judge, on rank 0 ----


class Place(NamedTuple):
    """A rank's place and part of the work."""

    name: str
    """Host and device, as "n7, cuda:1 NVIDIA H200"."""
    stage: int
    """Its pipeline stage. Each part of a sequence counts as a stage of its own, since later parts
    see more keys. Ranks of one stage do the same work."""


def places(topology: Topology) -> list[Place]:
    """Return where every rank runs, in the order of ranks. All ranks together."""
    device = f"{platform.device()} {platform.device_name()}" if platform.has_cuda() else "cpu"
    stage = topology.pipeline_rank * topology.layout.context + topology.context_rank
    return gather(Place(f"{host_name()}, {device}", stage), Place)


class Stragglers:
    """Tells which rank is the slowest from what all have shared, and says when it is slow.

    A rank is compared with the median of the others of its pipeline stage. One that is alone in its
    stage is compared with none, and not named.
    """

    def __init__(self, places: Sequence[Place], window: int) -> None:
        """Begin without knowing anything.

        Args:
            places: Where each rank runs.
            window: Steps from one sharing to the next.
        """
        self._places, self._window = places, window
        stages: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            stages.setdefault(place.stage, []).append(rank)
        self._stages = [ranks for ranks in stages.values() if len(ranks) > 1]
        self._rank, self._windows, self._lost = -1, 0, 0.0
        """The slowest rank, for how many windows it has been too slow, and the seconds lost."""
        self._since: int | None = None
        """The first step in which it was slow; None if it is not."""

    def judge(self, step: int, busy: Sequence[float]) -> tuple[Record, str | None]:
        """Judge the steps of a window.

        Args:
            step: The step in which the numbers were shared.
            busy: `StepTimes.shared`, added up over the ranks.

        Returns:
            (what the step's record gets, a line for the log).
        """
        if not self._stages or not all(busy):
            return {}, None
        found = []
        for ranks in self._stages:
            *others, rank = sorted(ranks, key=busy.__getitem__)
            usual = statistics.median(busy[other] for other in others)
            found.append((busy[rank] / usual, rank, busy[rank] - usual))
        ratio, rank, excess = max(found)
        if rank != self._rank or ratio <= SLOW_RATIO:
            self._rank, self._windows, self._lost, self._since = rank, 0, 0.0, None
        if ratio > SLOW_RATIO:
            self._windows += 1
            self._lost += excess * self._window
        name, line = self._places[rank].name, None
        if self._since is None and self._windows > 1 and self._lost >= LOST_SECONDS:
            self._since = step - self._windows * self._window + 1
            line = (
                f"warning: rank {rank} ({name}) is slow, and the others wait for it: since step "
                f"{self._since} it is busy {excess:.3g} s a step longer than the other ranks of "
                f"its pipeline stage, {ratio:.3g} times as long"
            )
        record: Record = {"slowest_rank": rank, "slowest_place": name, "slowest_ratio": ratio}
        return record if self._since is None else record | {"slow_since_step": self._since}, line
