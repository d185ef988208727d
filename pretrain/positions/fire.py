"""FIRE: a small network of the distance, relative to the query's position, adds to the scores.

Li et al., "Functional Interpolation for Relative Positions Improves Long Context Transformers",
ICLR 2024, arXiv 2310.04418, section 3. With psi(x) = log(c x + 1) and learned c and L, the score of
query i and key j <= i, counted from 0, is increased by

    f(psi(i - j) / psi(max(L, i)))

f is the network of the paper's listing: 1 -> 32 with a ReLU -> one number for each head, with
biases, initialized like torch's linear layers. c is 0.1 at first; L is fire_threshold times a
learned factor, which is 1 at first. All heads share c, L and the hidden layer, so every tensor rank
holds them whole, and their gradients are summed over tensor ranks. All layers share the network,
which the paper calls FIRE-S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.config.errors import Refusal
from pretrain.positions.base import PositionMethod, generator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig

SMALLEST = 1e-6
"""Added to the divisor, as in the paper's listing."""


class Fire(PositionMethod):
    """A learned function of the distance, divided by the query's position, on attention scores."""

    method: Literal["fire"] = "fire"

    fire_width: int = Field(default=32, gt=0)
    """Width of the network's hidden layer."""

    fire_threshold: int = Field(default=512, gt=0)
    """Initial L, in tokens: queries up to this position divide distances by the same number."""

    title = "FIRE"
    bias = "scores"
    shared_by_heads = ("fire_c", "fire_l_mult", "fire_hidden_weight", "fire_hidden_bias")

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why a query's position is not the number of tokens that it can see."""
        if config.is_masked or config.data.per_document_attention:
            yield config.refusal(
                "position.method",
                "divides distances by the number of tokens before the query in its sequence, which "
                "are neither all that a masked model sees nor all of one document",
                'Set train.objective = "next_token" and data.per_document_attention = false, or '
                "choose another method",
            )

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        heads, width = config.model.num_attention_heads, self.fire_width
        return {
            "position.fire_c": (1,),
            "position.fire_l_mult": (1,),
            "position.fire_hidden_weight": (width,),
            "position.fire_hidden_bias": (width,),
            "position.fire_output_weight": (heads, width),
            "position.fire_output_bias": (heads,),
        }

    def score_blocks(self, config: RunConfig) -> float:
        # The peak of memory is either at three times the hidden layer, which sequences and heads
        # share, with few blocks of scores, or at as many blocks as for a bias by distance.
        heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
        shared_by = config.batch.micro_batch_size * heads
        return max(3 * self.fire_width / shared_by - 1.7, 0.55)

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        import torch

        values = {"position.fire_c": torch.tensor([0.1]), "position.fire_l_mult": torch.ones(1)}
        for name, shape in self.tensors(config).items():
            if name not in values:
                # torch draws a layer's weights and biases from +- 1 / sqrt(inputs).
                bound = 1.0 if "hidden" in name else 1 / math.sqrt(self.fire_width)
                drawn = torch.rand(shape, generator=generator(config, name))
                values[name] = bound * (2 * drawn - 1)
        return values

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import ScoreFunction

        shared = {name: own[name].float() for name in self.shared_by_heads}
        shared["fire_threshold"] = self.fire_threshold * shared["fire_l_mult"].abs()
        by_head = own["fire_output_weight"].float(), own["fire_output_bias"].float()
        return {"scores": ScoreFunction(partial(_network, shared=shared), by_head)}


def _network(
    scores: Tensor,
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    keys: Tensor,
    output_weight: Tensor,
    output_bias: Tensor,
    *,
    shared: Mapping[str, Tensor],
) -> Tensor:
    """Return the scores plus the network's output."""
    c, threshold = shared["fire_c"].abs(), shared["fire_threshold"]
    distance = (queries[:, None] - keys).abs().to(scores.dtype)
    most = queries[:, None].to(scores.dtype).maximum(threshold)
    share = (c * distance).log1p() / ((c * most).log1p() + SMALLEST)
    hidden = (share[..., None] * shared["fire_hidden_weight"] + shared["fire_hidden_bias"]).relu()
    return scores + (hidden @ output_weight.mT + output_bias).permute(2, 0, 1)
