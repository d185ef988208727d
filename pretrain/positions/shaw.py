"""Relative position representations (Shaw, Uszkoreit and Vaswani 2018, arXiv 1803.02155).

Section 3.2: a learned vector of the clipped distance between query i and key j is added to the key,

    e_ij = q_i . (k_j + w_c) / sqrt(D)    c = clip(j - i, -k, k)

Every layer and head has its own vectors, as in section 4.1. The paper also adds vectors to values,
and finds that vectors on keys alone are as good (table 3). Here they are on keys alone, so that
position methods differ only in scores. Under a causal mask there are k + 1 distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.config.schema import Fixed
from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig


class Shaw(PositionMethod):
    """A learned vector for each clipped distance, added to the keys that a query sees."""

    method: Literal["shaw"] = "shaw"

    max_relative_position: Fixed[int] = Field(default=16, ge=1)
    """Largest distance in tokens with a vector of its own, the paper's k. Keys further away share
    it."""

    title = "relative (Shaw et al.)"
    bias = "scores"
    of_each_layer = ("shaw_keys",)

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        m, most = config.model, self.max_relative_position
        rows = 2 * most + 1 if config.is_masked else most + 1
        return {"position.shaw_keys": (m.num_attention_heads, m.num_layers, rows, config.head_dim)}

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import ScoreFunction

        formula = partial(_scores, most=self.max_relative_position, causal=not config.is_masked)
        return {"scores": ScoreFunction(formula, (own["shaw_keys"],))}

    def score_blocks(self, config: RunConfig) -> float:
        return 0.5


def _scores(
    scores: Tensor,
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    keys: Tensor,
    rows_HND: Tensor,
    most: int,
    causal: bool,
) -> Tensor:
    from pretrain.kernels.call import products_at

    # The distance of row 0.
    least = 0 if causal else -most
    index = (queries[:, None] - keys).clamp(least, most) - least
    return scores + products_at(q * q.shape[-1] ** -0.5, rows_HND, index)
