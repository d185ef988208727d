"""CoPE: positions that depend on the content (Golovneva et al. 2024, arXiv 2405.18719).

Section 4: for query i, the position of key j is the sum of the gates from the key to the query,

    g_ij = sigmoid(q_i . k_j / sqrt(D))    p_ij = g_ij + ... + g_ii, at most p_max - 1

and the score is q_i . (k_j + e[p_ij]) / sqrt(D), with e interpolated between whole positions. As in
the authors' code (projects/cope/src/cope/context_position.py in facebookresearch/RAM), e is 0 at
the start, every layer has its own, and all heads of a layer share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.config.schema import Fixed
from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig


class Cope(PositionMethod):
    """Learned embeddings of positions that are sums of gates between a query and a key."""

    method: Literal["cope"] = "cope"

    cope_positions: Fixed[int] = Field(default=64, ge=2)
    """Number of position embeddings of a layer, the paper's p_max. Keys at larger positions share
    the last one."""

    title = "CoPE"
    bias = "scores"
    looks_back = "sums the gates from a key up to a later query"
    shared_by_heads = ("cope_embeddings",)
    of_each_layer = ("cope_embeddings",)

    def score_blocks(self, config: RunConfig) -> float:
        return 13.6

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        shape = (config.model.num_layers, self.cope_positions, config.head_dim)
        return {"position.cope_embeddings": shape}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        import torch

        return {name: torch.zeros(shape) for name, shape in self.tensors(config).items()}

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import ScoreFunction

        embeddings_HPD = own["cope_embeddings"].expand(heads.stop - heads.start, -1, -1)
        return {"scores": ScoreFunction(_scores, (embeddings_HPD,))}


def _scores(
    scores: Tensor, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, embeddings_HPD: Tensor
) -> Tensor:
    gates = scores.sigmoid() * (keys <= queries[:, None])
    most = embeddings_HPD.shape[1] - 1
    position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=most)
    below = position.detach().floor().long()
    products_BHQP = q * q.shape[-1] ** -0.5 @ embeddings_HPD.mT
    low, high = (products_BHQP.gather(-1, at) for at in (below, (below + 1).clamp(max=most)))
    out: Tensor = scores + low + (position - below) * (high - low)
    return out
