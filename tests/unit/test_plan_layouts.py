"""The list of tensors and the buckets of ranks, against the models that Megatron builds."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from pretrain import platform
from pretrain.config import RunConfig, load_config, num_parameters, num_parameters_of_rank
from pretrain.config.tensors import ModelTensor, model_tensors, stage_tensors
from pretrain.plan.command import candidates
from pretrain.plan.memory import Stage, stage_of, stages_of
from pretrain.positions.base import METHODS, OWN
from pretrain.topology import Process, finish, initialize
from tests.conftest import tiny_config

PATH = "configs/cc100_roberta/alibi_1024.toml"
KEYS = {
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "sp": "parallel.sequence_parallel",
}
# 25 layers: all but pp1 and pp5 are uneven.
LAYOUTS: dict[str, dict[str, object]] = {
    "dp128": {},
    "tp2": {"tp": 2},
    "tp2 pp4 sp": {"tp": 2, "pp": 4, "sp": "true"},
    "tp4 pp8": {"tp": 4, "pp": 8},
    "pp2 vpp12": {"pp": 2, "vpp": 12},
    "tp2 pp4 vpp3 sp": {"tp": 2, "pp": 4, "vpp": 3, "sp": "true"},
    "tp8 pp16 sp": {"tp": 8, "pp": 16, "sp": "true"},
}
MODELS = {
    "tp4 pp8, untied": ["model.tie_word_embeddings=false"],
    "tp2 pp4 sp, no final norm, learned": [
        "model.final_layernorm=false",
        "position.method=learned",
        "model.embedding_layernorm=true",
        "evaluation.lengths=[1024]",
    ],
    "pp2 vpp12, t5, embedding norm": [
        "position.method=t5",
        "model.embedding_layernorm=true",
        "model.parallel_residual=true",
    ],
    "tp2, groups, no bias, slopes": [
        "model.num_query_groups=8",
        "model.use_bias=false",
        "position.trainable_slopes=true",
    ],
    "tp8 pp16 sp, a block of today": [
        "model.use_bias=false",
        "model.add_qkv_bias=true",
        "model.normalization=rmsnorm",
        "model.qk_layernorm=true",
        "model.gated_linear_unit=true",
        "model.hidden_act=silu",
        "model.num_query_groups=8",
        "model.kv_channels=96",
    ],
    "pp2 vpp12, hybrid": [
        "position.method=hybrid",
        'position.layers=[{method="alibi",trainable_slopes=true},{method="none"},{method="t5"}]',
    ],
    "dp128, the 247M of WikiText-103": [
        "model.num_layers=16",
        "model.hidden_size=1024",
        "model.num_attention_heads=8",
        "model.ffn_hidden_size=4096",
        "model.use_bias=true",
        "data.vocab_size=267744",
        "model.make_vocab_size_divisible_by=8",
        "model.adaptive_cutoffs=[20000,60000]",
        "model.final_layernorm=false",
    ],
    "dp128, adaptive, untied": [
        "model.adaptive_cutoffs=[20000]",
        "model.tie_word_embeddings=false",
    ],
    **{
        f"tp2 pp4 sp, {name}": [f"position.method={name}"]
        for name, method in METHODS.items()
        if method.bias == "scores"
    },
}
"""Other models: a layout of LAYOUTS, and what is different."""


def config_of(name: str) -> RunConfig:
    layout = LAYOUTS[name.partition(",")[0]]
    keys = [f"{KEYS[key]}={value}" for key, value in layout.items()]
    return load_config(PATH, [*keys, *MODELS.get(name, [])])


class Built(NamedTuple):
    """What a rank holds whose model Megatron has built."""

    stage: int
    weights: list[tuple[str, tuple[int, ...], tuple[int, ...], bool]]
    """Name, shapes here and in the whole model, and whether another rank saves it."""
    buckets: list[tuple[bool, list[str]]]


def built_rank(config: RunConfig, rank: int) -> Built:
    """Build the model of one rank of 128 on the meta device, by torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pretrain.model.gpt import build_model, named_parameters
    from pretrain.optim.buckets import plan_buckets

    platform.prepare(0)
    with platform.fp16_allowed_on_cpu():
        dist.init_process_group("fake", rank=rank, world_size=128, store=FakeStore())
        try:
            topology = initialize(config, Process(rank, 128, 0, "127.0.0.1", 0))
            named = list(named_parameters(build_model(config, device=torch.device("meta"))))
            names = {id(n.parameter): n.name for n in named}
            return Built(
                topology.pipeline_rank,
                [(n.name, n.shape, n.global_shape, n.is_copy) for n in named],
                [
                    (b.is_late, [names[id(p)] for p in b.parameters])
                    for b in plan_buckets(config, named)
                ],
            )
        finally:
            finish()


def local_shape(each: ModelTensor, tensor: int) -> tuple[int, ...]:
    return tuple(n // tensor if i == each.axis else n for i, n in enumerate(each.shape))


@pytest.mark.parametrize("layout", ["tp2 pp4 vpp3 sp", *MODELS])
def test_ranks_of_128_hold_the_listed_tensors(layout):
    """A rank of every stage: each parameter with its shape, and each bucket with its members."""
    config = config_of(layout)
    shape = config.layout(128)
    # Tensor rank 0 of data rank 0 of every stage.
    found = [built_rank(config, n * shape.tensor * shape.data) for n in range(shape.pipeline)]
    assert [rank.stage for rank in found] == list(range(shape.pipeline))
    saved = set()
    for rank in found:
        tensors = stage_tensors(config, rank.stage)
        assert [
            (t.name, local_shape(t, shape.tensor), t.shape, t.is_copy) for t in tensors
        ] == rank.weights
        count = sum(t.of_rank(shape.tensor) for t in tensors)
        assert num_parameters_of_rank(config, rank.stage) == count
        saved |= {(name, whole) for name, _, whole, is_copy in rank.weights if not is_copy}
        buckets = stage_of(config, shape, rank.stage).buckets
        assert [(b.is_late, list(b.names)) for b in buckets] == rank.buckets
    listed = [t for t in model_tensors(config) if not t.is_copy]
    assert saved == {(t.name, t.shape) for t in listed}
    assert num_parameters(config) == sum(math.prod(t.shape) for t in listed)
    if "247M" in layout:
        # The number that fairseq's 16-layer model of the architecture transformer_lm_wiki103 prints
        # is in its examples/layerdrop/README.md.
        assert num_parameters(config) == 246_933_504


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
    refused: Counter[str] = Counter()
    seen = set()
    for run, layout in candidates(config, 16, refused):
        assert layout == run.layout(16)
        key = (str(run.parallel), run.batch.micro_batch_size, run.train.recompute_granularity)
        assert key not in seen
        seen.add(key)
        if run.train.recompute_granularity == "full" and run.batch.micro_batch_size == 4:
            settings = ["batch.micro_batch_size=4", "train.recompute_granularity=full"]
            for name, value in run.parallel.model_dump(mode="json", exclude_none=True).items():
                settings.append(f"parallel.{name}={str(value).lower()}")
            assert load_config(PATH, settings) == run
    assert len(seen) > 300
    assert sum("does not work with pipeline stages" in rule for rule in refused) == 1


def test_a_copy_of_the_model_that_needs_more_gpus_is_refused():
    config = load_config("configs/demo.toml", ["parallel.context_parallel_size=4"])
    refused = Counter()
    assert not list(candidates(config, 2, refused))
    assert any("does not divide the 2 processes" in reason for reason in refused)


def test_tensor_parallel_ranks_stay_in_a_node():
    """Of 24 GPUs in nodes of 8, groups of 3 or 6 would lie across two of them."""
    heads = ["model.num_attention_heads=24", "model.hidden_size=1536"]
    shape = ["model.ffn_hidden_size=6144", "batch.global_batch_size=1536", "parallel.world_size="]
    config = load_config(PATH, [*heads, *shape])
    for gpus, sizes in ((24, {1, 2, 4, 8}), (6, {1, 2, 3, 6})):
        found = {layout.tensor for _, layout in candidates(config, gpus, Counter())}
        assert found == sizes


def test_every_candidate_is_a_run_that_may_train():
    """Whichever key is enumerated: at ZeRO 2, learned positions refuse recomputation."""
    config = tiny_config(position={"method": "t5"}, parallel={"zero_stage": 2})
    found = [(r, layout) for r, layout in candidates(config, 2, Counter()) if layout.zero_stage > 1]
    assert found
    assert all(run.train.recompute_granularity == "none" for run, _ in found)


def test_stages_of_unequal_sizes_cut_the_positions_that_they_share_alike():
    """The copies are summed and compared bucket by bucket."""
    config = tiny_config(
        parallel={"pipeline_model_parallel_size": 2},
        model={"num_layers": 5, "ffn_hidden_size": 384},
        position={"method": "transformer_xl"},
    )
    first, last = (
        [
            b.names
            for b in stage_of(config, config.layout(4), n).buckets
            if b.names[0].startswith(OWN)
        ]
        for n in range(2)
    )
    assert first == last != []
