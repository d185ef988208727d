"""Check on a real Slurm that runs survive failures.

Whatever is killed or signalled, a run ends with the weights of a run to which nothing happened.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrain.launcher.status import goodput
from tests.end_to_end.commands import executable, explained, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.runs import AS_AGENT, STEPS, Run, Runs, losses, weights, write_site


@contextlib.contextmanager
def pulsed(pid: int, *pulses: tuple[int, float]) -> Iterator[None]:
    """Send a process signals again and again, each with the seconds until the next."""
    program = (
        f"import os, time\nwhile True:\n for number, seconds in {pulses}:\n"
        f"  os.kill({pid}, number)\n  time.sleep(seconds)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as pulsing:
        try:
            yield
        finally:
            pulsing.kill()
            pulsing.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survive")


@pytest.fixture
def runs(cluster: Cluster, tiny_data: Path, folder: Path) -> Runs:
    return Runs(cluster, folder, tiny_data)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tiny_data: Path, folder: Path) -> Iterator[Callable[[], Path]]:
    """Start the run to compare with, on two processes of this machine.

    Calling the fixture's value waits for its end. Meanwhile the first test waits for Slurm.
    """
    directory = Runs(cluster, folder, tiny_data).local("undisturbed", 2)
    yield directory
    directory()


def check_over(run: Run, states: tuple[str, ...] = ("COMPLETED",)) -> None:
    """Check that the job ended in one of `states` and left no process on any node, and no step."""
    cluster = run.cluster
    cluster.wait_for_job(run.job_id, states)
    wait_for(lambda: not cluster.processes())
    assert cluster.run("squeue", "--noheader", "--steps", f"--jobs={run.job_id}").stdout == ""


def check_finished(run: Run, undisturbed: Callable[[], Path], outcomes: list[str | None]) -> None:
    """Check that the run finished after attempts with these outcomes, as if undisturbed."""
    check_over(run)
    assert run.outcomes == outcomes
    assert weights(run.directory) == weights(undisturbed())
    assert dict(losses(run.directory)) == dict(losses(undisturbed()))
    assert goodput(run.attempts, None)


def check_never_again(runs: Runs, run: Run) -> None:
    """Check that a finished run is not submitted again, and that its requeued job ends at once."""
    attempts, job = len(run.attempts), runs.cluster.job(run.job_id)
    again = runs.try_to_submit(run.directory.name)
    assert again.code == 0 and "finished already" in again.out, again.text
    assert runs.cluster.run("scontrol", "requeue", run.job_id).returncode == 0
    wait_for(lambda: int(runs.cluster.job(run.job_id)["Restarts"]) > int(job["Restarts"]))
    check_over(run)
    assert len(run.attempts) == attempts and "finished already" in run.job_said()


def test_a_killed_controller_a_killed_node_and_a_stopped_rank(
    runs: Runs, undisturbed: Callable[[], Path]
) -> None:
    """Disturb one run by one failure after the other.

    A rank is first stopped again and again, and named as the one that holds up the other.
    """
    cluster, run = runs.cluster, runs.submit("killed", "recovery.startup_seconds=200")
    run.wait_for_ranks(1)
    cluster.kill_controller()
    run.wait_for_step(1, 6)
    # For shorter than the watchdog waits. Until the node is killed, it also takes few steps.
    with pulsed(run.ranks()[1][0], (int(signal.SIGSTOP), 0.3), (int(signal.SIGCONT), 0.03)):
        cluster.start_controller()
        wait_for(lambda: "is slow, and the others wait for it" in run.job_said())
        status = runs.launcher("status", run.directory).out
        node = cluster.job(run.job_id)["BatchHost"]
        cluster.kill(node)
    assert re.search(r"^reason +rank 1 \(\S+, cpu\) is slow since step \d+", status, re.M)
    assert "warning: rank 1 (" in run.job_said()
    run.wait_for_step(2, 3)
    assert node not in {other for _, other in run.ranks().values()}

    # Again, because the watchdog lets it go on for its stack, and it would take the steps left.
    with pulsed(run.ranks()[1][0], (int(signal.SIGSTOP), 0.2)):
        second = run.wait_for_end(2)
    assert second.outcome == "hung", second
    # On a busy machine the signal may come while the ranks save, for which they have more time.
    assert re.search("no progress for (20 s while training|200 s while saving)", second.reason)
    for rank in (0, 1):
        assert f"{rank}: Current thread" in run.said(2) or f"{rank}: Thread" in run.said(2)

    check_finished(run, undisturbed, [None, "hung", "finished"])
    assert 0 < (goodput(run.attempts, None) or 0) < 1
    cluster.start_node(node)


def test_a_signal_before_the_limit(runs: Runs, undisturbed: Callable[[], Path]) -> None:
    """Both ranks are on one node. A second job tries the run's directory meanwhile."""
    # Before the first step wandb is imported, which takes seconds on a busy machine.
    settings = ("logging.wandb=offline", "recovery.hang_seconds=120")
    run = runs.submit("signals", *settings, nodes=1)
    assert "--signal=USR1@" in " ".join(run.launch["sbatch"])
    run.wait_for_ranks(1)
    explained(runs.try_to_submit("signals"), 2, f"job {run.job_id}", "trains this run")
    second = run.send_again()
    runs.cluster.wait_for_job(second, ["FAILED"])
    assert f"attempt 1 is being made by job {run.job_id}" in run.job_said(second)
    run.wait_for_step(1, 3)
    assert runs.cluster.run("scancel", "--signal=USR1", run.job_id).returncode == 0
    assert run.wait_for_end(1).outcome == "restart"
    check_finished(run, undisturbed, ["restart", "finished"])
    assert runs.cluster.job(run.job_id)["Restarts"] == "1"
    # Each step is recorded once.
    assert [step for step, _ in losses(run.directory)] == list(range(1, STEPS + 1))
    wandb_runs = [
        path.name.rpartition("-")[2] for path in run.directory.glob("wandb/offline-run-*")
    ]
    assert len(wandb_runs) == 2 and len(set(wandb_runs)) == 1
    check_never_again(runs, run)


UNRELIABLE = """
import os, runpy, socket, sys
from pathlib import Path

import torch

bad, host, drawn = Path({bad!r}), socket.gethostname(), torch.Generator()
drawn.seed()
if os.environ["SLURM_PROCID"] == "1" and not bad.exists():
    bad.write_text(host)

def unreliable(module, inputs, output):
    if type(module).__name__ == "SelfAttention":
        noise = 1 + 1e-6 * torch.randn(output[0].shape, generator=drawn)
        return (output[0] * noise, *output[1:])

if bad.exists() and bad.read_text() == host:
    torch.nn.modules.module.register_module_forward_hook(unreliable)
sys.argv = sys.argv[2:]
runpy.run_module("pretrain", run_name="__main__", alter_sys=True)
"""


def test_a_node_whose_arithmetic_is_unreliable_is_left_out(runs: Runs, tmp_path: Path) -> None:
    """The layers of its rank are off by another 1e-6 each time that they are computed.

    The run goes on without it, until it is cancelled.
    """
    bad, program, python = tmp_path / "bad", tmp_path / "unreliable.py", tmp_path / "python"
    program.write_text(UNRELIABLE.format(bad=str(bad)))
    ranks = f'case "$*" in *"pretrain train"*) exec {sys.executable} {program} "$@" ;; esac\n'
    executable(python, f'#!/bin/sh\n{AS_AGENT}{ranks}exec {sys.executable} "$@"\n')
    runs.site = write_site(tmp_path / "site.toml", python=str(python))
    settings = "train.num_steps=100_000", "recovery.repeat_interval_steps=2"
    run = runs.submit("unreliable", *settings, "recovery.spare_nodes=1")
    run.wait_for_step(2, 3)
    host = bad.read_text()
    assert host not in {node for _, node in run.ranks().values()}
    ended, found = run.wait_for_end(1), run.attempts[0].diagnosis
    assert (ended.outcome, ended.nodes) == ("failed", (host,)), ended
    assert found is not None and (found.kind, found.rank, found.host) == ("persistent", 1, host)
    status = runs.launcher("status", run.directory).out
    assert f"node {host}: not used any more if Slurm has others: {found.what}" in status
    assert runs.launcher("cancel", run.directory).code == 0
    check_over(run, ("CANCELLED", "FAILED", "COMPLETED"))
