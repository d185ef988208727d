"""Record metrics by name in the steps of real ranks; see tasks.py."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig


def train_with_own_metrics(config: RunConfig, odd_steps: tuple[int, ...]) -> str:
    """Train a run that records metrics of its own.

    Args:
        config: The run.
        odd_steps: The steps, counted from 0, in which rank 1 alone records a metric.

    Returns:
        What this rank printed.
    """
    from pretrain.model import forward
    from pretrain.train import loop, step
    from pretrain.train.metrics import record_metric

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
        platform.replaced(step, "_mean_loss", own_loss),
        platform.replaced(forward, "call_model", own_call),
        platform.replaced(loop, "seed_step", own_seed),
    ):
        assert loop.train(config) == 0
    return said.getvalue()
