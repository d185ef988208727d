"""Meet the other ranks of a job step, again and again: what a task of `srun` runs.

    python -m tests.slurm.meeting FOLDER NUM_STARTS [WHAT] [SECONDS]

Each start is a process of its own, forked from one that has imported torch, and meets in
FOLDER/<start>. What came of it is written to FOLDER/<start>/said-<rank>: "met", or the error. WHAT
is what rank 0 does: "meet", "die before" or "die after" publishing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pretrain import topology
from pretrain.config import ConfigError, RunFailed
from pretrain.rundir.files import replace_file
from pretrain.topology import Process, meet


def main(folder: Path, num_starts: int, what: str = "meet", seconds: float = 60) -> None:
    # Ranks that give up on another program wait no longer than this in addition.
    topology.CONNECT_SECONDS = min(topology.CONNECT_SECONDS, seconds)
    for start in range(num_starts):
        directory = folder / str(start)
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        os.environ["PRETRAIN_RENDEZVOUS"] = str(directory)
        rank = Process.from_environment().rank
        try:
            said = one_start(what, seconds)
        except (RunFailed, ConfigError) as error:
            said = f"{type(error).__name__}: {error}"
        replace_file(directory / f"said-{rank}", said)
        os._exit(0)


def one_start(what: str, seconds: float) -> str:
    process = Process.from_environment()
    if process.rank == 0 and what.startswith("die"):
        if what == "die after" and process.directory:
            topology._publish(process, process.directory, seconds)
        os._exit(1)
    store = meet(process, seconds)
    store.add("met", 1)
    # The store is rank 0's, so that has to stay until the last one has used it.
    while process.rank == 0 and store.add("met", 0) < process.world_size:
        time.sleep(0.01)
    return "met"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4], *map(float, sys.argv[4:5]))
