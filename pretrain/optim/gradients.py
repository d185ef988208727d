"""Sums of gradients over tensor and pipeline ranks, which neither autograd nor ZeRO computes.

Some parameters exist on several model-parallel ranks, each of which sees only a part of the
gradient. The parts are summed here; ZeRO then averages over the data-parallel ranks. Megatron does
the same in megatron/core/distributed/finalize_model_grads.py, but for its own data-parallel
wrapper, whose gradient buffers (`main_grad`) do not exist under DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain.model.parameters import TIED, Named


def finalize_gradients(chunks: list[GPTModel]) -> None:
    """Sum every gradient of which several model-parallel ranks hold a part, in place.

    To be called by all ranks after the last micro batch and before ZeRO's reduction. Three kinds
    of parameters are concerned:

    - layer norms and biases under sequence parallelism: each tensor rank has seen other tokens;
    - the tied embedding: the first stage embeds with it, the last one computes logits with it;
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
    # One reduction per parameter, in an order that is the same on all stages.
    for parameter in chunks[0].position.parameters():
        _all_reduce_flat([gradient(parameter)], pipeline_group)
    if chunks[0].share_embeddings_and_output_weights and parallel_state.is_rank_in_embedding_group(
        ignore_virtual=True
    ):
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        weight = (chunks[0] if is_first else chunks[-1]).shared_embedding_or_output_weight()
        dist.all_reduce(gradient(weight), group=parallel_state.get_embedding_group())


def is_completed_late(named: Named) -> bool:
    """Return True if `finalize_gradients` has to complete the gradient of a parameter.

    A position method's parameters count as such in every layout. All layers share them, and where
    layers are recomputed each layer's backward pass is one of its own (torch.utils.checkpoint), so
    that the passes over them cannot be counted by the micro batch.
    """
    return (
        named.name.startswith("position.")
        or (
            parallel_state.get_tensor_model_parallel_world_size() > 1
            and _is_sequence_parallel(named.parameter)
        )
        or (
            parallel_state.get_pipeline_model_parallel_world_size() > 1
            and named.name == TIED
            # Megatron's mark of weights that the first and the last stage share.
            and hasattr(named.parameter, "shared_embedding")
        )
    )


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient accumulated so far, or None if there is none.

    At ZeRO stage 1 it is summed in fp32 in `main_grad` (pretrain/optim/reduction.py), which is
    Megatron's name for such a tensor.
    """
    accumulated: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if accumulated is None else accumulated


def reduce_sequence_parallel_on_accumulation(chunks: list[GPTModel]) -> None:
    """Register hooks that sum sequence-parallel gradients over the tensor ranks as they appear.

    ZeRO 2 and 3 reduce and free each gradient during the backward pass, so `finalize_gradients`
    would come too late for them. To be called before `deepspeed.initialize`: post-accumulate hooks
    run in the order of their registration, and DeepSpeed's own hook takes the gradient away.

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
