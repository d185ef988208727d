"""Evaluations in the loop keep to their share of the time, on all ranks and after a restart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pretrain.config import RunConfig
from pretrain.rundir.metrics import is_evaluation, read_metrics
from pretrain.rundir.paths import RunPaths
from tests.conftest import tiny_config
from tests.distributed import tasks


def run_config(directory, data, share):
    return tiny_config(
        run={"directory": str(directory)},
        data={"directory": str(data)},
        train={"num_steps": 7},
        checkpoint={"interval_steps": 100},
        evaluation={"interval_steps": 2, "max_time_share": share, "max_tokens": 512},
    )


def steps_evaluated(records):
    return sorted({record["step"] for record in records if is_evaluation(record)})


def test_what_is_left_out_changes_no_loss(pools, tiny_data, tmp_path):
    losses = []
    for share, steps in ((None, [2, 4, 6, 7]), (1e-9, [7])):
        config = run_config(tmp_path / str(share), tiny_data, share)
        records, _ = pools(2).run(train, config)
        assert steps_evaluated(records) == steps
        evaluations = [record for record in records if is_evaluation(record)]
        trained = [record for record in records if not is_evaluation(record)]
        losses.append([record["loss_nats"] for record in trained])
        spent = 0.0
        for step in steps:
            own = [record for record in evaluations if record["step"] == step]
            assert [record["length"] for record in own] == [32, 64]
            assert [record["tokens"] for record in own] == [512, 512]
            spent += sum(record["evaluation_seconds"] for record in own)
            seconds = sum(record["step_seconds"] for record in trained if record["step"] <= step)
            for record in own:
                assert record["evaluation_time_share"] == pytest.approx(spent / seconds)
    assert len(losses[0]) == 7 and losses[0] == losses[1]


@pytest.mark.parametrize(("seconds", "steps"), [(1000.0, [2, 7]), (0.001, [2, 4, 6, 7])])
def test_a_restart_decides_by_what_the_run_has_recorded(pools, tiny_data, tmp_path, seconds, steps):
    """Step 4 is saved and not evaluated: left out if step 2 took long, else broken off."""
    config = run_config(tmp_path / "run", tiny_data, 0.5)
    pools(2).run(tasks.continue_run, config, "none", 4)
    evaluation = {
        "step": 2,
        "evaluation": True,
        "protocol": "nonoverlapping",
        "stride": 32,
        "length": 32,
        "loss_nats": 6.0,
        "perplexity": 403.4,
        "evaluation_seconds": seconds,
    }
    lines = [{"step": step, "loss_nats": 6.0, "step_seconds": 100.0} for step in range(1, 5)]
    lines.insert(2, evaluation)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    RunPaths(config.directory).metrics.write_text(text)
    records, _ = pools(2).run(train, config)
    assert steps_evaluated(records) == steps


# ---- tasks of the ranks --------------------------------------------------------------------------
def train(config: RunConfig) -> list[dict[str, Any]]:
    """Train a run, and return its records."""
    from pretrain.training import loop

    assert loop.train(config) == 0
    return list(read_metrics(RunPaths(config.directory).metrics))
