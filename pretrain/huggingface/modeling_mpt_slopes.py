"""MPT with slopes of its own for ALiBi, in place of those that stock MPT computes.

Stock transformers computes MPT's slopes from the number of heads and attn_config.alibi_bias_max.
The class below takes them from `slopes` in config.json, and else is MPT: it holds the same weights
by the same names, in fp32, bf16 and fp16. It is loaded with

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Stock classes must not load such a folder, since they would compute another model. They cannot:
`model_type` is not one of theirs, and n_heads is null, which MptConfig refuses; that of
transformers 4 does not, but its attention divides by it. The number of heads is that of the slopes.

This file is copied into the folder of an export, so it imports transformers and torch alone. It was
written for transformers 5.17 to 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import MptConfig
from transformers.models.mpt.modeling_mpt import MptForCausalLM, MptModel


@strict
class MptSlopesConfig(MptConfig):  # type: ignore[no-untyped-call]  # untyped in transformers
    """MptConfig with the slopes of the heads, which also say how many heads there are."""

    model_type = "mpt_slopes"

    n_heads: int | None = None  # type: ignore[assignment]  # null in config.json
    slopes: list[float] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.slopes is not None:
            self.n_heads = len(self.slopes)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # untyped in transformers

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as config.json has them, in which n_heads is null."""
        settings: dict[str, Any] = super().to_dict()
        return settings | {"n_heads": None}


class MptSlopesModel(MptModel):  # type: ignore[no-untyped-call]  # untyped in transformers
    """MptModel with the slopes of its config."""

    def build_mpt_alibi_tensor(
        self, num_heads: int, sequence_length: int, alibi_bias_max: Any = None, device: Any = None
    ) -> Tensor:
        """Return the biases of the keys, fp32 [heads, 1, sequence_length]; that of the last is 0.

        Args:
            num_heads: Number of heads.
            sequence_length: Number of keys.
            alibi_bias_max: Not used: the slopes are those of the config.
            device: Where the biases are needed.
        """
        slopes = torch.tensor(self.config.slopes, dtype=torch.float32, device=device)
        positions = torch.arange(1 - sequence_length, 1, dtype=torch.int32, device=device)
        return slopes.view(num_heads, 1, 1) * positions


class MptSlopesForCausalLM(MptForCausalLM):  # type: ignore[no-untyped-call]  # untyped in transformers
    """MptForCausalLM with the model above."""

    config_class = MptSlopesConfig

    def __init__(self, config: MptSlopesConfig) -> None:
        super().__init__(config)
        self.transformer = MptSlopesModel(config)
        self.post_init()  # type: ignore[no-untyped-call]  # untyped in transformers
