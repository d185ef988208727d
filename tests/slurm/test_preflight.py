"""Check on a real Slurm that the preflight names the broken node of a job, and the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pretrain.config import ConfigError, NoSpace, load_config
from pretrain.launcher.preflight import STAGES, check_nodes
from pretrain.launcher.supervise import Signals
from pretrain.rundir.attempts import Attempt, AttemptRecord, Preflight, read_attempts
from pretrain.rundir.jobs import LaunchRecord
from tests.end_to_end.commands import ON_CPU, ROOT, executable, wait_for
from tests.slurm.cluster import Cluster

LIMIT = 120.0
"""Long enough for a busy machine; no test waits for it."""
# Runs the processes' own code without torch, which takes most of their time. A test changes a part.
FAKE = f"""#!{sys.executable}
import os, signal, sys, time
from pathlib import Path
import pretrain.launcher.preflight as it
node = os.environ["SLURMD_NODENAME"]
it._import_torch = it._check_architecture = it._check_memory = lambda: None
it._find_device = it._multiply = it._add_up = lambda *arguments: None
# CHANGE
it.main(Path(sys.argv[3]), sys.argv[4], False)
sys.stdin.read()
os._exit(0)
"""


class Bench:
    """A job of four nodes, on which a test runs preflights from the login node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        done = cluster.run(
            *("sbatch", "--parsable", "--no-kill", "--nodes=4", "--ntasks-per-node=2"),
            *(f"--output={folder}/job.log", "--wrap=sleep 1000"),
        )
        self.job_id = done.stdout.strip()
        cluster.wait_for_job(self.job_id, ["RUNNING"])
        listed = cluster.job(self.job_id)["NodeList"]
        self.nodes = cluster.run("scontrol", "show", "hostnames", listed).stdout.split()
        self.run = folder / "run"

    def python(self, text: str) -> Path:
        path = self.folder / "bin/python"
        path.parent.mkdir(exist_ok=True)
        return executable(path, text)

    def fake(self, change: str = "") -> Path:
        return self.python(FAKE.replace("# CHANGE", change))

    def check(
        self,
        python: Path | str = sys.executable,
        per_node: int = 1,
        nodes: int = 4,
        signals: Signals | None = None,
        limit: float = LIMIT,
    ) -> dict[str, str]:
        """Check the nodes of the job, as the job itself does before an attempt."""
        settings = [f"run.directory={self.run}", f"recovery.preflight_seconds={limit}"]
        config = load_config(ROOT / "configs/demo.toml", settings)
        # As `Job.step` makes it for the nodes that train, which are fewer by a spare.
        count = nodes - 1
        words = ("srun", f"--nodes={count}", f"--ntasks-per-node={per_node}", "--cpus-per-task=1")
        step = (*words, f"--ntasks={count * per_node}", "--kill-on-bad-exit=1", "--label")
        launch = LaunchRecord(step, str(python), count * per_node, count, (), {"gpus_per_node": 0})
        attempt = Attempt.begin(self.run)
        signals = signals or Signals()
        try:
            return check_nodes(launch, config, self.nodes[:nodes], attempt, self.job_id, signals)
        finally:
            attempt.end("failed", 1, "a test", 0)

    @property
    def record(self) -> AttemptRecord:
        return read_attempts(self.run)[-1]

    @property
    def found(self) -> Preflight:
        assert self.record.preflight
        return self.record.preflight

    def hide(self, node: str, folder: Path) -> None:
        """Have a node see an empty folder in this one's place."""
        pid = self.cluster._init(node)
        mount = ["nsenter", "-t", str(pid), "-m", "mount", "-t", "tmpfs", "none", str(folder)]
        subprocess.run(mount, check=True)

    def show(self, node: str, folder: Path) -> None:
        pid = self.cluster._init(node)
        subprocess.run(["nsenter", "-t", str(pid), "-m", "umount", str(folder)], check=True)

    def check_nothing_is_left(self) -> None:
        """Check that no process, no step and no hidden file of the preflight is left."""
        batch = f"{self.job_id}.batch"
        steps = ("squeue", "--steps", "--noheader", f"--jobs={self.job_id}", "--format=%i")
        wait_for(lambda: self.cluster.run(*steps).stdout.split() == [batch])
        wait_for(lambda: not self.cluster.step_processes(self.job_id, "preflight"))
        assert [path.name for path in self.record.directory.glob(".*")] == []


@pytest.fixture
def bench(cluster: Cluster, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(cluster, tmp_path)
    # The launcher runs inside the job.
    for name, value in {**ON_CPU, "SLURM_JOB_ID": made.job_id}.items():
        monkeypatch.setenv(name, value)
    return made


def test_nodes_that_are_well_are_all_fit(bench: Bench) -> None:
    """With torch, and a sum within each node and over all."""
    assert bench.check(per_node=2, nodes=2) == {}
    assert bench.found.nodes == tuple(bench.nodes[:2]) and bench.found.faults == {}
    said = (bench.record.directory / "preflight.log").read_text()
    for stage in STAGES:
        assert said.count(f'"stage": "{stage}"') == 4, said
    assert "error" not in said and bench.found.warnings == ()
    bench.check_nothing_is_left()


def test_broken_nodes_are_named(bench: Bench) -> None:
    python = bench.fake()
    blind, bare, node = bench.nodes[1:]
    bench.run.mkdir()
    bench.hide(blind, bench.run)
    bench.hide(bare, python.parent)
    faults = bench.check(python)
    bench.show(blind, bench.run)
    bench.show(bare, python.parent)
    assert set(faults) == {blind, bare} and bench.found.faults == faults
    assert "failed while it writes to the run's directory ([Errno 2] No such" in faults[blind]
    assert f"{python} -m pretrain cannot be started there" in faults[bare]
    assert "No such file or directory" in faults[bare]
    # One is killed, one stops, and all wait for each other.
    killed = bench.fake(f"it._multiply = lambda what: os.kill(os.getpid(), 9 * (node == '{node}'))")
    assert bench.check(killed) == {node: "process 3 ended while it multiplies matrices (Killed)"}
    stops = f"lambda what: node == '{node}' and os.kill(os.getpid(), signal.SIGSTOP)"
    faults = bench.check(bench.fake(f"it._multiply = {stops}"), limit=20)
    assert faults == {node: "process 3 does not answer while it multiplies matrices"}
    waits = "it._add_up = lambda folder, *rest: folder.name == 'all' and time.sleep(1000)"
    assert bench.check(bench.fake(waits), limit=20) == {}
    assert bench.found.warnings == ("the all-reduce of all nodes fails (no answer)",)
    bench.check_nothing_is_left()


def test_what_is_the_run_s_fault_excludes_nobody_and_a_signal_ends_the_check(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"all 4 nodes: /no/python -m pretrain cannot be start"):
        bench.check("/no/python")
    assert bench.found.faults == {} and "/no/python" in bench.found.refusal
    with pytest.raises(ConfigError, match=r"all 4 nodes: .*No module named nothing"):
        bench.check(bench.python("#!/bin/sh\nexec python3 -m nothing\n"))
    full = "def full(own): raise OSError(28, 'No space left on device')\nit._write_there = full"
    with pytest.raises(NoSpace, match="no space is left"):
        bench.check(bench.fake(full))
    # SIGTERM to the launcher, once the processes have begun.
    began = bench.folder / "began"
    never = bench.fake(f"it._multiply = lambda what: Path('{began}').touch() or time.sleep(1000)")
    with Signals(signal.SIGTERM) as signals:

        def tell() -> None:
            wait_for(began.exists, LIMIT)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        assert bench.check(never, signals=signals) == {} and signals.stops == 1
    thread.join()
    assert bench.record.preflight is None
    bench.check_nothing_is_left()


@pytest.mark.torture
def test_a_dead_node_is_named_before_slurm_knows_of_it(bench: Bench) -> None:
    node = bench.nodes[2]
    bench.cluster.kill(node)
    faults = bench.check(bench.fake())
    assert list(faults) == [node] and "Slurm starts no processes there (Comm" in faults[node]
    bench.check_nothing_is_left()
