"""Compute the loss of every token from the hidden states, without a second copy of the logits.

Logits are the widest tensors of the model. Megatron's cross-entropy converts them to fp32 and keeps
the softmax for the backward pass, in a series of operations that each read or write all logits: in
bf16 these move 52 bytes per logit besides the three matrix products, and hold 6 at the peak. Here
the logits stay in the training precision, 2 bytes. The forward pass reads them once, to get the
maximum and the sum of exponentials of every row in fp32, and the backward pass replaces them, in
place, by their gradient: 2 + 4 bytes moved if compiled. Without compilation 48 bytes are moved, in
pieces, which only saves memory.

Rounding is the same as Megatron's: the matrix product rounds the logits to the training precision,
and their gradient is rounded once, after the multiplication by the gradient of the loss. All other
values are fp32.

Liger's fused linear cross-entropy goes further and never holds the logits of all tokens: it
computes the gradients of a few tokens at a time in the forward pass. That saves memory, but reads
and writes the weight's whole gradient once for each piece (docs/decisions.md has the arithmetic).
It also needs the whole vocabulary on one rank, and computes the logits twice if the gradient of the
loss differs from token to token.

Shapes: S tokens, B micro batch size, T = S x B, V vocabulary of this tensor rank.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from pretrain import platform
from pretrain.startup import compile_when_called

# ---- Add the weight gradients of linear layers to fp32 buffers in the matrix product itself ----
# Without this, a backward pass writes each weight's gradient, rounded to the training precision,
# and another kernel reads it and adds it to the fp32 sum over micro batches: 2 + 2 + 4 + 4 bytes
# per weight in bf16, where the product alone reads and writes 4 + 4.
#
# Megatron's linear layers support this (gradient_accumulation_fusion), but need a CUDA extension of
# APEX. `torch.addmm` with `out_dtype` does the same and takes the extension's place here
# (`platform.can_accumulate_products` tells on which devices).
#
# The optimizer provides the buffers and follows Megatron's convention:
#
#     parameter.main_grad
#         The fp32 buffer. Every micro batch adds to it, except that the first one overwrites a
#         buffer that is marked as stale.
#     parameter.grad_added_to_main_grad
#         Exists on weights whose layer adds its gradient itself. The layer sets it to True when it
#         has done so, and gives autograd an uninitialized gradient, so that hooks still run. A hook
#         must then drop `parameter.grad`, and reset the mark to False for the next micro batch.


def accumulate_in_layers(chunks: list[GPTModel]) -> None:
    """Let every linear layer whose weight has a `main_grad` add its gradient to that buffer.

    The optimizer calls this once the parameters have their buffers, and only if
    `Fusion.weight_gradients` is set. A weight that a tied output layer shares with the embedding on
    the same rank gets its gradient in two ways: the output layer adds its part to `main_grad`; the
    embedding, which has no matrix product, leaves its part in `parameter.grad`, and a hook adds it
    as usual. Such a weight is therefore not marked.

    Args:
        chunks: This rank's model chunks.
    """
    # Also in place of an installed APEX, whose product would add to a stale buffer.
    # wgrad_gemm_accum_fp16 is not needed: Megatron calls it only for 16-bit buffers.
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda *given: add_weight_gradient(*given)
    )
    for chunk in chunks:
        for module in chunk.modules():
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                continue
            weight = module.weight
            is_tied = weight is None
            if is_tied:
                # A tied output layer on the rank of the embedding has no weight itself.
                weight = chunk.shared_embedding_or_output_weight()
            if not hasattr(weight, "main_grad"):
                continue
            module.gradient_accumulation_fusion = True
            if not is_tied:
                weight.grad_added_to_main_grad = False


def mark_stale(main_grad: Tensor) -> None:
    """Mark a buffer as holding the last step's gradient, which the next gradient overwrites.

    This saves zeroing all buffers before a step and reading them in its first micro batch.
    """
    main_grad.is_stale = True  # type: ignore[attr-defined]  # our mark


def take_stale(main_grad: Tensor) -> bool:
    """Return True if a buffer is stale, and remove the mark: the caller must overwrite it."""
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
        platform.add_product(left, inputs, main_grad, overwrite=is_stale)
        return
    # `out_dtype` exists only on CUDA. Products of two 16-bit numbers are exact in fp32.
    main_grad.addmm_(left.float(), inputs.float(), beta=0 if is_stale else 1)


class AddingProduct(torch.autograd.Function):
    """inputs [..., in] times weight^T [in, out]; the backward pass adds to weight.main_grad."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        rows, d_rows = inputs.flatten(0, -2), gradient.flatten(0, -2)
        return gradient @ weight, _weight_gradient(rows, d_rows, weight, weight.main_grad)


class Float8Product(torch.autograd.Function):
    """inputs [..., in] times weight^T [in, out], both in 8 bits: e4m3, and e5m2 for its gradient.

    The gradient of the weight, a sum over all tokens, is a product in the training precision, as in
    torchao's recipe "rowwise_with_gw_hp" (torchao/float8/config.py).
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _in_float8(inputs, weight, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        # e5m2 has the range that gradients need.
        d_inputs = _in_float8(gradient, weight.t(), torch.float8_e5m2)
        return d_inputs, gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)


def _in_float8(left: Tensor, right: Tensor, kind: torch.dtype) -> Tensor:
    """Return left [..., K] times right^T [K, N], cast to `kind` and to e4m3, in left's dtype."""
    (a, scale_a), (b, scale_b) = _cast(left.flatten(0, -2), kind), _cast(right, torch.float8_e4m3fn)
    # cuBLAS takes the left factor row by row and the right one column by column.
    a, b = a.contiguous(), b.contiguous().t()
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=left.dtype).view(*left.shape[:-1], -1)


def _cast(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in 8 bits, divided so that it fills their range, and the divisor, fp32."""
    low, high = x.aminmax()
    scale = torch.maximum(high, -low).float().clamp(min=1e-30) / torch.finfo(kind).max
    # A bf16 tensor divided by a number of fp32 would be rounded to bf16 first.
    return (x.float() / scale).to(kind), scale


def product(linear: Any, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Call a linear layer: return the output, and the bias if the layer does not add it.

    Megatron's layers are autograd functions in Python, with collectives. If one rank holds the
    whole weight, torch's own product replaces them, which is faster and equal bit for bit.

    Args:
        linear: Megatron's ColumnParallelLinear or RowParallelLinear.
        inputs: [S, B, in], or this tensor rank's part of either.
    """
    # Modules with a "ds_id" must be called, because ZeRO 3 gathers their weights in hooks.
    if linear.tp_group.size() > 1 or "ds_id" in linear.__dict__:
        return linear(inputs)  # type: ignore[no-any-return]  # Megatron's
    # From the dictionary, because attribute access to a parameter takes half a microsecond.
    weight, bias = linear._parameters["weight"], linear._parameters["bias"]
    if linear.training and linear.is_float8:
        out = Float8Product.apply(inputs, weight)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    elif linear.gradient_accumulation_fusion:
        out = AddingProduct.apply(inputs, weight)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    else:
        out = nn.functional.linear(inputs, weight)
    return (out, bias) if linear.skip_bias_add or bias is None else (out + bias, None)


ELEMENTS_AT_ONCE = 2**24
"""Logits that are converted to fp32 at a time without compilation: 64 MiB."""


class FusedLossModel(GPTModel):  # type: ignore[misc]  # Megatron ships no types
    """Megatron's GPTModel, but passing the labels to its output layer."""

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None, **others: Any) -> Tensor:
        """Return the losses [B, S] if there are labels, else what Megatron returns."""
        if labels is None or not self.post_process:
            out: Tensor = super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
            return out
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        # Through the module, because ZeRO 3 gathers weights in hooks of modules.
        losses, _ = self.output_layer(hidden_states, weight, labels=labels)
        return losses  # type: ignore[no-any-return]  # Megatron's layers are untyped


class FusedLossLayer(ColumnParallelLinear):  # type: ignore[misc]  # Megatron ships no types
    """An output layer that returns losses instead of logits if it gets labels."""

    compiled = False
    """Compile the passes over the logits (`pretrain.model.gpt`)."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (losses or logits, None).

        Args:
            input_: Hidden states, [S, B, hidden]; this rank's part of S under sequence parallelism.
            weight: The tied weight, [V, hidden]; None for the layer's own.
            runtime_gather_output: As in Megatron, for logits.
            labels: Token ids [B, S], or None for logits.
        """
        if labels is None:
            out: tuple[Tensor, Tensor | None]
            out = super().forward(input_, weight, runtime_gather_output)
            return out
        options = Options(
            group=self.tp_group if self.tp_group.size() > 1 else None,
            sequence_parallel=self.sequence_parallel,
            compiled=self.compiled,
            accumulate=self.gradient_accumulation_fusion,
        )
        weight = self.weight if weight is None else weight
        losses = linear_cross_entropy(input_, weight, labels.t(), options)
        return losses.t().contiguous(), None


class Options(NamedTuple):
    """Options of `linear_cross_entropy`."""

    group: dist.ProcessGroup | None = None
    """Tensor-parallel ranks that split the vocabulary in order; None for one rank."""

    sequence_parallel: bool = False
    """Each rank of the group holds a different part of the sequence of hidden states."""

    compiled: bool = False
    """Compile the passes over the logits; otherwise they run on pieces of the logits."""

    accumulate: bool = False
    """Add the weight's gradient to its `main_grad` (`accumulate_in_layers`)."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options
) -> Tensor:
    """Return -log softmax(hidden weight^T)[label] of every token; hidden and weight get gradients.

    Only one backward pass is possible, because it overwrites the logits of the forward pass with
    their gradient. A second one, as with `retain_graph=True`, fails with torch's message that a
    variable "has been modified by an inplace operation". Compute the loss again instead.

    Args:
        hidden: Hidden states, [S, B, hidden]; this rank's part of S under sequence parallelism.
        weight: This rank's rows of the output layer, [V, hidden].
        labels: Token ids in the whole vocabulary, [S, B].
        options: See `Options`.

    Returns:
        fp32 [S, B], in nats; the same on every rank of the group.
    """
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, options)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    """The product with the weight, and the cross-entropy over the ranks' parts of the vocabulary.

    With m the largest logit of a row, z the sum of exp(x - m) over the vocabulary, and y the label:

        loss  = log z - (x_y - m)
        dx_v  = (exp(x_v - m) / z - [v = y]) dloss
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: Options
    ) -> Tensor:
        """Compute the losses, and keep the logits for the backward pass."""
        rows = _all_tokens(hidden, options)
        logits = rows @ weight.t()
        # The label's column on this rank. A label of another rank gives a negative column or one
        # beyond the last, which equals no column.
        first = weight.shape[0] * (options.group.rank() if options.group else 0)
        column = labels.reshape(-1) - first
        highest, total, label_logit = _row_statistics(logits, column, options)
        if options.group:
            highest, total, label_logit = _combine(highest, total, label_logit, options.group)
        if any(ctx.needs_input_grad[:2]):
            ctx.save_for_backward(rows, weight, logits, column, highest, total)
            ctx.options = options
            ctx.hidden_shape = hidden.shape
            # Take the buffer in the forward pass, as Megatron's linear layers do.
            ctx.main_grad = getattr(weight, "main_grad", None) if options.accumulate else None
        return (total.log() - (label_logit - highest)).view(labels.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, logits, column, highest, total = ctx.saved_tensors
        options: Options = ctx.options
        d_loss = d_loss.reshape(-1).float()
        of_rows = column, highest, total, d_loss
        if options.compiled:
            _compiled_gradient(logits, *of_rows)
        else:
            for piece in _pieces(logits, *of_rows):
                _gradient_of_piece(*piece)
        # The communication runs while the weight's gradient is computed.
        d_hidden, wait = _reduce_over_group(logits @ weight, ctx.hidden_shape, options)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = _weight_gradient(rows, logits, weight, ctx.main_grad)
        wait()
        return d_hidden, d_weight, None, None


def _all_tokens(hidden: Tensor, options: Options) -> Tensor:
    """Return the hidden states of all tokens, [T, hidden], from [S, B, hidden]."""
    if not options.sequence_parallel:
        return hidden.reshape(-1, hidden.shape[-1])
    assert options.group
    gathered = hidden.new_empty((hidden.shape[0] * options.group.size(), *hidden.shape[1:]))
    dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=options.group)
    return gathered.view(-1, hidden.shape[-1])


def _row_statistics(
    logits: Tensor, column: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m, z, x_y) of every row over this rank's columns, each fp32 [T].

    Args:
        logits: [T, V].
        column: Column of the label, [T]. For a label of another rank it is outside 0 .. V - 1, and
            x_y is 0.
        options: See `Options`.
    """
    if options.compiled:
        highest, total = _compiled_statistics(logits)
    else:
        pieces = [_statistics_of_piece(piece) for [piece] in _pieces(logits)]
        highest, total = (torch.cat(parts) for parts in zip(*pieces))
    has_label, column = _valid(column, logits.shape[1])
    label_logit = logits.gather(1, column[:, None])[:, 0].float()
    return highest, total, torch.where(has_label, label_logit, 0.0)


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m, z) of every row, in a form that becomes one kernel if compiled."""
    # Written like torch's own softmax, a pattern that Inductor turns into a single pass over the
    # logits on a GPU (torch/_inductor/fx_passes/post_grad.py, `prepare_softmax_pattern`).
    x = logits.float()
    highest = x.amax(dim=-1, keepdim=True)
    total = (x - highest).exp().sum(dim=-1, keepdim=True)
    return highest[:, 0], total[:, 0]


def _statistics_of_piece(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m, z) of every row, in as few passes as plain operations need."""
    highest = logits.amax(dim=-1).float()
    # The subtraction converts 16-bit logits to fp32 by itself.
    return highest, (logits - highest[:, None]).exp_().sum(dim=-1)


def _valid(column: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return where 0 <= column < size, and the column, replaced by a valid one elsewhere."""
    return (column >= 0) & (column < size), column.clamp(0, size - 1)


def _combine(
    highest: Tensor, total: Tensor, label_logit: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics of the whole vocabulary from those of this rank's columns.

    This takes two small all-reduces, where Megatron needs three.

    Args:
        highest: Largest logit of each row, fp32 [T].
        total: Sum of exp(x - highest), fp32 [T].
        label_logit: Logit of the label, or 0 if another rank has it, fp32 [T].
        group: The ranks that split the vocabulary.
    """
    highest_of_all = highest.clone()
    dist.all_reduce(highest_of_all, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([total * (highest - highest_of_all).exp(), label_logit])
    dist.all_reduce(sums, group=group)
    return highest_of_all, sums[0], sums[1]


def _gradient(
    logits: Tensor, column: Tensor, highest: Tensor, total: Tensor, d_loss: Tensor
) -> None:
    """Replace the logits by their gradient, in a form that becomes one kernel if compiled.

    Args:
        logits: [T, V], changed in place.
        column: Column of the label on this rank, as in `_row_statistics`, [T].
        highest: m of every row over the whole vocabulary, fp32 [T].
        total: z of every row over the whole vocabulary, fp32 [T].
        d_loss: Gradient of the losses, fp32 [T].
    """
    probability = (logits.float() - highest[:, None]).exp() / total[:, None]
    # The comparison of column numbers is fused with the rest. A scatter would be a separate kernel,
    # and the whole gradient would be stored in fp32 before it.
    is_label = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    logits.copy_((probability - is_label.float()) * d_loss[:, None])


def _gradient_of_piece(
    logits: Tensor, column: Tensor, highest: Tensor, total: Tensor, d_loss: Tensor
) -> None:
    """Do what `_gradient` does, in as few passes over the logits as plain operations need."""
    # The subtraction converts 16-bit logits to fp32 by itself.
    gradient = (logits - highest[:, None]).exp_().mul_((d_loss / total)[:, None])
    has_label, column = _valid(column, logits.shape[1])
    row = torch.arange(logits.shape[0], device=logits.device)
    gradient[row, column] -= torch.where(has_label, d_loss, 0.0)
    logits.copy_(gradient)


_compiled_statistics = compile_when_called(_statistics)
_compiled_gradient = compile_when_called(_gradient)


def _pieces(logits: Tensor, *of_rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut the logits [T, V] and tensors [T] into views of rows with ELEMENTS_AT_ONCE logits."""
    rows = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
    return zip(*(torch.split(x, rows) for x in (logits, *of_rows)))


def _reduce_over_group(
    d_hidden: Tensor, shape: torch.Size, options: Options
) -> tuple[Tensor, Callable[[], Any]]:
    """Start to sum the gradient of the hidden states over the ranks of the group.

    Each rank has seen its own part of the vocabulary.

    Args:
        d_hidden: This rank's gradient, [T, hidden].
        shape: Shape of this rank's hidden states.
        options: The group, and whether it splits the sequence.

    Returns:
        The sum, of shape `shape`, and a function to call before the sum is used.
    """
    if not options.group:
        return d_hidden.view(shape), lambda: None
    if not options.sequence_parallel:
        work = dist.all_reduce(d_hidden, group=options.group, async_op=True)
        return d_hidden.view(shape), work.wait
    part = d_hidden.new_empty(shape)
    work = dist.reduce_scatter_tensor(
        part.view(-1, shape[-1]), d_hidden, group=options.group, async_op=True
    )
    return part, work.wait


def _weight_gradient(
    rows: Tensor, d_logits: Tensor, weight: Tensor, main_grad: Tensor | None
) -> Tensor | None:
    """Return the gradient of the weight, or add it to `main_grad`.

    Args:
        rows: Hidden states of all tokens, [T, hidden].
        d_logits: Gradient of the logits, [T, V].
        weight: The weight, [V, hidden].
        main_grad: fp32 buffer of its shape, or None.

    Returns:
        The gradient. If it was added to `main_grad`: an uninitialized tensor for a weight marked
        with grad_added_to_main_grad, else None.
    """
    if main_grad is None:
        return d_logits.t() @ rows
    add_weight_gradient(rows, d_logits, main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
