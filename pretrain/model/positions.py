"""Define the position methods.

A position method answers three questions, and the model knows nothing else about positions:

    What is added to the embeddings?       `embedding_table`
    What is done to queries and keys?      `megatron_type = "rope"`, which Megatron implements
    What is added to the attention scores? `score_terms`, for the heads of this rank

A new method is one class and one entry in METHODS.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from pretrain.config import RunConfig
from pretrain.kernels.alibi import SinusoidalForm, chosen_slopes, sinusoidal_table


class PositionMethod(nn.Module):
    """The base of all position methods; by itself, the method "none" (no positions)."""

    megatron_type = "none"
    """GPTModel's position_embedding_type: "none", "learned_absolute" or "rope"."""

    heads: slice
    """The global heads that this tensor-parallel rank computes."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        count = config.model.num_attention_heads // tensor_size
        first = parallel_state.get_tensor_model_parallel_rank() * count
        self.heads = slice(first, first + count)

    def embedding_table(self) -> nn.Module | None:
        """Return the module that replaces Megatron's learned position table.

        It maps position ids [B, S] to what is added to the embeddings, [B, S, hidden]. None keeps
        what Megatron has built.
        """
        return None

    def score_terms(self, device: torch.device) -> dict[str, Any]:
        """Return what is added to the attention scores of this rank's heads.

        Args:
            device: The device of the queries.

        Returns:
            Keyword arguments of `pretrain.kernels.dispatch.attention`.
        """
        return {}

    def reset_parameters(self) -> None:
        """Set the method's own parameters, if it has any, to values that are not random.

        Called after all parameters were filled by global name (`pretrain.model.gpt.initialise`).
        """


class Alibi(PositionMethod):
    """ALiBi: add -m_h (i - j) to the score of query i and key j in head h (Press et al. 2022).

    A tensor-parallel rank takes its slice of the slopes of all heads. Computing slopes for the
    number of local heads instead would give each rank the slopes of a smaller model.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        # A plain tensor and no buffer: casting the module to bf16 would round a buffer.
        self.fixed = chosen_slopes(config.slopes, config.model.num_attention_heads)[
            self.heads
        ].clone()
        self.trainable = config.position.trainable_slopes
        if self.trainable:
            self.slopes = _per_head_parameter(torch.empty(self.fixed.shape))

    def score_terms(self, device: torch.device) -> dict[str, Any]:
        if self.trainable:
            return {"slopes": self.slopes.float()}
        # Since it is no buffer, Module.to() does not move it.
        if self.fixed.device != device:
            self.fixed = self.fixed.to(device)
        return {"slopes": self.fixed}

    def reset_parameters(self) -> None:
        if self.trainable:
            with torch.no_grad():
                self.slopes.copy_(self.fixed)


class T5Bias(PositionMethod):
    """T5's relative position bias (Raffel et al. 2020): learned, per head and bucket of distances.

    One table serves all layers. It is sharded by heads over tensor ranks, and every pipeline stage
    holds a copy; the gradients of the copies are summed (`pretrain.optim`).
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        num_heads = self.heads.stop - self.heads.start
        num_buckets = config.position.relative_attention_num_buckets
        self.relative_attention_bias = _per_head_parameter(torch.empty(num_heads, num_buckets))

    def score_terms(self, device: torch.device) -> dict[str, Any]:
        return {
            "relative_attention_bias": self.relative_attention_bias,
            "relative_attention_max_distance": self.config.position.relative_attention_max_distance,
        }


class Sinusoidal(PositionMethod):
    """A fixed table of sines and cosines, added to the embeddings (Vaswani et al. 2017)."""

    # Makes GPTModel create a position table, which `embedding_table` then replaces.
    megatron_type = "learned_absolute"

    def embedding_table(self) -> nn.Module:
        config = self.config
        return SinusoidalTable(config.model.hidden_size, config.position.sinusoidal_table)


class Rotary(PositionMethod):
    """Megatron's rotary embeddings in every layer (Su et al. 2021).

    They rotate the first position.rotary_percent of each head's channels.
    """

    megatron_type = "rope"


class Learned(PositionMethod):
    """Megatron's learned position table, added to the embeddings.

    It has position.max_position_embeddings rows. Longer sequences cannot be evaluated.
    """

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
    """Map position ids [B, S] to sines and cosines [B, S, hidden], at any length."""

    dtype_marker: Tensor
    """An empty buffer. It is cast with the model, so its dtype is the dtype of the embeddings."""

    def __init__(self, hidden_size: int, form: SinusoidalForm) -> None:
        super().__init__()
        self.hidden_size, self.form = hidden_size, form
        self.register_buffer("dtype_marker", torch.empty(0), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        table = sinusoidal_table(position_ids, self.hidden_size, self.form)
        return table.to(self.dtype_marker.dtype)


def _per_head_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter whose dimension 0 is this rank's heads.

    It is marked as sharded in the way that Megatron marks its own parameters, which
    `pretrain.model.parameters` reads.
    """
    parameter = nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
