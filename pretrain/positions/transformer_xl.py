"""The relative positions of Transformer-XL (Dai et al. 2019, arXiv 1901.02860).

Section 3.3: the score of query i and key j is

    (q_i . k_j + q_i . W_R R_(i-j) + u . k_j + v . W_R R_(i-j)) / sqrt(D)

R are sinusoids of the distance with hidden_size channels, sines before cosines as in the authors'
code. W_R, the paper's W_(k,R), is learned for each layer; all layers share u and v of each head, as
in the paper's formula. There is no recurrence: no state passes from one sample to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pretrain.config.errors import Refusal
from pretrain.positions.base import PositionMethod
from pretrain.positions.sinusoidal import odd_channels, sinusoidal_table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig


class TransformerXL(PositionMethod):
    """Scores of sinusoids of the distance, with a learned projection for each layer.

    Every pipeline stage holds the projections of all layers, hidden_size^2 numbers each.
    """

    method: Literal["transformer_xl"] = "transformer_xl"

    title = "Transformer-XL"
    bias = "scores"
    of_each_layer = ("transformer_xl_projection",)

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        return odd_channels(config)

    def score_blocks(self, config: RunConfig) -> float:
        return 4.6

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        m, width = config.model, config.head_dim
        heads = m.num_attention_heads
        return {
            "position.transformer_xl_u": (heads, width),
            "position.transformer_xl_v": (heads, width),
            "position.transformer_xl_projection": (heads, m.num_layers, width, m.hidden_size),
        }

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import ScoreFunction

        tensors = (own[f"transformer_xl_{name}"] for name in ("u", "v", "projection"))
        return {"scores": ScoreFunction(_scores, tuple(tensors))}


def _scores(
    scores: Tensor,
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    keys: Tensor,
    u_HD: Tensor,
    v_HD: Tensor,
    projection_HDE: Tensor,
) -> Tensor:
    import torch

    from pretrain.kernels.call import products_at

    scale = q.shape[-1] ** -0.5
    index = queries[:, None] - keys
    first = index[0, -1]
    # Positions are consecutive, so this lists every distance once.
    distances = torch.arange(len(queries) + len(keys) - 1, device=keys.device) + first
    sinusoids_NE = sinusoidal_table(distances, projection_HDE.shape[2], "vaswani").to(q.dtype)
    rows_HND = sinusoids_NE @ projection_HDE.mT
    content: Tensor = (k @ (u_HD * scale)[..., None]).mT
    return scores + content + products_at((q + v_HD[:, None]) * scale, rows_HND, index - first)
