"""Bloom and MPT with other ALiBi slopes than those of the stock classes.

Stock transformers computes the slopes from the number of heads. The classes below take them from
`slopes` in config.json. Otherwise they are Bloom and MPT, with the same weights and names. Use
Bloom in fp32 only, like the stock class. Load a folder with

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Stock classes would compute another model from such a folder, and therefore cannot load it:
`model_type` is not one of theirs, and the number of heads is null. BloomConfig and MptConfig refuse
that; those of transformers 4 accept it, but their attention fails when it divides by it. These
classes take the number of heads from the number of slopes.

This file is copied into the folder of an export, so it imports only transformers and torch. It was
written for transformers 5.17 to 5.24.
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
    """A config with the slopes of the heads, which also determine the number of heads."""

    slopes: list[float] | None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.slopes is not None:
            setattr(self, self.attribute_map["num_attention_heads"], len(self.slopes))
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # as above

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for config.json, in which the number of heads is null."""
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
        """Return the biases of the keys, [B x heads, 1, keys], in Bloom's arrangement.

        Args:
            attention_mask: 1 for each key that is not padding, [B, keys].
            num_heads: Number of heads.
            dtype: Data type of the biases, in which Bloom adds them to its scores.
        """
        slopes = torch.tensor(self.config.slopes, dtype=torch.float32, device=attention_mask.device)
        # Positions count from the first key that is not padding.
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
        # Since transformers 5.24, `past_key_values` is called `cache`.
        cache = kwargs.pop("cache", past_key_values)
        given = inputs_embeds if input_ids is None else input_ids
        if attention_mask is None and given is not None:
            # Pass a mask, because without one BloomModel computes biases with Bloom's own slopes.
            size, keys = given.shape[:2]
            if cache is not None:
                keys = cache.get_mask_sizes(keys, 0)[0]
            attention_mask = torch.ones(size, keys, dtype=torch.long, device=given.device)
        return super().forward(input_ids, cache, attention_mask, inputs_embeds, **kwargs)


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
        """Return the biases of the keys, fp32 [heads, 1, sequence_length]; 0 for the last key.

        Args:
            num_heads: Number of heads.
            sequence_length: Number of keys.
            alibi_bias_max: Not used, because the slopes come from the config.
            device: Device of the result.
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
