"""Check the cluster itself, on which all other tests here rely."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.end_to_end.commands import wait_for
from tests.slurm.cluster import IMAGE, Cluster, pyxis_options


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
    wait_for(lambda: cluster.step_processes(job, "sleep 300"))
    node = cluster.job(job)["NodeList"]
    # The script, two slurmstepd, srun, and the two sleeping processes.
    wait_for(lambda: len(cluster.processes(node)) >= 6)
    there = set(cluster.processes(node))
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
    wait_for(lambda: cluster.step_processes(job, "go"))
    cluster.kill_controller()
    assert cluster.node_states() == {}
    (tmp_path / "go").touch()
    cluster.start_controller()
    cluster.wait_for_job(job)
    assert (tmp_path / "log").read_text() == "went on\n"


def test_a_job_of_high_preempts_those_of_the_low_partitions(
    cluster: Cluster, tmp_path: Path
) -> None:
    """All end at SIGTERM, so that the test does not wait for the grace time."""
    places = dict(zip(("low", "low_nograce", "low_cancel", "main"), cluster.nodes))
    task = 'trap "echo told; exit 3" TERM; echo ready; while :; do sleep .1; done'

    def occupy(partition: str) -> str:
        (tmp_path / partition).mkdir()
        options = [f"--partition={partition}", f"--nodelist={places[partition]}", "--exclusive"]
        return submit(
            cluster, tmp_path / partition, f"srun bash -c '{task}'", "--requeue", *options
        )

    def said(partition: str) -> list[str]:
        path = tmp_path / partition / "log"
        return path.read_text().splitlines() if path.exists() else []

    jobs = {partition: occupy(partition) for partition in places}
    wait_for(lambda: all("ready" in said(partition) for partition in places))
    assert {cluster.job(job).get("PreemptTime", "None") for job in jobs.values()} == {"None"}
    (tmp_path / "high").mkdir()
    preempting = [
        submit(cluster, tmp_path / "high", "true", "--partition=high", f"--nodelist={node}")
        for node in places.values()
    ]
    *low, main = jobs
    wait_for(lambda: all("told" in said(partition) for partition in low))
    for job in preempting[:-1]:
        cluster.wait_for_job(job)
    fields = {partition: cluster.job(job) for partition, job in jobs.items()}
    assert fields[main]["JobState"] == "RUNNING" and "told" not in said(main)
    if cluster.version < (24, 11):
        # In its grace time a job is like any other: one that ends by itself is not requeued.
        for partition in ("low", "low_cancel"):
            assert fields[partition]["JobState"] == "FAILED"
            assert fields[partition]["PreemptTime"] != "None"
    else:
        assert fields["low"]["Restarts"] == "1"
        assert fields["low_cancel"]["JobState"] == "PREEMPTED"
    assert fields["low_nograce"]["Restarts"] == "1"
    assert cluster.run("scancel", *jobs.values(), preempting[-1]).returncode == 0


def test_pyxis_runs_tasks_in_a_container(pyxis_cluster: Cluster, tmp_path: Path) -> None:
    show = "grep PRETTY /etc/os-release; pwd; ls /tmp; echo $RANK $MASTER_PORT"
    folder = tmp_path / "seen"
    folder.mkdir()
    (folder / "script").write_text(show)
    words = pyxis_options(folder)
    other = f"--container-image=alpine --container-mounts={folder}:/tmp/here"
    script = f"srun {' '.join(words)} bash script\necho ---\nsrun {other} bash /tmp/here/script"
    # This project may lie below /tmp, which a container does not see.
    job = submit(pyxis_cluster, tmp_path, script, "--nodes=1", "--chdir=/")
    pyxis_cluster.wait_for_job(job)
    first, second = (tmp_path / "log").read_text().split("---\n")
    port = str(61_000 + int(job) % 4_536)
    assert first.splitlines()[:2] == [f'PRETTY_NAME="{IMAGE}"', str(folder)]
    assert first.splitlines()[-1] == f"0 {port}"
    assert second.splitlines() == ['PRETTY_NAME="alpine"', "/", "here", ""]


def test_pyxis_runs_the_script_of_sbatch_in_the_container(
    pyxis_cluster: Cluster, tmp_path: Path
) -> None:
    """The options of sbatch also hold for srun in the script, as any SPANK plugin's do."""
    # In a container, srun needs the cluster's files, and a Slurm that is not the system's.
    srun = shutil.which("srun", path=pyxis_cluster.environment["PATH"])
    assert srun
    script = f"grep PRETTY /etc/os-release\n{srun} grep PRETTY /etc/os-release"
    mounts = f"{pyxis_cluster.root},{Path(srun).parents[1]}"
    words = ["--container-image=alpine", f"--container-mounts={mounts}", "--chdir=/"]
    job = submit(pyxis_cluster, tmp_path, script, "--nodes=1", *words)
    pyxis_cluster.wait_for_job(job)
    assert (tmp_path / "log").read_text() == 'PRETTY_NAME="alpine"\n' * 2


def test_pyxis_refuses_an_image_that_is_not_there(pyxis_cluster: Cluster, tmp_path: Path) -> None:
    job = submit(pyxis_cluster, tmp_path, "srun --container-image=/no/such.sqsh true")
    pyxis_cluster.wait_for_job(job, ["FAILED"])
    assert "pyxis: no such image: /no/such.sqsh" in (tmp_path / "log").read_text()


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
