"""The entrance to the flash-attention kernel: what it can serve, and its autograd function."""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.kernels import skipping
from pretrain.kernels.bias import ScoreBias
from pretrain.kernels.flash.device import INTERPRETED
from pretrain.kernels.flash.launch import Inputs, Options, TilePlan, run_backward, run_forward
from pretrain.kernels.flash.schedules import Schedule, choose_schedule

# Skipping costs one more read of k and v, for their norms. Counted, not timed: at head width 128 in
# bf16, with 4.8 TB/s and 400 TFLOP/s (forward) or 350 (backward), that read takes 16 / 8 / 4 % of a
# causal forward pass at 1,024 / 2,048 / 4,096 keys, and 3.3 / 1.6 / 0.8 % of both passes. Over 16
# heads with Gaussian inputs, 19 / 34 / 48 % of the tiles are skipped, and 12 / 23 / 36 % if the
# queries are four times as long. So at 1,024 keys a forward pass alone would gain nothing, and from
# 2,048 on it gains in either case.
MIN_SKIP_KEYS = 2048
"""Number of keys from which skipping is on by default."""


def refusal(q_SBHD: Tensor) -> str | None:
    """Return the reason why the kernel cannot serve these queries, or None if it can."""
    if q_SBHD.shape[3] > 256:
        return (
            f"it serves heads of width 256 at most, these have {q_SBHD.shape[3]}: a wider tile "
            "does not fit into shared memory"
        )
    if q_SBHD.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it serves bf16, fp16 and fp32, and these inputs are {q_SBHD.dtype}"
    if INTERPRETED:
        return None
    if not q_SBHD.is_cuda:
        return "it needs a GPU (or Triton's interpreter)"
    if torch.cuda.get_device_capability(q_SBHD.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    return None


def attention_triton(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
    skip: bool | None = None,
    schedule: Schedule | None = None,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Compute attention by the flash-attention kernel, differentiable in q, k, v and the bias.

    `pretrain.kernels.dispatch.attention` checks the arguments before it calls this.

    Args:
        q_SBHD: Queries, [queries, B, H, D]. Strided views are read without a copy if D is dense.
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        bias: Score bias of this rank's heads, and whether attention is causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped. Dropout draws one seed from torch's default
            generator of the device; `pretrain.kernels.reference.dropout_keep` says which weights a
            seed keeps.
        skip: Skip tiles of keys that cannot matter: True at any length, False never, None from
            MIN_SKIP_KEYS keys on. Only slopes make tiles skippable.
        schedule: Block sizes; chosen by dtype, width and GPU if None.
        document_starts: As in `pretrain.kernels.dispatch.attention`, or None.

    Returns:
        The output, [queries, B, H, D] in the dtype of q.
    """
    bias_row = None
    if bias.table is not None:
        distances = torch.arange(-bias.max_distance, bias.max_distance + 1, device=q_SBHD.device)
        bias_row = bias.at(distances)
    if skip is None:
        skip = k_SBGD.shape[0] >= MIN_SKIP_KEYS
    seed = torch.randint(2**62, (1,), device=q_SBHD.device) if dropout_p > 0 else None
    # The stride of a dimension of one element says nothing.
    q, k, v = (
        x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
        for x in (q_SBHD, k_SBGD, v_SBGD)
    )
    options = Options(
        causal=bias.causal,
        scale=q_SBHD.shape[3] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        skip=skip and bias.slopes is not None,
        schedule=schedule or choose_schedule(q_SBHD),
    )
    inputs = Inputs(q, k, v, bias.slopes, bias_row, seed, document_starts)
    out: Tensor = _FlashAttention.apply(*inputs, options)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return out


def visited_tiles(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    causal: bool = True,
    scale: float | None = None,
    schedule: Schedule | None = None,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, Schedule]:
    """Run the forward pass with skipping and return the tiles it visited, for reports and tests.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D].
        v_SBGD: Values, [keys, B, G, D].
        slopes: ALiBi slopes, [H].
        causal: Apply a causal mask.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        schedule: Block sizes; chosen by dtype, width and GPU if None.
        document_starts: As in `pretrain.kernels.dispatch.attention`, or None.

    Returns:
        Which tiles of keys each tile of queries visited, bool [B, H, query tiles, key tiles], as
        `skipping.visited_tiles` does and `skipping.share_visited` turns into shares; and the
        schedule, which says how large the tiles are.
    """
    options = Options(
        causal=causal,
        scale=q_SBHD.shape[3] ** -0.5 if scale is None else scale,
        dropout_p=0.0,
        skip=True,
        schedule=schedule or choose_schedule(q_SBHD),
    )
    inputs = Inputs(q_SBHD, k_SBGD, v_SBGD, slopes, None, None, document_starts)
    _, _, plan = run_forward(inputs, options)
    query_tile, key_tile = options.schedule.forward.queries, options.schedule.key_tile
    visited = skipping.own_tiles(len(q_SBHD), len(k_SBGD), query_tile, key_tile)
    visited = visited.to(q_SBHD.device).expand_as(plan.thresholds).clone()
    counts, listed = plan.key_tiles[..., :1], plan.key_tiles[..., 1:].long()
    exists = torch.arange(listed.shape[3], device=listed.device) < counts
    # Entries beyond the count were never written, and are turned into the first that was.
    listed = torch.where(exists, listed, listed[..., :1].where(counts > 0, 0))
    visited |= torch.zeros_like(visited).scatter(3, listed, (counts > 0).expand_as(listed))
    return visited, options.schedule


class _FlashAttention(torch.autograd.Function):
    """Attention with the backward pass of FlashAttention-2: weights are recomputed from lse."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        bias_row: Tensor | None,
        seed: Tensor | None,
        document_starts: Tensor | None,
        options: Options,
    ) -> Tensor:
        inputs = Inputs(q, k, v, slopes, bias_row, seed, document_starts)
        trained_slopes = slopes is not None and ctx.needs_input_grad[3]
        options = options._replace(trained_slopes=trained_slopes)
        out, lse, plan = run_forward(inputs, options)
        ctx.save_for_backward(*inputs, out, lse, *plan)
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        count = len(Inputs._fields)
        inputs, (out, lse, *plan) = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        row_wants_grad = ctx.needs_input_grad[4]
        gradients = run_backward(
            Inputs(*inputs), ctx.options, out, lse, TilePlan(*plan), d_out, row_wants_grad
        )
        return *gradients, None, None, None
