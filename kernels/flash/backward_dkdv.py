"""The backward kernel for keys and values: one program per block of keys loops over queries."""

# Triton compiles these functions from their source; see device.py on annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels.flash.device import (
    LOG2E,
    ROW,
    ROW_END,
    SLOPES,
    add_bias,
    dot,
    dropout_keeps,
    load_starts,
    load_tile,
    store_tile,
)
from pretrain.kernels.flash.tile_skipping import list_query_tiles, row_skips


@triton.jit
def dkdv_kernel(
    Q,  # [queries, B, H, D], any strides but a dense D
    K,  # [keys, B, G, D], likewise
    V,  # [keys, B, G, D], likewise
    DOut,  # [queries, B, H, D], dense
    Lse,  # [B, H, queries], fp32, base 2
    Delta,  # [B, H, queries], fp32, from delta_kernel
    Slopes,  # [H], fp32; read if BIAS is SLOPES
    BiasRow,  # [H, 2 * row_reach + 1], fp32, times log2(e); read if BIAS is ROW
    Seed,  # [1], int64; read if DROPOUT
    DocumentStarts,  # [B, queries], int32; read if DOCUMENTS
    HeadOrder,  # [H + G], int32; this and the next four are read if SKIP
    KeyNorms,  # [B, G, key tiles], fp32
    RowBounds,  # [2, B, H, queries], fp32, from the forward kernel
    Thresholds,  # [B, H, query tiles, key tiles], fp32, likewise
    KeyTiles,  # [B, H, query tiles, key tiles + 1], int32, likewise
    DK,  # output, [keys, B, G, D], any strides but a dense D
    DV,  # output, [keys, B, G, D], the strides of DK
    QueryTiles,  # scratch if SKIP, [B, H, key blocks, query tiles], int32: see list_query_tiles
    dk_stride_s,
    dk_stride_b,
    dk_stride_h,
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
    HEADS_PER_GROUP: tl.constexpr,  # query heads that share a key head
    BLOCK_M: tl.constexpr,  # queries of one step of the loop
    BLOCK_N: tl.constexpr,  # keys of the program
    QUERY_TILE: tl.constexpr,  # queries for which skipping is decided together
    KEY_TILE: tl.constexpr,  # keys that are skipped together
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D padded to a power of two
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,  # NO_BIAS, SLOPES or ROW
    SKIP: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,  # queries see no key before DocumentStarts
    UPCAST: tl.constexpr,  # see dot
):
    """Compute dk and dv of one block of keys, summed over all query heads that share them.

    One program per (key head, batch, block of keys). One program serves all heads of a group in
    turn, so that their sum needs neither atomics nor a second pass and has a fixed order. Early
    keys come first: under a causal mask they have the most queries after them.
    """
    key_blocks = tl.cdiv(num_keys, BLOCK_N)
    key_start = tl.program_id(0) % key_blocks * BLOCK_N
    batch = tl.program_id(0) // key_blocks % batches
    group = tl.program_id(0) // key_blocks // batches
    groups = heads // HEADS_PER_GROUP
    if SKIP:
        # The order of the key heads stands behind that of the query heads.
        group = tl.load(HeadOrder + heads + group)
    K += tl.cast(batch, tl.int64) * k_stride_b + tl.cast(group, tl.int64) * k_stride_h
    V += tl.cast(batch, tl.int64) * v_stride_b + tl.cast(group, tl.int64) * v_stride_h
    k = load_tile(K, key_start, k_stride_s, num_keys, BLOCK_N, D, BLOCK_D, True)
    v = load_tile(V, key_start, v_stride_s, num_keys, BLOCK_N, D, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    query_tiles = tl.cdiv(num_queries, QUERY_TILE)
    # Keys before the first query: query i stands at position i + earlier_keys.
    earlier_keys = num_keys - num_queries
    # Queries before this one: those after it belong to documents that begin after these keys.
    last_query = num_queries
    if DOCUMENTS:
        DocumentStarts += tl.cast(batch, tl.int64) * num_queries
        last_query = count_starts(DocumentStarts, key_start + BLOCK_N - 1, num_queries)

    for member in range(0, HEADS_PER_GROUP):
        head = group * HEADS_PER_GROUP + member
        batch_head = batch * heads + head
        slope = 0.0
        if BIAS == SLOPES:
            slope = tl.load(Slopes + head) * LOG2E

        # The first loop has the queries that stand among the keys of the block, begin ..
        # begin_whole, for which the causal mask cuts it. Every later query sees the whole block.
        # With a bias row, begin_whole is where all of the block lies beyond the end of the row, and
        # no lookup is needed. The second loop has the others: begin_whole .. stop, or those in the
        # list if SKIP.
        WHOLE_BIAS: tl.constexpr = ROW_END if BIAS == ROW and CAUSAL else BIAS
        begin = 0
        stop = last_query
        begin_whole = 0
        if CAUSAL:
            begin = tl.maximum(key_start - earlier_keys, 0) // BLOCK_M * BLOCK_M
            last_key = key_start + BLOCK_N - 1
            if WHOLE_BIAS == ROW_END:
                last_key += row_reach
            begin_whole = tl.cdiv(tl.maximum(last_key - earlier_keys, 0), BLOCK_M) * BLOCK_M
            begin_whole = tl.minimum(tl.maximum(begin_whole, begin), stop)
        begin_listed = begin_whole
        if SKIP:
            first = 0
            key_tile = key_start // KEY_TILE
            key_tiles = tl.cdiv(num_keys, KEY_TILE)
            if CAUSAL:
                # The first tile of queries that does not have these keys among its own tiles.
                first = tl.cdiv(tl.maximum((key_tile + 1) * KEY_TILE - earlier_keys, 0), QUERY_TILE)
                begin_whole = tl.minimum(first * QUERY_TILE, last_query)
            thresholds = tl.cast(batch_head, tl.int64) * query_tiles * key_tiles
            lists = tl.cast(batch_head * key_blocks + key_start // BLOCK_N, tl.int64)
            stop = QUERY_TILE * list_query_tiles(
                QueryTiles + lists * query_tiles, Thresholds + thresholds,
                key_tile, first, query_tiles, key_tiles,
            )  # fmt: skip
            begin_listed = 0
        QHead = Q + tl.cast(batch, tl.int64) * q_stride_b + tl.cast(head, tl.int64) * q_stride_h
        DOutHead = DOut + tl.cast(batch_head, tl.int64) * D
        d_out_stride_s = batches * heads * D
        BiasRowHead = BiasRow + head * (2 * row_reach + 1)
        lists_at = QueryTiles
        thresholds_at = Thresholds
        key_norm = 0.0
        if SKIP:
            lists_at += lists * query_tiles
            thresholds_at += thresholds + key_tile
            key_norm = tl.load(KeyNorms + (batch * groups + group) * key_tiles + key_tile)
        if CAUSAL:
            dk, dv = accumulate_over_queries(
                dk, dv, k, v, QHead, q_stride_s, DOutHead, d_out_stride_s, Lse, Delta,
                DocumentStarts, RowBounds, thresholds_at, lists_at, key_norm,
                begin, begin_whole, key_start, batch_head, slope, BiasRowHead,
                row_reach, Seed, scale * LOG2E, dropout_p, batches * heads, num_queries, num_keys,
                True, BLOCK_M, BLOCK_N, QUERY_TILE, KEY_TILE, D, BLOCK_D,
                CAUSAL, BIAS, False, DROPOUT, DOCUMENTS, UPCAST,
            )  # fmt: skip
        dk, dv = accumulate_over_queries(
            dk, dv, k, v, QHead, q_stride_s, DOutHead, d_out_stride_s, Lse, Delta,
            DocumentStarts, RowBounds, thresholds_at, lists_at, key_norm,
            begin_listed, stop, key_start, batch_head, slope, BiasRowHead,
            row_reach, Seed, scale * LOG2E, dropout_p, batches * heads, num_queries, num_keys,
            False, BLOCK_M, BLOCK_N, QUERY_TILE, KEY_TILE, D, BLOCK_D,
            CAUSAL, WHOLE_BIAS, SKIP, DROPOUT, DOCUMENTS, UPCAST,
        )  # fmt: skip

    # d score / d k is scale * q: the scale is applied once, to the sum.
    offset = tl.cast(batch, tl.int64) * dk_stride_b + tl.cast(group, tl.int64) * dk_stride_h
    store_tile(DK + offset, dk * scale, key_start, dk_stride_s, num_keys, BLOCK_N, D, BLOCK_D)
    store_tile(DV + offset, dv, key_start, dk_stride_s, num_keys, BLOCK_N, D, BLOCK_D)


@triton.jit
def count_starts(DocumentStarts, position, num_queries):
    """Return how many queries of a sequence belong to documents that begin at or before a position.

    These are the first queries, because the starts never fall from one query to the next.
    """
    count = 0
    for chunk in range(0, num_queries, 1024):
        query = chunk + tl.arange(0, 1024)
        starts = load_starts(DocumentStarts, 0, query, num_queries, True)
        seen = (query < num_queries) & (starts <= position)
        count += tl.sum(seen.to(tl.int32), axis=0)
    return count


@triton.jit
def accumulate_over_queries(
    dk,  # [BLOCK_N, BLOCK_D], fp32
    dv,  # [BLOCK_N, BLOCK_D], fp32
    k,  # [BLOCK_N, BLOCK_D]
    v,  # [BLOCK_N, BLOCK_D]
    Q,  # queries of this batch and head
    q_stride_s,
    DOut,  # gradient of the output of this batch and head
    d_out_stride_s,
    Lse,
    Delta,
    DocumentStarts,  # [queries], of this batch; read if DOCUMENTS
    RowBounds,  # this and the next three are read if LISTED
    Thresholds,  # those of this tile of keys: one for every key_tiles elements
    QueryTiles,
    key_norm,  # the largest norm of the keys of this tile
    begin,  # first query, a multiple of BLOCK_M; if LISTED, counted along the list of tiles
    stop,
    key_start,
    batch_head,
    slope,  # times log2(e)
    BiasRow,  # of this head
    row_reach,
    Seed,
    score_scale,  # scale * log2(e)
    dropout_p,
    batch_heads,
    num_queries,
    num_keys,
    MASKED: tl.constexpr,  # the causal mask hides some keys of the block from some of the queries
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    LISTED: tl.constexpr,  # go through the tiles in QueryTiles
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the contributions of queries begin .. stop to dk and dv, and return (dk, dv).

    Scores are computed transposed, [keys, queries], so that their products with q and d_out have
    the keys as rows and need no transposition of their own.
    """
    key = key_start + tl.arange(0, BLOCK_N)
    lse_offset = tl.cast(batch_head, tl.int64) * num_queries
    for step in range(begin, stop, BLOCK_M):
        start = step
        if LISTED:
            query_tile = tl.load(QueryTiles + step // QUERY_TILE)
            start = query_tile * QUERY_TILE + step % QUERY_TILE
        query = start + tl.arange(0, BLOCK_M)
        position = query + num_keys - num_queries
        q = load_tile(Q, start, q_stride_s, num_queries, BLOCK_M, D, BLOCK_D, True)
        # An infinite logsumexp makes every weight of a query zero. That is the mask for queries
        # past the last one, and for queries that skip these keys.
        lse = tl.load(Lse + lse_offset + query, mask=query < num_queries, other=float("inf"))
        if LISTED and CAUSAL:
            bounds = RowBounds + lse_offset + query
            reaches = tl.cast(batch_heads, tl.int64) * num_queries
            row_floor = tl.load(bounds, mask=query < num_queries, other=0.0)
            norm_reach = tl.load(bounds + reaches, mask=query < num_queries, other=0.0)
            threshold = tl.load(
                Thresholds + tl.cast(query_tile, tl.int64) * tl.cdiv(num_keys, KEY_TILE)
            )
            skips = row_skips(row_floor, norm_reach, key_norm, threshold)
            lse = tl.where(skips, float("inf"), lse)
        scores = dot(k, tl.trans(q), UPCAST) * score_scale
        scores = add_bias(
            scores, position[None, :], key[:, None], slope, BiasRow, row_reach, CAUSAL, BIAS
        )
        weights = tl.math.exp2(scores - lse[None, :])
        if MASKED:
            weights = tl.where(position[None, :] >= key[:, None], weights, 0.0)
        if DOCUMENTS:
            doc_starts = load_starts(DocumentStarts, 0, query, num_queries, DOCUMENTS)
            weights = tl.where(key[:, None] >= doc_starts[None, :], weights, 0.0)
        d_out = load_tile(DOut, start, d_out_stride_s, num_queries, BLOCK_M, D, BLOCK_D, True)
        d_weights = dot(v, tl.trans(d_out), UPCAST)
        kept = weights
        if DROPOUT:
            keep = dropout_keeps(Seed, batch_head, query[None, :], key[:, None], dropout_p)
            kept = tl.where(keep, weights * (1 / (1 - dropout_p)), 0.0)
            d_weights = tl.where(keep, d_weights * (1 / (1 - dropout_p)), 0.0)
        dv += dot(kept.to(d_out.dtype), d_out, UPCAST)
        # The gradient of the softmax. Delta is the sum over keys of weights * d_weights.
        delta = tl.load(Delta + lse_offset + query, mask=query < num_queries, other=0.0)
        d_scores = weights * (d_weights - delta[None, :])
        dk += dot(d_scores.to(q.dtype), q, UPCAST)
    return dk, dv
