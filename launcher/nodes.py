"""Tell which nodes of a cluster a run should not use, from how its attempts ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pretrain.rundir.attempts import AttemptRecord

MOST_FAILURES = 1
"""A node from which more of a run's failures came than this is left out."""


def failing_nodes(records: Sequence[AttemptRecord]) -> dict[str, str]:
    """Return the nodes that failed twice or that a preflight found unfit, with the last reason.

    Args:
        records: The attempts to count, such as those of one Slurm job, oldest first.
    """
    ends = [record.ended for record in records if record.ended]
    failures = Counter(node for end in ends for node in set(end.nodes))
    reasons = {node: end.reason for end in ends for node in end.nodes}
    failed = {node: reasons[node] for node, count in failures.items() if count > MOST_FAILURES}
    # A preflight names a node and its cause for certain, so once is enough.
    checks = [record.preflight for record in records if record.preflight]
    return failed | {node: cause for check in checks for node, cause in check.faults.items()}
