"""Define the base of every section of a config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of every TOML section: immutable, and strict about unknown keys and about types.

    The one conversion is from an integer to a float. A key that is misspelled or of the wrong type
    is an error, because a default that silently took its place would train another model.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def _with_one_message(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a value of several types, with one message where pydantic has one for each type."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError(
            "auto_or_positive", "input should be 'auto' or a finite number greater than 0"
        ) from None


AutoOrPositive = Annotated[
    Literal["auto"] | Annotated[float, Field(gt=0, allow_inf_nan=False)],
    WrapValidator(_with_one_message),
]
"""The word "auto", or a number greater than 0."""
