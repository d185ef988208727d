"""What the Triton kernel decides, in plain torch: tiles that are skipped, weights that are dropped.

And random inputs of all kernels' tests.

The bound behind skipping and its proof stand in the docstring of `pretrain.kernels.flash`.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head,
# T tiles.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NEEDED_BITS = 24.0
NORM_SLACK = 1 + 2.0**-12
RELATIVE_SLACK = 2.0**-18
ABSOLUTE_SLACK = 2.0**-6
LOG2E = math.log2(math.e)


class Visits(NamedTuple):
    """The tiles of keys that are visited."""

    tiles_BHTK: Tensor
    """By each tile of queries, bool [B, H, query tiles, key tiles]."""
    rows_BHSK: Tensor
    """By each query, bool [B, H, S, key tiles]. Other keys of a visited tile get no weight."""


def random_qkv(
    shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Return queries, keys and values, leaves that require gradients.

    Args:
        shape: Queries, keys, batch, heads, key heads, width of a head.
        generator: Draws them, the queries first.
        dtype: Their dtype; they are drawn in fp32 on the CPU.
        device: Where they lie.
    """
    queries, keys, batch, heads, groups, width = shape
    sizes = ((queries, heads), (keys, groups), (keys, groups))
    drawn = (torch.randn(n, batch, count, width, generator=generator) for n, count in sizes)
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def visited_tiles(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    *,
    query_tile: int,
    key_tile: int,
    causal: bool = True,
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

    Returns:
        The visited tiles.
    """
    num_queries, num_keys, heads = q_SBHD.shape[0], k_SBGD.shape[0], q_SBHD.shape[2]
    heads_per_group = heads // k_SBGD.shape[2]
    scale = q_SBHD.shape[3] ** -0.5
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
    need = torch.tensor(NEEDED_BITS + log2_keys + ABSOLUTE_SLACK)
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
    reach = scale * LOG2E * longest_rows(q_SBHD, query_tile)[..., None]
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
        row_reach = scale * LOG2E * longest_rows(q_SBHD, 1)[..., None]
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


def dropout_keep(seed: int, shape: tuple[int, int, int, int], dropout_p: float) -> Tensor:
    """Return the weights that the Triton kernel's dropout keeps, bool [B, H, queries, keys].

    The random numbers are those of Philox4x32 with 7 rounds (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011, section 3.3), from the counter (key, query, b * H + h,
    0). The upper 24 bits of the first word, read as a fraction, are kept if they are at least
    dropout_p.

    Args:
        seed: Key of the generator, below 2^64.
        shape: (B, H, queries, keys).
        dropout_p: Probability that a weight is dropped.

    Returns:
        bool, [B, H, queries, keys].
    """
    batch, heads, num_queries, num_keys = shape
    word = (1 << 32) - 1
    head, query, key = torch.meshgrid(
        *(torch.arange(n) for n in (batch * heads, num_queries, num_keys)), indexing="ij"
    )
    c0, c1, c2, c3 = key, query, head, torch.zeros_like(key)
    key_low, key_high = seed & word, seed >> 32
    for _ in range(7):
        # int64 products wrap and right shifts keep the sign; masking with `word` corrects both. In
        # Python `&` binds tighter than `^`.
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (high >> 32) & word ^ c1 ^ key_low, high & word
        c2, c3 = (low >> 32) & word ^ c3 ^ key_high, low & word
        key_low, key_high = (key_low + 0x9E3779B9) & word, (key_high + 0xBB67AE85) & word
    kept = (c0 >> 8).float() / (1 << 24) >= dropout_p
    return kept.reshape(shape)
