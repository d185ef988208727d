"""Hold a step to its budget: a change that adds a kernel, a copy or a collective fails here.

The tables hold what is true now, exactly. A change that is meant to change them updates them, and
says in the changelog what it gained; a failing assertion shows the new lines. The sizes of messages
are not copied but follow from the number of parameters.

One process simulates a rank of each pipeline stage (pretrain/plan/simulation.py). The last tests
compare the simulation with real ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from pretrain.config import RunConfig
from pretrain.config.parameters import num_parameters_of_rank
from pretrain.plan.counter import Collective, Phase, StepCounts
from pretrain.plan.operators import OpClass
from pretrain.plan.report import PASSES
from pretrain.plan.step import count_run
from tests.conftest import tiny_config
from tests.distributed.counting_tasks import as_plain, count_real_step

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Number of processes, and [parallel].
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp4": (4, {}),
    "tp2dp2": (4, {"tensor_model_parallel_size": 2}),
    "tp2pp2sp": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "pp2vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "zero2": (4, {"zero_stage": 2}),
    "zero3": (4, {"zero_stage": 3}),
}
MICRO_BATCHES = 2
LENGTH = 32


class Budget(NamedTuple):
    """The cost of a step, summed over one rank of each pipeline stage."""

    launches: int
    """Kernel launches of the forward and backward passes."""
    other_launches: int
    """Kernel launches of everything else: reduction, optimizer, gather, loss."""
    token_bytes: int
    """Bytes of elementwise kernels and copies in the passes, per token of the rank, rounded."""
    other_bytes: int
    """Bytes of all kernels outside of the passes."""
    synchronisations: int
    """How often the host waits for the device."""


BUDGETS = {
    ("dp4", "bf16"): Budget(347, 77, 50095, 1927628, 7),
    ("dp4", "fp16"): Budget(270, 205, 34376, 2029176, 10),
    ("dp4", "fp32"): Budget(262, 133, 39851, 1778193, 9),
    ("tp2dp2", "bf16"): Budget(365, 77, 26500, 1340780, 7),
    ("tp2dp2", "fp16"): Budget(288, 280, 18536, 1546532, 10),
    ("tp2dp2", "fp32"): Budget(280, 143, 22451, 1394369, 9),
    ("tp2pp2sp", "bf16"): Budget(376, 130, 28621, 2438512, 14),
    ("tp2pp2sp", "fp16"): Budget(296, 665, 16816, 3783512, 20),
    ("tp2pp2sp", "fp32"): Budget(288, 287, 19003, 3567986, 18),
    ("pp2vpp2", "bf16"): Budget(606, 138, 71280, 6490992, 14),
    ("pp2vpp2", "fp16"): Budget(454, 1033, 39871, 10152312, 20),
    ("pp2vpp2", "fp32"): Budget(446, 343, 50816, 9581170, 18),
    ("zero2", "bf16"): Budget(325, 171, 61631, 1022428, 10),
    ("zero2", "fp16"): Budget(326, 174, 61590, 1023096, 10),
    ("zero2", "fp32"): Budget(314, 104, 68071, 973329, 9),
    ("zero3", "bf16"): Budget(401, 131, 59575, 1023347, 7),
    ("zero3", "fp16"): Budget(459, 142, 59838, 1090432, 8),
    ("zero3", "fp32"): Budget(397, 131, 66663, 1040115, 7),
}

LAYERS = {
    ("dp4", "bf16"): (61, 7508),
    ("dp4", "fp16"): (43, 3503),
    ("dp4", "fp32"): (43, 7006),
    ("tp2dp2", "bf16"): (61, 4322),
}
"""What a layer adds in the forward and backward pass of a micro batch: launches, and bytes of
elementwise kernels and copies per token."""

COLLECTIVES: dict[tuple[str, str], list[str]] = {
    ("dp4", "all"): [
        "gradient reduction: allreduce, data 4, float32, 1 calls, 1 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "weight gather: allgather_base, data 4, {dtype}, 2 calls, 2 exposed",
    ],
    ("dp4", "bf16"): [],
    ("dp4", "fp16"): [
        "optimizer step: allreduce, data 4, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, data 4, uint8, 1 calls, 1 exposed",
    ],
    ("dp4", "fp32"): ["optimizer step: allreduce, data 4, float32, 2 calls, 2 exposed"],
    ("tp2dp2", "all"): [
        "gradient reduction: allreduce, data 2, float32, 1 calls, 1 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "weight gather: allgather_base, data 2, {dtype}, 2 calls, 2 exposed",
    ],
    ("tp2dp2", "bf16"): [
        "backward: allreduce, tensor 2, bfloat16, 10 calls, 0 exposed",
        "forward: allreduce, tensor 2, bfloat16, 10 calls, 10 exposed",
        "forward: allreduce, tensor 2, float32, 6 calls, 6 exposed",
        "optimizer step: allreduce, model 2, float32, 1 calls, 1 exposed",
    ],
    ("tp2dp2", "fp16"): [
        "backward: allreduce, tensor 2, float16, 10 calls, 0 exposed",
        "forward: allreduce, tensor 2, float16, 10 calls, 10 exposed",
        "forward: allreduce, tensor 2, float32, 6 calls, 6 exposed",
        "optimizer step: allreduce, data 2, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, data 2, uint8, 1 calls, 1 exposed",
        "optimizer step: allreduce, model 2, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 2, uint8, 1 calls, 1 exposed",
    ],
    ("tp2dp2", "fp32"): [
        "backward: allreduce, tensor 2, float32, 10 calls, 0 exposed",
        "forward: allreduce, tensor 2, float32, 16 calls, 16 exposed",
        "optimizer step: allreduce, data 2, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 2, float32, 2 calls, 2 exposed",
    ],
    ("tp2pp2sp", "all"): [
        "backward: allgather_base, tensor 2, {dtype}, 20 calls, 10 exposed",
        "backward: reduce_scatter_base, tensor 2, {dtype}, 10 calls, 0 exposed",
        "between passes: recv, pipeline 2, {dtype}, 2 calls, 2 exposed",
        "between passes: recv, world 4, {dtype}, 2 calls, 2 exposed",
        "between passes: send, pipeline 2, {dtype}, 2 calls, 2 exposed",
        "between passes: send, world 4, {dtype}, 2 calls, 2 exposed",
        "forward: allgather_base, tensor 2, {dtype}, 10 calls, 10 exposed",
        "forward: allreduce, tensor 2, float32, 6 calls, 6 exposed",
        "forward: reduce_scatter_base, tensor 2, {dtype}, 10 calls, 10 exposed",
        "loss average: allreduce, world 4, float64, 2 calls, 2 exposed",
    ],
    ("tp2pp2sp", "bf16"): [
        "gradient reduction: allreduce, embedding 2, float32, 2 calls, 2 exposed",
        "gradient reduction: allreduce, tensor 2, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 4, float32, 2 calls, 2 exposed",
    ],
    ("tp2pp2sp", "fp16"): [
        "gradient reduction: allreduce, embedding 2, float16, 2 calls, 2 exposed",
        "gradient reduction: allreduce, tensor 2, float16, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 4, float32, 4 calls, 4 exposed",
        "optimizer step: allreduce, model 4, uint8, 2 calls, 2 exposed",
    ],
    ("tp2pp2sp", "fp32"): [
        "gradient reduction: allreduce, embedding 2, float32, 2 calls, 2 exposed",
        "gradient reduction: allreduce, tensor 2, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 4, float32, 4 calls, 4 exposed",
    ],
    ("pp2vpp2", "all"): [
        "between passes: recv, pipeline 2, {dtype}, 6 calls, 6 exposed",
        "between passes: recv, world 2, {dtype}, 6 calls, 6 exposed",
        "between passes: send, pipeline 2, {dtype}, 6 calls, 6 exposed",
        "between passes: send, world 2, {dtype}, 6 calls, 6 exposed",
        "loss average: allreduce, world 2, float64, 2 calls, 2 exposed",
    ],
    ("pp2vpp2", "bf16"): [
        "gradient reduction: allreduce, embedding 2, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 2, float32, 2 calls, 2 exposed",
    ],
    ("pp2vpp2", "fp16"): [
        "gradient reduction: allreduce, embedding 2, float16, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 2, float32, 4 calls, 4 exposed",
        "optimizer step: allreduce, model 2, uint8, 2 calls, 2 exposed",
    ],
    ("pp2vpp2", "fp32"): [
        "gradient reduction: allreduce, embedding 2, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, model 2, float32, 4 calls, 4 exposed",
    ],
    ("zero2", "all"): [
        "backward: allreduce, data 4, float32, 2 calls, 2 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, data 4, float32, 2 calls, 2 exposed",
        "weight gather: allgather_base, data 4, {dtype}, 2 calls, 2 exposed",
    ],
    ("zero2", "bf16"): ["optimizer step: allreduce, data 4, uint8, 1 calls, 1 exposed"],
    ("zero2", "fp16"): ["optimizer step: allreduce, data 4, uint8, 1 calls, 1 exposed"],
    ("zero2", "fp32"): [],
    ("zero3", "all"): [
        "backward: reduce_scatter_base, data 4, float32, 2 calls, 2 exposed",
        "forward: allgather_base, data 4, {dtype}, 4 calls, 2 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, data 4, float64, 2 calls, 2 exposed",
    ],
    ("zero3", "bf16"): [],
    ("zero3", "fp16"): ["optimizer step: allreduce, data 4, uint8, 1 calls, 1 exposed"],
    ("zero3", "fp32"): [],
}
"""The collectives of one rank of each pipeline stage together: those of every precision, and those
of each. "exposed" are the calls behind which no kernel is launched."""


@functools.cache
def counted(layout: str, precision: str, num_layers: int = 0) -> tuple[RunConfig, dict[int, Any]]:
    """Return a small run and its counts by pipeline stage."""
    world_size, parallel = LAYOUTS[layout]
    tensor = parallel.get("tensor_model_parallel_size", 1)
    pipeline = parallel.get("pipeline_model_parallel_size", 1)
    data = world_size // (tensor * pipeline)
    config = tiny_config(
        parallel=parallel | {"world_size": world_size},
        # Multiples that leave nothing for DeepSpeed to pad.
        model={
            "num_layers": num_layers or (4 if layout == "pp2vpp2" else 2),
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
        },
        batch={"micro_batch_size": 1, "global_batch_size": MICRO_BATCHES * data},
        data={"sequence_length": LENGTH},
        train={"precision": precision},
    )
    return config, count_run(config)


def passes(counts: StepCounts, *kinds: OpClass) -> tuple[int, int]:
    """Return the launches and the bytes of the passes, of some classes of kernels or of all."""
    costs = [counts.total(phase, kind) for phase in PASSES for kind in kinds or (None,)]
    return sum(cost.launches for cost in costs), sum(cost.bytes_moved for cost in costs)


def budget(stages: Iterable[StepCounts]) -> Budget:
    """Return what a step costs in all."""
    stages = list(stages)
    launches = sum(passes(each)[0] for each in stages)
    moved = sum(passes(each)[1] for each in stages)
    traffic = sum(passes(each, OpClass.ELEMENTWISE, OpClass.COPY)[1] for each in stages)
    return Budget(
        launches,
        sum(each.total().launches for each in stages) - launches,
        round(traffic / (MICRO_BATCHES * LENGTH)),
        sum(each.total().bytes_moved for each in stages) - moved,
        sum(sum(each.synchronisations.values()) for each in stages),
    )


def lines(stages: Iterable[StepCounts]) -> list[str]:
    """Return one line for all collectives of a kind, of more than one rank."""
    calls: dict[str, list[Collective]] = {}
    for each in (c for counts in stages for c in counts.collectives if c.group_size > 1):
        group = f"{each.group} {each.group_size}"
        calls.setdefault(f"{each.phase}: {each.name}, {group}, {each.dtype}", []).append(each)
    return sorted(
        f"{kind}, {len(each)} calls, {sum(c.is_exposed for c in each)} exposed"
        for kind, each in calls.items()
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_costs_what_its_budget_says(layout, precision):
    _, stages = counted(layout, precision)
    assert budget(stages.values()) == BUDGETS[layout, precision]


@pytest.mark.parametrize(("layout", "precision"), LAYERS)
def test_a_layer_costs_what_its_budget_says(layout, precision):
    """What a third layer adds, for each micro batch."""
    costs = []
    for num_layers in (2, 3):
        _, stages = counted(layout, precision, num_layers)
        launches, _ = passes(stages[0])
        _, moved = passes(stages[0], OpClass.ELEMENTWISE, OpClass.COPY)
        costs.append((launches / MICRO_BATCHES, moved / (MICRO_BATCHES * LENGTH)))
    (launches, moved), (more_launches, more_moved) = costs
    assert (more_launches - launches, round(more_moved - moved)) == LAYERS[layout, precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_collectives_of_a_step(layout, precision):
    _, stages = counted(layout, precision)
    expected = COLLECTIVES[layout, "all"] + COLLECTIVES[layout, precision]
    assert lines(stages.values()) == sorted(
        line.format(dtype=PRECISIONS[precision]) for line in expected
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_are_as_large_as_the_parameters(layout, precision):
    """Over the data-parallel ranks go the gradients in fp32 and the weights in their own dtype.

    ZeRO 2 and 3 reduce in every micro batch. ZeRO 3 also gathers the weights in every micro batch,
    and keeps those of so small a model for the backward pass; a few small ones it keeps for the
    next micro batch, too.
    """
    config, stages = counted(layout, precision)
    element = 4 if precision == "fp32" else 2
    stage_of_zero = config.parallel.zero_stage
    for stage, counts in stages.items():
        parameters = num_parameters_of_rank(config, stage)
        data = [c for c in counts.collectives if c.group == "data" and c.group_size > 1]
        if not data:
            assert config.layout(LAYOUTS[layout][0]).data == 1
            continue
        # The norm and the overflow flag are single numbers.
        reduced = [c for c in data if "reduce" in c.name and c.num_bytes > 8]
        times = 1 if stage_of_zero == 1 else MICRO_BATCHES
        assert sum(c.num_bytes for c in reduced) == times * 4 * parameters
        gathered = sum(c.num_bytes for c in data if "gather" in c.name)
        if stage_of_zero == 3:
            most = MICRO_BATCHES * element * parameters
            assert 0.99 * most <= gathered <= most
        else:
            assert gathered == element * parameters
        size = config.layout(LAYOUTS[layout][0]).data
        # A ring sends an all-reduce's message twice, and one n-th of it stays where it is.
        both_ways = 1 if reduced[0].name.startswith("reduce_scatter") else 2
        sent = sum(c.wire_bytes for c in reduced)
        assert sent == both_ways * times * 4 * parameters * (size - 1) / size


def test_an_added_copy_and_an_added_collective_are_seen(monkeypatch):
    """The budgets are worth something: one tensor cloned and reduced once more shows in both."""
    import torch
    import torch.distributed as dist

    from pretrain.optim import zero

    def wasteful(chunks: list[Any]) -> None:
        finalize(chunks)
        dist.all_reduce(torch.zeros(1000, device="cpu").clone())

    finalize = zero.finalize_gradients
    before = counted("dp4", "bf16")[1][0]
    monkeypatch.setattr(zero, "finalize_gradients", wasteful)
    after = counted.__wrapped__("dp4", "bf16")[1][0]
    clones = [each.total(Phase.GRADIENT_REDUCTION, name="clone") for each in (before, after)]
    assert clones[1].launches - clones[0].launches == 1
    assert clones[1].bytes_read - clones[0].bytes_read == 4000
    [new] = set(lines([after])) - set(lines([before]))
    assert new == "gradient reduction: allreduce, world 4, float32, 1 calls, 1 exposed"


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("dp4", "fp16"), ("tp2pp2sp", "bf16"), ("zero3", "fp32")],
)
def test_a_simulated_rank_does_what_a_real_one_does(pools, layout, precision):
    """Every collective and synchronisation, and every kernel except what differs by construction.

    Real ranks compute on the CPU, so attention is SDPA on both sides, Adam is compared by its other
    operators, and gloo adds a copy to every reduce-scatter.
    """
    config, _ = counted(layout, precision)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"attention_backend": "sdpa"}),
            # Real gradients overflow at the default scale.
            "optimizer": config.optimizer.model_copy(update={"initial_loss_scale_power": 0}),
        }
    )
    world_size, _ = LAYOUTS[layout]
    real = pools(world_size).run(count_real_step, config)
    for stage, counts in count_run(config).items():
        rank = stage * world_size // config.parallel.pipeline_model_parallel_size
        simulated = as_plain(counts)
        assert simulated["collectives"] == real[rank]["collectives"]
        assert simulated["synchronisations"] == real[rank]["synchronisations"]
        has_reduce_scatter = any("reduce_scatter" in c[1] for c in simulated["collectives"])
        assert _comparable(simulated, has_reduce_scatter) == _comparable(
            real[rank], has_reduce_scatter
        )


def _comparable(counts: dict[str, Any], has_reduce_scatter: bool) -> dict[Any, Any]:
    """Return the kernels that do not differ by construction."""
    adam = (Phase.OPTIMIZER_STEP, OpClass.ELEMENTWISE)
    return {
        key: cost
        for key, cost in counts["kernels"].items()
        if key[:2] != adam and not (has_reduce_scatter and key[2] == "copy_")
    }
