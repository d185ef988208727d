"""Allocate the results of the flash-attention kernels and launch the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pretrain.kernels.call import ScoreBias
from pretrain.kernels.flash.backward import (
    delta_kernel,
    dkdv_kernel,
    dq_kernel,
    row_gradient_kernel,
)
from pretrain.kernels.flash.device import INTERPRETED, LOG2E, NO_BIAS, ROW, SLOPES, norms_kernel
from pretrain.kernels.flash.forward import forward_kernel

# ---- schedules ----
# Block sizes of the flash-attention kernels, for each dtype, head width and GPU generation.
#
# The sizes are fixed tables and not the result of an autotuner. Block sizes set the order of
# summation, so processes that chose different sizes by timing would no longer agree bit for bit.


class Blocks(NamedTuple):
    """The launch parameters of one kernel."""

    queries: int
    """Queries in a block."""
    keys: int
    """Keys in a block."""
    warps: int
    """Warps per program."""
    stages: int
    """Stages of the software pipeline: how many loop iterations are loaded ahead."""


class Schedule(NamedTuple):
    """The block sizes of all kernels for one dtype and head width."""

    forward: Blocks
    dkdv: Blocks
    dq: Blocks
    key_tile: int
    """Granularity of skipping, in keys. Skipping is decided for `forward.queries` queries and
    `key_tile` keys at once, so both must be multiples of the block sizes of every kernel;
    `forward.queries` also of the 32 queries in a block of `row_gradient_kernel`."""


# Keys are (bytes of an element, head width padded to a power of two).
#
# SCHEDULES_90 is for the data-center GPUs of compute capability 9 and 10, where a thread block may
# have 227 KiB of shared memory. SCHEDULES_80 is for all others; the smallest limit among them is
# 99 KiB (compute capability 8.6, 8.9 and 12.0).
#
# The sizes were chosen from what ptxas reports, before any was timed on a GPU: the largest blocks
# whose registers do not spill, or by no more than a few bytes (dkdv with 128 keys at width 128).
# fp32 blocks are smaller because each element takes twice the space.
SCHEDULES_90 = {
    (2, 64): Schedule(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3), 64),
    (2, 128): Schedule(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3), Blocks(128, 64, 8, 3), 128),
    (2, 256): Schedule(Blocks(128, 32, 8, 3), Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2), 64),
    (4, 64): Schedule(Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2), 64),
    (4, 128): Schedule(Blocks(32, 32, 8, 2), Blocks(16, 32, 4, 2), Blocks(32, 16, 4, 2), 64),
    (4, 256): Schedule(Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 2), Blocks(16, 16, 8, 2), 64),
}
SCHEDULES_80 = SCHEDULES_90 | {
    (2, 128): Schedule(Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2), Blocks(128, 32, 8, 2), 64),
    (2, 256): Schedule(Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 4, 2), 64),
}


def choose_schedule(q_SBHD: Tensor) -> Schedule:
    """Return the schedule for the dtype and head width of `q_SBHD` on its GPU."""
    # The interpreter has no limit on shared memory, so it gets the larger blocks.
    large_shared_memory = not q_SBHD.is_cuda or (
        torch.cuda.get_device_capability(q_SBHD.device)[0] in (9, 10)
    )
    table = SCHEDULES_90 if large_shared_memory else SCHEDULES_80
    return table[q_SBHD.element_size(), max(64, padded_width(q_SBHD.shape[3]))]


def padded_width(head_dim: int) -> int:
    """Return the width to which a head is padded in registers.

    It is a power of two, since Triton's tensors have no other shapes, and at least 16, which is the
    smallest inner dimension of `tl.dot`.
    """
    return max(16, int(triton.next_power_of_2(head_dim)))


# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.


class Inputs(NamedTuple):
    """The tensors that attention reads."""

    q_SBHD: Tensor
    """Queries. Like keys and values, they may be strided views, but D must be dense."""
    k_SBGD: Tensor
    v_SBGD: Tensor
    slopes: Tensor | None
    """[H], fp32, or None."""
    bias_row: Tensor | None
    """[H, 2 * reach + 1], fp32: biases for distances -reach .. reach, or None."""
    seed: Tensor | None
    """[1], int64: seed of the dropout, or None."""
    document_starts: Tensor | None = None
    """[B, S], int32: position of the first token of each query's document, or None."""


class Options(NamedTuple):
    """The settings of one attention call."""

    causal: bool
    scale: float
    dropout_p: float
    skip: bool
    schedule: Schedule
    trained_slopes: bool = False
    """Slopes require a gradient."""


class TilePlan(NamedTuple):
    """The decisions of a forward pass on what is skipped. Without skipping, all are empty."""

    head_order: Tensor
    """[H + G], int32: query heads by ascending slope, then key heads."""
    key_norms: Tensor
    """[B, G, key tiles], fp32: the largest norm of the keys of each tile."""
    row_bounds: Tensor
    """[2, B, H, padded S], fp32: floors and reaches of single queries (`device.row_skips`)."""
    thresholds: Tensor
    """[B, H, query tiles, key tiles], fp32: likewise; -inf where no query visits the tile. Under a
    causal mask the entries from the own tiles on are not written."""
    key_tiles: Tensor
    """[B, H, query tiles, key tiles + 1], int32: the number of tiles of keys visited besides the
    queries' own, then their indices in ascending order."""


def run_forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, TilePlan]:
    """Run the forward pass.

    Args:
        inputs: Queries, keys, values and biases.
        options: Settings of the call.

    Returns:
        The output [S, B, H, D] in the dtype of q, the logsumexp of each row as forward_kernel
        stores it [B, H, padded S] in fp32, and the tiles that were visited. S is padded to whole
        tiles of queries, so that the backward kernels read the logsumexp without a mask.
    """
    q, k, v, slopes, bias_row, *_ = inputs
    (num_queries, batch, heads, head_dim), (num_keys, _, groups, _) = q.shape, k.shape
    blocks, key_tile = options.schedule.forward, options.schedule.key_tile
    query_tiles = triton.cdiv(num_queries, blocks.queries)
    key_tiles = triton.cdiv(num_keys, key_tile)
    if bias_row is not None or options.dropout_p > 0:
        # Random bits and looked-up biases need more registers than four warps have: at width 64,
        # the kernel with dropout would spill 1,500 bytes per thread.
        blocks = blocks._replace(warps=max(blocks.warps, 8))

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Without skipping, the kernels get empty tensors that they do not read.
    exists = int(options.skip)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    int32: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    lse = torch.empty(batch, heads, query_tiles * blocks.queries, **fp32)
    value_norms = torch.empty(exists * batch, groups, key_tiles, **fp32)
    plan = TilePlan(
        head_order=torch.empty(exists * (heads + groups), **int32),
        key_norms=torch.empty_like(value_norms),
        row_bounds=torch.empty(exists * options.causal * 2, *lse.shape, **fp32),
        thresholds=torch.empty(exists * batch, heads, query_tiles, key_tiles, **fp32),
        key_tiles=torch.empty(exists * batch, heads, query_tiles, key_tiles + 1, **int32),
    )

    if options.skip:
        norms_kernel[(batch * groups * key_tiles,)](
            k, v, slopes, plan.key_norms, value_norms, plan.head_order,
            *_strides(k), *_strides(v), groups, heads, num_keys,
            D=head_dim, BLOCK_D=padded_width(head_dim), KEY_TILE=key_tile,
            HEADS_PER_GROUP=heads // groups,
            PADDED_GROUPS=triton.next_power_of_2(groups),
            PADDED_HEADS_PER_GROUP=triton.next_power_of_2(heads // groups),
            PADDED_HEADS=triton.next_power_of_2(heads),
            num_warps=8,
        )  # fmt: skip
    forward_kernel[(batch * heads * query_tiles,)](
        q, k, v, out, lse, *_bias_arguments(inputs), plan.key_norms, value_norms, plan.head_order,
        plan.row_bounds, plan.thresholds, plan.key_tiles,
        options.scale * LOG2E.value, options.dropout_p,
        *_strides(q), *_strides(k), *_strides(v),
        batch, heads, num_queries, num_keys, _row_reach(bias_row),
        HEADS_PER_GROUP=heads // groups, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys,
        KEY_TILE=key_tile, TRAINED_SLOPES=options.trained_slopes,
        **_variant(inputs, options), **_resources(blocks, bias_row),
    )  # fmt: skip
    return out, lse, plan


def run_backward(
    inputs: Inputs,
    options: Options,
    out: Tensor,
    lse: Tensor,
    plan: TilePlan,
    d_out: Tensor,
    row_wants_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the backward pass.

    Args:
        inputs: Inputs of the forward pass.
        options: Options of the forward pass.
        out: Output of the forward pass, [S, B, H, D].
        lse: The second result of the forward pass, [B, H, padded S].
        plan: Tiles that the forward pass visited.
        d_out: Gradient of the output, [S, B, H, D].
        row_wants_grad: Compute the gradient of the bias rows.

    Returns:
        The gradients of q, k, v, slopes [H] and bias rows; each of the last two is None if it is
        not required. Those of q, k and v may be slices of one tensor: see `_allocate_gradients`.
    """
    q, k, v, _, bias_row, *_ = inputs
    (num_queries, batch, heads, head_dim), (num_keys, _, groups, _) = q.shape, k.shape
    d_out = d_out.contiguous()
    delta = torch.empty_like(lse)
    block = min(options.schedule.forward.queries, 64)
    delta_kernel[(delta.numel() // block,)](
        out, d_out, delta, batch, heads, num_queries, delta.shape[2],
        D=head_dim, BLOCK_D=padded_width(head_dim), BLOCK_M=block, num_warps=4,
    )  # fmt: skip

    dq, dk, dv = _allocate_gradients(q, k, v)
    # The arguments that all backward kernels take, before and after their own outputs.
    tensors = (q, k, v, d_out, lse, delta, *_bias_arguments(inputs))
    strides = (*_strides(q), *_strides(k), *_strides(v))
    counts = (batch, heads, num_queries, num_keys, delta.shape[2], _row_reach(bias_row))
    scalars = (options.scale, options.dropout_p, *strides, *counts)
    constants = _variant(inputs, options) | {"HEADS_PER_GROUP": heads // groups}
    tiles = {"QUERY_TILE": options.schedule.forward.queries, "KEY_TILE": options.schedule.key_tile}

    blocks = options.schedule.dkdv
    key_blocks = triton.cdiv(num_keys, blocks.keys)
    query_tiles = triton.cdiv(num_queries, options.schedule.forward.queries)
    lists_shape = (batch if options.skip else 0, heads, key_blocks, query_tiles)
    query_lists = torch.empty(lists_shape, dtype=torch.int32, device=q.device)
    dkdv_kernel[(batch * groups * key_blocks,)](
        *tensors, plan.head_order, plan.thresholds, dk, dv, query_lists, *_strides(dk), *scalars,
        BLOCK_M=blocks.queries, BLOCK_N=blocks.keys,
        **tiles, **constants, **_resources(blocks, bias_row),
    )  # fmt: skip

    blocks = options.schedule.dq
    bias_grad = options.trained_slopes or row_wants_grad
    # Each query's share of the gradient of the bias: see accumulate_over_keys in backward.py.
    sums = torch.empty(2 if bias_grad else 0, *lse.shape, dtype=torch.float32, device=q.device)
    dq_kernel[(batch * heads * triton.cdiv(num_queries, blocks.queries),)](
        *tensors, *plan, dq, sums, *_strides(dq), *scalars,
        BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, BIAS_GRAD=bias_grad,
        **tiles, **constants, **_resources(blocks, bias_row),
    )  # fmt: skip

    sums = sums[..., :num_queries]
    d_slopes = d_row = None
    if options.trained_slopes:
        # A score falls by the slope times the distance.
        d_slopes = -sums[0].sum(dim=(0, 2))
    elif bias_row is not None and row_wants_grad:
        d_row = _row_gradient(tensors, scalars, constants, bias_row, sums)
    return dq, dk, dv, d_slopes, d_row


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients of q, k and v: slices of one tensor if q, k and v are, else dense.

    Megatron splits one tensor [S, B, G, (H / G + 2) * D], in which the query heads of a group come
    first, then its key, then its value. With gradients laid out in the same way, the gradient of
    the split is the whole tensor, and nothing needs to be copied (`_Split` in
    `pretrain.model.attention`).

    Args:
        q: Queries, [queries, B, H, D].
        k: Keys, [keys, B, G, D].
        v: Values, [keys, B, G, D].

    Returns:
        Uninitialized tensors of the shapes of q, k and v. The last two have the same strides.
    """
    (num_queries, batch, heads, head_dim), (num_keys, _, groups, _) = q.shape, k.shape
    # Several groups of several heads leave q's heads unevenly spaced, which no view can express.
    evenly_spaced = groups in (1, heads)
    # The gradient of a leaf stays dense, since autograd would copy slices into `leaf.grad`.
    # Megatron's recomputation of attention makes leaves of q, k and v.
    has_leaf = q.is_leaf or k.is_leaf or v.is_leaf
    if num_queries == num_keys and evenly_spaced and not has_leaf:
        sizes = [heads // groups * head_dim, head_dim, head_dim]
        whole = torch.empty(num_queries, batch, groups, sum(sizes), dtype=q.dtype, device=q.device)
        dq, dk, dv = whole.split_with_sizes(sizes, dim=3)
        dq = dq.view(q.shape)
        if all(_lies_like(x, q, gradient) for x, gradient in ((q, dq), (k, dk), (v, dv))):
            return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _lies_like(x: Tensor, first: Tensor, gradient: Tensor) -> bool:
    """Return True if x lies after `first` in one storage as `gradient` lies in its own."""
    same_storage = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    same_offset = x.storage_offset() - first.storage_offset() == gradient.storage_offset()
    # The stride of a dimension of size 1 has no meaning.
    strides = zip(x.shape, x.stride(), gradient.stride())
    return same_storage and same_offset and all(a == b for size, a, b in strides if size > 1)


def _row_gradient(
    tensors: tuple[Any, ...],
    scalars: tuple[int | float, ...],
    constants: dict[str, Any],
    bias_row: Tensor,
    sums: Tensor,
) -> Tensor:
    """Return the gradient of the bias rows.

    Args:
        tensors: Tensor arguments that all backward kernels take.
        scalars: Scalar arguments that all backward kernels take.
        constants: Compile-time constants that all kernels take.
        bias_row: [H, 2 * reach + 1].
        sums: [2, B, H, S], the sums of dq_kernel at and beyond either end of the row.

    Returns:
        [H, 2 * reach + 1]. Entries between the ends are computed here, by row_gradient_kernel.
    """
    q, reach = tensors[0], _row_reach(bias_row)
    num_queries, batch, heads, head_dim = q.shape
    # Four tiles (q, k, v, d_out) of this many rows are in shared memory at once.
    block = 32 if padded_width(head_dim) * q.element_size() < 1024 else 16
    # The diagonals -num_diagonals + 1 .. num_diagonals - 1 contain distances below the reach. Under
    # a causal mask there are no negative distances.
    num_diagonals = triton.cdiv(reach + block - 1, block)
    first_diagonal = 0 if constants["CAUSAL"] else 1 - num_diagonals
    diagonals = num_diagonals - first_diagonal
    # Up to 16 programs share a diagonal, since a short row has too few diagonals to fill a GPU.
    splits = min(batch * triton.cdiv(num_queries, block), 16)
    width = 2 * block
    # Zeroed, because the kernel writes only the sheared part of each [block, width].
    sheared_shape = (heads, diagonals, splits, block, width)
    sheared = torch.zeros(sheared_shape, dtype=torch.float32, device=q.device)
    row_gradient_kernel[(heads * diagonals * splits,)](
        *tensors, sheared, *scalars, first_diagonal, diagonals, splits,
        BLOCK_M=block, BLOCK_N=block, **constants,
        num_warps=4 if padded_width(head_dim) < 256 else 8, num_stages=1,
    )  # fmt: skip

    by_diagonal = sheared.sum(dim=(2, 3))
    # Column c of diagonal d is the distance d * block + c - (block - 1). A diagonal is 2 * block
    # distances wide, so it overlaps its neighbors by one block on either side.
    low = first_diagonal * block - (block - 1)
    high = low + (diagonals + 1) * block
    by_distance = torch.zeros(heads, high - low, dtype=torch.float32, device=q.device)
    for index in range(diagonals):
        by_distance[:, index * block : index * block + width] += by_diagonal[:, index]
    d_row = torch.zeros_like(bias_row)
    begin, stop = max(low, 1 - reach), min(high, reach)
    d_row[:, reach + begin : reach + stop] = by_distance[:, begin - low : stop - low]
    d_row[:, -1], d_row[:, 0] = sums[0].sum(dim=(0, 2)), sums[1].sum(dim=(0, 2))
    return d_row


def _bias_arguments(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the slopes, the bias row in base 2, the seed and the document starts.

    A kernel needs a pointer for each, so q takes the place of tensors that its variant does not
    read. Only the starts may be None: Triton then compiles kernels without that argument, which are
    the same as if attention by document did not exist.
    """
    q, slopes, bias_row, seed = inputs.q_SBHD, inputs.slopes, inputs.bias_row, inputs.seed
    starts = inputs.document_starts
    return (
        q if slopes is None else slopes.contiguous(),
        q if bias_row is None else (bias_row.detach() * LOG2E.value).contiguous(),
        q if seed is None else seed,
        None if starts is None else starts.contiguous(),
    )


def _variant(inputs: Inputs, options: Options) -> dict[str, Any]:
    """Return the compile-time constants that the forward and backward kernels share."""
    q = inputs.q_SBHD
    bias = SLOPES if inputs.slopes is not None else NO_BIAS
    if inputs.bias_row is not None:
        bias = ROW
    return {
        "D": q.shape[3],
        "BLOCK_D": padded_width(q.shape[3]),
        "CAUSAL": options.causal,
        "BIAS": bias.value,
        "COLUMN_BIAS": q.dtype != torch.float32 and options.causal,
        "SKIP": options.skip,
        "DROPOUT": options.dropout_p > 0,
        "DOCUMENTS": inputs.document_starts is not None,
        "UPCAST": INTERPRETED and q.dtype == torch.bfloat16,
    }


def _resources(blocks: Blocks, bias_row: Tensor | None) -> dict[str, int]:
    """Return the launch options of a kernel."""
    # Triton prefetches biases through shared memory, as it does keys. With three stages of both,
    # the larger blocks would not fit into shared memory.
    stages = blocks.stages if bias_row is None else min(blocks.stages, 2)
    return {"num_warps": blocks.warps, "num_stages": stages}


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _row_reach(bias_row: Tensor | None) -> int:
    return 0 if bias_row is None else bias_row.shape[1] // 2


# ---- The entry point of the flash-attention kernel, and its autograd function ----


# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.


# Skipping costs one more read of k and v, for their norms. By calculation, not by timing: at head
# width 128 in bf16, with 4.8 TB/s and 400 TFLOP/s (forward) or 350 (backward), that read takes 16 /
# 8 / 4 % of a causal forward pass at 1,024 / 2,048 / 4,096 keys, and 3.3 / 1.6 / 0.8 % of both
# passes. With 16 heads and Gaussian inputs, 19 / 34 / 48 % of the tiles are skipped, and 12 / 23 /
# 36 % if the norms of the queries are four times as large. So at 1,024 keys a forward pass alone
# would gain nothing, and from 2,048 on it gains in either case.
MIN_SKIP_KEYS = 2048
"""Number of keys from which skipping is on by default."""


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
        scale: Factor by which the products q k^T are multiplied; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped. Dropout draws one seed from torch's default
            generator of the device (`device.dropout_keeps`).
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
    # The stride of a dimension of size 1 has no meaning.
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
    out: Tensor = _FlashAttention.apply(options, *inputs)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return out


class _FlashAttention(torch.autograd.Function):
    """Attention with the backward pass of FlashAttention-2: weights are recomputed from lse."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Any) -> Tensor:
        inputs = Inputs(*tensors)
        trained_slopes = inputs.slopes is not None and ctx.needs_input_grad[4]
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
        row_wants_grad = ctx.needs_input_grad[5]
        gradients = run_backward(
            Inputs(*inputs), ctx.options, out, lse, TilePlan(*plan), d_out, row_wants_grad
        )
        return None, *gradients, None, None
