"""Check on a real Slurm that a run outlives the processes that watch it.

The ranks are a script (scripted.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.end_to_end.commands import LAUNCHER, executable, wait_for
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


def test_a_run_that_is_given_up_after_a_kill_is_not_started_again(script: Script) -> None:
    run = script.submit("given-up", "recovery.max_restarts=1", nodes=1)
    for attempt in (1, 2):
        os.kill(run.wait_for_training(attempt)[0][0], signal.SIGKILL)
    run.cluster.wait_for_job(run.job_id, ["FAILED"])
    assert run.outcomes == ["failed", "gave_up"]
    assert "is started again" not in run.job_said()


def test_ranks_end_where_launcher_and_srun_are_killed_together(script: Script) -> None:
    run = script.submit("both")
    before = {pid for pid, _ in run.wait_for_training(1).values()}
    found = run.cluster.step_processes(run.job_id)
    for pid in [pid for pid, (_, words) in found.items() if words.startswith("srun")]:
        # srun is two processes, which end together.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    kill(run, LAUNCHES)
    run.wait_for_training(2)
    assert not before & run.cluster.processes().keys()
    finish(run)
    # The launcher may see the end of srun first.
    assert run.outcomes in ([None, "finished"], ["failed", "finished"])


def test_a_rank_that_dies_while_slurmctld_is_away_ends_the_attempt(script: Script) -> None:
    run = script.submit("away", "recovery.hang_seconds=120", "recovery.max_restarts=5")
    ranks = run.wait_for_training(1)
    script.cluster.kill_controller()
    pid, node = ranks[1]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    ended = run.wait_for_end(1)
    assert time.monotonic() - began < 40
    assert (ended.outcome, ended.code, ended.nodes) == ("failed", 137, (node,)), ended
    assert not run.ranks()
    script.cluster.start_controller()
    # Slurm may refuse steps for some seconds.
    wait_for(run.nodes)
    finish(run)
    assert run.outcomes[-1] == "finished"


def test_orders_reach_the_ranks_while_slurmctld_is_away(script: Script) -> None:
    run = script.submit("orders", nodes=1)
    run.wait_for_training(1)
    script.cluster.kill_controller()
    for pid in run.cluster.step_processes(run.job_id, LAUNCHES):
        os.kill(pid, signal.SIGTERM)
    ended = run.wait_for_end(1)
    assert (ended.outcome, ended.code) == ("stopped", 80), ended
    script.cluster.start_controller()
    script.cluster.wait_for_job(run.job_id)


@pytest.mark.parametrize("code", [2, pytest.param(75, marks=pytest.mark.torture)])
def test_the_codes_of_a_container_are_not_the_ranks(script: Script, code: int) -> None:
    """Nor are those of slurmstepd where it finds no Python."""
    node = "n2"
    # In the second attempt, the rank of the other node ends by SIGKILL instead of SIGTERM.
    text = f"""#!/bin/sh
    test "$SLURMD_NODENAME" = {node} && exit {code}
    test -e $0.2 && trap "" TERM && sleep 1 | "$@" || {{ touch $0.2; exec "$@"; }}"""
    broken = executable(script.folder / "container", text)
    run = script.submit(f"code-{code}", container=[str(broken)], options=("--nodelist=n[1-2]",))
    for attempt in (1, 2):
        ended = run.wait_for_end(attempt)
        assert (ended.outcome, ended.nodes) == ("failed", (node,)), ended
    wait_for(lambda: run.cluster.job(run.job_id).get("Restarts") == "1")


@pytest.mark.torture
def test_a_node_whose_slurmstepd_is_killed_is_named(script: Script) -> None:
    run = script.submit("stepd", "recovery.hang_seconds=600")
    node = run.wait_for_training(1)[1][1]
    found = run.cluster.processes(node)
    for pid, (_, words) in found.items():
        if "slurmstepd" in words and ".extern" not in words and ".batch" not in words:
            # One of its processes ends with the other.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    ended = run.wait_for_end(1)
    assert (ended.outcome, ended.nodes) == ("failed", (node,)), ended
    # slurmctld takes the step for running, and is not waited for.
    run.wait_for_training(2)
    finish(run)
