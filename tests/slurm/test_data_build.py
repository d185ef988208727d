"""Build data sets on a real Slurm of several nodes, disturb the builds, and compare the bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import ConfigError, dump_config
from pretrain.data.build import build
from tests.end_to_end.commands import LAUNCHER, ON_CPU, ROOT, Done, ended, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.runs import write_site
from tests.unit.test_data_build import DOCUMENTS, config, contents, write_jsonl, write_text

# Runs as the tasks' Python. A task notes that it has begun, and on which node, and goes on when
# nothing holds it. It does so without torch, which it has no need of: importing it takes longer
# than these tasks.
PYTHON = """#!/bin/sh
echo $SLURMD_NODENAME > {hold}/begun.$SLURM_ARRAY_TASK_ID
while test -e {hold}/all || test -e {hold}/$SLURM_ARRAY_TASK_ID; do sleep 0.1; done
rm {hold}/begun.$SLURM_ARRAY_TASK_ID
PYTHONPATH={root}/modules:$PYTHONPATH exec {python} "$@"
"""
NO_TORCH = 'raise ModuleNotFoundError("no torch in a task", name="torch")\n'
SCONTROL = """#!/bin/sh
test "$*" = "show config" && echo "MaxArraySize            = {size}" || exec {scontrol} "$@"
"""


class Builds:
    """A corpus, the data set that a local build makes of it, and builds on the cluster."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        self.cluster, self.root = cluster, root
        self.config, self.hold, python = root / "config.toml", root / "hold", root / "python"
        self.hold.mkdir()
        (root / "modules").mkdir()
        (root / "modules/torch.py").write_text(NO_TORCH)
        python.write_text(PYTHON.format(hold=self.hold, python=sys.executable, root=root))
        python.chmod(0o755)
        # A task takes a whole node, so four tasks are on four nodes.
        whole = {"nodes": 4, "time_limit": "10", "sbatch_arguments": ["--exclusive"]}
        self.site = write_site(root / "site.toml", python=str(python), **whole)
        write_text(root)
        made = config(root)
        self.config.write_text(dump_config(made))
        build(made)
        self.expected = contents(root / "data")

    def start(
        self, name: str, *options: object, nodes: int = 4, **environment: str
    ) -> subprocess.Popen[str]:
        """Start `launcher data build` of a data set called `name`, in a session of its own."""
        words = ["data", "build", self.config, "--site", self.site, "--nodes", nodes]
        words += ["--set", f"data.directory={json.dumps(str(self.root / name))}", *options]
        return subprocess.Popen(
            [*LAUNCHER, *map(str, words)],
            cwd=ROOT,
            env=os.environ | self.cluster.environment | ON_CPU | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, name: str, *options: object, **others: Any) -> Done:
        return ended(self.start(name, *options, **others))

    def check(self, done: Done, name: str) -> None:
        """Check that a build has succeeded, is what it should be, and left nothing."""
        assert done.code == 0, done.text
        assert contents(self.root / name) == self.expected
        assert not (self.root / f".building-{name}").exists() and self.queued() == []

    def queued(self) -> list[str]:
        """Return the ids of the array tasks in the queue."""
        return self.cluster.run("squeue", "--noheader", "--array", "--format=%i").stdout.split()

    def held(self, count: int) -> set[str]:
        """Wait until `count` tasks are held, and return their nodes."""

        def all_begun() -> set[str]:
            begun = [path.read_text().strip() for path in self.hold.glob("begun.*")]
            return set(begun) if len(begun) == count and all(begun) else set()

        wait_for(all_begun)
        return all_begun()

    def hold_tasks(self, *names: str) -> None:
        for path in self.hold.iterdir():
            path.unlink()
        for name in names:
            (self.hold / name).touch()

    def release(self) -> None:
        for path in self.hold.iterdir():
            if not path.name.startswith("begun"):
                path.unlink()

    def kill_held(self, index: int) -> None:
        """Kill one held array task, as the system does when memory runs out."""
        [pid] = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if self._is_held(path, index)
        ]
        os.kill(pid, signal.SIGKILL)

    def _is_held(self, path: Path, index: int) -> bool:
        try:
            return (
                f"SLURM_ARRAY_TASK_ID={index}".encode() in path.read_bytes().split(b"\0")
                and f"{self.root}/python".encode() in path.with_name("cmdline").read_bytes()
            )
        except OSError:
            return False


@pytest.fixture(scope="module")
def module_builds(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(cluster, tmp_path_factory.mktemp("builds"))


@pytest.fixture
def builds(module_builds: Builds) -> Iterator[Builds]:
    module_builds.hold_tasks()
    yield module_builds
    module_builds.release()
    module_builds.cluster.run("scancel", "--user=root")
    wait_for(lambda: not module_builds.queued())


def test_a_build_on_four_nodes_survives_its_builder_and_a_killed_task(builds: Builds) -> None:
    """Interrupt it, kill it and a task of it; what the last command builds is byte-identical."""
    builds.hold_tasks("all")
    first = builds.start("four")
    assert len(builds.held(4)) == 4
    second = builds.run("four")
    assert second.code == 2 and "is being built by" in second.err, second.text
    os.killpg(first.pid, signal.SIGINT)
    interrupted = ended(first)
    assert interrupted.code == 130 and "cancelled" in interrupted.err, interrupted.text
    assert builds.queued() == []

    builds.hold_tasks("all")
    third = builds.start("four")
    builds.held(4)
    os.killpg(third.pid, signal.SIGKILL)
    ended(third)
    assert len(builds.queued()) == 4

    builds.kill_held(1)
    fourth = builds.start("four")
    # Until the tasks are released, it says no more.
    assert fourth.stderr and "left by an earlier command" in fourth.stderr.readline()
    builds.release()
    done = ended(fourth)
    # The killed one alone is done again, then the tokens of all.
    assert re.findall(r"job \d+: (\d) array tasks", done.err) == ["1", "5"], done.err
    builds.check(done, "four")


def arrays_of(builds: Builds, size: int) -> dict[str, str]:
    """Return an environment in which Slurm says that an array may have `size` tasks."""
    scontrol = shutil.which("scontrol", path=builds.cluster.environment["PATH"])
    programs = builds.root / f"programs-{size}"
    programs.mkdir()
    (programs / "scontrol").write_text(SCONTROL.format(size=size, scontrol=scontrol))
    (programs / "scontrol").chmod(0o755)
    return {"PATH": f"{programs}:{builds.cluster.environment['PATH']}"}


def test_more_tasks_than_an_array_takes(builds: Builds) -> None:
    name = "é a,b $(touch x) %j '*"
    done = builds.run(name, **arrays_of(builds, 2))
    assert re.findall(r"job \d+: (\d) array tasks", done.err) == ["2", "2"], done.text
    builds.check(done, name)


def test_a_bad_document_is_named_as_in_a_local_build(builds: Builds, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{damaged\n")
    made = {"source": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}
    with pytest.raises(ConfigError) as local:
        build(config(tmp_path, **made))
    options = [f"--set=data.{key}={json.dumps(value)}" for key, value in made.items()]
    done = builds.run("bad", *options)
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.code == 2 and errors == [f"error: {local.value}"], done.text
    assert "a.jsonl:" in errors[0] and builds.queued() == []


def test_jobs_that_slurm_refuses_are_one_error(builds: Builds) -> None:
    site = builds.root / "other.toml"
    site.write_text(builds.site.read_text().replace('"main"', '"mian"'))
    done = builds.run("refused", "--site", site)
    errors = [line for line in done.err.splitlines() if "error" in line]
    assert done.code == 1 and len(errors) == 1 and "partition" in errors[0], done.text


# ---- long ones -----------------------------------------------------------------------------------
@pytest.mark.torture
@pytest.mark.parametrize(
    "disturb",
    ["cancel", "requeue", "controller", "node", "watcher", "terminate", "kill", "kill a task"],
)
def test_a_disturbed_build_goes_on(builds: Builds, disturb: str) -> None:
    builds.hold_tasks("1", "2")
    process = builds.start(disturb)
    builds.held(2)
    [job] = {each.partition("_")[0] for each in builds.queued()}
    if disturb == "cancel":
        assert builds.cluster.run("scancel", job).returncode == 0
    elif disturb == "requeue":
        assert builds.cluster.run("scontrol", "requeue", f"{job}_1").returncode == 0
        builds.release()
    elif disturb == "controller":
        builds.cluster.kill_controller()
        time.sleep(5)
        builds.cluster.start_controller()
        builds.release()
    elif disturb == "node":
        node = (builds.hold / "begun.1").read_text().strip()
        builds.cluster.kill_node(node)
        builds.release()
    elif disturb == "kill a task":
        builds.kill_held(1)
        builds.release()
    elif disturb in ("terminate", "kill"):
        # The builder alone. Whoever waits for the jobs cancels them.
        os.kill(process.pid, signal.SIGTERM if disturb == "terminate" else signal.SIGKILL)
        wait_for(lambda: builds.queued() == [])
    else:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
    done = ended(process)
    if disturb in ("terminate", "kill"):
        assert done.code < 0, done.text
    elif disturb in ("cancel", "watcher", "kill a task"):
        assert done.code == 1 and "error: " in done.err, done.text
        assert ("1 of 4 tasks" in done.err) == (disturb == "kill a task"), done.text
    if done.code:
        builds.release()
        done = builds.run(disturb)
    builds.check(done, disturb)
