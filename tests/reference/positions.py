"""The methods that are a function of the scores, written from their papers, in whatever dtype.

Each oracle says what its method makes of the scaled scores of whole sequences. Nothing here is the
product's. A method that reads queries and keys has one in `content`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pretrain.config import RunConfig

Oracle = Callable[[Tensor, RunConfig, dict[str, Tensor]], Tensor]
"""(scaled scores [B, H, S, S] of query i and key j, config, parameters) -> scores."""


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


def sandwich(scores: Tensor, c: RunConfig, p: dict[str, Tensor]) -> Tensor:
    """Products of sinusoidal positions p_m p_n over 8 h / H (Chi et al. 2022, 2212.10356)."""
    heads, channels = scores.shape[1], c.position.sandwich_channels
    place = torch.arange(scores.shape[-1], dtype=torch.float64)[:, None]
    i = torch.arange(1, channels // 2 + 1, dtype=torch.float64)
    angle = place / 10_000 ** (2 * i / channels)
    table = torch.cat([angle.sin(), angle.cos()], dim=1)
    ratio = torch.arange(1, heads + 1, dtype=torch.float64) * 8 / heads
    return scores + (table @ table.T / ratio[:, None, None]).to(scores)


def tisa(scores: Tensor, c: RunConfig, p: dict[str, Tensor]) -> Tensor:
    """sum_s a exp(-|b| (j - i - c)^2) (Wennberg and Henter 2021, 2106.01950)."""
    place = torch.arange(scores.shape[-1]).to(scores)
    ahead = place[None, :] - place[:, None]
    for s in range(c.position.tisa_kernels):
        kinds = ("amplitudes", "widths", "offsets")
        a, b, center = (p[f"tisa_{kind}"][:, s].to(scores)[:, None, None] for kind in kinds)
        scores = scores + a * torch.exp(-b.abs() * (ahead - center) ** 2)
    return scores


def multiplied(scores: Tensor, c: RunConfig, p: dict[str, Tensor]) -> Tensor:
    """relu(scores) (1 + e^v) / (1 + e^(v - w r)) (Wu et al. 2021, 2010.06925)."""
    w, v = (p[f"multiplied_{name}"].to(scores)[:, None, None] for name in "wv")
    factor = (1 + torch.exp(v)) / (1 + torch.exp(v - w * distances(scores)))
    return torch.where(scores > 0, scores, 0) * factor


def windowed(scores: Tensor, c: RunConfig, p: dict[str, Tensor]) -> Tensor:
    """A token sees itself and window - 1 tokens before it."""
    return scores.masked_fill(distances(scores) > c.position.window - 1, -torch.inf)


def fire(scores: Tensor, c: RunConfig, p: dict[str, Tensor]) -> Tensor:
    """The listing of Li et al. 2023, 2310.04418: f(log(c (i - j) + 1) / log(c max(L, i) + 1))."""
    own = {name.removeprefix("fire_"): x.to(scores) for name, x in p.items() if "fire_" in name}
    place = torch.arange(scores.shape[-1]).to(scores)
    threshold = own["l_mult"] * c.position.fire_threshold
    divisor = torch.log(own["c"] * torch.maximum(place, threshold) + 1)[:, None] + 1e-6
    share = torch.log(own["c"] * distances(scores) + 1) / divisor
    hidden = torch.nn.functional.linear(
        share[..., None], own["hidden_weight"][:, None], own["hidden_bias"]
    )
    out = torch.nn.functional.linear(torch.relu(hidden), own["output_weight"], own["output_bias"])
    return scores + out.permute(2, 0, 1)


ORACLES: dict[str, Oracle] = {
    "fire": fire,
    "kerple": kerple,
    "multiplied": multiplied,
    "sandwich": sandwich,
    "tisa": tisa,
    "windowed": windowed,
}
