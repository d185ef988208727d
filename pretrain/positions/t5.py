"""T5's relative position bias (Raffel et al. 2020): learned, per head and bucket of distances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.config.errors import Refusal
from pretrain.config.schema import Fixed
from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig


class T5(PositionMethod):
    """A learned bias on the attention scores for each bucket of distances.

    All layers share one table. Tensor ranks split it by heads, every pipeline stage holds a copy,
    and the gradients of the copies are summed (`pretrain.optim`).
    """

    method: Literal["t5"] = "t5"

    relative_attention_num_buckets: Fixed[int] = Field(default=32, gt=1)
    """Buckets of distances. The first half hold one distance each; the widths of the others grow
    logarithmically."""

    relative_attention_max_distance: int = Field(default=128, gt=1)
    """Distance in tokens beyond which all keys share the last bucket."""

    title = "T5 bias"
    bias = "table"

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the buckets cannot cover the distances."""
        # The first half of the buckets hold one distance each. The other half covers the distances
        # from there to the largest one, which must therefore be larger.
        buckets = self.relative_attention_num_buckets
        if self.relative_attention_max_distance <= buckets // 2:
            yield config.refusal(
                "position.relative_attention_max_distance",
                f"half of the {buckets} buckets hold one distance each and already reach as far",
                "Choose a larger distance, or fewer position.relative_attention_num_buckets",
            )
        if config.is_masked and buckets < 4:
            yield config.refusal(
                "position.relative_attention_num_buckets",
                'with train.objective = "masked" half of the buckets are for the tokens that '
                "follow",
                "Choose 4 or more",
            )

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        shape = (config.model.num_attention_heads, self.relative_attention_num_buckets)
        return {"position.relative_attention_bias": shape}

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        return {
            "relative_attention_bias": own["relative_attention_bias"],
            "relative_attention_max_distance": self.relative_attention_max_distance,
        }

    def reach(self, config: RunConfig) -> int:
        return min(config.data.sequence_length, self.relative_attention_max_distance)
