"""The plan against real ranks, and its collectives against those that the counter counts.

Those of the budgets' cases are compared in test_step_budgets.py, which has counted them.
"""

from __future__ import annotations

from typing import Any

import pytest

from pretrain import platform
from pretrain.config import RunConfig
from pretrain.plan.simulation import count_run
from pretrain.topology import initialize
from tests.conftest import tiny_config
from tests.distributed.test_step_budgets import compare
from tests.unit.test_plan_memory import assert_as_planned

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
REAL: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2pp2sp": (4, {**SEQUENCE, **PIPELINE}),
}


@pytest.mark.parametrize("layout", REAL)
def test_every_real_rank_allocates_what_is_planned(pools, layout):
    """State to the byte, activations within 5 %, of processes that train.

    On a CPU nothing is fused, and attention without a bias keeps what a GPU's kernel keeps.
    """
    world_size, parallel = REAL[layout]
    config = tiny_config(
        parallel={**parallel, "world_size": world_size},
        model={"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 1024},
        position={"method": "sinusoidal"},
        data={"sequence_length": 256},
        batch={"micro_batch_size": 2, "global_batch_size": 4},
        train={"precision": "bf16", "fusion": "off"},
    )
    shape = config.layout(world_size)
    measured = pools(world_size).run(measure_real_rank, config)
    for rank, found in enumerate(measured):
        stage = rank // (shape.tensor * shape.data)
        assert_as_planned(config, shape, stage, found)


SHARED = {**SEQUENCE, **PIPELINE, "world_size": 4}
SPLIT = {**SEQUENCE, "context_parallel_size": 4, "world_size": 8}
FURTHER: dict[str, dict[str, dict[str, Any]]] = {
    "learned, recompute": {
        "position": {"method": "learned", "max_position_embeddings": 64},
        "train": {"recompute_granularity": "full"},
    },
    "cp4, recompute": {
        "parallel": SPLIT,
        "position": {"method": "t5"},
        "train": {"recompute_granularity": "selective"},
    },
}


@pytest.mark.parametrize("case", FURTHER)
def test_further_planned_collectives(case):
    sections = {name: dict(keys) for name, keys in FURTHER[case].items()}
    config = tiny_config(
        parallel=sections.pop("parallel", SHARED),
        model={"num_layers": 2},
        batch={"micro_batch_size": 2, "global_batch_size": 4},
        train={"precision": "bf16", **sections.pop("train", {})},
        **sections,
    )
    compare(config, count_run(config))


# ---- tasks of the ranks --------------------------------------------------------------------------
def measure_real_rank(config: RunConfig) -> dict[str, int]:
    """Return what this rank of a real job allocates (`tests.allocations.measure`).

    Args:
        config: The run; its layout must fit the number of ranks.
    """
    from tests.allocations import Allocations, measure

    platform.prepare(0)
    topology = initialize(config)
    with Allocations() as allocations:
        return measure(config, topology, allocations)
