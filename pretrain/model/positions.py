"""Hold the position method of a rank: its part of the parameters, and what it adds for its heads.

What a method does is said in `pretrain.positions`; the model asks here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from pretrain.config import RunConfig
from pretrain.positions.base import OWN, Rope


class Positions(nn.Module):
    """The position method of the model, for the heads of this tensor-parallel rank.

    One instance is shared by all layers and chunks of the rank.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config, self.method = config, config.position
        tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        count = config.model.num_attention_heads // tensor_size
        first = parallel_state.get_tensor_model_parallel_rank() * count
        self.heads = slice(first, first + count)
        for name, (_, *rest) in self.method.tensors(config).items():
            if name.startswith(OWN):
                part = _per_head_parameter(torch.empty(count, *rest))
                self.register_parameter(name.removeprefix(OWN), part)
        # Plain tensors and no buffers: casting the module to bf16 would round a buffer.
        self._fixed: dict[torch.device, dict[str, Any]] = {}

    @property
    def megatron_type(self) -> str:
        """GPTModel's position_embedding_type."""
        if self.method.rope() is not None:
            return "rope"
        # Makes GPTModel create a position table, which `embedding_table` may replace.
        return "learned_absolute" if self.method.adds_to_embeddings else "none"

    @property
    def rope(self) -> Rope:
        """GPTModel's rotary_base and rotary_percent, which it wants without a rotation, too."""
        return self.method.rope() or Rope(10_000, 1.0)

    def embedding_table(self) -> nn.Module | None:
        """Return the module that replaces Megatron's learned position table.

        It maps position ids [B, S] to what is added to the embeddings, [B, S, hidden]. None keeps
        what Megatron has built.
        """
        added = self.method.embedded(self.config, torch.zeros(1, 1, dtype=torch.int64))
        return None if added is None else AddedPositions(self.config)

    def queries_and_keys(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the scores see them, beside Megatron's rotation.

        Args:
            query: [queries, B, heads, D].
            key: [keys, B, groups, D].
        """
        return self.method.queries_and_keys(self.config, query, key)

    def score_terms(self, device: torch.device) -> dict[str, Any]:
        """Return what is added to the attention scores of this rank's heads.

        Args:
            device: The device of the queries.

        Returns:
            Keyword arguments of `pretrain.kernels.dispatch.attention`.
        """
        # By attribute, because that is when ZeRO 3 gathers a parameter which it has divided.
        if own := {name: getattr(self, name) for name in self._parameters}:
            return self.method.score_terms(self.config, self.heads, own, device)
        if device not in self._fixed:
            found = self.method.score_terms(self.config, self.heads, {}, device)
            self._fixed[device] = found
        return self._fixed[device]


class AddedPositions(nn.Module):
    """Map position ids [B, S] to what the method adds to the embeddings, [B, S, hidden]."""

    dtype_marker: Tensor
    """An empty buffer. It is cast with the model, so its dtype is the dtype of the embeddings."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("dtype_marker", torch.empty(0), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        added = self.config.position.embedded(self.config, position_ids)
        assert added is not None
        return added.to(self.dtype_marker.dtype)


def _per_head_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter whose dimension 0 is this rank's heads.

    It is marked as sharded in the way that Megatron marks its own parameters, which
    `pretrain.model.parameters` reads.
    """
    parameter = nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
