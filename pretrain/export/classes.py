"""Find the transformers classes of a model_type, whether stock or our own, without a folder's code.

The code in a folder is a copy of ours. Loading the copy would run what somebody may have changed,
and leave another one in the user's cache (HF_MODULES_CACHE).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pretrain.export.targets import TARGETS


def is_own(model_type: object) -> bool:
    """Return True if a folder of this model_type is loaded by a class of ours."""
    return isinstance(model_type, str) and model_type in TARGETS and bool(TARGETS[model_type].stock)


def config_class(model_type: str) -> Any:
    """Return the config class of a model_type."""
    if not is_own(model_type):
        from transformers import AutoConfig

        return type(AutoConfig.for_model(model_type))
    return _own(model_type)[0]


def model_class(model_type: str) -> Any:
    """Return what loads a model of a model_type: one of our classes, or AutoModelForCausalLM."""
    if not is_own(model_type):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM
    return _own(model_type)[1]


def build_model(settings: Any) -> Any:
    """Return a model with the weights that it starts with.

    Args:
        settings: The transformers config.
    """
    if not is_own(settings.model_type):
        return model_class(settings.model_type).from_config(settings)
    return model_class(settings.model_type)(settings)


def auto_map(code: str, model_type: str) -> dict[str, str]:
    """Return what config.json says of the code in the folder.

    Args:
        code: Module and class of the model.
        model_type: Its model_type, whose config is stock or stands in the same module.
    """
    found = {"AutoModelForCausalLM": code}
    if not is_own(model_type):
        # Stock loaders take their own class; with trust_remote_code=True they take this one.
        return found
    return {"AutoConfig": f"{code.partition('.')[0]}.{_own(model_type)[0].__name__}"} | found


def code_files(code: str) -> list[Path]:
    """Return the files that a folder brings along: the module, and the neighbours that it imports.

    Args:
        code: Module and class of the model.
    """
    module = Path(__file__).with_name(f"{code.partition('.')[0]}.py")
    neighbours = re.findall(r"^from \.(\w+) import", module.read_text(), re.MULTILINE)
    return [module, *(module.with_name(f"{name}.py") for name in neighbours)]


def _own(model_type: str) -> tuple[Any, Any]:
    """Return our config class and model class of a model_type."""
    # Imported here, since transformers' modelling code takes seconds to load.
    from pretrain.export.modeling_bloom_slopes import BloomSlopesConfig, BloomSlopesForCausalLM
    from pretrain.export.modeling_mpt_slopes import MptSlopesConfig, MptSlopesForCausalLM

    return {
        "bloom_slopes": (BloomSlopesConfig, BloomSlopesForCausalLM),
        "mpt_slopes": (MptSlopesConfig, MptSlopesForCausalLM),
    }[model_type]
