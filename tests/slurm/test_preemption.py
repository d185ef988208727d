"""Check on a real Slurm that a preempted run saves if it can, and comes back; a cancelled one not.

The ranks are a script (scripted.py).
"""

from __future__ import annotations

import signal

from pretrain.rundir.checkpoints import newest_checkpoint_step
from tests.end_to_end.commands import wait_for
from tests.slurm.scripted import Script, ScriptedRun


def preempt(run: ScriptedRun) -> str:
    """Submit a job that needs the whole nodes of a run, and return its id."""
    nodes = run.cluster.job(run.job_id)["NodeList"]
    options = ["--partition=high", "--exclusive", f"--nodelist={nodes}", "--output=/dev/null"]
    done = run.cluster.run("sbatch", "--parsable", *options, "--wrap=sleep 600")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_preempted_run_saves_if_it_can_and_comes_back(script: Script) -> None:
    """With a grace time and without, where Slurm requeues what it preempts and where it cancels."""
    partitions = ("low", "low_cancel", "low_nograce", "low_cancel_nograce")
    runs = {name: script.submit(name, partition=name) for name in partitions}
    for run in runs.values():
        run.wait_for_training(1)
    others = [preempt(run) for run in runs.values()]
    saved = {}
    for name, run in runs.items():
        first = run.wait_for_end(1)
        saved[name] = newest_checkpoint_step(run.directory)
        assert first.outcome == "restart", (name, first)
        assert first.reason == f"preempted; saved at step {saved[name]}", (name, first)
    script.cluster.run("scancel", *others)
    for name, run in runs.items():
        run.wait_for_training(2)
        assert run.attempts[1].owner.checkpoint_step == saved[name]
        run.ask("finish")
        # 24.11 keeps the mark of the preemption: it starts the finished run's job once more, or
        # says of it that it was preempted.
        job = run.cluster.wait_for_job(run.job_id, ["COMPLETED", "PREEMPTED"])
        assert job["Restarts"] in ("1", "2")
        assert run.outcomes == ["restart", "finished"]


def test_a_cancelled_run_does_not_come_back(script: Script) -> None:
    run = script.submit("cancelled", partition="low")
    run.wait_for_training(1)
    run.cluster.run("scancel", run.job_id)
    assert run.wait_for_end(1).outcome == "stopped"
    assert run.cluster.wait_for_job(run.job_id, ["CANCELLED"])["Restarts"] == "0"
    told = script.submit("told", partition="low")
    told.wait_for_training(1)
    told.cluster.run("scancel", f"--signal={signal.SIGTERM.name}", told.job_id)
    assert told.wait_for_end(1).outcome == "stopped"
    assert told.cluster.wait_for_job(told.job_id, ["COMPLETED"])["Restarts"] == "0"


def test_a_run_that_is_cancelled_during_its_save_is_not_finished(script: Script) -> None:
    """srun ends with 0 when Slurm kills ranks that ended their step too late."""
    run = script.submit("late")
    run.wait_for_training(1)
    run.ask("slow")
    run.cluster.run("scancel", run.job_id)
    run.cluster.wait_for_job(run.job_id, ["CANCELLED"])
    wait_for(lambda: run.outcomes[0] in ("stopped", None))
    assert newest_checkpoint_step(run.directory) is None
    if end := run.attempts[0].ended:
        assert "nothing saved" in end.reason
