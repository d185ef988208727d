"""Flash attention in Triton with ALiBi's slopes, a bucketed bias or nothing, which skips tiles of keys that cannot matter.

Forward and backward after Dao, "FlashAttention-2" (arXiv 2307.08691): one program owns a tile of queries, or in the
backward of keys, and walks over tiles of the others with a running softmax in powers of two. What is ours:

- The bias is made inside, in fp32, from exact integer distances: of slopes [H], or of a row of biases a head, one for
  each distance, the ends standing for all beyond (T5's buckets are such a row).
- A program begins with the keys of its queries' own positions. What their softmax sums to tells which tiles farther
  away cannot matter (`pretrain.kernels.skipping` has the bound, and the same arithmetic in torch); the rest is loaded. The
  forward writes that down and the backward visits the same tiles. Nothing waits for the host.
- Gradients of slopes and rows, and those of grouped heads, are summed in a fixed order: no atomics, so two runs agree
  to the last bit.
- Programs are numbered heads first, shallow slopes (most tiles) before steep ones, and long runs before short ones, so
  that the last programs to finish are short, while those beside each other share keys in the cache.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head, T tiles.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels import skipping
from pretrain.kernels.bias import ScoreBias

LOG2E = tl.constexpr(skipping.LOG2E)
BITS = tl.constexpr(skipping.BITS)
NORM_SLACK = tl.constexpr(skipping.NORM_SLACK)
RELATIVE_SLACK = tl.constexpr(skipping.RELATIVE_SLACK)
ABSOLUTE_SLACK = tl.constexpr(skipping.ABSOLUTE_SLACK)
PHILOX_ROUNDS = tl.constexpr(7)
"""The fewest with which Philox4x32 passes every test of randomness (Salmon et al., SC 2011, table 2)."""

# What is added to a score.
NOTHING = tl.constexpr(0)
SLOPES = tl.constexpr(1)
ROW = tl.constexpr(2)
FAR = tl.constexpr(3)  # in a loop over tiles that all lie past the end of the row

MIN_SKIP_KEYS = 1024
"""Below that, what may be skipped is not worth reading k and v once more. An estimate: at 1,024 a fifth of the tiles goes
(head width 128, Gaussian), and reading takes a twentieth of the time of forward and backward."""


class Blocks(NamedTuple):
    """How a kernel is cut: queries and keys of a step, warps a program, steps loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Schedule(NamedTuple):
    forward: Blocks
    dkdv: Blocks
    dq: Blocks
    key_tile: int
    """Keys are skipped in tiles of so many, for `forward.queries` queries at once: multiples of every kernel's blocks."""


# By (bytes of an element, padded width of a head): for data-centre GPUs of compute capability 9 and 10 (227 KiB of shared
# memory a block), and for all others (8.6, 8.9 and 12.0 have 99 KiB). Chosen, before any was timed, from what ptxas says:
# the largest blocks whose registers do not spill, or by a few dozen bytes, as those of 128 keys in dkdv.
SCHEDULES_90 = {
    (2, 64): Schedule(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3), 64),
    (2, 128): Schedule(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 2), Blocks(128, 64, 8, 3), 128),
    (2, 256): Schedule(Blocks(128, 32, 8, 3), Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2), 64),
    (4, 64): Schedule(Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2), 64),
    (4, 128): Schedule(Blocks(32, 32, 8, 2), Blocks(16, 32, 4, 2), Blocks(32, 16, 4, 2), 64),
    (4, 256): Schedule(Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 2), Blocks(16, 16, 8, 2), 64),
}
SCHEDULES_80 = SCHEDULES_90 | {
    (2, 64): Schedule(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3), 64),
    (2, 128): Schedule(Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2), Blocks(128, 32, 8, 2), 64),
    (2, 256): Schedule(Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 4, 2), 64),
}


def refusal(q_SBHD: Tensor) -> str | None:
    """Why this kernel cannot serve, or None if it can."""
    if q_SBHD.shape[3] > 256:
        return f"it serves heads of width 256 at most, these have {q_SBHD.shape[3]}"
    if q_SBHD.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it serves bf16, fp16 and fp32, this is {q_SBHD.dtype}"
    if INTERPRETED:
        return None
    if not q_SBHD.is_cuda:
        return "it wants a GPU (or Triton's interpreter)"
    if torch.cuda.get_device_capability(q_SBHD.device) < (8, 0):
        return "it wants a GPU of compute capability 8.0 or more"
    return None


def attention_triton(
    q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, bias: ScoreBias, scale: float | None, dropout_p: float,
    skip: bool | None = None, schedule: Schedule | None = None,
) -> Tensor:  # fmt: skip
    """As `pretrain.kernels.dispatch.attention`, which checks the arguments. Strided views are read where they lie; only D must be dense.

    `skip`: None leaves tiles out where slopes allow it and MIN_SKIP_KEYS keys make it pay, True at any length, False
    never. `schedule` is one of the tables' if left out. Dropout replays from a seed drawn from torch's default
    generator of the device: `pretrain.kernels.reference.dropout_keep` says which weights a seed keeps.
    """
    row = None
    if bias.table is not None:
        distances = torch.arange(-bias.max_distance, bias.max_distance + 1, device=q_SBHD.device)
        row = bias.at(distances)
    if skip is None:
        skip = k_SBGD.shape[0] >= MIN_SKIP_KEYS
    seed = torch.randint(2**62, (1,), device=q_SBHD.device) if dropout_p > 0 else None
    return _Attention.apply(
        *(x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (q_SBHD, k_SBGD, v_SBGD)),
        bias.slopes, row, seed,
        _Options(
            causal=bias.causal, scale=q_SBHD.shape[3] ** -0.5 if scale is None else scale, dropout_p=dropout_p,
            skip=skip and bias.slopes is not None, schedule=schedule or _schedule(q_SBHD),
        ),
    )  # fmt: skip


def visited_tiles(
    q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, slopes: Tensor, causal: bool = True, scale: float | None = None,
    schedule: Schedule | None = None,
) -> tuple[skipping.KeyRuns, Schedule]:  # fmt: skip
    """What the kernel visits with skipping on, and the schedule that says how large its tiles are: for reports.

    `skipping.share_visited` makes shares of it.
    """
    options = _Options(
        causal,
        q_SBHD.shape[3] ** -0.5 if scale is None else scale,
        0.0,
        True,
        schedule or _schedule(q_SBHD),
    )
    _, _, plan = _run_forward(q_SBHD, k_SBGD, v_SBGD, slopes, None, None, options)
    return skipping.KeyRuns(plan.first, plan.end), options.schedule


class _Options(NamedTuple):
    causal: bool
    scale: float
    dropout_p: float
    skip: bool
    schedule: Schedule
    trained_slopes: bool = False


class _Plan(NamedTuple):
    """Which tiles of keys every tile of queries visits, and in what order the heads take their turn."""

    first: Tensor
    end: Tensor
    order: Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, row: Tensor | None,
                seed: Tensor | None, options: _Options) -> Tensor:  # fmt: skip
        options = options._replace(trained_slopes=slopes is not None and ctx.needs_input_grad[3])
        out, lse, plan = _run_forward(q, k, v, slopes, row, seed, options)
        ctx.save_for_backward(q, k, v, slopes, row, seed, out, lse, *plan)
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, slopes, row, seed, out, lse, *plan = ctx.saved_tensors
        grads = _run_backward(
            q,
            k,
            v,
            slopes,
            row,
            seed,
            out,
            lse,
            _Plan(*plan),
            d_out,
            ctx.options,
            ctx.needs_input_grad[4],
        )
        return *grads, None, None


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    row: Tensor | None,
    seed: Tensor | None,
    options: _Options,
) -> tuple[Tensor, Tensor, _Plan]:
    (num_queries, batch, heads, head_dim), (num_keys, _, groups, _) = q.shape, k.shape
    blocks, key_tile = options.schedule.forward, options.schedule.key_tile
    query_tiles, key_tiles = (
        triton.cdiv(num_queries, blocks.queries),
        triton.cdiv(num_keys, key_tile),
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
    runs = torch.empty(
        2, batch, heads, query_tiles if options.skip else 0, dtype=torch.int32, device=q.device
    )
    norms = torch.empty(
        2, batch, groups, key_tiles if options.skip else 0, dtype=torch.float32, device=q.device
    )
    order = torch.empty(heads + groups if options.skip else 0, dtype=torch.int32, device=q.device)
    if options.skip:
        _norms_kernel[(batch * groups * key_tiles,)](
            k, v, slopes, norms[0], norms[1], order, *_strides(k), *_strides(v),
            groups, heads, num_keys,
            D=head_dim, BLOCK_D=_padded(head_dim), KEY_TILE=key_tile, SHARE=heads // groups,
            PADDED_GROUPS=triton.next_power_of_2(groups), PADDED_SHARE=triton.next_power_of_2(heads // groups),
            PADDED_HEADS=triton.next_power_of_2(heads), num_warps=8,
        )  # fmt: skip
    _forward_kernel[(batch * heads * query_tiles,)](
        q, k, v, out, lse, *_bias_arguments(q, slopes, row, seed), norms[0], norms[1], order, runs[0], runs[1],
        options.scale * skipping.LOG2E, options.dropout_p, *_strides(q), *_strides(k), *_strides(v),
        batch, heads, num_queries, num_keys, _far(row),
        SHARE=heads // groups, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, KEY_TILE=key_tile,
        COLUMN_BIAS=q.dtype != torch.float32 and options.causal, TRAINED_SLOPES=options.trained_slopes,
        **_variant(q, slopes, row, options), **_resources(blocks, row),
    )  # fmt: skip
    return out, lse, _Plan(runs[0], runs[1], order)


def _run_backward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, row: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, plan: _Plan, d_out: Tensor, options: _Options, row_wants_grad: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (num_queries, batch, heads, head_dim), (num_keys, _, groups, _) = q.shape, k.shape
    d_out = d_out.contiguous()
    delta = torch.empty_like(lse)
    _delta_kernel[(triton.cdiv(num_queries, 64) * batch * heads,)](
        out,
        d_out,
        delta,
        batch,
        heads,
        num_queries,
        D=head_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_M=64,
        num_warps=4,
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    shared = (
        q, k, v, d_out, lse, delta, *_bias_arguments(q, slopes, row, seed), plan.order, plan.first, plan.end,
    )  # fmt: skip
    sizes = (
        options.scale, options.dropout_p, *_strides(q), *_strides(k), *_strides(v),
        batch, heads, num_queries, num_keys, _far(row),
    )  # fmt: skip
    variant = _variant(q, slopes, row, options)
    tiles = {"QUERY_TILE": options.schedule.forward.queries, "KEY_TILE": options.schedule.key_tile}

    blocks = options.schedule.dkdv
    _dkdv_kernel[(batch * groups * triton.cdiv(num_keys, blocks.keys),)](
        *shared, dk, dv, *sizes,
        SHARE=heads // groups, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, **tiles, **variant,
        **_resources(blocks, row),
    )  # fmt: skip

    blocks = options.schedule.dq
    # [by distance or of far keys on either side, B, H, S]: what each query has to say on the gradient of the bias
    sums = (
        torch.empty(2, *lse.shape, dtype=torch.float32, device=q.device)
        if options.trained_slopes
        else None
    )
    if row_wants_grad:
        sums = torch.empty(2, *lse.shape, dtype=torch.float32, device=q.device)
    _dq_kernel[(batch * heads * triton.cdiv(num_queries, blocks.queries),)](
        *shared, dq, delta if sums is None else sums, *sizes,
        SHARE=heads // groups, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, BIAS_GRAD=sums is not None,
        **tiles, **variant, **_resources(blocks, row),
    )  # fmt: skip

    d_slopes = d_row = None
    if options.trained_slopes and sums is not None:
        d_slopes = -sums[0].sum(dim=(0, 2))
    elif row is not None and row_wants_grad and sums is not None:
        d_row = _row_gradient(shared, sizes, variant, row, sums, heads // groups)
    return dq, dk, dv, d_slopes, d_row


def _row_gradient(
    shared: tuple, sizes: tuple, variant: dict[str, Any], row: Tensor, sums: Tensor, share: int
) -> Tensor:
    """The gradient of the row of biases, [H, 2 far + 1]: near distances by a kernel, far keys from what dq summed."""
    q, far = shared[0], _far(row)
    block = (
        32 if _padded(q.shape[3]) * q.element_size() < 1024 else 16
    )  # of four such tiles in shared memory
    num_queries, batch, heads, _ = q.shape
    reach = triton.cdiv(
        far + block - 1, block
    )  # diagonals -reach + 1 .. reach - 1 hold a distance below far
    first_diagonal = 0 if variant["CAUSAL"] else 1 - reach
    diagonals = reach - first_diagonal
    query_tiles = triton.cdiv(num_queries, block)
    splits = min(batch * query_tiles, 16)
    width = 2 * block
    near = torch.zeros(heads, diagonals, splits, block, width, dtype=torch.float32, device=q.device)
    _row_gradient_kernel[(heads * diagonals * splits,)](
        *shared, near, *sizes, first_diagonal, diagonals, splits,
        SHARE=share, BLOCK_M=block, BLOCK_N=block, **variant, num_warps=4 if _padded(q.shape[3]) < 256 else 8, num_stages=1,
    )  # fmt: skip
    by_diagonal = near.sum(dim=(2, 3))
    # Column c of diagonal d is distance d * block + c - (block - 1): neighbouring diagonals overlap.
    low = first_diagonal * block - (block - 1)
    high = low + (diagonals + 1) * block
    by_distance = torch.zeros(heads, high - low, dtype=torch.float32, device=q.device)
    for index in range(diagonals):
        by_distance[:, index * block : index * block + width] += by_diagonal[:, index]
    d_row = torch.zeros_like(row)
    begin, stop = max(low, 1 - far), min(high, far)
    d_row[:, far + begin : far + stop] = by_distance[:, begin - low : stop - low]
    d_row[:, -1], d_row[:, 0] = sums[0].sum(dim=(0, 2)), sums[1].sum(dim=(0, 2))
    return d_row


def _bias_arguments(
    q: Tensor, slopes: Tensor | None, row: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, ...]:
    """(slopes, row in powers of two, seed); q stands for what the kernel does not look at."""
    return (
        q if slopes is None else slopes.contiguous(),
        q if row is None else (row.detach() * skipping.LOG2E).contiguous(),
        q if seed is None else seed,
    )


def _variant(
    q: Tensor, slopes: Tensor | None, row: Tensor | None, options: _Options
) -> dict[str, Any]:
    """What is compiled in, for forward and backward alike."""
    bias = NOTHING if slopes is None and row is None else SLOPES if row is None else ROW
    return {
        "D": q.shape[3], "BLOCK_D": _padded(q.shape[3]), "CAUSAL": options.causal, "BIAS": bias.value,
        "SKIP": options.skip, "DROPOUT": options.dropout_p > 0, "UPCAST": INTERPRETED and q.dtype == torch.bfloat16,
    }  # fmt: skip


def _resources(blocks: Blocks, row: Tensor | None) -> dict[str, int]:
    # Triton loads biases ahead through shared memory, too, like keys: with three stages they would not fit.
    return {
        "num_warps": blocks.warps,
        "num_stages": blocks.stages if row is None else min(blocks.stages, 2),
    }


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _far(row: Tensor | None) -> int:
    return 0 if row is None else row.shape[1] // 2


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _schedule(q: Tensor) -> Schedule:
    roomy = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    table = SCHEDULES_90 if roomy else SCHEDULES_80
    return table[q.element_size(), max(64, _padded(q.shape[3]))]


# --- in Triton from here ---------------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """a b in fp32. UPCAST only under the interpreter, whose product of bf16 is wrong (triton issue 11584)."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _tile(
    X,
    start,
    stride,
    limit,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows start .. start + ROWS of X, [ROWS, BLOCK_D]; zero past column D and, if BOUNDED, outside [0, limit)."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    # 64 bits for where the tile lies: tokens x heads x width passes 2^31.
    pointers = X + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if BOUNDED:
        inside = ((start + rows >= 0) & (start + rows < limit))[:, None] & (columns < D)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif BLOCK_D != D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_tile(
    X, x, start, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = X + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    inside = (start + rows < limit)[:, None] & (columns < D)[None, :]
    tl.store(pointers, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def _biased(scores, position, key, slope, Row, far, CAUSAL: tl.constexpr, BIAS: tl.constexpr):
    """Scores and bias, base 2. `position` and `key` are int32 and broadcast, to either way up of `scores`."""
    if BIAS == SLOPES:
        # Differences of integers below 2^24 are exact in fp32, and half as dear there.
        distance = position.to(tl.float32) - key.to(tl.float32)
        if not CAUSAL:
            distance = tl.abs(distance)
        scores = scores - slope * distance
    elif BIAS == ROW:
        scores = scores + tl.load(Row + far + tl.minimum(tl.maximum(position - key, -far), far))
    elif BIAS == FAR:
        scores = scores + tl.load(Row + 2 * far)
    return scores


@triton.jit
def _kept(Seed, head, query, key, dropout_p):
    """Which weights dropout keeps: element (head of the batch, query, key) of the stream that the seed names."""
    bits, _, _, _ = tl.philox(tl.load(Seed), key, query, head, 0, PHILOX_ROUNDS)
    return (bits >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) >= dropout_p


@triton.jit
def _norms_kernel(
    K, V, Slopes, KeyNorms, ValueNorms, Order,
    k_s, k_b, k_h, v_s, v_b, v_h, groups, heads, num_keys,
    D: tl.constexpr, BLOCK_D: tl.constexpr, KEY_TILE: tl.constexpr, SHARE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, PADDED_SHARE: tl.constexpr, PADDED_HEADS: tl.constexpr,
):  # fmt: skip
    """The longest row of every tile of k and of v, and, by the first program, the order of the heads."""
    program = tl.program_id(0)
    tiles = tl.cdiv(num_keys, KEY_TILE)
    start = program % tiles * KEY_TILE
    batch = tl.cast(program // tiles // groups, tl.int64)
    group = tl.cast(program // tiles % groups, tl.int64)
    k = _tile(K + batch * k_b + group * k_h, start, k_s, num_keys, KEY_TILE, D, BLOCK_D, True)
    tl.store(KeyNorms + program, _longest(k))
    v = _tile(V + batch * v_b + group * v_h, start, v_s, num_keys, KEY_TILE, D, BLOCK_D, True)
    tl.store(ValueNorms + program, _longest(v))
    if program == 0:
        _store_order(Slopes, Order, heads, 1, PADDED_HEADS, 1)
        _store_order(Slopes, Order + heads, groups, SHARE, PADDED_GROUPS, PADDED_SHARE)


@triton.jit
def _longest(x):
    """The largest 2-norm of the rows of x; infinite where one is not finite."""
    x = x.to(tl.float32)
    squared = tl.sum(x * x, axis=1)
    squared = tl.where(squared == squared, squared, float("inf"))
    return tl.sqrt(tl.max(squared, axis=0))


@triton.jit
def _store_order(Slopes, Order, count, share, PADDED: tl.constexpr, PADDED_SHARE: tl.constexpr):
    """Order[r] = the head of rank r by slope; a head of keys counts by the shallowest of its `share` queries' heads."""
    mine = tl.arange(0, PADDED)
    each = tl.arange(0, PADDED_SHARE)
    inside = (mine < count)[:, None] & (each < share)[None, :]
    slopes = tl.min(
        tl.load(Slopes + mine[:, None] * share + each[None, :], mask=inside, other=float("inf")),
        axis=1,
    )
    slopes = tl.where(
        slopes == slopes, slopes, float("inf")
    )  # of NaN, too, ranks must be a permutation
    # the same vector the other way up, which Triton has no operation for
    others = tl.sum(tl.where(mine[:, None] == mine[None, :], slopes[:, None], 0.0), axis=0)
    before = (others[None, :] < slopes[:, None]) | (
        (others[None, :] == slopes[:, None]) & (mine[None, :] < mine[:, None])
    )
    rank = tl.sum(before.to(tl.int32), axis=1)
    tl.store(Order + rank, mine, mask=mine < count)


@triton.jit
def _forward_kernel(
    Q, K, V, Out, Lse, Slopes, Row, Seed, KeyNorms, ValueNorms, Order, First, End,
    score_scale, dropout_p, q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    batches, heads, num_queries, num_keys, far,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_TILE: tl.constexpr,
    COLUMN_BIAS: tl.constexpr, TRAINED_SLOPES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr, SKIP: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries: its output, logsumexp (base 2) and, if SKIP, the run of key tiles it visited."""
    query_tiles = tl.cdiv(num_queries, BLOCK_M)
    tile = query_tiles - 1 - tl.program_id(0) % query_tiles
    batch = tl.program_id(0) // query_tiles % batches
    head = tl.program_id(0) // query_tiles // batches
    if SKIP:
        head = tl.load(Order + head)
    line = batch * heads + head
    Q += tl.cast(batch, tl.int64) * q_b + tl.cast(head, tl.int64) * q_h
    K += tl.cast(batch, tl.int64) * k_b + tl.cast(head // SHARE, tl.int64) * k_h
    V += tl.cast(batch, tl.int64) * v_b + tl.cast(head // SHARE, tl.int64) * v_h
    slope = 0.0
    if BIAS == SLOPES:
        slope = tl.load(Slopes + head) * LOG2E
    Row += head * (2 * far + 1)

    start = tile * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    origin = start + num_keys - num_queries  # position of the first query
    last = tl.minimum(start + BLOCK_M, num_queries) - 1 + num_keys - num_queries
    own_first = tl.maximum(origin, 0) // KEY_TILE
    own_end = tl.maximum(last, 0) // KEY_TILE + 1
    stop = tl.minimum(own_end * KEY_TILE, num_keys)
    if CAUSAL:
        stop = last + 1

    q = _tile(Q, start, q_s, num_queries, BLOCK_M, D, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc, total, top = _attend(
        acc, total, top, q, K, V, own_first * KEY_TILE, stop, k_s, v_s, start, origin, slope, Row, far, Seed, line,
        num_keys, score_scale, dropout_p, True, BLOCK_M, BLOCK_N, COLUMN_BIAS, D, BLOCK_D, CAUSAL, BIAS, DROPOUT, UPCAST
    )  # fmt: skip
    first = 0
    end = tl.cdiv(num_keys, KEY_TILE)
    if CAUSAL:
        end = own_end
    if SKIP:
        row_floor = _true_lse(top + tl.log2(total), slope, BLOCK_M, COLUMN_BIAS)
        row_floor = tl.where(row_floor == row_floor, row_floor, float("-inf"))
        floor = tl.min(tl.where(queries < num_queries, row_floor, float("inf")), axis=0)
        key_tiles = tl.cdiv(num_keys, KEY_TILE)
        norms = (batch * (heads // SHARE) + head // SHARE) * key_tiles
        first, end = _run(
            KeyNorms + norms, ValueNorms + norms, floor, tl.abs(score_scale) * _longest(q), slope, origin, last,
            own_first, own_end, key_tiles, num_keys, KEY_TILE, BLOCK_M, TRAINED_SLOPES, CAUSAL
        )  # fmt: skip
        tl.store(First + line * query_tiles + tile, first)
        tl.store(End + line * query_tiles + tile, end)

    begin = first * KEY_TILE
    if BIAS == ROW and CAUSAL:
        stop_far = tl.maximum(origin - far + 1, 0) // BLOCK_N * BLOCK_N
        stop_far = tl.minimum(stop_far, own_first * KEY_TILE)
        acc, total, top = _attend(
            acc, total, top, q, K, V, begin, stop_far, k_s, v_s, start, origin, slope, Row, far, Seed, line, num_keys,
            score_scale, dropout_p, False, BLOCK_M, BLOCK_N, COLUMN_BIAS, D, BLOCK_D, CAUSAL, FAR, DROPOUT, UPCAST
        )  # fmt: skip
        begin = stop_far
    acc, total, top = _attend(
        acc, total, top, q, K, V, begin, own_first * KEY_TILE, k_s, v_s, start, origin, slope, Row, far, Seed, line,
        num_keys, score_scale, dropout_p, False, BLOCK_M, BLOCK_N, COLUMN_BIAS, D, BLOCK_D, CAUSAL, BIAS, DROPOUT, UPCAST
    )  # fmt: skip
    if not CAUSAL:
        acc, total, top = _attend(
            acc, total, top, q, K, V, stop, tl.minimum(end * KEY_TILE, num_keys), k_s, v_s, start, origin, slope, Row,
            far, Seed, line, num_keys, score_scale, dropout_p, True, BLOCK_M, BLOCK_N, COLUMN_BIAS, D, BLOCK_D, CAUSAL,
            BIAS, DROPOUT, UPCAST
        )  # fmt: skip

    weight = 1 / total
    if DROPOUT:
        weight = weight / (1 - dropout_p)
    line_of_out = tl.cast(batch, tl.int64) * heads * D + head * D
    _store_tile(
        Out + line_of_out,
        acc * weight[:, None],
        start,
        batches * heads * D,
        num_queries,
        BLOCK_M,
        D,
        BLOCK_D,
    )
    lse = _true_lse(top + tl.log2(total), slope, BLOCK_M, COLUMN_BIAS)
    tl.store(Lse + tl.cast(line, tl.int64) * num_queries + queries, lse, mask=queries < num_queries)


@triton.jit
def _attend(
    acc, total, top, q, K, V, begin, stop, k_s, v_s, start, origin, slope, Row, far, Seed, line,
    num_keys, score_scale, dropout_p, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COLUMN_BIAS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys begin .. stop. If not MASKED every key is there and seen by every query."""
    rows = tl.arange(0, BLOCK_M)
    for key_start in range(begin, stop, BLOCK_N):
        key = key_start + tl.arange(0, BLOCK_N)
        k = _tile(K, key_start, k_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        scores = _dot(q, tl.trans(k), UPCAST) * score_scale
        if COLUMN_BIAS and BIAS == SLOPES:
            # -slope * (position - key) less what all keys of a row share: nothing to compute for an element.
            scores = scores + (slope * (key - origin).to(tl.float32))[None, :]
        else:
            scores = _biased(
                scores, (origin + rows)[:, None], key[None, :], slope, Row, far, CAUSAL, BIAS
            )
        if MASKED:
            if CAUSAL:
                scores = tl.where((origin + rows)[:, None] >= key[None, :], scores, float("-inf"))
            else:
                scores = tl.where(key[None, :] < num_keys, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.math.exp2(scores - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        if DROPOUT:
            weights = tl.where(
                _kept(Seed, line, (start + rows)[:, None], key[None, :], dropout_p), weights, 0.0
            )
        v = _tile(V, key_start, v_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        acc = acc * shrink[:, None] + _dot(weights.to(v.dtype), v, UPCAST)
        top = new_top
    return acc, total, top


@triton.jit
def _true_lse(lse, slope, BLOCK_M: tl.constexpr, COLUMN_BIAS: tl.constexpr):
    if COLUMN_BIAS:
        lse = lse - slope * tl.arange(0, BLOCK_M).to(tl.float32)
    return lse


@triton.jit
def _run(
    KeyNorms, ValueNorms, floor, reach, slope, origin, last, own_first, own_end, key_tiles, num_keys,
    KEY_TILE: tl.constexpr, BLOCK_M: tl.constexpr, TRAINED_SLOPES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """[first, end) of the key tiles that may matter: `pretrain.kernels.skipping.key_runs` for one tile of queries."""
    OWN: tl.constexpr = (
        2 * BLOCK_M // KEY_TILE if BLOCK_M > KEY_TILE else 2
    )  # at least BLOCK_M / KEY_TILE + 1
    own = own_first + tl.arange(0, OWN)
    own_key = tl.max(tl.load(KeyNorms + own, mask=own < own_end, other=0.0), axis=0)
    own_value = tl.max(tl.load(ValueNorms + own, mask=own < own_end, other=0.0), axis=0)
    need = BITS + tl.log2(num_keys.to(tl.float32)) + ABSOLUTE_SLACK
    if TRAINED_SLOPES:
        need += tl.log2(num_keys.to(tl.float32))
    need = tl.where(slope > 0, need, float("inf"))
    floor = floor - tl.abs(floor) * RELATIVE_SLACK
    first = own_first
    for chunk in range(0, own_first, 64):
        tile = chunk + tl.arange(0, 64)
        nearest = origin - (tile * KEY_TILE + KEY_TILE - 1)
        matters = _matters(
            KeyNorms,
            ValueNorms,
            tile,
            tile < own_first,
            nearest,
            floor,
            reach,
            slope,
            need,
            own_key,
            own_value,
        )
        first = tl.minimum(first, tl.min(tl.where(matters, tile, own_first), axis=0))
    end = own_end
    if not CAUSAL:
        for chunk in range(own_end, key_tiles, 64):
            tile = chunk + tl.arange(0, 64)
            nearest = tile * KEY_TILE - last
            matters = _matters(
                KeyNorms,
                ValueNorms,
                tile,
                tile < key_tiles,
                nearest,
                floor,
                reach,
                slope,
                need,
                own_key,
                own_value,
            )
            end = tl.maximum(end, tl.max(tl.where(matters, tile + 1, own_end), axis=0))
    return first, end


@triton.jit
def _matters(
    KeyNorms, ValueNorms, tile, inside, nearest, floor, reach, slope, need, own_key, own_value
):
    key = tl.load(KeyNorms + tile, mask=inside, other=0.0)
    value = tl.load(ValueNorms + tile, mask=inside, other=0.0)
    gap = floor - (reach * key * NORM_SLACK - slope * nearest.to(tl.float32) * (1 - RELATIVE_SLACK))
    need = need + tl.log2(tl.where(key > own_key, key / own_key, 1.0))
    need = need + tl.log2(tl.where(value > own_value, value / own_value, 1.0))
    # Every comparison with NaN is false, so that what is not finite is not skipped.
    skipped = (gap > need) & (key < float("inf")) & (value < float("inf"))
    return inside & (skipped == 0)


@triton.jit
def _delta_kernel(
    Out,
    DOut,
    Delta,
    batches,
    heads,
    num_queries,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Delta[b, h, i] = sum of out * d_out over D: what every score's gradient has subtracted."""
    tiles = tl.cdiv(num_queries, BLOCK_M)
    line = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * BLOCK_M
    offset = (
        tl.cast(line, tl.int64) * D
    )  # [S, B, H, D] is dense: line b * heads + h of every position
    out = _tile(
        Out + offset, start, batches * heads * D, num_queries, BLOCK_M, D, BLOCK_D, True
    ).to(tl.float32)
    d_out = _tile(
        DOut + offset, start, batches * heads * D, num_queries, BLOCK_M, D, BLOCK_D, True
    ).to(tl.float32)
    queries = start + tl.arange(0, BLOCK_M)
    pointers = Delta + tl.cast(line, tl.int64) * num_queries + queries
    tl.store(pointers, tl.sum(out * d_out, axis=1), mask=queries < num_queries)


@triton.jit
def _dkdv_kernel(
    Q, K, V, DOut, Lse, Delta, Slopes, Row, Seed, Order, First, End, DK, DV,
    scale, dropout_p, q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    batches, heads, num_queries, num_keys, far,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr, SKIP: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values, over the queries of all heads that share them."""
    key_blocks = tl.cdiv(num_keys, BLOCK_N)
    key_start = tl.program_id(0) % key_blocks * BLOCK_N
    batch = tl.program_id(0) // key_blocks % batches
    group = tl.program_id(0) // key_blocks // batches
    groups = heads // SHARE
    if SKIP:
        group = tl.load(Order + heads + group)
    K += tl.cast(batch, tl.int64) * k_b + tl.cast(group, tl.int64) * k_h
    V += tl.cast(batch, tl.int64) * v_b + tl.cast(group, tl.int64) * v_h
    k = _tile(K, key_start, k_s, num_keys, BLOCK_N, D, BLOCK_D, True)
    v = _tile(V, key_start, v_s, num_keys, BLOCK_N, D, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    query_tiles = tl.cdiv(num_queries, QUERY_TILE)
    before = num_keys - num_queries

    for member in range(0, SHARE):
        head = group * SHARE + member
        line = batch * heads + head
        slope = 0.0
        if BIAS == SLOPES:
            slope = tl.load(Slopes + head) * LOG2E
        begin = 0
        stop = num_queries
        if CAUSAL:
            begin = tl.maximum(key_start - before, 0) // BLOCK_M * BLOCK_M
        if SKIP:
            first_tile, end_tile = _query_tiles(
                First + line * query_tiles,
                End + line * query_tiles,
                key_start // KEY_TILE,
                query_tiles,
            )
            begin = tl.maximum(begin, first_tile * QUERY_TILE)
            stop = tl.minimum(stop, end_tile * QUERY_TILE)
        near = begin
        if CAUSAL:  # the first queries stand among the keys
            near = tl.cdiv(tl.maximum(key_start + BLOCK_N - 1 - before, 0), BLOCK_M) * BLOCK_M
            near = tl.minimum(tl.maximum(near, begin), stop)
        dk, dv = _collect(
            dk, dv, k, v, Q + tl.cast(batch, tl.int64) * q_b + tl.cast(head, tl.int64) * q_h, q_s,
            DOut + tl.cast(line, tl.int64) * D, batches * heads * D, Lse, Delta, First, End, begin, near, key_start,
            line, slope, Row + head * (2 * far + 1), far, Seed, scale * LOG2E, dropout_p, num_queries, num_keys,
            CAUSAL, BLOCK_M, BLOCK_N, QUERY_TILE, KEY_TILE, D, BLOCK_D, CAUSAL, BIAS, SKIP, DROPOUT, UPCAST
        )  # fmt: skip
        stop_near = stop
        if BIAS == ROW and CAUSAL:
            stop_near = (
                tl.cdiv(tl.maximum(key_start + BLOCK_N - 1 + far - before, 0), BLOCK_M) * BLOCK_M
            )
            stop_near = tl.minimum(tl.maximum(stop_near, near), stop)
        dk, dv = _collect(
            dk, dv, k, v, Q + tl.cast(batch, tl.int64) * q_b + tl.cast(head, tl.int64) * q_h, q_s,
            DOut + tl.cast(line, tl.int64) * D, batches * heads * D, Lse, Delta, First, End, near, stop_near, key_start,
            line, slope, Row + head * (2 * far + 1), far, Seed, scale * LOG2E, dropout_p, num_queries, num_keys,
            False, BLOCK_M, BLOCK_N, QUERY_TILE, KEY_TILE, D, BLOCK_D, CAUSAL, BIAS, SKIP, DROPOUT, UPCAST
        )  # fmt: skip
        if BIAS == ROW and CAUSAL:
            dk, dv = _collect(
                dk, dv, k, v, Q + tl.cast(batch, tl.int64) * q_b + tl.cast(head, tl.int64) * q_h, q_s,
                DOut + tl.cast(line, tl.int64) * D, batches * heads * D, Lse, Delta, First, End, stop_near, stop,
                key_start, line, slope, Row + head * (2 * far + 1), far, Seed, scale * LOG2E, dropout_p, num_queries,
                num_keys, False, BLOCK_M, BLOCK_N, QUERY_TILE, KEY_TILE, D, BLOCK_D, CAUSAL, FAR, SKIP, DROPOUT, UPCAST
            )  # fmt: skip

    offset = (tl.cast(batch, tl.int64) * groups + group) * D
    _store_tile(
        DK + offset, dk * scale, key_start, batches * groups * D, num_keys, BLOCK_N, D, BLOCK_D
    )
    _store_tile(DV + offset, dv, key_start, batches * groups * D, num_keys, BLOCK_N, D, BLOCK_D)


@triton.jit
def _query_tiles(First, End, key_tile, query_tiles):
    """[first, end) of the query tiles that visit a tile of keys. One between them may not: `_collect` looks."""
    first = query_tiles
    end = 0
    for chunk in range(0, query_tiles, 64):
        tile = chunk + tl.arange(0, 64)
        # past the last tile an empty run
        visits = (tl.load(First + tile, mask=tile < query_tiles, other=1) <= key_tile) & (
            tl.load(End + tile, mask=tile < query_tiles, other=0) > key_tile
        )
        first = tl.minimum(first, tl.min(tl.where(visits, tile, query_tiles), axis=0))
        end = tl.maximum(end, tl.max(tl.where(visits, tile + 1, 0), axis=0))
    return first, end


@triton.jit
def _collect(
    dk, dv, k, v, Q, q_s, DOut, o_s, Lse, Delta, First, End, begin, stop, key_start,
    line, slope, Row, far, Seed, score_scale, dropout_p, num_queries, num_keys,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds what queries begin .. stop have to say on one block of keys. Scores stand with keys down, queries across."""
    key = key_start + tl.arange(0, BLOCK_N)
    line_of_rows = tl.cast(line, tl.int64) * num_queries
    query_tiles = tl.cdiv(num_queries, QUERY_TILE)
    for start in range(begin, stop, BLOCK_M):
        query = start + tl.arange(0, BLOCK_M)
        position = query + num_keys - num_queries
        q = _tile(Q, start, q_s, num_queries, BLOCK_M, D, BLOCK_D, True)
        # An infinite logsumexp makes the weights of a row zero: of rows past the end, and of those that skip this tile.
        lse = tl.load(Lse + line_of_rows + query, mask=query < num_queries, other=float("inf"))
        if SKIP:
            runs = line * query_tiles + query // QUERY_TILE
            visits = (
                tl.load(First + runs, mask=query < num_queries, other=0) <= key_start // KEY_TILE
            )
            if not CAUSAL:
                visits &= (
                    tl.load(End + runs, mask=query < num_queries, other=0) > key_start // KEY_TILE
                )
            lse = tl.where(visits, lse, float("inf"))
        scores = _dot(k, tl.trans(q), UPCAST) * score_scale
        scores = _biased(scores, position[None, :], key[:, None], slope, Row, far, CAUSAL, BIAS)
        weights = tl.math.exp2(scores - lse[None, :])
        if MASKED:
            weights = tl.where(position[None, :] >= key[:, None], weights, 0.0)
        d_out = _tile(DOut, start, o_s, num_queries, BLOCK_M, D, BLOCK_D, True)
        d_weights = _dot(v, tl.trans(d_out), UPCAST)
        kept = weights
        if DROPOUT:
            keep = _kept(Seed, line, query[None, :], key[:, None], dropout_p)
            kept = tl.where(keep, weights * (1 / (1 - dropout_p)), 0.0)
            d_weights = tl.where(keep, d_weights * (1 / (1 - dropout_p)), 0.0)
        dv += _dot(kept.to(d_out.dtype), d_out, UPCAST)
        delta = tl.load(Delta + line_of_rows + query, mask=query < num_queries, other=0.0)
        d_scores = weights * (d_weights - delta[None, :])
        dk += _dot(d_scores.to(q.dtype), q, UPCAST)
    return dk, dv


@triton.jit
def _dq_kernel(
    Q, K, V, DOut, Lse, Delta, Slopes, Row, Seed, Order, First, End, DQ, Sums,
    scale, dropout_p, q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    batches, heads, num_queries, num_keys, far,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr, SKIP: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries and, if BIAS_GRAD, its sums for the gradient of the bias."""
    query_blocks = tl.cdiv(num_queries, BLOCK_M)
    start = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    batch = tl.program_id(0) // query_blocks % batches
    head = tl.program_id(0) // query_blocks // batches
    if SKIP:
        head = tl.load(Order + head)
    line = batch * heads + head
    line_of_rows = tl.cast(line, tl.int64) * num_queries
    query = start + tl.arange(0, BLOCK_M)
    Q += tl.cast(batch, tl.int64) * q_b + tl.cast(head, tl.int64) * q_h
    K += tl.cast(batch, tl.int64) * k_b + tl.cast(head // SHARE, tl.int64) * k_h
    V += tl.cast(batch, tl.int64) * v_b + tl.cast(head // SHARE, tl.int64) * v_h
    q = _tile(Q, start, q_s, num_queries, BLOCK_M, D, BLOCK_D, True)
    d_out = _tile(
        DOut + tl.cast(line, tl.int64) * D,
        start,
        batches * heads * D,
        num_queries,
        BLOCK_M,
        D,
        BLOCK_D,
        True,
    )
    lse = tl.load(Lse + line_of_rows + query, mask=query < num_queries, other=float("inf"))
    delta = tl.load(Delta + line_of_rows + query, mask=query < num_queries, other=0.0)
    slope = 0.0
    if BIAS == SLOPES:
        slope = tl.load(Slopes + head) * LOG2E
    Row += head * (2 * far + 1)

    origin = start + num_keys - num_queries
    begin = 0
    stop = num_keys
    if SKIP:
        run = line * tl.cdiv(num_queries, QUERY_TILE) + start // QUERY_TILE
        begin = tl.load(First + run) * KEY_TILE
        stop = tl.minimum(tl.load(End + run) * KEY_TILE, num_keys)
    whole = stop // BLOCK_N * BLOCK_N  # up to there every key is there and seen by every query
    if CAUSAL:
        stop = tl.minimum(stop, tl.minimum(start + BLOCK_M, num_queries) + num_keys - num_queries)
        whole = origin // BLOCK_N * BLOCK_N
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    sums_after = tl.zeros([BLOCK_M], dtype=tl.float32)
    if BIAS == ROW and CAUSAL:
        whole_far = tl.minimum(tl.maximum(origin - far + 1, 0) // BLOCK_N * BLOCK_N, whole)
        dq, sums, sums_after = _descend(
            dq, sums, sums_after, q, d_out, lse, delta, K, V, k_s, v_s, begin, whole_far, query, line, slope, Row, far,
            Seed, scale * LOG2E, dropout_p, num_queries, num_keys, False, BLOCK_N, BIAS_GRAD, D, BLOCK_D, CAUSAL, FAR,
            DROPOUT, UPCAST
        )  # fmt: skip
        begin = whole_far
    dq, sums, sums_after = _descend(
        dq, sums, sums_after, q, d_out, lse, delta, K, V, k_s, v_s, begin, whole, query, line, slope, Row, far, Seed,
        scale * LOG2E, dropout_p, num_queries, num_keys, False, BLOCK_N, BIAS_GRAD, D, BLOCK_D, CAUSAL, BIAS, DROPOUT,
        UPCAST
    )  # fmt: skip
    dq, sums, sums_after = _descend(
        dq, sums, sums_after, q, d_out, lse, delta, K, V, k_s, v_s, tl.maximum(begin, whole), stop, query, line, slope,
        Row, far, Seed, scale * LOG2E, dropout_p, num_queries, num_keys, True, BLOCK_N, BIAS_GRAD, D, BLOCK_D, CAUSAL,
        BIAS, DROPOUT, UPCAST
    )  # fmt: skip
    offset = tl.cast(line, tl.int64) * D
    _store_tile(
        DQ + offset, dq * scale, start, batches * heads * D, num_queries, BLOCK_M, D, BLOCK_D
    )
    if BIAS_GRAD:
        tl.store(Sums + line_of_rows + query, sums, mask=query < num_queries)
        other = tl.cast(batches * heads, tl.int64) * num_queries
        tl.store(Sums + other + line_of_rows + query, sums_after, mask=query < num_queries)


@triton.jit
def _descend(
    dq, sums, sums_after, q, d_out, lse, delta, K, V, k_s, v_s, begin, stop, query, line, slope, Row, far, Seed,
    score_scale, dropout_p, num_queries, num_keys, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS_GRAD: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds what keys begin .. stop have to say on one block of queries."""
    position = (query + num_keys - num_queries)[:, None]
    for key_start in range(begin, stop, BLOCK_N):
        key = (key_start + tl.arange(0, BLOCK_N))[None, :]
        k = _tile(K, key_start, k_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        v = _tile(V, key_start, v_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        d_scores = _score_gradients(
            q, k, v, d_out, lse, delta, position, key, query[:, None], line, slope, Row, far, Seed, score_scale,
            dropout_p, num_keys, MASKED, CAUSAL, BIAS, DROPOUT, UPCAST
        )  # fmt: skip
        dq += _dot(d_scores.to(k.dtype), k, UPCAST)
        if BIAS_GRAD:
            if BIAS == SLOPES:
                sums += tl.sum(d_scores * tl.abs((position - key).to(tl.float32)), axis=1)
            else:
                sums += tl.sum(tl.where(position - key >= far, d_scores, 0.0), axis=1)
                if not CAUSAL:
                    sums_after += tl.sum(tl.where(position - key <= -far, d_scores, 0.0), axis=1)
    return dq, sums, sums_after


@triton.jit
def _score_gradients(
    q, k, v, d_out, lse, delta, position, key, query, line, slope, Row, far, Seed, score_scale, dropout_p, num_keys,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """d loss / d score, [queries, keys]: weights recomputed from the logsumexp."""
    scores = _dot(q, tl.trans(k), UPCAST) * score_scale
    scores = _biased(scores, position, key, slope, Row, far, CAUSAL, BIAS)
    weights = tl.math.exp2(scores - lse[:, None])
    if MASKED:
        seen = (key >= 0) & (key < num_keys)
        if CAUSAL:
            seen &= position >= key
        weights = tl.where(seen, weights, 0.0)
    d_weights = _dot(d_out, tl.trans(v), UPCAST)
    if DROPOUT:
        keep = _kept(Seed, line, query, key, dropout_p)
        d_weights = tl.where(keep, d_weights * (1 / (1 - dropout_p)), 0.0)
    return weights * (d_weights - delta[:, None])


@triton.jit
def _row_gradient_kernel(
    Q, K, V, DOut, Lse, Delta, Slopes, Row, Seed, Order, First, End, Near,
    scale, dropout_p, q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    batches, heads, num_queries, num_keys, far, first_diagonal, diagonals, splits,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr, SKIP: tl.constexpr,
    DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of the bias at distances below `far`, summed over queries.

    A program owns one diagonal of blocks, the keys `diagonal * BLOCK_N` before the queries: wherever on it, an element
    of the block has the same distance, so that blocks add up as they are. Row r of what is stored is shifted by r, so
    that its columns are distances.
    """
    split = tl.program_id(0) % splits
    diagonal = tl.program_id(0) // splits % diagonals + first_diagonal
    head = tl.program_id(0) // splits // diagonals
    Row += head * (2 * far + 1)
    query_tiles = tl.cdiv(num_queries, BLOCK_M)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for item in range(split, batches * query_tiles, splits):
        batch = tl.cast(item // query_tiles, tl.int64)
        start = item % query_tiles * BLOCK_M
        line = item // query_tiles * heads + head
        query = start + rows
        position = query + num_keys - num_queries
        key_start = start + num_keys - num_queries - diagonal * BLOCK_N
        key = key_start + columns
        line_of_rows = tl.cast(line, tl.int64) * num_queries
        q = _tile(Q + batch * q_b + head * q_h, start, q_s, num_queries, BLOCK_M, D, BLOCK_D, True)
        k = _tile(
            K + batch * k_b + head // SHARE * k_h,
            key_start,
            k_s,
            num_keys,
            BLOCK_N,
            D,
            BLOCK_D,
            True,
        )
        v = _tile(
            V + batch * v_b + head // SHARE * v_h,
            key_start,
            v_s,
            num_keys,
            BLOCK_N,
            D,
            BLOCK_D,
            True,
        )
        d_out = _tile(
            DOut + tl.cast(line, tl.int64) * D,
            start,
            batches * heads * D,
            num_queries,
            BLOCK_M,
            D,
            BLOCK_D,
            True,
        )
        lse = tl.load(Lse + line_of_rows + query, mask=query < num_queries, other=float("inf"))
        delta = tl.load(Delta + line_of_rows + query, mask=query < num_queries, other=0.0)
        acc += _score_gradients(
            q, k, v, d_out, lse, delta, position[:, None], key[None, :], query[:, None], line, 0.0, Row, far, Seed,
            scale * LOG2E, dropout_p, num_keys, True, CAUSAL, BIAS, DROPOUT, UPCAST
        )  # fmt: skip
    distance = diagonal * BLOCK_N + rows[:, None] - columns[None, :]
    Near += tl.cast((head * diagonals + diagonal - first_diagonal) * splits + split, tl.int64) * (
        BLOCK_M * 2 * BLOCK_N
    )
    pointers = (
        Near + rows[:, None] * (2 * BLOCK_N) + (BLOCK_N - 1 - columns)[None, :] + rows[:, None]
    )
    tl.store(pointers, acc, mask=tl.abs(distance) < far)


INTERPRETED = not isinstance(_forward_kernel, triton.JITFunction)
"""Whether Triton runs these kernels in its interpreter, on the CPU: for tests."""
