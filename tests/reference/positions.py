"""The methods that are a function of the scores, written from their papers, in whatever dtype.

Each oracle says what its method learns and what it makes of the scaled scores of whole sequences.
Nothing here is the product's: a method of `pretrain.positions` that has bias "scores" needs one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config import RunConfig


class Oracle(NamedTuple):
    """What a method learns and what it computes."""

    scores: Callable[[Tensor, RunConfig, dict[str, Tensor]], Tensor]
    """(scaled scores [B, H, S, S] of query i and key j, config, parameters) -> scores."""
    shapes: Callable[[RunConfig], dict[str, tuple[int, ...]]] = lambda c: {}
    """config -> shape of each parameter of the whole model, by its name after "position."."""


def distances(scores: Tensor) -> Tensor:
    """Return |i - j| for every query i and key j, [S, S] in the dtype of the scores."""
    place = torch.arange(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    return (place[:, None] - place[None, :]).abs()


def kerple(scores: Tensor, c: RunConfig, p: dict[str, Tensor]) -> Tensor:
    """-r1 log(1 + r2 d), or -r1 d^r2 (Chi et al. 2022, arXiv 2205.09921)."""
    d = distances(scores)
    r1, r2 = (p[f"kerple_r{i}"].to(scores)[:, None, None] for i in (1, 2))
    if c.position.kerple_kernel == "log":
        return scores - r1 * torch.log(1 + r2 * d)
    # exp(r2 log d) instead of a power, and nothing at distance 0.
    return scores - r1 * torch.where(d > 0, torch.exp(r2 * torch.log(d.clamp(min=1))), 0)


ORACLES: dict[str, Oracle] = {
    "kerple": Oracle(
        kerple,
        lambda c: {f"kerple_r{i}": (c.model.num_attention_heads,) for i in (1, 2)},
    ),
}
