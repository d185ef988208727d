"""The slopes of ALiBi (Press, Smith and Lewis, ICLR 2022, arXiv 2108.12409).

Model, kernels, export and benchmarks all take their slopes from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

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


# ---- sinusoidal ----
# The table of sinusoidal positions (Vaswani et al. 2017), in the two forms that models use.
#
# Model and export take their tables from here.


SinusoidalForm = Literal["fairseq", "vaswani"]
"""Values of position.sinusoidal_table."""

FAIRSEQ_FIRST_POSITION = 2
"""fairseq counts positions from its padding index + 1, and the index of its padding token is 1."""


def sinusoidal_table(positions: Tensor, hidden_size: int, form: SinusoidalForm) -> Tensor:
    """Return what sinusoidal positions add to the embeddings, [..., hidden_size] in fp64.

    The first half of the channels are sines and the second half cosines of the same angles. With
    h = hidden_size // 2 and p counted from 0, the k-th angle of position p is

        fairseq   (p + 2) 10000^(-k / (h - 1))
        vaswani   p 10000^(-k / h)

    fairseq's is also tensor2tensor's, and is what "Train Short, Test Long" compares ALiBi with
    (fairseq/modules/sinusoidal_positional_embedding.py in the authors' repository). Vaswani's has
    the frequencies of section 3.5 of "Attention Is All You Need", which interleaves sines and
    cosines. A trained model does not depend on the order of its channels.

    Args:
        positions: Positions in the text, counted from 0; integers of any shape [...].
        hidden_size: Number of channels, an even one.
        form: "fairseq" or "vaswani".
    """
    half = hidden_size // 2
    if form == "fairseq":
        positions = positions + FAIRSEQ_FIRST_POSITION
    # With a single frequency, fairseq's formula divides by 0.
    steps = max(half - 1, 1) if form == "fairseq" else half
    # In fp64: an fp32 angle near position 2000 has a rounding error of 1e-4.
    k = torch.arange(half, device=positions.device, dtype=torch.float64)
    angle = positions[..., None] * torch.exp(k * (-math.log(10_000.0) / steps))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
