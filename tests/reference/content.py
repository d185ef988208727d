"""The methods whose scores depend on positions and content together, written from their papers.

The same rules hold as for `tests.reference.positions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.config import RunConfig

# Shapes: B batch, H heads, S tokens, D width of a head.


class Content(NamedTuple):
    """What a method learns and what it computes."""

    products: Callable[[Tensor, Tensor, RunConfig, dict[str, Tensor], int], Tensor]
    """(queries and keys [B, H, S, D], config, parameters, layer) -> scores [B, H, S, S] before
    they are divided by sqrt(D)."""
    shapes: Callable[[RunConfig], dict[str, tuple[int, ...]]] = lambda c: {}
    """config -> shape of each parameter of the whole model, by its name after "position."."""


def distances(like: Tensor) -> Tensor:
    """Return i - j for every query i and key j, int64 [S, S]."""
    at = torch.arange(like.shape[-2], device=like.device)
    return at[:, None] - at[None]


def xpos(q: Tensor, k: Tensor, c: RunConfig, p: dict[str, Tensor], layer: int) -> Tensor:
    """Rotation and decay, from distances alone (Sun et al. 2022, arXiv 2212.10554, section 2.3).

    Channel n is paired with channel n + D/2.
    """
    h = q.shape[-1] // 2
    share = torch.arange(h, dtype=torch.float64) / h
    distance = distances(q).double()[:, :, None]
    factor = ((share + 0.4) / 1.4) ** (distance / c.position.xpos_scale_base)
    turn = torch.polar(factor, distance * c.position.xpos_base**-share)
    a, b = (torch.complex(x[..., :h].double(), x[..., h:].double()) for x in (q, k))
    return torch.einsum("bhic,bhjc,ijc->bhij", a, b.conj(), turn).real.to(q)


CONTENT: dict[str, Content] = {"xpos": Content(xpos)}
