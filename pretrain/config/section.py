"""Define the base of every section of a config."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
