"""Measure how long each rank is busy in a step, and name the rank that holds up the others.

All ranks take equally long for a step, because they wait for each other in its collectives. So a
slow rank shows in its waits: among ranks that do the same work, it waits least. A rank counts as
busy whenever it does not wait for other ranks: it computes, waits for data, is stopped, or gets no
processor.

The measurement synchronizes nothing. A wait is the time between two `platform.Moment`s around each
collective for which the current queue of work waits: on a CPU by the host's clock, on a GPU by
events that are read with the step's other numbers. The seconds travel with the loss, without a
collective of their own.
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
"""After this many steps the ranks exchange the mean of their busy seconds in these steps. The
longest step is left out, so that a single slow step has no effect."""
SLOW_RATIO = 1.1
"""A rank is slow if it is busy more than this many times as long as its peers in at least two
windows in a row, and the others have waited for it for LOST_SECONDS in these windows."""
LOST_SECONDS = 3.0
"""See SLOW_RATIO. Two ranks among a dozen busy processes on two cores got uneven shares for
seconds, in which one rank waited for the other for up to 1.3 s."""

SHARED = "shared_seconds"
"""The key of a step's record that holds the busy seconds of all ranks, for `Stragglers`."""
Waits = list[tuple[platform.Moment, platform.Moment]]


_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "alltoall"),
    *("_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "alltoall_base", "all_to_all_single"),
)
"""Methods of torch's ProcessGroup in several releases."""


class StepTimes:
    """The seconds that this rank was busy in its latest steps. Every rank makes one."""

    def __init__(self) -> None:
        self._waits: Waits = []
        self._begin: platform.Moment | None = None
        self._latest: deque[float] = deque(maxlen=WINDOW_STEPS)
        # From vars(), because getattr returns another object than the class holds, and the original
        # must be restored.
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
        """Measure how long the step of the block waits for other ranks in torch's collectives."""
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
            # NCCL runs a synchronous collective in the current queue, before `wait` is called.
            if not all(getattr(each, "asyncOp", True) for each in (*args, *named.values())):
                self._begin = platform.Moment()
            return function(*args, **named)

        return call

    def _waited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **named: Any) -> Any:
            begin, self._begin = self._begin or platform.Moment(), None
            done = function(*args, **named)
            # Events of another queue may not have passed yet when they are read.
            if platform.is_main_queue():
                self._waits.append((begin, platform.Moment()))
            return done

        return wait

    def take(self) -> Waits:
        """Return the waits of the completed step, and begin the next."""
        waits, self._waits = self._waits, []
        return waits

    def add(self, step_seconds: float, waits: Waits) -> None:
        """Add a completed step with its waits. A step without waits was not measured."""
        if waits:
            waited = sum(end.seconds_since(begin) for begin, end in waits)
            self._latest.append(max(0.0, step_seconds - waited))

    def shared(self, topology: Topology, step: int) -> list[float]:
        """Return what to sum over the ranks in a step: one number for each rank, or [].

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
    """Return n if every n-th step is measured.

    On a GPU a wait costs the host two events, and tensor ranks and context ranks wait four times
    per layer in every micro batch, so with these only every fourth step is measured.
    """
    layout = topology.layout
    return 4 if platform.has_cuda() and layout.tensor * layout.context > 1 else 1


def window_steps(topology: Topology) -> int:
    """Return after how many steps the ranks share the times of `WINDOW_STEPS` measured steps."""
    return WINDOW_STEPS * _interval(topology)


# ---- Judge, on rank 0 ----


class Place(NamedTuple):
    """A rank's place and part of the work."""

    name: str
    """Host and device, such as "n7, cuda:1 NVIDIA H200"."""
    stage: int
    """The rank's pipeline stage. With context parallelism, each part of a sequence counts as a
    stage of its own, since later parts see more keys. Ranks of one stage do the same work."""


def places(topology: Topology) -> list[Place]:
    """Return where every rank runs, in the order of ranks. All ranks together."""
    device = f"{platform.device()} {platform.device_name()}" if platform.has_cuda() else "cpu"
    stage = topology.pipeline_rank * topology.layout.context + topology.context_rank
    return gather(Place(f"{host_name()}, {device}", stage), Place)


class Stragglers:
    """Finds the slowest rank from the shared times, and reports when it is slow.

    A rank is compared with the median of the other ranks of its pipeline stage. A rank that is
    alone in its stage cannot be compared, and is never named.
    """

    def __init__(self, places: Sequence[Place], window: int) -> None:
        """Begin without any measurements.

        Args:
            places: The place of each rank.
            window: Number of steps between two exchanges of times.
        """
        self._places, self._window = places, window
        stages: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            stages.setdefault(place.stage, []).append(rank)
        self._stages = [ranks for ranks in stages.values() if len(ranks) > 1]
        self._rank, self._windows, self._lost = -1, 0, 0.0
        """The slowest rank, the number of windows in which it was too slow, and seconds lost."""
        self._since: int | None = None
        """The first step in which it was slow; None if it is not."""

    def judge(self, step: int, busy: Sequence[float]) -> tuple[Record, str | None]:
        """Judge the steps of a window.

        Args:
            step: The step in which the numbers were shared.
            busy: `StepTimes.shared`, summed over the ranks.

        Returns:
            (entries for the step's record, a line for the log or None).
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
