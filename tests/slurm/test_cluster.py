"""Check the cluster itself, on which all other tests here rely."""

from __future__ import annotations

import os
from pathlib import Path

from tests.end_to_end.commands import wait_for
from tests.slurm.cluster import Cluster


def submit(cluster: Cluster, directory: Path, script: str, *options: str) -> str:
    """Submit `script`, whose output goes to DIRECTORY/log, and return the job id."""
    path = directory / "script"
    path.write_text(f"#!/bin/bash\n{script}\n")
    words = [
        "--parsable",
        f"--output={directory}/log",
        "--open-mode=append",
        "--ntasks-per-node=1",
        *options,
    ]
    done = cluster.run("sbatch", *words, path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_tasks_run_on_their_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(
        cluster,
        tmp_path,
        "srun bash -c 'echo $(hostname) $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'",
        "--nodes=2",
        "--gres=gpu:3",
    )
    assert cluster.wait_for_job(job)["NumNodes"] == "2"
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len({line[0] for line in lines}) == 2
    assert all(
        line[0] == line[1] and line[0] in cluster.nodes and line[2] == "0,1,2" for line in lines
    ), lines


def test_a_killed_node_takes_its_processes_along(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "sleep 600 & srun sleep 300", "--nodes=1", "--no-requeue")
    wait_for(lambda: cluster.step_processes(job, "sleep 300"), 30)
    node = cluster.job(job)["NodeList"]
    there = set(cluster.processes(node))
    # The script, two slurmstepd, srun, and the two sleeping processes.
    assert len(there) >= 6
    cluster.kill_node(node)
    assert cluster.processes(node) == {} and not any(
        os.path.exists(f"/proc/{pid}") for pid in there
    )
    assert cluster.run("scancel", job).returncode == 0
    cluster.start_node(node)
    cluster.wait_for_job(job, ["CANCELLED", "NODE_FAIL"])
    assert cluster.processes(node) == {}


def test_jobs_outlive_the_controller(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(
        cluster,
        tmp_path,
        f"srun bash -c 'until test -e {tmp_path}/go; do sleep .1; done; echo went on'",
    )
    wait_for(lambda: cluster.step_processes(job, "go"), 30)
    cluster.kill_controller()
    assert cluster.node_states() == {}
    (tmp_path / "go").touch()
    cluster.start_controller()
    cluster.wait_for_job(job)
    assert (tmp_path / "log").read_text() == "went on\n"


def test_nothing_is_left_when_it_stops(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(num_nodes=1, gpus=1)
    try:
        other.start()
        job = submit(other, tmp_path, "srun sleep 301")
        wait_for(lambda: other.step_processes(job, "sleep 301"), 30)
    finally:
        other.stop()
    named = [
        p
        for p in Path("/proc").glob("[0-9]*/cmdline")
        if _holds(p, str(other.root)) or _holds(p, "sleep\x00301")
    ]
    assert named == [] and not other.root.exists()


def _holds(path: Path, words: str) -> bool:
    """Return True if a file in /proc contains `words`."""
    try:
        return words.encode() in path.read_bytes()
    except OSError:
        # The process has ended meanwhile.
        return False
