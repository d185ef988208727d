"""Read, check and describe the configuration of a run.

`load_config` reads a TOML file, `RunConfig` holds its values and every value derived from them.
This package never imports torch: the launcher checks a run on a login node, where torch may be
missing or slow to load.
"""

from pretrain.config.errors import (
    NO_SPACE_ERRORS,
    ConfigError,
    Diverged,
    NoSpace,
    RunFailed,
    free_bytes,
    in_bytes,
    writing,
)
from pretrain.config.evaluation import EvaluationRequest
from pretrain.config.load import dump_config, load_config, load_with_origins, parse_config
from pretrain.config.run import Layout, RunConfig
from pretrain.config.tensors import num_parameters, num_parameters_of_rank

__all__ = [
    "NO_SPACE_ERRORS",
    "ConfigError",
    "Diverged",
    "EvaluationRequest",
    "Layout",
    "NoSpace",
    "RunConfig",
    "RunFailed",
    "dump_config",
    "free_bytes",
    "in_bytes",
    "load_config",
    "load_with_origins",
    "num_parameters",
    "num_parameters_of_rank",
    "parse_config",
    "writing",
]
