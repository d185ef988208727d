"""KERPLE: a learned kernel of the distance, with two numbers per head, is added to the scores.

Chi, Fan, Ramadge and Rudnicky, "KERPLE: Kernelized Relative Positional Embedding for Length
Extrapolation", NeurIPS 2022, arXiv 2205.09921, section 4. The score of query m and key n is
increased by

    logarithmic   -r1 log(1 + r2 |m - n|)     r1, r2 > 0
    power         -r1 |m - n|^r2              r1 > 0, 0 < r2 <= 2

The bounds and the uniform initial values are those of the authors' code (chijames/KERPLE,
megatron/mpu/layers.py): both numbers are clamped to at least 0.01 where they are used, and
gradients pass through the clamp. All layers share the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pretrain.positions.base import PositionMethod, generator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig

LEAST = 0.01
"""The smallest value of r1 and r2."""

LARGEST_POWER = 2.0
"""The largest r2 of the power form, beyond which -|m - n|^r2 is no kernel."""


class Kerple(PositionMethod):
    """A learned logarithm or power of the distance on the attention scores."""

    method: Literal["kerple"] = "kerple"

    kerple_kernel: Literal["log", "power"] = "log"
    """What is added to a score at distance d. log: -r1 log(1 + r2 d), the paper's best. power: -r1
    d^r2, which is ALiBi if r2 = 1."""

    title = "KERPLE"
    bias = "scores"

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        heads = (config.model.num_attention_heads,)
        return {"position.kerple_r1": heads, "position.kerple_r2": heads}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        """Return uniform numbers: up to 2 for the p of the authors' code, up to 1 for its a."""
        # Its kernels are -p log(1 + a d) and -a d^p.
        import torch

        is_log = self.kerple_kernel == "log"
        limits = {"position.kerple_r1": 2.0 if is_log else 1.0}
        limits["position.kerple_r2"] = 1.0 if is_log else 2.0
        return {
            name: limit * torch.rand(self.tensors(config)[name], generator=generator(config, name))
            for name, limit in limits.items()
        }

    def result_name(self, config: RunConfig) -> str:
        return self.method if self.kerple_kernel == "log" else "kerple_power"

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import by_distance

        most = LARGEST_POWER if self.kerple_kernel == "power" else None
        r1, r2 = _bounded(own["kerple_r1"]), _bounded(own["kerple_r2"], most)
        return {"scores": by_distance(FORMULAS[self.kerple_kernel], (r1, r2))}


def _bounded(x: Tensor, most: float | None = None) -> Tensor:
    """Return x within its bounds, with the gradient of x."""
    x = x.float()
    return x + (x.clamp(LEAST, most) - x).detach()


def _logarithm(distances: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    return -r1[:, None] * (r2[:, None] * distances.abs()).log1p()


def _power(distances: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    # Keep 0 out of the power: the gradient of 0^r2 is 0 log 0, which is NaN in torch below fp64.
    far = distances.abs().clamp(min=1)
    return -r1[:, None] * far ** r2[:, None] * (distances != 0)


FORMULAS = {"log": _logarithm, "power": _power}
