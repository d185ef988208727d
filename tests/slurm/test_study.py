"""Check on a real Slurm that `pretrain study --site` sends what is missing, and nothing twice.

The ranks' Python is that of scripted.py, which counts instead of training; launcher, supervisor,
jobs and files are real.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.rundir.jobs import read_jobs
from tests.end_to_end.commands import PRETRAIN, ROOT, Done, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.test_follow import Desk

STUDY = """
title = "Two methods on a cluster"
directory = "runs/study"
config = "{root}/configs/demo.toml"
methods = ["alibi", "rotary"]
training_lengths = [64]
settings = ["data.directory=data", "batch.micro_batch_size=8", "recovery.preflight_seconds=0"]
"""
RUNS = ("alibi-64-s1234", "rotary-64-s1234")


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path) -> Desk:
    (tmp_path / "study.toml").write_text(STUDY.format(root=ROOT))
    return Desk(cluster, tmp_path)


def study(desk: Desk) -> Done:
    command = [*PRETRAIN, "study", "study.toml", "--site", "site.toml"]
    done = desk.cluster.run(*command, environment={"PYTHONPATH": str(ROOT)}, cwd=desk.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def states(desk: Desk) -> list[str]:
    """Return the states of study.json."""
    content = json.loads((desk.folder / "runs/study/study.json").read_text())
    return [run["state"] for run in content["runs"]]


def test_a_study_is_one_array_of_what_no_job_trains_yet(desk: Desk) -> None:
    said = study(desk).out
    folders = [f"runs/study/runs/{name}" for name in RUNS]
    jobs = [read_jobs(desk.folder / run) for run in folders]
    [[first], [second]] = jobs
    array = first.job_id.partition("_")[0]
    assert (first.job_id, second.job_id) == (f"{array}_0", f"{array}_1")
    assert "submitted 2 runs of 1 nodes x 1 ranks" in said
    assert "next: pretrain study study.toml --site site.toml\n" in said
    assert "pretrain study study.toml --report-only\n" in said and states(desk) == ["waiting"] * 2

    # Both are in the queue or run, so the same command sends nothing.
    again = study(desk)
    assert all(f"{run}: job {array}_" in again.out for run in folders), again.text
    assert again.out.count("trains it, left out") == 2
    assert [read_jobs(desk.folder / run) for run in folders] == jobs

    # What has finished is finished, and what was cancelled is sent again, alone.
    for run in folders:
        desk.wait_for_step(run, 1)
    (desk.folder / folders[0] / "finish").touch()
    assert "cancelled" in desk.launcher("cancel", folders[1]).out
    wait_for(lambda: not {first.job_id, second.job_id} & set(desk.job_states()))
    study(desk)
    assert states(desk) == ["finished", "waiting"]
    assert [len(read_jobs(desk.folder / run)) for run in folders] == [1, 2]
