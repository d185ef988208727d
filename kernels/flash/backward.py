"""The backward kernels: gradients of queries, of keys and values, and of each head's bias row."""

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
    list_query_tiles,
    load_starts,
    load_tile,
    row_skips,
    store_tile,
)

# ---- backward dq ----
# The backward kernel for queries, and the kernel that prepares delta for all backward kernels.


# Triton compiles these functions from their source; see device.py on annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def delta_kernel(
    Out,  # [queries, B, H, D], dense
    DOut,  # [queries, B, H, D], dense
    Delta,  # output, [B, H, padded queries], fp32
    batches,
    heads,
    num_queries,
    padded_queries,  # a multiple of BLOCK_M
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute Delta = the sum over D of out * d_out.

    Delta equals the sum over keys of weights * d_weights, which the gradient of the softmax
    subtracts from every d_weight of a row (FlashAttention-2, algorithm 2, line 4). The equality
    also holds with dropout, because out was computed from the weights that dropout kept. For
    queries past the last one, Delta is zero.
    """
    tiles = padded_queries // BLOCK_M
    batch_head = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * BLOCK_M
    # Dense [S, B, H, D]: batch_head numbers the vectors of one position.
    offset = tl.cast(batch_head, tl.int64) * D
    stride = batches * heads * D
    out = load_tile(Out + offset, start, stride, num_queries, BLOCK_M, D, BLOCK_D, True)
    d_out = load_tile(DOut + offset, start, stride, num_queries, BLOCK_M, D, BLOCK_D, True)
    pointers = Delta + tl.cast(batch_head, tl.int64) * padded_queries + start
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), axis=1)
    tl.store(pointers + tl.arange(0, BLOCK_M), delta)


@triton.jit
def dq_kernel(
    Q,  # [queries, B, H, D], any strides but a dense D
    K,  # [keys, B, G, D], likewise
    V,  # [keys, B, G, D], likewise
    DOut,  # [queries, B, H, D], dense
    Lse,  # [B, H, padded queries], fp32, base 2, from forward_kernel
    Delta,  # [B, H, padded queries], fp32, from delta_kernel
    Slopes,  # [H], fp32; read if BIAS is SLOPES
    BiasRow,  # [H, 2 * row_reach + 1], fp32, times log2(e); read if BIAS is ROW
    Seed,  # [1], int64; read if DROPOUT
    DocumentStarts,  # [B, queries], int32; read if DOCUMENTS
    HeadOrder,  # [H + G], int32; this and the next four are read if SKIP
    KeyNorms,  # [B, G, key tiles], fp32
    RowBounds,  # [2, B, H, padded queries], fp32, from the forward kernel
    Thresholds,  # [B, H, query tiles, key tiles], fp32, likewise
    KeyTiles,  # [B, H, query tiles, key tiles + 1], int32, likewise
    DQ,  # output, [queries, B, H, D], any strides but a dense D
    BiasSums,  # output if BIAS_GRAD, [2, B, H, padded queries], fp32: see accumulate_over_keys;
    # with slopes, the first half is the sum of d_score * |distance|, which the host negates
    dq_stride_s,
    dq_stride_b,
    dq_stride_h,
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
    padded_queries,  # a multiple of the block sizes
    row_reach,  # distance at which the bias row ends
    HEADS_PER_GROUP: tl.constexpr,  # query heads that share a key head
    BLOCK_M: tl.constexpr,  # queries of the program
    BLOCK_N: tl.constexpr,  # keys of one step of the loop
    QUERY_TILE: tl.constexpr,  # queries for which skipping is decided together
    KEY_TILE: tl.constexpr,  # keys that are skipped together
    BIAS_GRAD: tl.constexpr,  # slopes or bias rows require a gradient
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D padded to a power of two
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,  # NO_BIAS, SLOPES or ROW
    COLUMN_BIAS: tl.constexpr,  # see attend_to_keys
    SKIP: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,  # queries see no key before DocumentStarts
    UPCAST: tl.constexpr,  # see dot
):
    """Compute dq of one block of queries and, if BIAS_GRAD, its share of the gradient of the bias.

    One program per (query head, batch, block of queries), ordered as in the forward kernel. dq has
    a kernel of its own, although that kernel must recompute the scores: summing dq in the dkdv
    kernel would need atomics, whose order, and so the last bits of dq, would vary between runs.
    """
    query_blocks = tl.cdiv(num_queries, BLOCK_M)
    start = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    batch = tl.program_id(0) // query_blocks % batches
    head = tl.program_id(0) // query_blocks // batches
    if SKIP:
        head = tl.load(HeadOrder + head)
    batch_head = batch * heads + head
    query = start + tl.arange(0, BLOCK_M)
    # This block's numbers in tensors [B, H, padded queries].
    numbers = tl.cast(batch_head, tl.int64) * padded_queries + query
    all_numbers = tl.cast(batches * heads, tl.int64) * padded_queries
    group = head // HEADS_PER_GROUP
    Q += tl.cast(batch, tl.int64) * q_stride_b + tl.cast(head, tl.int64) * q_stride_h
    K += tl.cast(batch, tl.int64) * k_stride_b + tl.cast(group, tl.int64) * k_stride_h
    V += tl.cast(batch, tl.int64) * v_stride_b + tl.cast(group, tl.int64) * v_stride_h
    q = load_tile(Q, start, q_stride_s, num_queries, BLOCK_M, D, BLOCK_D, True)
    d_out = load_tile(
        DOut + tl.cast(batch_head, tl.int64) * D, start,
        batches * heads * D, num_queries, BLOCK_M, D, BLOCK_D, True,
    )  # fmt: skip
    lse = tl.load(Lse + numbers)
    delta = tl.load(Delta + numbers)
    slope = 0.0
    if BIAS == SLOPES:
        slope = tl.load(Slopes + head) * LOG2E
    BiasRow += head * (2 * row_reach + 1)

    # The first loop covers keys for which no query needs a mask: begin .. stop_whole, or those in
    # the list if SKIP. The second covers stop_whole .. stop.
    first_position = start + num_keys - num_queries
    query_tile = start // QUERY_TILE
    tile_position = query_tile * QUERY_TILE + num_keys - num_queries
    stop = num_keys
    stop_whole = stop // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.minimum(start + BLOCK_M, num_queries) + num_keys - num_queries
        stop_whole = first_position // BLOCK_N * BLOCK_N
    # Two loops and no more: with a third, ptxas serializes every wgmma (C7515). So under a causal
    # mask the keys within reach of the bias row go through the masked loop, and the first loop
    # covers keys beyond the end of the row for every query, which need no lookup.
    WHOLE_BIAS: tl.constexpr = ROW_END if BIAS == ROW and CAUSAL else BIAS
    if WHOLE_BIAS == ROW_END:
        stop_far = tl.maximum(first_position - row_reach + 1, 0) // BLOCK_N * BLOCK_N
        stop_whole = tl.minimum(stop_far, stop_whole)
    begin = 0
    doc_starts = load_starts(DocumentStarts, batch, query, num_queries, DOCUMENTS)
    # The keys of the first loop: along the list if SKIP, from key 0 if not.
    count = stop_whole
    row_floor = lse
    norm_reach = lse
    if SKIP:
        # The own tiles of the query tile that this block belongs to: see forward_kernel.
        tile_end = tl.minimum((query_tile + 1) * QUERY_TILE, num_queries) - 1
        own_end = tl.maximum(tile_end + num_keys - num_queries, 0) // KEY_TILE + 1
        stop_whole = tl.maximum(tile_position, 0) // KEY_TILE * KEY_TILE
        stop = tl.minimum(stop, own_end * KEY_TILE)
        key_tiles = tl.cdiv(num_keys, KEY_TILE)
        KeyNorms += (batch * (heads // HEADS_PER_GROUP) + group) * key_tiles
        pair = tl.cast(batch_head * tl.cdiv(num_queries, QUERY_TILE) + query_tile, tl.int64)
        Thresholds += pair * key_tiles
        KeyTiles += pair * (key_tiles + 1)
        count = tl.load(KeyTiles) * KEY_TILE
        if CAUSAL:
            row_floor = tl.load(RowBounds + numbers)
            norm_reach = tl.load(RowBounds + all_numbers + numbers)
    begin_masked = stop_whole
    if DOCUMENTS:
        # As in forward_kernel.
        first_start = tl.load(DocumentStarts + tl.cast(batch, tl.int64) * num_queries + start)
        begin_masked = tl.maximum(stop_whole, first_start // BLOCK_N * BLOCK_N)
        if not SKIP:
            begin = first_start // BLOCK_N * BLOCK_N
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M], dtype=tl.float32)
    sums_after = tl.zeros([BLOCK_M], dtype=tl.float32)
    mean_distance = tl.zeros([BLOCK_M], dtype=tl.float32)
    dq, sums, sums_after, mean_distance = accumulate_over_keys(
        dq, sums, sums_after, mean_distance, q, d_out, lse, delta, K, V, k_stride_s, v_stride_s,
        begin, count,
        query, tile_position, doc_starts, batch_head, slope, BiasRow, row_reach, Seed,
        scale * LOG2E, dropout_p,
        num_queries, num_keys, KeyNorms, Thresholds, KeyTiles, row_floor, norm_reach,
        SKIP and not CAUSAL, BLOCK_N, KEY_TILE, BIAS_GRAD, D, BLOCK_D,
        CAUSAL, WHOLE_BIAS, COLUMN_BIAS, SKIP, DROPOUT, DOCUMENTS, UPCAST,
    )  # fmt: skip
    # stop_whole is never below 0. The maximum keeps ptxas from merging the counters of the loops,
    # after which it would serialize every wgmma (C7515).
    dq, sums, sums_after, mean_distance = accumulate_over_keys(
        dq, sums, sums_after, mean_distance, q, d_out, lse, delta, K, V, k_stride_s, v_stride_s,
        tl.maximum(begin_masked, 0), stop,
        query, tile_position, doc_starts, batch_head, slope, BiasRow, row_reach, Seed,
        scale * LOG2E, dropout_p,
        num_queries, num_keys, KeyNorms, Thresholds, KeyTiles, row_floor, norm_reach,
        True, BLOCK_N, KEY_TILE, BIAS_GRAD, D, BLOCK_D,
        CAUSAL, BIAS, COLUMN_BIAS, False, DROPOUT, DOCUMENTS, UPCAST,
    )  # fmt: skip

    DQ += tl.cast(batch, tl.int64) * dq_stride_b + tl.cast(head, tl.int64) * dq_stride_h
    store_tile(DQ, dq * scale, start, dq_stride_s, num_queries, BLOCK_M, D, BLOCK_D)
    if BIAS_GRAD:
        if BIAS == SLOPES:
            # A query's score gradients would sum to zero if its delta were exact, but delta comes
            # from an output rounded to the dtype of q, so every d_score is off by weight * error.
            # Multiplied by the distance, this error would exceed all other rounding: subtract it.
            sums -= sums_after * mean_distance
        tl.store(BiasSums + numbers, sums)
        tl.store(BiasSums + all_numbers + numbers, sums_after)


@triton.jit
def accumulate_over_keys(
    dq,  # [BLOCK_M, BLOCK_D], fp32
    sums,  # [BLOCK_M], fp32
    sums_after,  # [BLOCK_M], fp32
    mean_distance,  # [BLOCK_M], fp32
    q,  # [BLOCK_M, BLOCK_D]
    d_out,  # [BLOCK_M, BLOCK_D]
    lse,  # [BLOCK_M], fp32, base 2
    delta,  # [BLOCK_M], fp32
    K,  # keys of this batch and head
    V,
    k_stride_s,
    v_stride_s,
    begin,  # first key, a multiple of BLOCK_N; if LISTED, counted along the list of tiles
    stop,
    query,  # [BLOCK_M]
    tile_position,  # position of the first query of the tile that these belong to
    doc_starts,  # [BLOCK_M], int32: position of the first token of each query's document
    batch_head,
    slope,  # times log2(e)
    BiasRow,  # of this head
    row_reach,
    Seed,
    score_scale,  # scale * log2(e)
    dropout_p,
    num_queries,
    num_keys,
    KeyNorms,  # [key tiles]; this and the next four are read if LISTED
    Thresholds,  # [key tiles]
    KeyTiles,  # [key tiles + 1]
    row_floor,  # [BLOCK_M], see row_skips
    norm_reach,  # [BLOCK_M]
    MASKED: tl.constexpr,  # some keys of the range do not exist or are hidden from some queries
    BLOCK_N: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMN_BIAS: tl.constexpr,
    LISTED: tl.constexpr,  # go through the tiles in KeyTiles
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the contributions of keys begin .. stop and return (dq, sums, sums_after, mean_distance).

    The sums are each query's share of the gradient of the bias. For slopes, `sums` is the sum of
    d_score * |distance|, `sums_after` the sum of d_score, and `mean_distance` the sum of weight *
    |distance|; dq_kernel computes the query's share from the three. For bias rows, `sums` is the
    gradient of the last entry, for distances of row_reach and more, and `sums_after` the gradient
    of the first entry, for distances of -row_reach and less. `row_gradient_kernel` covers the
    entries between them.
    """
    position = (query + num_keys - num_queries)[:, None]
    for step in range(begin, stop, BLOCK_N):
        key_start = step
        row_lse = lse
        if LISTED:
            key_tile = tl.load(KeyTiles + 1 + step // KEY_TILE)
            key_start = key_tile * KEY_TILE + step % KEY_TILE
            if CAUSAL:
                skips = row_skips(
                    row_floor, norm_reach,
                    tl.load(KeyNorms + key_tile), tl.load(Thresholds + key_tile),
                )  # fmt: skip
                row_lse = tl.where(skips, float("inf"), lse)
        if COLUMN_BIAS and BIAS == SLOPES:
            # Make lse relative to the first key of this step, so that the bias of the keys is the
            # same vector in every step.
            row_lse -= slope * (key_start - tile_position).to(tl.float32)
        key = (key_start + tl.arange(0, BLOCK_N))[None, :]
        k = load_tile(K, key_start, k_stride_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        v = load_tile(V, key_start, v_stride_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        d_scores, weights = score_gradients(
            q, k, v, d_out, row_lse, delta, position, key, query[:, None], doc_starts[:, None],
            key_start, batch_head, slope, BiasRow, row_reach, Seed, score_scale, dropout_p,
            num_keys, MASKED, CAUSAL, BIAS, COLUMN_BIAS, DROPOUT, DOCUMENTS, UPCAST,
        )  # fmt: skip
        dq += dot(d_scores.to(k.dtype), k, UPCAST)
        if BIAS_GRAD:
            if BIAS == SLOPES:
                distance = tl.abs((position - key).to(tl.float32))
                sums += tl.sum(d_scores * distance, axis=1)
                sums_after += tl.sum(d_scores, axis=1)
                mean_distance += tl.sum(weights * distance, axis=1)
            else:
                sums += tl.sum(tl.where(position - key >= row_reach, d_scores, 0.0), axis=1)
                if not CAUSAL:
                    before = position - key <= -row_reach
                    sums_after += tl.sum(tl.where(before, d_scores, 0.0), axis=1)
    return dq, sums, sums_after, mean_distance


@triton.jit
def score_gradients(
    q,  # [queries, BLOCK_D]
    k,  # [keys, BLOCK_D]
    v,  # [keys, BLOCK_D]
    d_out,  # [queries, BLOCK_D]
    lse,  # [queries], fp32, base 2
    delta,  # [queries], fp32
    position,  # [queries, 1]
    key,  # [1, keys]
    query,  # [queries, 1]
    doc_starts,  # [queries, 1]
    key_start,
    batch_head,
    slope,
    BiasRow,
    row_reach,
    Seed,
    score_scale,
    dropout_p,
    num_keys,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMN_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return (d loss / d score, weights), both [queries, keys] in fp32.

    The weights are recomputed from lse and are returned as they are before dropout.
    """
    weights = tl.math.exp2(
        log_weights(
            dot(q, tl.trans(k), UPCAST), lse[:, None], position, key, key_start, slope, BiasRow,
            row_reach, score_scale, CAUSAL, BIAS, COLUMN_BIAS,
        )
    )  # fmt: skip
    if MASKED:
        # No query lies past the last key. Relative to the step's first key, keys are constants.
        causal = position - key_start >= key - key_start
        weights = tl.where(causal if CAUSAL else key < num_keys, weights, 0.0)
    if DOCUMENTS:
        weights = tl.where(key >= doc_starts, weights, 0.0)
    d_weights = dot(d_out, tl.trans(v), UPCAST)
    if DROPOUT:
        keep = dropout_keeps(Seed, batch_head, query, key, dropout_p)
        d_weights = tl.where(keep, d_weights * (1 / (1 - dropout_p)), 0.0)
    return weights * (d_weights - delta[:, None]), weights


@triton.jit
def log_weights(
    products,  # of queries and keys, in either orientation; all arguments below broadcast to it
    lse,  # fp32, base 2; infinite for queries whose weights are to be zero
    position,
    key,
    origin,  # read with COLUMN_BIAS: the position that lse is relative to
    slope,  # times log2(e)
    BiasRow,  # of this head
    row_reach,
    score_scale,  # scale * log2(e)
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMN_BIAS: tl.constexpr,
):
    """Return scores - lse, the logarithms of the weights to base 2.

    With COLUMN_BIAS, scores and lse both omit the same number in each row: see attend_to_keys.
    """
    if COLUMN_BIAS and BIAS == SLOPES:
        return products * score_scale + slope * (key - origin).to(tl.float32) - lse
    scores = products * score_scale
    return add_bias(scores, position, key, slope, BiasRow, row_reach, CAUSAL, BIAS) - lse


# ---- backward dkdv ----
# The backward kernel for keys and values: one program per block of keys loops over queries.


@triton.jit
def dkdv_kernel(
    Q,  # [queries, B, H, D], any strides but a dense D
    K,  # [keys, B, G, D], likewise
    V,  # [keys, B, G, D], likewise
    DOut,  # [queries, B, H, D], dense
    Lse,  # [B, H, padded queries], fp32, base 2, from forward_kernel
    Delta,  # [B, H, padded queries], fp32, from delta_kernel
    Slopes,  # [H], fp32; read if BIAS is SLOPES
    BiasRow,  # [H, 2 * row_reach + 1], fp32, times log2(e); read if BIAS is ROW
    Seed,  # [1], int64; read if DROPOUT
    DocumentStarts,  # [B, queries], int32; read if DOCUMENTS
    HeadOrder,  # [H + G], int32; this and the next are read if SKIP
    Thresholds,  # [B, H, query tiles, key tiles], fp32, from the forward kernel
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
    padded_queries,  # a multiple of the block sizes
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
    COLUMN_BIAS: tl.constexpr,  # see attend_to_keys
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
    if SKIP:
        # The order of the key heads follows that of the query heads.
        group = tl.load(HeadOrder + heads + group)
    K += tl.cast(batch, tl.int64) * k_stride_b + tl.cast(group, tl.int64) * k_stride_h
    V += tl.cast(batch, tl.int64) * v_stride_b + tl.cast(group, tl.int64) * v_stride_h
    k = load_tile(K, key_start, k_stride_s, num_keys, BLOCK_N, D, BLOCK_D, True)
    v = load_tile(V, key_start, v_stride_s, num_keys, BLOCK_N, D, BLOCK_D, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    query_tiles = tl.cdiv(num_queries, QUERY_TILE)
    # Number of keys before the first query: query i has the position i + earlier_keys.
    earlier_keys = num_keys - num_queries
    # Only queries before last_query: the others belong to documents that begin after these keys.
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

        # The first loop covers the queries at the positions of the block's keys, begin ..
        # begin_whole, from which the causal mask hides some keys. Every later query sees the whole
        # block. With a bias row, begin_whole is the first query for which the whole block lies
        # beyond the end of the row, so that no lookup is needed. The second loop covers the other
        # queries: begin_whole .. stop, or those in the list if SKIP.
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
        lists_at = QueryTiles
        if SKIP:
            first = 0
            key_tile = key_start // KEY_TILE
            key_tiles = tl.cdiv(num_keys, KEY_TILE)
            if CAUSAL:
                # The first tile of queries that does not have these keys among its own tiles.
                first = tl.cdiv(tl.maximum((key_tile + 1) * KEY_TILE - earlier_keys, 0), QUERY_TILE)
                begin_whole = tl.minimum(first * QUERY_TILE, last_query)
            thresholds = tl.cast(batch_head, tl.int64) * query_tiles * key_tiles
            lists_at += (
                tl.cast(batch_head * key_blocks + key_start // BLOCK_N, tl.int64) * query_tiles
            )
            stop = QUERY_TILE * list_query_tiles(
                lists_at, Thresholds + thresholds, key_tile, first, query_tiles, key_tiles
            )
            begin_listed = 0
        QHead = Q + tl.cast(batch, tl.int64) * q_stride_b + tl.cast(head, tl.int64) * q_stride_h
        DOutHead = DOut + tl.cast(batch_head, tl.int64) * D
        d_out_stride_s = batches * heads * D
        numbers = tl.cast(batch_head, tl.int64) * padded_queries
        BiasRowHead = BiasRow + head * (2 * row_reach + 1)
        if CAUSAL:
            dk, dv = accumulate_over_queries(
                dk, dv, k, v, QHead, q_stride_s, DOutHead, d_out_stride_s, Lse + numbers,
                Delta + numbers, DocumentStarts, lists_at, begin, begin_whole, key_start,
                batch_head, slope, BiasRowHead, row_reach, Seed, scale * LOG2E, dropout_p,
                num_queries, num_keys, True, BLOCK_M, BLOCK_N, QUERY_TILE, D, BLOCK_D,
                CAUSAL, BIAS, COLUMN_BIAS, False, DROPOUT, DOCUMENTS, UPCAST,
            )  # fmt: skip
        dk, dv = accumulate_over_queries(
            dk, dv, k, v, QHead, q_stride_s, DOutHead, d_out_stride_s, Lse + numbers,
            Delta + numbers, DocumentStarts, lists_at, tl.maximum(begin_listed, 0), stop, key_start,
            batch_head, slope, BiasRowHead, row_reach, Seed, scale * LOG2E, dropout_p,
            num_queries, num_keys, False, BLOCK_M, BLOCK_N, QUERY_TILE, D, BLOCK_D,
            CAUSAL, WHOLE_BIAS, COLUMN_BIAS, SKIP, DROPOUT, DOCUMENTS, UPCAST,
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
    Lse,  # of this batch and head, like Delta
    Delta,
    DocumentStarts,  # [queries], of this batch; read if DOCUMENTS
    QueryTiles,  # read if LISTED
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
    num_queries,
    num_keys,
    MASKED: tl.constexpr,  # the causal mask hides some keys of the block from some of the queries
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMN_BIAS: tl.constexpr,
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
    for step in range(begin, stop, BLOCK_M):
        start = step
        if LISTED:
            start = tl.load(QueryTiles + step // QUERY_TILE) * QUERY_TILE + step % QUERY_TILE
        query = start + tl.arange(0, BLOCK_M)
        position = query + num_keys - num_queries
        tile_position = start // QUERY_TILE * QUERY_TILE + num_keys - num_queries
        q = load_tile(Q, start, q_stride_s, num_queries, BLOCK_M, D, BLOCK_D, True)
        # A query that skips these keys by itself (row_skips) still gives them a weight here. Each
        # query decides for itself only to keep later tokens out of outputs and dq; the gradients of
        # keys are sums over later tokens anyway.
        weights = tl.math.exp2(
            log_weights(
                dot(k, tl.trans(q), UPCAST), tl.load(Lse + query)[None, :], position[None, :],
                key[:, None], tile_position, slope, BiasRow, row_reach, score_scale,
                CAUSAL, BIAS, COLUMN_BIAS,
            )
        )  # fmt: skip
        if MASKED:
            # Relative to the step's first query, queries are constants, which take no registers.
            first = start + num_keys - num_queries
            sees = (position - first)[None, :] >= (key - first)[:, None]
            weights = tl.where(sees, weights, 0.0)
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
        d_scores = weights * (d_weights - tl.load(Delta + query)[None, :])
        dk += dot(d_scores.to(q.dtype), q, UPCAST)
    return dk, dv


# Triton compiles these functions from their source; see device.py on annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def row_gradient_kernel(
    Q,  # [queries, B, H, D], any strides but a dense D
    K,  # [keys, B, G, D], likewise
    V,  # [keys, B, G, D], likewise
    DOut,  # [queries, B, H, D], dense
    Lse,  # [B, H, padded queries], fp32, base 2, from forward_kernel
    Delta,  # [B, H, padded queries], fp32, from delta_kernel
    Slopes,  # not read: the first ten arguments are those of all backward kernels
    BiasRow,  # [H, 2 * row_reach + 1], fp32, times log2(e)
    Seed,  # [1], int64; read if DROPOUT
    DocumentStarts,  # [B, queries], int32; read if DOCUMENTS
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
    padded_queries,  # a multiple of the block sizes
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
    COLUMN_BIAS: tl.constexpr,  # not read, like SKIP: both are for slopes
    SKIP: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,  # queries see no key before DocumentStarts
    UPCAST: tl.constexpr,  # see dot
):
    """Sum d_score over all queries, for every distance below row_reach.

    The matrix of scores is divided into diagonals of blocks. A program owns one diagonal: for every
    block of queries, the block of keys that lies diagonal * BLOCK_N before it. Element (r, c) has
    the distance diagonal * BLOCK_N + r - c in every block of the diagonal. So the blocks are summed
    element by element, in registers, and no scatter by distance is needed.

    The sum is stored sheared: row r is shifted by r, which puts equal distances into the same
    column (BLOCK_N - 1 + r - c). The host then sums over rows and splits.
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
        # The block may begin before the first key or end after the last: load_tile, MASKED and the
        # condition below leave out keys that do not exist.
        key_start = start + num_keys - num_queries - diagonal * BLOCK_N
        key = key_start + columns
        numbers = tl.cast(batch_head, tl.int64) * padded_queries + query
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
        doc_starts = load_starts(DocumentStarts, batch, query, num_queries, DOCUMENTS)
        d_scores, _ = score_gradients(
            q, k, v, d_out, tl.load(Lse + numbers), tl.load(Delta + numbers), position[:, None],
            key[None, :], query[:, None], doc_starts[:, None], key_start, batch_head, 0.0, BiasRow,
            row_reach, Seed, scale * LOG2E, dropout_p,
            num_keys, True, CAUSAL, BIAS, False, DROPOUT, DOCUMENTS, UPCAST,
        )  # fmt: skip
        acc += tl.where(key[None, :] >= 0, d_scores, 0.0)

    distance = diagonal * BLOCK_N + rows[:, None] - columns[None, :]
    block = (head * diagonals + diagonal - first_diagonal) * splits + split
    Sheared += tl.cast(block, tl.int64) * (BLOCK_M * 2 * BLOCK_N)
    pointers = (
        Sheared + rows[:, None] * (2 * BLOCK_N) + (BLOCK_N - 1 - columns)[None, :] + rows[:, None]
    )
    # Distances of row_reach or more belong to the ends of the row, which dq_kernel sums.
    tl.store(pointers, acc, mask=tl.abs(distance) < row_reach)
