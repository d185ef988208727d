"""A checkpoint with a poisoned state, as a user meets it."""

from __future__ import annotations

import sys

import pytest
import torch

from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints, read_abandoned
from tests.end_to_end.commands import (
    LAUNCHER,
    forked,
    sets,
    succeeded,
    succeeds,
)

DAMAGED = """
from pretrain.optim import health
from pretrain.training import loop

health.LARGEST_WEIGHT = health.GROWTH = 1e38

def damaged(run, *args):
    step = queue_step(run, *args)
    if run.state.step == 8 and run.topology.rank == 0:
        run.optimizer.wait_for_weights()
        fragments = run.optimizer.state().fragments
        norm = next(f for f in fragments if "final_layernorm" in f.named.name)
        norm.tensors["master"][0] = 1e37
    return step

queue_step, loop.queue_step = loop.queue_step, damaged
from pretrain.__main__ import main
main()
"""


@pytest.fixture
def poisoned_run(workspace, config, request):
    """A run of 8 steps whose newest checkpoint, of step 8, holds a weight near 1e37.

    No check saw it, as where a bit flips on the way to the disk before it is hashed.
    """
    run = workspace / f"runs/{request.node.name}"
    program = [sys.executable, "-c", DAMAGED]
    settings = [f"run.directory={run}", "checkpoint.interval_steps=4", "checkpoint.keep=1"]
    forked([*program, "train", str(config), *sets(*settings)])
    assert [path.name[-1] for path in complete_checkpoints(run)] == ["4", "8"]
    return run, [str(config), *sets(*settings, "train.num_steps=12")]


def test_a_checkpoint_that_poisons_an_attempt_is_passed_over(poisoned_run, workspace, config):
    run, arguments = poisoned_run
    launched = succeeded(forked([*LAUNCHER, "local", *arguments, "--nproc", "1"]))
    assert [a.ended.outcome for a in read_attempts(run)][1:] == ["poisoned", "finished"]
    assert read_attempts(run)[1].diagnosis.kind == "reproduces"
    assert "starting again from step 4 (1 of 3 without progress)" in launched.text
    [(folder, why)] = read_abandoned(run)
    assert list(why.checkpoints) == ["step-00000008"] and why.step == 4
    assert "passed over: step-00000008: poisoned: 1 attempt that began with it" in why.reason
    # The history is that of a run to which nothing happened, bit for bit.
    whole = workspace / "runs/not_poisoned"
    settings = [f"run.directory={whole}", "checkpoint.interval_steps=4", "train.num_steps=12"]
    succeeds("train", config, *sets(*settings))
    first, second = (open_checkpoint(each / "checkpoints/step-00000012") for each in (run, whole))
    for kind in ("master", *first.config.moments):
        one, two = (load_global_state(each, kind) for each in (first, second))
        assert one and all(torch.equal(one[name], two[name]) for name in one)
    listed = succeeds("checkpoint", "list", run)
    assert f"abandoned/{folder.name}" in listed.out and "poisoned" in listed.out
