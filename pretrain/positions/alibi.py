"""ALiBi: add -m_h (i - j) to the score of query i and key j in head h.

Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, arXiv 2108.12409. Model, kernels,
export and benchmarks all take their slopes from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from pretrain.config.errors import Refusal
from pretrain.config.schema import Section
from pretrain.positions.base import PositionMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pretrain.config.run import RunConfig

MAX_SLOPE = 100.0
"""Largest slope. exp(-104) is 0 in fp32, so a steeper head sees nothing but a token itself, too."""


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
    """Head h of n, a power of two, has the slope 2^(-bias_max (h + 1) / n). The paper has 8."""


def _as_slopes(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a value of several types, with one message where pydantic has one for each type."""
    try:
        # TOML and JSON have lists, which are no tuples to a strict schema.
        return validate(tuple(value) if isinstance(value, list) else value)
    except ValidationError:
        raise PydanticCustomError(
            "slopes",
            "input should be 'published', a list with a number from 0 to 100 for each head, or a "
            "table {first = 0.5, last = 0.00390625} of numbers above 0, up to 100, or a table "
            "{bias_max = 16} with an integer from 1 to 100",
        ) from None


_Slope = Annotated[float, Field(ge=0, le=MAX_SLOPE, allow_inf_nan=False)]
Slopes = Annotated[
    Literal["published"]
    | Annotated[tuple[_Slope, ...], Field(min_length=1)]
    | SlopeRange
    | BiasMax,
    WrapValidator(_as_slopes),
]
"""The word "published", one slope a head, the ends of a geometric sequence, or a BiasMax."""
PUBLISHED_BIAS_MAX = 8


class Alibi(PositionMethod):
    """Linear biases on the attention scores.

    A tensor-parallel rank takes its slice of the slopes of all heads. Computing slopes for the
    number of local heads instead would give each rank the slopes of a smaller model.
    """

    method: Literal["alibi"] = "alibi"

    slopes: Slopes = "published"
    """The slopes of the heads. published: those of the paper, 2^(-8 (h + 1) / n) for n heads where
    n is a power of two, and those of the authors' code for other n. A list has one slope for each
    head of the model, from 0, which adds nothing to a head's scores, to 100. A table such as
    {first = 0.5, last = 0.00390625} is a geometric sequence from the first head to the last. The
    table {bias_max = 16} has 16 in place of the 8 of the published slopes, as alibi_bias_max of
    MPT's models."""

    trainable_slopes: bool = False
    """Train the slopes, from those of position.slopes on. The paper found it slower, and worse
    beyond the training length."""

    title = "ALiBi"
    about = _ABOUT
    bias = "slopes"

    def refusals(self, config: RunConfig) -> Iterator[Refusal]:
        """Yield why the slopes do not fit the heads."""
        heads = config.model.num_attention_heads
        if isinstance(self.slopes, tuple) and len(self.slopes) != heads:
            yield Refusal(
                "position.slopes",
                list(self.slopes),
                f"lists {len(self.slopes)}, and model.num_attention_heads = {heads}",
                f"Give {heads}, one for each head of the model; tensor-parallel ranks take their "
                "part",
            )
        ends = self.slopes if isinstance(self.slopes, SlopeRange) else None
        if ends is not None and heads == 1 and ends.first != ends.last:
            yield Refusal(
                "position.slopes",
                ends.model_dump(),
                "one head has one slope, which cannot be the first and the last of them",
                f"Set position.slopes = [{ends.first}]",
            )

    def slopes_of(self, num_heads: int) -> tuple[float, ...]:
        """Return the slope of each head, of all heads of a model.

        Args:
            num_heads: Number of heads of the whole model.
        """
        if isinstance(self.slopes, SlopeRange):
            first, last = self.slopes.first, self.slopes.last
            # The ends are exact, so that the range says what it holds.
            middle = [
                first * (last / first) ** (head / (num_heads - 1))
                for head in range(1, num_heads - 1)
            ]
            return (first, *middle, last)[:num_heads]
        if isinstance(self.slopes, BiasMax):
            return published_slopes(num_heads, self.slopes.bias_max)
        return published_slopes(num_heads) if self.slopes == "published" else self.slopes

    def resolved(self, config: RunConfig) -> dict[str, Any]:
        if self.slopes == "published":
            return {}
        # A range and the list of its values are one model.
        return {"slopes": list(self.slopes_of(config.model.num_attention_heads))}

    @property
    def result_name(self) -> str:
        if self.trainable_slopes:
            return "alibi_trained_slopes"
        return self.method if self.slopes == "published" else "alibi_other_slopes"

    def description(self, config: RunConfig) -> str:
        if self.slopes == "published":
            return "alibi with trainable slopes" if self.trainable_slopes else "alibi"
        found = self.slopes_of(config.model.num_attention_heads)
        trained = "trainable slopes, at first" if self.trainable_slopes else "slopes"
        return f"alibi with {trained} {' '.join(f'{slope:.4g}' for slope in found)}"

    def tensors(self, config: RunConfig) -> dict[str, tuple[int, ...]]:
        shape = (config.model.num_attention_heads,)
        return {"position.slopes": shape} if self.trainable_slopes else {}

    def initial_values(self, config: RunConfig) -> dict[str, Tensor]:
        import torch

        slopes = self.slopes_of(config.model.num_attention_heads)
        return {"position.slopes": torch.tensor(slopes, dtype=torch.float32)}

    def head_slopes(self, config: RunConfig) -> tuple[float, ...]:
        return self.slopes_of(config.model.num_attention_heads)

    def score_terms(
        self, config: RunConfig, heads: slice, own: Mapping[str, Tensor], device: torch.device
    ) -> dict[str, Any]:
        import torch

        if self.trainable_slopes:
            return {"slopes": own["slopes"].float()}
        slopes = self.slopes_of(config.model.num_attention_heads)[heads]
        return {"slopes": torch.tensor(slopes, dtype=torch.float32, device=device)}


def bias_max_of(slopes: Slopes) -> int:
    """Return MPT's alibi_bias_max of a value of position.slopes; 8 where it has none."""
    return slopes.bias_max if isinstance(slopes, BiasMax) else PUBLISHED_BIAS_MAX


def slopes_with(bias_max: int) -> Any:
    """Return the value of position.slopes that has MPT's alibi_bias_max.

    Raises:
        ValueError: It is not in the range of bias_max.
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
        bias_max: What stands in place of the 8.
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
