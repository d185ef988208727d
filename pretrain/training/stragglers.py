"""Measure what each rank does with a step's time, and name the ranks that hold up the others.

All ranks take equally long for a step, because they wait for each other in its collectives. So a
slow rank is known by its waits: of the ranks that do the same work, it waits least. A step's
seconds are split into those in which this rank waited for others, those in which its host waited
for data, and the rest, in which it computed. Time in which a process was stopped or had no
processor counts where it struck.

Nothing is synchronised for it. Waits lie between two `platform.Moment`s around each collective that
the present queue of work waits for: on a CPU the host's clock, on a GPU events that are read with
the step's other numbers. The seconds travel with the loss, in no collective of their own.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from pretrain import platform
from pretrain.rundir.metrics import Record
from pretrain.topology import Topology, gather, host_name

WINDOW_STEPS = 8
"""After so many steps the ranks tell each other the mean of their seconds in these steps, without
the longest one, so that what happens once leaves no trace."""
NUM_WINDOWS = 2
"""A rank begins and ends to be slow when it is that in so many windows in a row."""
SHARE = 0.1
"""A rank is slow if it takes longer than its peers by this share of a step. It is so no more below
that, or below half of the seconds that it was named with."""
LOST_SECONDS = 3.0
"""And if the others have waited for it so long in a row. Two ranks among a dozen busy processes on
two cores get uneven shares for seconds, in which one rank waited for the other for up to 1.3 s."""

SHARED = "shared_seconds"
"""The key under which a step's record brings what all ranks shared to `Stragglers`."""
Waits = list[tuple[platform.Moment, platform.Moment]]


class Seconds(NamedTuple):
    """A rank's seconds of a step."""

    compute: float
    wait: float
    """Waiting for other ranks, and for what they send."""
    data: float
    """The host waiting for data; on a GPU the device may have had work meanwhile."""

    @property
    def busy(self) -> float:
        """Return the seconds in which others may have waited for this rank."""
        return self.compute + self.data


_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "alltoall"),
    *("_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_single", "alltoall_base", "all_to_all_single"),
)
"""Methods of torch's ProcessGroup, of several releases."""


class StepTimes:
    """The seconds of this rank's latest steps, by what it did. Every rank makes one."""

    def __init__(self) -> None:
        self._waits: Waits = []
        self._begin: platform.Moment | None = None
        self._latest: deque[Seconds] = deque(maxlen=WINDOW_STEPS)
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

    def add(self, step_seconds: float, waits: Waits, data: float) -> None:
        """Note a step that is over, and so are its waits. One without any was not measured."""
        if not waits:
            return
        waited = sum(end.seconds_since(begin) for begin, end in waits)
        self._latest.append(Seconds(max(0.0, step_seconds - waited - data), waited, data))

    def shared(self, topology: Topology, step: int) -> list[float]:
        """Return what to add up over the ranks in a step: three numbers of each rank, or nothing.

        Args:
            topology: This process's coordinates.
            step: The step, counted from 1.
        """
        num_ranks = topology.layout.world_size
        if num_ranks == 1 or step % window_steps(topology):
            return []
        cells = [0.0] * (3 * num_ranks)
        if self._latest:
            ordered = sorted(self._latest, key=lambda seconds: seconds.busy)
            columns = zip(*(ordered[:-1] or ordered))
            cells[3 * topology.rank : 3 * topology.rank + 3] = map(statistics.mean, columns)
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


@dataclass(frozen=True)
class Place:
    """A rank's host, device and part of the work."""

    host: str
    device: str
    """As "cuda:1 NVIDIA H200", or "cpu"."""
    stage: int
    """Its pipeline stage. Each part of a sequence counts as a stage of its own, since later parts
    see more keys. Ranks of one stage do the same work."""


def places(topology: Topology) -> list[Place]:
    """Return where every rank runs, in the order of ranks. All ranks together."""
    device = f"{platform.device()} {platform.device_name()}" if platform.has_cuda() else "cpu"
    stage = topology.pipeline_rank * topology.layout.context + topology.context_rank
    return gather(Place(host_name(), device, stage), Place)


@dataclass
class _Course:
    """How a rank has come along."""

    windows: int = 0
    """Windows in a row that speak against what is said of it: that it is slow, or is not."""
    lost: float = 0.0
    """Seconds that the others have waited for it in these windows."""
    began: int = 0
    """The first step of these windows."""
    named: float = 0.0
    """The seconds a step that it was named with; 0 if it is not slow."""
    since: int | None = None
    """The first step in which it was slow; None if it is not."""
    usual: float = math.inf
    """The fewest seconds for a sample that it has been busy in a window."""


class Stragglers:
    """Tells which ranks are slow from what all have shared, in a few numbers of memory a rank.

    A rank is compared with the median of the others of its pipeline stage. One that is alone in its
    stage is compared with itself: with its fastest window, slowed down by as much as the least
    slowed of all others. So it is not noticed if it was slow from the start.
    """

    def __init__(self, places: Sequence[Place], window: int) -> None:
        """Begin without knowing anything.

        Args:
            places: Where each rank runs.
            window: Steps from one sharing to the next.
        """
        self._places, self._window = places, window
        self._courses = [_Course() for _ in places]
        self._stages: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            self._stages.setdefault(place.stage, []).append(rank)
        self._unlisted = 0

    def judge(self, step: int, shared: Sequence[float], size: int) -> tuple[Record, list[str]]:
        """Judge the steps of a window.

        Args:
            step: The step in which the numbers were shared.
            shared: `StepTimes.shared`, added up over the ranks.
            size: Samples of a step.

        Returns:
            (what the step's record gets, lines for the log).
        """
        seconds = [Seconds(*shared[i : i + 3]) for i in range(0, len(shared), 3)]
        if not all(map(sum, seconds)):
            return {}, []
        # All ranks' steps are equally long, but for how far apart they pass the last collective.
        whole = statistics.median(map(sum, seconds))
        excess = self._excess(seconds, size)
        lines = []
        for rank, (course, each) in enumerate(zip(self._courses, seconds)):
            course.usual = min(course.usual, each.busy / size)
            if self._has_changed(course, step, excess[rank], whole):
                lines.append(self._change(rank, excess[rank], seconds))
        record: Record = {
            "compute_seconds": statistics.median(each.compute for each in seconds),
            "wait_seconds": statistics.median(each.wait for each in seconds),
            **self._slowest(excess),
        }
        self._unlisted += self._window
        if lines or self._unlisted >= len(seconds):
            # The lists are as long as the job has ranks, so they come less often in large ones.
            self._unlisted = 0
            for name in Seconds._fields:
                values = [float(f"{getattr(each, name):.4g}") for each in seconds]
                record[f"rank_{name}_seconds"] = values
        return record, lines

    def _excess(self, seconds: Sequence[Seconds], size: int) -> list[float]:
        """Return by how many seconds of a step each rank is busy longer than is expected of it."""
        busy = [each.busy for each in seconds]
        usual = [course.usual * size for course in self._courses]
        excess = [0.0] * len(busy)
        for ranks in self._stages.values():
            ordered = sorted(busy[rank] for rank in ranks)
            for rank in ranks:
                if len(ranks) > 1:
                    excess[rank] = busy[rank] - _median_of_others(ordered, busy[rank])
                elif 0 < usual[rank] < math.inf:
                    slowed = min(now / before for now, before in zip(busy, usual) if before)
                    excess[rank] = busy[rank] - usual[rank] * max(1.0, slowed)
        return excess

    def _has_changed(self, course: _Course, step: int, excess: float, whole: float) -> bool:
        """Count a window of a rank, and return True if it begins or ends to be slow."""
        is_named = course.since is not None
        if (excess > max(SHARE * whole, course.named / 2)) == is_named:
            course.windows, course.lost = 0, 0.0
            return False
        if not course.windows:
            course.began = step - self._window + 1
        course.windows += 1
        course.lost += excess * self._window
        return course.windows >= NUM_WINDOWS and (is_named or course.lost >= LOST_SECONDS)

    def _change(self, rank: int, excess: float, seconds: Sequence[Seconds]) -> str:
        """Note that a rank begins or ends to be slow, and return the line that says so."""
        course, place = self._courses[rank], self._places[rank]
        name = f"rank {rank} (host {place.host}, device {place.device})"
        since, course.windows, course.lost = course.since, 0, 0.0
        if since is not None:
            course.since, course.named = None, 0.0
            return f"{name} is no longer slow, as it was since step {since}"
        course.since, course.named = course.began, excess
        stage = self._stages[place.stage]
        than = "the other ranks of its pipeline stage" if len(stage) > 1 else "before"
        late_data = seconds[rank].data - min(each.data for each in seconds)
        does = "waits for data" if late_data > excess / 2 else "computes"
        return (
            f"warning: {name} is slow, and the others wait for it: since step {course.since} it "
            f"{does} {excess:.3g} s a step longer than {than} (of {sum(seconds[rank]):.3g} s)"
        )

    def _slowest(self, excess: Sequence[float]) -> Record:
        """Return what is recorded of the slowest of the ranks that are slow, if any is."""
        slow = [rank for rank, course in enumerate(self._courses) if course.since is not None]
        if not slow:
            return {}
        rank = max(slow, key=excess.__getitem__)
        return {
            "straggler_rank": rank,
            "straggler_seconds": excess[rank],
            "straggler_since_step": self._courses[rank].since,
            "straggler_host": self._places[rank].host,
            "straggler_device": self._places[rank].device,
            "num_stragglers": len(slow),
        }


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of at least two sorted numbers without one of them."""
    left, number = bisect.bisect_left(ordered, own), len(ordered) - 1
    middle = [k + (k >= left) for k in ((number - 1) // 2, number // 2)]
    return (ordered[middle[0]] + ordered[middle[1]]) / 2
