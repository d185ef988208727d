"""Bloom with attention scores and ALiBi biases in fp32, for weights in bf16 and fp16.

Stock transformers adds the bias m j of key j to the scores in the dtype of the weights. bf16 has 8
bits, so from position 256 on neighbouring keys get the same bias. The classes below compute what
the stock ones compute in fp32, and hold the same weights by the same names. They are loaded with

    AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", trust_remote_code=True)

This file is copied into the folder of an export, so it imports transformers and torch alone. It was
written for transformers 5.17 to 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import (
    BloomAttention,
    BloomForCausalLM,
    BloomModel,
    dropout_add,
)


class BloomFp32ScoresAttention(BloomAttention):
    """BloomAttention, except for the dtype of scores and biases."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the residual and the attention's output, and the probabilities.

        Args:
            hidden_states: The normalised input, [B, T, hidden].
            residual: What the output is added to, [B, T, hidden].
            alibi: Biases of the keys in fp32, [B x heads, 1, keys].
            attention_mask: What is added to the scores of keys that are not seen, [B, 1, T, keys].
            layer_past: The cache of keys and values, which stay in the dtype of the weights.
            use_cache: Changes nothing here, as in BloomAttention.
            output_attentions: Changes nothing here, as in BloomAttention.
            **kwargs: Further arguments of BloomAttention, which change nothing here.
        """
        batch_size, length, _ = hidden_states.shape
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        scores = query.float() @ key.float().transpose(-1, -2) * self.inv_norm_factor
        scores = scores + alibi.view(batch_size, self.num_heads, 1, -1)
        if attention_mask is not None:
            scores = scores + attention_mask
        probabilities = self.attention_dropout(F.softmax(scores, dim=-1).to(value.dtype))
        context = (probabilities @ value).transpose(1, 2).reshape(batch_size, length, -1)
        output = self.dense(context)
        return dropout_add(output, residual, self.hidden_dropout, self.training), probabilities


class BloomFp32ScoresModel(BloomModel):  # type: ignore[no-untyped-call]  # transformers'
    """BloomModel with the attention above."""

    def __init__(self, config: BloomConfig) -> None:
        super().__init__(config)
        for index, block in enumerate(self.h):
            block.self_attention = BloomFp32ScoresAttention(config, layer_idx=index)
        self.post_init()  # type: ignore[no-untyped-call]  # untyped in transformers

    def build_alibi_tensor(
        self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the biases of the keys, in fp32 instead of `dtype`."""
        biases: Tensor = super().build_alibi_tensor(attention_mask, num_heads, torch.float32)
        return biases

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what BloomModel returns, for the same arguments."""
        if attention_mask is None:
            # Without a mask BloomModel makes the biases itself, and rounds them.
            given = inputs_embeds if input_ids is None else input_ids
            if given is not None:
                past = 0 if past_key_values is None else past_key_values.get_seq_length()
                size = given.shape[0], past + given.shape[1]
                attention_mask = torch.ones(size, dtype=torch.long, device=given.device)
        return super().forward(
            input_ids=input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class BloomFp32ScoresForCausalLM(BloomForCausalLM):  # type: ignore[no-untyped-call]  # as above
    """BloomForCausalLM with the model above."""

    def __init__(self, config: BloomConfig) -> None:
        super().__init__(config)
        self.transformer = BloomFp32ScoresModel(config)
        self.post_init()  # type: ignore[no-untyped-call]  # untyped in transformers
