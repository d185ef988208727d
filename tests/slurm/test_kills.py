"""Check on a real Slurm that a run outlives the processes that watch it.

The ranks are a script (scripted.py).
"""

from __future__ import annotations

import os
import signal

from tests.end_to_end.commands import LAUNCHER, wait_for
from tests.slurm.scripted import Script, ScriptedRun
from tests.slurm.test_restart import finish

LAUNCHES = "pretrain.launcher attempt"


def kill(run: ScriptedRun, *words: str) -> None:
    """Kill the processes of a run's job whose command lines contain all of these words."""
    found = run.cluster.step_processes(run.job_id, *words)
    assert found, words
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def test_a_killed_launcher_is_started_again_when_its_ranks_have_ended(script: Script) -> None:
    run = script.submit("launcher")
    before = {pid for pid, _ in run.wait_for_training(1).values()}
    kill(run, LAUNCHES)
    wait_for(lambda: len(run.attempts) == 2)
    assert not before & run.cluster.processes().keys()
    run.wait_for_training(2)
    assert finish(run)["Restarts"] == "0"
    assert run.outcomes == [None, "finished"]
    assert "the launcher of attempt 1 was killed" in run.job_said()


def test_a_launcher_that_is_killed_too_often_is_not_started_again(script: Script) -> None:
    run = script.submit("often", "recovery.max_restarts=1", nodes=1)
    for attempt in (1, 2):
        run.wait_for_training(attempt)
        kill(run, LAUNCHES)
    run.cluster.wait_for_job(run.job_id, ["FAILED"])
    wait_for(lambda: not run.cluster.processes())
    assert run.outcomes == [None, None]
    # The heartbeat is younger than a lease.
    status = script.cluster.run(*LAUNCHER, "status", run.directory).stdout
    assert "running" not in status and "estimated end" not in status, status
