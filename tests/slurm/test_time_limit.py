"""Let Slurm itself end a job at its time limit, which is whole minutes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.commands import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.runs import STEPS, Runs, losses, weights

MINUTES = 2
SAVE_BEFORE_SECONDS = 30
# A rank is stopped until the signal has come, so that the run cannot finish before it on a fast
# machine. For the watchdog this is a long step.


@pytest.mark.torture
def test_a_run_saves_before_its_time_limit_and_goes_on(
    cluster: Cluster, tiny_data: Path, tmp_path: Path
) -> None:
    """Nobody but Slurm sends a signal that ends the first attempt."""
    runs = Runs(cluster, tmp_path, tiny_data)
    settings = "recovery.hang_seconds=600"
    undisturbed = runs.local("undisturbed", 2, settings)
    limit = ("--time", MINUTES, "--save-before", SAVE_BEFORE_SECONDS)
    run = runs.submit("limit", settings, options=limit)
    try:
        run.wait_for_step(1, 5)
        assert cluster.job(run.job_id)["TimeLimit"] == f"00:0{MINUTES}:00"
        process, _ = run.ranks()[0]
        os.kill(process, signal.SIGSTOP)
        # Slurm may signal up to a minute early, but not late.
        wait_for(lambda: seconds(cluster, run.job_id) > MINUTES * 60 - SAVE_BEFORE_SECONDS)
        # The signal may have come before the stop, and the process have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
        first = run.wait_for_end(1)
        assert first.outcome == "restart" and 5 <= first.step < STEPS, first
        cluster.wait_for_job(run.job_id)
    finally:
        cluster.run("scancel", "--signal=KILL", run.job_id)
    # On a busy machine the second start may reach its limit, too.
    *before, last = run.outcomes
    assert set(before) == {"restart"} and last == "finished"
    assert cluster.job(run.job_id)["Restarts"] == str(len(before))
    assert [step for step, _ in losses(run.directory)] == list(range(1, STEPS + 1))
    assert dict(losses(run.directory)) == dict(losses(undisturbed()))
    assert weights(run.directory) == weights(undisturbed())


def seconds(cluster: Cluster, job_id: str) -> int:
    """Return how long a job has run since its last start, or the limit's time once that is over."""
    fields = cluster.job(job_id)
    if fields["Restarts"] != "0":
        return MINUTES * 60
    hours, minutes, rest = map(int, fields["RunTime"].split(":"))
    return (hours * 60 + minutes) * 60 + rest
