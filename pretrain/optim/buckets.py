"""Divide a rank's parameters into buckets, the units of reduction, update and gathering at ZeRO 1.

A bucket becomes one parameter group of AdamW. DeepSpeed lays each group out in one flat tensor and
cuts it evenly over the data-parallel ranks, so every rank owns a part of every bucket, and a bucket
can be reduce-scattered as soon as its gradients are complete. Megatron's own distributed optimizer
divides its buckets in the same way (megatron/core/distributed/param_and_grad_buffer.py), but its
buckets mix parameters with and without weight decay, which DeepSpeed's groups cannot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain.config import RunConfig
from pretrain.config.tensors import TIED
from pretrain.model.gpt import Named
from pretrain.optim import Piece, cut, is_late, settings_of

# ---- gradients ----
# Sums of gradients over tensor and pipeline ranks, which neither autograd nor ZeRO computes.
#
# Some parameters exist on several model-parallel ranks, each of which sees only a part of the
# gradient. The parts are summed here; ZeRO then averages over the data-parallel ranks. Megatron
# does the same in megatron/core/distributed/finalize_model_grads.py, but for its own data-parallel
# wrapper, whose gradient buffers (`main_grad`) do not exist under DeepSpeed.


def finalize_gradients(chunks: list[GPTModel]) -> None:
    """Sum, in place, every gradient of which several model-parallel ranks hold a part.

    All ranks call this after the last micro batch and before ZeRO's reduction. It concerns three
    kinds of parameters:

    - norms and biases under sequence parallelism: each tensor rank has seen different tokens;
    - the tied embedding: the first stage embeds with it, and the last one computes logits with it;
    - the position method's parameters: every stage adds positions in its own layers.

    Args:
        chunks: This rank's model chunks, with their gradients accumulated.
    """
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    if tensor_group.size() > 1:
        partial = [p for chunk in chunks for p in chunk.parameters() if _is_sequence_parallel(p)]
        _all_reduce_flat((gradient(p) for p in partial), tensor_group)
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    if pipeline_group.size() == 1:
        return
    # One reduction per parameter, in the same order on all stages.
    for parameter in chunks[0].position.parameters():
        _all_reduce_flat([gradient(parameter)], pipeline_group)
    if chunks[0].share_embeddings_and_output_weights and parallel_state.is_rank_in_embedding_group(
        ignore_virtual=True
    ):
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        weight = (chunks[0] if is_first else chunks[-1]).shared_embedding_or_output_weight()
        dist.all_reduce(gradient(weight), group=parallel_state.get_embedding_group())


def is_completed_late(named: Named) -> bool:
    """Return `is_late` of a parameter of this rank."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    is_partial, is_shared = _is_sequence_parallel(named.parameter), is_shared_embedding(named)
    return is_late(named.name, is_partial, is_shared, tensor, pipeline)


def is_shared_embedding(named: Named) -> bool:
    """Return True for a tied embedding, by Megatron's mark that two stages may share it."""
    return named.name == TIED and hasattr(named.parameter, "shared_embedding")


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient accumulated so far, or None if there is none.

    At ZeRO stage 1 gradients are summed in fp32 in `main_grad` (pretrain/optim/sharded_step.py),
    Megatron's name for this tensor.
    """
    accumulated: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if accumulated is None else accumulated


def reduce_sequence_parallel_on_accumulation(chunks: list[GPTModel]) -> None:
    """Register hooks that sum sequence-parallel gradients over the tensor ranks as they appear.

    ZeRO 2 and 3 reduce and free each gradient during the backward pass, so `finalize_gradients`
    would come too late for them. Call this before `deepspeed.initialize`, because post-accumulate
    hooks run in the order of their registration, and DeepSpeed's hook removes the gradient.

    Args:
        chunks: This rank's model chunks, not yet wrapped by DeepSpeed.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return

    def reduce(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad, group=group)

    for chunk in chunks:
        for parameter in chunk.parameters():
            if _is_sequence_parallel(parameter):
                parameter.register_post_accumulate_grad_hook(reduce)


def _is_sequence_parallel(parameter: nn.Parameter) -> bool:
    """Return True if each tensor rank computes the parameter's gradient from its own tokens.

    Megatron's layers set the mark, as does our LayerNorm (pretrain/model/gpt.py).
    """
    return bool(getattr(parameter, "sequence_parallel", False))


def _all_reduce_flat(gradients: Iterable[Tensor | None], group: Any) -> None:
    """Sum `gradients` over `group` in one all-reduce: they are many and small."""
    tensors = [g for g in gradients if g is not None]
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    totals = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, total in zip(tensors, totals):
        tensor.copy_(total.view_as(tensor))


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stored, reduced and updated together, with the same settings."""

    parameters: list[nn.Parameter]

    weight_decay: float

    lr_mult: float
    """Factor on the learning rate; the name is Megatron's (megatron/core/optimizer)."""

    is_late: bool
    """True if the gradients are complete only after `finalize_gradients`, so that their reduction
    cannot start within the backward pass; meaningless at ZeRO 2 and 3."""

    is_copy: bool
    """True if the global norm counts these parameters on another tensor rank or pipeline stage;
    meaningless at ZeRO 2 and 3."""


def plan_buckets(
    config: RunConfig, parameters: Iterable[Named], zero_stage: int = 1
) -> list[Bucket]:
    """Return the buckets of a rank, in the order in which the backward pass completes them.

    Args:
        config: The run, for its weight decay and factors on the learning rate.
        parameters: All parameters of this rank, in the order of its chunks. A backward pass
            completes them in about the reverse order.
        zero_stage: The stage of ZeRO. At 2 and 3 the result is the parameter groups (`cut`).
    """
    members = list(parameters)
    pieces = [
        Piece(
            named.name,
            named.parameter.numel(),
            is_completed_late(named),
            settings_of(config, named.name, named.global_shape),
            is_replicated=named.shape == named.global_shape,
        )
        for named in members
    ]
    return [
        Bucket(
            [members[number].parameter for number in part],
            *pieces[part[0]].settings,
            is_late=pieces[part[0]].is_late,
            # Pieces of one kind are either all copies or none.
            is_copy=members[part[0]].is_copy,
        )
        for part in cut(pieces, zero_stage)
    ]


# ---- Gather updated weights from the data-parallel ranks while the next forward pass begins ----
# At ZeRO stage 1 each rank updates its part of every bucket. All gathers are started right after
# the update, in the order in which the forward pass needs the weights, and every module waits for
# its own before it runs.


class WeightGather:
    """Starts the gathers of all buckets, and makes modules wait for the weights that they use."""

    def __init__(
        self,
        chunks: list[GPTModel],
        buckets: list[Bucket],
        flat_weights: list[Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        """Register a hook on each module that must wait.

        Args:
            chunks: This rank's model chunks.
            buckets: The buckets, in the order of the backward pass.
            flat_weights: The flat weights of each bucket, [padded elements], of which this rank
                updates its part.
            group: The data-parallel ranks.
        """
        self._flat_weights, self._group = flat_weights, group
        self._works: dict[int, Any] = {}
        """The gathers in progress, by index of the bucket."""
        bucket_of = {id(p): i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        if group.size() == 1:
            return
        for chunk in chunks:
            units = _units(chunk)
            within = {id(p) for unit in units for p in unit.parameters()}
            # The position method's parameters belong to no unit, because all layers use them.
            outside = [p for p in chunk.parameters() if id(p) not in within]
            for module, parameters in [(chunk, outside), *((u, u.parameters()) for u in units)]:
                needed = sorted({bucket_of[id(p)] for p in parameters})
                if needed:
                    module.register_forward_pre_hook(
                        lambda module, args, needed=needed: self.wait(needed)
                    )

    def start(self) -> None:
        """Start to gather every bucket, after the work that is already queued on the device."""
        if self._group.size() == 1:
            return
        # The forward pass needs first what the backward pass completes last.
        for number, flat in reversed(list(enumerate(self._flat_weights))):
            own = flat.view(self._group.size(), -1)[self._group.rank()]
            self._works[number] = dist.all_gather_into_tensor(
                flat, own, group=self._group, async_op=True
            )

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Wait for the gathers that are still in progress.

        Args:
            buckets: The indices of the buckets; None for all, to read weights outside a forward
                pass.
        """
        for number in list(self._works) if buckets is None else buckets:
            work = self._works.pop(number, None)
            if work is not None:
                work.wait()


def _units(chunk: GPTModel) -> list[nn.Module]:
    """Return the modules of a chunk that run one after the other and wait for their weights."""
    units = [
        getattr(chunk, "embedding", None),
        *chunk.decoder.layers,
        chunk.decoder.final_layernorm,
        getattr(chunk, "output_layer", None),
    ]
    return [unit for unit in units if unit is not None]
