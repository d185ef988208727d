"""Check on a real Slurm how ranks find each other and which GPU each takes.

The ranks do nothing else; see `tests.slurm.meeting`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pretrain.platform import device_index
from tests.end_to_end.commands import ROOT
from tests.slurm.cluster import Cluster


class Allocation:
    """A job that holds nodes while the test starts steps in it, as with salloc."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str) -> None:
        self.cluster, self.folder, self.num_steps = cluster, folder, 0
        words = ["--parsable", "--output=/dev/null", "--no-requeue", *options]
        done = cluster.run("sbatch", *words, "--wrap=sleep 600")
        assert done.returncode == 0, done.stderr
        self.job_id = done.stdout.strip()
        cluster.wait_for_job(self.job_id, ["RUNNING"])

    def step(
        self, *options: str, starts: int = 1, what: str = "meet", seconds: float = 60
    ) -> list[dict[int, str]]:
        """Run the ranks as a step of the job; return what each said, by start and rank."""
        folder = self.folder / f"{self.job_id}.{self.num_steps}"
        self.num_steps += 1
        for start in range(starts):
            (folder / str(start)).mkdir(parents=True)
        ranks = [sys.executable, "-m", "tests.slurm.meeting", folder, starts, what, seconds]
        # The variables of this process's own environment must not decide where ranks meet.
        done = self.cluster.run(
            "env",
            "-u",
            "MASTER_PORT",
            "srun",
            f"--jobid={self.job_id}",
            "--overlap",
            *options,
            *ranks,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        return [
            {
                int(said.name.removeprefix("said-")): said.read_text()
                for said in (folder / str(start)).glob("said-*")
            }
            for start in range(starts)
        ]


@contextmanager
def allocation(cluster: Cluster, folder: Path, *options: str) -> Iterator[Allocation]:
    held = Allocation(cluster, folder, *options)
    try:
        yield held
    finally:
        cluster.run("scancel", held.job_id)


ONE_EACH = ("--nodes=2", "--ntasks-per-node=1")


@pytest.mark.torture
def test_two_jobs_meet_on_one_node_at_once(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nodes=1", "--ntasks=2")
    with (
        allocation(cluster, tmp_path, *options, "--nodelist=n1") as first,
        allocation(cluster, tmp_path, *options, "--nodelist=n1") as second,
        ThreadPoolExecutor(2) as pool,
    ):
        both = [pool.submit(job.step, *options, starts=10) for job in (first, second)]
        assert [done.result() for done in both] == [[{0: "met", 1: "met"}] * 10] * 2


def test_a_rank_0_that_dies_ends_the_others_with_an_error(cluster: Cluster, tmp_path: Path) -> None:
    with allocation(cluster, tmp_path, *ONE_EACH) as held:
        [before] = held.step(*ONE_EACH, what="die before", seconds=2)
        [after] = held.step(*ONE_EACH, what="die after", seconds=20)
    assert before.keys() == after.keys() == {1}
    assert (
        "rendezvous.json: rank 1 on n" in before[1]
        and "it cannot be read: No such file" in before[1]
    )
    words = ("rank 0 no longer answers", "does not answer")
    assert any(word in after[1] for word in words), after


# What each rank says. The tests' GPUs have a number and nothing else.
SAYS = "echo $SLURM_PROCID $SLURM_LOCALID $CUDA_VISIBLE_DEVICES"


def test_every_rank_has_a_gpu_of_its_own_however_slurm_binds_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    ranks = ("--nodes=2", "--ntasks-per-node=4")

    def devices(*options: str) -> list[tuple[str, str]]:
        """Return what each rank sees, and the GPU of it that it would use."""
        command = ("srun", *ranks, "--gpus-per-node=4", *options, "sh", "-c", SAYS)
        done = cluster.run(*command, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        found = []
        for line in sorted(done.stdout.splitlines(), key=lambda line: int(line.split()[0])):
            _, local_rank, visible = line.split()
            gpus = visible.split(",")
            found.append((visible, gpus[device_index(int(local_rank), len(gpus))]))
        return found

    for option, visible in {
        "--gpus-per-node=4": ["0,1,2,3"] * 4,
        "--gpus-per-task=1": ["0", "1", "2", "3"],
        "--gpu-bind=single:1": ["0", "1", "2", "3"],
        "--gpu-bind=map_gpu:0,1,2,3": ["0", "1", "2", "3"],
    }.items():
        found = devices(option)
        assert [seen for seen, _ in found] == visible * 2, option
        assert [gpu for _, gpu in found] == ["0", "1", "2", "3"] * 2, option
