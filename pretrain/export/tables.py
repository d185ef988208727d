"""Define how each class names and arranges our weights: one literal table, which reads both ways.

An export reads a table from left to right, an import from right to left. Biases, tied outputs and
what a class computes beside our model are the business of `targets` and `convert`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config import RunConfig


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
