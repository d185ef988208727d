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


def shaw(q: Tensor, k: Tensor, c: RunConfig, p: dict[str, Tensor], layer: int) -> Tensor:
    """q_i (k_j + w of the clipped distance) (Shaw et al. 2018, arXiv 1803.02155, section 3.2)."""
    most = c.position.max_relative_position
    clipped = distances(q).clamp(-most, most)
    if c.train.objective == "masked":
        clipped = clipped + most
    # Keys that follow are masked, where they are not shown.
    vectors = p["shaw_keys"][:, layer][:, clipped.clamp(min=0)]
    return torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + vectors)


def transformer_xl(q: Tensor, k: Tensor, c: RunConfig, p: dict[str, Tensor], layer: int) -> Tensor:
    """The terms (a) to (d) of Dai et al. 2019, arXiv 1901.02860, section 3.3."""
    u, v, w = (p[f"transformer_xl_{name}"] for name in ("u", "v", "projection"))
    width = c.model.hidden_size
    frequency = 10_000.0 ** (-torch.arange(0, width, 2).double() / width)
    angle = distances(q)[:, :, None] * frequency
    r = torch.einsum("hde,ije->hijd", w[:, layer], torch.cat([angle.sin(), angle.cos()], -1).to(q))
    a = torch.einsum("bhid,bhjd->bhij", q, k)
    b = torch.einsum("bhid,hijd->bhij", q, r)
    return (
        a + b + torch.einsum("hd,bhjd->bhj", u, k)[:, :, None] + torch.einsum("hd,hijd->hij", v, r)
    )


def cope(q: Tensor, k: Tensor, c: RunConfig, p: dict[str, Tensor], layer: int) -> Tensor:
    """Gates, their sums, and embeddings between (Golovneva et al. 2024, 2405.18719, section 4)."""
    root, at = q.shape[-1] ** 0.5, torch.arange(q.shape[-2])
    products = torch.einsum("bhid,bhjd->bhij", q, k)
    between = (at[:, None, None] >= at[None, None]) & (at[None, None] >= at[None, :, None])
    # [i, j, m]: whether j <= m <= i.
    position = torch.einsum("bhim,ijm->bhij", (products / root).sigmoid(), between.to(q))
    most = c.position.cope_positions - 1
    position = position.clamp(max=most)
    e, below = p["cope_embeddings"][layer], position.detach().floor().long()
    low, high = e[below], e[(below + 1).clamp(max=most)]
    share = (position - below)[..., None]
    return products + torch.einsum("bhid,bhijd->bhij", q, (1 - share) * low + share * high)


def _of_layers(c: RunConfig, *rest: int) -> tuple[int, ...]:
    return (c.model.num_attention_heads, c.model.num_layers, *rest)


CONTENT: dict[str, Content] = {
    "xpos": Content(xpos),
    "shaw": Content(
        shaw,
        lambda c: {
            "shaw_keys": _of_layers(
                c,
                c.position.max_relative_position * (1 + (c.train.objective == "masked")) + 1,
                c.head_dim,
            )
        },
    ),
    "transformer_xl": Content(
        transformer_xl,
        lambda c: {
            "transformer_xl_u": (c.model.num_attention_heads, c.head_dim),
            "transformer_xl_v": (c.model.num_attention_heads, c.head_dim),
            "transformer_xl_projection": _of_layers(c, c.head_dim, c.model.hidden_size),
        },
    ),
    "cope": Content(
        cope,
        lambda c: {"cope_embeddings": (c.model.num_layers, c.position.cope_positions, c.head_dim)},
    ),
}
