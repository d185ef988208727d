"""Time calls on a GPU or a CPU for `pretrain.kernels.bench`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

CACHE_BYTES = 2**28
"""Bytes that are zeroed before every timed call, so that no contestant finds its inputs in the L2
cache (50 MB on an H100 or H200)."""
CALLS_PER_READING = 5
"""Calls that are launched together. A GPU queues about a thousand launches, and no contestant has
more than a hundred."""
SPIN_HERTZ = 2e9
"""At least the clock rate of a GPU; turns seconds into the cycles of torch.cuda._sleep."""


class Reading(NamedTuple):
    """The times of one contestant's calls."""

    seconds: float
    """Median."""
    spread: float
    """Half the distance between the quartiles, relative to the median."""
    calls: int


class Clock(Protocol):
    """A way to time calls."""

    def warm_up(self, call: Callable[[], None]) -> int:
        """Make the calls that are not counted and return the bytes that one allocates at most."""

    def measure(self, call: Callable[[], None]) -> list[float]:
        """Make CALLS_PER_READING calls and return the seconds of each."""


class CpuClock:
    """The time that passes on a CPU."""

    def warm_up(self, call: Callable[[], None]) -> int:
        """Make one call. The memory of a CPU's allocator is not counted."""
        call()
        return 0

    def measure(self, call: Callable[[], None]) -> list[float]:
        """Return the seconds of one call."""
        begin = time.perf_counter()
        call()
        return [time.perf_counter() - begin]


class GpuClock:
    """The GPU's own clock, without the time that the host takes to launch kernels.

    The GPU is kept busy until the host has queued all calls of a reading. Then it runs them without
    a gap, and the events around each call measure the kernels alone. In a training step the host is
    ahead of the GPU, too.
    """

    def __init__(self) -> None:
        self.flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
        self.host_seconds = 0.0

    def warm_up(self, call: Callable[[], None]) -> int:
        """Call once, which compiles, and once more, to see memory and the time of launching.

        Args:
            call: What is to be timed.

        Returns:
            The largest number of bytes that a call has allocated at once, beyond what was there.
        """
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        call()
        self.host_seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def measure(self, call: Callable[[], None]) -> list[float]:
        """Queue CALLS_PER_READING calls behind a pause and return the seconds of each.

        Args:
            call: What is timed.
        """
        events = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
            for _ in range(CALLS_PER_READING)
        ]
        # Twice the time that queueing took last time.
        cycles = int(2 * CALLS_PER_READING * self.host_seconds * SPIN_HERTZ)
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        begin = time.perf_counter()
        for start, end in events:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        self.host_seconds = (time.perf_counter() - begin) / CALLS_PER_READING
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) / 1e3 for start, end in events]


def summarize(seconds: Sequence[float]) -> Reading:
    """Return median and spread of the seconds of at least one call."""
    median = statistics.median(seconds)
    if len(seconds) < 2:
        return Reading(median, 0.0, len(seconds))
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Reading(median, (high - low) / 2 / median, len(seconds))
