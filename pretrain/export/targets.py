"""The stock classes that hold our models: for each, one literal table from our names to theirs, and its settings.

What each class computes was read in transformers 5.17 and 5.23 (`models/{bloom,mpt,opt,gpt_neox}/modeling_*.py`);
that it is the same function is measured by `export.parity` at every export.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.config import ConfigError, RunConfig
from pretrain.config.rules import Refusal

Transform = Callable[[RunConfig, Tensor], tuple[Tensor, ...]]
Table = dict[str, tuple[Any, ...]]
"""Our module -> (transform, their modules); `{i}` is the layer. Holds for .weight and .bias alike."""

BLOOM_EMBEDDING_SCALE = 2.0**-20
OPT_LAYERNORM_EPSILON = 1e-5
"""`OPTDecoderLayer` builds its LayerNorms with torch's default; no setting changes it."""


# ---- transforms: one of our tensors -> theirs -------------------------------------------------------------------
def same(config: RunConfig, tensor: Tensor) -> tuple[Tensor]:
    return (tensor,)


def separate(config: RunConfig, fused: Tensor) -> tuple[Tensor, ...]:
    """Fused rows [head, (q, k, v), head_dim] -> queries, keys and values, each [head, head_dim] rows."""
    heads = fused.view(config.model.num_attention_heads, 3, config.head_dim, *fused.shape[1:])
    return tuple(part.flatten(0, 1) for part in heads.unbind(1))


def stacked(config: RunConfig, fused: Tensor) -> tuple[Tensor]:
    """Fused rows [head, (q, k, v), head_dim] -> [(q, k, v), head, head_dim]."""
    return (torch.cat(separate(config, fused)),)


# ---- tables -------------------------------------------------------------------------------------------------------
BLOOM: Table = {
    "embedding.word_embeddings": (same, "transformer.word_embeddings"),
    "decoder.layers.{i}.input_layernorm": (same, "transformer.h.{i}.input_layernorm"),
    "decoder.layers.{i}.self_attention.linear_qkv": (
        same,
        "transformer.h.{i}.self_attention.query_key_value",
    ),
    "decoder.layers.{i}.self_attention.linear_proj": (
        same,
        "transformer.h.{i}.self_attention.dense",
    ),
    "decoder.layers.{i}.pre_mlp_layernorm": (same, "transformer.h.{i}.post_attention_layernorm"),
    "decoder.layers.{i}.mlp.linear_fc1": (same, "transformer.h.{i}.mlp.dense_h_to_4h"),
    "decoder.layers.{i}.mlp.linear_fc2": (same, "transformer.h.{i}.mlp.dense_4h_to_h"),
    "decoder.final_layernorm": (same, "transformer.ln_f"),
    "output_layer": (same, "lm_head"),
}
MPT: Table = {
    "embedding.word_embeddings": (same, "transformer.wte"),
    "decoder.layers.{i}.input_layernorm": (same, "transformer.blocks.{i}.norm_1"),
    "decoder.layers.{i}.self_attention.linear_qkv": (stacked, "transformer.blocks.{i}.attn.Wqkv"),
    "decoder.layers.{i}.self_attention.linear_proj": (same, "transformer.blocks.{i}.attn.out_proj"),
    "decoder.layers.{i}.pre_mlp_layernorm": (same, "transformer.blocks.{i}.norm_2"),
    "decoder.layers.{i}.mlp.linear_fc1": (same, "transformer.blocks.{i}.ffn.up_proj"),
    "decoder.layers.{i}.mlp.linear_fc2": (same, "transformer.blocks.{i}.ffn.down_proj"),
    "decoder.final_layernorm": (same, "transformer.norm_f"),
    "output_layer": (same, "lm_head"),
}
OPT: Table = {
    "embedding.word_embeddings": (same, "model.decoder.embed_tokens"),
    "decoder.layers.{i}.input_layernorm": (same, "model.decoder.layers.{i}.self_attn_layer_norm"),
    "decoder.layers.{i}.self_attention.linear_qkv": (
        separate,
        "model.decoder.layers.{i}.self_attn.q_proj",
        "model.decoder.layers.{i}.self_attn.k_proj",
        "model.decoder.layers.{i}.self_attn.v_proj",
    ),
    "decoder.layers.{i}.self_attention.linear_proj": (
        same,
        "model.decoder.layers.{i}.self_attn.out_proj",
    ),
    "decoder.layers.{i}.pre_mlp_layernorm": (same, "model.decoder.layers.{i}.final_layer_norm"),
    "decoder.layers.{i}.mlp.linear_fc1": (same, "model.decoder.layers.{i}.fc1"),
    "decoder.layers.{i}.mlp.linear_fc2": (same, "model.decoder.layers.{i}.fc2"),
    "decoder.final_layernorm": (same, "model.decoder.final_layer_norm"),
    "output_layer": (same, "lm_head"),
}
GPT_NEOX: Table = {
    "embedding.word_embeddings": (same, "gpt_neox.embed_in"),
    "decoder.layers.{i}.input_layernorm": (same, "gpt_neox.layers.{i}.input_layernorm"),
    "decoder.layers.{i}.self_attention.linear_qkv": (
        same,
        "gpt_neox.layers.{i}.attention.query_key_value",
    ),
    "decoder.layers.{i}.self_attention.linear_proj": (same, "gpt_neox.layers.{i}.attention.dense"),
    "decoder.layers.{i}.pre_mlp_layernorm": (same, "gpt_neox.layers.{i}.post_attention_layernorm"),
    "decoder.layers.{i}.mlp.linear_fc1": (same, "gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
    "decoder.layers.{i}.mlp.linear_fc2": (same, "gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
    "decoder.final_layernorm": (same, "gpt_neox.final_layer_norm"),
    "output_layer": (same, "lm_head"),
}


# ---- settings: RunConfig and the longest sequence -> keyword arguments of their config class --------------------
def _bloom(c: RunConfig, max_length: int) -> dict[str, Any]:
    m = c.model
    return {
        "hidden_size": m.hidden_size,
        "n_layer": m.num_layers,
        "n_head": m.num_attention_heads,
        "layer_norm_epsilon": m.layernorm_epsilon,
        "hidden_dropout": m.hidden_dropout,
        "attention_dropout": m.attention_dropout,
        "seq_length": max_length,
    }


def _mpt(c: RunConfig, max_length: int) -> dict[str, Any]:
    m = c.model
    return {
        "d_model": m.hidden_size,
        "n_layers": m.num_layers,
        "n_heads": m.num_attention_heads,
        "expansion_ratio": 4,
        "max_seq_len": max_length,
        "layer_norm_epsilon": m.layernorm_epsilon,
        "no_bias": True,
        "learned_pos_emb": False,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
        "use_cache": True,
    }


def _opt(c: RunConfig, max_length: int) -> dict[str, Any]:
    m = c.model
    return {
        "hidden_size": m.hidden_size,
        "word_embed_proj_dim": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "ffn_dim": c.ffn_hidden_size,
        "max_position_embeddings": max_length,
        "activation_function": m.hidden_act,
        "do_layer_norm_before": True,
        "dropout": m.hidden_dropout,
        "attention_dropout": m.attention_dropout,
    }


def _gpt_neox(c: RunConfig, max_length: int) -> dict[str, Any]:
    m = c.model
    rope = {
        "rope_type": "default",
        "rope_theta": float(c.position.rotary_base),
        "partial_rotary_factor": 1.0,
    }
    return {
        "hidden_size": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "intermediate_size": c.ffn_hidden_size,
        "hidden_act": m.hidden_act,
        "rope_parameters": rope,
        "use_parallel_residual": False,
        "layer_norm_eps": m.layernorm_epsilon,
        "max_position_embeddings": max_length,
        "hidden_dropout": m.hidden_dropout,
        "attention_dropout": m.attention_dropout,
    }


# ---- tensors that only they have ----------------------------------------------------------------------------------
def _bloom_extra(c: RunConfig, embedding: Tensor, max_length: int) -> dict[str, Tensor]:
    """Bloom normalises its embeddings and we do not, so that LayerNorm is made to do nothing.

    LN(a x) w = (x - mean) a w / sqrt(a^2 var(x) + eps), with w = sqrt(eps) / a and a tiny, is x - mean; and the mean is
    invisible to a pre-LN model, whose every reader is a LayerNorm.
    """
    a, eps = BLOOM_EMBEDDING_SCALE, c.model.layernorm_epsilon
    error = (
        0.5 * embedding.var(dim=1, unbiased=False).max().item() / eps
    )  # relative, of the rows times a already
    if error > 2.0**-21:  # a few roundings of fp32
        reason = f"too small to neutralise Bloom's embedding LayerNorm (relative error {error:.1e})"
        remedy = "Train with 1e-5, or with model.use_bias = false and model.hidden_act = gelu (MptForCausalLM)"
        raise ConfigError(str(Refusal("model.layernorm_epsilon", eps, reason, remedy)))
    return {
        "transformer.word_embeddings_layernorm.weight": torch.full(
            (c.model.hidden_size,), math.sqrt(eps) / a
        ),
        "transformer.word_embeddings_layernorm.bias": torch.zeros(c.model.hidden_size),
    }


def _opt_extra(c: RunConfig, embedding: Tensor, max_length: int) -> dict[str, Tensor]:
    """The sinusoids as OPT's position table, whose first two rows stand for padding."""
    half = c.model.hidden_size // 2
    frequency = torch.exp(torch.arange(half, dtype=torch.float64) * (-math.log(10_000.0) / half))
    angle = torch.arange(max_length, dtype=torch.float64)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], dim=1).float()
    return {"model.decoder.embed_positions.weight": torch.cat([torch.zeros(2, 2 * half), table])}


def _no_extra(c: RunConfig, embedding: Tensor, max_length: int) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Target:
    """A stock class and how a model of ours becomes one of it."""

    model_type: str
    class_name: str
    table: Table
    settings: Callable[[RunConfig, int], dict[str, Any]]
    has_bias: bool = True
    """Biases on linear layers and LayerNorms; where our model has none, zeros."""
    embedding_scale: Callable[[RunConfig], float] = lambda c: 1.0
    """Factor on the word embeddings; a tied output takes it back in the final LayerNorm."""
    extra: Callable[[RunConfig, Tensor, int], dict[str, Tensor]] = _no_extra
    """(config, scaled embeddings, max_length) -> tensors that only this class has."""


TARGETS = {
    "bloom": Target(
        "bloom",
        "BloomForCausalLM",
        BLOOM,
        _bloom,
        embedding_scale=lambda c: BLOOM_EMBEDDING_SCALE,
        extra=_bloom_extra,
    ),
    "mpt": Target("mpt", "MptForCausalLM", MPT, _mpt, has_bias=False),
    "opt": Target(
        "opt",
        "OPTForCausalLM",
        OPT,
        _opt,
        embedding_scale=lambda c: math.sqrt(c.model.hidden_size),
        extra=_opt_extra,
    ),
    "gpt_neox": Target("gpt_neox", "GPTNeoXForCausalLM", GPT_NEOX, _gpt_neox),
}


def check_exportable(config: RunConfig) -> Target:
    """The class that holds this model. Raises ConfigError with every reason why none does, and what would."""
    method, m = config.position.method, config.model
    if method in _WITHOUT_CLASS:
        raise ConfigError(
            str(
                Refusal(
                    "position.method",
                    method,
                    _WITHOUT_CLASS[method],
                    "`pretrain evaluate` measures it here; to export, train with alibi, rotary or "
                    "sinusoidal",
                )
            )
        )
    if method == "alibi":
        # MPT has no biases and erf GELU, Bloom biases and tanh GELU; biases of zero make Bloom serve tanh without any.
        target = TARGETS["mpt" if m.hidden_act == "gelu" and not m.use_bias else "bloom"]
    else:
        target = TARGETS["opt" if method == "sinusoidal" else "gpt_neox"]
    refusals = list(_refusals(config, target))
    if refusals:
        raise ConfigError("\n".join(str(r) for r in refusals))
    return target


_WITHOUT_CLASS = {
    "t5": "no stock transformers decoder adds T5's relative bias",
    "none": "no stock transformers decoder goes without positions",
    "learned": "a learned table ends at the training length, and an export is checked at 4 times that",
}


def _refusals(c: RunConfig, target: Target) -> Iterator[Refusal]:
    m, name = c.model, target.class_name
    if c.num_query_groups != m.num_attention_heads:
        yield Refusal(
            "model.num_query_groups",
            c.num_query_groups,
            f"{name} has a key and a value head per query head",
            f"Train with {m.num_attention_heads}, or leave it out",
        )
    if target is TARGETS["opt"] and m.layernorm_epsilon != OPT_LAYERNORM_EPSILON:
        yield Refusal(
            "model.layernorm_epsilon",
            m.layernorm_epsilon,
            f"{name} knows {OPT_LAYERNORM_EPSILON} alone",
            f"Train with {OPT_LAYERNORM_EPSILON}",
        )
    if c.position.method != "alibi":
        return
    if c.position.trainable_slopes:
        yield Refusal(
            "position.trainable_slopes",
            True,
            f"{name} computes its slopes from the number of heads",
            "Train with fixed slopes",
        )
    if c.ffn_hidden_size != 4 * m.hidden_size:
        yield Refusal(
            "model.ffn_hidden_size",
            c.ffn_hidden_size,
            f"{name} has 4 x hidden_size = {4 * m.hidden_size}",
            "Train with that, or leave it out; rotary (GPTNeoXForCausalLM) exports with any",
        )
    if target is TARGETS["bloom"] and m.hidden_act != "gelu_pytorch_tanh":
        yield Refusal(
            "model.hidden_act",
            m.hidden_act,
            f"{name} computes gelu_pytorch_tanh",
            "Train with that, or with gelu and model.use_bias = false (MptForCausalLM)",
        )
