"""The bound by which the flash-attention kernel skips tiles of keys under ALiBi, in plain torch.

A key far from its query carries the bias -slope * distance. Where no product q.k can make up for
that bias, the key's weight is too small to show in any result, and its tile need not be loaded. The
kernel decides this per tile of queries and tile of keys, from numbers it has anyway. The same
arithmetic is in `pretrain.kernels.flash.device`, on the device; the tests compare the two.

**The bound.** All scores are in base 2. For query i and key j, with N keys in all,

    s_ij = log2(e) * (scale * q_i . k_j - slope * |i - j|)        the score
    L_i  = log2(sum over j of 2^s_ij)                             the logsumexp of row i
    w_ij = 2^(s_ij - L_i)                                         the weight

Take a tile of queries and a tile of keys. Let |q| and |k| be the largest 2-norms in the tiles, and
d the smallest distance between them.

1. No score is above `most`. By Cauchy-Schwarz,

       s_ij <= most = log2(e) * (|scale| |q| |k| - slope * d).

2. No logsumexp is below `floor`. A sum only grows with more terms, so L_i is at least the logsumexp
   over the query's *own* tiles, those that hold the keys at the positions of the tile's queries.
   `floor` is the lowest of these over the queries of the tile. The kernel attends to the own tiles
   first, so it has them before it decides.
3. Hence w_ij <= 2^(most - floor). The tile is skipped if

       floor - most > need + log2(N).

   Then each of its weights is below 2^-need / N, and since a row has at most N keys, all weights
   that a row loses sum to less than 2^-need.

A simpler `floor` would be the lowest score that norms permit, -|scale| |q| |k_own|. It is much
weaker: for Gaussian inputs the products of norms are several times as large as the scores.

**What `need` must cover.** It is NEEDED_BITS = 24, plus:

- log2(|v| / |v_own|) where a tile's longest value is longer than v_own, the value at the position
  of the first query (without a causal mask, the longest of the own tiles).
  What the output loses is a sum of weights times values. With this term it stays below 2^-24 of the
  own values, even if one giant value is far away.
- log2(|k| / |k_own|), likewise. The gradient of q is a sum of score gradients times keys, so a
  giant key can show there although its weight does not.
- log2(N) once more if the slopes want a gradient. That gradient multiplies each score gradient by
  its distance, which is below N.

**What is lost.** With d_out_i the gradient of output i, w_ij the weights and N the number of keys:

    |error of out_i| < 2^-24 * (|v_own| + |out_i|)
    |error of dq_i|  < 2^-24 * |scale| |d_out_i| * (|k_own| (|v_own| + |out_i|)
                       + sum over j of w_ij |k_j| (|v_own| + 2 |out_i| + |v_j|))
    |error of dk_j|  < 2^-24 * |scale| * sum over i of |q_i| |d_out_i|
                       * ((w_ij + 1 / N) (|v_own| + 2 |out_i|) + w_ij |v_j|)
    |error of dv_j|  < 2^-24 * sum over i of (w_ij + 1 / N) |d_out_i|

These are relative to the terms that a gradient is a sum of, and not to the sum, in which they may
nearly cancel. Terms with |k_own| or 1 / N are the weights that are dropped; those with w_ij are
what the renormalised weights and the changed output make of the others.

**Rounding** always counts against skipping (the three SLACK constants). Heads whose slope is not
positive skip nothing. Rows that are not finite count as infinitely long, so every query that could
see a NaN or an infinity does visit it.

**Lists.** The kernels go through a list of the tiles that matter, so one key far back that must be
visited (an attention sink, often key 0) costs one tile. The backward pass visits the same tiles as
the forward pass.

**Documents.** Where queries see no key before the start of their own document, the bound is that of
the keys that a query sees: floors are made of these alone, so they are lower, and |q|, |k| and |v|
are taken over whole tiles, so they are larger. A query that sees any key before its own tiles sees
all of its document from there on, the position of the tile's first query included, and so the own
value and key in `need` are its own. What a token of another document contains can decide whether a
tile is skipped on which both documents lie, and thereby move an output by the 2^-24 above.

**Causality.** Under a causal mask and with finite q, k and v, no output depends on a later token by
a single bit, though a tile of queries decides as one. (Keys after a query get the weight 0, and 0
times an infinity or a NaN among their values is NaN, as in every backend.) The own value and key in
`need` are those at the position of the tile's first query, which all its queries see. Floor and |q|
of the tile decide which tiles are loaded; within a loaded tile, a query that could skip it by its
own logsumexp and its own norm gives it no weight. As the tile decides with twice the slack, it
skips only what each of its queries skips.

That holds where the slack covers the rounding of the two comparisons in fp32. Terms of the size of
the floor are covered everywhere, by RELATIVE_SLACK. What else is rounded errs by at most 7 * 2^-24
of the threshold, counted over both, as the device associates their products differently.
ABSOLUTE_SLACK covers that for thresholds down to -2^15 bits: a slope * distance of 22,700, or
22,700 keys at a slope of 1. Further away a tile may be skipped that one of its queries would visit,
if the product of norms is also of that size. The weights that are lost are within the bounds above
even then, since the distance has a RELATIVE_SLACK of its own, but they may depend on a later token
of the tile.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head,
# T tiles.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NEEDED_BITS = 24.0
"""All weights that a row loses sum to less than 2^-24: half an fp32 ulp of 1."""
NORM_SLACK = 1 + 2.0**-12
"""Factor on the product of norms. It exceeds the relative rounding of sums over up to 256 columns,
in the norms and in the products q.k, which tensor cores round more coarsely than fp32 does."""
RELATIVE_SLACK = 2.0**-18
"""Relative reduction of the floor and of slope * distance, for their rounding in fp32."""
ABSOLUTE_SLACK = 2.0**-6
"""Bits added to `need`, for the rounding of logarithms and of the remaining sums in fp32."""
LOG2E = math.log2(math.e)


class Visits(NamedTuple):
    """The tiles of keys that are visited."""

    tiles_BHTK: Tensor
    """By each tile of queries, bool [B, H, query tiles, key tiles]."""
    rows_BHSK: Tensor
    """By each query, bool [B, H, S, key tiles]. Other keys of a visited tile get no weight."""


def visited_tiles(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    *,
    query_tile: int,
    key_tile: int,
    causal: bool = True,
    scale: float | None = None,
    trained_slopes: bool = False,
) -> Visits:
    """Return the tiles of keys that each tile of queries, and each query, must visit.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        slopes: ALiBi slopes, [H].
        query_tile: Queries in a tile.
        key_tile: Keys in a tile.
        causal: Apply a causal mask.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        trained_slopes: The slopes want a gradient.

    Returns:
        The visited tiles.
    """
    num_queries, num_keys, heads = q_SBHD.shape[0], k_SBGD.shape[0], q_SBHD.shape[2]
    heads_per_group = heads // k_SBGD.shape[2]
    scale = q_SBHD.shape[3] ** -0.5 if scale is None else scale
    floors = own_floors(q_SBHD, k_SBGD, slopes, query_tile, key_tile, causal, scale)
    own = own_tiles(num_queries, num_keys, query_tile, key_tile)
    longest_k = longest_rows(k_SBGD, key_tile).repeat_interleave(heads_per_group, dim=1)
    longest_v = longest_rows(v_SBGD, key_tile).repeat_interleave(heads_per_group, dim=1)

    # The smallest distance between a tile of queries and a tile of keys before or after it.
    starts = torch.arange(0, num_queries, query_tile)
    first_position = starts + num_keys - num_queries
    last_position = (starts + query_tile).clamp(max=num_queries) - 1 + num_keys - num_queries
    tiles = torch.arange(longest_k.shape[2])
    before = first_position[:, None] - (tiles * key_tile + key_tile - 1)
    after = tiles * key_tile - last_position[:, None]
    distance = torch.where(before > 0, before, after).float()

    # What the floor must exceed a tile's best score by. From here on, tensors are [B, H, query
    # tiles, key tiles].
    log2_keys = math.log2(num_keys)
    need = torch.tensor(NEEDED_BITS + log2_keys * (2 if trained_slopes else 1) + ABSOLUTE_SLACK)
    for x, tile_norms in ((k_SBGD, longest_k), (v_SBGD, longest_v)):
        longest = tile_norms[:, :, None]
        if causal:
            # The key or value of each tile's first query, which every query of the tile sees.
            first_rows = longest_rows(x[first_position], 1)
            longest_own = first_rows.repeat_interleave(heads_per_group, dim=1)[..., None]
        else:
            longest_own = torch.where(own, longest, 0).amax(dim=3, keepdim=True)
        need = need + torch.where(longest > longest_own, longest / longest_own, 1).log2()
    slope = slopes.float()[None, :, None, None] * LOG2E
    threshold = need - slope * distance * (1 - RELATIVE_SLACK)
    finite = (longest_k < torch.inf) & (longest_v < torch.inf)
    threshold = torch.where(finite[:, :, None] & (slope > 0), threshold, torch.inf)
    # Comparisons with NaN are false, so a tile with a NaN in its terms is not skipped.
    norms = longest_k[:, :, None] * NORM_SLACK
    reach = abs(scale) * LOG2E * longest_rows(q_SBHD, query_tile)[..., None]
    floor = _by_tile(floors, query_tile).amin(dim=3)[..., None]
    floor = floor - floor.abs() * (2 * RELATIVE_SLACK)
    visited = ~(floor - reach * norms > threshold + ABSOLUTE_SLACK) | own
    if causal:
        visited &= tiles <= last_position[:, None] // key_tile
    tile_of_query = torch.arange(num_queries) // query_tile
    rows = visited[:, :, tile_of_query]
    if causal:
        later = (torch.arange(num_queries) - starts[tile_of_query]).float()[:, None]
        row_floor = floors[..., None] - floors[..., None].abs() * RELATIVE_SLACK
        row_floor = row_floor + slope * later * (1 - RELATIVE_SLACK)
        row_reach = abs(scale) * LOG2E * longest_rows(q_SBHD, 1)[..., None]
        skips = row_floor - row_reach * norms > threshold[:, :, tile_of_query]
        rows = rows & ~(skips & ~own[tile_of_query])
    return Visits(visited, rows)


def own_tiles(num_queries: int, num_keys: int, query_tile: int, key_tile: int) -> Tensor:
    """Return which tiles of keys hold the positions of each tile of queries.

    Without a causal mask there can be more queries than keys; tile 0 is then the own tile of the
    queries before the first key.

    Args:
        num_queries: Number of queries.
        num_keys: Number of keys.
        query_tile: Queries in a tile.
        key_tile: Keys in a tile.

    Returns:
        bool, [query tiles, key tiles].
    """
    first = torch.arange(0, num_queries, query_tile)
    last = (first + query_tile).clamp(max=num_queries) - 1
    first, last = ((x + num_keys - num_queries).clamp(min=0) // key_tile for x in (first, last))
    tiles = torch.arange(-(-num_keys // key_tile))
    return (tiles >= first[:, None]) & (tiles <= last[:, None])


def own_floors(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    slopes: Tensor,
    query_tile: int,
    key_tile: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the logsumexp of every query over its tile's own tiles of keys.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D].
        slopes: ALiBi slopes, [H].
        query_tile: Queries in a tile.
        key_tile: Keys in a tile.
        causal: Apply a causal mask.
        scale: Factor of the products q k^T.

    Returns:
        [B, H, S], in base 2.
    """
    num_queries, num_keys = q_SBHD.shape[0], k_SBGD.shape[0]
    k_SBHD = k_SBGD.repeat_interleave(q_SBHD.shape[2] // k_SBGD.shape[2], dim=2)
    own = own_tiles(num_queries, num_keys, query_tile, key_tile)
    floors = []
    for start in range(0, num_queries, query_tile):
        q = q_SBHD[start : start + query_tile].float().permute(1, 2, 0, 3)
        position = torch.arange(start, start + q.shape[2]) + num_keys - num_queries
        keys = own[start // query_tile].repeat_interleave(key_tile)[:num_keys].nonzero()[:, 0]
        scores = q @ k_SBHD[keys].float().permute(1, 2, 3, 0) * (scale * LOG2E)
        distance = (position[:, None] - keys).float()
        scores = scores - slopes.float()[:, None, None] * LOG2E * distance.abs()
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        # torch's logsumexp is to base e.
        floors.append((scores * math.log(2)).logsumexp(dim=3) * LOG2E)
    return torch.cat(floors, dim=2)


def _by_tile(x_BHS: Tensor, tile: int) -> Tensor:
    """Return x as [B, H, T, tile], the last tile being filled up with infinities."""
    batch, heads, length = x_BHS.shape
    padded = torch.nn.functional.pad(x_BHS, (0, -length % tile), value=torch.inf)
    return padded.reshape(batch, heads, -1, tile)


def longest_rows(x_SBHD: Tensor, tile: int) -> Tensor:
    """Return the largest 2-norm of the rows of each tile, infinity where a row is not finite.

    Args:
        x_SBHD: Queries, keys or values, [S, B, H, D].
        tile: Rows in a tile.

    Returns:
        [B, H, T], fp32.
    """
    length, batch, heads, _ = x_SBHD.shape
    norms = x_SBHD.float().square().sum(dim=3).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
    padded = torch.nn.functional.pad(norms.permute(1, 2, 0), (0, -length % tile))
    return padded.reshape(batch, heads, -1, tile).amax(dim=3)
