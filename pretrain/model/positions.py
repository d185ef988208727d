"""Position methods. Each answers three questions, and the model knows no other:

what is added to the embeddings (`embedding_scale`, `embedding_table`), what is done to queries and keys
(`megatron_type = "rope"`, Megatron's own), and what is added to the scores (`score_terms`, for this rank's heads).
A new method is one class and a line in METHODS.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from pretrain.config import RunConfig
from pretrain.kernels.alibi import alibi_slopes


class PositionMethod(nn.Module):
    """No positions at all (method "none"), and what every method shares."""

    megatron_type = "none"
    """GPTModel's position_embedding_type: none, learned_absolute or rope."""
    embedding_scale = 1.0
    """Factor on the word embeddings."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        count = config.model.num_attention_heads // tensor
        first = parallel_state.get_tensor_model_parallel_rank() * count
        self.heads = slice(first, first + count)
        """Which of the global heads this tensor-parallel rank computes."""

    def embedding_table(self) -> nn.Module | None:
        """Replaces Megatron's learned table: position ids [B, S] -> [B, S, hidden]. None keeps what Megatron built."""
        return None

    def score_terms(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments for `pretrain.kernels.dispatch.attention`: what is added to this rank's scores."""
        return {}

    def reset_parameters(self) -> None:
        """Sets own parameters, if any, to their initial values."""


class Alibi(PositionMethod):
    """Linear biases: -m_h (i - j) on the score of query i and key j (Press et al. 2022).

    The slopes are the *global* heads' slopes, sliced by tensor rank. Fixed, they are a plain tensor and no buffer:
    a cast of the module to bf16 must not round them.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.fixed = alibi_slopes(config.model.num_attention_heads)[self.heads].clone()
        self.trainable = config.position.trainable_slopes
        if self.trainable:
            self.slopes = _per_head(torch.empty(self.fixed.shape))

    def score_terms(self, device: torch.device) -> dict[str, Any]:
        if self.trainable:
            return {"slopes": self.slopes.float()}
        if self.fixed.device != device:
            self.fixed = self.fixed.to(device)
        return {"slopes": self.fixed}

    def reset_parameters(self) -> None:
        if self.trainable:
            with torch.no_grad():
                self.slopes.copy_(self.fixed)


class T5Bias(PositionMethod):
    """A learned bias per head and bucket of distances, one table for all layers (Raffel et al. 2020).

    Heads are sharded over tensor ranks; every pipeline stage holds the table, and its gradients are summed over them.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        shape = (self.heads.stop - self.heads.start, config.position.relative_attention_num_buckets)
        self.relative_attention_bias = _per_head(torch.empty(shape))

    def score_terms(self, device: torch.device) -> dict[str, Any]:
        return {
            "relative_attention_bias": self.relative_attention_bias,
            "relative_attention_max_distance": self.config.position.relative_attention_max_distance,
        }


class Sinusoidal(PositionMethod):
    """A fixed table of sines and cosines added once, to embeddings scaled by sqrt(hidden) (Vaswani et al. 2017)."""

    megatron_type = "learned_absolute"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.embedding_scale = math.sqrt(config.model.hidden_size)

    def embedding_table(self) -> nn.Module:
        return SinusoidalTable(self.config.model.hidden_size)


class Rotary(PositionMethod):
    """Queries and keys turned by their position in every layer, over the full head (Su et al. 2021); Megatron's own."""

    megatron_type = "rope"


class Learned(PositionMethod):
    """A learned table added to the embeddings; it ends at position.max_position_embeddings. Megatron's own."""

    megatron_type = "learned_absolute"


METHODS: dict[str, type[PositionMethod]] = {
    "alibi": Alibi,
    "sinusoidal": Sinusoidal,
    "rotary": Rotary,
    "t5": T5Bias,
    "learned": Learned,
    "none": PositionMethod,
}


class SinusoidalTable(nn.Module):
    """position ids [B, S] -> [B, S, hidden]: first half sines, second half cosines, of any length."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.pairs = hidden_size // 2
        self.like: Tensor  # empty, but cast with the model, so it knows the dtype
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        # float64: in fp32 an angle near position 2000 is rounded by 1e-4.
        k = torch.arange(self.pairs, device=position_ids.device, dtype=torch.float64)
        angle = position_ids[..., None] * torch.exp(k * (-math.log(10_000.0) / self.pairs))
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(self.like.dtype)


def _per_head(tensor: Tensor) -> nn.Parameter:
    """A parameter whose first axis is this rank's heads, marked as Megatron marks its sharded ones."""
    parameter = nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
