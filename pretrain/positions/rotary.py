"""Rotary positions: queries and keys are rotated in every layer (Su et al. 2021).

The context can be extended by changing the frequencies: in the ways of transformers
(modeling_rope_utils.py of version 5), or by the static NTK-aware base. d is the number of rotated
channels of a head, and theta_i = base^(-2 i / d) is the angle per token of pair i.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from pretrain.config.errors import Refusal
from pretrain.config.schema import Positive, Section
from pretrain.positions.base import PositionMethod, Rope

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.config.run import RunConfig


class Linear(Section):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): theta_i / factor."""

    type: Literal["linear"]
    factor: float = Field(ge=1)

    def scaled(self, base: float, channels: int) -> Tensor:
        """Return the angles per token, fp32 [channels / 2]."""
        return inverse_frequencies(base, channels) / self.factor

    @property
    def temperature(self) -> float:
        """Return the factor on rotated queries and on rotated keys."""
        return 1.0


class Ntk(Linear):
    """NTK-aware: the base times factor^(d / (d - 2)), which interpolates the slowest pair exactly.

    The source is u/bloc97, "NTK-Aware Scaled RoPE", 2023; equation 16 of YaRN's paper.
    """

    type: Literal["ntk"]  # type: ignore[assignment]  # pydantic's way to tell classes of a union
    original_max_position_embeddings: int | None = Field(default=None, gt=0)

    def larger_base(self, base: float, channels: int) -> float:
        """Return the base that gives the same frequencies without scaling."""
        return base * math.pow(self.factor, channels / max(channels - 2, 1))

    def scaled(self, base: float, channels: int) -> Tensor:
        return inverse_frequencies(self.larger_base(base, channels), channels)


class Llama3(Linear):
    """As in Llama 3.1: long waves are interpolated, short waves are kept, with a ramp between."""

    type: Literal["llama3"]  # type: ignore[assignment]  # as above
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: int = Field(gt=0)

    def scaled(self, base: float, channels: int) -> Tensor:
        found = inverse_frequencies(base, channels)
        waves = self.original_max_position_embeddings * found / (2 * math.pi)
        ramp = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = ramp.clamp(0, 1)
        return (1 - kept) * found / self.factor + kept * found


class Yarn(Linear):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by pair, and a temperature.

    Pairs that turn more than beta_fast times within the original length are kept, and pairs that
    turn less than beta_slow times are interpolated, with a ramp between (sections 3.2 and 3.4).
    """

    type: Literal["yarn"]  # type: ignore[assignment]  # as above
    original_max_position_embeddings: int = Field(gt=0)
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None

    def scaled(self, base: float, channels: int) -> Tensor:
        import torch

        def pair(turns: float) -> float:
            """Return the (fractional) index of the pair with this many turns."""
            length = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return channels * math.log(length) / (2 * math.log(base))

        # Rounded and bounded as in transformers.
        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), channels - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(channels // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        found = inverse_frequencies(base, channels)
        return found / self.factor * ramp + found * (1 - ramp)

    @property
    def temperature(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1


def inverse_frequencies(base: float, channels: int) -> Tensor:
    """Return theta of every pair of channels, fp32 [channels / 2], in Megatron's arithmetic."""
    import torch

    return 1.0 / (base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))


def odd_head(config: RunConfig) -> Iterator[Refusal]:
    """Yield a refusal if a head has an odd number of channels."""
    if config.head_dim % 2:
        why = f"pairs of channels are rotated, and a head has {config.head_dim} channels"
        key = "model.hidden_size" if config.model.kv_channels is None else "model.kv_channels"
        yield config.refusal(key, why, "Choose one that gives each head an even width")


class Rotary(PositionMethod):
    """Megatron's rotary embeddings of queries and keys."""

    method: Literal["rotary"] = "rotary"

    rotary_base: float = Field(default=10_000.0, gt=1)
    """Base of the frequencies. A larger base makes rotations slower, as in models for long
    contexts."""

    rotary_percent: float = Field(default=1.0, gt=0, le=1)
    """Share of each head's channels that is rotated, from the first channel on. 0.25 in GPT-NeoX
    and Pythia."""

    rotary_scaling: Annotated[Linear | Ntk | Llama3 | Yarn, Field(discriminator="type")] | None = (
        None
    )
    """Changed frequencies for a context that is `factor` times as long, named as in the
    rope_parameters of transformers. {type = "linear", factor = 4.0}: positions are divided by the
    factor. {type = "ntk", factor = 4.0}: the base grows, so that mainly slow rotations are
    interpolated. {type = "yarn", factor = 4.0, original_max_position_embeddings = 2048}: pairs that
    turn rarely within the original length are interpolated, and scores get a temperature; optional
    keys: attention_factor, beta_fast = 32.0, beta_slow = 1.0. {type = "llama3", factor = 8.0,
    low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 8192}: as in
    Llama 3.1."""

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the channels of a head cannot be rotated in pairs."""
        width, channels = config.head_dim, self.rotated_channels(config)
        yield from odd_head(config)
        if width % 2 == 0 and (channels % 2 or not channels):
            yield config.refusal(
                "position.rotary_percent",
                f"rotates {channels} of a head's {width} channels, and rotary positions rotate "
                "channels in pairs",
                "Choose a share that gives an even number of channels",
            )
        steps = self.rotary_scaling
        if isinstance(steps, Llama3) and steps.high_freq_factor <= steps.low_freq_factor:
            yield config.refusal(
                "position.rotary_scaling.high_freq_factor",
                f"not above low_freq_factor = {steps.low_freq_factor}",
                "Llama 3.1 has 4.0 and 1.0",
            )

    def resolved(self, config: RunConfig) -> dict[str, Any]:
        scaling = self.rotary_scaling
        return {} if scaling is None else {"rotary_scaling": scaling.model_dump()}

    def result_name(self, config: RunConfig) -> str:
        return self.method if self.rotary_scaling is None else "rotary_scaled"

    def rope(self) -> Rope:
        base, scaling = self.rotary_base, self.rotary_scaling
        scaled = None if scaling is None else partial(scaling.scaled, base)
        return Rope(base, self.rotary_percent, scaled)

    def queries_and_keys(
        self, config: RunConfig, query: Tensor, key: Tensor, first: int, length: int
    ) -> tuple[Tensor, Tensor]:
        # transformers multiplies the cosines and sines of both queries and keys by the temperature.
        # Multiplying only the queries, by its square, gives the same scores.
        factor = self.rotary_scaling.temperature**2 if self.rotary_scaling is not None else 1.0
        if factor == 1:
            return query, key
        import torch

        rotated, rest = query.tensor_split([self.rotated_channels(config)], dim=-1)
        return torch.cat((rotated * factor, rest), dim=-1), key

    def rotated_channels(self, config: RunConfig) -> int:
        return int(config.head_dim * self.rotary_percent)
