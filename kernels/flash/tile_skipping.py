"""Device functions that decide which tiles of keys are visited under ALiBi.

They do the arithmetic of `pretrain.kernels.skipping`, which proves the bound and has the same code
in plain torch. Two steps:

1. `norms_kernel` runs before the forward pass. For every tile of keys it stores the largest norm of
   its keys and of its values, and it sorts the heads by slope.
2. In the forward kernel, `find_visited_tiles` compares those norms with the logsumexp that a tile
   of queries has over the keys at its own positions.

The backward kernel for keys and values reads the decision the other way round, with
`find_visiting_tiles`.
"""

# Triton compiles these functions from their source; see device.py on annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from pretrain.kernels import skipping
from pretrain.kernels.flash.device import load_tile

NEEDED_BITS = tl.constexpr(skipping.NEEDED_BITS)
NORM_SLACK = tl.constexpr(skipping.NORM_SLACK)
RELATIVE_SLACK = tl.constexpr(skipping.RELATIVE_SLACK)
ABSOLUTE_SLACK = tl.constexpr(skipping.ABSOLUTE_SLACK)


@triton.jit
def norms_kernel(
    K,  # [keys, B, G, D], any strides but a dense D
    V,  # the same
    Slopes,  # [H]
    KeyNorms,  # output, [B, G, key tiles]: the largest 2-norm of the keys of a tile
    ValueNorms,  # output, the same for values
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
    PADDED_GROUPS: tl.constexpr,  # the next power of two, as of all tensors in Triton
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
def find_visited_tiles(
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
    KEY_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TRAINED_SLOPES: tl.constexpr,  # slopes want a gradient
    CAUSAL: tl.constexpr,
):
    """Return (first, end): the tiles of keys that one tile of queries visits, first <= tile < end.

    This is `pretrain.kernels.skipping.key_runs` for one tile of queries.
    """
    if CAUSAL:
        # The one key of the own tiles that every query of the tile sees is that of the first query.
        # Compared with later ones, a query's output would depend on tokens after it.
        own_key = row_norm(K, first_position, k_stride_s, D, BLOCK_D)
        own_value = row_norm(V, first_position, v_stride_s, D, BLOCK_D)
    else:
        # BLOCK_M queries touch at most BLOCK_M / KEY_TILE + 1 tiles of keys; rounded up to a power
        # of 2.
        OWN: tl.constexpr = 2 * BLOCK_M // KEY_TILE if BLOCK_M > KEY_TILE else 2
        own = own_first + tl.arange(0, OWN)
        own_key = tl.max(tl.load(KeyNorms + own, mask=own < own_end, other=0.0), axis=0)
        own_value = tl.max(tl.load(ValueNorms + own, mask=own < own_end, other=0.0), axis=0)

    # Not num_keys.to(): Triton makes a constant of an argument that is 1, and constants have no .to.
    log2_keys = tl.log2(tl.cast(num_keys, tl.float32))
    need = NEEDED_BITS + log2_keys + ABSOLUTE_SLACK
    if TRAINED_SLOPES:
        # The gradient of a slope multiplies every weight by its distance, which is below num_keys.
        need += log2_keys
    # Without decay (slope <= 0 or NaN) nothing is skipped.
    need = tl.where(slope > 0, need, float("inf"))
    floor = floor - tl.abs(floor) * RELATIVE_SLACK

    # The kernels loop over one contiguous run, so only its ends are searched for, 64 tiles at a
    # time.
    first = own_first
    for chunk in range(0, own_first, 64):
        tile = chunk + tl.arange(0, 64)
        nearest = first_position - (tile * KEY_TILE + KEY_TILE - 1)
        matters = tile_matters(
            KeyNorms, ValueNorms, tile, tile < own_first, nearest,
            floor, reach, slope, need, own_key, own_value,
        )  # fmt: skip
        first = tl.minimum(first, tl.min(tl.where(matters, tile, own_first), axis=0))
    end = own_end
    if not CAUSAL:
        for chunk in range(own_end, key_tiles, 64):
            tile = chunk + tl.arange(0, 64)
            nearest = tile * KEY_TILE - last_position
            matters = tile_matters(
                KeyNorms, ValueNorms, tile, tile < key_tiles, nearest,
                floor, reach, slope, need, own_key, own_value,
            )  # fmt: skip
            end = tl.maximum(end, tl.max(tl.where(matters, tile + 1, own_end), axis=0))
    return first, end


@triton.jit
def tile_matters(
    KeyNorms,
    ValueNorms,
    tile,  # [64] indices of tiles
    inside,  # [64] which of them exist
    nearest,  # [64] distance between the nearest query and key
    floor,
    reach,
    slope,
    need,  # bits by which the floor must exceed a tile's best score before the tile is skipped
    own_key,  # norm of the queries' own keys: see find_visited_tiles
    own_value,  # the same for values
):
    """Return which tiles cannot be skipped."""
    key = tl.load(KeyNorms + tile, mask=inside, other=0.0)
    value = tl.load(ValueNorms + tile, mask=inside, other=0.0)
    gap = floor - (reach * key * NORM_SLACK - slope * nearest.to(tl.float32) * (1 - RELATIVE_SLACK))
    # Keys and values that are longer than the queries' own count for more in dq and in the output.
    need = need + tl.log2(tl.where(key > own_key, key / own_key, 1.0))
    need = need + tl.log2(tl.where(value > own_value, value / own_value, 1.0))
    # Any comparison with NaN is false. The test is for skipping and not for visiting, so that a
    # tile with a NaN anywhere in its terms is visited.
    skipped = (gap > need) & (key < float("inf")) & (value < float("inf"))
    return inside & (skipped == 0)


@triton.jit
def find_visiting_tiles(
    FirstTile,  # [query tiles] of this batch and query head
    EndTile,
    key_tile,
    query_tiles,  # how many there are
):
    """Return (first, end): the range of query tiles that visit a tile of keys.

    A tile between the two may not visit it: `accumulate_over_queries` tests every query.
    """
    first = query_tiles
    end = 0
    for chunk in range(0, query_tiles, 64):
        tile = chunk + tl.arange(0, 64)
        # The defaults for tiles that do not exist are an empty run: from 1 to 0.
        visits = (tl.load(FirstTile + tile, mask=tile < query_tiles, other=1) <= key_tile) & (
            tl.load(EndTile + tile, mask=tile < query_tiles, other=0) > key_tile
        )
        first = tl.minimum(first, tl.min(tl.where(visits, tile, query_tiles), axis=0))
        end = tl.maximum(end, tl.max(tl.where(visits, tile + 1, 0), axis=0))
    return first, end
