"""`pretrain plan --calibrate`: a plan that is scaled by a measurement predicts the measured run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.plan.command import read_calibration, read_target
from pretrain.plan.memory import stages_of
from pretrain.plan.timing import H200, Scale, time_of_step

PAPER = Path("configs/cc100_roberta/alibi_1024.toml")
H200S = read_target(8, "h200", None)


def paper(*overrides: str) -> RunConfig:
    return load_config(PAPER, overrides)


def measurement(config: RunConfig, device: str = H200.name, gpus: int = 1) -> dict[str, Any]:
    """What bench train would write if all that is computed took twice as long as modelled.

    And the optimizer's step six times as long. The host waits for the device after each part, so
    that the gather of weights hides behind nothing and is in the optimizer's step.
    """
    layout = config.layout(gpus)
    slow = replace(read_target(gpus, "h200", None), scale=Scale(2.0, 6.0))
    timing = time_of_step(config, layout, stages_of(config, layout), slow, waits=True)
    optimizer, tail = timing.part("optimizer"), 0.0
    if config.parallel.zero_stage < 3:
        optimizer += timing.lines.get("gather of weights, exposed", 0.0)
    if gpus > 1:
        tail = timing.lines["reduction of gradients, exposed"]
    return {
        "device": device,
        "world_size": gpus,
        "config": config.model_dump(mode="json", exclude_none=True),
        "seconds": {
            "forward and backward": (timing.milliseconds - optimizer - tail) / 1e3,
            "gradient reduction": tail / 1e3,
            "optimizer step": optimizer / 1e3,
        },
    }


MEASURED = {
    "one GPU": (1, {}),
    "dp8": (8, {}),
    "dp16, between nodes": (16, {}),
    "pp2vpp2": (
        8,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "zero3": (8, {"zero_stage": 3}),
}


def measured_run(case: str) -> RunConfig:
    gpus, parallel = MEASURED[case]
    settings = [f"parallel.{key}={value}" for key, value in parallel.items()]
    batch = ["batch.global_batch_size=256", f"parallel.world_size={gpus}"]
    return paper("train.precision=bf16", *batch, *settings)


@pytest.mark.parametrize("case", MEASURED)
def test_a_calibrated_plan_predicts_the_measured_run(tmp_path, case):
    """A measurement that was made from two known factors gives them back, and its own time."""
    gpus, config, file = MEASURED[case][0], measured_run(case), tmp_path / "measured.json"
    measured = measurement(config, gpus=gpus)
    file.write_text(json.dumps(measured))
    target = read_target(gpus, "h200", None, file)
    assert target.scale.compute == pytest.approx(2.0)
    assert target.scale.optimizer == pytest.approx(6.0)
    layout = config.layout(gpus)
    timing = time_of_step(config, layout, stages_of(config, layout), target, waits=True)
    total = 1e3 * sum(measured["seconds"].values())
    assert timing.milliseconds == pytest.approx(total)


SECONDS = {"forward and backward": 1e-3, "gradient reduction": 0.0, "optimizer step": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "cpu"}, "measured on cpu in bf16"),
        ({"seconds": SECONDS | {"forward and backward": float("inf")}}, "not a result"),
        ({"seconds": {"forward and backward": 1, "optimizer step": 1}}, "not a result"),
        ({"seconds": SECONDS | {"optimizer step": 0}}, "for communication alone"),
        ({"precision": "fp32"}, "in fp32. Calibrate with a measurement on"),
    ],
)
def test_an_impossible_measurement_is_refused(tmp_path, change, says):
    config = paper("train.precision=bf16", "parallel.world_size=1", "batch.global_batch_size=16")
    content = measurement(config) | change
    if precision := change.get("precision"):
        content["config"]["train"]["precision"] = precision
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        read_calibration(file, H200S)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path / "none.json", H200S)
