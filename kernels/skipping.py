"""Which tiles of keys an ALiBi head need not load, and why nothing is lost: the bound, written out in plain torch.

A key far back carries the bias -slope * distance. Where no q.k can make up for that, its weight is too small to show,
and its tile need not be loaded. With |q| and |k| the longest rows of a tile of queries and a tile of keys, no score
between the two exceeds

    |scale| |q| |k| - slope * (distance between the tiles).

The softmax divides by exp(logsumexp of the row), and the keys of the query's own tile alone give a lower bound of that,
the row's `floor`. So every weight in the tile is below 2^-need / keys once, in powers of two,

    floor - that score > log2(keys) + need,

and all weights dropped from a row sum to less than 2^-need. `need` is 24 bits and more:
- log2 of how far the tile's longest value, and its longest key, exceed those of the query's own tile: what is dropped
  from an output is below 2^-24 of the values it is made of, one giant value far away notwithstanding; for keys the
  same holds of the gradient of q;
- log2(keys) again where the slopes want a gradient, which weighs every weight by its distance.
Rounding goes against skipping, a slope that is not positive skips nothing, and rows that are not finite count as
infinitely long: whatever might see a NaN does.

What is left for a tile of queries is a run of tiles of keys, [first, end), since the kernels loop over runs: what lies
between two tiles that matter is visited too. The Triton kernel does the same arithmetic on the device
(`pretrain.kernels.alibi_attention`), and its backward visits the very tiles of its forward.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head, T tiles.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NEEDED_BITS = 24.0
"""What all dropped weights of a row may add up to: 2^-24, half a unit in the last place of an fp32 one."""
NORM_SLACK = 1 + 2.0**-12
"""Times a product of norms: above the rounding of sums over 256 columns, of norms and of tensor-core products alike."""
RELATIVE_SLACK = 2.0**-18
ABSOLUTE_SLACK = 2.0**-6
"""In bits, for the rounding of everything else in fp32: logarithms, sums, slope * distance."""
LOG2E = math.log2(math.e)


class KeyRuns(NamedTuple):
    """The tiles of keys that every tile of queries visits: first <= tile < end."""

    first_BHT: Tensor
    end_BHT: Tensor
    """int32, [batch, query heads, tiles of queries]"""


def key_runs(
    q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, slopes: Tensor, *, query_tile: int, key_tile: int,
    causal: bool = True, scale: float | None = None, trained_slopes: bool = False,
) -> KeyRuns:  # fmt: skip
    """The runs of tiles that matter, from the actual q, k and v. Tiles hold `query_tile` queries and `key_tile` keys.

    Arguments otherwise as `pretrain.kernels.dispatch.attention` takes them; `trained_slopes` where slopes want a gradient.
    """
    num_queries, num_keys, heads = q_SBHD.shape[0], k_SBGD.shape[0], q_SBHD.shape[2]
    share = heads // k_SBGD.shape[2]
    scale = q_SBHD.shape[3] ** -0.5 if scale is None else scale
    floor, own_first, own_end = own_floors(
        q_SBHD, k_SBGD, slopes, query_tile, key_tile, causal, scale
    )
    longest_q = longest_rows(q_SBHD, query_tile)
    longest_k, longest_v = (
        longest_rows(x, key_tile).repeat_interleave(share, dim=1) for x in (k_SBGD, v_SBGD)
    )

    starts = torch.arange(len(own_first)) * query_tile
    first_position = starts + num_keys - num_queries
    last_position = (starts + query_tile).clamp(max=num_queries) - 1 + num_keys - num_queries
    tiles = torch.arange(longest_k.shape[2])
    before = first_position[:, None] - (tiles * key_tile + key_tile - 1)
    after = tiles * key_tile - last_position[:, None]
    own = (tiles >= own_first[:, None]) & (tiles < own_end[:, None])
    distance = torch.where(tiles < own_first[:, None], before, after).float()

    slope = slopes.float()[None, :, None, None] * LOG2E
    most = abs(scale) * LOG2E * longest_q[..., None] * longest_k[:, :, None] * NORM_SLACK
    floor = (floor - floor.abs() * RELATIVE_SLACK)[..., None]
    gap = floor - (most - slope * distance * (1 - RELATIVE_SLACK))
    need = torch.tensor(NEEDED_BITS + math.log2(num_keys) * (2 if trained_slopes else 1) + ABSOLUTE_SLACK)
    for longest in (longest_k[:, :, None], longest_v[:, :, None]):
        of_own = torch.where(own, longest, 0).amax(dim=3, keepdim=True)
        need = need + torch.where(longest > of_own, longest / of_own, 1).log2()
    finite = (longest_k < torch.inf) & (longest_v < torch.inf)
    skipped = (gap > need) & finite[:, :, None] & (slope > 0) & ~own
    allowed = tiles < own_end[:, None] if causal else torch.ones_like(own)
    matters = ~skipped & allowed
    first = torch.where(matters, tiles, len(tiles)).amin(dim=3)
    end = torch.where(matters, tiles, -1).amax(dim=3) + 1
    return KeyRuns(first.int(), end.int())


def own_floors(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    slopes: Tensor,
    query_tile: int,
    key_tile: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(floor [B, H, T], first [T], end [T]): the least logsumexp, base 2, that the rows of a tile of queries have over
    the keys of their own tiles [first, end): those that hold the queries' positions, or the nearest to them."""
    num_queries, num_keys = q_SBHD.shape[0], k_SBGD.shape[0]
    k_SBHD = k_SBGD.repeat_interleave(q_SBHD.shape[2] // k_SBGD.shape[2], dim=2)
    floors, firsts, ends = [], [], []
    for start in range(0, num_queries, query_tile):
        q = q_SBHD[start : start + query_tile].float().permute(1, 2, 0, 3)
        position = torch.arange(start, start + q.shape[2]) + num_keys - num_queries
        first, last = (max(int(position[end]), 0) // key_tile for end in (0, -1))
        keys = torch.arange(first * key_tile, min((last + 1) * key_tile, num_keys))
        scores = q @ k_SBHD[keys].float().permute(1, 2, 3, 0) * (scale * LOG2E)
        distance = (position[:, None] - keys).float()
        scores = scores - slopes.float()[:, None, None] * LOG2E * distance.abs()
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        floors.append((scores * math.log(2)).logsumexp(dim=3).amin(dim=2) * LOG2E)
        firsts.append(first)
        ends.append(last + 1)
    return torch.stack(floors, dim=2), torch.tensor(firsts), torch.tensor(ends)


def longest_rows(x_SBHD: Tensor, tile: int) -> Tensor:
    """The largest 2-norm of the rows of every tile, fp32 [B, H, T]; infinite where a row is not finite."""
    norms = x_SBHD.float().square().sum(dim=3).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
    padded = torch.nn.functional.pad(norms.permute(1, 2, 0), (0, -len(x_SBHD) % tile))
    return padded.unflatten(2, (-1, tile)).amax(dim=3)


def share_visited(
    runs: KeyRuns, num_queries: int, num_keys: int, query_tile: int, key_tile: int, causal: bool
) -> Tensor:
    """What share of the tiles that a head would visit without skipping it does visit, fp64 [B, H]."""
    starts = torch.arange(0, num_queries, query_tile)
    last_position = (starts + query_tile).clamp(max=num_queries) - 1 + num_keys - num_queries
    ends = (
        last_position // key_tile + 1
        if causal
        else torch.full_like(starts, -(-num_keys // key_tile))
    )
    return (runs.end_BHT - runs.first_BHT).cpu().double().sum(dim=2) / ends.sum()
