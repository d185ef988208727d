"""Test the lists of visited tiles that FlashAttention-4 is given, against the bound they rest on.

What is lost is computed in double precision from the definition of attention, and the lists are
compared with `pretrain.kernels.skipping`, from which they differ only on the careful side.
"""

import math

import pytest
import torch

from pretrain.kernels import flash4, skipping
from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.block_lists import KEY_TILE, causal_lists, skipping_lists
from pretrain.kernels.call import ScoreBias
from pretrain.kernels.dispatch import attention
from pretrain.kernels.reference import attention_reference
from tests.kernels.test_dispatch import CUDA, assert_as_good_as_plain_torch, run

CPU = torch.device("cpu")


def dense(lists, shape=None):
    """Return (partial, full) as bool [B, H, query tiles, key tiles]; check that lists ascend."""
    results = []
    for counts, indices in ((lists[0], lists[1]), (lists[2], lists[3])):
        assert counts.dtype == indices.dtype == torch.int32
        listed = torch.zeros(indices.shape, dtype=torch.bool)
        for row in torch.cartesian_prod(*(torch.arange(n) for n in indices.shape[:3])).tolist():
            used = indices[tuple(row)][: counts[tuple(row)]].tolist()
            assert used == sorted(set(used))
            listed[tuple(row)][used] = True
        results.append(listed)
    assert not (results[0] & results[1]).any()
    return results


def seen(partial, full, num_queries, num_keys, query_tile):
    """Return which keys the lists let each query see, bool [B, H, queries, keys]."""
    query = torch.arange(num_queries) // query_tile
    key = torch.arange(num_keys) // KEY_TILE
    position = torch.arange(num_keys - num_queries, num_keys)
    causal = position[:, None] >= torch.arange(num_keys)
    pick = lambda tiles: tiles[:, :, query][:, :, :, key]  # noqa: E731
    return (pick(partial) & causal) | pick(full), causal


@pytest.mark.parametrize("query_tile", [128, 256])
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (128, 128), (300, 300), (640, 640), (5, 700), (128, 256)]
)
def test_without_skipping_the_lists_are_the_causal_mask(queries, keys, query_tile):
    partial, full = dense(causal_lists(queries, keys, query_tile, CPU))
    visible, causal = seen(partial, full, queries, keys, query_tile)
    assert torch.equal(visible[0, 0], causal)
    mask = flash4._causal_block_mask(queries, keys, query_tile, CPU)
    assert mask.seq_lengths == (queries, keys) and (query_tile, KEY_TILE) == mask.BLOCK_SIZE


def inputs(length, heads, width, kind, groups=None):
    generator = torch.Generator().manual_seed(length + heads)
    shapes = [(length, 2, heads, width)] + 2 * [(length, 2, groups or heads, width)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    if kind == "peaked":
        q, k = 3 * q, 3 * k
    if kind == "giants far back":
        k[7], v[3] = 40 * k[7], 1e6 * v[3]
    if kind == "giants in own tiles":
        # The last rows of every tile, which the first queries of the tile do not see.
        k[127::128] *= 8
        v[127::128] *= 1e6
        v[5] *= 1e4
    if kind == "sink":
        # A first key that attracts every query, however far.
        k[0] = 0
        k[0, ..., 0], q[..., 0] = 60.0, 20.0
    return q, k, v


KINDS = ["gaussian", "peaked", "giants far back", "giants in own tiles", "sink"]


@pytest.mark.parametrize("query_tile", [128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_is_below_the_bound(kind, query_tile):
    """Weights lost sum to less than 2^-24 a row, also times values relative to those seen."""
    length, heads, width = 900, 4, 16
    q, k, v = inputs(length, heads, width, kind)
    slopes = torch.tensor([0.9, 0.5, 0.2, 0.01])
    scale = width**-0.5
    partial, full = dense(skipping_lists(q, k, v, slopes, query_tile, scale))
    visible, causal = seen(partial, full, length, length, query_tile)
    assert not (visible & ~causal).any()
    assert visible.diagonal(dim1=2, dim2=3).all()

    q64, k64, v64 = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = q64 @ k64.mT * scale - slopes.double()[:, None, None] * distance
    weights = scores.masked_fill(~causal, -torch.inf).softmax(dim=3)
    lost = weights.masked_fill(visible, 0)
    assert (lost.sum(dim=3) < 2.0**-24).all()
    for rows in (k64, v64):
        sizes = rows.norm(dim=3)
        # The first row of the query's tile: every query of the tile sees it.
        reference = sizes[:, :, torch.arange(length) // query_tile * query_tile]
        lost_rows = (lost * sizes[:, :, None]).sum(dim=3)
        assert (lost_rows <= 2.0**-24 * reference).all()
    if kind == "gaussian":
        # The last queries of the steepest head.
        assert (full[:, 0, -1].sum(dim=1) <= 2).all()
    if kind == "sink":
        # A list keeps the sink's tile without those between: head 2 at its last query.
        assert visible[:, 2, -1, 0].all() and not visible[:, 2, -1, 200].any()


@pytest.mark.parametrize("kind", ["gaussian", "peaked", "giants far back"])
def test_the_lists_are_careful_beside_the_kernel_s_own_bound(kind):
    """No tile is skipped that the kernel visits for its own sake, and few are visited in vain."""
    length, heads, width = 1024, 4, 32
    q, k, v = inputs(length, heads, width, kind)
    slopes = torch.tensor([0.9, 0.5, 0.2, 0.01])
    theirs = skipping.visited_tiles(q, k, v, slopes, query_tile=128, key_tile=KEY_TILE).tiles_BHTK
    partial, full = dense(skipping_lists(q, k, v, slopes, 128, width**-0.5))
    visited = partial | full
    assert (visited | ~theirs).all()
    if kind == "gaussian":
        # Per tile of queries.
        assert (visited & ~theirs).sum(dim=3).float().mean() < 0.25


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_is_visited(poison):
    q, k, v = inputs(700, 2, 16, "gaussian")
    slopes = torch.tensor([0.9, 0.5])
    for which in range(3):
        poisoned = [q.clone(), k.clone(), v.clone()]
        poisoned[which][3, 0, 0, 0] = poison
        partial, full = dense(skipping_lists(*poisoned, slopes, 128, 0.25))
        # Row 3 of a query is in tile 0, which has no far keys; as a key it is far from the others.
        assert which == 0 or (partial | full)[0, 0, :, 0].all()


def test_slopes_that_are_not_positive_skip_nothing():
    q, k, v = inputs(700, 3, 16, "gaussian")
    slopes = torch.tensor([0.0, -1.0, torch.nan])
    partial, full = dense(skipping_lists(q, k, v, slopes, 128, 0.25))
    causal_partial, causal_full = dense(causal_lists(700, 700, 128, CPU))
    assert torch.equal(partial, causal_partial.expand_as(partial))
    assert torch.equal(full, causal_full.expand_as(full))


def test_a_later_token_does_not_change_earlier_outputs():
    """A maximum over the whole own tile would leak: giants far back and later in the own tile."""
    q, k, v = inputs(512, 1, 16, "gaussian")
    slopes, scale = torch.tensor([0.5]), 0.25
    v[3] *= 1e6
    later = v.clone()
    later[-1] *= 1e6

    def output(values):
        partial, full = dense(skipping_lists(q, k, values, slopes, 128, scale))
        visible, _ = seen(partial, full, 512, 512, 128)
        q64, k64, v64 = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
        distance = torch.arange(512)[:, None] - torch.arange(512)
        scores = q64 @ k64.mT * scale - 0.5 * distance
        return scores.masked_fill(~visible, -torch.inf).softmax(dim=3) @ v64

    before, after = output(v), output(later)
    assert (before - after)[:, :, :-1].abs().max() <= 2.0**-24 * v.norm(dim=3)[384:].max()


def test_block_mask_has_the_lists_of_both_passes():
    q, k, v = inputs(900, 4, 16, "gaussian")
    slopes = torch.tensor([0.9, 0.5, 0.2, 0.01])
    bias = ScoreBias(slopes, None, 128, True)
    mask = flash4.block_mask(q, k, v, bias, None, skip=True)
    partial, full = dense(skipping_lists(q, k, v, slopes, 128, 0.25))
    assert torch.equal(mask.to_dense().bool(), partial | full)
    for counts, indices, tiles in (
        (mask.q_num_blocks, mask.q_indices, partial),
        (mask.full_q_num_blocks, mask.full_q_indices, full),
    ):
        for b, h, t in ((0, 0, 0), (1, 2, 3), (1, 0, 7)):
            listed = indices[b, h, t][: counts[b, h, t]].tolist()
            assert listed == tiles[b, h, :, t].nonzero().flatten().tolist()
    # By default short sequences skip nothing, nor do fewer queries than keys.
    for length, skip in ((900, None), (37, True)):
        mask = flash4.block_mask(q[:length], k, v, bias, None, skip)
        assert mask.kv_indices.shape[:2] == (1, 1)


def test_share_of_tiles_visited():
    """Gaussian inputs, width 64, 16 heads, 2,048 tokens: at most 75 % of the causal tiles."""
    q, k, v = inputs(2048, 16, 64, "gaussian")
    lists = skipping_lists(q, k, v, alibi_slopes(16), 128, 64**-0.5)
    causal = causal_lists(2048, 2048, 128, CPU)
    share = (lists.partial_counts + lists.full_counts).double().mean() / (
        (causal.partial_counts + causal.full_counts).double().mean()
    )
    assert 0.4 < share < 0.75 and math.isfinite(share), share


def test_flash4_is_refused_by_name_where_it_cannot_serve():
    q = torch.zeros(8, 1, 2, 8)
    with pytest.raises(ValueError, match=r"flash4 cannot serve: it needs a GPU of compute"):
        attention(q, q, q, slopes=torch.ones(2), backend="flash4")


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("added", ["slopes", None])
def test_cuda_flash4(skip, added):
    """Outputs and gradients; needs flash-attn-4 and a GPU of compute capability 9.x or 10.x."""
    q, k, v = (x.cuda().bfloat16().requires_grad_() for x in inputs(1100, 4, 64, "gaussian"))
    arguments = {"slopes": alibi_slopes(4).cuda()} if added else {}
    try:
        ours = run(attention, (q, k, v), arguments, backend="flash4", skip=skip)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    exact = run(attention_reference, (q, k, v), arguments)
    plain = run(attention_reference, (q, k, v), arguments, dtype=torch.bfloat16)
    assert_as_good_as_plain_torch(ours, plain, exact, torch.bfloat16)
