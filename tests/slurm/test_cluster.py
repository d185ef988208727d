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


def test_nothing_is_left_when_it_stops(cluster: Cluster, tmp_path: Path) -> None:
    other = Cluster(num_nodes=1, gpus=1)
    # No other process of this machine, of another pytest either, sleeps for as many seconds.
    seconds = 100_000 + os.getpid()
    try:
        other.start()
        job = submit(other, tmp_path, f"srun sleep {seconds}")
        wait_for(lambda: other.step_processes(job, f"sleep {seconds}"))
    finally:
        other.stop()
    named = [
        p
        for p in Path("/proc").glob("[0-9]*/cmdline")
        if _holds(p, str(other.root)) or _holds(p, f"sleep\x00{seconds}")
    ]
    assert named == [] and not other.root.exists()


def _holds(path: Path, words: str) -> bool:
    """Return True if a file in /proc contains `words`."""
    try:
        return words.encode() in path.read_bytes()
    except OSError:
        # The process has ended meanwhile.
        return False
