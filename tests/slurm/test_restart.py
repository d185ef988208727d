"""Check on a real Slurm that a run is started again inside its allocation, on the nodes left.

The ranks are a script (scripted.py); test_survive.py does the same with real training.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.commands import LAUNCHER, wait_for
from tests.slurm.scripted import Script, ScriptedRun
from tests.slurm.test_arrays import called, commands


def finish(run: ScriptedRun) -> dict[str, str]:
    """Let the run finish and return the fields of its job."""
    run.ask("finish")
    fields = run.cluster.wait_for_job(run.job_id)
    wait_for(lambda: not run.cluster.processes())
    return fields


def test_killed_and_stopped_ranks_start_again_in_the_same_job(script: Script) -> None:
    counted = script.folder / "commands"
    run = script.submit("ranks", environment=commands(counted, script.cluster))
    pid, node = run.wait_for_training(1)[1]
    os.kill(pid, signal.SIGKILL)
    first = run.wait_for_end(1)
    assert (first.outcome, first.nodes) == ("failed", (node,)), first
    pid, node = run.wait_for_training(2)[0]
    os.kill(pid, signal.SIGSTOP)
    second = run.wait_for_end(2)
    assert (second.outcome, second.nodes) == ("hung", (node,)), second
    run.wait_for_training(3)
    job = finish(run)
    assert run.outcomes == ["failed", "hung", "finished"] and job["Restarts"] == "0"
    # One job step after the other, and the queue was waited for once.
    assert [bool(attempt.owner.submitted_at) for attempt in run.attempts] == [True, False, False]
    assert "goes back to the queue" not in run.job_said()
    # The job is asked for once at an attempt's start, and once after an end that another follows.
    assert called(counted, without="--steps")["squeue"] == 3 + 2, (counted / "calls").read_text()


def test_a_spare_node_takes_the_place_of_one_that_dies(script: Script) -> None:
    run = script.submit("spare", "recovery.spare_nodes=1")
    ranks = run.wait_for_training(1)
    assert script.cluster.job(run.job_id)["NumNodes"] == "3" and len(ranks) == 2
    dead = ranks[1][1]
    script.cluster.kill(dead)
    first = run.wait_for_end(1)
    # The watchdog may be faster than Slurm.
    assert first.outcome in ("failed", "hung") and first.nodes == (dead,), first
    run.wait_for_training(2)
    assert dead not in run.nodes() and len(run.nodes()) == 2
    job = finish(run)
    assert run.outcomes == [first.outcome, "finished"] and job["Restarts"] == "0"


def test_a_node_that_fails_twice_is_excluded(script: Script) -> None:
    run = script.submit("twice")
    bad = run.wait_for_training(1)[1][1]
    run.ask(f"bad-{bad}")
    assert run.wait_for_end(1).nodes == (bad,)
    assert run.wait_for_end(2).nodes == (bad,)
    run.wait_for_training(3)
    assert bad not in run.nodes()
    job = finish(run)
    assert job["Restarts"] == "1" and job["ExcNodeList"] == bad
    assert "goes back to the queue: 2 nodes are needed" in run.job_said()
    status = script.cluster.run(*LAUNCHER, "status", run.directory).stdout
    why = f"rank 1 on {bad} ended with exit code 1"
    assert f"node {bad}: not used any more if Slurm has others: {why}" in status


@pytest.mark.torture
def test_a_node_that_fails_twice_is_used_again_where_slurm_has_no_other(script: Script) -> None:
    """Excluded, it would leave the job in the queue forever."""
    only = "n[1-2]"
    run = script.submit("needed", "recovery.max_restarts=4", options=(f"--nodelist={only}",))
    bad = run.wait_for_training(1)[1][1]
    run.ask(f"bad-{bad}")
    run.wait_for_end(2)
    (run.directory / f"bad-{bad}").unlink()
    run.wait_for_training(3)
    assert bad in run.nodes() and f"may start on {bad} again: Slurm has too" in run.job_said()
    job = finish(run)
    assert job["Restarts"] == "1" and job["ExcNodeList"] == "(null)"


@pytest.mark.torture
def test_the_batch_host_of_a_job_with_spare_nodes_dies(script: Script) -> None:
    """Slurm leaves such a job running without a batch script; its guards requeue it."""
    run = script.submit("host", "recovery.spare_nodes=1")
    run.wait_for_training(1)
    host = script.cluster.job(run.job_id)["BatchHost"]
    script.cluster.kill(host)
    wait_for(lambda: script.cluster.job(run.job_id)["Restarts"] == "1")
    run.wait_for_training(2)
    assert host not in run.nodes()
    finish(run)
    assert run.outcomes == [None, "finished"]
