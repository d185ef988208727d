"""Read, check and describe the configuration of a run.

`load_config` reads a TOML file, `RunConfig` holds its values and every value derived from them.
This package never imports torch: the launcher checks a run on a login node, where torch may be
missing or slow to load. A module of it is imported when one of its names is first used: its classes
take three times as long as its errors, which alone the process that writes checkpoints needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pretrain.config.errors import (
    ConfigError,
    Diverged,
    MemoryChanged,
    NoSpace,
    Poisoned,
    RunFailed,
    Unsound,
    free_bytes,
    in_bytes,
    writing,
)

if TYPE_CHECKING:
    from pretrain.config.load import EvaluationRequest, dump_config, load_config, parse_config
    from pretrain.config.run import Layout, RunConfig
    from pretrain.config.tensors import num_parameters, num_parameters_of_rank

__all__ = [
    "ConfigError",
    "Diverged",
    "EvaluationRequest",
    "Layout",
    "MemoryChanged",
    "NoSpace",
    "Poisoned",
    "RunConfig",
    "RunFailed",
    "Unsound",
    "dump_config",
    "free_bytes",
    "in_bytes",
    "load_config",
    "num_parameters",
    "num_parameters_of_rank",
    "parse_config",
    "writing",
]

_LAZY = ("tensors", "run", "load")
"""The modules of the other names. Each imports those before it."""


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used."""
    for home in _LAZY if name in __all__ else ():
        module = import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
