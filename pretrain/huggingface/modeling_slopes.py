"""Bloom and MPT with slopes of their own for ALiBi, in place of those that stock classes compute.

Stock transformers computes the slopes from the number of heads. The classes below take them from
`slopes` in config.json, and else are Bloom and MPT: they hold the same weights by the same names.
Bloom is for fp32, as the stock one. A folder is loaded with

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Stock classes must not load such a folder, since they would compute another model. They cannot:
`model_type` is not one of theirs, and the number of heads is null, which BloomConfig and MptConfig
refuse; those of transformers 4 do not, but their attention divides by it. The number of heads is
that of the slopes.

This file is copied into the folder of an export, so it imports transformers and torch alone. It was
written for transformers 5.17 to 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import BloomConfig, MptConfig, PreTrainedConfig
from transformers.models.bloom.modeling_bloom import BloomForCausalLM, BloomModel
from transformers.models.mpt.modeling_mpt import MptForCausalLM, MptModel


class _Slopes(PreTrainedConfig):  # type: ignore[no-untyped-call]  # untyped in transformers
    """A config with the slopes of the heads, which also say how many heads there are."""

    slopes: list[float] | None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.slopes is not None:
            setattr(self, self.attribute_map["num_attention_heads"], len(self.slopes))
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # as above

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as config.json has them, in which the number of heads is null."""
        return super().to_dict() | {self.attribute_map["num_attention_heads"]: None}


@strict
class BloomSlopesConfig(_Slopes, BloomConfig):  # type: ignore[no-untyped-call]  # as above
    """BloomConfig with slopes."""

    model_type = "bloom_slopes"

    n_head: int | None = None  # type: ignore[assignment]  # null in config.json
    slopes: list[float] | None = None


class BloomSlopesModel(BloomModel):  # type: ignore[no-untyped-call]  # untyped in transformers
    """BloomModel with the slopes of its config."""

    def build_alibi_tensor(
        self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the biases of the keys, [B x heads, 1, keys], as Bloom arranges them.

        Args:
            attention_mask: 1 for each key that is no padding, [B, keys].
            num_heads: Number of heads.
            dtype: That of the biases, in which Bloom adds them to its scores.
        """
        slopes = torch.tensor(self.config.slopes, dtype=torch.float32, device=attention_mask.device)
        # Positions count from the first key that is no padding.
        positions = (attention_mask.cumsum(dim=-1) - 1) * attention_mask
        biases = slopes[:, None] * positions[:, None, :]
        return biases.reshape(-1, 1, attention_mask.shape[1]).to(dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what BloomModel returns, for the same arguments."""
        given = inputs_embeds if input_ids is None else input_ids
        if attention_mask is None and given is not None:
            # Without a mask BloomModel computes the biases itself, with the slopes of Bloom.
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            size = given.shape[0], past + given.shape[1]
            attention_mask = torch.ones(size, dtype=torch.long, device=given.device)
        return super().forward(input_ids, past_key_values, attention_mask, inputs_embeds, **kwargs)


class BloomSlopesForCausalLM(BloomForCausalLM):  # type: ignore[no-untyped-call]  # as above
    """BloomForCausalLM with the model above."""

    config_class = BloomSlopesConfig

    def __init__(self, config: BloomSlopesConfig) -> None:
        super().__init__(config)
        self.transformer = BloomSlopesModel(config)
        self.post_init()  # type: ignore[no-untyped-call]  # untyped in transformers


@strict
class MptSlopesConfig(_Slopes, MptConfig):  # type: ignore[no-untyped-call]  # as above
    """MptConfig with slopes."""

    model_type = "mpt_slopes"

    n_heads: int | None = None  # type: ignore[assignment]  # null in config.json
    slopes: list[float] | None = None


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
