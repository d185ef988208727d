"""Device functions that the flash-attention kernels share: tiles, products, score bias, dropout.

In all device code, names that begin with a capital are pointers (`Q`, `Lse`), lower-case names are
values, and names in capitals are compile-time constants. `position` is the place of a query on the
axis of the keys: the queries are the last `num_queries` positions of `num_keys`, so query i has
position i + num_keys - num_queries. `batch_head` is batch * heads + head.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from pretrain.kernels import reach

# Triton compiles these functions from their source, where an annotation would change the type of an
# argument, so the only annotation is `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


# Scores are kept in base 2: they are multiplied by log2(e) once, and exp2 is a single instruction.
LOG2E = tl.constexpr(math.log2(math.e))

PHILOX_ROUNDS = tl.constexpr(7)
"""Rounds of Philox4x32 for dropout. Seven is the fewest that pass every test of randomness (Salmon
et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2); Triton's default is 10."""

# Values of the compile-time constant BIAS: what is added to a score.
NO_BIAS = tl.constexpr(0)
# -slope * |distance|, with one slope per head.
SLOPES = tl.constexpr(1)
# An entry of the head's bias row, by distance.
ROW = tl.constexpr(2)
# The last entry of the bias row: for loops over tiles whose keys all lie at or beyond its end.
# Every score gets the same bias there, so no per-element load is needed.
ROW_END = tl.constexpr(3)


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Return the matrix product a b, accumulated in fp32.

    "ieee" keeps fp32 operands in fp32. Triton's default is TF32, which has 10 bits of mantissa.
    UPCAST is set only under the interpreter, whose bf16 product is wrong (triton issue 11584).
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_tile(
    X,  # first element of a [rows, D] matrix; only D must be dense
    start,  # first row
    stride,  # elements from one row to the next
    limit,  # number of rows that exist
    ROWS: tl.constexpr,  # rows to load
    D: tl.constexpr,  # columns that exist
    BLOCK_D: tl.constexpr,  # columns to load: D padded to a power of two
    BOUNDED: tl.constexpr,  # check rows against [0, limit)
):
    """Return rows start .. start + ROWS of X, [ROWS, BLOCK_D], zero where nothing exists.

    Zeros in padded columns add nothing to a product. Without BOUNDED the row mask is left out, as
    the inner loops over whole tiles need none.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    # The start is computed in 64 bits: tokens * heads * width can exceed 2^31. Offsets within the
    # tile fit in 32 bits, without a sign, whose extension to 64 bits would take registers.
    pointers = X + tl.cast(start, tl.int64) * stride
    pointers += (rows.to(tl.uint32) * stride)[:, None] + columns[None, :].to(tl.uint32)
    if BOUNDED:
        inside = ((start + rows >= 0) & (start + rows < limit))[:, None] & (columns < D)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif BLOCK_D != D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    X,  # first element of a [rows, D] matrix
    x,  # [ROWS, BLOCK_D], stored in the dtype of X
    start,  # first row
    stride,  # elements from one row to the next
    limit,  # number of rows that exist
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store x as rows start .. start + ROWS of X, leaving out rows and columns outside X."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = X + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    inside = (start + rows < limit)[:, None] & (columns < D)[None, :]
    tl.store(pointers, x.to(X.dtype.element_ty), mask=inside)


@triton.jit
def add_bias(
    scores,  # scaled scores, base 2
    position,  # int32 positions of the queries
    key,  # int32 positions of the keys
    slope,  # of this head, times log2(e)
    BiasRow,  # bias row of this head, times log2(e): distances -row_reach .. row_reach
    row_reach,
    CAUSAL: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return scores + bias. `position` and `key` broadcast against scores of either orientation."""
    if BIAS == SLOPES:
        # Positions are below 2^24, so both conversions and the difference are exact in fp32. An
        # integer difference would need a conversion for every element.
        distance = position.to(tl.float32) - key.to(tl.float32)
        if not CAUSAL:
            distance = tl.abs(distance)
        scores = scores - slope * distance
    elif BIAS == ROW:
        # Distances beyond the ends of the row get the bias of the nearer end.
        scores = scores + tl.load(
            BiasRow + row_reach + tl.minimum(tl.maximum(position - key, -row_reach), row_reach)
        )
    elif BIAS == ROW_END:
        scores = scores + tl.load(BiasRow + 2 * row_reach)
    return scores


@triton.jit
def load_starts(DocumentStarts, batch, query, num_queries, DOCUMENTS: tl.constexpr):
    """Return the position of the first token of each query's document, 0 without DOCUMENTS.

    Queries past the last one get 0. The starts never decrease from one query to the next, so the
    first of a block is the smallest.
    """
    starts = tl.zeros_like(query)
    if DOCUMENTS:
        pointers = DocumentStarts + tl.cast(batch, tl.int64) * num_queries + query
        starts = tl.load(pointers, mask=query < num_queries, other=0)
    return starts


@triton.jit
def dropout_keeps(Seed, batch_head, query, key, dropout_p):
    """Return which weights dropout keeps, as booleans of the shape of query and key broadcast.

    The decision is a function of (seed, batch_head, query, key) alone, so forward and backward
    drop the same weights, whatever their block sizes. `dropout_keep` in tests/kernels/oracles.py
    computes the same.
    """
    bits, _, _, _ = tl.philox(tl.load(Seed), key, query, batch_head, 0, PHILOX_ROUNDS)
    # The upper 24 bits are a fraction in [0, 1) that fp32 holds exactly.
    return (bits >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) >= dropout_p


INTERPRETED = not isinstance(dot, triton.JITFunction)
"""True when Triton runs these kernels in its interpreter on the CPU (TRITON_INTERPRET=1)."""


# ---- Device functions that decide which tiles of keys are visited under ALiBi ----
# The package's docstring proves the bound. Two steps:
#
# 1. `norms_kernel` runs before the forward pass. For every tile of keys it stores the largest norm
#    of its keys and of its values, and it sorts the heads by slope.
# 2. In the forward kernel, `list_key_tiles` compares those norms with the logsumexp that a tile of
#    queries has over the keys at its own positions, and lists the tiles to visit. Within a tile
#    that is visited, `row_skips` decides for each query.
#
# The backward kernels visit the same tiles. The kernel for keys and values builds its own lists
# from the stored decisions, with `list_query_tiles`.


# Triton compiles these functions from their source; see device.py on annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


# `pretrain.kernels.reach` says how much weight a row may lose, and what rounding the slack covers.
NEEDED_BITS = tl.constexpr(reach.NEEDED_BITS)
NORM_SLACK = tl.constexpr(reach.NORM_SLACK)
RELATIVE_SLACK = tl.constexpr(reach.RELATIVE_SLACK)
ABSOLUTE_SLACK = tl.constexpr(reach.ABSOLUTE_SLACK)
"""In bits here, in natural units in `reach`. The package says which thresholds it covers."""


@triton.jit
def norms_kernel(
    K,  # [keys, B, G, D], any strides but a dense D
    V,  # likewise
    Slopes,  # [H]
    KeyNorms,  # output, [B, G, key tiles]: the largest 2-norm of the keys of a tile
    ValueNorms,  # output, likewise for values
    HeadOrder,  # output, [H + G]: query heads by slope, then key heads by slope
    k_stride_s,
    k_stride_b,
    k_stride_h,
    v_stride_s,
    v_stride_b,
    v_stride_h,
    groups,
    heads,
    num_keys,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_TILE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,  # the next power of two, which Triton needs for every tensor
    PADDED_HEADS_PER_GROUP: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
):
    """Store the largest norms of one tile of keys and values and, in program 0, the head order.

    One program per (batch, key head, tile).
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(num_keys, KEY_TILE)
    start = program % tiles * KEY_TILE
    batch = tl.cast(program // tiles // groups, tl.int64)
    group = tl.cast(program // tiles % groups, tl.int64)
    k = load_tile(
        K + batch * k_stride_b + group * k_stride_h, start,
        k_stride_s, num_keys, KEY_TILE, D, BLOCK_D, True,
    )  # fmt: skip
    tl.store(KeyNorms + program, longest_row_norm(k))
    v = load_tile(
        V + batch * v_stride_b + group * v_stride_h, start,
        v_stride_s, num_keys, KEY_TILE, D, BLOCK_D, True,
    )  # fmt: skip
    tl.store(ValueNorms + program, longest_row_norm(v))
    if program == 0:
        store_head_order(Slopes, HeadOrder, heads, 1, PADDED_HEADS, 1)
        store_head_order(
            Slopes, HeadOrder + heads, groups, HEADS_PER_GROUP,
            PADDED_GROUPS, PADDED_HEADS_PER_GROUP,
        )  # fmt: skip


@triton.jit
def longest_row_norm(x):
    """Return the largest 2-norm of the rows of x, infinity if any is not finite."""
    x = x.to(tl.float32)
    squared = tl.sum(x * x, axis=1)
    # The maximum below may drop a NaN; infinity survives it and prevents skipping.
    squared = tl.where(squared == squared, squared, float("inf"))
    return tl.sqrt(tl.max(squared, axis=0))


@triton.jit
def store_head_order(
    Slopes,  # [count * per_head]
    HeadOrder,  # output, [count]: the head of rank 0, 1, .. by ascending slope
    count,
    per_head,  # consecutive slopes that belong to one head; the smallest of them counts
    PADDED: tl.constexpr,
    PADDED_PER_HEAD: tl.constexpr,
):
    """Sort the heads by slope, shallow ones first: they visit most tiles and should start first."""
    mine = tl.arange(0, PADDED)
    each = tl.arange(0, PADDED_PER_HEAD)
    inside = (mine < count)[:, None] & (each < per_head)[None, :]
    slopes = tl.load(
        Slopes + mine[:, None] * per_head + each[None, :], mask=inside, other=float("inf")
    )
    slopes = tl.min(slopes, axis=1)
    # Ranks must be a permutation even if a slope is NaN, or a head would not be computed at all.
    slopes = tl.where(slopes == slopes, slopes, float("inf"))
    # `others` is `slopes` laid out along the other axis. Triton has no operation for that, so
    # select the diagonal of a broadcast and sum over it.
    others = tl.sum(tl.where(mine[:, None] == mine[None, :], slopes[:, None], 0.0), axis=0)
    # A rank is the number of heads that come before; ties go by index.
    before = (others[None, :] < slopes[:, None]) | (
        (others[None, :] == slopes[:, None]) & (mine[None, :] < mine[:, None])
    )
    rank = tl.sum(before.to(tl.int32), axis=1)
    tl.store(HeadOrder + rank, mine, mask=mine < count)


@triton.jit
def row_norm(X, row, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the 2-norm of one row of the [rows, D] matrix X."""
    columns = tl.arange(0, BLOCK_D)
    x = tl.load(X + tl.cast(row, tl.int64) * stride + columns, mask=columns < D, other=0.0)
    x = x.to(tl.float32)
    return tl.sqrt(tl.sum(x * x, axis=0))


@triton.jit
def list_key_tiles(
    Thresholds,  # output, [key tiles], fp32: see row_skips; -inf where no query visits the tile
    KeyTiles,  # output, [key tiles + 1], int32: the number of tiles visited, then their indices
    K,  # keys of this batch and key head
    V,
    k_stride_s,
    v_stride_s,
    KeyNorms,  # [key tiles] of this batch and key head
    ValueNorms,  # the same
    floor,  # lowest logsumexp of the tile's queries over their own tiles of keys, base 2
    reach,  # |scale| * log2(e) * the largest norm of the queries: a score is at most reach * |k|
    slope,  # times log2(e)
    first_position,  # of the tile's queries
    last_position,
    own_first,  # the tiles of keys at the queries' own positions: own_first <= tile < own_end
    own_end,
    key_tiles,  # how many there are
    num_keys,
    first_start,  # if DOCUMENTS, the position where the document of the tile's first query begins
    KEY_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TRAINED_SLOPES: tl.constexpr,  # slopes want a gradient
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """List the tiles of keys, other than its own, that a tile of queries visits; return how many.

    The result is a list and not a range, since with a range a single key far back that must be
    visited (an attention sink) would bring in every tile between.
    """
    if CAUSAL:
        # In the own tiles, the key at the first query's position is seen by every query of the
        # tile. If later keys were used, a query's output would depend on tokens after it.
        own_key = row_norm(K, first_position, k_stride_s, D, BLOCK_D)
        own_value = row_norm(V, first_position, v_stride_s, D, BLOCK_D)
        stop = own_first
    else:
        # BLOCK_M queries touch at most BLOCK_M / KEY_TILE + 1 tiles of keys; rounded up to a power
        # of 2.
        OWN: tl.constexpr = 2 * BLOCK_M // KEY_TILE if BLOCK_M > KEY_TILE else 2
        mine = own_first + tl.arange(0, OWN)
        own_key = tl.max(tl.load(KeyNorms + mine, mask=mine < own_end, other=0.0), axis=0)
        own_value = tl.max(tl.load(ValueNorms + mine, mask=mine < own_end, other=0.0), axis=0)
        stop = key_tiles

    # Triton makes a constant of an argument that is 1, and constants have no method `.to`.
    log2_keys = tl.log2(tl.cast(num_keys, tl.float32))
    bits = NEEDED_BITS + log2_keys + ABSOLUTE_SLACK
    if TRAINED_SLOPES:
        # The gradient of a slope multiplies every weight by its distance, which is below num_keys.
        bits += log2_keys
    # Without decay (slope <= 0 or NaN) nothing is skipped.
    bits = tl.where(slope > 0, bits, float("inf"))
    # Twice the slack of row_bounds, so that every query would skip by itself what is skipped here.
    floor = floor - tl.abs(floor) * (2 * RELATIVE_SLACK)
    count = 0
    for chunk in range(0, stop, 64):
        tile = chunk + tl.arange(0, 64)
        inside = tile < stop
        key = tl.load(KeyNorms + tile, mask=inside, other=0.0)
        value = tl.load(ValueNorms + tile, mask=inside, other=0.0)
        # Keys and values that are longer than the queries' own count for more in dq and in the
        # output.
        need = bits + tl.log2(tl.where(key > own_key, key / own_key, 1.0))
        need = need + tl.log2(tl.where(value > own_value, value / own_value, 1.0))
        nearest = first_position - (tile * KEY_TILE + KEY_TILE - 1)
        own = tile < 0
        if not CAUSAL:
            nearest = tl.where(tile < own_first, nearest, tile * KEY_TILE - last_position)
            own = (tile >= own_first) & (tile < own_end)
        threshold = need - slope * nearest.to(tl.float32) * (1 - RELATIVE_SLACK)
        # Keys or values that are not finite are not skipped. Own tiles are visited anyway, but not
        # through the list.
        bounded = (key < float("inf")) & (value < float("inf")) & (own == 0)
        threshold = tl.where(bounded, threshold, float("inf"))
        # Any comparison with NaN is false. The condition is for skipping and not for visiting, so
        # that a tile with a NaN anywhere in its terms is visited.
        skipped = floor - reach * key * NORM_SLACK > threshold + ABSOLUTE_SLACK
        if DOCUMENTS:
            skipped |= (tile + 1) * KEY_TILE <= first_start
        threshold = tl.where(skipped, float("-inf"), threshold)
        tl.store(Thresholds + tile, threshold, mask=inside)
        listed = inside & (skipped == 0) & (own == 0)
        count += append(KeyTiles + 1 + count, tile, listed)
    tl.store(KeyTiles, count)
    # The barrier is needed because the list was stored by some threads and is read by all.
    tl.debug_barrier()
    return count


@triton.jit
def append(List, items, listed):
    """Store the items that are `listed` at the head of List, in order, and return how many."""
    listed = listed.to(tl.int32)
    tl.store(List + tl.cumsum(listed, 0) - 1, items, mask=listed != 0)
    return tl.sum(listed, axis=0)


@triton.jit
def row_skips(
    row_floor,  # [queries] of a tile, from row_bounds
    row_reach,  # [queries], likewise
    key_norm,  # the largest norm of the keys of a tile
    threshold,  # of this tile of queries and tile of keys, from list_key_tiles
):
    """Return which queries of a tile skip a tile of keys before them, though others may visit it.

    Each query decides from what it sees: its own norm, its own floor, and keys before it. If the
    tile alone decided, a token could change outputs of tokens before it, if only by 2^-24, because
    the tile's floor and reach depend on all its queries.
    """
    return row_floor - row_reach * (key_norm * NORM_SLACK) > threshold


@triton.jit
def row_bounds(q, lse, slope, score_scale, BLOCK_M: tl.constexpr):
    """Return (row_floor, row_reach) of the queries of a tile, for row_skips.

    `lse` is the logsumexp over the own tiles. The threshold is for the tile's first query. Later
    queries are further from every earlier key, so the floor includes slope times that difference.
    """
    later = tl.arange(0, BLOCK_M).to(tl.float32)
    row_floor = lse - tl.abs(lse) * RELATIVE_SLACK + slope * later * (1 - RELATIVE_SLACK)
    x = q.to(tl.float32)
    return row_floor, tl.sqrt(tl.sum(x * x, axis=1)) * tl.abs(score_scale)


@triton.jit
def list_query_tiles(
    QueryTiles,  # output, [query tiles], int32
    Thresholds,  # [query tiles, key tiles] of this batch and query head
    key_tile,
    first,  # first tile of queries
    query_tiles,  # how many there are
    key_tiles,
):
    """List the tiles of queries from `first` on that visit a tile of keys; return how many."""
    count = 0
    for chunk in range(first, query_tiles, 64):
        tile = chunk + tl.arange(0, 64)
        inside = tile < query_tiles
        threshold = tl.load(
            Thresholds + tl.cast(tile, tl.int64) * key_tiles + key_tile,
            mask=inside, other=float("-inf"),
        )  # fmt: skip
        # A NaN counts as visited.
        count += append(QueryTiles + count, tile, (threshold == float("-inf")) == 0)
    tl.debug_barrier()
    return count
