"""Submit runs whose ranks are a small script that reports and saves as `pretrain train` does.

For tests of what the launcher does about ranks and nodes, where training itself is not the point.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrain.launcher.agent import MODULE as AGENT
from pretrain.rundir.paths import RunPaths
from tests.end_to_end.commands import LAUNCHER, ROOT, Done, executable, sets, succeeded, wait_for
from tests.rank_script import BEGIN
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Run, write_site

LAST = 320
"""Steps of configs/demo.toml."""
# Ranks take steps while every one of them does, and until RUN/finish exists. Rank 0 saves on the
# signals of `pretrain train`; on SIGTERM only after RUN/slow is gone.
BE_AGENT = """
import os, sys
if sys.argv[2:3] == ['pretrain.launcher.agent']:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
STEPS = """
rank, ranks = int(os.environ['SLURM_PROCID']), int(os.environ['SLURM_NTASKS'])
name, node = os.path.basename(run), os.uname().nodename
def exists(name):
    return os.path.exists(run + '/' + name)
def save_slowly():
    phase('saving')
    while exists('slow'):
        time.sleep(0.05)
    save()
print('rank', rank, 'on', node, 'at step', step, flush=True)
others = [attempt + f'/beat-{other}' for other in range(ranks)]
if not exists('bad-' + node):
    open(others[rank], 'w').close()
    # As at their rendezvous. One that Slurm ends before the others came saves nothing.
    while not all(map(os.path.exists, others)):
        time.sleep(0.05)
if rank == 0:
    # Of lost steps, as training drops them.
    write(run + '/metrics.jsonl', '')
    phase('training')
while True:
    if exists('bad-' + node):
        sys.exit(1)
    open(others[rank], 'w').close()
    time.sleep(0.05)
    if all(os.path.exists(o) and time.time() - os.stat(o).st_mtime < 1 for o in others):
        step = min(step + 1, LAST - 1)
        print(f'{name}, attempt {number}: rank {rank} took step {step}', flush=True)
        if rank == 0:
            progress('training')
            record = dict(step=step, loss_nats=2.5, step_seconds=0.1, tokens_per_second=4000.0)
            open(run + '/metrics.jsonl', 'a').write(json.dumps(record) + chr(10))
    if rank == 0:
        if exists('checkpoint'):
            os.remove(run + '/checkpoint')
            save_slowly()
            phase('training')
        if asked or exists('finish'):
            step = step if asked else LAST
            save_slowly()
            phase('ending')
            write(attempt + '/done', '')
    if os.path.exists(attempt + '/done'):
        # As pretrain/cli/__init__.py: while Python ends in order it has no handlers.
        sys.stdout.flush()
        os._exit((75 if asked[0] == signal.SIGUSR1 else 80) if asked else 0)
"""


def prepare(folder: Path) -> str:
    """Write the ranks' Python and the data that they do not read; return its path."""
    text = f"#!{sys.executable}{BE_AGENT}{BEGIN}{STEPS.replace('LAST', str(LAST))}"
    for split in ("train", "validation"):
        (folder / "data" / split).mkdir(parents=True)
        (folder / "data" / split / "manifest.json").touch()
    return str(executable(folder / "rank", text))


class Script:
    """Submits runs of scripted ranks, one on each node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.rank = prepare(folder)

    def submit(
        self,
        name: str,
        *settings: str,
        nodes: int = 2,
        partition: str = "main",
        time: str = "30",
        options: tuple[str, ...] = (),
        container: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ScriptedRun:
        path = write_site(
            self.folder / f"{name}.site.toml",
            partition=partition,
            time_limit=time,
            python=self.rank,
            sbatch_arguments=list(options),
            container=list(container),
            environment=environment or {},
        )
        run = self.folder / "runs" / name
        given = (
            f"run.directory={run}",
            f"data.directory={self.folder}/data",
            "recovery.hang_seconds=3",
            "recovery.preflight_seconds=0",
            *settings,
        )
        options = sets(*given)
        demo = ROOT / "configs/demo.toml"
        words = ("submit", demo, "--site", path, "--nodes", nodes, "--save-before", 1, *options)
        ran = self.cluster.run(*LAUNCHER, *words, cwd=self.folder)
        succeeded(Done(ran.returncode, ran.stdout, ran.stderr))
        return ScriptedRun(self.cluster, run)


class ScriptedRun(Run):
    """A run of scripted ranks."""

    def ask(self, what: str) -> None:
        """Have the ranks do something: "finish", "checkpoint", "slow", "bad-NODE"."""
        (self.directory / what).touch()

    def wait_for_training(self, attempt: int) -> dict[int, tuple[int, str]]:
        """Wait until all ranks of an attempt take steps, and return rank -> (process id, node)."""
        log = RunPaths(self.directory).attempt_log(attempt)
        wait_for(lambda: self.trains(attempt))
        assert log.exists()
        return self.ranks()

    def trains(self, attempt: int) -> bool:
        """Return True once an attempt has taken a few steps, which do not go beyond the last."""
        record = self.going_on(attempt)
        return record is not None and record.progress is not None and record.progress.count > 2

    def ranks(self) -> dict[int, tuple[int, str]]:
        """Return the ranks' processes: rank -> (process id, node)."""
        found = {}
        for pid, (node, words) in self.cluster.step_processes(self.job_id, " train ").items():
            if AGENT in words:
                continue
            # OSError: the process has ended meanwhile.
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/environ").read_bytes().decode()
                variables = dict(word.split("=", 1) for word in text.split("\0") if "=" in word)
                if "SLURM_PROCID" in variables and "PRETRAIN_ATTEMPT" in variables:
                    found[int(variables["SLURM_PROCID"])] = (pid, node)
        return found

    def nodes(self) -> set[str]:
        """Return the nodes on which ranks run."""
        return {node for _, node in self.ranks().values()}
