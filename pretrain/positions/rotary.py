"""Rotary positions: queries and keys are rotated in every layer (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pretrain.config.errors import Refusal
from pretrain.positions.base import PositionMethod, Rope

if TYPE_CHECKING:
    from pretrain.config.run import RunConfig


class Rotary(PositionMethod):
    """Megatron's rotary embeddings of queries and keys."""

    method: Literal["rotary"] = "rotary"

    rotary_base: int = Field(default=10_000, gt=0)
    """Base of the frequencies. A larger one makes rotations slower, as models for long contexts
    have them."""

    rotary_percent: float = Field(default=1.0, gt=0, le=1)
    """Share of each head's channels that is rotated, the first ones. GPT-NeoX and Pythia rotate
    0.25 of them."""

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the channels of a head cannot be rotated in pairs."""
        width, channels = config.head_dim, self.rotated_channels(config)
        if width % 2:
            yield Refusal(
                "model.hidden_size",
                config.model.hidden_size,
                f"rotary positions rotate pairs of channels, and a head has {width} channels",
                "Choose a hidden_size that gives each head an even width",
            )
        elif channels % 2 or not channels:
            yield Refusal(
                "position.rotary_percent",
                self.rotary_percent,
                f"rotates {channels} of a head's {width} channels, and rotary positions rotate "
                "pairs of them",
                "Choose a share that gives an even number of channels",
            )

    def rope(self) -> Rope:
        return Rope(self.rotary_base, self.rotary_percent)

    def rotated_channels(self, config: RunConfig) -> int:
        return int(config.head_dim * self.rotary_percent)
