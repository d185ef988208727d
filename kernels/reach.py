"""How far back a query can see under ALiBi: the bound that every attention kernel shares.

A key at a distance d has the bias -slope * d, so it cannot matter if no product q.k can make up for
that. The package docstring of `pretrain.kernels.flash` has the rule by tiles, which Triton's kernel
applies with the constants below, and its proof. Here the rule is applied to each query, and gives
one position: keys before it are left out. By Cauchy-Schwarz, in natural units, all weights that
query i gives the keys of tiles 0 .. c sum to at most exp(most_ic - floor_i), where

    most_ic = ln sum over j of exp(|scale| |q_i| |k_j| - slope * d_ij)
    floor_i = logsumexp of its scores over the FLOOR_TILE to 2 * FLOOR_TILE - 1 keys up to its own,
              which is a lower bound on the logsumexp of its row

The tiles are left out if

    floor_i - most_ic > 24 ln 2 + ln max(1, V_c / |v_i|)

where V_c is the largest norm of values in tiles 0 .. c, and K_c that of keys. If gradients are
needed, ln max(1, K_c / |k_i|) is added on the right, and ln 2 if keys are left out on both sides.
most_ic + slope * (position of i) depends only on |q_i| and c. As a function of |q_i| it is convex,
so the chord between two of NORM_POINTS lengths is an upper bound. If the norms of single keys are
not known, K_c replaces each of them, and the sum over distances is at most
exp(|scale| |q_i| K_c - slope * d_ic) times the smaller of N, the number of keys, and
1 / (1 - exp(-slope)), with the distance d_ic to the last key of tile c. The left side falls as c
rises, so a binary search finds the last tile for which the inequality holds.

Measured on the demo's model at 32,768 tokens: each query got 2,900 keys with K_c and N, 2,630 with
K_c and the sum over distances, and 2,350 with the norms of single keys.

A block of queries takes the keys that any of its queries can see. Outputs can therefore depend on
later tokens, but by no more than the weights that are left out.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head,
# T tiles of keys.

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.functional import pad

NEEDED_BITS = 24.0
"""The weights that are left out of a row sum to less than 2^-24: half an fp32 ulp of 1."""
NEEDED = NEEDED_BITS * math.log(2)
"""The same in natural units."""
NORM_SLACK = 1 + 2.0**-12
"""Factor on the product of norms. It exceeds the relative rounding of sums over up to 256 columns,
in the norms and in the products q.k, which tensor cores round more coarsely than fp32 does."""
RELATIVE_SLACK = 2.0**-18
"""Relative reduction of the floor and of slope * distance, for their rounding in fp32."""
ABSOLUTE_SLACK = 2.0**-6
"""Added to the required margin, for the rounding of logarithms and of the other sums in fp32."""
NORM_POINTS = 8
"""Number of query lengths, from 0 to the longest, for which sums over keys are computed. With 31,
0.01 % more keys are left out on the demo's model."""
FLOOR_TILE = 32
"""Queries whose floors are computed together."""
FLOOR_TILES = 32
"""Tiles of queries whose scores are in memory at once."""


@torch.no_grad()
def key_windows(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    scale: float,
    causal: bool,
    *,
    queries: int,
    tile: int,
    gradients: bool,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the keys that any query of each block can see, for every key head.

    The weights that are left out of a row sum to less than 2^-24, and the error of the output is
    below 2^-24 (|v_i| + |out_i|). A query that is not finite, or that could see non-finite numbers,
    sees all keys, and so does a head whose slope is not positive.

    Args:
        q_SBHD: Queries, [queries, B, H, D], the last positions of the keys; without a causal mask
            as many as keys.
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        slopes: [H], fp32.
        scale: Factor of the products q k^T.
        causal: Queries see no later key.
        queries: Queries in a block, counted from the last query backwards.
        tile: Keys in a tile, counted from the first key on.
        gradients: Whether gradients are needed, in which long keys matter too.
        document_starts: Where each query's document begins, [B, queries], or None.

    Returns:
        The first key and the key after the last, each int64 [G, blocks]; block 0 holds the last
        queries.
    """
    options = (slopes, scale, queries, tile, gradients, not causal)
    firsts = _firsts(q_SBHD, k_SBGD, v_SBGD, *options, document_starts).flip(1)
    if causal:
        blocks = torch.arange(firsts.shape[1], device=firsts.device)
        return firsts, (len(k_SBGD) - blocks * queries).expand_as(firsts)
    q, k, v = (x.flip(0) for x in (q_SBHD, k_SBGD, v_SBGD))
    return firsts, len(k_SBGD) - _firsts(q, k, v, *options, blocks_from_first=True)


def _firsts(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    scale: float,
    queries: int,
    tile: int,
    gradients: bool,
    two_sided: bool,
    document_starts: Tensor | None = None,
    blocks_from_first: bool = False,
) -> Tensor:
    """Return the first key that each block can see, among those before it, int64 [G, blocks].

    Blocks are in the order of the queries. The first one may be shorter, or with
    `blocks_from_first` the last one.
    """
    num_queries, num_keys, groups = len(q_SBHD), len(k_SBGD), k_SBGD.shape[2]
    norms = row_norms(k_SBGD), row_norms(v_SBGD)
    longest = longest_so_far(norms[0], tile), longest_so_far(norms[1], tile)
    own = (norms[0][..., num_keys - num_queries :], norms[1][..., num_keys - num_queries :])
    left_out = tiles_left_out(
        q_SBHD, k_SBGD, own, longest, slopes, scale, tile, num_keys, gradients, document_starts,
        norms=norms[0], two_sided=two_sided, queries=queries, blocks_from_first=blocks_from_first,
    )  # fmt: skip
    if document_starts is not None:
        # Starts never decrease, so the first query of a block decides.
        first = torch.arange(num_queries % -queries, num_queries, queries).clamp(min=0)
        left_out = left_out.maximum(document_starts[:, None, first] // tile)
    return left_out.amin(0).view(groups, q_SBHD.shape[2] // groups, -1).amin(1) * tile


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
    norms: Tensor | None = None,
    two_sided: bool = False,
    queries: int = 1,
    blocks_from_first: bool = False,
) -> Tensor:
    """Return how many tiles of keys, from the first one on, are invisible to a block of queries.

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
        gradients: As in `key_windows`.
        document_starts: The same, in positions of `k_SBGD`.
        first: Position of the first key of the first tile.
        norms: 2-norms of the keys of all tiles, fp32 [B, G, keys], if no keys precede these. None:
            use the largest norms for all keys.
        two_sided: Whether another call leaves out keys after the queries.
        queries: Queries in a block.
        blocks_from_first: If blocks do not divide evenly, make the last one shorter, not the first.

    Returns:
        int64 [B, H, blocks].
    """
    shared = q_SBHD.shape[2] // k_SBGD.shape[2]
    own_key, own_value = (x.repeat_interleave(shared, dim=1) for x in own)
    key_BHT, value_BHT = (x.repeat_interleave(shared, dim=1) for x in longest)
    decay = slopes.float()[:, None] * (1 - RELATIVE_SLACK)
    position = torch.arange(num_keys - len(q_SBHD), num_keys, device=q_SBHD.device)
    floor = _floors(q_SBHD, k_SBGD, slopes.float(), scale, document_starts)
    needed = NEEDED + ABSOLUTE_SLACK + (math.log(2) if two_sided else 0)
    reach = row_norms(q_SBHD) * (abs(scale) * NORM_SLACK)
    # Scores over near keys round by a share of the product of norms, which may cancel in the floor.
    near = row_norms(k_SBGD).amax(2, keepdim=True).repeat_interleave(shared, dim=1)
    spare = floor - (floor.abs() + reach * near) * RELATIVE_SLACK - needed
    # Fill up the incomplete block with queries that never restrict the result.
    after = -len(q_SBHD) % queries
    fill = (0, after) if blocks_from_first else (after, 0)
    spare, reach, own_key, own_value = (
        torch.unflatten(pad(x, fill, value=filler), 2, (-1, queries))
        for x, filler in ((spare, math.inf), (reach, 0), (own_key, math.inf), (own_value, math.inf))
    )
    # Split distances to the last key of a tile in two parts: positions may be a million, and their
    # products with slopes would not be precise enough in fp32.
    places = pad(position, fill, value=int(position[0])).view(-1, queries)
    begins = places[:, 0]
    spare = spare + decay[..., None] * (places - begins[:, None] + 1)
    if norms is None:
        tail = -(-torch.expm1(-decay)).log().clamp(max=math.log(num_keys))[..., None]
    else:
        sums = _NormSums(reach, norms.repeat_interleave(shared, dim=1), decay, tile)

    def left_out(tile_BHT: Tensor) -> Tensor:
        """Return which blocks leave out tiles 0 .. tile_BHT."""
        key, value = (x.gather(2, tile_BHT)[..., None] for x in (key_BHT, value_BHT))
        most = reach * key + tail if norms is None else sums.at(tile_BHT)
        most = most + (value / own_value).clamp(min=1).log()
        if gradients:
            most = most + (key / own_key).clamp(min=1).log()
        # Comparisons with NaN are false, so tiles with non-finite numbers are not left out.
        between = begins - first - (tile_BHT + 1) * tile
        enough = spare - most > -(decay * between)[..., None]
        return enough.all(3) & (key + value).isfinite().squeeze(3) & (decay > 0)

    # The number of tiles left out is in low .. high; they are before the first query of the block.
    high = ((begins - first) // tile).clamp(min=0, max=key_BHT.shape[2]).expand(spare.shape[:3])
    low = torch.zeros_like(high)
    for _ in range(key_BHT.shape[2].bit_length()):
        middle = (low + high) // 2
        out = left_out(middle.clamp(max=key_BHT.shape[2] - 1)) & (middle < high)
        low, high = torch.where(out, middle + 1, low), torch.where(out, high, middle)
    return low


class _NormSums:
    """An upper bound of ln of the sum over tiles 0 .. c of exp(reach_i |k_j| - decay * d_cj).

    d_cj is the distance of key j to the last key of tile c.

    Args:
        reach_BHTS: For each query, by block: largest score per unit of a key's norm.
        norms_BHS: Norms of keys.
        decay: [H, 1].
        tile: Keys in a tile.
    """

    def __init__(self, reach_BHTS: Tensor, norms_BHS: Tensor, decay: Tensor, tile: int) -> None:
        longest = reach_BHTS.where(reach_BHTS.isfinite(), 0).amax((2, 3))[..., None]
        step = (longest / (NORM_POINTS - 1)).clamp(min=1e-30)
        keys = norms_BHS.shape[2]
        to_end = decay * (tile - 1 - torch.arange(keys, device=decay.device) % tile)
        sums = []
        for point in range(NORM_POINTS):
            terms = pad(norms_BHS * (step * point) - to_end, (0, -keys % tile), value=-math.inf)
            sums.append(torch.unflatten(terms, 2, (-1, tile)).logsumexp(3))
        of_tiles = torch.stack(sums, dim=3).double()  # [B, H, T, NORM_POINTS]
        # In fp64, because slope * position may be 10^5, and the sums need a precision of 2^-7.
        number = torch.arange(of_tiles.shape[2], device=decay.device)
        end = (decay.double() * (number * tile))[..., None]
        self.table = (torch.logcumsumexp(of_tiles + end, dim=2) - end).float()
        place = reach_BHTS / step[..., None]
        self.low = place.floor().clamp(max=NORM_POINTS - 2).long()
        self.weight = place - self.low

    def at(self, tile_BHT: Tensor) -> Tensor:
        """Return the bound for every query and the tile c of its block, fp32 [B, H, T, S]."""
        rows = self.table.gather(2, tile_BHT[..., None].expand(-1, -1, -1, NORM_POINTS))
        return rows.gather(3, self.low).lerp(rows.gather(3, self.low + 1), self.weight)


def _floors(
    q_SBHD: Tensor, k_SBGD: Tensor, slopes: Tensor, scale: float, document_starts: Tensor | None
) -> Tensor:
    """Return the logsumexp of each query's scores over the keys just before it, fp32 [B, H, S]."""
    num_queries, batch, heads, width = q_SBHD.shape
    groups, before = k_SBGD.shape[2], len(k_SBGD) - num_queries
    # A tile of queries takes the keys at its positions and at as many positions before. Positions
    # that do not exist are filled with zeros and masked.
    after = -num_queries % FLOOR_TILE
    q = pad(q_SBHD, (0, 0, 0, 0, 0, 0, 0, after))
    q = q.view(-1, FLOOR_TILE, batch, groups, heads // groups, width)  # [T, FLOOR_TILE, ...]
    front = max(FLOOR_TILE - before, 0)
    k = pad(k_SBGD[max(before - FLOOR_TILE, 0) :], (0, 0, 0, 0, 0, 0, front, after))
    k = k.unfold(0, 2 * FLOOR_TILE, FLOOR_TILE)  # [T, B, G, D, 2 * FLOOR_TILE]
    row = torch.arange(FLOOR_TILE, device=q.device)[:, None]
    column = torch.arange(2 * FLOOR_TILE, device=q.device)
    distance = row + FLOOR_TILE - column
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)
    starts = None if document_starts is None else pad(document_starts, (0, after))
    floors = []
    for begin in range(0, len(q), FLOOR_TILES):
        part = slice(begin, begin + FLOOR_TILES)
        q_part = (
            q[part].permute(0, 2, 3, 4, 1, 5).float() * scale
        )  # [T, B, G, H / G, FLOOR_TILE, D]
        many = (len(q_part), batch, groups)
        scores = torch.baddbmm(
            bias.expand(*many[:2], -1, -1, -1).reshape(math.prod(many), -1, len(column)),
            q_part.reshape(math.prod(many), -1, width),
            k[part].float().reshape(math.prod(many), width, -1),
        ).view(*many[:2], heads, FLOOR_TILE, -1)
        # Hide only keys before the first existing key, and before a query's document.
        if starts is not None or before + (begin - 1) * FLOOR_TILE < 0:
            number = torch.arange(begin, begin + len(q_part), device=q.device)[:, None]
            position = before + (number - 1) * FLOOR_TILE + column  # [T, 2 * FLOOR_TILE]
            first = torch.zeros_like(row)[None, None]
            if starts is not None:
                first = starts.view(batch, -1, FLOOR_TILE)[:, part].transpose(0, 1)[..., None]
            scores.masked_fill_((position[:, None, None] < first)[:, :, None], -math.inf)
        # Like torch's logsumexp, but in place. No row is empty, because own keys are never hidden.
        most = scores.amax(-1, keepdim=True)
        floors.append(scores.sub_(most).exp_().sum(-1).log_().add_(most[..., 0]))
    whole = torch.cat(floors).permute(1, 2, 0, 3).reshape(batch, heads, -1)
    return whole[..., :num_queries]


def has_values(q_SBHD: Tensor, slopes: Tensor) -> bool:
    """Return True if it can be decided from the values which keys matter.

    The gradient of slopes needs every distance, and fake and meta tensors have no values.
    """
    trained = slopes.requires_grad and torch.is_grad_enabled()
    return not (trained or isinstance(q_SBHD, FakeTensor) or q_SBHD.is_meta)


def row_norms(x_SBHD: Tensor) -> Tensor:
    """Return the 2-norm of every row, fp32 [B, H, S]; infinite instead of NaN."""
    norms: Tensor = torch.linalg.vector_norm(x_SBHD.float(), dim=3).permute(1, 2, 0)
    return norms.nan_to_num(nan=math.inf, posinf=math.inf)


def longest_so_far(norms_BHS: Tensor, tile: int) -> Tensor:
    """Return the largest norm in tiles 0 .. t, [B, H, T]."""
    tiles = torch.unflatten(pad(norms_BHS, (0, -norms_BHS.shape[2] % tile)), 2, (-1, tile))
    longest: Tensor = torch.cummax(tiles.amax(3), 2).values
    return longest
