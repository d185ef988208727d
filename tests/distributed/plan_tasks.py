"""Define the task that follows every allocation of a real rank."""

from __future__ import annotations

from pretrain.config import RunConfig


def measure_real_rank(config: RunConfig) -> dict[str, int]:
    """Return what this rank of a real job allocates (`tests.allocations.measure`).

    Args:
        config: The run; its layout must fit the number of ranks.
    """
    from pretrain import platform
    from pretrain.topology import initialize
    from tests.allocations import Allocations, measure

    platform.prepare(0)
    topology = initialize(config)
    with Allocations() as allocations:
        return measure(config, topology, allocations)
