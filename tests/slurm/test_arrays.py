"""Check on a real Slurm that each run of a sweep is controlled by itself.

The last task of an array has the array's own id as its SLURM_JOB_ID. The ranks' Python is that of
test_follow.py, which counts instead of training; supervisor, signals, jobs and files are real.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from pretrain.config import EvaluationRequest
from pretrain.launcher import evaluations, slurm
from pretrain.launcher.site import parse_site
from pretrain.launcher.supervise import job_is_over
from pretrain.rundir.attempts import AttemptRecord, read_attempts
from pretrain.rundir.jobs import JobRecord, append_job, read_jobs, read_launch
from tests.end_to_end.commands import ROOT, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.test_follow import Desk, fields

LENGTHS = (64, 128, 256)
WRAPPER = """#!/bin/bash
# Counts a command, then runs the real one.
echo "$(basename "$0") $*" >> {calls}
exec {real} "$@"
"""
FAILING = """#!/bin/bash
# Counts squeue. Of ten calls three fail, and none answers at once.
exec 9>>{calls}.lock; flock 9
echo "$(basename "$0") $*" >> {calls}
number=$(wc -l < {calls})
flock -u 9; exec 9>&-
sleep {seconds}
case $((number % 10)) in
    1|4) echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1;;
    7) echo "slurm_load_jobs error: Zebra" >&2; exit 1;;
esac
exec {real} "$@"
"""
STEP = "step-00000001"
COMMANDS = ("sbatch", "squeue", "scontrol", "scancel")


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, here: None) -> Desk:
    return Desk(cluster, tmp_path)


class Sweep:
    """A sweep of three runs on the tests' cluster."""

    def __init__(self, desk: Desk, *words: object) -> None:
        self.desk = desk
        lengths = ",".join(map(str, LENGTHS))
        self.said = desk.send(
            "sweep", "--over", f"data.sequence_length={lengths}", *words, "--nodes", 1
        ).out
        self.runs = [f"runs/a-sweep/{length}" for length in LENGTHS]
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
        wait_for(lambda: all(slurm.is_over(id) for id in ids), 60)


def commands(folder: Path, cluster: Cluster, script: str, **values: object) -> dict[str, str]:
    """Put scripts in front of Slurm's commands; return the environment in which they are found."""
    folder.mkdir()
    for name in COMMANDS:
        found = cluster.run("bash", "-c", f"command -v {name}").stdout.strip()
        chosen = script if name == "squeue" else WRAPPER
        calls = folder / ("calls" if name != "squeue" else "squeue-calls")
        path = folder / name
        path.write_text(chosen.format(real=found, calls=calls, **values))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def called(folder: Path) -> Counter[str]:
    """Return how often each command was called."""
    lines = [
        line.split()[0]
        for name in ("calls", "squeue-calls")
        if (folder / name).exists()
        for line in (folder / name).read_text().splitlines()
    ]
    return Counter(lines)


# ---- one element, and nothing else ----
def test_the_last_run_of_a_sweep_is_requeued_alone(desk: Desk) -> None:
    """One has finished and one was stopped on purpose, and both stay so."""
    sweep = Sweep(desk)
    for run in sweep.runs:
        desk.wait_for_step(run, 1)
    array = sweep.ids[0].split("_")[0]
    assert [sweep.raw(index) == array for index in range(3)] == [False, False, True]
    (desk.folder / sweep.runs[0] / "enough").touch()
    assert "stopped after step" in desk.launcher("cancel", sweep.runs[1], "--save").out
    sweep.wait_until_over(0, 1)
    before = sweep.standing(0, 1)
    desk.launcher("requeue", sweep.runs[2])
    desk.wait_for_step(sweep.runs[2], 2)
    assert sweep.standing(0, 1) == before
    assert [len(sweep.attempts(index)) for index in range(3)] == [1, 1, 2]
    assert sweep.attempts(2)[-1].owner.slurm_job_id == sweep.ids[2]


@pytest.mark.torture
def test_each_run_of_a_sweep_is_requeued_alone(desk: Desk) -> None:
    sweep = Sweep(desk)
    for run in sweep.runs:
        desk.wait_for_step(run, 1)
    for index in range(3):
        others = [other for other in range(3) if other != index]
        before = sweep.standing(*others)
        desk.launcher("requeue", sweep.runs[index])
        desk.wait_for_step(sweep.runs[index], 2)
        assert sweep.standing(*others) == before
        owner = sweep.attempts(index)[-1].owner
        assert owner.slurm_job_id == sweep.ids[index] and owner.slurm_restart_count == 1
        assert desk.cluster.job(sweep.ids[index])["Restarts"] == "1"


def test_each_run_of_a_sweep_is_cancelled_alone(desk: Desk) -> None:
    sweep = Sweep(desk)
    for run in sweep.runs:
        desk.wait_for_step(run, 1)
    before = sweep.standing(0, 1)
    assert "stopped after step" in desk.launcher("cancel", sweep.runs[2], "--save").out
    wait_for(lambda: sweep.ids[2] not in desk.job_states(), 30)
    assert sweep.standing(0, 1) == before
    before = sweep.standing(1, 2)
    assert "cancelled" in desk.launcher("cancel", sweep.runs[0]).out
    wait_for(lambda: sweep.ids[0] not in desk.job_states(), 30)
    assert sweep.standing(1, 2) == before and desk.job_states() == {sweep.ids[1]: "RUNNING"}


def test_a_run_takes_one_signal_while_others_of_its_sweep_wait(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld keeps those that wait in one record, and calls a signal that it delivers failed."""
    sweep = Sweep(desk, "--concurrent", 1)
    desk.wait_for_step(sweep.runs[0], 1)
    for name, value in commands(tmp_path / "commands", desk.cluster, WRAPPER).items():
        monkeypatch.setenv(name, value)
    slurm.signal(sweep.ids[0], "CONT", batch=True)
    counted = called(tmp_path / "commands")
    assert counted == Counter({"squeue": 1, "scontrol": 1, "scancel": 1})
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


@pytest.mark.torture
def test_a_run_that_fails_again_and_again_leaves_the_others_alone(desk: Desk) -> None:
    """The last one, whose SLURM_JOB_ID is the array's id, fails until it is given up."""
    sweep = Sweep(desk, "--set", "recovery.max_restarts=1")
    for run in sweep.runs:
        desk.wait_for_step(run, 1)
    (desk.folder / sweep.runs[0] / "enough").touch()
    sweep.wait_until_over(0)
    before = sweep.standing(0, 1)

    def kill_ranks() -> bool:
        for pid in desk.cluster.step_processes(sweep.raw(2), str(desk.folder / "python")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = sweep.attempts(2)[-1].ended
        return ended is not None and ended.outcome == "gave_up"

    wait_for(kill_ranks, 90)
    wait_for(lambda: sweep.ids[2] not in desk.job_states(), 30)
    assert sweep.standing(0, 1) == before
    assert [attempt.ended.outcome for attempt in sweep.attempts(2) if attempt.ended] == [
        "failed",
        "gave_up",
    ]


# ---- what Slurm is asked ----
def test_a_sweep_of_200_is_one_sbatch(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "commands"
    environment = commands(folder, desk.cluster, WRAPPER)
    desk.cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        seeds = ",".join(map(str, range(200)))
        settings = ("data.directory=data", "run.directory=runs/a", "batch.micro_batch_size=8")
        done = desk.cluster.run(
            *(sys.executable, "-m", "pretrain.launcher", "sweep", ROOT / "configs/demo.toml"),
            *("--site", "site.toml", "--over", f"run.seed={seeds}"),
            *(word for setting in settings for word in ("--set", setting)),
            environment=environment | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
            cwd=desk.folder,
        )
        assert done.returncode == 0, done.stderr
        said = [line.split()[1].strip(":") for line in done.stdout.splitlines() if "_" in line]
        array = said[0].split("_")[0]
        assert said == [f"{array}_{index}" for index in range(200)]
        counted = called(folder)
        assert counted["sbatch"] <= 2 and counted.total() <= 4, counted
        # Still one record: 200 updates would have made 200 of it.
        records = desk.cluster.run("squeue", "--noheader", f"--jobs={array}", "--format=%i")
        assert len(records.stdout.splitlines()) == 1
    finally:
        desk.cluster.run("scancel", "--name=a-sweep")
        desk.cluster.run("scontrol", "update", "PartitionName=main", "State=UP")


# ---- squeue that fails three times in ten, and takes long ----
@pytest.fixture
def failing(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a squeue that fails in front of the real one, for this process, commands and jobs."""
    folder = tmp_path / "commands"
    for name, value in commands(folder, desk.cluster, FAILING, seconds=0.2).items():
        monkeypatch.setenv(name, value)
    # Cluster.run passes a PATH of its own.
    monkeypatch.setattr(
        Cluster, "environment", property(lambda self: {"SLURM_CONF": os.environ["SLURM_CONF"]})
    )
    return folder


@pytest.mark.torture
def test_nothing_is_concluded_from_a_squeue_that_fails(desk: Desk, failing: Path) -> None:
    desk.send("submit")
    desk.wait_for_step("runs/a", 1)
    run = desk.folder / "runs/a"
    owner = read_attempts(run)[-1].owner
    before = called(failing)["squeue"]
    told = [job_is_over(owner) for _ in range(10)]
    assert called(failing)["squeue"] == before + 10
    assert True not in told and told.count(None) == 3
    assert all(slurm.jobs_named("runs.a") != {} for _ in range(10))
    log = desk.folder / "followed"
    with (
        log.open("w") as output,
        desk.started("logs", "runs/a", "--follow", output=output) as following,
    ):
        for _ in range(4):
            row = fields(desk.launcher("status").out)
            assert row["STATE"] in ("RUNNING", "running")
        # A checkpoint that has an evaluation job gets no second one, from here or from training.
        words = ("--parsable", "--output=/dev/null", "--wrap=sleep 300")
        job = desk.cluster.run("sbatch", *words).stdout.strip()
        append_job(
            run, JobRecord(job, "evaluate", "e", time.time(), "t", 1, 1, str(run), None, STEP)
        )
        evaluations.write_plan(run, plan_of(run))
        (run / "checkpoints" / STEP).mkdir(parents=True)
        (run / "checkpoints" / STEP / "manifest.json").touch()
        sent = called(failing)["sbatch"]
        submit_pending = evaluations.PendingEvaluations(run)
        for _ in range(10):
            submit_pending(at_once=True)
        assert called(failing)["sbatch"] == sent
        evaluations.pause(run)
        assert "asked to save and start again" in desk.launcher("requeue", "runs/a").out
        desk.wait_for_step("runs/a", 2)
        assert following.poll() is None
        assert "stopped after step" in desk.launcher("cancel", "runs/a", "--save").out
        following.wait(60)
    assert "attempt 2: rank 0 took step" in log.read_text()
    assert "runs/a: stopped: saved at step" in log.read_text()


def plan_of(run: Path) -> evaluations.Plan:
    """Return a plan of the run's evaluations."""
    site = parse_site(read_launch(run).site, "launch.json")
    return evaluations.Plan(
        request=EvaluationRequest(None, ("sliding",), 64, 64),
        name="e",
        site=site,
        directory=str(run),
        tasks_per_node=1,
        time_limit="10",
    )
