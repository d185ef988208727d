"""How far back a query can see under ALiBi: the bound of `pretrain.kernels.flash`, in plain torch.

A key at a distance d carries the bias -slope * d. The package docstring of `pretrain.kernels.flash`
proves when no product q.k can make up for it. Here the same rule is asked for each query instead of
each tile of queries, and answered with one position: the keys before it are left out. In natural
units, with N keys, for query i and the keys of tiles 0 .. c,

    floor_i - |scale| |q_i| K_c + slope * d_ic > 24 ln 2 + ln N + ln max(1, V_c / |v_i|)

where floor_i is the logsumexp of the query's scores over the FLOOR_TILE to 2 * FLOOR_TILE - 1 keys
up to its own, which is a lower bound of that of its row, K_c and V_c are the largest norms of keys
and values in tiles 0 .. c, and d_ic is the distance to the last key of tile c. If a gradient is
wanted, ln max(1, K_c / |k_i|) is added on the right. K_c and V_c rise with c and d_ic falls, so a
binary search finds the last tile for which the inequality holds.

Seen on the demo's model at 32,768 tokens: with the score of the own key alone as floor, blocks of
256 queries kept 15 to 31 % of the causal pairs of query and key in a layer, with this floor 12 to
18 %, and with the largest score of each tile in place of |q| |k|, which costs as much as attention,
12 to 16 %. Norms in a space in which keys are white, or around their mean, kept more or as much.

Outputs depend on later tokens by what is left out at most: a block of queries takes the keys that
any of its queries can see.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head,
# T tiles of keys.

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

NEEDED = 24 * math.log(2)
"""All weights that a row loses sum to less than exp(-NEEDED) = 2^-24: half an fp32 ulp of 1."""
NORM_SLACK = 1 + 2.0**-12
"""Factor on the product of norms, for the rounding of the sums in norms and in products q.k."""
RELATIVE_SLACK = 2.0**-18
"""Relative reduction of the floor and of slope * distance, for their rounding in fp32."""
ABSOLUTE_SLACK = 2.0**-6
"""Added to what is needed, for the rounding of logarithms and of the remaining sums in fp32."""
FLOOR_TILE = 32
"""Queries that look for their floor together."""
FLOOR_TILES = 32
"""Tiles of queries whose scores are in memory at once."""


@torch.no_grad()
def first_keys(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    scale: float,
    tile: int,
    gradients: bool,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Return the first key that any query of each block can see, for every key head.

    All weights of a row before it sum to less than 2^-24, and what the output loses is below
    2^-24 (|v_i| + |out_i|). A query that is not finite, or that could see a number that is not,
    sees all keys, and so does a head whose slope is not positive.

    Args:
        q_SBHD: Queries, [queries, B, H, D], the last positions of the keys.
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        slopes: [H], fp32.
        scale: Factor of the products q k^T.
        tile: Queries in a block, counted from the last query backwards, and keys in a tile, counted
            from the first key on.
        gradients: Gradients are wanted, in which a long key counts as well.
        document_starts: Where each query's document begins, [B, queries], or None.

    Returns:
        int64 [G, blocks of queries], multiples of `tile`; block 0 holds the last queries.
    """
    num_queries, num_keys, groups = len(q_SBHD), len(k_SBGD), k_SBGD.shape[2]
    norms = row_norms(k_SBGD), row_norms(v_SBGD)
    longest = (longest_so_far(norms[0], tile), longest_so_far(norms[1], tile))
    own = (norms[0][..., num_keys - num_queries :], norms[1][..., num_keys - num_queries :])
    left_out = tiles_left_out(
        q_SBHD, k_SBGD, own, longest, slopes, scale, tile, num_keys, gradients, document_starts
    )
    if document_starts is not None:
        left_out = left_out.maximum(document_starts[:, None] // tile)
    shared = q_SBHD.shape[2] // groups
    first_GS = left_out.amin(0).view(groups, shared, -1).amin(1).flip(1) * tile
    padded = pad(first_GS, (0, -num_queries % tile), value=num_keys)
    return padded.view(groups, -1, tile).amin(2)


@torch.no_grad()
def tiles_left_out(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    own: tuple[Tensor, Tensor],
    longest: tuple[Tensor, Tensor],
    slopes: Tensor,
    scale: float,
    tile: int,
    num_keys: int,
    gradients: bool,
    document_starts: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return how many tiles of keys, from the first one on, no query can see.

    Args:
        q_SBHD: Queries, [queries, B, H, D], the last of `num_keys` positions.
        k_SBGD: The last keys, at least the queries' own and the FLOOR_TILE before these, or all.
        own: 2-norms of the key and the value at each query's position, each fp32 [B, G, queries].
        longest: Largest norms of keys and of values up to the end of each tile, including what is
            before the first tile; each fp32 [B, G, T].
        slopes: [H], fp32.
        scale: Factor of the products q k^T.
        tile: Keys in a tile.
        num_keys: Keys of the whole text so far.
        gradients: As in `first_keys`.
        document_starts: The same, in positions of `k_SBGD`.
        first: Position of the first key of the first tile.

    Returns:
        int64 [B, H, queries].
    """
    shared = q_SBHD.shape[2] // k_SBGD.shape[2]
    own_key, own_value = (x.repeat_interleave(shared, dim=1) for x in own)
    key_BHT, value_BHT = (x.repeat_interleave(shared, dim=1) for x in longest)
    floor = _floors(q_SBHD, k_SBGD, slopes.float(), scale, document_starts)
    floor -= floor.abs() * RELATIVE_SLACK
    reach = row_norms(q_SBHD) * (abs(scale) * NORM_SLACK)
    needed = NEEDED + math.log(num_keys) + ABSOLUTE_SLACK
    decay = slopes.float()[:, None] * (1 - RELATIVE_SLACK)
    position = torch.arange(num_keys - len(q_SBHD), num_keys, device=q_SBHD.device)

    def left_out(tile_BHS: Tensor) -> Tensor:
        """Return which queries leave out tiles 0 .. tile_BHS."""
        key, value = key_BHT.gather(2, tile_BHS), value_BHT.gather(2, tile_BHS)
        distance = position + 1 - first - (tile_BHS + 1) * tile
        need = needed + (value / own_value).clamp(min=1).log()
        if gradients:
            need = need + (key / own_key).clamp(min=1).log()
        # Any comparison with NaN is false: what is not finite is not left out.
        enough = floor - reach * key + decay * distance > need
        return enough & (distance > 0) & (decay > 0) & value.isfinite()

    # How many tiles are left out lies in low .. high.
    tiles = key_BHT.shape[2]
    low = torch.zeros_like(floor, dtype=torch.int64)
    high = torch.full_like(low, tiles)
    for _ in range(tiles.bit_length()):
        middle = (low + high) // 2
        out = left_out(middle.clamp(max=tiles - 1)) & (middle < high)
        low, high = torch.where(out, middle + 1, low), torch.where(out, high, middle)
    return low


def _floors(
    q_SBHD: Tensor, k_SBGD: Tensor, slopes: Tensor, scale: float, document_starts: Tensor | None
) -> Tensor:
    """Return the logsumexp of every query's scores over keys close before it, fp32 [B, H, S]."""
    num_queries, batch = q_SBHD.shape[:2]
    groups, before = k_SBGD.shape[2], len(k_SBGD) - num_queries
    # The keys of a tile of queries are those at its positions and at as many before them. Zeros
    # stand for positions that do not exist, which are masked.
    after = -num_queries % FLOOR_TILE
    q = pad(q_SBHD, (0, 0, 0, 0, 0, 0, 0, after))
    q = torch.unflatten(q, 0, (-1, FLOOR_TILE))  # [T, FLOOR_TILE, B, H, D]
    front = max(FLOOR_TILE - before, 0)
    k = pad(k_SBGD[max(before - FLOOR_TILE, 0) :], (0, 0, 0, 0, 0, 0, front, after))
    k = k.unfold(0, 2 * FLOOR_TILE, FLOOR_TILE)  # [T, B, G, D, 2 * FLOOR_TILE]
    starts = torch.full((batch, num_queries), 0, device=q.device)
    starts = pad(starts if document_starts is None else document_starts, (0, after))
    row = torch.arange(FLOOR_TILE, device=q.device)[:, None]
    column = torch.arange(2 * FLOOR_TILE, device=q.device)
    distance = row + FLOOR_TILE - column
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)
    floors = []
    for tiles in torch.split(torch.arange(len(q), device=q.device), FLOOR_TILES):
        q_part = torch.unflatten(q[tiles].float(), 3, (groups, -1))
        scores = torch.einsum("tsbgpd,tbgdk->bgptsk", q_part, k[tiles].float()).flatten(1, 2)
        position = before + tiles[:, None] * FLOOR_TILE + column - FLOOR_TILE
        first = starts.view(batch, -1, FLOOR_TILE)[:, tiles]
        hidden = position[None, :, None] < first[..., None]
        scores = (scores * scale + bias[:, None]).masked_fill(hidden[:, None], -math.inf)
        floors.append(scores.logsumexp(-1).flatten(2))
    return torch.cat(floors, dim=2)[..., :num_queries]


def row_norms(x_SBHD: Tensor) -> Tensor:
    """Return the 2-norm of every row, fp32 [B, H, S]; infinite where it is no number."""
    norms: Tensor = torch.linalg.vector_norm(x_SBHD.float(), dim=3).permute(1, 2, 0)
    return norms.nan_to_num(nan=math.inf, posinf=math.inf)


def longest_so_far(norms_BHS: Tensor, tile: int) -> Tensor:
    """Return the largest norm in tiles 0 .. t, [B, H, T]."""
    tiles = torch.unflatten(pad(norms_BHS, (0, -norms_BHS.shape[2] % tile)), 2, (-1, tile))
    longest: Tensor = torch.cummax(tiles.amax(3), 2).values
    return longest
