"""ALiBi: add -m_h (i - j) to the score of query i and key j in head h.

Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, arXiv 2108.12409. Model,
kernels, export and benchmarks all take their slopes from this file.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from pretrain.config.errors import Refusal
from pretrain.config.schema import Section
from pretrain.positions.base import OWN, PositionMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig

MAX_SLOPE = 100.0
"""Largest slope. exp(-104) is 0 in fp32, so a head with this slope already sees a token alone."""


_ABOUT = """ ALiBi ([Press, Smith and Lewis, 2022](https://arxiv.org/abs/2108.12409)) adds a bias to
attention scores that falls with the distance between two tokens, so that the model can read texts
that are longer than those it was trained on."""


class SlopeRange(Section):
    """A geometric sequence of slopes, from the first head to the last."""

    first: float = Field(gt=0, le=MAX_SLOPE)
    """Slope of the first head."""

    last: float = Field(gt=0, le=MAX_SLOPE)
    """Slope of the last head."""


class BiasMax(Section):
    """The published slopes with another largest exponent: `alibi_bias_max` of MPT's models."""

    bias_max: int = Field(ge=1, le=100)
    """Head h of n, a power of two, has the slope 2^(-bias_max (h + 1) / n). 8 in the paper."""


class ScaledSlopes(Section):
    """The published slopes times a factor, for texts that are 1 / factor times as long."""

    factor: float = Field(gt=0, le=MAX_SLOPE)
    """Factor on the slopes, which has the effect of multiplying distances by it: position
    interpolation (Al-Khateeb et al. 2023, arXiv 2310.13017)."""

    by_head: bool = False
    """Multiply the flattest slope by the factor, keep the steepest, and multiply the slopes between
    by powers of the factor: m_h f^t, t = log(m_h / m_steepest) / log(m_flattest / m_steepest). For
    n heads, a power of two, t is h / (n - 1): NTK-ALiBi (keezen/ntk_alibi, readme_en.md, f = 1 /
    a)."""

    bias_max: int = Field(default=8, ge=1, le=100)
    """As in BiasMax."""

    def of_heads(self, num_heads: int) -> tuple[float, ...]:
        """Return the slopes of all heads of a model."""
        slopes = published_slopes(num_heads, self.bias_max)
        steepest, flattest = max(slopes), min(slopes)
        if not self.by_head:
            return tuple(slope * self.factor for slope in slopes)
        octaves = math.log(flattest / steepest) or 1.0
        return tuple(m * self.factor ** (math.log(m / steepest) / octaves) for m in slopes)


def _as_slopes(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a value of several types, with one message instead of pydantic's one per type."""
    try:
        # TOML and JSON give lists, which a strict schema does not accept as tuples.
        return validate(tuple(value) if isinstance(value, list) else value)
    except ValidationError:
        raise PydanticCustomError(
            "slopes",
            "input should be 'published', a list with a number from 0 to 100 for each head, or a "
            "table {first = 0.5, last = 0.00390625} of numbers above 0, up to 100, or a table "
            "{bias_max = 16} with an integer from 1 to 100, or a table {factor = 0.5} or "
            "{factor = 0.5, by_head = true} with a factor above 0, up to 100",
        ) from None


_Slope = Annotated[float, Field(ge=0, le=MAX_SLOPE, allow_inf_nan=False)]
Slopes = Annotated[
    Literal["published"]
    | Annotated[tuple[_Slope, ...], Field(min_length=1)]
    | SlopeRange
    | BiasMax
    | ScaledSlopes,
    WrapValidator(_as_slopes),
]
"""The word "published", one slope per head, the ends of a geometric sequence, or the published
slopes with another largest exponent or times a factor."""
PUBLISHED_BIAS_MAX = 8


class Alibi(PositionMethod):
    """Linear biases on the attention scores.

    A tensor-parallel rank takes its slice of the slopes of all heads. Slopes that are computed for
    the number of local heads would be those of a smaller model.
    """

    method: Literal["alibi"] = "alibi"

    slopes: Slopes = "published"
    """The slopes of the heads. published: those of the paper, 2^(-8 (h + 1) / n) for n heads if n
    is a power of two, and those of the authors' code for any other n. A list: one slope for each
    head of the model, from 0, which adds nothing to the head's scores, to 100. {first = 0.5, last =
    0.00390625}: a geometric sequence from the first head to the last; with first = 2^(-8 / n) this
    is the formula above for any n, as in the paper's text and in tutorials. {bias_max = 16}: the
    published slopes with 16 in place of 8, like alibi_bias_max of MPT's models. {factor = 0.5}: the
    published slopes times 0.5, as if every distance were half as long. {factor = 0.5, by_head =
    true}: the steepest slope stays, the flattest is multiplied by the factor, and the slopes
    between by powers of it. Both tables with a factor may also hold bias_max."""

    trainable_slopes: bool = False
    """Train the slopes, starting from those of position.slopes. The paper found that this is slower
    and extrapolates worse."""

    slopes_right: Slopes | None = None
    """With train.objective = "masked": slopes for keys after the query, written like
    position.slopes, which then holds for keys before the query. Default: the same slopes on both
    sides. Two sets are the nonsymmetric form of the authors' advice on encoders (issue 5 of
    ofirpress/attention_with_linear_biases), where they are trained."""

    title = "ALiBi"
    about = _ABOUT

    @property
    def bias(self) -> Literal["slopes", "scores"]:  # type: ignore[override]  # a class variable elsewhere
        return "slopes" if self.slopes_right is None else "scores"

    def _sides(self) -> dict[str, Slopes]:
        """Return the slopes as the config writes them, by key."""
        both = {"slopes": self.slopes, "slopes_right": self.slopes_right}
        return {key: written for key, written in both.items() if written is not None}

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the slopes do not fit the heads, or the model."""
        heads = config.model.num_attention_heads
        for key, written in self._sides().items():
            if isinstance(written, tuple) and len(written) != heads:
                yield config.refusal(
                    f"position.{key}",
                    f"lists {len(written)}, and model.num_attention_heads = {heads}",
                    f"Give {heads}, one for each head of the model; tensor-parallel ranks take "
                    "their part",
                )
            if isinstance(written, SlopeRange) and heads == 1 and written.first != written.last:
                yield config.refusal(
                    f"position.{key}",
                    "one head has one slope, which cannot be the first and the last of them",
                    f"Set position.{key} = [{written.first}]",
                )
        if self.slopes_right is not None and not config.is_masked:
            yield config.refusal(
                "position.slopes_right",
                'no token sees one that follows, since train.objective = "next_token"',
                "Remove it",
            )

    def _slopes(self, config: RunConfig) -> dict[str, tuple[float, ...]]:
        """Return the slopes of all heads of the model by key: for keys before the query, after."""
        heads = config.model.num_attention_heads
        return {key: _values(written, heads) for key, written in self._sides().items()}

    def resolved(self, config: RunConfig) -> dict[str, Any]:
        # A range and the list of its values give the same model. They are compared in fp32, in
        # which scores are computed.
        published, sides = published_slopes(config.model.num_attention_heads), self._slopes(config)
        same = {key: array("f", v) == array("f", published) for key, v in sides.items()}
        return {key: "published" if same[key] else [*v] for key, v in sides.items()}

    def _are_published(self, config: RunConfig) -> bool:
        """Return True if both sides have the published slopes, however they are written."""
        return self.resolved(config) == {"slopes": "published"}

    def result_name(self, config: RunConfig) -> str:
        if self.trainable_slopes:
            return "alibi_trained_slopes"
        return self.method if self._are_published(config) else "alibi_other_slopes"

    def description(self, config: RunConfig) -> str:
        trained, sides = self.trainable_slopes, self._slopes(config).values()
        if self._are_published(config):
            return "alibi with trainable slopes" if trained else "alibi"
        shown = " and to the right ".join(" ".join(f"{m:.4g}" for m in side) for side in sides)
        return f"alibi with {'trainable slopes, at first' if trained else 'slopes'} {shown}"

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        if not self.trainable_slopes:
            return {}
        return {OWN + key: (config.model.num_attention_heads,) for key in self._sides()}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        return self._given(config) if self.trainable_slopes else {}

    def _given(self, config: RunConfig) -> dict[str, Tensor]:
        """Return the slopes of the config, trainable or not."""
        import torch

        values = self._slopes(config).items()
        return {OWN + key: torch.tensor(v, dtype=torch.float32) for key, v in values}

    def head_slopes(self, config: RunConfig) -> tuple[float, ...] | None:
        # With two slopes per head, the kernels compute all keys.
        return self._slopes(config)["slopes"] if self.slopes_right is None else None

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        from pretrain.kernels.call import by_distance

        given = self._given(config)
        left, *right = (
            own[key].float() if self.trainable_slopes else given[OWN + key][heads].to(device)
            for key in self._sides()
        )
        return {"scores": by_distance(_two_sided, (left, *right))} if right else {"slopes": left}


def _two_sided(distances: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the bias [H, N] of keys at distances [N] before the query, or after it if negative."""
    before, behind = distances.clamp(min=0), (-distances).clamp(min=0)
    return -left[:, None] * before - right[:, None] * behind


def _values(written: Slopes, num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head that a value of position.slopes means."""
    if isinstance(written, SlopeRange):
        first, last = written.first, written.last
        # Take the ends as written, because powers would round them.
        middle = [
            first * (last / first) ** (head / (num_heads - 1)) for head in range(1, num_heads - 1)
        ]
        return (first, *middle, last)[:num_heads]
    if isinstance(written, BiasMax):
        return published_slopes(num_heads, written.bias_max)
    if isinstance(written, ScaledSlopes):
        return written.of_heads(num_heads)
    return published_slopes(num_heads) if written == "published" else written


def bias_max_of(slopes: Slopes) -> int:
    """Return MPT's alibi_bias_max of a value of position.slopes; 8 where it has none."""
    return slopes.bias_max if isinstance(slopes, BiasMax) else PUBLISHED_BIAS_MAX


def slopes_with(bias_max: int) -> Any:
    """Return the value of position.slopes that has MPT's alibi_bias_max.

    Raises:
        ValueError: bias_max is not from 1 to 100.
    """
    if bias_max == PUBLISHED_BIAS_MAX:
        return "published"
    return BiasMax(bias_max=bias_max).model_dump()


def published_slopes(num_heads: int, bias_max: int = PUBLISHED_BIAS_MAX) -> tuple[float, ...]:
    """Return the published slopes of all heads of a model, each in (0, 1).

    For n heads, n a power of two, head h has the slope 2^(-8 (h + 1) / n) (section 3 of the paper).
    For other n, this follows the authors' code and every public model: the slopes of the largest
    power of two below n, then every second slope of twice as many heads.

    Args:
        num_heads: n.
        bias_max: Largest exponent, 8 in the paper.
    """
    power = 1 << (num_heads.bit_length() - 1)
    more = _geometric(2 * power, bias_max)[0::2][: num_heads - power]
    return (*_geometric(power, bias_max), *more)


def _geometric(num_heads: int, bias_max: int) -> list[float]:
    """Return the slopes of `num_heads` heads, a power of two."""
    return [2.0 ** (-bias_max * (head + 1) / num_heads) for head in range(num_heads)]


def alibi_slopes(num_heads: int) -> Tensor:
    """Return `published_slopes` as a tensor, fp32 [num_heads].

    A tensor-parallel rank must slice this tensor. Calling it with the rank's own head count would
    give different slopes.
    """
    import torch

    return torch.tensor(published_slopes(num_heads), dtype=torch.float32)
