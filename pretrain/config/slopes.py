"""Define the ways to write the slopes of ALiBi, and resolve them to one number for each head.

No torch: the launcher reads configs too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from pretrain.config.refusal import Refusal
from pretrain.config.section import Section

if TYPE_CHECKING:
    # RunConfig.layout applies the rules, so importing it at run time would be a circle.
    from pretrain.config.run import RunConfig

MAX_SLOPE = 100.0
"""Largest slope. exp(-104) is 0 in fp32, so a steeper head sees nothing but a token itself, too."""


class SlopeRange(Section):
    """A geometric sequence of slopes, from the first head to the last."""

    first: float = Field(gt=0, le=MAX_SLOPE)
    """Slope of the first head."""

    last: float = Field(gt=0, le=MAX_SLOPE)
    """Slope of the last head."""


def _with_one_message(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a value of several types, with one message where pydantic has one for each type."""
    try:
        # TOML and JSON have lists, which are no tuples to a strict schema.
        return validate(tuple(value) if isinstance(value, list) else value)
    except ValidationError:
        raise PydanticCustomError(
            "slopes",
            "input should be 'published', a list with a number from 0 to 100 for each head, or a "
            "table {first = 0.5, last = 0.00390625} of numbers above 0, up to 100",
        ) from None


_Slope = Annotated[float, Field(ge=0, le=MAX_SLOPE, allow_inf_nan=False)]
Slopes = Annotated[
    Literal["published"] | Annotated[tuple[_Slope, ...], Field(min_length=1)] | SlopeRange,
    WrapValidator(_with_one_message),
]
"""The word "published", one slope for each head, or the ends of a geometric sequence."""


def resolve_slopes(slopes: Slopes, num_heads: int) -> tuple[float, ...] | None:
    """Return the slope of each head of a model; None for the published ones.

    Args:
        slopes: The value of position.slopes.
        num_heads: Number of heads of the whole model.
    """
    if isinstance(slopes, SlopeRange):
        first, last = slopes.first, slopes.last
        # The ends are exact, so that the range says what it holds.
        middle = [
            first * (last / first) ** (head / (num_heads - 1)) for head in range(1, num_heads - 1)
        ]
        return (first, *middle, last)[:num_heads]
    return None if slopes == "published" else slopes


def check_slopes(c: RunConfig) -> Iterator[Refusal]:
    """Check that the slopes are those of a model with slopes, one for each of its heads."""
    p, heads = c.position, c.model.num_attention_heads
    if p.slopes == "published":
        return
    shown = list(p.slopes) if isinstance(p.slopes, tuple) else p.slopes.model_dump()
    if p.method != "alibi":
        yield Refusal(
            "position.slopes",
            shown,
            f'position.method = "{p.method}" has no slopes',
            'Remove the key, or set position.method = "alibi"',
        )
    elif isinstance(p.slopes, tuple) and len(p.slopes) != heads:
        yield Refusal(
            "position.slopes",
            shown,
            f"lists {len(p.slopes)}, and model.num_attention_heads = {heads}",
            f"Give {heads}, one for each head of the model; tensor-parallel ranks take their part",
        )
    elif isinstance(p.slopes, SlopeRange) and heads == 1 and p.slopes.first != p.slopes.last:
        yield Refusal(
            "position.slopes",
            shown,
            "one head has one slope, which cannot be the first and the last of them",
            f"Set position.slopes = [{p.slopes.first}]",
        )
