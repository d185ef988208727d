"""The plan's memory against every allocation of simulated ranks, and against other formulas."""

from __future__ import annotations

from typing import Any

import pytest

from pretrain.config import RunConfig
from pretrain.plan.memory import memory_of_rank, stage_of
from pretrain.plan.simulation import simulated_rank
from tests.allocations import Allocations, measure
from tests.conftest import mark_torture, tiny_config

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp4": (4, {}),
    "tp2": (2, TENSOR),
    "tp2dp2sp": (4, SEQUENCE),
    "pp2dp2": (4, PIPELINE),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2vpp2": (2, VIRTUAL),
    "tp2pp2sp": (4, {**SEQUENCE, **PIPELINE}),
    "tp2pp2vpp2sp": (4, {**SEQUENCE, **VIRTUAL}),
    "cp4": (4, {"context_parallel_size": 4}),
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "alibi": {},
    "recompute full": {"train": {"recompute_granularity": "full"}},
    "recompute selective": {"train": {"recompute_granularity": "selective"}},
    "not fused": {"train": {"fusion": "off"}},
    "fp32": {"train": {"precision": "fp32"}},
    "rotary": {"position": {"method": "rotary"}},
    "t5": {"position": {"method": "t5"}},
    "kerple": {"position": {"method": "kerple"}},
    "shaw": {"position": {"method": "shaw"}},
    "transformer_xl": {"position": {"method": "transformer_xl"}},
    "cope": {"position": {"method": "cope"}},
    "fire": {"position": {"method": "fire"}},
    # One layer of each of its methods.
    "hybrid": {"position": {"method": "hybrid"}, "model": {"num_layers": 4}},
    "trained slopes": {"position": {"trainable_slopes": True}},
    "learned": {"position": {"method": "learned", "max_position_embeddings": 512}},
    "rotary, a quarter of grouped queries": {
        "position": {"method": "rotary", "rotary_percent": 0.25},
        "model": {"num_query_groups": 4},
    },
    "no positions": {"position": {"method": "none"}},
    "grouped queries": {"model": {"num_query_groups": 4}},
    "dropout": {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}},
    "NAG, dropped activations, no final norm": {
        "model": {"hidden_act": "relu", "activation_dropout": 0.1, "final_layernorm": False},
        "optimizer": {"name": "nag"},
    },
    "dropped GELU": {"model": {"activation_dropout": 0.1}},
    "as MPT, untied": {
        "model": {
            "use_bias": False,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "clip_qkv": 6.0,
        }
    },
    "as Pythia, ReLU": {
        "model": {"parallel_residual": True, "hidden_act": "relu", "embedding_layernorm": True}
    },
    "SwiGLU, RMSNorm, normalized heads": {
        "position": {"method": "rotary"},
        "model": {
            "use_bias": False,
            "normalization": "rmsnorm",
            "gated_linear_unit": True,
            "hidden_act": "silu",
            "qk_layernorm": True,
            "num_query_groups": 4,
            "kv_channels": 64,
            "ffn_hidden_size": 768,
        },
    },
    "GeGLU": {"model": {"gated_linear_unit": True, "hidden_act": "gelu"}},
    "ReLU, recompute full": {
        "model": {"hidden_act": "relu"},
        "train": {"recompute_granularity": "full"},
        "data": {"sequence_length": 512},
    },
}
CASES = [(layout, model) for layout in LAYOUTS for model in MODELS]
CORE = {
    ("one rank", "ReLU, recompute full"),
    ("one rank", "NAG, dropped activations, no final norm"),
    # Eight slopes are no multiple of what a bucket is padded to.
    ("dp4", "trained slopes"),
    ("tp2dp2sp", "as MPT, untied"),
    ("tp2dp2sp", "SwiGLU, RMSNorm, normalized heads"),
    ("pp2vpp2", "alibi"),
    ("tp2pp2sp", "recompute full"),
    ("cp4", "rotary, a quarter of grouped queries"),
    ("cp4", "t5"),
    ("cp4", "shaw"),
    ("pp4", "hybrid"),
    ("one rank", "cope"),
    ("one rank", "fire"),
}


def small_run(layout: str, model: str) -> RunConfig:
    """A run whose activations are larger than what a model of its size has beside them."""
    world_size, parallel = LAYOUTS[layout]
    pipeline = parallel.get("pipeline_model_parallel_size", 1)
    data = world_size // pipeline // parallel.get("tensor_model_parallel_size", 1)
    data //= parallel.get("context_parallel_size", 1)
    # As few as show every state of the schedule: one after as many as wait on the first stage; the
    # interleaved schedule takes multiples of the stages.
    micro_batches = (
        2 * pipeline if "virtual_pipeline_model_parallel_size" in parallel else (pipeline + 1)
    )
    sections = {name: dict(keys) for name, keys in MODELS[model].items()}
    shape = {"num_layers": 4 if pipeline > 1 else 2, "hidden_size": 256, "ffn_hidden_size": 1024}
    return tiny_config(
        parallel={**parallel, "world_size": world_size},
        data={"sequence_length": 256, **sections.pop("data", {})},
        batch={"micro_batch_size": 2, "global_batch_size": 2 * data * micro_batches},
        train={"precision": "bf16", **sections.pop("train", {})},
        model={**shape, **sections.pop("model", {})},
        **sections,
    )


def simulated(config: RunConfig, rank: int) -> dict[str, int]:
    assert config.parallel.world_size is not None
    with (
        simulated_rank(config, rank, config.parallel.world_size) as (topology, counter),
        Allocations(counter) as allocations,
    ):
        return measure(config, topology, allocations)


@pytest.mark.parametrize(("layout", "model"), mark_torture(CASES, CORE))
def test_a_rank_allocates_what_is_planned(layout, model):
    """State to the byte, and activations within 5 %, on a rank of every stage."""
    config = small_run(layout, model)
    shape = config.layout(LAYOUTS[layout][0])
    for stage in range(shape.pipeline):
        # Of the last replica, which sees the most keys where a sequence is split.
        measured = simulated(config, shape.tensor * ((stage + 1) * shape.replicas - 1))
        assert_as_planned(config, shape, stage, measured)


def assert_as_planned(config: RunConfig, layout: Any, stage: int, found: dict[str, int]) -> None:
    planned = memory_of_rank(config, layout, stage_of(config, layout, stage), is_modern=True)
    state = (planned.weights, planned.gradients, planned.optimizer)
    assert state == (found["weights"], found["gradients"], found["optimizer"])
    most = planned.activations + planned.logits + planned.buffers
    assert most == pytest.approx(found["peak"], rel=0.05)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_the_state_of_zero_2_and_3(zero_stage):
    """What is alive between two steps; buffers and gathered weights are bounds."""
    config = small_run("dp4", "alibi")
    parallel = config.parallel.model_copy(update={"zero_stage": zero_stage})
    config = config.model_copy(update={"parallel": parallel})
    measured, layout = simulated(config, 0), config.layout(4)
    planned = memory_of_rank(config, layout, stage_of(config, layout, 0), is_modern=True)
    if zero_stage == 2:
        # Gradients come and go.
        between = planned.weights + planned.optimizer
    else:
        padded = 4 * (planned.gradients // 4)
        between = planned.weights - 2 * padded + planned.optimizer + planned.gradients
        # The part of the buffers that is there for good is in fp32, the other in bf16.
        between += planned.wire * 4 // 6
    # The token ids of the last micro batch, single numbers, and the slopes.
    ids = 8 * config.batch.micro_batch_size * (config.data.sequence_length + 1)
    assert between <= measured["between"] < between + ids + 200
    assert measured["peak"] <= planned.total - planned.overhead
