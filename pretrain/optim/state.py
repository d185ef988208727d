"""The optimizer's state on this rank, as views into the flat buffers in which DeepSpeed keeps it.

ZeRO flattens the parameters of a group, cuts the result over the data-parallel ranks and keeps the
fp32 master weights and the optimizer's moments of one part per rank. This module finds, for each
parameter, which range of it this rank keeps and where. The buffers' names are those of deepspeed
0.19 (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from pretrain.model.parameters import Named

if TYPE_CHECKING:
    from pretrain.optim.zero import ZeroOptimizer

MASTER_BUFFERS = (
    # ZeRO 3.
    "fp32_partitioned_groups_flat",
    # ZeRO 1 and 2.
    "single_partition_of_fp32_groups",
)
"""Attributes under which DeepSpeed's optimizers keep one flat fp32 master tensor per group."""

LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What changes while training in DeepSpeed's DynamicLossScaler (deepspeed/runtime/fp16)."""


@dataclass(frozen=True)
class Fragment:
    """The contiguous range of one parameter whose optimizer state this rank keeps."""

    named: Named
    start: int
    """The range's first element, in this tensor rank's part of the parameter, flattened by rows."""
    tensors: dict[str, Tensor]
    """"master" and the optimizer's moments, each fp32 [n]: the range is [start, start + n). The
    tensors are views, so writing to them changes the optimizer's state."""


@dataclass(frozen=True)
class OptimizerState:
    """Everything that a checkpoint needs of the optimizer on this rank."""

    fragments: list[Fragment]
    adam_steps: int
    """Updates made so far."""
    loss_scaler_state: dict[str, float] | None
    """fp16: the dynamic loss scaler's fields. None otherwise."""


def read_fragments(optimizer: ZeroOptimizer) -> Iterator[Fragment]:
    """Yield this rank's fragments, in the order of its parameters.

    Optimizers create their moments at the first update. There may have been none: the optimizer is
    new, or every step so far has overflowed in fp16. Zero moments are created then, as it would
    start from itself, so that a state can always be saved and loaded into.
    """
    if not all(optimizer.zero.optimizer.state[flat] for flat in flat_masters(optimizer)):
        for flat in flat_masters(optimizer):
            moments = {moment: torch.zeros_like(flat) for moment in optimizer.moments}
            step = torch.zeros((), device=flat.device)
            optimizer.zero.optimizer.state[flat] = {"step": step, **moments}
    find = _stage3_range if optimizer.stage == 3 else _stage12_range
    for named in optimizer.parameters:
        found = find(optimizer, named)
        if found is not None:
            yield Fragment(named, *found)


def adam_steps(optimizer: ZeroOptimizer) -> int:
    """Return the number of updates made so far; fp16 skips those that overflow."""
    states = [optimizer.zero.optimizer.state[flat] for flat in flat_masters(optimizer)]
    steps = {int(state["step"]) for state in states if "step" in state}
    assert len(steps) <= 1, f"the optimizer's groups disagree on their steps: {steps}"
    return steps.pop() if steps else 0


def set_adam_steps(optimizer: ZeroOptimizer, steps: int) -> None:
    """Set the number of updates made so far, which Adam's bias correction depends on.

    The name is that of the entry of checkpoints. NAG counts its updates too.
    """
    for flat in flat_masters(optimizer):
        # On the device, where the fused AdamW keeps it.
        step = torch.tensor(float(steps), device=flat.device)
        optimizer.zero.optimizer.state[flat]["step"] = step


def loss_scaler_state(optimizer: ZeroOptimizer) -> dict[str, float] | None:
    """Return the dynamic loss scaler's fields in fp16, None otherwise."""
    if not optimizer.is_fp16:
        return None
    scaler = optimizer.zero.loss_scaler
    return {field: getattr(scaler, field) for field in LOSS_SCALER_FIELDS}


def set_loss_scaler_state(optimizer: ZeroOptimizer, state: dict[str, float]) -> None:
    """Set the fields that `loss_scaler_state` returned."""
    for field, value in state.items():
        setattr(optimizer.zero.loss_scaler, field, value)


def copy_masters_to_partitions(optimizer: ZeroOptimizer) -> None:
    """Overwrite ZeRO 3's partitions of the model weights with the masters, cast to their dtype.

    ZeRO 3 keeps both: the masters for Adam, and partitions in the model's dtype, which it gathers
    before a layer runs.
    """
    for fragment in read_fragments(optimizer):
        master = fragment.tensors["master"]
        partition = _deepspeed_attributes(fragment.named).ds_tensor
        partition.data.view(-1)[: master.numel()].copy_(master)


def _deepspeed_attributes(named: Named) -> Any:
    """Return the parameter without its type, to read what DeepSpeed has attached to it."""
    return cast(Any, named.parameter)


def flat_masters(optimizer: ZeroOptimizer) -> list[Tensor]:
    """Return one flat fp32 master tensor per parameter group; Adam's state is keyed by them."""
    for name in MASTER_BUFFERS:
        if hasattr(optimizer.zero, name):
            return list(getattr(optimizer.zero, name))
    kind = type(optimizer.zero).__name__
    raise RuntimeError(f"{kind} has none of {', '.join(MASTER_BUFFERS)}: another DeepSpeed version")


def _stage12_range(optimizer: ZeroOptimizer, named: Named) -> tuple[int, dict[str, Tensor]] | None:
    """Return a parameter's (start, tensors) under ZeRO 1 and 2, None if this rank has none of it.

    Each data-parallel rank keeps one flat range of the whole group, which respects no parameter's
    bounds. `_hp_mapping` (deepspeed/utils/tensor_fragment.py) holds the overlap with a parameter:
    its address in the rank's buffer (`hp`) and in the parameter (`lp`).
    """
    mapping = _deepspeed_attributes(named)._hp_mapping
    if mapping is None:
        return None
    flat = flat_masters(optimizer)[mapping.param_group_index]
    state = optimizer.zero.optimizer.state[flat]
    buffers = {"master": flat.detach(), **{moment: state[moment] for moment in optimizer.moments}}
    address = mapping.hp_fragment_address
    tensors = {
        key: buffer.narrow(0, address.start, address.numel) for key, buffer in buffers.items()
    }
    return mapping.lp_fragment_address.start, tensors


def _stage3_range(optimizer: ZeroOptimizer, named: Named) -> tuple[int, dict[str, Tensor]] | None:
    """Return a parameter's (start, tensors) under ZeRO 3, None if this rank has only padding.

    ZeRO 3 cuts every parameter into equal parts, one per data-parallel rank, and pads the last
    ones (deepspeed/runtime/zero/partition_parameters.py, `_partition_param`).
    """
    parameter = _deepspeed_attributes(named)
    size = parameter.ds_tensor.numel()
    start = dist.get_rank(parallel_state.get_data_parallel_group()) * size
    count = min(size, parameter.ds_numel - start)
    if count <= 0:
        return None
    tensors = {}
    # DeepSpeed returns the master when no key of the optimizer's state is asked for.
    for key in ("master", *optimizer.moments):
        state_key = None if key == "master" else key
        part, _ = optimizer.zero._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=state_key
        )
        tensors[key] = part.detach().view(-1)[:count]
    return start, tensors
