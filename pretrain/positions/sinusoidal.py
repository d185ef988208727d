"""Sinusoidal positions: a fixed table added to the embeddings (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pretrain.config.errors import Refusal
from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.config.run import RunConfig

SinusoidalForm = Literal["fairseq", "vaswani"]
"""Values of position.sinusoidal_table."""

FAIRSEQ_FIRST_POSITION = 2
"""fairseq counts positions from its padding index + 1, and the index of its padding token is 1."""


class Sinusoidal(PositionMethod):
    """Sines and cosines added to the embeddings, at any position."""

    method: Literal["sinusoidal"] = "sinusoidal"

    sinusoidal_table: SinusoidalForm = "fairseq"
    """Formula of the table. fairseq: positions counted from 2, frequencies from 1 to exactly
    1/10000, as in tensor2tensor and in the models that "Train Short, Test Long" compares with.
    vaswani: positions counted from 0, and the frequencies of "Attention Is All You Need". Both have
    sines first and then cosines."""

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        return odd_channels(config)

    def embedded(self, config: RunConfig, positions: Tensor) -> Tensor:
        return sinusoidal_table(positions, config.model.hidden_size, self.sinusoidal_table)


def odd_channels(config: RunConfig) -> Iterator[Refusal]:
    """Yield a refusal if the embeddings have an odd number of channels."""
    if config.model.hidden_size % 2:
        why = "sinusoids consist of pairs of a sine and a cosine"
        yield config.refusal("model.hidden_size", why, "Choose an even number")


def sinusoidal_table(positions: Tensor, hidden_size: int, form: SinusoidalForm) -> Tensor:
    """Return what sinusoidal positions add to the embeddings, [..., hidden_size] in fp64.

    The first half of the channels are sines and the second half cosines of the same angles. With
    h = hidden_size // 2 and p counted from 0, the k-th angle of position p is

        fairseq   (p + 2) 10000^(-k / (h - 1))
        vaswani   p 10000^(-k / h)

    "Train Short, Test Long" compares ALiBi with fairseq's formula, which is also tensor2tensor's
    (fairseq/modules/sinusoidal_positional_embedding.py in the authors' repository). Vaswani's has
    the frequencies of section 3.5 of "Attention Is All You Need", which interleaves sines and
    cosines; the order of channels makes no difference to a trained model.

    Args:
        positions: Positions in the text, counted from 0; integers of any shape [...].
        hidden_size: Number of channels, an even one.
        form: "fairseq" or "vaswani".
    """
    import torch

    half = hidden_size // 2
    if form == "fairseq":
        positions = positions + FAIRSEQ_FIRST_POSITION
    # With a single frequency, fairseq's formula divides by 0.
    steps = max(half - 1, 1) if form == "fairseq" else half
    # In fp64: an fp32 angle near position 2000 has a rounding error of 1e-4.
    k = torch.arange(half, device=positions.device, dtype=torch.float64)
    angle = positions[..., None] * torch.exp(k * (-math.log(10_000.0) / steps))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
