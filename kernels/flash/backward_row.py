"""The backward kernel for bias rows: the gradient of each head's bias at every distance."""

# Triton compiles these functions from their source; see device.py on annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.flash.backward_dq import score_gradients
from pretrain.kernels.flash.device import LOG2E, load_starts, load_tile


@triton.jit
def row_gradient_kernel(
    Q,  # [queries, B, H, D], any strides but a dense D
    K,  # [keys, B, G, D], likewise
    V,  # [keys, B, G, D], likewise
    DOut,  # [queries, B, H, D], dense
    Lse,  # [B, H, queries], fp32, base 2
    Delta,  # [B, H, queries], fp32, from delta_kernel
    Slopes,  # not read: the first fifteen arguments are those of all backward kernels
    BiasRow,  # [H, 2 * row_reach + 1], fp32, times log2(e)
    Seed,  # [1], int64; read if DROPOUT
    DocumentStarts,  # [B, queries], int32; read if DOCUMENTS
    HeadOrder,  # not read
    KeyNorms,  # not read
    RowBounds,  # not read
    Thresholds,  # not read
    KeyTiles,  # not read
    Sheared,  # output, [H, diagonals, splits, BLOCK_M, 2 * BLOCK_N], fp32, zeroed by the host
    scale,
    dropout_p,
    q_stride_s,
    q_stride_b,
    q_stride_h,
    k_stride_s,
    k_stride_b,
    k_stride_h,
    v_stride_s,
    v_stride_b,
    v_stride_h,
    batches,
    heads,
    num_queries,
    num_keys,
    row_reach,  # distance at which the bias row ends
    first_diagonal,
    diagonals,
    splits,  # programs that share one diagonal
    HEADS_PER_GROUP: tl.constexpr,  # query heads that share a key head
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D padded to a power of two
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    SKIP: tl.constexpr,  # not read: only slopes skip
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,  # queries see no key before DocumentStarts
    UPCAST: tl.constexpr,  # see dot
):
    """Sum d_score over all queries, for every distance below row_reach.

    The matrix of scores is cut along its diagonals. A program owns one diagonal of blocks: for
    every block of queries, the block of keys that lies diagonal * BLOCK_N before it. Element (r, c)
    of such a block has the same distance, diagonal * BLOCK_N + r - c, wherever on the diagonal the
    block is. So the blocks are added up as they are, in registers, and no scatter by distance is
    needed.

    What is stored is sheared: row r is shifted by r, which puts equal distances into equal columns
    (column BLOCK_N - 1 + r - c). The host then sums over rows and splits.
    """
    split = tl.program_id(0) % splits
    diagonal = tl.program_id(0) // splits % diagonals + first_diagonal
    head = tl.program_id(0) // splits // diagonals
    BiasRow += head * (2 * row_reach + 1)
    query_tiles = tl.cdiv(num_queries, BLOCK_M)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for item in range(split, batches * query_tiles, splits):
        batch = tl.cast(item // query_tiles, tl.int64)
        start = item % query_tiles * BLOCK_M
        batch_head = item // query_tiles * heads + head
        query = start + rows
        position = query + num_keys - num_queries
        # This may begin before the first key or end after the last: load_tile and MASKED check.
        key_start = start + num_keys - num_queries - diagonal * BLOCK_N
        key = key_start + columns
        lse_offset = tl.cast(batch_head, tl.int64) * num_queries
        q = load_tile(
            Q + batch * q_stride_b + head * q_stride_h, start,
            q_stride_s, num_queries, BLOCK_M, D, BLOCK_D, True,
        )  # fmt: skip
        k = load_tile(
            K + batch * k_stride_b + head // HEADS_PER_GROUP * k_stride_h, key_start,
            k_stride_s, num_keys, BLOCK_N, D, BLOCK_D, True,
        )  # fmt: skip
        v = load_tile(
            V + batch * v_stride_b + head // HEADS_PER_GROUP * v_stride_h, key_start,
            v_stride_s, num_keys, BLOCK_N, D, BLOCK_D, True,
        )  # fmt: skip
        d_out = load_tile(
            DOut + tl.cast(batch_head, tl.int64) * D, start,
            batches * heads * D, num_queries, BLOCK_M, D, BLOCK_D, True,
        )  # fmt: skip
        lse = tl.load(Lse + lse_offset + query, mask=query < num_queries, other=float("inf"))
        delta = tl.load(Delta + lse_offset + query, mask=query < num_queries, other=0.0)
        doc_starts = load_starts(DocumentStarts, batch, query, num_queries, DOCUMENTS)
        d_scores, _ = score_gradients(
            q, k, v, d_out, lse, delta, position[:, None], key[None, :], query[:, None],
            doc_starts[:, None], batch_head, 0.0, BiasRow, row_reach, Seed, scale * LOG2E,
            dropout_p, num_keys, True, CAUSAL, BIAS, DROPOUT, DOCUMENTS, UPCAST,
        )  # fmt: skip
        acc += d_scores

    distance = diagonal * BLOCK_N + rows[:, None] - columns[None, :]
    block = (head * diagonals + diagonal - first_diagonal) * splits + split
    Sheared += tl.cast(block, tl.int64) * (BLOCK_M * 2 * BLOCK_N)
    pointers = (
        Sheared + rows[:, None] * (2 * BLOCK_N) + (BLOCK_N - 1 - columns)[None, :] + rows[:, None]
    )
    # Distances at or beyond row_reach belong to the ends of the row, which dq_kernel sums.
    tl.store(pointers, acc, mask=tl.abs(distance) < row_reach)
