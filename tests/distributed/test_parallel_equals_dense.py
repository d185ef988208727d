"""Compare the sharded model with an independent dense GPT.

Every position method, in every layout, must give the logits, loss and gradients of
tests.reference.dense_gpt from the same weights.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.config import RunConfig, load_config
from pretrain.huggingface.classes import CLASSES
from pretrain.huggingface.import_model import import_folder
from pretrain.positions.base import METHODS
from pretrain.rundir.checkpoints import find_checkpoint
from pretrain.topology import initialize
from tests.conftest import ALL_LAYOUTS, LAYOUTS, mark_torture, tiny_config
from tests.distributed import tasks
from tests.reference.dense_gpt import DenseGPT, random_state, sinusoids
from tests.unit.test_import import FAMILIES, qwen3, randomise, saved

# Both sides compute in fp32 and differ in the order of their sums, which is 2^-24 per term over a
# few hundred terms and some layers. The largest differences seen over all cases are 1e-5 for logits
# of up to 3, and 4e-6 for gradients of up to 1.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}

# Each method with other settings of the model, so that these are checked under sharding too.
VARIANTS = {
    "alibi": {},
    "alibi-trainable": {"position": {"trainable_slopes": True}, "model": {"hidden_act": "gelu"}},
    # From above 1 to a slope that is nearly none; a zero stands in a list.
    "alibi-range": {"position": {"slopes": {"first": 1.5, "last": 0.0007}}},
    "alibi-list": {"position": {"slopes": [0.0, 0.31, 6.0, 0.02, 0.003, 1.0, 100.0, 1e-6]}},
    # A third of queries, keys and values is clipped.
    "alibi-clipped": {"model": {"clip_qkv": 0.15}, "position": {"slopes": {"bias_max": 3}}},
    "alibi-grouped": {"model": {"num_query_groups": 4, "tie_word_embeddings": False}},
    "alibi-uneven": {"model": {"num_layers": 5}},
    "sinusoidal": {"model": {"hidden_act": "relu"}},
    "rotary": {"model": {"tie_word_embeddings": False}},
    "t5": {"model": {"use_bias": False}},
    "learned": {"evaluation": {"lengths": [32]}},
    "none": {"model": {"use_bias": False, "tie_word_embeddings": False}},
    # Fewer positions than 32 tokens have.
    "shaw": {"position": {"max_relative_position": 5}, "model": {"num_query_groups": 4}},
    "cope": {"position": {"cope_positions": 6}},
    # It fades within 32 tokens.
    "xpos": {"position": {"xpos_scale_base": 20}},
    # A layer of its own for each kind of positions, so that stages differ.
    "hybrid": {
        "position": {
            "layers": [
                {"method": "alibi", "trainable_slopes": True},
                {"method": "none"},
                {"method": "rotary", "rotary_scaling": {"type": "linear", "factor": 2.0}},
                {"method": "cope"},
            ]
        }
    },
    "alibi-embedding-norm": {"model": {"embedding_layernorm": True}},
    # Here every tensor rank normalizes the whole sequence, also under sequence parallelism.
    "sinusoidal-embedding-norm": {"model": {"embedding_layernorm": True}},
    # GPT-2's embeddings, and the sinusoids that the paper of the Transformer states.
    "t5-unscaled": {"model": {"embedding_scale": 1.0}},
    "sinusoidal-vaswani": {"position": {"sinusoidal_table": "vaswani"}},
    # The residual stream reaches the output layer as it is.
    "alibi-no-final-norm": {"model": {"final_layernorm": False}},
    # Qwen3's block with all of Qwen2's biases: heads wider than hidden_size / heads.
    "rotary-modern": {
        "model": {
            "use_bias": False,
            "add_qkv_bias": True,
            "normalization": "rmsnorm",
            "qk_layernorm": True,
            "gated_linear_unit": True,
            "hidden_act": "silu",
            "num_query_groups": 4,
            "kv_channels": 16,
        },
    },
    # LayerNorms of heads, with biases, and a gate with all biases.
    "alibi-geglu": {"model": {"gated_linear_unit": True, "qk_layernorm": True}},
    "rotary-parallel": {
        "model": {"parallel_residual": True, "tie_word_embeddings": False},
        "position": {"rotary_percent": 0.5},
    },
    "kerple-power": {"position": {"kerple_kernel": "power"}, "model": {"num_query_groups": 4}},
    "rotary-yarn": {
        "position": {
            "rotary_percent": 0.5,
            "rotary_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    },
    # From below L to beyond it; a window within a rank's part of the sequence.
    "fire": {"position": {"fire_threshold": 12}},
    "windowed": {"position": {"window": 7}},
}
VARIANTS |= {method: {} for method in METHODS if method not in VARIANTS}


def variant_config(variant: str, heads: int, parallel: dict[str, Any]) -> RunConfig:
    """Return the config of a variant; its name starts with the position method."""
    sections = {name: dict(keys) for name, keys in VARIANTS[variant].items()}
    sections.setdefault("model", {})["num_attention_heads"] = heads
    sections.setdefault("position", {})["method"] = variant.split("-")[0]
    if variant == "alibi-list":
        slopes = sections["position"]["slopes"]
        sections["position"]["slopes"] = (2 * slopes)[:heads]
    # Two micro batches; test_optimizer.py adds up the gradients of more.
    batch = {"micro_batch_size": 4}
    return tiny_config(parallel=parallel, batch=batch, **sections)


Expected = tuple[dict[str, Tensor], Tensor, Tensor, float, dict[str, Tensor]]


@functools.cache
def _expected(variant: str, heads: int) -> Expected:
    """Return (weights, token ids, logits, loss, gradients) of the dense reference."""
    return expected_of(variant_config(variant, heads, {}))


def expected_of(config: RunConfig) -> Expected:
    """Return the same of any config."""
    state = random_state(config, seed=3)
    tokens = torch.randint(0, 512, (8, 33), generator=torch.Generator().manual_seed(5))
    model = DenseGPT(config).load_global_state(state)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return state, tokens, logits.detach(), float(loss), gradients


def assert_close_by_name(
    actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float
) -> None:
    """Compare tensors with those of the same names."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equals_dense(run, config: RunConfig, expected: Expected) -> None:
    """Run `tasks.gradients` by `run`, and compare what it returns with the dense reference's."""
    state, tokens, logits, loss, gradients = expected
    actual = run(tasks.gradients, config, state, tokens)[0]
    torch.testing.assert_close(actual["logits"], logits, **TOLERANCE)
    assert actual["loss"] == pytest.approx(loss, rel=1e-6)
    assert_close_by_name(actual["gradients"], gradients, **TOLERANCE)


# 12 heads have slopes that are no powers of 2, so the number matters to ALiBi alone.
CASES = [
    (variant, layout, heads) for variant in VARIANTS for layout in LAYOUTS for heads in (8, 12)
]
# What these change is the same in every layer, so two tensor ranks show it. Five are in SPLIT, too.
OF_HEADS = {"alibi-range", "alibi-list", "alibi-clipped", "t5-unscaled", "sinusoidal-vaswani"}
OF_HEADS |= {"alibi-grouped", "rotary-modern", "rotary-yarn", "kerple-power", "xpos"}
# Two stages and two tensor ranks in one layout; the others of what ranks share or have parts of.
CORE = {(variant, "tp2pp2sp", 8) for variant in VARIANTS if variant not in OF_HEADS}
CORE |= {("alibi-trainable", "tp2pp2sp", 12), ("alibi", "tp2", 12), ("alibi-uneven", "pp2vpp2", 8)}
# All that other methods share between ranks or stages, these slopes share, too.
CORE |= {("alibi-trainable", layout, 8) for layout in ("tp2", "pp2", "dp2", "pp2vpp2")}
CORE |= {(variant, "tp2", 8) for variant in {"sinusoidal-embedding-norm", *OF_HEADS}}
# Where a sequence is split: what a method adds by position, by distance or per head; and what is
# learned, of which each rank has a part of the gradient.
SPLIT = {
    ("alibi-trainable", "cp4", 8),
    ("alibi-grouped", "tp2cp2sp", 8),
    ("rotary-modern", "tp2cp2sp", 8),
    ("rotary-yarn", "cp2", 8),
    ("sinusoidal", "pp2vpp2cp2", 8),
    ("t5", "cp2", 8),
    ("learned", "cp4", 8),
    ("kerple-power", "tp2cp2sp", 8),
    ("xpos", "cp4", 8),
    ("hybrid", "tp2cp2sp", 8),
    ("cope", "cp2", 8),
    ("fire", "tp2cp2sp", 8),
}
# Their heads are those of two tensor ranks in SPLIT.
CORE = CORE - {(variant, "tp2", 8) for variant in ("alibi-grouped", "kerple-power")} | SPLIT


@pytest.mark.parametrize(("variant", "layout", "heads"), mark_torture(CASES, CORE))
def test_logits_and_gradients_equal_the_dense_reference(pools, variant, layout, heads):
    processes, parallel = LAYOUTS[layout]
    config = variant_config(variant, heads, parallel)
    assert_equals_dense(pools(processes).run, config, _expected(variant, heads))


@pytest.mark.parametrize("layout", ["one", "tp2sp"])
@pytest.mark.parametrize("variant", ["alibi", "rotary-modern"])
def test_layers_compute_the_bits_of_megatrons_own(pools, variant, layout):
    processes, parallel = ALL_LAYOUTS[layout]
    state, tokens, *_ = _expected(variant, 8)
    arguments = variant_config(variant, 8, parallel), state, tokens
    ours = pools(processes).run(tasks.gradients, *arguments)[0]
    theirs = pools(processes).run(with_megatrons_layers, *arguments)[0]
    assert torch.equal(ours["logits"], theirs["logits"]) and ours["loss"] == theirs["loss"]
    assert_close_by_name(ours["gradients"], theirs["gradients"], rtol=0.0, atol=0.0)


def with_megatrons_layers(*arguments: Any) -> dict[str, Any] | None:
    """Return `tasks.gradients` of the model whose layers are Megatron's code."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from pretrain.model import attention, gpt

    with contextlib.ExitStack() as stack:
        for ours, theirs in (
            (gpt.Block, TransformerBlock),
            (gpt.Layer, TransformerLayer),
            (attention.SelfAttention, SelfAttention),
        ):
            # Where ours only inherits a forward pass, the patch is taken away afterwards.
            patched = mock.patch.object(ours, "forward", theirs.forward, create=True)
            stack.enter_context(patched)
        return tasks.gradients(*arguments)


def _story_writer() -> Any:
    """MPT-7B-StoryWriter's settings, whose bias maximum the stock model drops."""
    model = FAMILIES["mpt_storywriter"]()
    model.transformer.build_mpt_alibi_tensor = functools.partial(
        build_mpt_alibi_tensor, alibi_bias_max=16
    )
    return model


# Qwen3's heads are wider than hidden_size / heads, and two have a key.
SIZES = {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("name", "make", "layout"),
    [("mpt", _story_writer, "one"), ("qwen3", lambda: qwen3(**SIZES), "tp2sp")],
)
def test_an_imported_model_has_the_logits_and_gradients_of_stock_transformers(
    pools, tmp_path, name, make, layout
):
    model, (processes, parallel) = randomise(make()), ALL_LAYOUTS[layout]
    import_folder(saved(model, tmp_path / "hf"), tmp_path / "run")
    overrides = ["train.precision=fp32", "data.sequence_length=32"]
    overrides += [f"parallel.{key}={str(value).lower()}" for key, value in parallel.items()]
    config = load_config(tmp_path / "run/config.toml", overrides)
    tokens = torch.randint(0, 512, (8, 33), generator=torch.Generator().manual_seed(5))
    logits = model(tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    expected = dict(CLASSES[name].restore(config, gradients.__getitem__, {}))
    state = load_global_state(open_checkpoint(find_checkpoint(tmp_path / "run")))
    actual = pools(processes).run(tasks.gradients, config, state, tokens)[0]
    torch.testing.assert_close(actual["logits"], logits, **TOLERANCE)
    assert_close_by_name(actual["gradients"], expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("model", "scale", "std"),
    [
        ({}, 96**0.5, 96**-0.5),
        ({"embedding_scale": 1.0, "embedding_init_method_std": 0.02}, 1, 0.02),
    ],
    ids=["fairseq", "gpt2"],
)
def test_every_method_begins_with_the_embeddings_of_its_authors_code(pools, model, scale, std):
    """fairseq: normal(0, 1 / sqrt(d)) times sqrt(d), for every method (models/transformer.py).

    GPT-2's are a setting of every method.
    """
    tokens = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(5))
    words = None
    for method in METHODS:
        config = tiny_config(
            position={"method": method},
            evaluation={"lengths": [32]} if method == "learned" else {},
            model={"tie_word_embeddings": False, **model},
        )
        found = pools(1).run(tasks.embeddings, config, tokens)[0]
        table = found["embedding.word_embeddings.weight"]
        # 49,152 draws: the standard error of their deviation is 0.3 %.
        assert table.std().item() == pytest.approx(std, rel=0.015)
        assert found["output_layer.weight"].std().item() == pytest.approx(std, rel=0.015)
        expected = table[tokens] * scale
        # The same words for all methods, times the same factor.
        words = expected if words is None else words
        torch.testing.assert_close(expected, words, rtol=0, atol=0)
        if method == "sinusoidal":
            expected = expected + sinusoids(32, 96).float()
        if method == "learned":
            places = found["embedding.position_embeddings.weight"]
            assert places.std().item() == pytest.approx(std, rel=0.05)
            expected = expected + places
        # Megatron multiplies, adds and transposes in fp32.
        torch.testing.assert_close(found["output"], expected, rtol=1e-6, atol=1e-6)


def test_trainable_slopes_start_from_the_chosen_ones(pools):
    """On two tensor ranks, each of which has its part of the heads of the whole model."""
    position = {"trainable_slopes": True, "slopes": {"first": 0.9, "last": 0.01}}
    config = tiny_config(position=position, parallel=LAYOUTS["tp2"][1])
    found = pools(2).run(tasks.initial_weights, config)[0]["position.slopes"]
    expected = [0.9 * (0.01 / 0.9) ** (head / 7) for head in range(8)]
    torch.testing.assert_close(found.tolist(), expected, rtol=1e-7, atol=0)


def test_a_method_may_make_those_of_its_layers_anew_each_time_it_is_asked(pools):
    """What is kept of a layer's method must not be found by an object that has its place."""
    assert pools(1).run(slopes_of_fresh_methods)[0] == [1.0, 0.5, 0.25, 0.125]


def slopes_of_fresh_methods() -> list[float]:
    """Return the first head's slope in each layer of a method whose layers are objects anew."""
    from pretrain.model.attention import Positions
    from pretrain.positions.alibi import Alibi

    def of_layer(_: Any, config: RunConfig, layer: int) -> Alibi:
        return Alibi(slopes=[0.5**layer] * config.model.num_attention_heads)

    config = tiny_config()
    initialize(config)
    with mock.patch.object(Alibi, "of_layer", of_layer):
        positions = Positions(config)
        terms = [positions.score_terms(torch.device("cpu"), n) for n in range(4)]
    return [float(each["slopes"][0]) for each in terms]
