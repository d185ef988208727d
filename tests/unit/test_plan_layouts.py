"""Parameters and buckets of ranks without the model, against Megatron's and an own formula."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pretrain.config import ConfigError, RunConfig, load_config, num_parameters
from pretrain.plan.memory import Stage, stage_of, stages_of, weights_of_rank
from pretrain.plan.search import Refused, candidates

PATH = "configs/cc100_roberta/alibi_1024.toml"
KEYS = {
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "sp": "parallel.sequence_parallel",
}
# 25 layers: all but pp1 and pp5 are uneven.
LAYOUTS = {
    "dp128": {},
    "tp2": {"tp": 2},
    "tp8 sp": {"tp": 8, "sp": "true"},
    "pp2": {"pp": 2},
    "tp2 pp4 sp": {"tp": 2, "pp": 4, "sp": "true"},
    "tp4 pp8": {"tp": 4, "pp": 8},
    "pp16": {"pp": 16},
    "pp2 vpp12": {"pp": 2, "vpp": 12},
    "tp2 pp4 vpp3 sp": {"tp": 2, "pp": 4, "vpp": 3, "sp": "true"},
    "tp8 pp16 sp": {"tp": 8, "pp": 16, "sp": "true"},
}


def config_of(layout: str) -> RunConfig:
    return load_config(PATH, overrides_of(layout))


def overrides_of(layout: str) -> list[str]:
    return [f"{KEYS[key]}={value}" for key, value in LAYOUTS[layout].items()]


def formula(config: RunConfig, stage: int) -> int:
    """Parameters of a rank, written down from the shapes of a GPT and Megatron's rules alone."""
    tensor = config.parallel.tensor_model_parallel_size
    pipeline = config.parallel.pipeline_model_parallel_size
    d, ffn, vocabulary = 2048, 8192, 50_304
    # qkv and fc1 split outputs and biases, proj and fc2 inputs, and two norms are whole.
    layer = (3 * d * d + 3 * d + d * d + 2 * d * ffn + ffn) // tensor + 2 * d + 4 * d
    layers = sum(n for c, n in enumerate(config.layers_per_chunk) if c % pipeline == stage)
    first, last = stage == 0, stage == pipeline - 1
    # Tied: a stage that is both has it once.
    embedding = vocabulary // tensor * d * (1 if first or last else 0)
    return layers * layer + embedding + last * 2 * d


class Built(NamedTuple):
    """What a rank holds whose model Megatron has built."""

    stage: int
    weights: list[tuple[str, tuple[int, ...]]]
    buckets: list[tuple[bool, list[str]]]


def built_rank(config: RunConfig, rank: int) -> Built:
    """Build the model of one rank of 128 on the meta device, by torch's fake process group."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pretrain import platform
    from pretrain.model.gpt import build_model
    from pretrain.model.parameters import named_parameters
    from pretrain.optim.buckets import plan_buckets
    from pretrain.topology import Process, finish, initialize

    platform.prepare(0)
    with platform.fp16_allowed_on_cpu():
        dist.init_process_group("fake", rank=rank, world_size=128, store=FakeStore())
        try:
            topology = initialize(config, Process(rank, 128, 0, "127.0.0.1", 0))
            named = list(named_parameters(build_model(config, device=torch.device("meta"))))
            names = {id(n.parameter): n.name for n in named}
            return Built(
                topology.pipeline_rank,
                [(n.name, tuple(n.shape)) for n in named],
                [
                    (b.is_late, [names[id(p)] for p in b.parameters])
                    for b in plan_buckets(config, named)
                ],
            )
        finally:
            finish()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_128_hold_the_planned_parameters(layout):
    """A rank of every stage: each parameter with its shape, and each bucket with its members."""
    config = config_of(layout)
    shape = config.layout(128)
    assert sum(config.layers_per_chunk) == 25
    ranks = [stage * shape.tensor * shape.data for stage in range(shape.pipeline)] + [127]
    found = [built_rank(config, rank) for rank in ranks]
    assert {rank.stage for rank in found} == set(range(shape.pipeline))
    for rank in found:
        weights = weights_of_rank(config, rank.stage)
        assert [(w.name, w.shape) for w in weights] == rank.weights
        assert sum(w.num_elements for w in weights) == formula(config, rank.stage)
        buckets = stage_of(config, shape, rank.stage).buckets
        assert [(b.is_late, list(b.names)) for b in buckets] == rank.buckets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_of_a_kind_stand_for_all(layout):
    config = config_of(layout)
    shape = config.layout(128)
    kinds = stages_of(config, shape)
    assert sum(stage.count for stage in kinds) == shape.pipeline
    total = sum(elements(stage) * stage.count for stage in kinds)
    every = [stage_of(config, shape, number) for number in range(shape.pipeline)]
    assert total == sum(map(elements, every))
    if shape.pipeline > 1:
        assert all(0 < stage.tail < 1 for stage in every)


def elements(stage: Stage) -> int:
    return sum(bucket.num_elements for bucket in stage.buckets)


def test_layouts_are_those_that_load():
    """Every layout of 16 GPUs loads from a file with its keys, and none is listed twice."""
    config = load_config(PATH)
    refused, seen = Refused(), set()
    for run, layout in candidates(config, 16, refused):
        assert layout == run.layout(16)
        key = (str(run.parallel), run.batch.micro_batch_size, run.train.recompute_granularity)
        assert key not in seen
        seen.add(key)
        if run.train.recompute_granularity == "full" and run.batch.micro_batch_size == 4:
            p = run.parallel
            settings = {
                "parallel.tensor_model_parallel_size": p.tensor_model_parallel_size,
                "parallel.pipeline_model_parallel_size": p.pipeline_model_parallel_size,
                "parallel.zero_stage": p.zero_stage,
                "parallel.sequence_parallel": str(p.sequence_parallel).lower(),
                "parallel.world_size": 16,
                "batch.micro_batch_size": 4,
                "train.recompute_granularity": "full",
            }
            if p.virtual_pipeline_model_parallel_size:
                virtual = p.virtual_pipeline_model_parallel_size
                settings["parallel.virtual_pipeline_model_parallel_size"] = virtual
            assert load_config(PATH, [f"{k}={v}" for k, v in settings.items()]) == run
    assert len(seen) > 300
    assert any("zero_stage: ZeRO N does not work with pipeline stages" in r for r in refused.counts)
    assert all(" = " in example for example in refused.examples.values())


def test_tensor_parallel_ranks_stay_in_a_node():
    """Of 24 GPUs in nodes of 8, groups of 3 or 6 would lie across two of them."""
    heads = ["model.num_attention_heads=24", "model.hidden_size=1536"]
    shape = ["model.ffn_hidden_size=6144", "batch.global_batch_size=1536", "parallel.world_size="]
    config = load_config(PATH, [*heads, *shape])
    for gpus, sizes in ((24, {1, 2, 4, 8}), (6, {1, 2, 3, 6})):
        found = {layout.tensor for _, layout in candidates(config, gpus, Refused())}
        assert found == sizes


def test_a_model_with_unknown_parameters_is_refused(monkeypatch):
    from pretrain.plan import memory

    def more(config, stage):
        return num_parameters(config) + 1

    monkeypatch.setattr(memory, "num_parameters_of_rank", more)
    with pytest.raises(ConfigError, match="of which `pretrain plan` knows"):
        weights_of_rank(load_config(PATH), 0)
