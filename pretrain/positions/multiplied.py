"""Scores are multiplied by a learned function of the distance, as in DA-Transformer.

Wu, Wu and Huang, "DA-Transformer: Distance-aware Transformer", NAACL 2021, arXiv 2010.06925,
section 3. With w and v of each head and the distance r = |i - j|, the softmax sees

    relu(q_i k_j / sqrt(d)) (1 + e^v) / (1 + e^(v - w r))

The ReLU is needed because a small factor would raise a negative score. The factor is 1 at distance
0, and with growing distance goes to 1 + e^v if w is positive, and to 0 if w is negative. "Train
Short, Test Long" (section 3) found multiplying worse than adding. The initial values are ours: w is
drawn like the model's weights, so that all factors start near 1, and v = 0. All layers share w and
v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pretrain.positions.base import PositionMethod, generator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig


class Multiplied(PositionMethod):
    """Positive attention scores times a learned function of the distance."""

    method: Literal["multiplied"] = "multiplied"

    title = "DA-Transformer"
    bias = "scores"

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        heads = (config.model.num_attention_heads,)
        return {"position.multiplied_w": heads, "position.multiplied_v": heads}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        import torch

        (w, shape), (v, _) = self.tensors(config).items()
        drawn = torch.randn(shape, generator=generator(config, w))
        return {w: config.model.init_method_std * drawn, v: torch.zeros(shape)}

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import by_distance

        learned = (own["multiplied_w"].float(), own["multiplied_v"].float())
        return {"scores": by_distance(_factor, learned, _multiply)}


def _factor(distances: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (1 + v.exp())[:, None] * (w[:, None] * distances.abs() - v[:, None]).sigmoid()


def _multiply(scores: Tensor, factor: Tensor) -> Tensor:
    return scores.relu() * factor
