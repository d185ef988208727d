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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pretrain.config import RunConfig
from pretrain.export.tables import BLOOM, GPT_NEOX, MPT, OPT, OPT_POSITION_OFFSET, Table
from pretrain.kernels.sinusoidal import sinusoidal_table


# ---- Factors -------------------------------------------------------------------------------------
# Our model multiplies its word embeddings by config.embedding_scale, which no class does, so the
# export stores the product. Where the same matrix is the output layer, the final LayerNorm is
# divided by the factor: (f e) . (LN(h) / f) = e . LN(h).
@dataclass(frozen=True)
class Factors:
    """By what an export multiplies our weights."""

    embedding: float = 1.0
    """Word embeddings. With tied output the final LayerNorm is divided by it."""
    embedding_norm: float = 1.0
    """The LayerNorm on the embeddings, if the model has one."""
    stream: float = 1.0
    """The residual stream: what attention and MLP add to it."""


Read = Callable[[str], Tensor]
"""A class's name of a tensor -> the tensor, in fp32."""


def _scaled_embeddings(config: RunConfig, embedding: Tensor) -> Factors:
    """Return the model's factor on its embeddings."""
    return Factors(embedding=config.embedding_scale)


def _as_exported(config: RunConfig, read: Read) -> Factors:
    """Return the same, which does not depend on the weights."""
    return Factors(embedding=config.embedding_scale)


# ---- Bloom: ALiBi with biases and tanh GELU (models/bloom/modeling_bloom.py) ---------------------
# BloomModel applies word_embeddings_layernorm to the embeddings e. A model of ours that does not
# (model.embedding_layernorm) has it neutralised. With embeddings a e, weight w = r sqrt(eps) / a
# and bias 0 it computes
#
#     LN(a e) = a (e - mean(e)) w / sqrt(a^2 var(e) + eps)
#             = r (e - mean(e)) / sqrt(1 + a^2 var(e) / eps)
#
# For a small a the root is 1 up to a relative error of a^2 var(e) / (2 eps), below the rounding of
# fp32, and what remains is r (e - mean(e)). Subtracting the mean has no effect: in a pre-LN model
# the residual stream is read by LayerNorms only, which subtract the mean themselves.
#
# In fp16, whose smallest number is 2^-24, a must not be that small. So the whole residual stream is
# multiplied by a power of two s, which needs weights and biases of linear_proj and linear_fc2 times
# s, and epsilons times s^2: LN(s x) with s^2 eps is LN(x) with eps. Bloom has one epsilon, which
# the embedding LayerNorm shares, and for which a may be s times larger. s is no larger, because
# fp16 ends at 65504, in the residual stream and in w. r is s times the model's embedding_scale.
#
# Tied output weights are a e as well, so convert() divides the weight and bias of the final
# LayerNorm by a, which leaves the logits as they were: (a e) . (LN(h) / a) = e . LN(h).
#
# a and s are powers of two, so all scalings are exact in fp32.
BLOOM_STREAM_SCALE = 8.0
BLOOM_MAX_RELATIVE_ERROR = 2.0**-20
"""Largest error of the embeddings: sixteen roundings of fp32 (2^-24 each)."""
_BLOOM_NORM = "transformer.word_embeddings_layernorm"


def _bloom_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of BloomConfig."""
    m = config.model
    stream = 1.0 if m.embedding_layernorm else BLOOM_STREAM_SCALE
    return {
        "hidden_size": m.hidden_size,
        "n_layer": m.num_layers,
        "n_head": m.num_attention_heads,
        "layer_norm_epsilon": m.layernorm_epsilon * stream**2,
        "hidden_dropout": m.hidden_dropout,
        "attention_dropout": m.attention_dropout,
        "seq_length": max_length,
    }


def _bloom_factors(config: RunConfig, embedding: Tensor) -> Factors:
    """Return the factors of an export, with the largest a that the embeddings allow."""
    if config.model.embedding_layernorm:
        # The model's factor stands behind the LayerNorm.
        return Factors(embedding_norm=config.embedding_scale)
    stream = BLOOM_STREAM_SCALE
    largest = embedding.var(dim=1, unbiased=False).max().item()
    # a^2 largest / (2 stream^2 eps) is the error.
    allowed = 2 * stream**2 * config.model.layernorm_epsilon * BLOOM_MAX_RELATIVE_ERROR
    a = 2.0 ** math.floor(math.log2(allowed / largest) / 2) if largest else 1.0
    return Factors(embedding=a, stream=stream)


def _bloom_stored_factors(config: RunConfig, read: Read) -> Factors:
    """Return the factors of an export, whose a is in the weight of the LayerNorm."""
    if config.model.embedding_layernorm:
        return Factors(embedding_norm=config.embedding_scale)
    stream = BLOOM_STREAM_SCALE
    weight = read(f"{_BLOOM_NORM}.weight")[0].item()
    if not weight > 0:
        return Factors(stream=stream)
    exact = _bloom_norm_weight(config, Factors(stream=stream)) / weight
    return Factors(embedding=2.0 ** round(math.log2(exact)), stream=stream)


def _bloom_norm_weight(config: RunConfig, factors: Factors) -> float:
    """Return w, as derived above."""
    factor = factors.stream * config.embedding_scale
    return factor * factors.stream * math.sqrt(config.model.layernorm_epsilon) / factors.embedding


def _bloom_extra(config: RunConfig, factors: Factors, max_length: int) -> dict[str, Tensor]:
    """Return the embedding LayerNorm that undoes itself, as derived above."""
    if config.model.embedding_layernorm:
        return {}
    size = config.model.hidden_size
    return {
        f"{_BLOOM_NORM}.weight": torch.full((size,), _bloom_norm_weight(config, factors)),
        f"{_BLOOM_NORM}.bias": torch.zeros(size),
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
        # The class has the slopes of 8 whatever is written here.
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
        "use_cache": True,
    }


# ---- Bloom and MPT with other slopes (modeling_bloom_slopes.py, modeling_mpt_slopes.py) ----------
# The number of heads is null, so that the stock class refuses the folder: transformers 5 checks the
# type, and transformers 4 divides by it.
# `export.huggingface` adds the slopes, which are among the weights if they were trained.
def _bloom_slopes_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of BloomSlopesConfig but for the slopes."""
    return _bloom_settings(config, max_length) | {"n_head": None}


def _mpt_slopes_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of MptSlopesConfig but for the slopes."""
    return _mpt_settings(config, max_length) | {"n_heads": None}


# ---- OPT: learned and sinusoidal positions (models/opt/modeling_opt.py) --------------------------
# OPT adds a learned table of positions to its embeddings, which needs no algebra. With sinusoidal
# positions the table is filled with the sinusoids of the first max_length positions.
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


def _opt_extra(config: RunConfig, factors: Factors, max_length: int) -> dict[str, Tensor]:
    """Return the table [2 + max_length, hidden_size] of sinusoids; the padding's rows are zeros."""
    if config.position.method == "learned":
        return {}
    width = config.model.hidden_size
    table = sinusoidal_table(torch.arange(max_length), width, config.position.sinusoidal_table)
    padding = torch.zeros(OPT_POSITION_OFFSET, width)
    return {"model.decoder.embed_positions.weight": torch.cat([padding, table.float()])}


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
def _no_extra(config: RunConfig, factors: Factors, max_length: int) -> dict[str, Tensor]:
    """Return no tensors."""
    return {}


@dataclass(frozen=True)
class Target:
    """A transformers class and how one of our models is stored in it."""

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
    code: str | None = None
    """Module and class that the folder brings along: for 16 bit, if the stock class fails there; or
    for slopes that no stock class computes."""
    stock: str = ""
    """Of a class that is not stock: model_type of the one that it is but for its slopes."""
    factors: Callable[[RunConfig, Tensor], Factors] = _scaled_embeddings
    """(config, our word embeddings) -> by what an export multiplies our weights."""
    stored_factors: Callable[[RunConfig, Read], Factors] = _as_exported
    """(config, the folder's weights) -> by what they were multiplied."""
    extra: Callable[[RunConfig, Factors, int], dict[str, Tensor]] = _no_extra
    """(config, factors, max_length) -> tensors that only this class has."""

    @property
    def family(self) -> str:
        """Return the model_type of the stock class that has these weights by these names."""
        return self.stock or self.model_type


STOCK_TARGETS = {
    "bloom": Target(
        "bloom",
        "BloomForCausalLM",
        BLOOM,
        _bloom_settings,
        "seq_length",
        code="modeling_bloom_fp32_scores.BloomFp32ScoresForCausalLM",
        factors=_bloom_factors,
        stored_factors=_bloom_stored_factors,
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
"""The stock classes, by model_type."""

TARGETS = STOCK_TARGETS | {
    "bloom_slopes": replace(
        STOCK_TARGETS["bloom"],
        model_type="bloom_slopes",
        class_name="BloomSlopesForCausalLM",
        settings=_bloom_slopes_settings,
        code="modeling_bloom_slopes.BloomSlopesForCausalLM",
        stock="bloom",
    ),
    "mpt_slopes": replace(
        STOCK_TARGETS["mpt"],
        model_type="mpt_slopes",
        class_name="MptSlopesForCausalLM",
        settings=_mpt_slopes_settings,
        code="modeling_mpt_slopes.MptSlopesForCausalLM",
        stock="mpt",
    ),
}
"""Every class that a model can be exported as, by model_type."""
