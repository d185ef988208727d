"""Count fused operations as the kernels that a GPU runs, where a simulation cannot run them.

A region under torch.compile runs as plain operators here, which are not counted. Instead the
kernels are recorded that Inductor makes of it on a GPU: it generates one for a chain of elementwise
operators, and one for a sum over tokens, which cannot share a kernel with what is not summed.
Inductor's own count agrees: on a CPU, with hidden size 2,048 and 16-bit values, its kernels move
32.8 kB a token in the forward and 65.7 kB in two kernels in the backward pass of bias and GELU,
12.3 kB and 4.1 kB of bias and residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.fusions import fused_bias_dropout, fused_bias_gelu
from megatron.core.tensor_parallel import layers
from torch import Tensor

from pretrain.model import loss
from pretrain.model import weight_gradients as in_layers
from pretrain.plan.counter import Counter
from pretrain.plan.operators import OpClass, tensors_in

Replacement = tuple[Any, str, Any]
"""A module, the name of one of its functions, and what takes its place."""


def compiled_regions(counter: Counter) -> Iterator[Replacement]:
    """Yield stand-ins for the functions of the model that are compiled (`pretrain.model.fusion`).

    Args:
        counter: Counts the kernels.
    """

    def one_kernel(module: Any, name: str, kind: OpClass, in_place: int = 0) -> Replacement:
        """Return a stand-in that counts one kernel, which also writes its first `in_place` args."""
        function = getattr(module, name)

        def call(*args: Tensor) -> Any:
            with counter.paused():
                result = function(*args)
            written = [*args[:in_place], *tensors_in(result)]
            counter.kernel(kind, name.strip("_"), args, written)
            return result

        return module, name, call

    def bias_dropout_add(
        x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
    ) -> Tensor:
        out: Tensor = _BiasDropoutAdd.apply(*x_with_bias, residual, probability, counter)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
        return out

    yield one_kernel(fused_bias_gelu, "bias_gelu", OpClass.ELEMENTWISE)
    yield one_kernel(fused_bias_gelu, "bias_gelu_back", OpClass.ELEMENTWISE)
    yield fused_bias_dropout, "bias_dropout_add_fused_train", bias_dropout_add
    yield one_kernel(loss, "_compiled_statistics", OpClass.REDUCTION)
    yield one_kernel(loss, "_compiled_gradient", OpClass.ELEMENTWISE, in_place=1)


class _BiasDropoutAdd(torch.autograd.Function):
    """Add a bias, drop, and add a residual, counted as torch.compile's forward and backward pass.

    The backward pass hands the gradient on: it computes the bias's gradient, and with dropout the
    gradient of what was dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, counter: Counter
    ) -> Tensor:
        """Count the one kernel of the forward pass, and return an unfilled result."""
        with counter.paused():
            out = torch.empty_like(x)
            # A byte for each element says what was dropped.
            keep = torch.empty_like(x, dtype=torch.bool) if dropout else None
        ctx.counter, ctx.keep = counter, keep
        ctx.bias_shape = None if bias is None else bias.shape
        inputs = [tensor for tensor in (x, bias, residual) if tensor is not None]
        outputs = [out] if keep is None else [out, keep]
        counter.kernel(OpClass.ELEMENTWISE, "bias_dropout_add", inputs, outputs)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        counter, d_x, d_bias = ctx.counter, d_out, None
        if ctx.keep is not None:
            with counter.paused():
                d_x = torch.empty_like(d_out)
            name = "bias_dropout_add_backward"
            counter.kernel(OpClass.ELEMENTWISE, name, [d_out, ctx.keep], [d_x])
        if ctx.bias_shape is not None:
            with counter.paused():
                d_bias = d_x.new_empty(ctx.bias_shape)
            counter.kernel(OpClass.REDUCTION, "bias_gradient", [d_x], [d_bias])
        return d_x, d_bias, d_out, None, None


def weight_gradients(counter: Counter) -> Iterator[Replacement]:
    """Yield stand-ins for the matrix product that adds a weight's gradient to an fp32 buffer.

    Its `out_dtype` exists on CUDA alone (`pretrain.model.weight_gradients`).

    Args:
        counter: Counts the kernels.
    """

    def add(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        factors = [inputs, grad_output]
        if in_layers.take_stale(main_grad):
            counter.kernel(OpClass.MATMUL, "mm", factors, [main_grad])
        else:
            counter.kernel(OpClass.MATMUL, "addmm", [*factors, main_grad], [main_grad])

    yield in_layers, "add_weight_gradient", add
    yield loss, "add_weight_gradient", add
    extension = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    yield layers, "_grad_accum_fusion_available", True
    yield layers, "fused_weight_gradient_mlp_cuda", extension
