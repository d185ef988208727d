"""The forward kernel: attention output and logsumexp of one tile of queries."""

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
    list_key_tiles,
    load_starts,
    load_tile,
    longest_row_norm,
    row_bounds,
    row_skips,
    store_tile,
)


@triton.jit
def forward_kernel(
    Q,  # [queries, B, H, D], any strides but a dense D
    K,  # [keys, B, G, D], likewise
    V,  # [keys, B, G, D], likewise
    Out,  # output, [queries, B, H, D], dense
    Lse,  # output, [B, H, padded queries], fp32, base 2: logsumexp of each row of the scores in
    # attend_to_keys
    Slopes,  # [H], fp32; read if BIAS is SLOPES
    BiasRow,  # [H, 2 * row_reach + 1], fp32, times log2(e); read if BIAS is ROW
    Seed,  # [1], int64; read if DROPOUT
    DocumentStarts,  # [B, queries], int32; read if DOCUMENTS
    KeyNorms,  # [B, G, key tiles], fp32; this and all below are read or written if SKIP
    ValueNorms,  # [B, G, key tiles], fp32
    HeadOrder,  # [H + G], int32: query heads by ascending slope, then key heads
    RowBounds,  # output if causal, [2, B, H, padded queries], fp32: floors, reaches (see row_skips)
    Thresholds,  # output, [B, H, query tiles, key tiles], fp32: see list_key_tiles
    KeyTiles,  # output, [B, H, query tiles, key tiles + 1], int32: likewise
    score_scale,  # scale * log2(e)
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
    BLOCK_M: tl.constexpr,  # queries of the program
    BLOCK_N: tl.constexpr,  # keys of one step of the loop
    KEY_TILE: tl.constexpr,  # keys that are skipped together, a multiple of BLOCK_N
    TRAINED_SLOPES: tl.constexpr,  # slopes require a gradient
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D padded to a power of two
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,  # NO_BIAS, SLOPES or ROW
    COLUMN_BIAS: tl.constexpr,  # see attend_to_keys
    SKIP: tl.constexpr,  # skip tiles of keys that cannot matter
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,  # queries see no key before DocumentStarts
    UPCAST: tl.constexpr,  # see dot
):
    """Compute one tile of queries: its output, its logsumexp and, if SKIP, the tiles it visits.

    One program per (query head, batch, query tile); the head varies slowest. Programs start in the
    order of their ids, so heads with small slopes (which visit most tiles) start before heads with
    large ones, and late queries (with the most keys before them) before early ones: the programs
    that finish last are short, and no multiprocessor is left alone with a long one. Programs with
    neighboring ids read the same keys and values, which stay in the L2 cache.
    """
    query_tiles = tl.cdiv(num_queries, BLOCK_M)
    tile = query_tiles - 1 - tl.program_id(0) % query_tiles
    batch = tl.program_id(0) // query_tiles % batches
    head = tl.program_id(0) // query_tiles // batches
    if SKIP:
        head = tl.load(HeadOrder + head)
    batch_head = batch * heads + head
    Q += tl.cast(batch, tl.int64) * q_stride_b + tl.cast(head, tl.int64) * q_stride_h
    group = head // HEADS_PER_GROUP
    K += tl.cast(batch, tl.int64) * k_stride_b + tl.cast(group, tl.int64) * k_stride_h
    V += tl.cast(batch, tl.int64) * v_stride_b + tl.cast(group, tl.int64) * v_stride_h
    slope = 0.0
    if BIAS == SLOPES:
        slope = tl.load(Slopes + head) * LOG2E
    BiasRow += head * (2 * row_reach + 1)

    start = tile * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    # This tile's numbers in tensors [B, H, padded queries], whose last tile is whole.
    numbers = tl.cast(batch_head * query_tiles + tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_position = start + num_keys - num_queries
    last_position = tl.minimum(start + BLOCK_M, num_queries) - 1 + num_keys - num_queries
    # The queries' own tiles hold the keys at their positions. Without a causal mask there may be
    # more queries than keys; queries before the first key take tile 0 as their own.
    own_first = tl.maximum(first_position, 0) // KEY_TILE
    own_end = tl.maximum(last_position, 0) // KEY_TILE + 1
    near = own_first * KEY_TILE
    stop = tl.minimum(own_end * KEY_TILE, num_keys)
    if CAUSAL:
        stop = last_position + 1
    # With a bias row, the first loop also covers the keys within its reach. Keys before `near` lie
    # beyond the end of the row for every query, so the second loop needs no lookup.
    WHOLE_BIAS: tl.constexpr = ROW_END if BIAS == ROW and CAUSAL else BIAS
    if WHOLE_BIAS == ROW_END:
        stop_far = tl.maximum(first_position - row_reach + 1, 0) // BLOCK_N * BLOCK_N
        near = tl.minimum(near, stop_far)
    # Keys before the first query's document are hidden from all queries, so both loops begin no
    # earlier than the block of keys in which that document begins.
    begin = 0
    begin_near = near
    first_start = 0
    doc_starts = load_starts(DocumentStarts, batch, queries, num_queries, DOCUMENTS)
    if DOCUMENTS:
        first_start = tl.load(DocumentStarts + tl.cast(batch, tl.int64) * num_queries + start)
        begin = first_start // BLOCK_N * BLOCK_N
        begin_near = tl.maximum(near, begin)

    q = load_tile(Q, start, q_stride_s, num_queries, BLOCK_M, D, BLOCK_D, True)
    # The accumulators are fp32 for inputs of any dtype, since thousands of terms are added to them.
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if DOCUMENTS:
        # Below every finite score, but itself finite: the first keys may all be hidden from a row.
        row_max = tl.full([BLOCK_M], -3.0e38, dtype=tl.float32)
    # The own tiles come first. They hold the diagonal, where ALiBi's weights are largest, so their
    # logsumexp is a good lower bound of the whole row's and decides what else must be visited. Only
    # in these tiles does the causal mask hide keys, so all loops below run without that mask.
    acc, row_sum, row_max = attend_to_keys(
        acc, row_sum, row_max, q, K, V, begin_near, stop, k_stride_s, v_stride_s,
        start, first_position, doc_starts, slope, BiasRow, row_reach, Seed, batch_head,
        num_keys, score_scale, dropout_p,
        KeyNorms, Thresholds, KeyTiles, row_max, row_max,
        True, BLOCK_M, BLOCK_N, KEY_TILE, COLUMN_BIAS, D, BLOCK_D,
        CAUSAL, BIAS, False, DROPOUT, DOCUMENTS, UPCAST,
    )  # fmt: skip

    # The other keys: those in the list if SKIP, else those before and after the own tiles. `count`
    # is where the loop ends, counted from the first tile of the list, or from key 0.
    count = near
    row_floor = row_max
    norm_reach = row_max
    if SKIP:
        row_lse = row_max + tl.log2(row_sum)
        if COLUMN_BIAS:
            row_lse -= slope * tl.arange(0, BLOCK_M).to(tl.float32)
        row_floor, norm_reach = row_bounds(q, row_lse, slope, score_scale, BLOCK_M)
        if CAUSAL:
            reaches = tl.cast(batches * heads, tl.int64) * query_tiles * BLOCK_M
            tl.store(RowBounds + numbers, row_floor)
            tl.store(RowBounds + reaches + numbers, norm_reach)
        # The floor must hold for every query of the tile, so it is the lowest of their logsumexps.
        # A NaN becomes -inf, with which nothing is skipped; rows past the last query do not count.
        row_lse = tl.where(row_lse == row_lse, row_lse, float("-inf"))
        floor = tl.min(tl.where(queries < num_queries, row_lse, float("inf")), axis=0)
        key_tiles = tl.cdiv(num_keys, KEY_TILE)
        norms = (batch * (heads // HEADS_PER_GROUP) + group) * key_tiles
        KeyNorms += norms
        # The backward pass visits the same tiles, so its gradients are the gradients of this
        # output.
        pair = tl.cast(batch_head * query_tiles + tile, tl.int64)
        Thresholds += pair * key_tiles
        KeyTiles += pair * (key_tiles + 1)
        count = KEY_TILE * list_key_tiles(
            Thresholds, KeyTiles, K, V, k_stride_s, v_stride_s, KeyNorms, ValueNorms + norms,
            floor, tl.abs(score_scale) * longest_row_norm(q), slope, first_position, last_position,
            own_first, own_end, key_tiles, num_keys, first_start,
            KEY_TILE, BLOCK_M, D, BLOCK_D, TRAINED_SLOPES, CAUSAL, DOCUMENTS,
        )  # fmt: skip
        # The list itself leaves out the tiles that end before the first query's document.
        begin = 0
    # MASKED without a causal mask, since the list may then contain the incomplete last tile.
    acc, row_sum, row_max = attend_to_keys(
        acc, row_sum, row_max, q, K, V, begin, count, k_stride_s, v_stride_s,
        start, first_position, doc_starts, slope, BiasRow, row_reach, Seed, batch_head,
        num_keys, score_scale, dropout_p,
        KeyNorms, Thresholds, KeyTiles, row_floor, norm_reach,
        SKIP and not CAUSAL, BLOCK_M, BLOCK_N, KEY_TILE, COLUMN_BIAS, D, BLOCK_D,
        CAUSAL, WHOLE_BIAS, SKIP, DROPOUT, DOCUMENTS, UPCAST,
    )  # fmt: skip
    if not CAUSAL and not SKIP:
        acc, row_sum, row_max = attend_to_keys(
            acc, row_sum, row_max, q, K, V, stop, num_keys, k_stride_s, v_stride_s,
            start, first_position, doc_starts, slope, BiasRow, row_reach, Seed, batch_head,
            num_keys, score_scale, dropout_p,
            KeyNorms, Thresholds, KeyTiles, row_floor, norm_reach,
            True, BLOCK_M, BLOCK_N, KEY_TILE, COLUMN_BIAS, D, BLOCK_D,
            CAUSAL, BIAS, False, DROPOUT, DOCUMENTS, UPCAST,
        )  # fmt: skip

    weight = 1 / row_sum
    if DROPOUT:
        weight = weight / (1 - dropout_p)
    # Out is dense: [queries, B * H * D].
    out_offset = tl.cast(batch, tl.int64) * heads * D + head * D
    store_tile(
        Out + out_offset, acc * weight[:, None], start,
        batches * heads * D, num_queries, BLOCK_M, D, BLOCK_D,
    )  # fmt: skip
    lse = row_max + tl.log2(row_sum)
    # An infinite logsumexp makes all weights zero for queries past the last one.
    tl.store(Lse + numbers, tl.where(queries < num_queries, lse, float("inf")))


@triton.jit
def attend_to_keys(
    acc,  # [BLOCK_M, BLOCK_D], fp32: sum of weights times values so far
    row_sum,  # [BLOCK_M], fp32: sum of weights so far
    row_max,  # [BLOCK_M], fp32: the largest score so far, to which the weights are relative
    q,  # [BLOCK_M, BLOCK_D]
    K,  # keys of this batch and head
    V,
    begin,  # first key, a multiple of BLOCK_N; if LISTED, counted along the list of tiles
    stop,
    k_stride_s,
    v_stride_s,
    start,  # index of the first query
    first_position,  # position of the first query
    doc_starts,  # [BLOCK_M], int32: position of the first token of each query's document
    slope,  # times log2(e)
    BiasRow,  # of this head
    row_reach,
    Seed,
    batch_head,
    num_keys,
    score_scale,
    dropout_p,
    KeyNorms,  # [key tiles]; this and the next four are read if LISTED
    Thresholds,  # [key tiles]
    KeyTiles,  # [key tiles + 1]
    row_floor,  # [BLOCK_M], see row_skips
    norm_reach,  # [BLOCK_M]
    MASKED: tl.constexpr,  # some keys of the range do not exist or are hidden from some queries
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_TILE: tl.constexpr,
    COLUMN_BIAS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
    LISTED: tl.constexpr,  # go through the tiles in KeyTiles
    DROPOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Continue the running softmax over keys begin .. stop and return (acc, row_sum, row_max).

    With COLUMN_BIAS (causal, half precision) the bias of a score is slope * (key - first_position),
    which is -slope * distance plus slope * (row of the query). The second term is the same for all
    keys of a row, so it cancels in the softmax. It remains in the logsumexp, which the backward
    kernels subtract from scores of the same form (`log_weights`). The bias is then a vector over
    the keys, and an element costs one addition. The term makes scores near the diagonal larger by
    up to slope * BLOCK_M. The rounding of such scores would be visible in fp32 results, so for fp32
    the bias is computed for each element.
    """
    rows = tl.arange(0, BLOCK_M)
    for step in range(begin, stop, BLOCK_N):
        key_start = step
        if LISTED:
            key_tile = tl.load(KeyTiles + 1 + step // KEY_TILE)
            key_start = key_tile * KEY_TILE + step % KEY_TILE
        key = key_start + tl.arange(0, BLOCK_N)
        k = load_tile(K, key_start, k_stride_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        scores = dot(q, tl.trans(k), UPCAST) * score_scale
        if COLUMN_BIAS and BIAS == SLOPES:
            scores = scores + (slope * (key - first_position).to(tl.float32))[None, :]
        else:
            scores = add_bias(
                scores, (first_position + rows)[:, None], key[None, :], slope, BiasRow, row_reach,
                CAUSAL, BIAS,
            )  # fmt: skip
        if MASKED:
            if CAUSAL:
                # Relative to the step's first key, keys are constants.
                sees = (first_position - key_start + rows)[:, None] >= (key - key_start)[None, :]
                scores = tl.where(sees, scores, float("-inf"))
            else:
                scores = tl.where(key[None, :] < num_keys, scores, float("-inf"))
        if DOCUMENTS:
            scores = tl.where(key[None, :] >= doc_starts[:, None], scores, float("-inf"))
        # Every row sees the first key of its own tiles or, where DOCUMENTS may hide that key,
        # starts with a finite row_max. So new_max is finite for finite inputs, and the differences
        # below are never inf - inf.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        relative_to = new_max
        if LISTED and CAUSAL:
            # Relative to infinity, all weights of a query are zero.
            skips = row_skips(
                row_floor, norm_reach, tl.load(KeyNorms + key_tile), tl.load(Thresholds + key_tile)
            )
            new_max = tl.where(skips, row_max, new_max)
            relative_to = tl.where(skips, float("inf"), new_max)
        weights = tl.math.exp2(scores - relative_to[:, None])
        shrink = tl.math.exp2(row_max - new_max)
        # The sum is taken before dropout, because dropout acts on normalized weights.
        row_sum = row_sum * shrink + tl.sum(weights, axis=1)
        if DROPOUT:
            keep = dropout_keeps(Seed, batch_head, (start + rows)[:, None], key[None, :], dropout_p)
            weights = tl.where(keep, weights, 0.0)
        v = load_tile(V, key_start, v_stride_s, num_keys, BLOCK_N, D, BLOCK_D, MASKED)
        acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v, UPCAST)
        row_max = new_max
    return acc, row_sum, row_max
