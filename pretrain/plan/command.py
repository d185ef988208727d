"""`pretrain plan`: choose a layout for a number of GPUs, and write it down."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from pretrain.config import ConfigError, RunConfig, load_config, writing
from pretrain.config.inheritance import read_layers
from pretrain.plan.calibration import read_calibration
from pretrain.plan.hardware import GPU_TYPES, NETWORKS, Device, Network, network_of
from pretrain.plan.planning import Planned, make_plan
from pretrain.plan.source import values_of_file
from pretrain.plan.table import layout_name, to_table
from pretrain.plan.timing import Target, time_of_evaluations
from pretrain.plan.weights import stages_of

SLOWEST, FASTEST = 0.01, 1e6
"""Gbit/s of a node's links that are believed."""


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
    device = GPU_TYPES.get(gpu_type.lower())
    if device is None:
        raise ConfigError(f"--gpu-type {gpu_type}: not known. Choose one of {', '.join(GPU_TYPES)}")
    target = Target(gpus, gpu_type.lower(), device, _network(network, device))
    if calibration is None:
        return target
    return replace(target, scale=read_calibration(calibration, target))


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
    if not SLOWEST <= rate <= FASTEST:
        names = ", ".join(f"{name} ({each.name})" for name, each in NETWORKS.items())
        raise ConfigError(
            f"--network {text}: not known. Choose one of {names}, or a number of Gbit/s from "
            f"{SLOWEST:g} to {FASTEST:g}: all links of a node together, in one direction"
        )
    return network_of(rate)


def plan_run(
    config: RunConfig,
    source: Path,
    target: Target,
    overlay: Path | None,
    refusal: str | None = None,
) -> str:
    """Return the text of the plan, and write the best layout if asked to.

    Args:
        config: The run.
        source: The file that it was read from.
        target: What it is planned for.
        overlay: Where to write the best layout as a config that builds on `source`, or None.
        refusal: Why the layout of `source` itself is refused, or None if it is not.

    Raises:
        ConfigError: The run cannot be planned, or nothing fits that could be written.
    """
    if overlay is not None:
        # Before the work of a plan.
        check_overlay(overlay, source)
    plan = make_plan(config, target)
    evaluations = None
    if plan.fits:
        best = plan.fits[0]
        stages = stages_of(best.config, best.layout)
        evaluations = time_of_evaluations(best.config, best.layout, stages, target)
    text = to_table(config, target, plan, evaluations, refusal)
    if overlay is None:
        return text
    if not plan.fits:
        raise ConfigError(
            f"--write {overlay}: no layout fits into {target.usable_bytes / 1e9:.1f} GB. Plan for "
            "more GPUs, or for larger ones"
        )
    write_overlay(overlay, source, plan.fits[0])
    return f"{text}\n\n{overlay}: {layout_name(plan.fits[0])}, on top of {source}"


def check_overlay(path: Path, source: Path) -> None:
    """Refuse to write where something is.

    Args:
        path: Where an overlay is to be written.
        source: The config that it builds on.

    Raises:
        ConfigError: There is a file, which may be the config or one of its bases, or no folder.
    """
    if os.path.lexists(path):
        files = {os.path.realpath(file) for file in read_layers(source).files}
        what = "exists, and is not replaced. Remove it first, or choose another name"
        if os.path.realpath(path) in files:
            what = "is a config that the overlay builds on. Choose another name"
        raise ConfigError(f"--write {path}: {what}")
    if not path.parent.is_dir():
        raise ConfigError(f"--write {path}: there is no folder {path.parent}. Make it first")


def write_overlay(path: Path, source: Path, best: Planned) -> None:
    """Write a config that builds on another one and is the planned run.

    It is read before it gets its name, and must be the planned run.

    Args:
        path: Where to write.
        source: The config to build on.
        best: The planned run.

    Raises:
        ConfigError: There is a file already, or no overlay of `source` is the planned run.
    """
    check_overlay(path, source)
    base = os.path.relpath(source.resolve(), path.resolve().parent)
    wanted = best.config.model_dump(mode="json", exclude_none=True)
    changed, removed = _different(values_of_file(source), wanted)
    values = {"base": base, **({"remove": removed} if removed else {}), **changed}
    text = f"# Written by `pretrain plan`: {layout_name(best)}.\n{tomli_w.dumps(values)}"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            partial.write_text(text)
            if load_config(partial) != best.config:
                raise ConfigError(
                    f"--write {path}: no overlay of {source} is the planned run. Write its values "
                    "into a config of your own: the table names the layout"
                )
            with path.open("x") as file:
                file.write(text)
        finally:
            partial.unlink(missing_ok=True)


def _different(
    base: dict[str, Any], wanted: dict[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return what an overlay says to turn the tables of a base into others.

    Args:
        base: The tables of the base.
        wanted: Those wanted.
        prefix: Name of the table with a dot at its end, within the whole.

    Returns:
        (values that differ, dotted keys of the base to remove)
    """
    changed: dict[str, Any] = {}
    removed = [f"{prefix}{key}" for key in base if key not in wanted]
    for key, value in wanted.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner, gone = _different(before, value, f"{prefix}{key}.")
            removed += gone
            if inner:
                changed[key] = inner
        elif key not in base or before != value:
            changed[key] = value
    return changed, removed
