"""TISA: a few learned Gaussians of the distance, different in each head, are added to the scores.

Wennberg and Henter, "The Case for Translation-Invariant Self-Attention in Transformer-Based
Language Models", ACL 2021, arXiv 2106.01950, section 3. Each head has S kernels with amplitude a,
width b and offset c, and adds to the score of query i and key j

    sum_s a_s exp(-|b_s| (j - i - c_s)^2)

Initial values are drawn from normal(0, 1), like the embeddings that hold them in the authors' first
code (ulmewennberg/tisa, model/positional_scorer.py). All layers share the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pretrain.positions.base import OWN, PositionMethod, generator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig

NAMES = ("tisa_amplitudes", "tisa_widths", "tisa_offsets")


class Tisa(PositionMethod):
    """Learned Gaussians of the distance on the attention scores."""

    method: Literal["tisa"] = "tisa"

    tisa_kernels: int = Field(default=5, gt=0)
    """Number of Gaussians per head, the paper's S."""

    title = "TISA"
    bias = "scores"

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        shape = (config.model.num_attention_heads, self.tisa_kernels)
        return {OWN + name: shape for name in NAMES}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        import torch

        return {
            name: torch.randn(shape, generator=generator(config, name))
            for name, shape in self.tensors(config).items()
        }

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import by_distance

        return {"scores": by_distance(_gaussians, tuple(own[name].float() for name in NAMES))}


def _gaussians(distances: Tensor, amplitudes: Tensor, widths: Tensor, offsets: Tensor) -> Tensor:
    # Distances are i - j, and the paper's formula has j - i.
    from_center = -distances - offsets[:, :, None]
    kernels = (-widths.abs()[:, :, None] * from_center**2).exp()
    return (amplitudes[:, :, None] * kernels).sum(1)
