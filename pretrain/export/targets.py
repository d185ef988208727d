"""Define the stock transformers classes that hold our models, and how each stores our weights.

There is one literal table for each class, from our parameter names to its own (`tables`), and one
function here that returns the keyword arguments of its config class. Where a class computes
something that our model does not, the weights are rewritten so that both compute the same function,
and the algebra stands in a comment beside the code that does it.

The classes were read in transformers 5.17 and 5.23 (transformers/models/{bloom,mpt,opt,gpt_neox}/
modeling_*.py). `export.parity` measures at every export that the result is the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.config import ConfigError, RunConfig
from pretrain.config.refusal import Refusal
from pretrain.export.tables import BLOOM, GPT_NEOX, MPT, OPT, OPT_POSITION_OFFSET, Table

# ---- Bloom: ALiBi with biases and tanh GELU (models/bloom/modeling_bloom.py) ---------------------
# BloomModel applies word_embeddings_layernorm to the embeddings e. A model of ours that does not
# (model.embedding_layernorm) has it neutralised. With embeddings a e, weight w = sqrt(eps) / a and
# bias 0 it computes
#
#     LN(a e) = a (e - mean(e)) w / sqrt(a^2 var(e) + eps)
#             = (e - mean(e)) / sqrt(1 + a^2 var(e) / eps)
#
# For a small a the root is 1 up to a relative error of a^2 var(e) / (2 eps), below the rounding of
# fp32, and what remains is e - mean(e). Subtracting the mean has no effect: in a pre-LN model the
# residual stream is read by LayerNorms only, which subtract the mean themselves.
#
# Tied output weights are a e as well, so convert() divides the weight and bias of the final
# LayerNorm by a, which leaves the logits as they were: (a e) . (LN(h) / a) = e . LN(h).
#
# a is a power of two, so both scalings are exact in fp32. In float16 1 / a would overflow.
BLOOM_EMBEDDING_SCALE = 2.0**-20
BLOOM_MAX_RELATIVE_ERROR = 2.0**-21
"""Largest error of the embeddings that an export accepts: eight roundings of fp32 (2^-24 each)."""


def _bloom_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of BloomConfig."""
    m = config.model
    return {
        "hidden_size": m.hidden_size,
        "n_layer": m.num_layers,
        "n_head": m.num_attention_heads,
        "layer_norm_epsilon": m.layernorm_epsilon,
        "hidden_dropout": m.hidden_dropout,
        "attention_dropout": m.attention_dropout,
        "seq_length": max_length,
    }


def _bloom_scale(config: RunConfig) -> float:
    """Return the factor on the embeddings: a, unless the model has Bloom's LayerNorm itself."""
    a = 1.0 if config.model.embedding_layernorm else BLOOM_EMBEDDING_SCALE
    return a * config.embedding_scale


def _bloom_extra(config: RunConfig, embedding: Tensor, max_length: int) -> dict[str, Tensor]:
    """Return the embedding LayerNorm that undoes itself, as derived above.

    Raises:
        ConfigError: The epsilon is so small that the LayerNorm would change the embeddings.
    """
    if config.model.embedding_layernorm:
        return {}
    a, eps = BLOOM_EMBEDDING_SCALE, config.model.layernorm_epsilon
    # `embedding` is scaled by a already, so this is a^2 var(e) / (2 eps).
    error = 0.5 * embedding.var(dim=1, unbiased=False).max().item() / eps
    if error > BLOOM_MAX_RELATIVE_ERROR:
        reason = f"too small to neutralise Bloom's embedding LayerNorm (relative error {error:.1e})"
        remedy = (
            "Train with 1e-5, or with model.use_bias = false and model.hidden_act = gelu "
            "(MptForCausalLM)"
        )
        raise ConfigError(str(Refusal("model.layernorm_epsilon", eps, reason, remedy)))
    name, hidden_size = "transformer.word_embeddings_layernorm", config.model.hidden_size
    return {
        f"{name}.weight": torch.full((hidden_size,), math.sqrt(eps) / a),
        f"{name}.bias": torch.zeros(hidden_size),
    }


# ---- MPT: ALiBi without biases, with erf GELU (models/mpt/modeling_mpt.py) -----------------------
# Needs no algebra: linear layers are made without biases, and MptBlock sets those of its LayerNorms
# to None. build_mpt_alibi_tensor computes the slopes that our model has (test_export.py compares
# them for every number of heads to 40), in fp32 and for max_seq_len positions, where MPT ends.
def _mpt_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of MptConfig."""
    m = config.model
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


# ---- OPT: learned and sinusoidal positions (models/opt/modeling_opt.py) --------------------------
# OPT adds a learned table of positions to its embeddings, which needs no algebra. With sinusoidal
# positions, ours adds sinusoids to embeddings times sqrt(hidden_size), as in "Attention Is All You
# Need", section 3.4. So the table is filled with the sinusoids, which gives it an end, and the
# stored embeddings are e sqrt(hidden_size). Where they are tied to the output, the final LayerNorm
# is divided by sqrt(hidden_size), as for Bloom.
OPT_LAYERNORM_EPSILON = 1e-5
"""OPTDecoderLayer makes its LayerNorms with torch's default epsilon; no setting changes it."""


def _opt_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of OPTConfig."""
    m = config.model
    return {
        "hidden_size": m.hidden_size,
        "word_embed_proj_dim": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "ffn_dim": config.ffn_hidden_size,
        "max_position_embeddings": max_length,
        "activation_function": m.hidden_act,
        "do_layer_norm_before": True,
        "dropout": m.hidden_dropout,
        "attention_dropout": m.attention_dropout,
    }


def _opt_extra(config: RunConfig, embedding: Tensor, max_length: int) -> dict[str, Tensor]:
    """Return the table [2 + max_length, hidden_size] of sinusoids; padding has the rows of zeros.

    The first half of each row are sines, the second half cosines, of the angles
    p x 10000^(-k / (hidden_size / 2)), computed in fp64 as `model.positions.SinusoidalTable` does.
    """
    if config.position.method == "learned":
        return {}
    half = config.model.hidden_size // 2
    frequency = torch.exp(torch.arange(half, dtype=torch.float64) * (-math.log(10_000.0) / half))
    angle = torch.arange(max_length, dtype=torch.float64)[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], dim=1).float()
    padding = torch.zeros(OPT_POSITION_OFFSET, 2 * half)
    return {"model.decoder.embed_positions.weight": torch.cat([padding, table])}


# ---- GPT-NeoX: rotary positions (models/gpt_neox/modeling_gpt_neox.py) ---------------------------
# Needs no algebra either. rotate_half pairs channel k with channel k + n / 2, where n channels are
# rotated, as Megatron does unless rotary_interleaved is set.
def _gpt_neox_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of GPTNeoXConfig."""
    m = config.model
    rope = {
        "rope_type": "default",
        "rope_theta": float(config.position.rotary_base),
        "partial_rotary_factor": config.position.rotary_percent,
    }
    return {
        "hidden_size": m.hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "intermediate_size": config.ffn_hidden_size,
        "hidden_act": m.hidden_act,
        "rope_parameters": rope,
        "use_parallel_residual": m.parallel_residual,
        "layer_norm_eps": m.layernorm_epsilon,
        "max_position_embeddings": max_length,
        "hidden_dropout": m.hidden_dropout,
        "attention_dropout": m.attention_dropout,
    }


# ---- The classes ---------------------------------------------------------------------------------
def _embedding_scale(config: RunConfig) -> float:
    """Return the model's own factor: no class but ours multiplies its embeddings."""
    return config.embedding_scale


def _no_extra(config: RunConfig, embedding: Tensor, max_length: int) -> dict[str, Tensor]:
    """Return no tensors."""
    return {}


@dataclass(frozen=True)
class Target:
    """A stock transformers class and how one of our models is stored in it."""

    model_type: str
    """Key of its config class in AutoConfig."""
    class_name: str
    """Name of the class that AutoModelForCausalLM loads."""
    table: Table
    """Our modules -> theirs."""
    settings: Callable[[RunConfig, int], dict[str, Any]]
    """(config, max_length) -> keyword arguments of its config class."""
    length_key: str
    """Key of its config class that holds max_length."""
    has_bias: bool = True
    """True if linear layers and LayerNorms have biases, which are zeros if our model has none."""
    embedding_scale: Callable[[RunConfig], float] = _embedding_scale
    """Factor on the word embeddings. With tied output the final LayerNorm is divided by it."""
    extra: Callable[[RunConfig, Tensor, int], dict[str, Tensor]] = _no_extra
    """(config, scaled embeddings, max_length) -> tensors that only this class has."""


TARGETS = {
    "bloom": Target(
        "bloom",
        "BloomForCausalLM",
        BLOOM,
        _bloom_settings,
        "seq_length",
        embedding_scale=_bloom_scale,
        extra=_bloom_extra,
    ),
    "mpt": Target("mpt", "MptForCausalLM", MPT, _mpt_settings, "max_seq_len", has_bias=False),
    "opt": Target(
        "opt",
        "OPTForCausalLM",
        OPT,
        _opt_settings,
        "max_position_embeddings",
        extra=_opt_extra,
    ),
    "gpt_neox": Target(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        GPT_NEOX,
        _gpt_neox_settings,
        "max_position_embeddings",
    ),
}
"""Every class that a model can be exported as, by model_type."""
