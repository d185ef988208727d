"""FIRE: a small network of the distance, as a share of the query's position, adds to the scores.

Li et al., "Functional Interpolation for Relative Positions Improves Long Context Transformers",
ICLR 2024, arXiv 2310.04418, section 3. With psi(x) = log(c x + 1) and learned c and L, query i and
key j <= i, counted from 0, get

    f(psi(i - j) / psi(max(L, i)))

f is the network of the paper's listing: 1 -> 32 with a ReLU -> one number for each head, with
biases, begun as torch's linear layers. c begins at 0.1; L is its value at the start times a learned
factor, which begins at 1. All heads share c, L and the hidden layer, so every tensor rank holds
these whole and their gradients are summed over tensor ranks. One set serves all layers, which the
paper calls FIRE-S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from pretrain.config.errors import Refusal
from pretrain.positions.base import OWN, PositionMethod, generator

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
    """L at the start, in tokens: up to this position distances are divided by the same number."""

    title = "FIRE"
    bias = "scores"
    shared_by_heads = ("fire_c", "fire_l_mult", "fire_hidden_weight", "fire_hidden_bias")

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield what a query's position in the whole sequence does not say."""
        if config.is_masked or config.data.per_document_attention:
            yield Refusal(
                "position.method",
                self.method,
                "divides distances by the number of tokens before the query in its sequence, which "
                "are neither all that a masked model sees nor all of one document",
                'Set train.objective = "next_token" and data.per_document_attention = false, or '
                "choose another method",
            )

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        heads, width = config.model.num_attention_heads, self.fire_width
        shapes: dict[str, tuple[int, ...]] = {
            "fire_c": (1,),
            "fire_l_mult": (1,),
            "fire_hidden_weight": (width,),
            "fire_hidden_bias": (width,),
            "fire_output_weight": (heads, width),
            "fire_output_bias": (heads,),
        }
        return {OWN + name: shape for name, shape in shapes.items()}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        import torch

        values = {f"{OWN}fire_c": torch.tensor([0.1]), f"{OWN}fire_l_mult": torch.ones(1)}
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
        wide = {name.removeprefix("fire_"): x.float() for name, x in own.items()}
        return {"scores": Network(self.fire_threshold * wide.pop("l_mult").abs(), **wide)}


class Network(NamedTuple):
    """FIRE's `pretrain.kernels.call.ScoreFunction`."""

    threshold: Tensor
    """L, [1]."""
    c: Tensor
    hidden_weight: Tensor
    hidden_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it learns."""
        return tuple(self)

    @property
    def window(self) -> None:
        """A query sees all keys before it."""

    def of_heads(self, heads: slice) -> Network:
        """Return it for some of its heads."""
        return self._replace(
            output_weight=self.output_weight[heads], output_bias=self.output_bias[heads]
        )

    def __call__(
        self, scores_BHQK: Tensor, q_BHQD: Tensor, k_BHKD: Tensor, queries: Tensor, keys: Tensor
    ) -> Tensor:
        """Return the scores plus the network's output."""
        c, dtype = self.c.abs(), scores_BHQK.dtype
        distance = (queries[:, None] - keys).abs().to(dtype)
        most = queries[:, None].to(dtype).maximum(self.threshold)
        share = (c * distance).log1p() / ((c * most).log1p() + SMALLEST)
        hidden = (share[..., None] * self.hidden_weight + self.hidden_bias).relu()
        added = hidden @ self.output_weight.to(hidden.dtype).mT + self.output_bias
        return scores_BHQK + added.permute(2, 0, 1)
