"""Find the fastest layout of a run that fits, and scale the assumed speeds by measured ones."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from pretrain.config import ConfigError, Layout, RunConfig, parse_config, rules
from pretrain.plan.hardware import GPUS_PER_NODE, Scale
from pretrain.plan.memory import (
    WIDEST_HEAD,
    Memory,
    Stage,
    attention_backend,
    memory_of_rank,
    stages_of,
    zero_stage,
)
from pretrain.plan.timing import Target, Timing, time_of_step

# ---- layouts ----
# List the layouts in which a number of GPUs can share a run, and the reasons against the others.
#
# Which layouts are legal is decided by the rules of `pretrain.config`, not here.


LARGEST_MICRO_BATCH = 64
"""Sequences. A GPU's multiprocessors are busy long before."""
RECOMPUTE = ("none", "selective", "full")
ZERO_STAGES = (1, 2, 3)


Refused = dict[str, list[str]]
"""Reason, which is the first line of a message of the rules without the numbers in it -> the lines
of all combinations that were refused so."""


def _refuse(refused: Refused, message: str) -> None:
    """Note a message of the rules."""
    line = message.splitlines()[0]
    key, _, rest = line.partition(" = ")
    reason = re.sub(r"\d[\d,.]*", "N", rest.partition(": ")[2].partition(". ")[0])
    refused.setdefault(f"{key}: {reason}" if reason else line, []).append(line)


def candidates(
    config: RunConfig, gpus: int, refused: Refused
) -> Iterator[tuple[RunConfig, Layout]]:
    """Yield the run in every layout that `gpus` GPUs can share it in.

    Tensor-parallel ranks stay in one node. What is not enumerated is taken from the config.

    Args:
        config: The run.
        gpus: Number of GPUs.
        refused: Takes what the rules refuse.
    """
    for keys in _parallel_keys(config, gpus):
        parallel = config.parallel.model_copy(update={**keys, "world_size": gpus})
        split = config.model_copy(update={"parallel": parallel})
        data = gpus // (keys["tensor_model_parallel_size"] * keys["pipeline_model_parallel_size"])
        if keys["zero_stage"] > 1 and data == 1:
            # There is nothing to shard, and every stage is stage 1.
            continue
        sizes = _micro_batches(config, data)
        # Without any size that fits, the rules say why with the size of the config.
        for size in sizes or [config.batch.micro_batch_size]:
            batch = config.batch.model_copy(update={"micro_batch_size": size})
            run = split.model_copy(update={"batch": batch})
            try:
                rules.check(run)
                layout = run.layout(gpus)
            except ConfigError as error:
                _refuse(refused, str(error))
                continue
            for recompute in RECOMPUTE:
                train = run.train.model_copy(update={"recompute_granularity": recompute})
                yield run.model_copy(update={"train": train}), layout


def _parallel_keys(config: RunConfig, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield every combination of sizes, legal or not."""
    # Of several nodes, each holds whole groups of tensor-parallel ranks.
    node = gpus if gpus <= GPUS_PER_NODE else GPUS_PER_NODE
    for tensor in _divisors(node):
        for pipeline in _divisors(gpus // tensor):
            most = config.model.num_layers // pipeline
            chunks = [None, *range(2, most + 1)] if pipeline > 1 else [None]
            for virtual in chunks:
                for sequence in (False, True) if tensor > 1 else (False,):
                    for zero in ZERO_STAGES:
                        yield {
                            "tensor_model_parallel_size": tensor,
                            "pipeline_model_parallel_size": pipeline,
                            "virtual_pipeline_model_parallel_size": virtual,
                            "sequence_parallel": sequence,
                            "zero_stage": zero,
                        }


def _micro_batches(config: RunConfig, data: int) -> list[int]:
    """Return the sizes that divide a data-parallel rank's part of the batch, the config's too."""
    if config.batch.global_batch_size % data:
        return []
    share = config.batch.global_batch_size // data
    own = config.batch.micro_batch_size
    return [n for n in sorted({*range(1, LARGEST_MICRO_BATCH + 1), own}) if share % n == 0]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


# ---- Find the fastest layout that fits, and say why the others do not ----


MOST_GPUS = 1_000_000
"""GPUs of a job that are believed."""


@dataclass(frozen=True)
class Planned:
    """Hold a run in one layout, with its memory and its time."""

    config: RunConfig
    layout: Layout
    memory: Memory
    """Of the rank that needs most."""
    timing: Timing

    @property
    def memory_is_bound(self) -> bool:
        """True if the run needs no more memory than planned, and maybe less.

        Of ZeRO 2 and 3 the buffers are taken at their full size, all at once.
        """
        return zero_stage(self.config, self.layout) > 1

    @property
    def group(self) -> tuple[object, ...]:
        """The layout without micro-batch size and recomputation."""
        p = self.config.parallel
        return (
            p.tensor_model_parallel_size,
            p.pipeline_model_parallel_size,
            p.virtual_pipeline_model_parallel_size,
            p.sequence_parallel,
            p.zero_stage,
        )

    def hours(self, gpus: int) -> float:
        """Return the GPU-hours of the whole run, without evaluations and checkpoints."""
        seconds = self.config.planned_tokens / self.timing.tokens_per_second
        return seconds * gpus / 3600


@dataclass(frozen=True)
class Plan:
    """Hold all layouts of a run."""

    fits: list[Planned]
    """Those that fit, the fastest first."""
    too_large: list[Planned]
    """Those that do not, the nearest miss first."""
    refused: Refused

    def best_of_groups(self) -> list[Planned]:
        """Return the fastest micro batch and recomputation of each layout, the fastest first."""
        best: dict[tuple[object, ...], Planned] = {}
        for each in self.fits:
            best.setdefault(each.group, each)
        return list(best.values())

    def reasons(self) -> Counter[str]:
        """Return how many combinations fall out for each reason."""
        counts = Counter({reason: len(lines) for reason, lines in self.refused.items()})
        if self.too_large:
            counts["more memory than a GPU has"] = len(self.too_large)
        return counts


def check_target(config: RunConfig, target: Target) -> None:
    """Refuse what the plan's arithmetic does not describe, or the GPUs cannot do.

    Args:
        config: The run.
        target: The GPUs.

    Raises:
        ConfigError: With the key and the remedy.
    """
    precision = config.train.precision
    if not 0 < target.gpus <= MOST_GPUS:
        raise ConfigError(
            f"--gpus {target.gpus}: not a number of GPUs. Choose 1 or more, up to {MOST_GPUS:,}"
        )
    if target.gpus > GPUS_PER_NODE and target.gpus % GPUS_PER_NODE:
        below = target.gpus // GPUS_PER_NODE * GPUS_PER_NODE
        raise ConfigError(
            f"--gpus {target.gpus}: not a multiple of the {GPUS_PER_NODE} GPUs of a node. Choose "
            f"{below} or {below + GPUS_PER_NODE}"
        )
    if config.is_masked:
        raise ConfigError(
            'train.objective = "masked": attention looks both ways, and `pretrain plan` counts '
            "that of a causal mask. Plan with --set train.objective=next_token for a lower bound"
        )
    if config.model.adaptive_cutoffs is not None:
        raise ConfigError(
            f"model.adaptive_cutoffs = {list(config.model.adaptive_cutoffs)}: how many tokens a "
            "tail computes is up to the text, so `pretrain plan` has no time for it. `pretrain "
            "bench train` times steps"
        )
    if precision == "fp32":
        raise ConfigError(
            "train.precision = fp32: the speeds of `pretrain plan` are those of 16-bit products. "
            f"Plan with --set train.precision={'bf16' if target.is_modern else 'fp16'}"
        )
    if precision == "bf16" and not target.is_modern:
        raise ConfigError(
            f"train.precision = bf16: a {target.gpu_type} has no bf16. Plan with --set "
            "train.precision=fp16"
        )
    _check_attention(config, target)


def _check_attention(config: RunConfig, target: Target) -> None:
    """Refuse kernels of attention whose memory and time are not known; arguments as above."""
    wanted, taken = config.model.attention_backend, attention_backend(config, target.is_modern)
    if wanted not in ("auto", taken):
        raise ConfigError(
            f"model.attention_backend = {wanted}: `pretrain plan` knows memory and time of {taken} "
            f"alone, which auto takes for this run on a {target.gpu_type}. Plan with --set "
            "model.attention_backend=auto"
        )
    if config.data.per_document_attention and taken == "sdpa":
        raise ConfigError(
            "data.per_document_attention = true: without Triton's kernel, attention has a mask for "
            "each text, which `pretrain plan` does not count. Plan with --set "
            "data.per_document_attention=false for a lower bound"
        )
    if config.head_dim > WIDEST_HEAD and target.is_modern and config.position.bias != "none":
        raise ConfigError(
            f"model.hidden_size = {config.model.hidden_size}: heads of width {config.head_dim} are "
            f"served by {taken}, of which `pretrain plan` knows nothing on a {target.gpu_type}. "
            "Choose more heads, of a width up to 256"
        )


def make_plan(config: RunConfig, target: Target) -> Plan:
    """Return every layout of a run with memory and time.

    Args:
        config: The run.
        target: The GPUs and their network.

    Raises:
        ConfigError: The run cannot be planned, or no layout is legal.
    """
    check_target(config, target)
    refused: Refused = {}
    fits: list[Planned] = []
    too_large: list[Planned] = []
    stages: dict[str, list[Stage]] = {}
    for run, layout in candidates(config, target.gpus, refused):
        key = str(run.parallel)
        if key not in stages:
            stages[key] = stages_of(run, layout)
        each = planned(run, layout, stages[key], target)
        (fits if each.memory.total <= target.usable_bytes else too_large).append(each)
    if not fits and not too_large:
        reasons = "\n".join(lines[0] for lines in refused.values())
        raise ConfigError(f"--gpus {target.gpus}: no layout is legal, because\n{reasons}")
    fits.sort(key=_order)
    too_large.sort(key=lambda each: each.memory.total)
    return Plan(fits, too_large, refused)


def _order(each: Planned) -> tuple[float, int, int]:
    """Return what layouts are sorted by: time, then the least recomputation, then memory.

    Where the host sets the pace, what a GPU computes again costs no time in the model.
    """
    recompute = RECOMPUTE.index(each.config.train.recompute_granularity)
    return each.timing.milliseconds, recompute, each.memory.total


def planned(config: RunConfig, layout: Layout, stages: Sequence[Stage], target: Target) -> Planned:
    """Return the memory and the time of a run in one layout.

    Args:
        config: The run, with the layout's keys.
        layout: Its layout.
        stages: Its pipeline stages, one of each kind.
        target: The GPUs and their network.
    """
    memories = [memory_of_rank(config, layout, stage, target.is_modern) for stage in stages]
    largest = max(memories, key=lambda memory: memory.total)
    timing = time_of_step(config, layout, stages, target)
    return Planned(config, layout, largest, timing)


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
        path: What `pretrain bench train --out` wrote.
        target: The GPU that is planned for, on which the measurement must have been made, and its
            links.

    Raises:
        ConfigError: The file is not such a result, or of another device.
    """
    measured = _read(path)
    if measured.device != target.device.name:
        raise ConfigError(
            f"{path}: measured on {measured.device}, and the plan is for {target.device.name}. "
            "Give a measurement of the planned GPU, or plan for the measured one with --gpu-type"
        )
    config: RunConfig = parse_config(measured.config, str(path))
    # The plan's speeds are those of 16-bit products and of fused attention.
    if config.train.precision == "fp32" or config.model.attention_backend == "reference":
        raise ConfigError(
            f"{path}: measured in {config.train.precision} with attention "
            f"{config.model.attention_backend}. Calibrate with a measurement in 16 bit "
            "and with model.attention_backend = auto"
        )
    try:
        layout = config.layout(measured.world_size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    stages = stages_of(config, layout)
    seconds = measured.seconds

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


class _Result(BaseModel):
    """What is needed of a result of `pretrain bench train`."""

    device: str
    config: dict[str, Any]
    world_size: int = Field(gt=0)
    seconds: dict[str, float]

    @field_validator("seconds")
    @classmethod
    def _check(cls, seconds: dict[str, float]) -> dict[str, float]:
        """Check that each part of a step took some time, and none a day."""
        if not (
            0 < seconds.get(PASSES, 0) < LONGEST
            and 0 < seconds.get(OPTIMIZER, 0) < LONGEST
            and 0 <= seconds.get(REDUCTION, -1) < LONGEST
        ):
            raise ValueError("the parts of a step are missing, or took no time or days")
        return seconds


def _read(path: Path) -> _Result:
    """Return the content of a result."""
    try:
        return _Result.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError:
        raise ConfigError(
            f"{path}: not a result of a measurement. Make one with `pretrain bench train CONFIG "
            "--out FILE` on the planned GPU"
        ) from None
