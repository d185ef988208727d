"""Let several ways to do the same take turns, so that what else the machine does hits all alike.

Each way is a function that returns the seconds that it took, by the clock that fits it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pretrain import platform

Way = Callable[[], float]


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Way:
    """Return a way that does `action` and waits for the device."""

    def way() -> float:
        platform.synchronize()
        begin = clock()
        action()
        platform.synchronize()
        return clock() - begin

    return way


def rounds(
    ways: Mapping[str, Way], count: int, warm_up: int = 1, seconds: float = float("inf")
) -> Iterator[dict[str, float | str]]:
    """Yield the seconds of every way in each round, or once, in its first round, why it failed.

    The rounds have the orders of a Williams design, in which each way follows each other equally
    often: on an H100, equal steps were 2.6 % apart that each always followed the same other one.

    Args:
        ways: By name.
        count: Rounds at most.
        warm_up: Rounds before them that are not yielded.
        seconds: After how long no further round begins; three are taken in any case.
    """
    running, begin = dict(ways), time.monotonic()
    failed: dict[str, float | str] = {}
    for number in itertools.count(-warm_up):
        if number == count or (number >= 3 and time.monotonic() - begin > seconds):
            return
        found: dict[str, float | str] = {}
        for name in _order([*running], number):
            try:
                found[name] = running[name]()
            # A library may be too old, or a kernel may not compile: the others go on.
            except Exception as error:
                said = " ".join(str(error).split())[:160]
                failed[name] = f"{type(error).__name__}: {said}"
                del running[name]
        if number >= 0:
            yield {name: {**found, **failed}[name] for name in ways}


def _order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: after as many rounds as ways, or twice as many, all is even."""
    size = len(names)
    steps = [(k + 1) // 2 if k % 2 else size - k // 2 for k in range(size)]
    order = [names[(number + step) % size] for step in steps]
    # An odd number of ways also needs every order reversed.
    return order[::-1] if size % 2 and number // size % 2 else order


def summary(found: Sequence[Mapping[str, float | str]]) -> list[dict[str, Any]]:
    """Return a row for each way: median milliseconds and the middle half of its rounds.

    Args:
        found: What `rounds` yielded.
    """
    rows: list[dict[str, Any]] = []
    for name in found[-1]:
        times = [1e3 * s for each in found if isinstance(s := each.get(name), float)]
        if isinstance(said := found[-1][name], str):
            rows.append({"way": name, "ms": said})
        else:
            low, median, high = statistics.quantiles(times * (1 if len(times) > 1 else 2), n=4)
            rows.append({"way": name, "ms": median, "middle half": f"{low:.4g} to {high:.4g}"})
    return rows
