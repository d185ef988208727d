"""Check `launcher run`: a whole experiment on a real Slurm, interrupted and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from pretrain.rundir.jobs import read_jobs
from tests.end_to_end.commands import LAUNCHER, ON_CPU, ROOT, ended, explained, succeeded, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Runs

SHORT = ("train.num_steps=2", "checkpoint.interval_steps=2", "evaluation.max_tokens=256")


def experiment(runs: Runs, *settings: str) -> subprocess.Popen[str]:
    """Start `launcher run` on the run "whole" as a terminal does."""
    words = [*LAUNCHER, "run", runs.config, "--site", runs.site, "--nodes", 2, "--max-tokens", 256]
    words += runs.options("whole", *settings)
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        env=os.environ | runs.cluster.environment | ON_CPU,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def jobs(runs: Runs) -> list[str]:
    """Return the kinds of the jobs that were sent for the run."""
    return [record.kind for record in read_jobs(runs.folder / "runs/whole")]


def test_the_same_command_goes_on_where_the_run_is(
    cluster: Cluster, tiny_data: Path, tmp_path: Path
) -> None:
    runs, report = Runs(cluster, tmp_path, tiny_data), tmp_path / "runs/whole/evaluations"
    first = experiment(runs, *SHORT)
    wait_for(lambda: jobs(runs) == ["train"])
    first.send_signal(signal.SIGINT)
    stopped = ended(first)
    assert stopped.code == 130 and "the same command follows them again" in stopped.err
    assert "Traceback" not in stopped.err
    done = succeeded(ended(experiment(runs, *SHORT)))
    assert "following it" in done.out + done.err and "finished" in done.err, done.text
    assert jobs(runs) == ["train", "evaluate"]
    steps = {
        record["step"] for record in json.loads((report / "curve.json").read_text())["records"]
    }
    assert steps == {2} and "Perplexity by length" in done.out
    again = ended(experiment(runs, *SHORT))
    assert again.code == 0 and f"report: {report}/report.md" in again.out, again.text
    assert jobs(runs) == ["train", "evaluate"]


def test_what_cannot_run_is_refused_before_its_data_is_built(
    cluster: Cluster, tmp_path: Path
) -> None:
    runs = Runs(cluster, tmp_path, tmp_path / "data")
    runs.site.write_text(runs.site.read_text().replace('"main"', '"elsewhere"'))
    explained(ended(experiment(runs)), 1, "invalid partition")
    assert not (tmp_path / "data").exists() and not (tmp_path / "runs").exists()


@pytest.mark.torture
def test_an_experiment_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    """From the text to the report, with the data built on the cluster."""
    runs = Runs(cluster, tmp_path, tmp_path / "data")
    done = succeeded(ended(experiment(runs, "train.num_steps=20")))
    assert "building it with 2 nodes" in done.text and "finished: at step 20" in done.err
    assert (tmp_path / "data/train/manifest.json").is_file()
    assert jobs(runs).count("train") == 1 and jobs(runs).count("evaluate") == 2
