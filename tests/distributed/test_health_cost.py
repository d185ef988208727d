"""What a check of the ranks' health costs beside a step, counted on simulated ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from pretrain.plan import simulation as plan_step
from pretrain.plan.operators import StepCounts
from pretrain.plan.simulation import simulated_rank
from pretrain.training.health import inspect
from tests.distributed.test_step_budgets import CASES, small_run

MOST = 1e-3
"""The largest share of a step's work, averaged over the steps from one check to the next."""
COLLECTIVES = {
    "dp4": {"data 4": 1},
    "tp2dp2": {"data 2": 1, "tensor 2": 1},
    "tp2dp2sp": {"data 2": 1, "tensor 2": 1},
    "pp2dp2": {"data 2": 1, "embedding 2": 1},
    "tp2pp2sp": {"tensor 2": 1, "embedding 2": 1},
    "zero2": {"data 4": 1},
    "zero3": {},
}
"""The all-reduces of a check, by group, beside one of all ranks."""


def counted(case: str, precision: str, stage: int) -> tuple[StepCounts, StepCounts]:
    """Return what a step of a rank costs, and a check after it."""
    config, world_size = small_run(case, precision), CASES[case].world_size
    rank = stage * world_size // config.parallel.pipeline_model_parallel_size
    made: list[Any] = []

    def keep(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    make = plan_step.Run
    with (
        simulated_rank(config, rank, world_size) as (topology, counter),
        patch.object(plan_step, "Run", keep),
    ):
        step = plan_step.count_step(config, topology, counter)
        made[0].optimizer.wait_for_weights()
        counter.counts = check = StepCounts()
        inspect(made[0])
    return step, check


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", COLLECTIVES)
def test_a_check_costs_less_than_a_thousandth(case, precision):
    """Launches, bytes, collectives and what they send; the host waits once, for the verdict."""
    config = small_run(case, precision)
    interval = config.train.consistency_interval_steps
    for stage in range(config.parallel.pipeline_model_parallel_size):
        step, check = counted(case, precision, stage)
        calls: dict[str, int] = {}
        for each in check.collectives:
            if each.group_size > 1:
                group = f"{each.group} {each.group_size}"
                calls[group] = calls.get(group, 0) + 1
        world = f"world {CASES[case].world_size}"
        assert calls.pop(world) == 1 and calls == COLLECTIVES[case]
        assert sum(check.synchronisations.values()) == 0
        shares = {
            "launches": (check.total().launches, step.total().launches),
            "bytes": (check.total().bytes_moved, step.total().bytes_moved),
            "collectives": (len(check.collectives), len(step.collectives)),
            "sent": tuple(sum(c.wire_bytes for c in each.collectives) for each in (check, step)),
        }
        for what, (cost, whole) in shares.items():
            assert 0 < cost < MOST * interval * whole, (what, cost, whole)
