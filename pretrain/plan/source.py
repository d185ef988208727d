"""Read the config that is planned, also one whose own layout is refused: the plan finds another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pretrain.config import ConfigError, RunConfig, load_config
from pretrain.config.inheritance import read_layers
from pretrain.config.overrides import overridden
from pretrain.config.paths import expand_paths
from pretrain.config.schema import BatchSection, ParallelSection

SMALLEST = (
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
    "parallel.virtual_pipeline_model_parallel_size=",
    "parallel.sequence_parallel=false",
    "parallel.zero_stage=1",
    "parallel.world_size=",
    "batch.micro_batch_size=1",
)
"""Overrides of all that a plan chooses and a rule may refuse. They are legal where anything is."""


def load_for_plan(path: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, str | None]:
    """Return a run to plan, and why its own layout is refused; None if it is not.

    The layout of a run whose own one is refused is the smallest instead.

    Args:
        path: The config file.
        overrides: As for `load_config`.

    Raises:
        ConfigError: The config is refused for something that no layout can mend.
    """
    try:
        return load_config(path, overrides), None
    except ConfigError as error:
        refusal = error
    values = overridden(read_layers(path).values, overrides)
    try:
        # What is no layout at all, such as a size of 0, is a mistake to be told.
        ParallelSection.model_validate(values.get("parallel", {}))
        BatchSection.model_validate(values.get("batch", {}))
    except ValidationError:
        raise refusal from None
    return load_config(path, [*overrides, *SMALLEST]), str(refusal)


def values_of_file(path: Path) -> dict[str, Any]:
    """Return the values that a config file and its bases say, legal or not.

    Defaults are among them, unless a value has the wrong type or a key is missing.

    Args:
        path: The config file.
    """
    values = read_layers(path).values
    try:
        return RunConfig.model_validate(expand_paths(values)).model_dump(
            mode="json", exclude_none=True
        )
    except (ConfigError, ValidationError):
        return values
