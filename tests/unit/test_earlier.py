"""Resolved configs of releases without model.embedding_scale stay what they were."""

from __future__ import annotations

import math
import tomllib

import pytest

from pretrain.config import RunConfig, dump_config, load_config, parse_config
from pretrain.config.trajectory import Effect, differences

# What the last of these releases wrote to RUN/config.toml, but for sections that do not matter.
RESOLVED = """
[run]
directory = "runs/demo/alibi"
seed = 1234

[model]
num_layers = 4
hidden_size = 128
num_attention_heads = 8
hidden_act = "gelu_pytorch_tanh"
use_bias = true
tie_word_embeddings = true
embedding_layernorm = false
parallel_residual = false
hidden_dropout = 0.0
attention_dropout = 0.0
layernorm_epsilon = 1e-05
init_method_std = 0.03
make_vocab_size_divisible_by = 128
attention_backend = "auto"

[position]
method = "alibi"
trainable_slopes = false
rotary_base = 10000
rotary_percent = 1.0
relative_attention_num_buckets = 32
relative_attention_max_distance = 128

[batch]
micro_batch_size = 16
global_batch_size = 32

[data]
directory = "runs/demo/data"
sequence_length = 128
vocab_size = 4096
source = "shakespeare"

[optimizer]
learning_rate = 0.002
adam_beta1 = 0.9
adam_beta2 = 0.95
adam_eps = 1e-08
weight_decay = 0.1
clip_grad = 1.0
initial_loss_scale_power = 16

[train]
num_steps = 320
"""
METHODS = ("alibi", "sinusoidal", "rotary", "t5", "learned", "none")


def resolved(method: str, *overrides: str) -> RunConfig:
    values = tomllib.loads(RESOLVED)
    values["position"]["method"] = method
    return parse_config(values, "config.toml", overrides)


def written(method: str, **model: object) -> RunConfig:
    """Return the same run from the config that its user wrote."""
    values = tomllib.loads(RESOLVED)
    values["model"] = {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "init_method_std": 0.03,
        **model,
    }
    values["position"] = {"method": method}
    values["optimizer"] = {"learning_rate": 0.002}
    return parse_config(values, "mine.toml")


@pytest.mark.parametrize("method", METHODS)
def test_a_resolved_config_of_an_earlier_release_stays_what_it_was(method, tmp_path):
    config = resolved(method)
    assert config.embedding_scale == (math.sqrt(128) if method == "sinusoidal" else 1.0)
    assert config.embedding_init_method_std == config.model.init_method_std == 0.03
    if method == "sinusoidal":
        assert config.position.sinusoidal_table == "vaswani"
    copy = tmp_path / "copy.toml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_only_sinusoidal_embeddings_were_scaled_behind_a_layernorm():
    values = tomllib.loads(RESOLVED)
    values["model"]["embedding_layernorm"] = True
    scales = {}
    for method in METHODS:
        values["position"]["method"] = method
        scales[method] = parse_config(values, "config.toml").embedding_scale
    assert scales == dict.fromkeys(METHODS, 1.0) | {"sinusoidal": math.sqrt(128)}


@pytest.mark.parametrize("method", METHODS)
def test_a_users_config_has_the_same_embeddings_for_every_method(method):
    config = written(method)
    assert config.embedding_scale == math.sqrt(128)
    assert config.embedding_init_method_std == 128**-0.5
    assert config.position.sinusoidal_table == "fairseq"
    assert written(method, embedding_layernorm=True).embedding_scale == 1.0
    assert written(method, embedding_scale=3.0).embedding_scale == 3.0


def test_a_run_of_an_earlier_release_does_not_go_on_as_another_model():
    # What a release had for defaults and wrote into its configs, a user's own would say.
    same = {"hidden_act": "gelu_pytorch_tanh", "use_bias": True}
    found = {m: differences(resolved(m), written(m, **same)) for m in METHODS}
    keys = {m: {d.key for d in each if d.effect is not Effect.FREE} for m, each in found.items()}
    scale = {"model.embedding_scale"}
    assert keys == dict.fromkeys(METHODS, scale) | {
        "sinusoidal": {"position.sinusoidal_table"},
    }
    # The message says the value to set.
    assert (
        found["alibi"][0]
        .refusal("CHECKPOINT")
        .startswith(
            "model.embedding_scale = 11.313708498984761: CHECKPOINT was trained with 1.0. Keep it"
        )
    )
    assert differences(resolved("alibi"), written("alibi", embedding_scale=1.0, **same)) == [
        d for d in found["alibi"] if d.effect is Effect.FREE
    ]


def test_auto_is_no_other_scale_than_the_equal_number():
    same = written("alibi", embedding_scale=math.sqrt(128))
    assert differences(written("alibi"), same) == []
    # Of two spellings that are the same, the width alone is what changed.
    wider = {"hidden_size": 256, "ffn_hidden_size": 512}
    changed = differences(written("alibi", ffn_hidden_size=512), written("alibi", **wider))
    assert [d.key for d in changed] == ["model.hidden_size"]
