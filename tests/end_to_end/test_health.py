"""Poisoned state and ranks that differ, as a user meets them: exit code, message, what is saved."""

from __future__ import annotations

import socket
import sys

import pytest

from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import complete_checkpoints
from pretrain.rundir.paths import ExitCode
from tests.end_to_end.commands import ended, explained, fresh, sets, started

DAMAGED = """
import sys

from pretrain.training import loop

def damaged(run, *args):
    step = queue_step(run, *args)
    if run.state.step == STEP and run.topology.rank == 0:
        run.optimizer.wait_for_weights()
        fragments = run.optimizer.state().fragments
        norm = next(f for f in fragments if "final_layernorm" in f.named.name)
        norm.tensors["KIND"][0] = VALUE
    return step

queue_step, loop.queue_step = loop.queue_step, damaged
from pretrain.cli.main import main
main()
"""
POISONED_EXPORT = """
from pretrain.huggingface import export as command

def poisoned(checkpoint):
    weights = load(checkpoint)
    weights["decoder.layers.1.mlp.linear_fc1.weight"][3, 2] = float("nan")
    return weights

load, command.load_global_state = command.load_global_state, poisoned
from pretrain.cli.main import main
main()
"""


def _program(step: int, kind: str, value: str) -> list[str]:
    code = DAMAGED.replace("STEP", str(step)).replace("KIND", kind).replace("VALUE", value)
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("step", "kind", "value"),
    [(8, "master", 'float("nan")'), (4, "exp_avg_sq", 'float("inf")')],
)
def test_poisoned_state_ends_the_command_with_1(workspace, config, step, kind, value):
    run = workspace / f"runs/poisoned-{kind}"
    arguments = ["train", config, "--set", f"run.directory={run}"]
    done = fresh([*_program(step, kind, value), *map(str, arguments)])
    explained(done, 1, f"after step {step} the optimizer's state is not finite", f"{kind} of ")
    assert [path.name for path in complete_checkpoints(run)] == ["step-00000004"][: step == 8]
    assert [a.ended.outcome for a in read_attempts(run)] == ["failed"]


def test_tensor_ranks_that_differ_end_with_81(workspace, config, tmp_path):
    run = workspace / "runs/diverged"
    rendezvous = {"WORLD_SIZE": "2", "PRETRAIN_RENDEZVOUS": str(tmp_path)}
    settings = [f"run.directory={run}", "parallel.tensor_model_parallel_size=2"]
    command = [*_program(4, "master", "1.5"), "train", str(config)]
    command += sets(*settings)
    ranks = [started(command, rendezvous | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in (0, 1)]
    for done in map(ended, ranks):
        assert done.code == ExitCode.DIVERGED and "Traceback" not in done.err, done.err
        assert "error: after step 4 ranks differ in what must be equal. " in done.err
        assert "decoder.final_layernorm.weight (master): no majority among ranks 0 (" in done.err
        assert socket.gethostname() in done.err
    assert complete_checkpoints(run) == []
    [attempt] = read_attempts(run)
    assert (attempt.ended.outcome, attempt.ended.code) == ("diverged", ExitCode.DIVERGED)


def test_a_model_with_a_nan_is_not_exported(run, tmp_path):
    command = [sys.executable, "-c", POISONED_EXPORT, "export", str(run), str(tmp_path / "hf")]
    words = "1 of the 4096 elements of decoder.layers.1.mlp.linear_fc1.weight are not finite"
    explained(fresh(command), 2, words, "Export an earlier checkpoint")
    assert not (tmp_path / "hf").exists()
