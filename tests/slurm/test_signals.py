"""Check on a real Slurm that signals do what they ask for, whenever they come.

The ranks are those of scripted.py, which count instead of training.
"""

from __future__ import annotations

import subprocess
import time
import tomllib
from typing import Any

import tomli_w

from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import newest_checkpoint_step
from pretrain.rundir.jobs import read_jobs
from tests.end_to_end.commands import ROOT, executable, wait_for
from tests.slurm.test_follow import Desk, desk

__all__ = ["desk"]
RUN = "runs/a"
# Every Python of a job waits here for the file `open` before it runs anything.
SITECUSTOMIZE = """
import time
from pathlib import Path
Path({folder!r}, "waits").touch()
while not Path({folder!r}, "open").exists():
    time.sleep(0.01)
"""


class Gate:
    """Keep the launcher of every job from running its first line until `open`."""

    def __init__(self, desk: Desk) -> None:
        self.folder = desk.folder / "gate"
        self.folder.mkdir()
        (self.folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(folder=str(self.folder)))
        change_site(desk, environment={"PYTHONPATH": f"{self.folder}:{ROOT}"})

    def wait(self) -> None:
        """Wait until a launcher waits."""
        wait_for((self.folder / "waits").exists)

    def open(self) -> None:
        (self.folder / "open").touch()


def change_site(desk: Desk, **changes: Any) -> None:
    """Give other values to the site of the jobs that are submitted from now on."""
    site = desk.folder / "site.toml"
    site.write_text(tomli_w.dumps(tomllib.loads(site.read_text()) | changes))


def submit(desk: Desk, *words: object, run: str = RUN) -> str:
    return desk.send("submit", "--nodes", 1, *words, run=run).out.split()[1].strip(":")


def outcomes(desk: Desk, run: str = RUN) -> list[str | None]:
    return [a.ended.outcome if a.ended else None for a in read_attempts(desk.folder / run)]


def test_signals_before_the_launcher_runs_are_held_and_none_ends_the_job(desk: Desk) -> None:
    gate = Gate(desk)
    job = submit(desk)
    gate.wait()
    # The launcher does not signal a job that has nothing to save.
    assert "no attempt has begun, so there is nothing" in desk.launcher("requeue", RUN).out
    for options in (["--batch"], ["--full"], ["--batch"]):
        done = desk.cluster.run("scancel", "--signal=USR1", *options, job)
        assert done.returncode == 0, done.stderr
    time.sleep(0.5)
    assert desk.cluster.job(job)["JobState"] == "RUNNING"
    # As if it had been sent with sbatch.
    (desk.folder / RUN / "jobs.jsonl").unlink()
    gate.open()
    wait_for(lambda: outcomes(desk)[:1] == ["restart"])
    second = desk.wait_for_step(RUN, 2)
    assert second.owner.slurm_job_id == job and second.owner.slurm_restart_count == 1
    assert [record.job_id for record in read_jobs(desk.folder / RUN)] == [job]
    assert desk.cluster.job(job)["JobState"] == "RUNNING"


def test_a_job_that_has_not_begun_is_cancelled_and_has_nothing_to_save(desk: Desk) -> None:
    gate = Gate(desk)
    job = submit(desk)
    gate.wait()
    said = desk.launcher("cancel", RUN, "--save").out
    assert f"job {job}: cancelled; no attempt had begun, so it had nothing to save" in said
    desk.cluster.wait_for_job(job, ["CANCELLED"])
    assert outcomes(desk) == []


def test_a_run_whose_nodes_drop_the_signal_after_a_resume_is_asked_again(desk: Desk) -> None:
    """A node needs 2 s to suspend a job, resumes it then, and drops what is sent meanwhile."""
    job = submit(desk)
    desk.wait_for_step(RUN, 1)
    assert desk.cluster.run("scontrol", "suspend", job).returncode == 0
    refused = desk.launcher("cancel", RUN, "--save", code=1).err
    assert f"resume it, with `scontrol resume {job}`" in refused
    assert desk.cluster.run("scontrol", "resume", job).returncode == 0
    assert "stopped after step" in desk.launcher("cancel", RUN, "--save").out
    # Slurm calls it COMPLETED, so jobs that depend on it (afterok) start.
    desk.cluster.wait_for_job(job, ["COMPLETED"])
    assert outcomes(desk) == ["stopped"] and newest_checkpoint_step(desk.folder / RUN)


def test_a_cancelled_run_is_recorded_while_squeue_takes_longer_than_kill_wait(desk: Desk) -> None:
    """`scancel` gives the job KillWait seconds, in which squeue says nothing."""
    folder, slow = desk.folder / "commands", desk.folder / "slow"
    folder.mkdir()
    real = desk.cluster.run("bash", "-c", "command -v squeue").stdout.strip()
    script = f'#!/bin/bash\ntest -e {slow} && sleep 30\nexec {real} "$@"\n'
    executable(folder / "squeue", script)
    change_site(desk, environment={"PATH": f"{folder}:{desk.cluster.environment['PATH']}"})
    job = submit(desk)
    desk.wait_for_step(RUN, 1)
    slow.touch()
    assert desk.cluster.run("scancel", job).returncode == 0
    desk.cluster.wait_for_job(job, ["CANCELLED"])
    # The launcher has been killed by now, and so has its squeue.
    wait_for(lambda: not desk.cluster.step_processes(job))
    [attempt] = read_attempts(desk.folder / RUN)
    assert attempt.ended is not None and attempt.ended.outcome == "stopped"
    assert attempt.ended.step == newest_checkpoint_step(desk.folder / RUN)
    assert f"saved at step {attempt.ended.step}" in attempt.ended.reason


def test_a_run_directory_that_a_node_does_not_see_is_named(desk: Desk) -> None:
    node = "n3"
    change_site(desk, sbatch_arguments=[f"--nodelist={node}"])
    init = desk.cluster._init(node)
    inside = ["nsenter", f"--target={init}", "--mount"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "none", desk.folder], check=True)
    try:
        job = submit(desk)
        wait_for(lambda: desk.cluster.job(job)["JobState"] == "FAILED")
        # The folder for the log is there, as with a copy on the node's own disk, and no more.
        subprocess.run([*inside, "mkdir", "-p", desk.folder / RUN / "logs"], check=True)
        job = submit(desk)
        wait_for(lambda: desk.cluster.job(job)["JobState"] == "FAILED")
        log = desk.folder / RUN / f"logs/slurm-{job}.log"
        said = subprocess.run([*inside, "cat", log], capture_output=True, text=True).stdout
        assert f"{RUN}/launch: node {node} does not see it" in said, said
    finally:
        subprocess.run([*inside, "umount", desk.folder], check=True)
