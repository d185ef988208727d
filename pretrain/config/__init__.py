"""What a run is. `load_config` reads one; `RunConfig` holds it and every value derived from it. Never imports torch."""

from pretrain.config.errors import ConfigError, RunFailed, writing
from pretrain.config.evaluation import EvaluationRequest
from pretrain.config.load import dump_config, load_config, parse_config
from pretrain.config.parameters import num_parameters, num_parameters_of_rank
from pretrain.config.schema import Layout, RunConfig

__all__ = [
    "ConfigError",
    "EvaluationRequest",
    "Layout",
    "RunConfig",
    "RunFailed",
    "dump_config",
    "load_config",
    "num_parameters",
    "num_parameters_of_rank",
    "parse_config",
    "writing",
]
