"""What a failed check replays, what it finds out, and where the run goes on."""

from __future__ import annotations

import pytest
import torch

from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.rundir.attempts import read_attempts
from pretrain.rundir.checkpoints import checkpoint_directory
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import RunPaths
from tests.conftest import ALL_LAYOUTS, tiny_config
from tests.distributed import health_tasks as tasks

WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"
STEPS = 10


def _config(directory, data, layout, interval=4, recovery=None, **train):
    return tiny_config(
        run={"directory": str(directory)},
        data={"directory": str(data)},
        parallel=ALL_LAYOUTS[layout][1],
        train={"num_steps": STEPS, **train},
        checkpoint={"interval_steps": interval, "keep": 1},
        evaluation={"interval_steps": 100, "lengths": [32], "max_tokens": 512},
        recovery=recovery or {},
    )


def _numbers(directory):
    records = [r for r in read_metrics(RunPaths(directory).metrics) if not is_evaluation(r)]
    return [(r["step"], r["loss_nats"], r["gradient_norm"]) for r in records]


def _masters(directory, step=STEPS):
    from pretrain.checkpoint.load import load_global_state

    checkpoint = open_checkpoint(checkpoint_directory(directory, step))
    return {kind: load_global_state(checkpoint, kind) for kind in ("master", "exp_avg_sq")}


def _assert_same_end(one, other):
    a, b = _masters(one), _masters(other)
    assert all(torch.equal(a[kind][name], b[kind][name]) for kind in a for name in a[kind])


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("dp2", tasks.Flip(7, 1, "master", 30, WEIGHT)),
        ("zero3-dp2", tasks.Flip(7, 0, "exp_avg", 30, WEIGHT)),
        ("tp2pp2sp", tasks.Flip(2, 3, "gradient", 30)),
    ],
)
def test_a_bit_that_flips_once_is_transient_and_the_run_ends_as_if_nothing_had_been(
    pools, tiny_data, tmp_path, capfd, layout, fault
):
    """The first is that of a master before step 8, the second save."""
    processes = ALL_LAYOUTS[layout][0]
    whole, run = tmp_path / "whole", tmp_path / "run"
    pools(processes).run(tasks.outcome, _config(whole, tiny_data, layout))
    config = _config(run, tiny_data, layout)
    results = pools(processes).run(tasks.train_flipped, config, [fault])
    assert {r["code"] for r in results} == {0}, results[0]["error"]
    assert sum(r["flips"] for r in results) == 1
    [attempt] = read_attempts(run)
    found = attempt.diagnosis
    assert (found.kind, found.rank) == ("transient", fault.rank)
    assert found.step == fault.after + 1 and found.host and found.device
    assert _numbers(run) == _numbers(whole)
    _assert_same_end(run, whole)
