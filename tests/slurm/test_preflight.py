"""Check on a real Slurm that the preflight names the broken node of a job, and the cause."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.config import ConfigError, NoSpace, load_config
from pretrain.launcher.preflight import check_nodes
from pretrain.launcher.supervise import Signals
from pretrain.rundir.attempts import Attempt, AttemptRecord, Preflight, read_attempts
from pretrain.rundir.jobs import LaunchRecord
from tests.end_to_end.commands import ON_CPU, ROOT, wait_for
from tests.slurm.cluster import Cluster

LIMIT = 120.0
"""Long enough for a busy machine; no test waits for it."""
PYTHON = f"""#!/bin/sh
exec {sys.executable} "$@"
"""
# Answers as `pretrain preflight` does, and imports nothing for it.
STAND_IN = f"""#!{sys.executable}
import json, os, sys, threading, time
doing = ["started"]
def say(stage, **found):
    line = {{"stage": stage, "node": os.environ["SLURMD_NODENAME"], "at": time.time(), **found}}
    os.write(1, (json.dumps(line) + "\\n").encode())
def tick():
    while True:
        say("alive", during=doing[0])
        time.sleep(0.5)
threading.Thread(target=tick, daemon=True).start()
say("started")
for doing[0] in ("directory", "torch"):
    say(doing[0])
doing[0] = "device"
say("device", count=0, free=10**12)
doing[0] = "gemm"
say("gemm", seconds=0.01)
doing[0] = "waiting"
say("ready", address="localhost", port=1)
for line in sys.stdin:
    say("round " + json.loads(line)["round"], seconds=0.01)
os._exit(0)
"""

# Suspends `pretrain preflight` on one node at the moment at which it is told to add up.
SUSPENDED = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = ["{sys.executable}", *sys.argv[1:]]
if os.environ["SLURMD_NODENAME"] != "@NODE@":
    os.execv(command[0], command)
child = subprocess.Popen(command, stdin=subprocess.PIPE)
sys.stdin.readline()
os.kill(child.pid, signal.SIGSTOP)
child.wait()
"""

# Runs `pretrain preflight`, which never finishes its product of matrices.
HELD = f"""#!{sys.executable}
import runpy, sys, time
import pretrain.cli.preflight
pretrain.cli.preflight._multiply = lambda place: time.sleep(1000)
sys.argv = sys.argv[2:]
runpy.run_module("pretrain", run_name="__main__")
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
        words = cluster.run("scontrol", "show", "hostnames", listed).stdout.split()
        self.nodes = words
        self.run = folder / "run"

    def python(self, text: str) -> Path:
        path = self.folder / "bin/python"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

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
        words = (
            "srun",
            f"--nodes={count}",
            f"--ntasks-per-node={per_node}",
            "--cpus-per-task=1",
        )
        step = (*words, f"--ntasks={count * per_node}", "--kill-on-bad-exit=1", "--label")
        launch = LaunchRecord(
            step, str(python), count * per_node, count, {}, (), {"gpus_per_node": 0}
        )
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

    def when(self, stage: str, node: str, then: Callable[[int], object]) -> threading.Thread:
        """Act on the process of a node as soon as the next check says that a stage is done."""

        number = len(read_attempts(self.run)) + 1

        def said() -> bool:
            log = self.run / f"attempts/{number:04d}/preflight.log"
            lines = log.read_text().splitlines() if log.exists() else []
            return any(f'"stage": "{stage}", "node": "{node}"' in line for line in lines)

        def act() -> None:
            wait_for(said, LIMIT)
            for pid, (at, _) in self.cluster.step_processes(self.job_id, "preflight").items():
                if at == node:
                    then(pid)

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        return thread

    def check_nothing_is_left(self) -> None:
        """Check that no process, no step and no hidden file of the preflight is left."""
        batch = f"{self.job_id}.batch"
        steps = ("squeue", "--steps", "--noheader", f"--jobs={self.job_id}", "--format=%i")
        wait_for(lambda: self.cluster.run(*steps).stdout.split() == [batch], 30)
        wait_for(lambda: not self.cluster.step_processes(self.job_id, "preflight"), 30)
        assert [path.name for path in self.record.directory.glob(".*")] == []


@pytest.fixture
def bench(cluster: Cluster, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(cluster, tmp_path)
    # The launcher runs inside the job.
    for name, value in {**ON_CPU, "SLURM_JOB_ID": made.job_id}.items():
        monkeypatch.setenv(name, value)
    return made


def test_nodes_that_are_well_are_all_fit(bench: Bench) -> None:
    assert bench.check(per_node=2, nodes=2) == {}
    assert bench.found.nodes == tuple(bench.nodes[:2]) and bench.found.faults == {}
    said = (bench.record.directory / "preflight.log").read_text()
    for stage in ("started", "directory", "torch", "device", "gemm", "ready", "round node"):
        assert said.count(f'"stage": "{stage}"') == 4
    # The spare nodes are part of the sum over all.
    assert said.count('"stage": "round all"') == 4 and "error" not in said
    bench.check_nothing_is_left()


def test_a_node_without_the_directory_and_one_without_python(bench: Bench) -> None:
    python = bench.python(PYTHON)
    blind, bare = bench.nodes[1], bench.nodes[2]
    bench.run.mkdir()
    bench.hide(blind, bench.run)
    bench.hide(bare, python.parent)
    faults = bench.check(python)
    bench.show(blind, bench.run)
    bench.show(bare, python.parent)
    assert set(faults) == {blind, bare}
    assert f"{bench.run} cannot be seen or written to there" in faults[blind]
    assert f"{python} -m pretrain cannot be started there" in faults[bare]
    assert "No such file or directory" in faults[bare] and bench.found.faults == faults
    # The others have added up without them.
    said = (bench.record.directory / "preflight.log").read_text()
    assert said.count('"stage": "round all"') == 2
    bench.check_nothing_is_left()


def test_a_suspended_process_is_found_while_the_others_wait_for_it(bench: Bench) -> None:
    node = bench.nodes[1]
    faults = bench.check(bench.python(SUSPENDED.replace("@NODE@", node)), nodes=3)
    assert list(faults) == [node] and "gives no sign of life any more" in faults[node]
    said = (bench.record.directory / "preflight.log").read_text()
    assert said.count('"stage": "ready"') == 3 and said.count('"stage": "round all"') == 0
    bench.check_nothing_is_left()


def test_a_killed_process_is_named(bench: Bench) -> None:
    node = bench.nodes[3]
    dies = f'os.environ["SLURMD_NODENAME"] == "{node}" and os.kill(os.getpid(), 9)\nsay("gemm"'
    faults = bench.check(bench.python(STAND_IN.replace('say("gemm"', dies)))
    assert faults == {node: "process 3 ended while it multiplies matrices (Killed)"}


@pytest.mark.torture
def test_a_dead_node_is_named_before_and_after_slurm_knows_of_it(bench: Bench) -> None:
    python, node = bench.python(STAND_IN), bench.nodes[2]
    bench.cluster.kill_node(node)
    faults = bench.check(python)
    assert list(faults) == [node] and "Slurm starts no processes there (Comm" in faults[node]
    wait_for(lambda: bench.cluster.node_states().get(node, "").startswith("down"), 60)
    faults = bench.check(python)
    assert faults == {node: "Slurm starts no processes there (the node is down*)"}
    bench.check_nothing_is_left()


def test_what_no_node_can_start_is_refused_and_excludes_nobody(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"all 4 nodes: /no/python -m pretrain cannot be start"):
        bench.check("/no/python")
    assert bench.found.faults == {} and "/no/python" in bench.found.refusal
    with pytest.raises(ConfigError, match=r"all 4 nodes: .*No module named nothing"):
        bench.check(bench.python("#!/bin/sh\nexec python3 -m nothing\n"))


def test_a_full_disk_is_the_runs_fault(bench: Bench) -> None:
    bench.run.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=750", "none", bench.run], check=True
    )
    try:
        with pytest.raises(NoSpace, match=r"a checkpoint takes 15.7 MB"):
            bench.check("/no/python")
        # What an unfinished save has left is removed before the next save.
        shutil.rmtree(bench.run / "attempts")
        subprocess.run(["mount", "-o", "remount,size=20m", bench.run], check=True)
        left = bench.run / "checkpoints/.step-00000001.0001-0123456789abcdef.partial"
        left.mkdir(parents=True)
        (left / "rank-0.safetensors").write_bytes(b"0" * 10_000_000)
        assert bench.check(bench.python(STAND_IN)) == {}
        assert any("less than two checkpoints" in line for line in bench.found.warnings)
    finally:
        subprocess.run(["umount", bench.run], check=True)


def test_a_signal_ends_the_check_at_once(bench: Bench) -> None:
    """SIGTERM to the launcher, and Slurm's warning before the limit, which the processes get."""
    never = bench.python(STAND_IN.replace('say("ready"', 'time.sleep(1000); say("ready"'))
    with Signals(signal.SIGTERM) as signals:
        thread = bench.when(
            "gemm", bench.nodes[1], lambda pid: os.kill(os.getpid(), signal.SIGTERM)
        )
        assert bench.check(never, signals=signals) == {} and signals.stops == 1
    thread.join()
    assert bench.record.preflight is None
    bench.check_nothing_is_left()
    with Signals() as signals:
        warn = ("scancel", "--signal=USR1", bench.job_id)
        thread = bench.when("started", bench.nodes[1], lambda pid: bench.cluster.run(*warn))
        assert bench.check(bench.python(HELD), signals=signals) == {}
        assert set(signals.received) == {signal.SIGUSR1}
    thread.join()
    bench.check_nothing_is_left()


@pytest.mark.torture
def test_a_slow_machine_is_warned_of_and_trains(bench: Bench) -> None:
    slow = STAND_IN.replace('say("gemm"', 'while True: pass\nsay("gemm"')
    slow = slow.replace("during=doing[0]", 'during="gemm", busy=time.monotonic()')
    assert bench.check(bench.python(slow), limit=6) == {}
    assert bench.found.faults == {} and len(bench.found.warnings) == 4
    bench.check_nothing_is_left()
