"""Sandwich: the inner product of two sinusoidal positions is added to the scores; none is learned.

Chi, Fan, Rudnicky and Ramadge, "Dissecting Transformer Length Extrapolation via the Lens of
Receptive Field Analysis", ACL 2023, arXiv 2212.10356. The sinusoids of positions m and n, with d
channels, have the inner product sum_i cos((m - n) / 10000^(2i / d)), i = 1 .. d / 2. Head h of H,
counted from 1, adds

    (sum_i cos((m - n) / 10000^(2i / d)) - d / 2) / (8 h / H)

Subtracting d / 2 makes the term 0 at distance 0; the softmax does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig


class Sandwich(PositionMethod):
    """The inner product of sinusoidal positions, scaled for each head, on the attention scores."""

    method: Literal["sandwich"] = "sandwich"

    sandwich_channels: int = Field(default=128, gt=1, multiple_of=2)
    """Channels of the sinusoids whose inner product is added, independent of model.hidden_size. The
    more channels, the more steeply the product falls."""

    title = "Sandwich"
    bias = "scores"

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        import torch

        from pretrain.kernels.call import by_distance

        count = config.model.num_attention_heads
        sizes = count / (8 * torch.arange(1, count + 1, dtype=torch.float32, device=device))
        formula = partial(_product, channels=self.sandwich_channels)
        return {"scores": by_distance(formula, (sizes[heads],))}


def _product(distances: Tensor, sizes: Tensor, channels: int) -> Tensor:
    import torch

    # In fp64, because fp32 rounds an angle of 10^5 by 0.004.
    i = torch.arange(1, channels // 2 + 1, dtype=torch.float64, device=distances.device)
    cosines = (distances.double()[:, None] * 10_000.0 ** (-2 * i / channels)).cos()
    return sizes[:, None] * (cosines.sum(1) - channels // 2).to(distances.dtype)
