"""Find the transformers classes of a model_type, whether stock or our own, without a folder's code.

The code in a folder is a copy of ours. Loading the copy would run what somebody may have changed,
and leave another one in the user's cache (HF_MODULES_CACHE).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.config import ConfigError, RunConfig
from pretrain.config.describe import export_class
from pretrain.positions.base import LEARNED_TABLE

# ---- tables ----
# Define how each class names and arranges our weights: one literal table, which reads both ways.
#
# An export reads a table from left to right, an import from right to left. Biases, tied outputs and
# what a class computes beside our model are the business of `targets` and `convert`.


class Transform(NamedTuple):
    """A rearrangement of a module's weight and bias, which are treated alike; no value changes."""

    export: Callable[[RunConfig, Tensor], tuple[Tensor, ...]]
    """Turns one of our tensors into theirs."""
    restore: Callable[[RunConfig, Sequence[Tensor]], Tensor]
    """Turns theirs into ours."""


Table = dict[str, tuple[Transform, *tuple[str, ...]]]
"""Our module -> (transform, their modules), where `{i}` stands for the layer."""


# ---- Transforms ----------------------------------------------------------------------------------
# Megatron fuses the query, key and value projections of each head: with as many query groups as
# heads, the rows of linear_qkv are [head, (q, k, v), head_dim]. Bloom and GPT-NeoX use the same
# order (BloomAttention._reshape, GPTNeoXAttention.forward).


def _parts(config: RunConfig, fused: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values, each with rows [head, head_dim], as three tensors."""
    heads = fused.view(config.model.num_attention_heads, 3, config.head_dim, *fused.shape[1:])
    return tuple(part.flatten(0, 1) for part in heads.unbind(1))


def _fused(config: RunConfig, parts: Sequence[Tensor]) -> Tensor:
    """Return linear_qkv of queries, keys and values: the reverse of `_parts`."""
    heads = config.model.num_attention_heads, config.head_dim
    by_head = [part.reshape(*heads, *part.shape[1:]) for part in parts]
    return torch.stack(by_head, dim=1).flatten(0, 2)


UNCHANGED = Transform(lambda _, ours: (ours,), lambda _, theirs: theirs[0])
"""The tensor as it is."""
SPLIT_QKV = Transform(_parts, _fused)
"""Queries, keys and values as three tensors."""
STACK_QKV = Transform(
    lambda config, ours: (torch.cat(_parts(config, ours)),),
    lambda config, theirs: _fused(config, theirs[0].chunk(3)),
)
"""One tensor with rows [(q, k, v), head, head_dim], the order of MptAttention.Wqkv."""
OPT_POSITION_OFFSET = 2
"""OPTLearnedPositionalEmbedding.offset: position p is in row p + 2; the others are of padding."""
PAST_PADDING = Transform(
    lambda _, ours: (torch.cat([ours.new_zeros(OPT_POSITION_OFFSET, ours.shape[1]), ours]),),
    lambda _, theirs: theirs[0][OPT_POSITION_OFFSET:],
)
"""OPT's table of positions, behind the rows of padding, which our model does not have."""


# ---- Tables --------------------------------------------------------------------------------------
BLOOM: Table = {
    "embedding.word_embeddings": (UNCHANGED, "transformer.word_embeddings"),
    "embedding.word_embeddings_layernorm": (UNCHANGED, "transformer.word_embeddings_layernorm"),
    "decoder.layers.{i}.input_layernorm": (UNCHANGED, "transformer.h.{i}.input_layernorm"),
    "decoder.layers.{i}.self_attention.linear_qkv": (
        UNCHANGED,
        "transformer.h.{i}.self_attention.query_key_value",
    ),
    "decoder.layers.{i}.self_attention.linear_proj": (
        UNCHANGED,
        "transformer.h.{i}.self_attention.dense",
    ),
    "decoder.layers.{i}.pre_mlp_layernorm": (
        UNCHANGED,
        "transformer.h.{i}.post_attention_layernorm",
    ),
    "decoder.layers.{i}.mlp.linear_fc1": (UNCHANGED, "transformer.h.{i}.mlp.dense_h_to_4h"),
    "decoder.layers.{i}.mlp.linear_fc2": (UNCHANGED, "transformer.h.{i}.mlp.dense_4h_to_h"),
    "decoder.final_layernorm": (UNCHANGED, "transformer.ln_f"),
    "output_layer": (UNCHANGED, "lm_head"),
}
MPT: Table = {
    "embedding.word_embeddings": (UNCHANGED, "transformer.wte"),
    "decoder.layers.{i}.input_layernorm": (UNCHANGED, "transformer.blocks.{i}.norm_1"),
    "decoder.layers.{i}.self_attention.linear_qkv": (
        STACK_QKV,
        "transformer.blocks.{i}.attn.Wqkv",
    ),
    "decoder.layers.{i}.self_attention.linear_proj": (
        UNCHANGED,
        "transformer.blocks.{i}.attn.out_proj",
    ),
    "decoder.layers.{i}.pre_mlp_layernorm": (UNCHANGED, "transformer.blocks.{i}.norm_2"),
    "decoder.layers.{i}.mlp.linear_fc1": (UNCHANGED, "transformer.blocks.{i}.ffn.up_proj"),
    "decoder.layers.{i}.mlp.linear_fc2": (UNCHANGED, "transformer.blocks.{i}.ffn.down_proj"),
    "decoder.final_layernorm": (UNCHANGED, "transformer.norm_f"),
    "output_layer": (UNCHANGED, "lm_head"),
}
OPT: Table = {
    "embedding.word_embeddings": (UNCHANGED, "model.decoder.embed_tokens"),
    "embedding.position_embeddings": (PAST_PADDING, "model.decoder.embed_positions"),
    "decoder.layers.{i}.input_layernorm": (
        UNCHANGED,
        "model.decoder.layers.{i}.self_attn_layer_norm",
    ),
    "decoder.layers.{i}.self_attention.linear_qkv": (
        SPLIT_QKV,
        "model.decoder.layers.{i}.self_attn.q_proj",
        "model.decoder.layers.{i}.self_attn.k_proj",
        "model.decoder.layers.{i}.self_attn.v_proj",
    ),
    "decoder.layers.{i}.self_attention.linear_proj": (
        UNCHANGED,
        "model.decoder.layers.{i}.self_attn.out_proj",
    ),
    # OPT calls the LayerNorm before each MLP "final"; the last one of the decoder is another.
    "decoder.layers.{i}.pre_mlp_layernorm": (
        UNCHANGED,
        "model.decoder.layers.{i}.final_layer_norm",
    ),
    "decoder.layers.{i}.mlp.linear_fc1": (UNCHANGED, "model.decoder.layers.{i}.fc1"),
    "decoder.layers.{i}.mlp.linear_fc2": (UNCHANGED, "model.decoder.layers.{i}.fc2"),
    "decoder.final_layernorm": (UNCHANGED, "model.decoder.final_layer_norm"),
    "output_layer": (UNCHANGED, "lm_head"),
}
GPT_NEOX: Table = {
    "embedding.word_embeddings": (UNCHANGED, "gpt_neox.embed_in"),
    "decoder.layers.{i}.input_layernorm": (UNCHANGED, "gpt_neox.layers.{i}.input_layernorm"),
    "decoder.layers.{i}.self_attention.linear_qkv": (
        UNCHANGED,
        "gpt_neox.layers.{i}.attention.query_key_value",
    ),
    "decoder.layers.{i}.self_attention.linear_proj": (
        UNCHANGED,
        "gpt_neox.layers.{i}.attention.dense",
    ),
    "decoder.layers.{i}.pre_mlp_layernorm": (
        UNCHANGED,
        "gpt_neox.layers.{i}.post_attention_layernorm",
    ),
    "decoder.layers.{i}.mlp.linear_fc1": (UNCHANGED, "gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
    "decoder.layers.{i}.mlp.linear_fc2": (UNCHANGED, "gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
    "decoder.final_layernorm": (UNCHANGED, "gpt_neox.final_layer_norm"),
    "output_layer": (UNCHANGED, "lm_head"),
}


# ---- targets ----
# Define the stock transformers classes that hold our models, and how each stores our weights.
#
# There is one literal table for each class, from our parameter names to its own (`tables`), and one
# function here that returns the keyword arguments of its config class. Where a class computes
# something that our model does not, the weights are rewritten so that both compute the same
# function, and the algebra stands in a comment beside the code that does it.
#
# The classes were read in transformers 5.17 and 5.23 (transformers/models/{bloom,mpt,opt,gpt_neox}/
# modeling_*.py). `export.parity` measures at every export that the result is the same function.


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
    table = config.position.embedded(config, torch.arange(max_length))
    if table is None:
        return {}
    padding = torch.zeros(OPT_POSITION_OFFSET, config.model.hidden_size)
    return {"model.decoder.embed_positions.weight": torch.cat([padding, table.float()])}


# ---- GPT-NeoX: rotary positions (models/gpt_neox/modeling_gpt_neox.py) ---------------------------
# Needs no algebra either. rotate_half pairs channel k with channel k + n / 2, where n channels are
# rotated, as Megatron does unless rotary_interleaved is set.
def _gpt_neox_settings(config: RunConfig, max_length: int) -> dict[str, Any]:
    """Return the keyword arguments of GPTNeoXConfig."""
    m, rotation = config.model, config.position.rope()
    assert rotation is not None
    rope = {
        "rope_type": "default",
        "rope_theta": float(rotation.base),
        "partial_rotary_factor": rotation.percent,
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


# ---- Convert weights between our global names and a transformers class, in both directions ----
# `stored_tensors` says where a class stores each of our tensors and by which factor it is
# multiplied. An export follows that list forward (`convert`), an import backward (`restore`).


SLOPES = "position.slopes"
"""Trained slopes, which a class in the folder has among its settings (`export.huggingface`)."""
EMBEDDING, FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm"

_WITHOUT_BIAS = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "output_layer",
)


@dataclass(frozen=True)
class Stored:
    """One of our tensors and where a class stores it."""

    name: str
    """Our global name."""
    theirs: tuple[str, ...]
    """Names in the class's state_dict."""
    transform: Transform
    factor: float = 1.0
    """The class stores our tensor multiplied by this."""
    is_absent: bool = False
    """True if our model has no such tensor, and the class stores zeros: a bias."""

    def export(self, config: RunConfig, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return what the class stores, under the names `theirs`, of our tensor."""
        return self.transform.export(config, _times(tensor, self.factor))

    def restore(self, config: RunConfig, parts: list[Tensor]) -> Tensor:
        """Return our tensor, of what the class stores under the names `theirs`."""
        return _divided(self.transform.restore(config, parts), self.factor)


def stored_tensors(target: Target, config: RunConfig, factors: Factors) -> Iterator[Stored]:
    """Yield every tensor of the class but those of `target.extra`; a weight before its bias.

    Args:
        target: The class.
        config: The run's config.
        factors: By what the class stores our weights multiplied.
    """
    m = config.model
    left_out = {
        "output_layer": m.tie_word_embeddings,
        "embedding.word_embeddings_layernorm": not m.embedding_layernorm,
        "embedding.position_embeddings": LEARNED_TABLE not in config.position.tensors(config),
    }
    # A tied output layer multiplies by the scaled embeddings too. Dividing the final LayerNorm by
    # the same factor cancels it in the logits.
    by_module = {
        "embedding.word_embeddings": factors.embedding,
        "embedding.word_embeddings_layernorm": factors.embedding_norm,
        "decoder.layers.{i}.self_attention.linear_proj": factors.stream,
        "decoder.layers.{i}.mlp.linear_fc2": factors.stream,
        FINAL_NORM: 1 / factors.embedding if m.tie_word_embeddings else 1.0,
    }
    for module, (transform, *theirs) in target.table.items():
        if left_out.get(module):
            continue
        has_bias = target.has_bias and module not in _WITHOUT_BIAS
        for i in range(m.num_layers if "{i}" in module else 1):
            for kind in ("weight", "bias") if has_bias else ("weight",):
                yield Stored(
                    f"{module.format(i=i)}.{kind}",
                    tuple(f"{name.format(i=i)}.{kind}" for name in theirs),
                    transform,
                    by_module.get(module, 1.0),
                    is_absent=kind == "bias" and not m.use_bias,
                )


def convert(
    target: Target, config: RunConfig, state: Mapping[str, Tensor], max_length: int
) -> dict[str, Tensor]:
    """Return the weights under the names and in the shapes of the target class, in fp32.

    Args:
        target: Class to convert to.
        config: The run's resolved config.
        state: Full fp32 tensors by global name.
        max_length: Longest sequence in tokens, which sizes OPT's table of positions.

    Returns:
        Tensors by their names in the class's state_dict.

    Raises:
        ConfigError: A tensor that the config needs is missing, one is left over, or the embeddings
            have another shape.
    """
    # Tensors are taken out of `rest` as they are converted, so that none can be forgotten.
    rest = dict(state)
    if target.stock and SLOPES in config.position.tensors(config):
        _take(rest, SLOPES)
    embedding = _take(dict(rest), EMBEDDING)
    shape = config.padded_vocab_size, config.model.hidden_size
    if embedding.shape != shape:
        raise ConfigError(
            f"{EMBEDDING}: has shape {tuple(embedding.shape)}, but the config asks for {shape}. "
            "Are these another run's weights?"
        )
    factors = target.factors(config, embedding)
    out = target.extra(config, factors, max_length)
    tensor = embedding
    for stored in stored_tensors(target, config, factors):
        # A bias that our model does not have follows its weight.
        absent = tensor.new_zeros(tensor.shape[0])
        tensor = absent if stored.is_absent else _take(rest, stored.name)
        for name, part in zip(stored.theirs, stored.export(config, tensor), strict=True):
            out[name] = part.float().contiguous()
    if rest:
        raise ConfigError(
            f"the weights hold tensors that the config does not have: "
            f"{', '.join(sorted(rest)[:5])}. Are these another run's weights?"
        )
    return out


def not_restored(
    target: Target, config: RunConfig, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return those of our tensors that `restore` would not give back bit for bit.

    That is so where the factor is no power of two (sqrt(hidden_size): of two neighbouring numbers,
    both may round to the same product), or where the product leaves fp32's normal range.

    Args:
        target: The class that is exported to.
        config: The run.
        state: Our fp32 masters by global name.
    """
    lost = {}
    factors = target.factors(config, state[EMBEDDING])
    for stored in stored_tensors(target, config, factors):
        if stored.factor != 1.0 and not stored.is_absent:
            tensor = state[stored.name]
            if not same_bits(_divided(_times(tensor, stored.factor), stored.factor), tensor):
                lost[stored.name] = tensor.contiguous()
    return lost


def restore(
    target: Target,
    config: RunConfig,
    factors: Factors,
    read: Read,
    originals: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors by global name, one at a time.

    Args:
        target: Class that the weights were stored in.
        config: The run's config.
        factors: By what the class stores our weights multiplied.
        read: Returns a tensor of the class by its name, in fp32.
        originals: What `not_restored` returned at the export; used where it still is what the class
            stores.

    Raises:
        ConfigError: The config has no biases, and one of the class's is not zero.
    """
    for stored in stored_tensors(target, config, factors):
        parts = [read(name) for name in stored.theirs]
        if stored.is_absent:
            if any(part.count_nonzero() for part in parts):
                raise ConfigError(
                    f"{stored.theirs[0]}: is not zero, but model.use_bias = false. The weights "
                    "were changed after the export"
                )
            continue
        original = originals.get(stored.name)
        if original is not None and _is_stored(stored, config, original, parts):
            yield stored.name, original
        else:
            yield stored.name, stored.restore(config, parts).contiguous()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two fp32 tensors have the same shape and bits; unlike ==, 0 is not -0."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def _is_stored(stored: Stored, config: RunConfig, original: Tensor, parts: list[Tensor]) -> bool:
    """Return True if the parts are what an export of the original would store."""
    if original.dtype != torch.float32:
        return False
    mine = stored.restore(config, parts)
    return mine.shape == original.shape and all(
        map(same_bits, stored.export(config, original), parts)
    )


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return the product with `factor`; the tensor itself for 1, which keeps a NaN's bits."""
    return tensor if factor == 1.0 else tensor * factor


def _divided(product: Tensor, factor: float) -> Tensor:
    """Return a tensor whose product with `factor` is `product`, where there is one, else nearby."""
    if factor == 1.0:
        return product
    quotient = product / factor
    # The quotient is rounded. Its product almost always is the one again, but for sqrt(2048) and
    # 0x1.6a09e8 only the product of its neighbour is.
    for direction in (-torch.inf, torch.inf):
        neighbour = torch.nextafter(quotient, torch.full_like(quotient, direction))
        is_it = (quotient * factor != product) & (neighbour * factor == product)
        quotient = torch.where(is_it, neighbour, quotient)
    return quotient


def _take(rest: dict[str, Tensor], name: str) -> Tensor:
    """Remove a tensor from `rest` and return it; raise ConfigError if it is missing."""
    if name not in rest:
        raise ConfigError(
            f"{name}: missing from the weights, but the config needs it. Are these another run's "
            "weights?"
        )
    return rest.pop(name)


# ---- selection ----
# Choose how a model is stored: the class by `pretrain.config.describe`, its tables by `targets`.


def check_exportable(config: RunConfig) -> Target:
    """Return the class that can hold this model.

    Raises:
        ConfigError: No class can. The message gives every reason, and what to train instead.
    """
    return TARGETS[export_class(config).model_type]


def is_own(model_type: object) -> bool:
    """Return True if a folder of this model_type is loaded by a class of ours."""
    return isinstance(model_type, str) and model_type in TARGETS and bool(TARGETS[model_type].stock)


def config_class(model_type: str) -> Any:
    """Return the config class of a model_type."""
    if not is_own(model_type):
        from transformers import AutoConfig

        return type(AutoConfig.for_model(model_type))
    return _own(model_type)[0]


def model_class(model_type: str) -> Any:
    """Return what loads a model of a model_type: one of our classes, or AutoModelForCausalLM."""
    if not is_own(model_type):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM
    return _own(model_type)[1]


def build_model(settings: Any) -> Any:
    """Return a model with the weights that it starts with.

    Args:
        settings: The transformers config.
    """
    if not is_own(settings.model_type):
        return model_class(settings.model_type).from_config(settings)
    return model_class(settings.model_type)(settings)


def auto_map(code: str, model_type: str) -> dict[str, str]:
    """Return what config.json says of the code in the folder.

    Args:
        code: Module and class of the model.
        model_type: Its model_type, whose config is stock or stands in the same module.
    """
    found = {"AutoModelForCausalLM": code}
    if not is_own(model_type):
        # Stock loaders take their own class; with trust_remote_code=True they take this one.
        return found
    return {"AutoConfig": f"{code.partition('.')[0]}.{_own(model_type)[0].__name__}"} | found


def code_files(code: str) -> list[Path]:
    """Return the files that a folder brings along: the module, and the neighbours that it imports.

    Args:
        code: Module and class of the model.
    """
    module = Path(__file__).with_name(f"{code.partition('.')[0]}.py")
    neighbours = re.findall(r"^from \.(\w+) import", module.read_text(), re.MULTILINE)
    return [module, *(module.with_name(f"{name}.py") for name in neighbours)]


def _own(model_type: str) -> tuple[Any, Any]:
    """Return our config class and model class of a model_type."""
    # Imported here, since transformers' modelling code takes seconds to load.
    from pretrain.huggingface.modeling_bloom_slopes import BloomSlopesConfig, BloomSlopesForCausalLM
    from pretrain.huggingface.modeling_mpt_slopes import MptSlopesConfig, MptSlopesForCausalLM

    return {
        "bloom_slopes": (BloomSlopesConfig, BloomSlopesForCausalLM),
        "mpt_slopes": (MptSlopesConfig, MptSlopesForCausalLM),
    }[model_type]
