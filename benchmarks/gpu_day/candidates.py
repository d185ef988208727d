"""Attention kernels that the product has not: who wins here on a GPU may become a backend."""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.gpu_day import flash4, flex
from pretrain.kernels.call import ScoreBias, describe_call
from pretrain.kernels.dispatch import attention


def attend_by(backend: str) -> Callable[..., Tensor]:
    """Return attention through a candidate, or through a backend of the product, by its name.

    It takes the arguments of `pretrain.kernels.dispatch.attention` that training has, and raises
    ValueError where the kernel cannot serve.
    """
    if backend not in CANDIDATES:
        return partial(attention, backend=backend)
    refusal, attend = CANDIDATES[backend]

    def call(
        q_SBHD: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        *,
        slopes: Tensor | None = None,
        relative_attention_bias: Tensor | None = None,
        relative_attention_max_distance: int = 128,
        **options: Any,
    ) -> Tensor:
        bias = ScoreBias(slopes, relative_attention_bias, relative_attention_max_distance, True)
        reason = refusal(describe_call(q_SBHD, k_SBGD, bias, 0.0))
        if reason is not None:
            raise ValueError(f"{backend} cannot serve: {reason}")
        return attend(q_SBHD, k_SBGD, v_SBGD, bias, None, **options)

    return call


CANDIDATES: dict[str, tuple[Callable[..., str | None], Callable[..., Tensor]]] = {
    "flex": (flex.refusal, flex.attention_flex),
    "flash4": (flash4.refusal, flash4.attention_flash4),
}
"""Name -> why a call cannot be served, and the kernel."""
