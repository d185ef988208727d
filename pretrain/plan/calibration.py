"""Scale the assumed speeds by what `pretrain bench train --json` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, RunConfig, parse_config
from pretrain.plan.hardware import Device, Network
from pretrain.plan.timing import Scale, time_of_step
from pretrain.plan.weights import stages_of

LONGEST = 86_400
"""Seconds. No part of a step takes a day."""


def read_calibration(path: Path, device: Device, network: Network) -> Scale:
    """Return the factors by which measured times differ from the model's.

    The measured forward and backward passes are compared with all that the model has in them,
    communication included; the optimizer's step with the optimizer's lines.

    Args:
        path: What `pretrain bench train --json` wrote.
        device: The GPU that is planned for, on which the measurement must have been made.
        network: The links between its nodes.

    Raises:
        ConfigError: The file is not such a result, or of another device.
    """
    measured = _read(path)
    if measured["device"] != device.name:
        raise ConfigError(
            f"{path}: measured on {measured['device']}, and the plan is for {device.name}. Give a "
            "measurement of the planned GPU, or plan for the measured one with --gpu-type"
        )
    config: RunConfig = parse_config(measured["config"], str(path))
    # The plan's speeds are those of 16-bit products and of fused attention.
    if config.train.precision == "fp32" or config.model.attention_backend == "reference":
        raise ConfigError(
            f"{path}: measured in {config.train.precision} with attention "
            f"{config.model.attention_backend}. Calibrate with a measurement in 16 bit "
            "and with model.attention_backend = auto"
        )
    layout = config.layout(measured["world_size"])
    timing = time_of_step(config, layout, stages_of(config, layout), device, network)
    optimizer = timing.part("optimizer")
    passes = timing.milliseconds - optimizer
    seconds = measured["seconds"]
    # What is not compute is left as it is.
    fixed = timing.part("communication") + timing.part("bubble")
    compute = (1e3 * seconds["forward and backward"] - fixed) / (passes - fixed)
    if compute <= 0:
        raise ConfigError(
            f"{path}: forward and backward took {1e3 * seconds['forward and backward']:.1f} ms, "
            f"less than the {fixed:.1f} ms that the model has for communication alone. Calibrate "
            "with a measurement on one node, or say with --network how fast its links are"
        )
    if compute < device.gemm_fraction:
        raise ConfigError(
            f"{path}: forward and backward took {seconds['forward and backward']:g} s, less than "
            f"the peak of a {device.name} allows. Make the measurement anew"
        )
    return Scale(compute, 1e3 * seconds["optimizer step"] / optimizer)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a result, with the keys that are needed."""
    needed = {"device": str, "config": dict, "world_size": int, "seconds": dict}
    try:
        content = json.loads(path.read_bytes())
        assert all(isinstance(content[key], kind) for key, kind in needed.items())
        for name in ("forward and backward", "optimizer step"):
            assert 0 < content["seconds"][name] < LONGEST
        assert content["world_size"] > 0
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise ConfigError(
            f"{path}: not a result of a measurement. Make one with `pretrain bench train CONFIG "
            "--json FILE` on the planned GPU"
        ) from None
    return dict(content)
