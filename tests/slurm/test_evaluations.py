"""Check on a real Slurm that every checkpoint is evaluated once, whatever is killed meanwhile.

Training does not wait for any of it. This is proof 4.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.rundir.jobs import read_jobs
from pretrain.rundir.paths import JobKind, RunPaths
from tests.end_to_end.commands import (
    Done,
    executable,
    explained,
    metrics,
    sets,
    succeeded,
    wait_for,
)
from tests.end_to_end.conftest import CONFIG
from tests.slurm.cluster import Cluster
from tests.slurm.runs import write_site
from tests.unit.test_rundir import undocumented

NAMES = [f"step-{step:08d}" for step in (1, 2)]
LENGTHS = (32, 64)


class Desk:
    """A user's directory on the login node, with run.toml, site.toml and the run runs/alibi."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "runs/alibi"
        (folder / "run.toml").write_text(CONFIG.format(folder=folder, data=data))
        self.site()

    def site(self, **values: str) -> None:
        on_cpu = {"CUDA_VISIBLE_DEVICES": ""}
        write_site(self.folder / "site.toml", nodes=2, environment=on_cpu, **values)

    def launcher(self, *words: object) -> Done:
        command = [sys.executable, "-m", "pretrain.launcher", *words, "--site", "site.toml"]
        done = self.cluster.run(*command, cwd=self.folder)
        return Done(done.returncode, done.stdout, done.stderr)

    def submit(self, steps: int, restarts: int = 3) -> str:
        """Submit training that saves and evaluates after every step; return the job's id."""
        settings = [
            f"train.num_steps={steps}",
            "checkpoint.interval_steps=1",
            "evaluation.interval_steps=1",
            "recovery.preflight_seconds=0",
            f"recovery.max_restarts={restarts}",
        ]
        words = ["submit", "run.toml", *sets(*settings), "--nodes", 1, "--evaluate-checkpoints"]
        # As evaluation.max_tokens of the run.
        succeeded(self.launcher(*words, "--lengths", "32,64", "--max-tokens", 2048))
        return read_jobs(self.run, JobKind.TRAIN)[-1].job_id

    def jobs(self) -> dict[str, str]:
        """Return the recorded evaluation jobs: checkpoint -> job id."""
        sent = read_jobs(self.run, JobKind.EVALUATE)
        return {str(record.checkpoint): record.job_id for record in sent}

    def state(self, job_id: str) -> tuple[str, str]:
        fields = self.cluster.job(job_id)
        return fields["JobState"], fields["Reason"]

    def freeze(self, job_id: str, log: Path, *words: str) -> int:
        """Stop (SIGSTOP) a process of a job as soon as it has started; return its id.

        Args:
            job_id: The job.
            log: A file that the process's job step writes when it starts.
            words: Parts of the process's command line.
        """
        # Searching for processes is slow and would delay those that are starting.
        wait_for(log.exists)
        found: dict[int, Any] = {}

        def is_there() -> bool:
            found.update(self.cluster.step_processes(job_id, *words))
            return bool(found)

        wait_for(is_there)
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        return min(found)


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, tiny_data: Path) -> Desk:
    return Desk(cluster, tmp_path, tiny_data)


def test_every_checkpoint_is_evaluated_once(desk: Desk) -> None:
    run, cluster = desk.run, desk.cluster
    # The first checkpoint appears while its supervisor is frozen; killing it ends the job.
    training = desk.submit(steps=1, restarts=0)
    log = run / "logs/attempt-0001.log"
    # The supervisor makes the log and then starts the rank, whose agent is the first to write.
    wait_for(lambda: log.exists() and log.stat().st_size)
    supervisor = desk.freeze(training, log, "pretrain.launcher attempt")
    wait_for((run / "checkpoints" / NAMES[0] / "manifest.json").exists)
    os.kill(supervisor, signal.SIGKILL)
    cluster.wait_for_job(training, ["FAILED"])
    assert desk.jobs() == {}

    # The next supervisor sends the missing evaluation. That job is frozen, and another checkpoint
    # appears: training does not wait.
    training = desk.submit(steps=2)
    wait_for(lambda: NAMES[0] in desk.jobs())
    first = desk.jobs()[NAMES[0]]
    desk.freeze(first, run / f"logs/evaluate-{NAMES[0]}.log", "pretrain", "evaluate", "--out")
    wait_for((run / "checkpoints" / NAMES[1] / "manifest.json").exists)
    cluster.wait_for_job(training)
    assert sorted(desk.jobs()) == NAMES
    assert desk.state(first)[0] == "RUNNING"
    last = desk.jobs()[NAMES[1]]
    assert desk.state(last) == ("PENDING", "Dependency")

    # A cancel that Slurm refuses ends no evaluations.
    executable(desk.folder / "scancel", "#!/bin/bash\nexit 1\n")
    path = f"PATH={desk.folder}:{cluster.environment['PATH']}"
    done = cluster.run("env", path, sys.executable, "-m", "pretrain.launcher", "cancel", run)
    assert done.returncode == 1 and RunPaths(run).evaluation_plan.exists(), done.stderr

    # The record of the last job is lost, as in a crash right after sbatch, and the frozen job is
    # requeued. At its end it sends the job that is missing from the record a second time.
    lines = (RunPaths(run).jobs).read_text().splitlines(keepends=True)
    (RunPaths(run).jobs).write_text(
        "".join(line for line in lines if json.loads(line)["job_id"] != last)
    )
    assert cluster.run("scontrol", "requeue", first).returncode == 0
    wait_for(lambda: desk.jobs().get(NAMES[1], last) != last)
    again = desk.jobs()[NAMES[1]]
    wait_for((run / "evaluations" / NAMES[1]).exists)
    for job_id in (first, last, again):
        cluster.wait_for_job(job_id)

    logs = "".join(path.read_text() for path in (run / "logs").glob("slurm-*.log"))
    assert [logs.count(f"{name}: evaluated; see") for name in NAMES] == [1, 1]
    assert f"{NAMES[1]}: evaluated before" in (run / f"logs/slurm-{again}.log").read_text()
    assert len(desk.jobs()) == len(read_jobs(run, JobKind.EVALUATE)) == 2
    curve = json.loads((run / "evaluations/curve.json").read_text())
    found = {
        (r["step"], r["length"]): r["loss_nats"]
        for r in curve["records"]
        if r["protocol"] == "nonoverlapping"
    }
    # The training loop evaluated the same weights, but sums the losses in another order.
    logged = {(r["step"], r["length"]): r["loss_nats"] for r in metrics(run) if r.get("evaluation")}
    assert found == pytest.approx(logged, rel=1e-6) and sorted(found) == [
        (s, n) for s in (1, 2) for n in LENGTHS
    ]
    # Sliding windows of 32 tokens by 32 are the nonoverlapping ones.
    assert len(curve["records"]) == 6
    assert {r["train_length"] for r in curve["records"]} == {32}
    assert undocumented(run) == []
    assert {p.name for p in (run / "evaluations").iterdir() if p.is_file()} == {
        "plan.json",
        "curve.json",
        *(
            f"{name}.{kind}"
            for name in ("curve", "curve_positions", "curve_processor_seconds", "steps")
            for kind in ("png", "svg")
        ),
        "report.md",
    }


def test_what_cannot_be_evaluated_is_given_up_and_gets_a_new_chance_when_asked(desk: Desk) -> None:
    checkpoint = desk.run / "checkpoints" / NAMES[0]
    explained(
        desk.launcher("evaluate-checkpoints", "runs/alibi"),
        2,
        "not a run's directory (no config.toml)",
    )
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    (desk.run / "config.toml").write_text((desk.folder / "run.toml").read_text())
    desk.site(python="/bin/false")
    failed = desk.run / "evaluations" / NAMES[0] / "failed.json"
    succeeded(desk.launcher("evaluate-checkpoints", "runs/alibi"))
    # Minutes apart, unless somebody has it start now.
    for tries in range(1, 3):
        wait_for(lambda before=tries: len(read_jobs(desk.run)) > before)
        again = read_jobs(desk.run)[-1].job_id
        wait_for(lambda id=again: desk.state(id) == ("PENDING", "BeginTime"))
        # Under the name of the others, it would hold these back.
        assert desk.cluster.run("squeue", "-ho%j", "-j", again).stdout.endswith("-again\n")
        assert not desk.cluster.run("scontrol", "update", f"jobid={again}", "starttime=now").stderr
    # Until then Slurm has a job that evaluates the checkpoint.
    desk.cluster.wait_for_job(again, ["FAILED"])
    sent = [record.job_id for record in read_jobs(desk.run)]
    assert json.loads(failed.read_text())["jobs"] == sent and len(sent) == 3
    succeeded(desk.launcher("evaluate-checkpoints", "runs/alibi"))
    assert not failed.exists() and len(read_jobs(desk.run)) == 4
    log = (desk.run / f"logs/slurm-{sent[0]}.log").read_text()
    assert f"{NAMES[0]}: not evaluated: srun ended with exit code 1 (n1: task 0" in log
    assert not (desk.run / "evaluations/curve.json").exists()
