"""`pretrain plan`: choose a layout for a number of GPUs, and write it down."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from pretrain.config import ConfigError, RunConfig, load_config, num_parameters, rules, writing
from pretrain.config.load import overridden
from pretrain.config.schema import BatchSection, ParallelSection
from pretrain.config.toml import expand_paths, read_layers
from pretrain.plan.hardware import GPU_TYPES, INPUTS, NETWORKS, TITLES, Device, Network, network_of
from pretrain.plan.memory import Activations, Memory
from pretrain.plan.search import Plan, Planned, make_plan, read_calibration
from pretrain.plan.timing import PARTS, USABLE, Target

# ---- source ----
# Read the config that is planned, also one whose own layout is refused: the plan finds another.


SMALLEST = (
    "parallel.tensor_model_parallel_size=1",
    "parallel.pipeline_model_parallel_size=1",
    "parallel.virtual_pipeline_model_parallel_size=",
    "parallel.sequence_parallel=false",
    "parallel.zero_stage=1",
    "parallel.world_size=",
    "batch.micro_batch_size=1",
)
"""Overrides of all that a plan chooses and a rule may refuse. They are legal where anything is."""


def load_for_plan(path: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, str | None]:
    """Return a run to plan, and why its own layout is refused; None if it is not.

    The layout of a run whose own one is refused is the smallest instead.

    Args:
        path: The config file.
        overrides: As for `load_config`.

    Raises:
        ConfigError: The config is refused for something that no layout can mend.
    """
    try:
        return load_config(path, overrides), None
    except ConfigError as error:
        refusal = error
    values = overridden(read_layers(path).values, overrides)
    try:
        # What is no layout at all, such as a size of 0, is a mistake to be told.
        ParallelSection.model_validate(values.get("parallel", {}))
        BatchSection.model_validate(values.get("batch", {}))
    except ValidationError:
        raise refusal from None
    return load_config(path, [*overrides, *SMALLEST]), str(refusal)


def values_of_file(path: Path) -> dict[str, Any]:
    """Return the values that a config file and its bases say, legal or not.

    Defaults are among them, unless a value has the wrong type or a key is missing.

    Args:
        path: The config file.
    """
    values = read_layers(path).values
    try:
        return RunConfig.model_validate(expand_paths(values)).model_dump(
            mode="json", exclude_none=True
        )
    except (ConfigError, ValidationError):
        return values


# ---- Show a plan: the best layouts, memory and time by part, what falls out, what was assumed ----


ROWS = 10
"""Layouts in the table."""
MISSES = 3
"""Layouts that do not fit of which the table says by how much."""


def to_table(
    config: RunConfig,
    target: Target,
    plan: Plan,
    refusal: str | None = None,
) -> str:
    """Return the text that `pretrain plan` prints.

    Args:
        config: The run as it is configured.
        target: The GPUs and their network.
        plan: Its layouts.
        refusal: Why the configured layout is refused; `config` has another one then.
    """
    parts = [
        _head(config, target),
        *_best(target, plan),
        *_details(config, target, plan, refusal),
        *_reasons(target, plan),
        *_assumptions(config, target),
    ]
    return "\n".join(parts)


def layout_name(each: Planned) -> str:
    """Return a layout in a few letters, as "TP 2 PP 4 VPP 2 SP ZeRO 1"."""
    p = each.config.parallel
    words = [f"TP {p.tensor_model_parallel_size} PP {p.pipeline_model_parallel_size}"]
    if p.virtual_pipeline_model_parallel_size:
        words.append(f"VPP {p.virtual_pipeline_model_parallel_size}")
    if p.sequence_parallel:
        words.append("SP")
    return " ".join([*words, f"DP {each.layout.data} ZeRO {p.zero_stage}"])


def _head(config: RunConfig, target: Target) -> str:
    """Return the lines that say what is planned."""
    return (
        f"{num_parameters(config):,} parameters, {config.position.method}, "
        f"L = {config.data.sequence_length}, {config.train.precision}; "
        f"{config.tokens_per_step:,} tokens a step, {config.train.num_steps:,} steps, "
        f"{config.planned_tokens:,} tokens\n"
        f"{target.gpus} x {target.device.name}, {target.usable_bytes / 1e9:.1f} GB of each usable; "
        f"links of a node: {target.network.name}"
    )


def _best(target: Target, plan: Plan) -> Iterator[str]:
    """Yield the table of the best layouts: for each its fastest micro batch and recomputation."""
    best = plan.best_of_groups()
    if not best:
        yield "\nNo layout fits. The nearest misses are below"
        return
    shown = best[:ROWS]
    width = max(len(layout_name(each)) for each in shown)
    columns = [f"{name:>{max(7, len(name) + 1)}}" for name in PARTS]
    yield (
        f"\n{'layout':<{width}}  micro  recompute     GB {'step ms':>8}{''.join(columns)}"
        f"{'tokens/s':>12}  MFU all  causal  GPU-hours"
    )
    for each in shown:
        times = "".join(f"{each.timing.part(n):>{max(7, len(n) + 1)}.0f}" for n in PARTS)
        mfu = [each.timing.mfu(each.config, target.device, causal) for causal in (False, True)]
        yield (
            f"{layout_name(each):<{width}}  {each.config.batch.micro_batch_size:>5}  "
            f"{each.config.train.recompute_granularity:<9}{_gigabytes(each):>7} "
            f"{each.timing.milliseconds:>8.0f}{times}{each.timing.tokens_per_second:>12,.0f}  "
            f"{mfu[0]:>7.1%}  {mfu[1]:>6.1%}  {each.hours(target.gpus):>9,.0f}"
        )
    if len(best) > len(shown):
        yield f"and {len(best) - len(shown)} slower layouts that fit"


def _gigabytes(each: Planned) -> str:
    """Return the memory of the fullest rank; with <= where it is a bound."""
    return f"{'<=' if each.memory_is_bound else ''}{each.memory.total / 1e9:.1f}"


def _details(config: RunConfig, target: Target, plan: Plan, refusal: str | None) -> Iterator[str]:
    """Yield memory by part of the best layout and of the config's own."""
    every = [*plan.fits, *plan.too_large] if refusal is None else []
    own = [each for each in every if _is_configured(each, config)]
    named = [("best", each) for each in plan.fits[:1]] + [("as configured", each) for each in own]
    if named:
        columns = [field.name for field in fields(Memory)]
        yield "\nGB of the fullest rank   " + "".join(f"{c:>13}" for c in columns) + "        total"
    for name, each in named:
        name += ", at most" * each.memory_is_bound
        values = [getattr(each.memory, field.name) for field in fields(Memory)]
        cells = "".join(f"{value / 1e9:>13.2f}" for value in (*values, each.memory.total))
        yield f"{name:<25}{cells}"
    for each in own:
        verdict = "" if each in plan.fits[:1] else _compared(each, plan)
        mfu = each.timing.mfu(each.config, target.device, causal=False)
        yield (
            f"\nAs configured ({layout_name(each)}, micro batches of "
            f"{each.config.batch.micro_batch_size}): {each.timing.milliseconds:.0f} ms a step, MFU "
            f"{mfu:.1%}, {each.hours(target.gpus):,.0f} GPU-hours{verdict}"
        )
    if not own:
        yield f"\nAs configured: {_why_not_own(config, target, refusal)}"


def _is_configured(each: Planned, config: RunConfig) -> bool:
    """Return True for the layout, micro batch and recomputation of the config itself."""
    parallel = config.parallel.model_copy(update={"world_size": each.layout.world_size})
    return (each.config.parallel, each.config.batch, each.config.train) == (
        parallel,
        config.batch,
        config.train,
    )


def _why_not_own(config: RunConfig, target: Target, refusal: str | None) -> str:
    """Return why the config's own layout is not among those that were planned."""
    if refusal is not None:
        return f"not a legal layout. {refusal.splitlines()[0]}"
    parallel = config.parallel.model_copy(update={"world_size": target.gpus})
    try:
        rules.check(config.model_copy(update={"parallel": parallel}))
    except ConfigError as error:
        return f"not a legal layout of so many GPUs. {str(error).splitlines()[0]}"
    return (
        "not planned. What is: tensor-parallel ranks within a node, and ZeRO 2 and 3 where there "
        "are several data-parallel ranks"
    )


def _compared(each: Planned, plan: Plan) -> str:
    """Return how a layout compares with the best one."""
    if each in plan.too_large:
        return ". It does not fit"
    ratio = each.timing.milliseconds / plan.fits[0].timing.milliseconds
    return f", {ratio:.2f} x the best one's time"


def _reasons(target: Target, plan: Plan) -> Iterator[str]:
    """Yield how many combinations fall out for each reason, and the nearest misses."""
    total = sum(plan.reasons().values())
    yield f"\n{len(plan.fits):,} combinations fit, and {total:,} do not{':' * (total > 0)}"
    for reason, count in plan.reasons().most_common():
        yield f"{count:>7,}  {reason}"
    fastest = plan.fits[0].timing.milliseconds if plan.fits else float("inf")
    faster = [each for each in plan.too_large if each.timing.milliseconds < fastest]
    for each in (faster or plan.too_large)[:MISSES]:
        missing = each.memory.total - target.usable_bytes
        speed = f"{each.timing.milliseconds:.0f} ms a step"
        yield (
            f"nearest miss: {layout_name(each)}, micro batches of "
            f"{each.config.batch.micro_batch_size}, recompute "
            f"{each.config.train.recompute_granularity}: {'at most ' * each.memory_is_bound}"
            f"{missing / 1e9:.1f} GB too much ({speed})"
        )


def _assumptions(config: RunConfig, target: Target) -> Iterator[str]:
    """Yield every number that is taken for granted, with its origin."""
    device, network = target.device, target.network
    has_mask = Activations(config, target.is_modern).uses_mask
    yield "\nAssumed:"
    for name, title in TITLES.items():
        value, origin = getattr(device, name), device.origins[name]
        if name == "attention_tflops":
            if has_mask:
                value = device.masked_tflops
                origin = "assumed, with a mask in memory and products in fp32"
            value = "{:g}, {:g}".format(*value)
        yield f"  {title}: {value} ({origin})"
    origin = device.origins["memory_bytes"]
    yield f"  memory of a GPU, GB: {device.memory_bytes / 1e9:.1f} ({origin})"
    yield (
        f"  links of a node {network.node_gb_per_second:g} GB/s each way, of which "
        f"{network.efficiency:.0%} is achieved; a ring step takes {network.between_nodes_us:g} us "
        f"between nodes and {network.within_node_us:g} us within one (assumed)"
    )
    for name, row in INPUTS.items():
        yield f"  {name}: {row.of(not target.is_modern):g} ({row.origin})"
    yield (
        f"  bytes per parameter of the shard that the update itself moves: "
        f"{config.optimizer.update_bytes} (counted, {config.optimizer.name})"
    )
    yield (
        f"  {USABLE:.0%} of a GPU's memory is usable; CUDA, NCCL and fragmentation take "
        f"{Memory.overhead / 1e9:g} GB (assumed). GB with <=, of ZeRO 2 and 3, are bounds: all of "
        "DeepSpeed's buffers at their full size at once"
    )
    yield (
        "  nodes of 8 GPUs, within which tensor-parallel ranks stay. Not counted: ranks that wait "
        "for the slowest one, other jobs on the network, loading of data, checkpoints. "
        "Communication hides behind the passes at ZeRO 1; at ZeRO 2 and 3 gradients are reduced "
        "in every micro batch, and nothing hides them"
    )
    scale = target.scale
    if (scale.compute, scale.optimizer) != (1.0, 1.0):
        yield (
            f"  calibrated: times of matrix products, attention and elementwise work x "
            f"{scale.compute:.3f}, of the optimizer x {scale.optimizer:.3f} (measured)"
        )


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
        calibration: A result of `pretrain bench train --out`, or None.

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
    # Before the work of a plan.
    if overlay is not None and os.path.lexists(overlay):
        raise ConfigError(
            f"--out {overlay}: exists, and is not replaced. Remove it first, or choose another name"
        )
    plan = make_plan(config, target)
    text = to_table(config, target, plan, refusal)
    if overlay is None:
        return text
    if not plan.fits:
        raise ConfigError(
            f"--out {overlay}: no layout fits into {target.usable_bytes / 1e9:.1f} GB. Plan for "
            "more GPUs, or for larger ones"
        )
    write_overlay(overlay, source, plan.fits[0])
    return f"{text}\n\n{overlay}: {layout_name(plan.fits[0])}, on top of {source}"


def write_overlay(path: Path, source: Path, best: Planned) -> None:
    """Write a config that builds on another one and is the planned run.

    Args:
        path: Where to write.
        source: The config to build on.
        best: The planned run.

    Raises:
        ConfigError: There is a file already, or no overlay of `source` is the planned run.
    """
    base = os.path.relpath(source.resolve(), path.resolve().parent)
    wanted = best.config.model_dump(mode="json", exclude_none=True)
    changed, removed = _different(values_of_file(source), wanted)
    values = {"base": base, **({"remove": removed} if removed else {}), **changed}
    text = f"# Written by `pretrain plan`: {layout_name(best)}.\n{tomli_w.dumps(values)}"
    with writing(path), path.open("x") as file:
        file.write(text)
    try:
        if load_config(path) != best.config:
            raise ConfigError(
                f"--out {path}: no overlay of {source} is the planned run. Write its values "
                "into a config of your own: the table names the layout"
            )
    except ConfigError:
        path.unlink()
        raise


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
