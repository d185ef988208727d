"""The plan against real ranks, and its collectives against those that the counter counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pretrain.config import RunConfig
from pretrain.plan.memory import Activations, memory_of_rank, most_kept, peak, stage_of
from pretrain.plan.simulation import count_run
from pretrain.plan.timing import messages
from tests.conftest import tiny_config
from tests.distributed.test_step_budgets import CASES, counted

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
        batch={"micro_batch_size": 2, "global_batch_size": 8},
        train={"precision": "bf16", "fusion": "off"},
    )
    shape = config.layout(world_size)
    measured = pools(world_size).run(measure_real_rank, config)
    for rank, found in enumerate(measured):
        stage = rank // (shape.tensor * shape.data)
        planned = memory_of_rank(config, shape, stage_of(config, shape, stage), is_modern=True)
        state = (planned.weights, planned.gradients, planned.optimizer)
        assert state == (found["weights"], found["gradients"], found["optimizer"])
        persistent = Activations(config, True).persistent()
        kept = most_kept(config, shape, stage, True) + persistent
        # As for simulated ranks.
        received = 2 * Activations(config, True).stream
        assert 0.95 * found["kept"] < kept < 1.05 * found["kept"] + received
        most = peak(config, shape, stage, True).total + persistent
        assert most == pytest.approx(found["peak"], rel=0.05)


ZERO_1 = [case for case in CASES if not case.startswith("zero")]
SHARED = {**SEQUENCE, **PIPELINE, "world_size": 4}
FURTHER: dict[str, dict[str, dict[str, Any]]] = {
    "recompute": {"train": {"recompute_granularity": "full"}},
    "learned": {"position": {"method": "learned", "max_position_embeddings": 64}},
}


def planned_and_counted(config: RunConfig, counts: dict[int, Any]) -> list[tuple[Any, Any]]:
    """(planned, counted) calls and bytes by collective, group and dtype, of each stage."""
    assert config.parallel.world_size is not None
    layout = config.layout(config.parallel.world_size)
    pairs = []
    for stage, of_stage in counts.items():
        found: Counter[tuple[str, ...]] = Counter()
        for each in of_stage.collectives:
            if each.group_size > 1:
                # Megatron's sends name their group in one direction only.
                group = "pipeline" if each.name in ("send", "recv") else each.group
                found[each.name, group, each.dtype, "calls"] += 1
                found[each.name, group, each.dtype, "bytes"] += each.num_bytes
        planned: Counter[tuple[str, ...]] = Counter()
        for row in messages(config, layout, stage_of(config, layout, stage), is_modern=True):
            planned[row.name, row.group, row.dtype, "calls"] += row.calls
            planned[row.name, row.group, row.dtype, "bytes"] += row.num_bytes
        pairs.append((planned, found))
    return pairs


@pytest.mark.parametrize("case", ZERO_1)
def test_the_planned_collectives_are_those_that_are_counted(case):
    for planned, found in planned_and_counted(*counted(case, "bf16")):
        assert planned == found


@pytest.mark.parametrize("case", FURTHER)
def test_further_planned_collectives(case):
    sections = {name: dict(keys) for name, keys in FURTHER[case].items()}
    config = tiny_config(
        parallel=SHARED,
        model={"num_layers": 2},
        train={"precision": "bf16", **sections.pop("train", {})},
        **sections,
    )
    for planned, found in planned_and_counted(config, count_run(config)):
        assert planned == found


# ---- tasks of the ranks --------------------------------------------------------------------------
def measure_real_rank(config: RunConfig) -> dict[str, int]:
    """Return what this rank of a real job allocates (`tests.allocations.measure`).

    Args:
        config: The run; its layout must fit the number of ranks.
    """
    from pretrain import platform
    from pretrain.topology import initialize
    from tests.allocations import Allocations, measure

    platform.prepare(0)
    topology = initialize(config)
    with Allocations() as allocations:
        return measure(config, topology, allocations)
