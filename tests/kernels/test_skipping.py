"""Test the bound behind tile skipping against dense attention in fp64.

The tiles come from `oracles`, in plain torch; `test_flash` tests that the kernel visits the same
ones.
"""

import math

import pytest
import torch

from pretrain.positions.alibi import alibi_slopes
from tests.kernels.oracles import longest_rows, visited_tiles

TILES = {"query_tile": 128, "key_tile": 128}


def share_visited(
    tiles_BHTK: torch.Tensor,
    num_queries: int,
    num_keys: int,
    query_tile: int,
    key_tile: int,
    causal: bool,
) -> torch.Tensor:
    """Return the share of tiles that each head visits, of those it would visit without skipping.

    Args:
        tiles_BHTK: The tiles that are visited, bool [B, H, query tiles, key tiles].
        num_queries: Number of queries.
        num_keys: Number of keys.
        query_tile: Queries in a tile.
        key_tile: Keys in a tile.
        causal: A causal mask is applied, so tiles after the queries do not count.

    Returns:
        [B, H], fp64.
    """
    starts = torch.arange(0, num_queries, query_tile)
    last_position = (starts + query_tile).clamp(max=num_queries) - 1 + num_keys - num_queries
    if causal:
        ends = last_position // key_tile + 1
    else:
        ends = torch.full_like(starts, -(-num_keys // key_tile))
    return tiles_BHTK.cpu().double().sum(dim=(2, 3)) / ends.sum()


def visited(visits, num_keys, key_tile):
    """Return which keys each query visits, bool [B, H, queries, keys]."""
    return visits.rows_BHSK.repeat_interleave(key_tile, dim=3)[..., :num_keys]


def first_tile(visits):
    """Return the first tile of keys that each tile of queries visits, [B, H, query tiles]."""
    return visits.tiles_BHTK.int().argmax(dim=3)


def attend(q, k, v, slopes, causal, seen=None):
    """Compute dense attention in fp64 over the keys in `seen`, or over all.

    Returns (output [S, B, H, D], weights [B, H, queries, keys]). There must be a key head per head.
    """
    num_queries, num_keys = len(q), len(k)
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    distance = (
        torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    ).double()
    scores = q @ k.mT / q.shape[3] ** 0.5 - slopes.double()[:, None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(dim=3)
    return (weights @ v).permute(2, 0, 1, 3), weights


def draw(kind, length, heads, width=64, seed=0):
    """Return q, k and v of the given kind, [length, 1, heads, width]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, 1, heads, width, generator=generator) for _ in range(3))
    if kind.startswith("scale "):
        q = q * float(kind.removeprefix("scale "))
    if kind in ("constant", "giant value", "giant key, faint queries"):
        q, k = torch.full_like(q, 0.7), torch.full_like(k, 1.3)
    if kind == "one-hot":
        hot = torch.eye(width)[torch.randint(width, (2, length, 1, heads), generator=generator)]
        q, k = 9 * hot
    if kind == "giant key":
        k[3] *= 1e4
    if kind == "giant value":
        v[255] *= 1e12
    if kind == "giant key, faint queries":
        # The key shows in the gradient of q only, not in any weight.
        q *= 1e-12
        k[255] *= 1e12
    if kind == "saturated":
        # Every query attends to its own key alone, so all gradients of scores nearly cancel.
        q = k * 3
    if kind == "giant queries":
        q[length // 2 :] *= 1e6
    if kind == "key against its query":
        # The key at a query's own position has the lowest possible score, the first keys the
        # highest.
        k = -q
        k[:64] = q[-64:] * 1.5
    return q, k, v


def assert_skipping_changes_nothing(q, k, v, slopes, visits, query_tile, key_tile, causal=True):
    """Compare outputs and gradients with and without the tiles that `visits` leaves out.

    Returns the largest sum of weights that a row lost.
    """
    seen = visited(visits, len(k), key_tile)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    towards = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).double()
    out, weights = attend(q, k, v, slopes, causal)
    dropped = (weights * ~seen).sum(dim=3).max().item()
    grads = torch.autograd.grad((out * towards).sum(), (q, k, v))
    skipped, _ = attend(q, k, v, slopes, causal, seen)
    skipped_grads = torch.autograd.grad((skipped * towards).sum(), (q, k, v))
    assert dropped < 2.0**-24
    for name, x, truth in zip("oq", (skipped, skipped_grads[0]), (out, grads[0])):
        # The rounding of the oracle itself, where giant values cancel.
        noise = 1e-12 + 1e-18 * float(rows(v).max() * rows(k).max())
        assert (x - truth).abs().max() <= 2.0**-20 * truth.abs().max() + noise, name
    # The bounds that `pretrain.kernels.flash` states, row by row.
    own_value, own_key = (
        own_rows(x.detach(), len(q), query_tile, key_tile, causal) for x in (v, k)
    )
    weights, bound = weights.detach(), 1.01 * 2.0**-24
    noise = 1e-13
    assert (rows(skipped - out) <= bound * (own_value + rows(out)) + noise).all()
    for_row = own_key * (own_value + rows(out))
    for_row += (own_value + 2 * rows(out)) * (weights @ rows(k).double()[..., None])[..., 0]
    for_row += (weights @ (rows(k) * rows(v)).double()[..., None])[..., 0]
    for_row *= rows(towards) / q.shape[3] ** 0.5
    assert (rows(skipped_grads[0] - grads[0]) <= bound * for_row + noise).all()
    shares = weights + 1 / len(k)
    for_value = (shares * rows(towards)[..., None]).sum(dim=2)
    assert (rows(skipped_grads[2] - grads[2]) <= bound * for_value + 1e-13).all()
    for_query = rows(towards) * rows(q) / q.shape[3] ** 0.5
    for_key = (shares * (for_query * (own_value + 2 * rows(out)))[..., None]).sum(dim=2)
    for_key += rows(v) * (weights * for_query[..., None]).sum(dim=2)
    assert (rows(skipped_grads[1] - grads[1]) <= bound * for_key + noise).all()
    return dropped


def own_rows(x, num_queries, query_tile, key_tile, causal):
    """Return the norm that the proof compares keys or values with, for each query, [B, H, S]."""
    query = torch.arange(num_queries)
    first = query // query_tile * query_tile + len(x) - num_queries
    if causal:
        return rows(x)[:, :, first]
    last = (first + query_tile).clamp(max=len(x)) - 1
    norms = longest_rows(x, key_tile)
    own = [
        norms[:, :, max(a, 0) // key_tile : max(b, 0) // key_tile + 1].amax(dim=2)
        for a, b in zip(first.tolist(), last.tolist())
    ]
    return torch.stack(own, dim=2)


def rows(x_SBHD):
    """Return the 2-norm of every row, [B, H, S]."""
    return x_SBHD.detach().norm(dim=3).permute(1, 2, 0)


KINDS = [
    "scale 1",
    "scale 3",
    "scale 8",
    "constant",
    "one-hot",
    "giant key",
    "giant key, faint queries",
    "giant value",
    "giant queries",
    "saturated",
    "key against its query",
]


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_changes_nothing(kind):
    q, k, v = draw(kind, 1024, 2)
    slopes = alibi_slopes(16)[[0, 5]]
    visits = visited_tiles(q, k, v, slopes, **TILES)
    assert_skipping_changes_nothing(q, k, v, slopes, visits, **TILES)
    share = share_visited(visits.tiles_BHTK, 1024, 1024, causal=True, **TILES).squeeze(0)
    if kind in ("scale 1", "constant", "one-hot"):
        assert share[0] < 0.5, "the steep head skips most of its tiles"
    if kind == "giant key":
        assert (first_tile(visits) == 0).all(), "all that see it visit it"


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(300, 1000, True), (700, 700, False), (900, 300, False), (200, 900, False)],
)
def test_other_shapes(queries, keys, causal):
    """Test other numbers of queries than keys, no mask, unequal tiles, and ragged last tiles."""
    q, (_, k, v) = draw("scale 1", queries, 2)[0], draw("scale 1", keys, 2, seed=1)
    slopes = torch.tensor([0.7, 0.3])
    for tiles in ({"query_tile": 64, "key_tile": 32}, {"query_tile": 32, "key_tile": 64}):
        visits = visited_tiles(q, k, v, slopes, causal=causal, **tiles)
        assert_skipping_changes_nothing(q, k, v, slopes, visits, causal=causal, **tiles)
        assert (share_visited(visits.tiles_BHTK, queries, keys, causal=causal, **tiles) < 0.8).all()


def test_bound_holds_where_it_is_tight():
    """Construct the worst case: with one bit less of `need`, too much would be dropped.

    Every key before the last tile lies along the query and is just short enough for its tile to be
    skipped, so the weights that are dropped are as large as the bound permits.
    """
    length, tile, slope, own_score = 2048, 64, 2.0**-10, 60.0
    q, k, v = (
        torch.zeros(length, 1, 1, 64),
        torch.zeros(length, 1, 1, 64),
        torch.ones(length, 1, 1, 64),
    )
    # The scale is 1 / 8, so a score is the first number of its key.
    q[-tile:, :, :, 0] = 8.0
    k[-tile:, :, :, 0] = own_score
    slopes = torch.tensor([slope])
    # The first query of the last tile sees one key of that tile, whose score is its logsumexp.
    nearest = torch.arange(length // tile - 1).flip(0) * tile + 1
    longest = own_score - (24 + math.log2(length)) * math.log(2) + slope * nearest

    def visits_of(short):
        k[:-tile, 0, 0, 0] = (longest - short).repeat_interleave(tile)
        return visited_tiles(q, k, v, slopes, query_tile=tile, key_tile=tile)

    assert (first_tile(visits_of(short=-0.1))[0, 0, -1] == 0).all(), (
        "a little longer, and nothing is skipped"
    )
    visits = visits_of(short=0.1)
    assert first_tile(visits)[0, 0, -1] == length // tile - 1, "a little shorter, and all of it is"
    seen = visited(visits, length, tile)[:, :, -tile:]
    _, weights = attend(q[-tile:], k, v, slopes, True)
    dropped = (weights * ~seen).sum(dim=3).max()
    assert 2.0**-26 < dropped < 2.0**-24


@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_share_is_that_of_the_closed_form(length):
    """With equal scores, a key matters until slope * distance exceeds 24 + log2(length) bits."""
    q, k, _ = draw("constant", length, 8, width=32)
    slopes = alibi_slopes(8)
    share = share_visited(
        visited_tiles(q, k, torch.ones_like(k), slopes, **TILES).tiles_BHTK,
        length,
        length,
        causal=True,
        **TILES,
    )
    tiles = length // 128
    for head, slope in enumerate(slopes.tolist()):
        window = (24 + math.log2(length)) * math.log(2) / slope
        # The t-th tile before a tile of queries ends (t - 1) * 128 + 1 keys before its first query.
        before = [min(tile, int((window - 1) // 128) + 1) for tile in range(tiles)]
        expected = sum(1 + x for x in before) / (tiles * (tiles + 1) / 2)
        assert share[0, head] == pytest.approx(expected, abs=1e-12), head
