"""Provide pools of worker processes to the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="package")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Return a function that gives the pool of n ranks, started on first use.

    The scope is this folder and not the session, because gloo's threads of closed process groups
    would keep a core busy during all later tests.
    """
    made: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in made:
            made[world_size] = Pool(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.close()
