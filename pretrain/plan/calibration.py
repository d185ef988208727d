"""Scale the assumed speeds by what `pretrain bench train --json` has measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.config import ConfigError, Layout, RunConfig, parse_config
from pretrain.plan.hardware import Scale
from pretrain.plan.timing import Target, Timing, time_of_step
from pretrain.plan.weights import stages_of, zero_stage

LONGEST = 86_400
"""Seconds. No part of a step takes a day."""
PASSES, REDUCTION, OPTIMIZER = "forward and backward", "gradient reduction", "optimizer step"
"""Parts of a step in a measurement. What reduces gradients while the backward pass runs is in the
first, and what is left of it afterwards in the second."""


def read_calibration(path: Path, target: Target) -> Scale:
    """Return the factors with which the model's time of the measured run is the measured one.

    The measured passes are compared with all that the model has in them, communication and the
    reduction of gradients included; the optimizer's step with the optimizer's lines and the gather
    of weights, for which a measurement waits. The factors are on computing alone.

    Args:
        path: What `pretrain bench train --json` wrote.
        target: The GPU that is planned for, on which the measurement must have been made, and its
            links.

    Raises:
        ConfigError: The file is not such a result, or of another device.
    """
    measured = _read(path)
    if measured["device"] != target.device.name:
        raise ConfigError(
            f"{path}: measured on {measured['device']}, and the plan is for {target.device.name}. "
            "Give a measurement of the planned GPU, or plan for the measured one with --gpu-type"
        )
    config: RunConfig = parse_config(measured["config"], str(path))
    # The plan's speeds are those of 16-bit products and of fused attention.
    if config.train.precision == "fp32" or config.model.attention_backend == "reference":
        raise ConfigError(
            f"{path}: measured in {config.train.precision} with attention "
            f"{config.model.attention_backend}. Calibrate with a measurement in 16 bit "
            "and with model.attention_backend = auto"
        )
    try:
        layout = config.layout(measured["world_size"])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    stages = stages_of(config, layout)
    seconds = measured["seconds"]

    def modelled(scale: Scale) -> tuple[float, float]:
        """Return the model's passes and optimizer step in milliseconds."""
        scaled = replace(target, scale=scale)
        return parts(time_of_step(config, layout, stages, scaled, waits=True), config, layout)

    passes = 1e3 * (seconds[PASSES] + seconds[REDUCTION])
    compute = _factor(path, PASSES, passes, lambda x: modelled(Scale(compute=x))[0])
    if compute < target.device.gemm_fraction:
        raise ConfigError(
            f"{path}: {PASSES} took {passes / 1e3:g} s, less than the peak of a "
            f"{target.device.name} allows. Make the measurement anew"
        )
    step = 1e3 * seconds[OPTIMIZER]
    return Scale(compute, _factor(path, OPTIMIZER, step, lambda x: modelled(Scale(compute, x))[1]))


def parts(timing: Timing, config: RunConfig, layout: Layout) -> tuple[float, float]:
    """Return the milliseconds of a step that a measurement has in the passes and in the optimizer.

    Args:
        timing: The modelled step, in which the host waits for the device after each part.
        config: The measured run.
        layout: Its layout.
    """
    optimizer = timing.part("optimizer")
    if zero_stage(config, layout) < 3:
        # ZeRO 3 gathers weights in the passes.
        optimizer += timing.lines.get("gather of weights, exposed", 0.0)
    return timing.milliseconds - optimizer, optimizer


def _factor(path: Path, name: str, measured: float, modelled: Callable[[float], float]) -> float:
    """Return the factor on computing with which the model takes as long as was measured.

    Args:
        path: The measurement.
        name: The measured part.
        measured: Its milliseconds.
        modelled: Milliseconds of the model by factor. They rise with it, and less than in
            proportion, as communication hides behind computing.

    Raises:
        ConfigError: Communication alone takes longer in the model.
    """
    low, high = 0.0, 1.0
    if measured <= (fixed := modelled(low)):
        raise ConfigError(
            f"{path}: {name} took {measured:.1f} ms, less than the {fixed:.1f} ms that the model "
            "has for communication alone. Calibrate with a measurement on one node, or say with "
            "--network how fast its links are"
        )
    while modelled(high) < measured:
        low, high = high, 2 * high
    while not math.isclose(low, high, rel_tol=1e-12):
        middle = (low + high) / 2
        low, high = (middle, high) if modelled(middle) < measured else (low, middle)
    return high


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a result, with the keys that are needed."""
    needed = {"device": str, "config": dict, "world_size": int, "seconds": dict}
    try:
        content = json.loads(path.read_bytes())
        assert all(isinstance(content[key], kind) for key, kind in needed.items())
        seconds = content["seconds"]
        for name in (PASSES, OPTIMIZER):
            assert 0 < seconds[name] < LONGEST
        assert 0 <= seconds[REDUCTION] < LONGEST
        assert content["world_size"] > 0
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise ConfigError(
            f"{path}: not a result of a measurement. Make one with `pretrain bench train CONFIG "
            "--json FILE` on the planned GPU"
        ) from None
    return dict(content)
