"""Choose how a model is stored: the class by `pretrain.config.exports`, its tables by `targets`."""

from __future__ import annotations

from pretrain.config import RunConfig
from pretrain.config.exports import export_class
from pretrain.export.targets import TARGETS, Target


def check_exportable(config: RunConfig) -> Target:
    """Return the class that can hold this model.

    Raises:
        ConfigError: No class can. The message gives every reason, and what to train instead.
    """
    return TARGETS[export_class(config).model_type]
