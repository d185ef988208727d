"""Where ZeRO keeps this rank's share of every parameter: fp32 master and Adam moments, as views into its flat buffers.

The one place that knows DeepSpeed's buffers by name (deepspeed 0.19: zero/stage_1_and_2.py, zero/stage3.py,
bf16_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from pretrain.model.parameters import Named, named_parameters
from pretrain.optim.zero import ZeroOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """This rank's range [start, start + n) of a parameter flattened row by row."""

    named: Named
    start: int
    tensors: dict[str, Tensor]
    """ "master", "exp_avg", "exp_avg_sq" -> fp32 [n], views: writing to them writes the optimizer's state."""


def fragments(optimizer: ZeroOptimizer) -> Iterator[Fragment]:
    """This rank's fragments. Adam's state is made if no update has been: none yet, or every one overflowed (fp16)."""
    if not all(optimizer.zero.optimizer.state[flat] for flat in _flat_masters(optimizer)):
        create_adam_state(optimizer, steps=0)
    for named in named_parameters(optimizer.chunks):
        found = (
            _partition_of_stage3(optimizer, named)
            if optimizer.stage == 3
            else _partition(optimizer, named)
        )
        if found is not None:
            yield Fragment(named, *found)


def create_adam_state(optimizer: ZeroOptimizer, steps: int) -> None:
    """Zero moments after `steps` updates, for a resume to load into; torch's Adam would only make them at its step."""
    for flat in _flat_masters(optimizer):
        zeros = {moment: torch.zeros_like(flat) for moment in MOMENTS}
        optimizer.zero.optimizer.state[flat] = {"step": torch.tensor(float(steps)), **zeros}


def adam_steps(optimizer: ZeroOptimizer) -> int:
    """Updates made so far (fp16 skips those that overflow)."""
    states = [optimizer.zero.optimizer.state[flat] for flat in _flat_masters(optimizer)]
    steps = {int(state["step"]) for state in states if "step" in state}
    assert len(steps) <= 1, f"Adam's groups disagree on their steps: {steps}"
    return steps.pop() if steps else 0


def copy_masters_to_partitions(optimizer: ZeroOptimizer) -> None:
    """ZeRO 3 keeps its model weights as partitions beside the masters; after a load they follow the masters."""
    for fragment in fragments(optimizer):
        master = fragment.tensors["master"]
        partition: Tensor = fragment.named.parameter.ds_tensor  # type: ignore[attr-defined]
        partition.data.view(-1)[: master.numel()].copy_(master)


def _flat_masters(optimizer: ZeroOptimizer) -> list[Tensor]:
    zero = optimizer.zero
    for name in (
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "single_partition_of_fp32_groups",
    ):
        if hasattr(zero, name):
            return list(getattr(zero, name))
    raise RuntimeError(
        f"{type(zero).__name__} keeps its masters under a name this version does not know"
    )


def _partition(optimizer: ZeroOptimizer, named: Named) -> tuple[int, dict[str, Tensor]] | None:
    """Stages 1 and 2: each data rank owns a flat range of the whole group, so a range, maybe empty, of a parameter."""
    mapping = named.parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    flat = _flat_masters(optimizer)[mapping.param_group_index]
    address = mapping.hp_fragment_address
    state = optimizer.zero.optimizer.state[flat]
    whole = {"master": flat.detach(), **{moment: state[moment] for moment in MOMENTS}}
    tensors = {key: value.narrow(0, address.start, address.numel) for key, value in whole.items()}
    return mapping.lp_fragment_address.start, tensors


def _partition_of_stage3(
    optimizer: ZeroOptimizer, named: Named
) -> tuple[int, dict[str, Tensor]] | None:
    """Stage 3: each parameter is cut into equal parts, one a data rank, the last ones padded."""
    size = named.parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    start = dist.get_rank(parallel_state.get_data_parallel_group()) * size
    count = min(size, named.parameter.ds_numel - start)  # type: ignore[attr-defined]
    if count <= 0:
        return None
    keys = {"master": None, **{moment: moment for moment in MOMENTS}}
    tensors = {}
    for key, state_key in keys.items():
        part, _ = optimizer.zero._get_fp32_opt_state_partition(
            named.parameter, release_swap_buffers=False, optim_state_key=state_key
        )
        tensors[key] = part.detach().view(-1)[:count]
    return start, tensors
