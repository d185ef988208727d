"""Define the task that counts a step of real ranks."""

from __future__ import annotations

from typing import Any

from pretrain.config import RunConfig


def count_real_step(config: RunConfig) -> dict[str, Any]:
    """Count a step of this rank of a real job, with real tensors and collectives.

    Args:
        config: The run; its layout must fit the number of ranks.

    Returns:
        "kernels": (launches, bytes read, bytes written) by (phase, class, operator);
        "collectives": (phase, name, group, group size, dtype, bytes, asynchronous), in order;
        "synchronisations": times by (phase, cause).
    """
    from pretrain import platform
    from pretrain.plan.operators import Counter
    from pretrain.plan.simulation import count_step
    from pretrain.topology import initialize

    platform.prepare(0)
    with platform.fp16_allowed_on_cpu():
        topology = initialize(config)
        counter = Counter()
        with counter:
            return as_plain(count_step(config, topology, counter))


def as_plain(counts: Any) -> dict[str, Any]:
    """Return the parts of StepCounts that real ranks and simulated ones have in common."""
    return {
        "kernels": {
            key: (cost.launches, cost.bytes_read, cost.bytes_written)
            for key, cost in counts.kernels.items()
        },
        "collectives": [
            (c.phase, c.name, c.group, c.group_size, c.dtype, c.num_bytes, c.asynchronous)
            for c in counts.collectives
        ],
        "synchronisations": dict(counts.synchronisations),
    }
