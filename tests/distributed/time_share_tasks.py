"""Tasks of the tests of evaluations whose time is bounded."""

from __future__ import annotations

from typing import Any

from pretrain.config import RunConfig
from pretrain.rundir.metrics import read_metrics
from pretrain.rundir.paths import RunPaths


def train(config: RunConfig) -> list[dict[str, Any]]:
    """Train a run, and return its records."""
    from pretrain.train import loop

    assert loop.train(config) == 0
    return list(read_metrics(RunPaths(config.directory).metrics))
