"""Bloom with slopes of its own for ALiBi, and with scores and biases in fp32.

Stock transformers computes Bloom's slopes from the number of heads. The class below takes them from
`slopes` in config.json, and else is the class of modeling_bloom_fp32_scores.py, which stands beside
this file: it holds Bloom's weights by the same names, in fp32, bf16 and fp16. It is loaded with

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Stock classes must not load such a folder, since they would compute another model. They cannot:
`model_type` is not one of theirs, and n_head is null, which BloomConfig refuses. The number of
heads is that of the slopes.

This file is copied into the folder of an export, so it imports transformers, torch and its
neighbour alone. It was written for transformers 5.17 to 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import BloomConfig

from .modeling_bloom_fp32_scores import BloomFp32ScoresForCausalLM, BloomFp32ScoresModel


@strict
class BloomSlopesConfig(BloomConfig):  # type: ignore[no-untyped-call]  # untyped in transformers
    """BloomConfig with the slopes of the heads, which also say how many heads there are."""

    model_type = "bloom_slopes"

    n_head: int | None = None  # type: ignore[assignment]  # null in config.json
    slopes: list[float] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.slopes is not None:
            self.n_head = len(self.slopes)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # untyped in transformers

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as config.json has them, in which n_head is null."""
        settings: dict[str, Any] = super().to_dict()
        return settings | {"n_head": None}


class BloomSlopesModel(BloomFp32ScoresModel):  # type: ignore[no-untyped-call]  # untyped in transformers
    """BloomModel with the slopes of its config, and biases in fp32."""

    def build_alibi_tensor(
        self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the biases of the keys, fp32 [B x heads, 1, keys], as Bloom arranges them.

        Args:
            attention_mask: 1 for each key that is no padding, [B, keys].
            num_heads: Number of heads.
            dtype: Not used: the biases are fp32.
        """
        slopes = torch.tensor(self.config.slopes, dtype=torch.float32, device=attention_mask.device)
        # Positions count from the first key that is no padding.
        positions = (attention_mask.cumsum(dim=-1) - 1) * attention_mask
        biases = slopes[:, None] * positions[:, None, :]
        return biases.reshape(-1, 1, attention_mask.shape[1])


class BloomSlopesForCausalLM(BloomFp32ScoresForCausalLM):
    """BloomForCausalLM with the model above."""

    config_class = BloomSlopesConfig

    def __init__(self, config: BloomSlopesConfig) -> None:
        super().__init__(config)
        self.transformer = BloomSlopesModel(config)
        self.post_init()  # type: ignore[no-untyped-call]  # untyped in transformers
