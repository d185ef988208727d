"""Hold a step to its budget: a change that adds a kernel, a copy or a collective fails here.

The tables hold what is true now, exactly. A change that is meant to change them updates them, and
says in the changelog what it gained; a failing assertion shows the new lines. The sizes of messages
are not copied but follow from the number of parameters.

One process simulates a rank of each pipeline stage (pretrain/plan/simulation.py). The last test
compares the simulation with real ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from pretrain import platform
from pretrain.config import RunConfig, num_parameters_of_rank
from pretrain.plan.memory import stage_of
from pretrain.plan.operators import Collective, Counter, OpClass, StepCounts
from pretrain.plan.simulation import PASSES, count_run, count_step
from pretrain.plan.timing import H200, Network, Step, Target
from pretrain.topology import initialize
from pretrain.training import stragglers
from tests.conftest import tiny_config

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WIRE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class Case(NamedTuple):
    """A layout and what else differs from the defaults."""

    world_size: int
    parallel: Mapping[str, Any] = MappingProxyType({})
    fusion: str = "auto"


CASES = {
    "dp4": Case(4),
    "dp4 plain": Case(4, fusion="off"),
    "dp4 16-bit wire": Case(4, {"gradient_reduce_dtype": "bf16"}),
    "tp2dp2": Case(4, {"tensor_model_parallel_size": 2}),
    "tp2dp2sp": Case(4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2dp2": Case(4, {"pipeline_model_parallel_size": 2}),
    "tp2pp2sp": Case(
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "pp2vpp2": Case(
        2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    ),
    "zero2": Case(4, {"zero_stage": 2}),
    "zero3": Case(4, {"zero_stage": 3}),
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
    synchronizations: int
    """How often the host waits for the device."""


BUDGETS = {
    ("dp4", "bf16"): Budget(232, 43, 11381, 353168, 1),
    ("dp4", "fp16"): Budget(236, 43, 11382, 353168, 2),
    ("dp4 plain", "bf16"): Budget(286, 43, 39102, 353168, 1),
    ("dp4 16-bit wire", "bf16"): Budget(238, 49, 14525, 453776, 1),
    ("tp2dp2", "bf16"): Budget(260, 45, 6960, 357944, 1),
    ("tp2dp2sp", "bf16"): Budget(262, 60, 6128, 365112, 1),
    ("pp2dp2", "bf16"): Budget(246, 81, 10367, 1017488, 2),
    ("pp2vpp2", "bf16"): Budget(416, 81, 14180, 2750736, 2),
    ("zero2", "bf16"): Budget(294, 162, 34825, 588276, 9),
    ("zero3", "bf16"): Budget(358, 122, 37485, 589195, 6),
}

COLLECTIVES: dict[str, list[str]] = {
    "dp4": [
        "backward: reduce_scatter_base, data 4, float32, 6 calls, 1 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, world 4, float64, 1 calls, 1 exposed",
        "weight gather: allgather_base, data 4, {dtype}, 6 calls, 0 exposed",
    ],
    "dp4 16-bit wire": [
        "backward: alltoall_base, data 4, bfloat16, 6 calls, 1 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, world 4, float64, 1 calls, 1 exposed",
        "weight gather: allgather_base, data 4, bfloat16, 6 calls, 0 exposed",
    ],
    "tp2dp2": [
        "backward: allreduce, tensor 2, {dtype}, 10 calls, 0 exposed",
        "backward: reduce_scatter_base, data 2, float32, 7 calls, 1 exposed",
        "forward: allreduce, tensor 2, {dtype}, 10 calls, 10 exposed",
        "forward: allreduce, tensor 2, float32, 4 calls, 4 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, world 4, float64, 1 calls, 1 exposed",
        "weight gather: allgather_base, data 2, {dtype}, 7 calls, 0 exposed",
    ],
    "tp2dp2sp": [
        "backward: allgather_base, tensor 2, {dtype}, 18 calls, 10 exposed",
        "backward: reduce_scatter_base, data 2, float32, 6 calls, 1 exposed",
        "backward: reduce_scatter_base, tensor 2, {dtype}, 10 calls, 0 exposed",
        "forward: allgather_base, tensor 2, {dtype}, 10 calls, 10 exposed",
        "forward: allreduce, tensor 2, float32, 4 calls, 4 exposed",
        "forward: reduce_scatter_base, tensor 2, {dtype}, 10 calls, 10 exposed",
        "gradient reduction: allreduce, tensor 2, float32, 1 calls, 1 exposed",
        "gradient reduction: reduce_scatter_base, data 2, float32, 1 calls, 1 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, world 4, float64, 1 calls, 1 exposed",
        "weight gather: allgather_base, data 2, {dtype}, 7 calls, 0 exposed",
    ],
    "pp2dp2": [
        "backward: reduce_scatter_base, data 2, float32, 10 calls, 1 exposed",
        "between passes: recv, pipeline 2, {dtype}, 2 calls, 2 exposed",
        "between passes: recv, world 4, {dtype}, 2 calls, 2 exposed",
        "between passes: send, pipeline 2, {dtype}, 2 calls, 2 exposed",
        "between passes: send, world 4, {dtype}, 2 calls, 2 exposed",
        "gradient reduction: allreduce, embedding 2, float32, 2 calls, 2 exposed",
        "gradient reduction: reduce_scatter_base, data 2, float32, 2 calls, 2 exposed",
        "loss average: allreduce, world 4, float64, 2 calls, 2 exposed",
        "optimizer step: allreduce, world 4, float64, 2 calls, 2 exposed",
        "weight gather: allgather_base, data 2, {dtype}, 12 calls, 0 exposed",
    ],
    "pp2vpp2": [
        "between passes: recv, pipeline 2, {dtype}, 6 calls, 6 exposed",
        "between passes: recv, world 2, {dtype}, 6 calls, 6 exposed",
        "between passes: send, pipeline 2, {dtype}, 6 calls, 6 exposed",
        "between passes: send, world 2, {dtype}, 6 calls, 6 exposed",
        "gradient reduction: allreduce, embedding 2, float32, 2 calls, 2 exposed",
        "loss average: allreduce, world 2, float64, 2 calls, 2 exposed",
        "optimizer step: allreduce, world 2, float64, 2 calls, 2 exposed",
    ],
    "zero2": [
        "backward: reduce, data 4, float32, 8 calls, 8 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, data 4, float32, 2 calls, 2 exposed",
        "optimizer step: allreduce, data 4, uint8, 1 calls, 1 exposed",
        "weight gather: allgather_base, data 4, {dtype}, 2 calls, 2 exposed",
    ],
    "zero3": [
        "backward: reduce_scatter_base, data 4, float32, 2 calls, 2 exposed",
        "forward: allgather_base, data 4, {dtype}, 4 calls, 2 exposed",
        "loss average: allreduce, world 4, float64, 1 calls, 1 exposed",
        "optimizer step: allreduce, data 4, float64, 2 calls, 2 exposed",
    ],
}
COLLECTIVES["dp4 plain"] = COLLECTIVES["dp4"]
"""The collectives of one rank of each pipeline stage together. "exposed" are the calls behind which
no kernel is launched."""


def small_run(case: str, precision: str) -> RunConfig:
    """Return the config of a small run, with as few layers as the layout takes."""
    world_size, parallel, fusion = CASES[case]
    tensor = parallel.get("tensor_model_parallel_size", 1)
    pipeline = parallel.get("pipeline_model_parallel_size", 1)
    data = world_size // (tensor * pipeline)
    return tiny_config(
        parallel={**parallel, "world_size": world_size},
        # Multiples that leave nothing for DeepSpeed to pad.
        model={
            "num_layers": 4 if case == "pp2vpp2" else 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
            # The activation that has a fused kernel.
            "hidden_act": "gelu_pytorch_tanh",
        },
        batch={"micro_batch_size": 1, "global_batch_size": MICRO_BATCHES * data},
        data={"sequence_length": LENGTH},
        train={"precision": precision, "fusion": fusion},
    )


@functools.cache
def counted(case: str, precision: str) -> tuple[RunConfig, dict[int, Any]]:
    """Return a small run and its counts by pipeline stage."""
    config = small_run(case, precision)
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
        sum(sum(each.synchronizations.values()) for each in stages),
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


@pytest.mark.parametrize(("case", "precision"), BUDGETS)
def test_a_step_costs_what_its_budget_says(case, precision):
    _, stages = counted(case, precision)
    assert budget(stages.values()) == BUDGETS[case, precision]


@pytest.mark.parametrize(("case", "precision"), BUDGETS)
def test_the_collectives_of_a_step(case, precision):
    _, stages = counted(case, precision)
    expected = [line.format(dtype=PRECISIONS[precision]) for line in COLLECTIVES[case]]
    assert lines(stages.values()) == sorted(expected)


def compare(config: RunConfig, counts: dict[int, Any]) -> None:
    """Compare bytes and rings of each stage with those that the plan's time is made of."""
    assert config.parallel.world_size is not None
    layout = config.layout(config.parallel.world_size)
    for stage, of_stage in counts.items():
        found = {"tensor": [0, 0], "pipeline": [0, 0], "context": [0, 0]}
        for each in of_stage.collectives:
            rings = 2 if each.name == "allreduce" else 1
            # Megatron's sends name their group in one direction only.
            is_sent = each.name == "send"
            of_ranks = each.group in ("tensor", "context") and each.is_exposed
            if each.group_size > 1 and (is_sent or of_ranks):
                totals = found["pipeline" if is_sent else each.group]
                totals[0] += rings * each.num_bytes
                totals[1] += rings
        target = Target(layout.world_size, H200, Network(H200.network_gbit))
        planned = Step(config, layout, stage_of(config, layout, stage), target)
        if layout.tensor > 1:
            assert [*planned.exposed_in_tensor_group()] == found["tensor"]
        if layout.context > 1:
            assert [*planned.exchanged_in_context_group()] == found["context"]
        if layout.pipeline > 1:
            assert [*planned.sent_to_stages()] == found["pipeline"]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("zero")])
def test_the_planned_collectives_are_those_that_are_counted(case):
    compare(*counted(case, "bf16"))


def test_what_the_ranks_did_with_their_time_travels_with_the_loss(monkeypatch):
    """Every WINDOW_STEPS-th step: an fp64 number of each rank, and no call more."""
    case = "pp2dp2"
    before = counted(case, "bf16")[1]
    monkeypatch.setattr(stragglers, "WINDOW_STEPS", 1)
    after = counted.__wrapped__(case, "bf16")[1]
    assert lines(after.values()) == lines(before.values())
    for stage in before:
        assert after[stage].synchronizations == before[stage].synchronizations
        more = sum(c.num_bytes for c in after[stage].collectives) - sum(
            c.num_bytes for c in before[stage].collectives
        )
        assert more == 8 * CASES[case].world_size


@pytest.mark.parametrize(("case", "precision"), BUDGETS)
def test_messages_are_as_large_as_the_parameters(case, precision):
    """Between n data-parallel ranks each sends (n - 1) / n of the gradients and of the weights.

    ZeRO 2 and 3 reduce in every micro batch. ZeRO 3 also gathers the weights in every micro batch,
    and keeps those of so small a model for the backward pass; a few small ones it keeps for the
    next micro batch, too.
    """
    config, stages = counted(case, precision)
    size = config.layout(CASES[case].world_size).data
    wire = WIRE_BYTES[config.parallel.gradient_reduce_dtype]
    element = WIRE_BYTES[precision]
    stage_of_zero = config.parallel.zero_stage
    for stage, counts in stages.items():
        parameters = num_parameters_of_rank(config, stage)
        if size == 1:
            assert not [c for c in counts.collectives if c.group == "data"]
            continue
        times = 1 if stage_of_zero == 1 else MICRO_BATCHES
        reduced = reductions(counts)
        assert sum(c.num_bytes for c in reduced) == times * wire * parameters
        # An all-reduce would send the message twice. DeepSpeed reduces to the owners at stage 2.
        if stage_of_zero != 2:
            sent = sum(c.wire_bytes for c in reduced)
            assert sent == times * wire * parameters * (size - 1) / size
        gathered = sum(c.num_bytes for c in gathers(counts))
        if stage_of_zero == 3:
            most = MICRO_BATCHES * element * parameters
            assert 0.99 * most <= gathered <= most
        else:
            assert gathered == element * parameters


def reductions(counts: StepCounts) -> list[Collective]:
    """Return the collectives that sum gradients over the data-parallel ranks."""
    names = ("reduce", "alltoall")
    data = [c for c in counts.collectives if c.group == "data" and c.group_size > 1]
    # The norm and the overflow flag are single numbers.
    return [c for c in data if c.num_bytes > 8 and any(name in c.name for name in names)]


def gathers(counts: StepCounts) -> list[Collective]:
    """Return the collectives that gather weights over the data-parallel ranks."""
    data = [c for c in counts.collectives if c.group == "data" and c.group_size > 1]
    return [c for c in data if "allgather" in c.name]


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("dp4", "fp16"),
        ("tp2pp2sp", "bf16"),
        pytest.param("zero3", "fp32", marks=pytest.mark.torture),
    ],
)
def test_a_simulated_rank_does_what_a_real_one_does(pools, case, precision):
    """Every collective and synchronization, and every kernel except what differs by construction.

    Real ranks compute on the CPU, so attention is SDPA on both sides and nothing is fused, and gloo
    adds copies to reduce-scatters.
    """
    config = small_run(case, precision)
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"attention_backend": "sdpa"}),
            "train": config.train.model_copy(update={"fusion": "off"}),
            # Real gradients overflow at the default scale.
            "optimizer": config.optimizer.model_copy(update={"initial_loss_scale_power": 0}),
        }
    )
    world_size = CASES[case].world_size
    real = pools(world_size).run(count_real_step, config)
    for stage, counts in count_run(config).items():
        rank = stage * world_size // config.parallel.pipeline_model_parallel_size
        simulated = as_plain(counts)
        assert simulated["collectives"] == real[rank]["collectives"]
        assert simulated["synchronizations"] == real[rank]["synchronizations"]
        has_reduce_scatter = any("reduce_scatter" in c[1] for c in simulated["collectives"])
        assert _comparable(simulated, has_reduce_scatter) == _comparable(
            real[rank], has_reduce_scatter
        )


def _comparable(counts: dict[str, Any], has_reduce_scatter: bool) -> dict[Any, Any]:
    """Return the kernels that do not differ by construction."""
    return {
        key: cost
        for key, cost in counts["kernels"].items()
        if not (has_reduce_scatter and key[2] == "copy_")
    }


# ---- tasks of the ranks --------------------------------------------------------------------------
def count_real_step(config: RunConfig) -> dict[str, Any]:
    """Count a step of this rank of a real job, with real tensors and collectives.

    Args:
        config: The run; its layout must fit the number of ranks.

    Returns:
        "kernels": (launches, bytes) by (phase, class, operator);
        "collectives": (phase, name, group, group size, dtype, bytes, asynchronous), in order;
        "synchronizations": times by (phase, cause).
    """

    platform.prepare(0)
    with platform.fp16_allowed_on_cpu():
        topology = initialize(config)
        counter = Counter()
        with counter:
            return as_plain(count_step(config, topology, counter))


def as_plain(counts: Any) -> dict[str, Any]:
    """Return the parts of StepCounts that real ranks and simulated ones have in common."""
    return {
        "kernels": {key: (cost.launches, cost.bytes_moved) for key, cost in counts.kernels.items()},
        "collectives": [
            (c.phase, c.name, c.group, c.group_size, c.dtype, c.num_bytes, c.asynchronous)
            for c in counts.collectives
        ],
        "synchronizations": dict(counts.synchronizations),
    }
