"""xPos: rotary positions whose scores fade with the distance (Sun et al. 2022, 2212.10554)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pretrain.config.errors import Refusal
from pretrain.positions.base import PositionMethod
from pretrain.positions.rotary import odd_head

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.config.run import RunConfig

GAMMA = 0.4
"""Section 2.3 of the paper: it limits how fast the fastest pair fades."""


class XPos(PositionMethod):
    """Queries and keys are rotated, and each pair of channels fades at its own rate.

    Section 2.3 of the paper: a head has 2 h channels, and q_k and k_k are pair k of the query at
    position n and of the key at position m, as complex numbers. The score is

        sum over k of Re[q_k conj(k_k) e^(i (n - m) t_k)] z_k^((n - m) / scale_base)
        t_k = base^(-k / h)    z_k = (k / h + gamma) / (1 + gamma)    gamma = 0.4

    A pair is channels k and k + h here, and two neighboring channels in the authors' code
    (torchscale/component/xpos_relative_position.py in microsoft/torchscale): the same model with
    its channels in another order. Both count positions from the middle of the text, because queries
    and keys hold factors that grow with the distance from position 0. Positions end where a factor
    would reach 1/64 of the largest number of train.precision: `table_end`.
    """

    method: Literal["xpos"] = "xpos"

    xpos_base: float = Field(default=10_000.0, gt=1)
    """Base of the frequencies."""

    xpos_scale_base: float = Field(default=512.0, gt=0)
    """Distance in tokens at which the pair that fades fastest has fallen to 0.29, and the slowest
    hardly at all. 512 in the paper and its code; a smaller number shortens the reach."""

    title = "xPos"
    looks_back = "the scores of later keys would grow with the distance"

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the channels cannot be rotated, or why scores would grow with the distance."""
        yield from odd_head(config)
        yield from super().refusals(config)

    def queries_and_keys(
        self, config: RunConfig, query: Tensor, key: Tensor, first: int, length: int
    ) -> tuple[Tensor, Tensor]:
        first -= length // 2
        behind = len(key) - len(query)
        return self._turned(query, first + behind, 1.0), self._turned(key, first, -1.0)

    def _turned(self, x: Tensor, first: int, sign: float) -> Tensor:
        """Return x [S, B, heads, D] rotated, times (sign 1) or divided by (-1) its factors."""
        import torch

        half = x.shape[-1] // 2
        # In fp64: an fp32 angle near position 2000 has a rounding error of 1e-4.
        place = torch.arange(first, first + len(x), device=x.device, dtype=torch.float64)
        place = place[:, None, None, None]
        share = torch.arange(half, device=x.device, dtype=torch.float64) / half
        angle = place * self.xpos_base**-share
        factor = ((share + GAMMA) / (1 + GAMMA)) ** (sign * place / self.xpos_scale_base)
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    def table_end(self, config: RunConfig) -> int:
        """Return 68,555 tokens in fp32 and bf16, and 5,665 in fp16, with the paper's scale base."""
        largest = 65504.0 if config.train.precision == "fp16" else 2.0**127
        growth = math.log((1 + GAMMA) / GAMMA) / self.xpos_scale_base
        return int(2 * math.log(largest / 64) / growth)

    def rotated_channels(self, config: RunConfig) -> int:
        return config.head_dim
