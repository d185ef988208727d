"""Submit runs to the tests' cluster, disturb them and compare their results."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w

from pretrain.launcher.agent import MODULE as AGENT
from pretrain.rundir.attempts import AttemptRecord, Ended, read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints
from tests.end_to_end.commands import (
    LAUNCHER,
    ON_CPU,
    ROOT,
    Done,
    metrics,
    running_ranks,
    sets,
    succeeded,
    wait_for,
)
from tests.end_to_end.conftest import CONFIG as SMALL
from tests.slurm.cluster import Cluster

SITE = {
    "name": "tests",
    "partition": "main",
    "nodes": 16,
    "tasks_per_node": 1,
    "cpus_per_node": 1,
    "time_limit": "30",
}
TWO_RANKS = {"tasks_per_node": 2, "cpus_per_node": 2}

CONFIG = """
base = "small.toml"
parallel.world_size = 2
data.sequence_length = 64
train.num_steps = {steps}
checkpoint.interval_steps = 15
evaluation = {{lengths = [64], interval_steps = 1000}}
logging.interval_steps = 10
recovery = {{hang_seconds = 20, preflight_seconds = 0}}
batch = {{micro_batch_size = 8, global_batch_size = 16}}
model.hidden_dropout = 0.1
"""
STEPS = 150
"""More than a test waits for, so that a run has not ended when it is disturbed."""
NO_PREFLIGHT = ("--set", "recovery.preflight_seconds=0")
"""For tests whose ranks are scripts, which cannot be the preflight's processes as well."""


AS_AGENT = f'test "$2" = {AGENT} && exec {sys.executable} "$@"\n'
"""A line of a shell script that stands in for Python: the agent of a rank is the real one."""


def write_site(path: Path, **values: Any) -> Path:
    """Write the site file of the tests' cluster, with other values in it."""
    path.write_text(tomli_w.dumps(SITE | values))
    return path


def write_configs(folder: Path, base: Path, runs: dict[str, str]) -> list[Path]:
    """Write a config for each run: its directory, what it has of its own in TOML, and the base."""
    paths = []
    for directory, own in runs.items():
        paths.append(folder / f"{directory.replace('/', '-')}.toml")
        paths[-1].write_text(f'base = "{base}"\nrun.directory = "{directory}"\n{own}\n')
    return paths


def with_scripted_ranks(words: Sequence[object]) -> list[object]:
    """Return the words of a `launcher` command, without the preflight where it sends training."""
    options = NO_PREFLIGHT if words[0] in ("submit", "sweep") else ()
    return [words[0], *options, *words[1:]]


class Runs:
    """Make runs of one config on one site, each in its own directory."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path) -> None:
        self.cluster, self.folder, self.data = cluster, folder, data
        self.config = folder / "run.toml"
        (folder / "small.toml").write_text(SMALL.format(folder=folder, data=data))
        self.config.write_text(CONFIG.format(steps=STEPS))
        self.site = write_site(folder / "site.toml", **TWO_RANKS)

    def launcher(self, *arguments: object) -> Done:
        """Run `launcher` with these arguments."""
        done = self.cluster.run(*LAUNCHER, *arguments, environment=ON_CPU, cwd=ROOT)
        return Done(done.returncode, done.stdout, done.stderr)

    def options(self, name: str, *settings: str) -> list[str]:
        """Return the options of `launcher submit` and `launcher local` for the run `name`."""
        return sets(f"run.directory={self.folder}/runs/{name}", *settings)

    def submit(self, name: str, *settings: str, **how: Any) -> Run:
        """Submit the run `name` on `nodes` nodes."""
        succeeded(self.try_to_submit(name, *settings, **how))
        return Run(self.cluster, self.folder / "runs" / name)

    def try_to_submit(
        self, name: str, *settings: str, nodes: int = 2, config: Any = None, options: Any = ()
    ) -> Done:
        """Run `launcher submit` and return how it ended."""
        words = ["submit", config or self.config, "--site", self.site, "--nodes", nodes, *options]
        return self.launcher(*words, *self.options(name, *settings))

    def local(self, name: str, nproc: int, *settings: str) -> Callable[[], Path]:
        """Start the run `name` on this machine, with `nproc` processes.

        Returns:
            A function that waits for the run's end and returns its directory.
        """
        started = ExitStack()
        words = ["train", self.config, *self.options(name, *settings)]
        ranks = started.enter_context(running_ranks(words, nproc))

        def directory() -> Path:
            with started:
                for done in ranks.done():
                    succeeded(done)
            return self.folder / "runs" / name

        return functools.cache(directory)


class Run:
    """A run that was submitted."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        lines = (directory / "jobs.jsonl").read_text().splitlines()
        self.job_id: str = json.loads(lines[-1])["job_id"]

    @property
    def launch(self) -> dict[str, Any]:
        """The content of RUN/launch/launch.json."""
        content: dict[str, Any] = json.loads((self.directory / "launch/launch.json").read_text())
        return content

    def send_again(self) -> str:
        """Submit the same script with plain sbatch, past the launcher; return the new job's id."""
        script = self.directory / "launch/train.sbatch"
        done = self.cluster.run("sbatch", "--parsable", *self.launch["sbatch"], script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @property
    def attempts(self) -> list[AttemptRecord]:
        return read_attempts(self.directory)

    def going_on(self, attempt: int) -> AttemptRecord | None:
        """Return attempt number `attempt` once it has begun; it fails if it has ended."""
        records = self.attempts
        assert len(records) <= attempt, [record.ended for record in records]
        assert len(records) < attempt or records[-1].ended is None, records[-1].ended
        return records[-1] if len(records) == attempt else None

    def wait_for_step(self, attempt: int, steps: int) -> None:
        """Wait until attempt number `attempt` has taken `steps` steps of its own."""

        def reached() -> bool:
            record = self.going_on(attempt)
            if record is None or record.progress is None or record.progress.phase != "training":
                return False
            first = next(mark.step for mark in record.phases if mark.phase == "training")
            return record.progress.step >= first + steps

        wait_for(reached)

    def wait_for_ranks(self, attempt: int, count: int = 2) -> None:
        """Wait until the ranks of attempt number `attempt` have processes, which may do nothing."""
        wait_for(lambda: len(self.attempts) == attempt and len(self.ranks()) == count)

    def wait_for_end(self, attempt: int) -> Ended:
        """Wait for the end of attempt number `attempt` and return how it ended."""
        wait_for(lambda: len(self.attempts) >= attempt and self.attempts[attempt - 1].ended)
        ended = self.attempts[attempt - 1].ended
        assert ended is not None
        return ended

    @property
    def outcomes(self) -> list[str | None]:
        """Return how each attempt ended; None for one that was killed or goes on."""
        return [attempt.ended.outcome if attempt.ended else None for attempt in self.attempts]

    def ranks(self) -> dict[int, tuple[int, str]]:
        """Return the ranks' processes: rank -> (process id, node)."""
        found = {}
        processes = self.cluster.step_processes(self.job_id, "-m pretrain train")
        agents = {pid for pid, (_, words) in processes.items() if AGENT in words}
        for pid, (node, _) in processes.items():
            with contextlib.suppress(OSError, KeyError):
                words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                variables = dict(word.split("=", 1) for word in words if "=" in word)
                # A rank may have children with its own command line.
                if _parent(pid) in agents:
                    found[int(variables["SLURM_PROCID"])] = (pid, node)
        return found

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process of one rank alone."""
        os.kill(self.ranks()[rank][0], number)

    def said(self, attempt: int) -> str:
        """Return what the ranks of an attempt, and srun, have printed."""
        return (self.directory / f"logs/attempt-{attempt:04d}.log").read_text()

    def job_said(self, job_id: str | None = None) -> str:
        """Return what a job of this run has printed: its script, the supervisor and rank 0."""
        return (self.directory / f"logs/slurm-{job_id or self.job_id}.log").read_text()


def _parent(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def weights(run: Path, step: int = STEPS) -> dict[str, bytes]:
    """Return the files of the newest checkpoint, which has to be that of `step`.

    Equal bytes are equal weights and Adam moments.
    """
    checkpoint = complete_checkpoints(run)[-1]
    assert checkpoint.name == f"step-{step:08d}", checkpoint
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def losses(run: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every training step in metrics.jsonl."""
    return [
        (record["step"], record["loss_nats"])
        for record in metrics(run)
        if "evaluation" not in record
    ]
