"""List the tiles of keys that each tile of queries visits under ALiBi, for block-sparse kernels.

The bound is that of `pretrain.kernels.flash` (read its docstring first), computed here by a few
batched torch operations on the device of q, since kernels of other projects take lists that exist
before they run.

- A tile's own keys are those at the positions of its queries, in tiles of 128. For the floor, a
  query counts those of its own 128 alone, which is careful: a logsumexp only grows with more keys.
- Far keys and values are compared with those at the first position of the tile of queries, which
  all of its queries see. So what a later token of the tile contains cannot make an earlier query
  lose more than 2^-24 of what it sees itself.
- The result is a list per tile of queries and not a run, so one attention sink at key 0 keeps one
  tile and not all between.
"""

# Shape suffixes: S sequence, B batch, H query heads, G key heads, D width of a head, T tiles,
# K rows of a tile.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.kernels.flash import device

ABSOLUTE_SLACK, RELATIVE_SLACK = device.ABSOLUTE_SLACK.value, device.RELATIVE_SLACK.value
NEEDED_BITS, NORM_SLACK = device.NEEDED_BITS.value, device.NORM_SLACK.value
LOG2E = device.LOG2E.value
KEY_TILE = 128
"""Keys in a tile, and the granularity of floors."""


class BlockLists(NamedTuple):
    """For each tile of queries, the tiles of keys that need the causal mask and those that do not.

    Tiles in a list ascend, so that the order of summation is always the same. All are int32.
    """

    partial_counts: Tensor
    """[B, H, query tiles]: length of the list of tiles that need the mask."""
    partial: Tensor
    """[B, H, query tiles, key tiles]: the list, then other tiles, which are not visited."""
    full_counts: Tensor
    """[B, H, query tiles]: the same for tiles whose keys all queries see."""
    full: Tensor
    """[B, H, query tiles, key tiles]."""


def causal_lists(
    num_queries: int, num_keys: int, query_tile: int, device: torch.device
) -> BlockLists:
    """Return the lists of all tiles that the causal mask leaves, with B = H = 1.

    Args:
        num_queries: Number of queries; they are the last positions of the keys.
        num_keys: Number of keys.
        query_tile: Queries in a tile.
        device: Where to make the lists.
    """
    partial, full = _causal_tiles(num_queries, num_keys, query_tile, device)
    return _as_lists(partial[None, None], full[None, None])


def skipping_lists(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor,
    query_tile: int,
    scale: float,
) -> BlockLists:
    """Return the lists of the tiles that the causal mask leaves and that can matter under ALiBi.

    Args:
        q_SBHD: Queries, [S, B, H, D].
        k_SBGD: Keys, [S, B, G, D], as many as there are queries.
        v_SBGD: Values, [S, B, G, D].
        slopes: ALiBi slopes, [H]; they must not want a gradient.
        query_tile: Queries in a tile, a multiple of KEY_TILE.
        scale: Factor of the products q k^T.
    """
    length, heads_per_group = len(q_SBHD), q_SBHD.shape[2] // k_SBGD.shape[2]
    partial, full = _causal_tiles(length, length, query_tile, q_SBHD.device)
    q, k, v = (
        _tiles(x.repeat_interleave(repeats, dim=2) if repeats > 1 else x)
        for x, repeats in ((q_SBHD, 1), (k_SBGD, heads_per_group), (v_SBGD, heads_per_group))
    )
    floor_BHT = _coarser(_floors(q, k, slopes, scale, length), query_tile, "min")
    longest_q = _coarser(_norms(q).amax(dim=3), query_tile, "max")
    norms_k, norms_v = _norms(k), _norms(v)
    # The row at the first position of each tile of queries.
    first = slice(None, None, query_tile // KEY_TILE)
    seen_k, seen_v = norms_k[:, :, first, 0], norms_v[:, :, first, 0]
    longest_k, longest_v = norms_k.amax(dim=3), norms_v.amax(dim=3)

    # The bound. From here on, tensors are [B, H, query tiles, key tiles].
    query_tiles = torch.arange(partial.shape[0], device=slopes.device)
    key_tiles = torch.arange(partial.shape[1], device=slopes.device)
    distance = query_tiles[:, None] * query_tile - (key_tiles * KEY_TILE + KEY_TILE - 1)
    slope = slopes.float()[None, :, None, None] * LOG2E
    most = abs(scale) * LOG2E * longest_q[..., None] * longest_k[:, :, None] * NORM_SLACK
    floor = (floor_BHT - floor_BHT.abs() * (2 * RELATIVE_SLACK))[..., None]
    gap = floor - (most - slope * distance * (1 - RELATIVE_SLACK))
    need = torch.full_like(gap, NEEDED_BITS + math.log2(length) + 2 * ABSOLUTE_SLACK)
    for longest, seen in ((longest_k, seen_k), (longest_v, seen_v)):
        # A row of zeros makes this infinite, and nothing is skipped.
        ratio = longest[:, :, None] / seen[..., None]
        need += ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=1).log2()
    # Comparisons with NaN are false, so a tile with a NaN in its terms is not skipped.
    skipped = (gap > need) & (slope > 0) & full
    return _as_lists(partial.expand_as(skipped), full & ~skipped)


def _causal_tiles(
    num_queries: int, num_keys: int, query_tile: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return which tiles some and which all of their queries see whole, bool [query, key tiles].

    Args:
        num_queries: Number of queries.
        num_keys: Number of keys.
        query_tile: Queries in a tile.
        device: Where to make them.
    """
    first = torch.arange(0, num_queries, query_tile, device=device)[:, None]
    last = (first + query_tile).clamp(max=num_queries) - 1
    first, last = (row + num_keys - num_queries for row in (first, last))
    key = torch.arange(0, num_keys, KEY_TILE, device=device)
    full = key + KEY_TILE - 1 <= first
    return (key <= last) & ~full, full


def _floors(q: Tensor, k: Tensor, slopes: Tensor, scale: float, length: int) -> Tensor:
    """Return the lowest logsumexp of each tile's queries over the tile's own keys, in base 2.

    Args:
        q: Tiles of queries, [B, H, T, K, D].
        k: Tiles of keys, [B, H, T, K, D].
        slopes: [H].
        scale: Factor of the products q k^T.
        length: Number of queries; those beyond are padding.
    """
    position = torch.arange(KEY_TILE, device=q.device)
    distance = position[:, None] - position
    scores = (q.float() * scale) @ k.float().mT - slopes.float()[:, None, None, None] * distance
    rows = scores.masked_fill(distance < 0, -torch.inf).logsumexp(dim=4) * LOG2E
    padding = torch.arange(rows.shape[2] * KEY_TILE, device=q.device).view(-1, KEY_TILE) >= length
    return rows.masked_fill(padding, torch.inf).amin(dim=3)


def _norms(tiles: Tensor) -> Tensor:
    """Return the 2-norm of each row, [B, H, T, K], infinite where a row is not finite."""
    norms = tiles.float().square().sum(dim=4).sqrt()
    return norms.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _tiles(x_SBHD: Tensor) -> Tensor:
    """Return x as tiles of KEY_TILE rows, [B, H, T, K, D], padded with zeros."""
    length, batch, heads, width = x_SBHD.shape
    padded = torch.nn.functional.pad(x_SBHD.permute(1, 2, 0, 3), (0, 0, 0, -length % KEY_TILE))
    return padded.reshape(batch, heads, -1, KEY_TILE, width)


def _coarser(x_BHT: Tensor, query_tile: int, how: str) -> Tensor:
    """Return the extremes of the KEY_TILE tiles within each tile of queries.

    Args:
        x_BHT: A value per tile of KEY_TILE.
        query_tile: Queries in a tile.
        how: "min" or "max".
    """
    step = query_tile // KEY_TILE
    fill = torch.inf if how == "min" else -torch.inf
    padded = torch.nn.functional.pad(x_BHT, (0, -x_BHT.shape[2] % step), value=fill)
    grouped = padded.reshape(*padded.shape[:2], -1, step)
    return grouped.amin(dim=3) if how == "min" else grouped.amax(dim=3)


def _as_lists(partial: Tensor, full: Tensor) -> BlockLists:
    """Turn bool [B, H, query tiles, key tiles] into lists."""
    lists = []
    for tiles in (partial, full):
        order = (~tiles).to(torch.int8).argsort(dim=3, stable=True)
        lists += [tiles.sum(dim=3, dtype=torch.int32), order.to(torch.int32)]
    return BlockLists(*lists)
