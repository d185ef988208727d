"""Check on a real Slurm that runs survive failures.

Whatever is killed or signalled, a run ends with the weights of a run to which nothing happened.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrain.rundir.checkpoints import complete_checkpoints
from tests.end_to_end.commands import explained, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.runs import STEPS, Run, Runs, losses, parts, weights


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
    assert parts(run.directory)["training"] > 0


def check_never_again(runs: Runs, run: Run) -> None:
    """Check that a finished run is not submitted again, and that its requeued job ends at once."""
    attempts, job = len(run.attempts), runs.cluster.job(run.job_id)
    again = runs.try_to_submit(run.directory.name)
    assert again.code == 0 and "finished already" in again.out, again.text
    assert runs.cluster.run("scontrol", "requeue", run.job_id).returncode == 0
    wait_for(lambda: int(runs.cluster.job(run.job_id)["Restarts"]) > int(job["Restarts"]))
    check_over(run)
    assert len(run.attempts) == attempts and "finished already" in run.job_said()


def test_two_nodes_of_two_ranks_train_as_one_machine_does(runs: Runs) -> None:
    small = [
        "train.num_steps=6",
        "schedule.lr_warmup_steps=2",
        "evaluation.lengths=[128]",
        "evaluation.max_tokens=2048",
        "data.vocab_size=512",
        "data.tokens_per_block=4096",
        "data.tokens_per_shard=500_000",
        "data.tokenizer_training_bytes=500_000",
        f"data.directory={runs.data}",
        "batch.micro_batch_size=4",
    ]
    run = runs.submit("demo", *small, config="configs/demo.toml")
    check_over(run)
    assert run.outcomes == ["finished"]
    assert run.attempts[0].owner.num_processes == 4
    local = runs.local("local", 4, *small, config="configs/demo.toml")()
    assert weights(run.directory, 6) == weights(local, 6) and losses(run.directory) == losses(local)


def test_a_killed_controller_killed_and_stopped_ranks_and_a_killed_node(
    runs: Runs, undisturbed: Callable[[], Path]
) -> None:
    """Disturb one run by one failure after the other."""
    cluster, run = runs.cluster, runs.submit("killed")
    run.wait_for_ranks(1)
    cluster.kill_controller()
    run.wait_for_step(1, 6)
    cluster.start_controller()
    run.wait_for_step(1, 13)

    run.signal(1, signal.SIGKILL)
    first = run.wait_for_end(1)
    assert first.outcome == "failed" and first.reason.startswith("rank 1 "), first

    run.wait_for_step(2, 3)
    node = cluster.job(run.job_id)["BatchHost"]
    cluster.kill_node(node)
    run.wait_for_step(3, 3)
    assert node not in {other for _, other in run.ranks().values()}

    run.signal(1, signal.SIGSTOP)
    third = run.wait_for_end(3)
    assert third.outcome == "hung" and "no progress for 6 s while training" in third.reason, third
    for rank in (0, 1):
        assert f"{rank}: Current thread" in run.said(3) or f"{rank}: Thread" in run.said(3)

    check_finished(run, undisturbed, ["failed", None, "hung", "finished"])
    assert parts(run.directory)["lost"] > 0
    cluster.start_node(node)


def test_signals_before_the_limit(runs: Runs, undisturbed: Callable[[], Path]) -> None:
    """Send two signals, and meanwhile a second job on the run's directory."""
    # Before the first step wandb is imported, which takes seconds on a busy machine.
    run = runs.submit("signals", "logging.wandb=offline", "recovery.hang_seconds=120")
    assert "--signal=USR1@" in " ".join(run.launch["sbatch"])
    run.wait_for_ranks(1)
    explained(runs.try_to_submit("signals"), 2, f"job {run.job_id}", "trains this run")
    second = run.send_again()
    runs.cluster.wait_for_job(second, ["FAILED"])
    assert f"attempt 1 is being made by job {run.job_id}" in run.job_said(second)
    for attempt in (1, 2):
        run.wait_for_step(attempt, 3)
        assert runs.cluster.run("scancel", "--signal=USR1", run.job_id).returncode == 0
        assert run.wait_for_end(attempt).outcome == "restart"
    check_finished(run, undisturbed, ["restart", "restart", "finished"])
    assert runs.cluster.job(run.job_id)["Restarts"] == "2"
    # Each step is recorded once.
    assert [step for step, _ in losses(run.directory)] == list(range(1, STEPS + 1))
    wandb_runs = [
        path.name.rpartition("-")[2] for path in run.directory.glob("wandb/offline-run-*")
    ]
    assert len(wandb_runs) == 3 and len(set(wandb_runs)) == 1
    check_never_again(runs, run)


def test_sigterm_saves_and_stops(runs: Runs) -> None:
    run = runs.submit("term", "parallel.world_size=1", nodes=1)
    run.wait_for_step(1, 3)
    assert runs.cluster.run("scancel", "--signal=TERM", run.job_id).returncode == 0
    # As its user asked: no failure to Slurm.
    check_over(run)
    assert run.outcomes == ["stopped"]
    assert runs.cluster.job(run.job_id)["Restarts"] == "0"
    step = run.wait_for_end(1).step
    assert complete_checkpoints(run.directory)[-1].name == f"step-{step:08d}"
    assert 3 <= step < STEPS


def test_a_run_that_never_gets_anywhere_is_given_up(runs: Runs) -> None:
    run = runs.submit("hopeless", "recovery.max_restarts=1")
    for attempt in (1, 2):
        run.wait_for_ranks(attempt)
        run.signal(0, signal.SIGKILL)
    check_over(run, ("FAILED",))
    assert run.outcomes == ["failed", "gave_up"]
    reason = run.wait_for_end(2).reason
    assert "2 attempts in a row without a new checkpoint (recovery.max_restarts = 1)" in reason
    assert reason in run.job_said()
