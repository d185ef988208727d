"""A metric that is recorded by its name in one line reaches every place where numbers are shown."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.rundir.metrics import collecting, is_evaluation, read_metrics, record_metric
from pretrain.rundir.paths import RunPaths
from pretrain.training.metrics import StepMetrics
from tests.conftest import LAYOUTS, directories, tiny_config

ODD_STEPS = (2, 3, 5)


def train_with_own_metrics(config: RunConfig, odd_steps: tuple[int, ...]) -> str:
    """Train a run that records metrics of its own.

    Args:
        config: The run.
        odd_steps: The steps, counted from 0, in which rank 1 alone records a metric.

    Returns:
        What this rank printed.
    """
    from pretrain.model import forward
    from pretrain.training import loop, step

    mean_loss, call_model, seed_step = step._mean_loss, forward.call_model, loop.seed_step

    def own_loss(token_losses: Tensor) -> tuple[Tensor, Tensor]:
        # Called on the last pipeline stage alone.
        record_metric("own_loss_nats", token_losses.float().mean())
        return mean_loss(token_losses)

    def own_call(*args: Any) -> Tensor:
        record_metric("health/passes", 1, "sum")
        record_metric("largest_rank", dist.get_rank(), "max")
        return call_model(*args)

    def own_seed(config: RunConfig, topology: Any, step: int) -> None:
        if dist.get_rank() == 1 and step in odd_steps:
            record_metric("data/odd", float(step))
        seed_step(config, topology, step)

    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        patch.object(step, "_mean_loss", own_loss),
        patch.object(forward, "call_model", own_call),
        patch.object(loop, "seed_step", own_seed),
    ):
        assert loop.train(config) == 0
    return said.getvalue()


def test_a_metric_of_ones_own_is_shown_everywhere(pools, tiny_data, tmp_path):
    """In two stages of a pipeline: of the last one, of every rank, and of one rank now and then."""
    processes, parallel = LAYOUTS["pp2"]
    config = tiny_config(
        **directories(tmp_path / "run", tiny_data),
        parallel=parallel,
        train={"num_steps": 7},
        evaluation={"interval_steps": 4},
        logging={"interval_steps": 2, "tensorboard": True},
    )
    said = pools(processes).run(train_with_own_metrics, config, ODD_STEPS)
    records = [
        record
        for record in read_metrics(RunPaths(config.directory).metrics)
        if not is_evaluation(record)
    ]
    assert [record["step"] for record in records] == list(range(1, 8))
    micro_batches = config.layout(processes).num_microbatches
    for record in records:
        # fp32 means, averaged in fp64 in another order.
        assert record["own_loss_nats"] == pytest.approx(record["loss_nats"], rel=1e-12)
        # Evaluations call the model as well, and are no steps.
        assert record["health/passes"] == processes * micro_batches
        assert record["largest_rank"] == processes - 1
        step = record["step"] - 1
        assert record.get("data/odd") == (step if step in ODD_STEPS else None)
    tags = {"own_loss_nats": "train/own_loss_nats", "largest_rank": "train/largest_rank"}
    tags |= {name: name for name in ("health/passes", "data/odd")}
    events = EventAccumulator(str(config.directory / "tensorboard"))
    events.Reload()
    for name, tag in tags.items():
        expected = {record["step"]: record[name] for record in records if name in record}
        # W&B gets the same tags. TensorBoard stores single precision.
        assert {event.step: event.value for event in events.Scalars(tag)} == {
            step: float(np.float32(value)) for step, value in expected.items()
        }
    [line] = [line for line in said[0].splitlines() if line.startswith("step 4/7")]
    assert f"  own_loss_nats {records[3]['own_loss_nats']:.4g}" in line
    assert "  data/odd 3" in line and f"  health/passes {processes * micro_batches}" in line


@pytest.mark.parametrize(
    ("name", "value", "reduction"),
    [
        ("loss_nats", 1.0, "mean"),  # a step has it
        ("train/loss", 1.0, "mean"),  # its tag
        ("evaluation", 1.0, "mean"),  # a record with it would be taken for an evaluation
        ("own/metric", 1.0, "mean"),  # no group of that name
        ("begun_pass_of_books", 1.0, "mean"),
        ("known", 1.0, "sum"),  # another reduction than before
        ("vector", np.zeros(2), "mean"),
    ],
)
def test_a_metric_that_cannot_be_one_is_refused(name, value, reduction):
    metrics = StepMetrics()
    metrics.collect("known", 1.0, "mean")
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    with pytest.raises(ValueError, match=r"^record_metric\('"):
        metrics.collect(name, value, reduction)


def test_outside_of_a_step_nothing_is_recorded():
    recorded: list[tuple[Any, ...]] = []
    with collecting(lambda *metric: recorded.append(metric)):
        record_metric("of_a_step", 1.0)
    record_metric("loss_nats", "of no step")
    assert recorded == [("of_a_step", 1.0, "mean")]
