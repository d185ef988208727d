"""The slopes of ALiBi (Press, Smith and Lewis, ICLR 2022, arXiv 2108.12409).

Model, kernels, export and benchmarks all take their slopes from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chosen_slopes(slopes: Sequence[float] | None, num_heads: int) -> Tensor:
    """Return the slopes of all heads of a model, fp32 [num_heads].

    A tensor-parallel rank must slice this tensor.

    Args:
        slopes: One for each head; None for the published ones.
        num_heads: Number of heads of the whole model.
    """
    return alibi_slopes(num_heads) if slopes is None else torch.tensor(slopes, dtype=torch.float32)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the published slopes of all heads of a model.

    For n heads, n a power of two, head h has the slope 2^(-8 (h + 1) / n) (section 3 of the paper).
    For other n, this follows the authors' code and every public model: the slopes of the largest
    power of two below n, then every second slope of twice as many heads.

    A tensor-parallel rank must slice this tensor. Calling it with the rank's own head count would
    give different slopes.

    Args:
        num_heads: Number of heads of the whole model.

    Returns:
        [num_heads], fp32, each in (0, 1).

    Raises:
        ValueError: `num_heads` is less than 1.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads = {num_heads}: it must be at least 1")
    power = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(power) + _geometric(2 * power)[0::2][: num_heads - power]
    return torch.tensor(slopes, dtype=torch.float32)


def _geometric(num_heads: int) -> list[float]:
    """Return the slopes of `num_heads` heads, a power of two."""
    return [2.0 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
