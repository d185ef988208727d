"""The slopes of ALiBi (Press, Smith, Lewis, ICLR 2022, arXiv 2108.12409): their only owner."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """The slopes of all `num_heads` heads of a model, fp32 [num_heads], each in (0, 1).

    A power of two n: 2^(-8 (h + 1) / n), the paper's section 3. Other n, as the authors' code and every public model
    do: the slopes of the largest power of two below n, then every second slope of twice as many heads.
    A tensor-parallel rank takes its slice of this; the slopes of its local head count would be other ones.
    Raises ValueError when there is no head.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads = {num_heads}: want at least one head")
    power = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(power) + _geometric(2 * power)[0::2][: num_heads - power]
    return torch.tensor(slopes, dtype=torch.float32)


def _geometric(num_heads: int) -> list[float]:
    return [2.0 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
