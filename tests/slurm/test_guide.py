"""The commands of docs/guide.md for a cluster run as they are written, on the tests' cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints
from tests.end_to_end.commands import metrics, wait_for
from tests.guide import GUIDE, Block, Workspace, blocks
from tests.slurm.cluster import Cluster
from tests.slurm.runs import TWO_RANKS, write_site


# tests/end_to_end runs the guide's other commands in `make test`.
@pytest.mark.torture
def test_the_guide_s_job_is_sent_saved_and_goes_on_with_one_node(
    cluster: Cluster, tmp_path: Path
) -> None:
    found = blocks(GUIDE.read_text())
    workspace = Workspace(tmp_path, cluster.environment)
    workspace.write_files(found)
    # In place of the reader's own: the site of this cluster.
    write_site(tmp_path / "slurm/site.toml", **TWO_RANKS)
    workspace.run(Block("run", "", "sh", "pretrain data build small.toml\n", 0))

    run = tmp_path / "runs/cluster"
    steps = [block for block in found if block.kind == "slurm"]
    assert len(steps) == 3
    for block in steps:
        if "launcher cancel" in block.text:
            # As a reader does who has watched it train.
            wait_for(lambda: (run / "metrics.jsonl").exists() and metrics(run))
        done = workspace.run(block)
    assert "finished" in done.text
    outcomes = [attempt.ended.outcome for attempt in read_attempts(run) if attempt.ended]
    assert outcomes == ["stopped", "finished"]
    assert complete_checkpoints(run)[-1].name == "step-00000300"
    # The second job went on from what the first one had saved, in another layout.
    stopped, finished = read_attempts(run)
    assert stopped.ended and finished.owner.checkpoint_step == stopped.ended.step
    assert (stopped.owner.num_processes, finished.owner.num_processes) == (4, 2)
