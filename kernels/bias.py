"""The bias that is added to attention scores: ALiBi slopes, T5's relative buckets, or nothing.

A distance is the position of the query minus the position of the key.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ScoreBias(NamedTuple):
    """The bias for the scores of this rank's H heads: slopes, a table, or neither."""

    slopes: Tensor | None
    """ALiBi: [H], fp32."""
    table: Tensor | None
    """T5: [H, num_buckets]."""
    max_distance: int
    """T5: the distance at which the last bucket begins."""
    causal: bool

    def at(self, distances: Tensor) -> Tensor:
        """Return the bias of every head at the given distances, differentiable in slopes and table.

        The result is fp32 whatever the dtype of q. In bf16, neighbouring keys far from the query
        would round to the same bias.

        Args:
            distances: [N], integers.

        Returns:
            [H, N], fp32; zeros [1, N] if there is no bias.
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
    """Return the bucket of every distance.

    The rule is that of Raffel et al. 2020, section 2.1: the first half of the buckets hold one
    distance each; the others hold ranges that grow logarithmically up to `max_distance`, where the
    last one begins. Without a causal mask, half of all buckets are for keys after the query. The
    arithmetic is that of `T5Attention._relative_position_bucket` in transformers.

    Args:
        distances: Integers of any shape. Negative ones count as 0 under a causal mask.
        num_buckets: Number of buckets.
        max_distance: Distance at which the last bucket begins.
        causal: Attention is causal.

    Returns:
        int64 in [0, num_buckets), in the shape of `distances`.

    Raises:
        ValueError: There are too few buckets, or `max_distance` is within the exact half.
    """
    each_side = num_buckets if causal else num_buckets // 2
    exact = each_side // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"{num_buckets} relative attention buckets with max distance {max_distance}: expected "
            f"at least {2 if causal else 4} buckets, and a distance above {exact}, the number of "
            "buckets that hold one distance each"
        )
    future = 0 if causal else (distances < 0).long() * each_side
    distances = distances.clamp(min=0) if causal else distances.abs()
    octaves = torch.log(distances.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    coarse = (exact + (octaves * (each_side - exact)).long()).clamp(max=each_side - 1)
    return future + torch.where(distances < exact, distances, coarse)
