"""Pools of worker processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="package")
def pools() -> Iterator[Callable[[int], Pool]]:
    """pools(n): n ranks, started on first use and shared by every test of this folder.

    Not longer: gloo's threads of groups that were closed keep a core busy.
    """
    made: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in made:
            made[world_size] = Pool(world_size)
        return made[world_size]

    yield pool
    for each in made.values():
        each.close()
