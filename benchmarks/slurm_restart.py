"""Time how fast a failure is found and the next attempt runs, on the tests' Slurm cluster.

Detection is the time from the failure to the attempt's recorded end; restart is the time from there
to the first step of the next attempt, in the same job. The ranks are the tests' script, which takes
its first step a tenth of a second after its start: what real ranks need to import torch, join and
load a checkpoint comes on top.

    python -m benchmarks.slurm_restart

Needs Slurm and root, as tests/slurm does.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.end_to_end.commands import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.scripted import Script, ScriptedRun

REPEATS = 3
HANG_SECONDS = 3
FAILURES = {
    "a rank is killed": 0,
    "a rank is stopped": 0,
    "a node dies, with a spare one": 1,
}
"""What fails, and the spare nodes of the job."""


def fail(cluster: Cluster, run: ScriptedRun, failure: str) -> str | None:
    """Cause a failure of rank 1. Returns its node if that has to be started again."""
    pid, node = run.ranks()[1]
    if failure.startswith("a node"):
        cluster.kill(node)
        return node
    os.kill(pid, signal.SIGKILL if "killed" in failure else signal.SIGSTOP)
    return None


def measure(cluster: Cluster, script: Script, failure: str, number: int) -> tuple[float, float]:
    """Return detection and restart of one failure, in seconds."""
    spares = FAILURES[failure]
    name = f"{failure.replace(' ', '-').replace(',', '')}-{number}"
    run = script.submit(name, f"recovery.spare_nodes={spares}")
    run.wait_for_training(1)
    failed_at = time.time()
    node = fail(cluster, run, failure)
    ended = run.wait_for_end(1)
    run.wait_for_training(2)
    first_step = next(mark.at for mark in run.attempts[1].phases if mark.phase == "training")
    run.ask("finish")
    job = cluster.wait_for_job(run.job_id)
    assert job["Restarts"] == "0", job
    if node is not None:
        cluster.start_node(node)
    wait_for(lambda: set(cluster.node_states().values()) == {"idle"}, 60)
    return ended.at - failed_at, first_step - ended.at


def main() -> None:
    """Measure every failure several times and print a table."""
    cluster = Cluster(num_nodes=4, gpus=0)
    try:
        cluster.start()
        with tempfile.TemporaryDirectory() as folder:
            script = Script(cluster, Path(folder))
            print("| failure | detection (s) | restart (s) |\n|---|---|---|")
            for failure in FAILURES:
                times = [measure(cluster, script, failure, n) for n in range(REPEATS)]
                cells = [
                    f"{statistics.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
                    for column in zip(*times)
                ]
                print(f"| {failure} | {' | '.join(cells)} |", flush=True)
    finally:
        cluster.stop()
    print(f"recovery.hang_seconds = {HANG_SECONDS}; load average {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
