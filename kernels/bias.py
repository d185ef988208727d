"""What a score gets for the distance between its query and its key. A distance is query position minus key position."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ScoreBias(NamedTuple):
    """What is added to the scores of this rank's H heads: ALiBi's slopes, T5's table, or nothing."""

    slopes: Tensor | None
    """[H], fp32."""
    table: Tensor | None
    """[H, num_buckets]."""
    max_distance: int
    """Where the last bucket of the table begins."""
    causal: bool

    def at(self, distances: Tensor) -> Tensor:
        """fp32 [H, N] for integer `distances` [N]; [1, N] of zeros for nothing. Differentiable in slopes and table.

        It stays fp32 whatever q is: rounded to bf16, neighbouring keys far back would share one bias.
        """
        if self.slopes is not None:
            return -self.slopes[:, None] * distances.abs()
        if self.table is not None:
            buckets = relative_buckets(
                distances, self.table.shape[1], self.max_distance, self.causal
            )
            return self.table.float()[:, buckets]
        return torch.zeros(1, len(distances), device=distances.device)


def relative_buckets(
    distances: Tensor, num_buckets: int, max_distance: int, causal: bool
) -> Tensor:
    """The bucket of every distance, int64 in [0, num_buckets), any shape.

    Raffel et al. 2020, section 2.1: the first half of the buckets hold one distance each, the others logarithmically
    wider ranges up to `max_distance`, where the last one begins. Without a causal mask, half of the buckets are for
    keys after the query. The arithmetic is that of `T5Attention._relative_position_bucket` in transformers.
    Raises ValueError when the buckets do not fit the distance.
    """
    each_side = num_buckets if causal else num_buckets // 2
    exact = each_side // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"{num_buckets} relative attention buckets with max distance {max_distance}: want at least "
            f"{2 if causal else 4} buckets, and a distance above {exact}, as far as those of one distance each reach"
        )
    future = 0 if causal else (distances < 0).long() * each_side
    distances = distances.clamp(min=0) if causal else distances.abs()
    octaves = torch.log(distances.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    coarse = (exact + (octaves * (each_side - exact)).long()).clamp(max=each_side - 1)
    return future + torch.where(distances < exact, distances, coarse)
