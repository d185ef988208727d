"""`pretrain plan`: choose a layout for a number of GPUs, and write it down."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tomli_w

from pretrain.config import ConfigError, RunConfig, load_config, writing
from pretrain.plan.calibration import read_calibration
from pretrain.plan.hardware import GPU_TYPES, NETWORKS, Device, Network, network_of
from pretrain.plan.planning import Planned, Target, make_plan
from pretrain.plan.table import layout_name, to_table
from pretrain.plan.timing import Scale, time_of_evaluations
from pretrain.plan.weights import stages_of


def read_target(
    gpus: int, gpu_type: str, network: str | None, calibration: Path | None = None
) -> Target:
    """Return what a run is planned for, from the words of the command line.

    Args:
        gpus: Number of GPUs.
        gpu_type: One of GPU_TYPES.
        network: One of NETWORKS, or Gbit/s of a node each way; None: what the GPU usually has.
        calibration: A result of `pretrain bench train --json`, or None.

    Raises:
        ConfigError: A word is not known.
    """
    device = GPU_TYPES.get(gpu_type)
    if device is None:
        raise ConfigError(f"--gpu-type {gpu_type}: not known. Choose one of {', '.join(GPU_TYPES)}")
    links = _network(network, device)
    scale = Scale() if calibration is None else read_calibration(calibration, device, links)
    return Target(gpus, gpu_type, device, links, scale)


def _network(text: str | None, device: Device) -> Network:
    """Return the links of a node that `text` names."""
    if text is None:
        return NETWORKS[device.network]
    if text in NETWORKS:
        return NETWORKS[text]
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        names = ", ".join(f"{name} ({each.name})" for name, each in NETWORKS.items())
        raise ConfigError(
            f"--network {text}: not known. Choose one of {names}, or a number of Gbit/s: all links "
            "of a node together, in one direction"
        )
    return network_of(rate)


def plan_run(config: RunConfig, source: Path, target: Target, overlay: Path | None) -> str:
    """Return the text of the plan, and write the best layout if asked to.

    Args:
        config: The run.
        source: The file that it was read from.
        target: What it is planned for.
        overlay: Where to write the best layout as a config that builds on `source`, or None.

    Raises:
        ConfigError: The run cannot be planned, or nothing fits that could be written.
    """
    plan = make_plan(config, target)
    evaluations = None
    if plan.fits:
        best = plan.fits[0]
        stages = stages_of(best.config, best.layout)
        evaluations = time_of_evaluations(
            best.config, best.layout, stages, target.device, target.network, target.scale
        )
    text = to_table(config, target, plan, evaluations)
    if overlay is None:
        return text
    if not plan.fits:
        raise ConfigError(
            f"--write {overlay}: no layout fits into {target.usable_bytes / 1e9:.1f} GB. Plan for "
            "more GPUs, or for larger ones"
        )
    write_overlay(overlay, source, config, plan.fits[0])
    return f"{text}\n\n{overlay}: {layout_name(plan.fits[0])}, on top of {source}"


def write_overlay(path: Path, source: Path, config: RunConfig, best: Planned) -> None:
    """Write a config that builds on another one and has the planned layout.

    It is read again, and must be the planned run.

    Args:
        path: Where to write.
        source: The config to build on.
        config: The run as the command had it, with its --set.
        best: The planned run.

    Raises:
        ConfigError: The file would replace the config that it builds on, or is not the planned run.
    """
    if path.resolve() == source.resolve():
        raise ConfigError(
            f"--write {path}: is the config itself, which the overlay builds on. Choose another "
            "name"
        )
    base = os.path.relpath(source.resolve(), path.resolve().parent)
    values: dict[str, Any] = {"base": base, **_different(load_config(source), best.config)}
    with writing(path):
        path.write_text(
            f"# Written by `pretrain plan`: {layout_name(best)}.\n{tomli_w.dumps(values)}"
        )
    if load_config(path) != best.config:
        raise ConfigError(
            f"{path}: does not have the planned layout, because a key cannot be removed from its "
            f"base. Remove parallel.virtual_pipeline_model_parallel_size from {source}"
        )


def _different(base: RunConfig, wanted: RunConfig) -> dict[str, dict[str, Any]]:
    """Return section -> the keys in which a run differs from its base.

    Raises:
        ConfigError: A key of the base would have to be removed, which an overlay cannot.
    """
    before, after = (c.model_dump(mode="json", exclude_none=True) for c in (base, wanted))
    result: dict[str, dict[str, Any]] = {}
    for section, keys in after.items():
        changed = {k: v for k, v in keys.items() if before[section].get(k, _MISSING) != v}
        if changed:
            result[section] = changed
    return result


_MISSING = object()
