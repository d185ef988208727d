"""Check on a real Slurm that each run of a sweep is controlled by itself.

The last task of an array has the array's own id as its SLURM_JOB_ID. The ranks' Python is that of
scripted.py, which counts instead of training; supervisor, signals, jobs and files are real.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pretrain.launcher import slurm
from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.jobs import read_jobs
from tests.end_to_end.commands import executable, explained, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.test_follow import Desk, desk

__all__ = ["desk"]
pytestmark = pytest.mark.usefixtures("here")

LENGTHS = (64, 128, 256)
WRAPPER = """#!/bin/bash
# Counts a command, then runs the real one.
echo "$(basename "$0") $*" >> {calls}
exec {real} "$@"
"""
SCONTROL = """#!/bin/sh
test "$*" = "show config" && echo "MaxArraySize            = {size}" || exec {scontrol} "$@"
"""
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel")


class Sweep:
    """A sweep of three runs on the tests' cluster."""

    def __init__(self, desk: Desk, *words: object) -> None:
        self.desk = desk
        self.said = desk.sweep(LENGTHS, *words, "--nodes", 1).out
        self.runs = [f"runs/a/{length}" for length in LENGTHS]
        self.ids = [read_jobs(desk.folder / run)[0].job_id for run in self.runs]

    def attempts(self, index: int) -> list[AttemptRecord]:
        return read_attempts(self.desk.folder / self.runs[index])

    def raw(self, index: int) -> str:
        """Return the SLURM_JOB_ID of a run's job."""
        states = slurm.jobs([self.ids[index]])
        assert states
        return states[self.ids[index]].raw_id

    def standing(self, *indices: int) -> dict[str, tuple[object, ...]]:
        """Return what must not change for runs that nobody touches."""
        found = {}
        for index in indices:
            fields = self.desk.cluster.job(self.ids[index])
            ends = [attempt.ended for attempt in self.attempts(index)]
            found[self.ids[index]] = (fields["JobState"], fields["Restarts"], tuple(ends))
        return found

    def wait_until_over(self, *indices: int) -> None:
        ids = [self.ids[index] for index in indices]
        wait_for(lambda: all(slurm.is_over(id) for id in ids))


def commands(folder: Path, cluster: Cluster) -> dict[str, str]:
    """Put scripts in front of Slurm's commands; return the environment in which they are found."""
    folder.mkdir()
    for name in COMMANDS:
        found = cluster.run("bash", "-c", f"command -v {name}").stdout.strip()
        executable(folder / name, WRAPPER.format(real=found, calls=folder / "calls"))
    return {"PATH": f"{folder}:{cluster.environment['PATH']}"}


def called(folder: Path, without: str = "\n") -> Counter[str]:
    """Return how often each command was called, without calls that contain a word."""
    calls = (folder / "calls").read_text().splitlines()
    return Counter(call.split()[0] for call in calls if without not in call)


# ---- one element, and nothing else ----
def test_each_run_of_a_sweep_is_requeued_and_cancelled_alone(desk: Desk) -> None:
    """The last one as well, whose SLURM_JOB_ID is the array's id."""
    sweep = Sweep(desk)
    for run in sweep.runs:
        desk.wait_for_step(run, 1)
    array = sweep.ids[0].split("_")[0]
    assert [sweep.raw(index) == array for index in range(3)] == [False, False, True]
    before = sweep.standing(0, 1)
    desk.launcher("requeue", sweep.runs[2])
    desk.wait_for_step(sweep.runs[2], 2)
    assert sweep.standing(0, 1) == before
    assert [len(sweep.attempts(index)) for index in range(3)] == [1, 1, 2]
    assert sweep.attempts(2)[-1].owner.slurm_job_id == sweep.ids[2]
    # One is finished and one is stopped on purpose, and both stay so.
    (desk.folder / sweep.runs[0] / "finish").touch()
    assert "stopped after step" in desk.launcher("cancel", sweep.runs[1], "--save").out
    sweep.wait_until_over(0, 1)
    assert desk.job_states() == {sweep.ids[2]: "RUNNING"}
    before = sweep.standing(0, 1)
    assert "cancelled" in desk.launcher("cancel", sweep.runs[2]).out
    wait_for(lambda: sweep.ids[2] not in desk.job_states())
    assert sweep.standing(0, 1) == before


def test_a_sweep_that_no_array_takes_is_refused(desk: Desk, tmp_path: Path) -> None:
    real = desk.cluster.run("bash", "-c", "command -v scontrol").stdout.strip()
    executable(tmp_path / "scontrol", SCONTROL.format(size=2, scontrol=real))
    path = f"{tmp_path}:{desk.cluster.environment['PATH']}"
    done = desk.sweep(LENGTHS, "--nodes", 1, code=2, PATH=path)
    explained(done, 2, "3 runs: a job array of this cluster has at most 2 tasks")
    assert not (desk.folder / "runs").exists()


def test_a_run_takes_one_signal_while_others_of_its_sweep_wait(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld keeps those that wait in one record, and calls a signal that it delivers failed."""
    sweep = Sweep(desk, "--concurrent", 1)
    desk.wait_for_step(sweep.runs[0], 1)
    for name, value in commands(tmp_path / "commands", desk.cluster).items():
        monkeypatch.setenv(name, value)
    slurm.signal(sweep.ids[0], "CONT", batch=True)
    assert called(tmp_path / "commands") == Counter({"squeue": 1, "scontrol": 1, "scancel": 1})
    # 24.11 says so for a moment after a signal.
    wait_for(lambda: "SIGNALING" not in desk.job_states().values())
    assert set(desk.job_states().items()) == {
        (id, state) for id, state in zip(sweep.ids, ("RUNNING", "PENDING", "PENDING"))
    }
    assert "stopped after step" in desk.launcher("cancel", sweep.runs[0], "--save").out
    # The limit of one at a time still holds, and the others begin as if nothing had been, in the
    # order that Slurm chooses.
    wait_for(lambda: sweep.attempts(1) or sweep.attempts(2))
    now, later = (1, 2) if sweep.attempts(1) else (2, 1)
    desk.wait_for_step(sweep.runs[now], 1)
    assert list(desk.job_states().values()).count("RUNNING") == 1
    assert desk.cluster.job(sweep.ids[now])["Restarts"] == "0" and not sweep.attempts(later)
