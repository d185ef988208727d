"""Pretrain GPTs with ALiBi attention at a short length and test them at longer ones.

Models run in any tensor x pipeline x data-parallel layout (Megatron-core), with the optimizer state
sharded by DeepSpeed ZeRO. The commands are `pretrain` (pretrain.cli) and `launcher`
(pretrain.launcher.cli); the functions below are the library (pretrain.library), imported when one
of them is first named. So this file imports nothing heavy, and either command can refuse a wrong
config without waiting for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pretrain.startup import install

if TYPE_CHECKING:
    from pretrain.config import ConfigError, RunConfig, RunFailed
    from pretrain.library import (
        TrainResult,
        attention,
        build_data,
        evaluate,
        export_model,
        import_model,
        load_config,
        train,
    )

    __version__: str

__all__ = [
    "ConfigError",
    "RunConfig",
    "RunFailed",
    "TrainResult",
    "__version__",
    "attention",
    "build_data",
    "evaluate",
    "export_model",
    "import_model",
    "load_config",
    "train",
]

install()


def __getattr__(name: str) -> Any:
    """Import the library when one of its names is first used."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pretrain")
    if name not in __all__:
        raise AttributeError(f"module 'pretrain' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("pretrain.library"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
