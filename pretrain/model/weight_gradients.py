"""Add the weight gradients of linear layers to fp32 buffers in the matrix product itself.

Without this, a backward pass writes each weight's gradient in the training precision, rounded, and
another kernel reads it again and adds it to the fp32 sum over micro batches: 2 + 2 + 4 + 4 bytes a
weight in bf16, where the product alone reads and writes 4 + 4.

Megatron's linear layers can do so (gradient_accumulation_fusion), but through a CUDA extension of
APEX. `torch.addmm` with `out_dtype` does the same and takes the extension's place here
(`platform.can_accumulate_products` says where it can).

The optimizer provides the buffers and follows Megatron's convention:

    parameter.main_grad                 The fp32 buffer. Every micro batch adds to it, except that
                                        the first one overwrites a buffer that is marked as stale.
    parameter.grad_added_to_main_grad   Exists on the weights whose layer adds its gradient itself.
                                        The layer sets it to True when it has done so, and gives
                                        autograd an unfilled gradient, so that hooks still run. A
                                        hook must then drop `parameter.grad`, and set the mark to
                                        False for the next micro batch.
"""

from __future__ import annotations

import types

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn


def accumulate_in_layers(chunks: list[GPTModel]) -> list[nn.Parameter]:
    """Let every linear layer whose weight has a `main_grad` add its gradient to it.

    Called by the optimizer once it has given the parameters their buffers, and only where
    `Fusion.weight_gradients` asks for it. The input embedding has no matrix product, so a weight
    that a tied output layer shares with it on one rank gets its gradient from both sides:
    the output layer adds its part to `main_grad`, and the embedding's arrives as `parameter.grad`,
    which a hook adds as usual. Such a weight is not marked.

    Args:
        chunks: This rank's model chunks.

    Returns:
        All parameters whose `main_grad` a layer adds to, marked or not.
    """
    _install_stand_in()
    weights = []
    for chunk in chunks:
        for module in chunk.modules():
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                continue
            weight = module.weight
            is_tied = weight is None
            if is_tied:
                # A tied output layer on the rank of the embedding has no weight of its own.
                weight = chunk.shared_embedding_or_output_weight()
            if not hasattr(weight, "main_grad"):
                continue
            module.gradient_accumulation_fusion = True
            if not is_tied:
                weight.grad_added_to_main_grad = False
            weights.append(weight)
    return weights


def mark_stale(main_grad: Tensor) -> None:
    """Mark a buffer as holding the last step's gradient, which the next gradient overwrites.

    It saves setting all buffers to zero before a step, and reading them in its first micro batch.
    """
    main_grad.is_stale = True  # type: ignore[attr-defined]  # our mark


def take_stale(main_grad: Tensor) -> bool:
    """Return True if a buffer is stale, and take the mark away: the caller overwrites it."""
    if not getattr(main_grad, "is_stale", False):
        return False
    main_grad.is_stale = False  # type: ignore[attr-defined]  # our mark
    return True


def add_weight_gradient(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output^T inputs to an fp32 buffer, or overwrite a stale one with it.

    Its signature is that of APEX's `wgrad_gemm_accum_fp32`.

    Args:
        inputs: Inputs of the linear layer, [tokens, in].
        grad_output: Gradient of its output, [tokens, out].
        main_grad: fp32 buffer, [out, in].
    """
    left, is_stale = grad_output.t(), take_stale(main_grad)
    if inputs.is_cuda and inputs.dtype != torch.float32:
        # The tensor cores accumulate in fp32 in any case; `out_dtype` keeps what they have.
        if is_stale:
            torch.mm(left, inputs, out_dtype=torch.float32, out=main_grad)
        else:
            torch.addmm(main_grad, left, inputs, out_dtype=torch.float32, out=main_grad)
        return
    # `out_dtype` exists on CUDA alone. Products of two 16-bit numbers are exact in fp32.
    left, inputs = left.float(), inputs.float()
    if is_stale:
        torch.mm(left, inputs, out=main_grad)
    else:
        main_grad.addmm_(left, inputs)


def _install_stand_in() -> None:
    """Put `add_weight_gradient` where Megatron looks for APEX's extension, unless APEX is there."""
    if layers._grad_accum_fusion_available:
        return
    extension = types.ModuleType("fused_weight_gradient_mlp_cuda")
    # Megatron calls wgrad_gemm_accum_fp16 for 16-bit buffers only, which do not exist here.
    extension.wgrad_gemm_accum_fp32 = add_weight_gradient  # type: ignore[attr-defined]  # a stand-in
    layers.fused_weight_gradient_mlp_cuda = extension
    layers._grad_accum_fusion_available = True
