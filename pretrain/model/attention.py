"""Megatron's core attention, ours: asks the position method what to add and `pretrain.kernels.dispatch.attention` to compute."""

from __future__ import annotations

import contextlib

from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrain.kernels.dispatch import attention
from pretrain.model.positions import PositionMethod


class CoreAttention(MegatronModule):
    """Causal attention of this rank's heads; stands where Megatron's DotProductAttention would (which refuses a bias)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        position: PositionMethod,
        backend: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused,
    ) -> None:
        super().__init__(config=config)
        # In a tuple, so that the shared method's parameters are not registered again in every layer.
        self.position = (position,)
        self.backend = backend
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
        **unused,
    ) -> Tensor:
        """query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads x D]."""
        dropout = self.dropout if self.training else 0.0
        # Masks differ between tensor ranks (each has other heads). Under sequence parallelism Megatron has
        # already forked the generator around the whole block (transformer/transformer_block.py).
        fork = dropout > 0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else contextlib.nullcontext():
            out = attention(
                query,
                key,
                value,
                scale=self.scale,
                dropout_p=dropout,
                backend=self.backend,
                **self.position[0].score_terms(query.device),
            )
        return out.reshape(*out.shape[:2], -1)
