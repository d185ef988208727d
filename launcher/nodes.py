"""Tell which nodes of a cluster a run should not use, from how its attempts ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from pretrain.rundir.attempts import AttemptRecord

MOST_FAILURES = 1
"""A node from which more of a run's failures came than this is left out."""


def count_failures(records: Sequence[AttemptRecord]) -> Counter[str]:
    """Return how many attempts ended by a failure that came from each node."""
    ends = [record.ended for record in records if record.ended]
    return Counter(node for end in ends for node in set(end.nodes))


def failing_nodes(records: Sequence[AttemptRecord]) -> dict[str, str]:
    """Return the nodes that failed twice or that a preflight found unfit, with the last reason.

    Args:
        records: The attempts to count, such as those of one Slurm job, oldest first.
    """
    ends = [record.ended for record in records if record.ended]
    reasons = {node: end.reason for end in ends for node in end.nodes}
    failures = count_failures(records)
    failed = {node: reasons[node] for node, count in failures.items() if count > MOST_FAILURES}
    # A preflight names a node and its cause for certain, so once is enough.
    checks = [record.preflight for record in records if record.preflight]
    return failed | {node: cause for check in checks for node, cause in check.faults.items()}


def choose_nodes(
    nodes: Sequence[str],
    count: int,
    unusable: Collection[str] = (),
    failures: Counter[str] | None = None,
) -> list[str]:
    """Choose the nodes for the ranks from those that a job holds.

    Args:
        nodes: All nodes of the job, in Slurm's order.
        count: How many the ranks need.
        unusable: Nodes that must not be chosen.
        failures: How often each node failed; those that failed less often come first, so that a
            spare node takes the place of one that failed once.

    Returns:
        The chosen nodes in Slurm's order; fewer than `count` when too few can be used.
    """
    failed = failures or Counter()
    usable = [node for node in nodes if node not in unusable]
    # A stable sort: of equals, the nodes that come first.
    chosen = sorted(usable, key=lambda node: failed[node])[:count]
    return [node for node in nodes if node in chosen]
