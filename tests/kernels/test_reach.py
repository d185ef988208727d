"""Test which keys attention on a CPU is given under ALiBi, against dense attention in fp64."""

import math

import pytest
import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from pretrain.kernels import sdpa
from pretrain.kernels.dispatch import attention
from pretrain.kernels.reach import key_windows, tiles_left_out
from pretrain.model.reach import _seen
from pretrain.positions.alibi import alibi_slopes
from tests.kernels.test_skipping import KINDS, draw, rows


@pytest.fixture
def pairs(monkeypatch):
    """Pairs of query and key that torch's kernel is given, over all heads, call by call."""
    calls, torchs = [], sdpa.scaled_dot_product_attention

    def counted(q, k, v, **options):
        calls.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return torchs(q, k, v, **options)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", counted)
    return calls


NEEDED = 24 * math.log(2)


def compare(q, k, v, pairs, slopes, **options):
    """Compare outputs and gradients with those of all keys; return the share of pairs left."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    towards = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).double()
    outs, gradients, counts = [], [], []
    for skip in (False, True):
        pairs.clear()
        out = attention(*inputs, slopes=slopes, backend="sdpa", skip=skip, **options)
        outs.append(out.detach())
        gradients.append(torch.autograd.grad((out * towards).sum(), inputs))
        counts.append(sum(pairs))
    dense, left = outs
    # What `key_windows` states, row by row; values of several heads to one are taken for each head.
    own = rows(v[len(v) - len(q) :]).repeat_interleave(q.shape[2] // v.shape[2], dim=1)
    noise = 1e-13 * (1 + float(rows(v).max()))
    assert (rows(left - dense) <= 2.0**-24 * (own + rows(dense)) + noise).all()
    for truth, found in zip(*gradients):
        # The rounding of the sums themselves, where giant numbers cancel.
        noise = 1e-12 + 1e-17 * float(rows(v).max() * rows(k).max())
        assert (found - truth).abs().max() <= 2.0**-20 * truth.abs().max() + noise
    return counts[1] / counts[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_does_not_matter(kind, causal, pairs):
    q, k, v = draw(kind, 1536, 2, width=16)
    share = compare(q, k, v, pairs, alibi_slopes(16)[[0, 5]], causal=causal)
    if kind in ("scale 1", "constant", "one-hot"):
        assert share < 0.8


def test_blocks_of_two_sided_queries_that_do_not_come_out_even(pairs):
    """One query sees far ahead; from the first query on it would be in the block before."""
    q, k, v = draw("scale 1", 1400, 1, width=16)
    q[200] *= 30
    k[900] = 40 * q[200] / q[200].norm()
    assert compare(q, k, v, pairs, torch.tensor([0.5]), causal=False) < 0.8


def test_fewer_queries_shared_keys_and_documents(pairs):
    q, k, v = draw("scale 1", 1600, 4, width=16)
    slopes = torch.tensor([0.9, 0.5, 0.3, 0.2])
    assert compare(q[-700:], k, v, pairs, slopes) < 0.6
    assert compare(q, k[:, :, :2], v[:, :, :2], pairs, slopes) < 0.8
    starts = torch.arange(1600, dtype=torch.int32)[None] // 400 * 400
    apart = compare(q, k, v, pairs, slopes / 1000, document_starts=starts)
    assert apart < 0.7, "keys of documents before that of a block are not loaded"


@pytest.mark.parametrize("length", [4096, 8192])
def test_pairs_are_those_of_the_closed_form(length, pairs):
    """With all scores 0, a key matters while slope * distance + floor < 24 ln 2 + ln(length)."""
    slopes = alibi_slopes(8)
    q, k, v = torch.zeros(length, 1, 8, 16), *draw("scale 0", length, 8, width=16)[1:]
    v = v / v.norm(dim=3, keepdim=True)
    attention(q, k, v, slopes=slopes, backend="sdpa")
    expected = 0
    for slope in slopes.tolist():
        # The first query of a block has its own key and the 32 before it to make its floor of.
        floor = math.log(sum(math.exp(-slope * t) for t in range(33)))

        def lost(keys, position, slope=slope):
            """Return ln of the sum of exp(score) over the first keys."""
            near = -slope * (position + 1 - keys)
            return near + math.log(math.expm1(-slope * keys) / math.expm1(-slope))

        for start in range(0, length, 256):
            tiles = [t for t in range(1, start // 64 + 1) if floor - lost(64 * t, start) > NEEDED]
            expected += 256 * (start + 256 - 64 * max(tiles, default=0))
    # Heads that share a call are given the longest window among them, which may cost as much as a
    # call for each head but the first; every block has all heads.
    shared = 8 * length // 256 - len(pairs)
    assert shared > 0 and expected <= sum(pairs) <= expected + shared * 256 * sdpa.KEYS_OF_A_CALL


def given_pairs(length, skip, causal):
    """Return the pairs that torch's kernels are given forward and backward, and other products."""
    torchs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backwards = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_shapes = {
        torchs: lambda q, k, *_, **__: math.prod(q[:3]) * k[2],
        backwards: lambda _, q, k, *__, **___: math.prod(q[:3]) * k[2],
    }
    q = torch.zeros(length, 1, 8, 16, requires_grad=True)
    _, k, v = draw("scale 1", length, 8, width=16)
    k, v = k.requires_grad_(), (v / v.norm(dim=3, keepdim=True)).requires_grad_()
    with FlopCounterMode(display=False, custom_mapping=of_shapes) as made:
        out = attention(q, k, v, slopes=alibi_slopes(8), backend="sdpa", causal=causal, skip=skip)
        out.sum().backward()
    found = dict(made.get_flop_counts()["Global"])
    return found.pop(torchs), found.pop(backwards), found


def test_backward_pairs_two_sides_and_lengths_at_which_it_would_not_pay():
    for causal in (True, False):
        assert given_pairs(2048, None, causal) == given_pairs(2048, False, causal)
    forward, backward, asked = given_pairs(4096, None, True)
    assert forward == backward < given_pairs(4096, False, True)[0] / 2
    # What it costs to ask, in parts of the 64 operations of a pair of 16 channels.
    assert sum(asked.values()) < 0.04 * 64 * forward
    # A block sees as far ahead as back; its own queries are counted once.
    both, backward, _ = given_pairs(4096, None, False)
    assert both == backward <= 2 * forward - 8 * 4096 * 256


@pytest.mark.parametrize("causal", [True, False])
def test_a_step_grows_with_the_length_in_work_and_memory(causal):
    """Matrix products, numbers written and bytes held, forward and backward: counted, not timed."""
    counts = []
    for length in (4096, 8192, 16384):
        q, k, v = (x.requires_grad_() for x in draw("scale 1", length, 2, width=8))
        slopes = torch.tensor([0.5, 0.25])
        with profile(profile_memory=True, with_flops=False) as made:
            attention(q, k, v, slopes=slopes, backend="sdpa", causal=causal).sum().backward()
        held, most, written = 0, 0, 0
        for event in sorted(
            made.profiler.kineto_results.events(), key=lambda each: each.start_ns()
        ):
            if event.name() == "[memory]":
                held += event.nbytes()
                most, written = max(most, held), written + max(event.nbytes(), 0)
        counts.append((most, written))
    for name, few, many in zip(("held", "written"), counts[1], counts[2]):
        assert many < 2.1 * few, (name, counts)
    # Of q, k and v of one head each: their gradients, copies, and what the windows save.
    assert counts[2][0] < 16 * 3 * q.nbytes, counts


def test_nothing_is_left_out_that_could_show(pairs):
    q, k, v = draw("scale 1", 1024, 1, width=16)
    whole = 256 * 256 * (1 + 2 + 3 + 4)

    def given(q=q, k=k, v=v, slope=0.5):
        pairs.clear()
        slopes = torch.as_tensor([slope]) if isinstance(slope, float) else slope
        attention(q, k, v, slopes=slopes, backend="sdpa", skip=True)
        return sum(pairs)

    assert given() < whole
    assert given(slope=0.0) == given(slope=-0.5) == given(slope=math.nan) == whole
    for bad in (math.nan, math.inf):
        for name, x in (("k", k), ("v", v)):
            hostile = x.clone()
            hostile[0, 0, 0, 0] = bad
            assert given(**{name: hostile}) == whole
    assert given(slope=torch.tensor([0.5], requires_grad=True)) == whole, "its gradient wants all"


def test_bound_is_tight():
    """Keys far back, as long as they may be to be left out, weigh close to the bound in a row."""
    length, slopes = 1024, torch.tensor([2.0**-10])
    q, k, v = (
        torch.zeros(length, 1, 1, 16),
        torch.zeros(length, 1, 1, 16),
        torch.ones(1024, 1, 1, 16),
    )
    q[-256:, ..., 0], k[-256:, ..., 0] = 4.0, 60.0  # the scale is 1 / 4, so a score is 60

    def first(longest):
        k[:512, ..., 0] = longest
        tiles = {"queries": 256, "tile": 256, "gradients": False}
        return int(key_windows(q, k, v, slopes, 0.25, True, **tiles)[0][0, 0])

    short, long = 0.0, 60.0
    assert first(short) == 768 and first(long) == 0
    for _ in range(30):
        middle = (short + long) / 2
        short, long = (middle, long) if first(middle) >= 512 else (short, middle)
    assert first(short) >= 512
    scores = 0.25 * q[:, 0, 0].double() @ k[:, 0, 0].double().T
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = (scores - slopes.double() * distance).masked_fill(distance < 0, -math.inf)
    lost = scores.softmax(1)[-256:, :512].sum(1).max()
    assert 2.0**-32 < lost < 2.0**-24


def test_bound_holds_at_position_16_million():
    """Products of slopes and positions are far above what fp32 resolves to the bound's slack."""
    length, tile, slope = 2**24, 64, 0.5
    k = torch.ones(128, 1, 1, 1)
    k[-tile:] = -0.5  # all others are 1
    own = torch.full((1, 1, 1), 0.5), torch.ones(1, 1, 1)
    longest = (torch.ones(1, 1, length // tile),) * 2

    def first(query):
        q, slopes = torch.full((1, 1, 1, 1), query), torch.tensor([slope])
        return tile * int(tiles_left_out(q, k, own, longest, slopes, 1.0, tile, length, False))

    short, long = 0.3 * slope, 200 * slope
    most = first(short)
    for _ in range(26):
        middle = (short + long) / 2
        short, long = (middle, long) if first(middle) == most else (short, middle)
    distance = torch.arange(8192, dtype=torch.float64)
    weights = (short * torch.where(distance < tile, -0.5, 1.0) - slope * distance).softmax(0)
    assert 0.9 < weights[distance >= length - most].sum() * 2**24 < 1


def test_a_floor_whose_products_cancel_is_not_too_high():
    """In fp32 a sum that is exactly 0 rounds by a share of the product of norms."""
    a, b = torch.randint(8000, 16000, (2, 500), generator=torch.Generator().manual_seed(0)).float()
    q = torch.stack((a, b), dim=1)[None, None]
    k = torch.zeros(32, 1, 500, 2)
    k[-1] = torch.stack((-b, a), dim=1)
    own = k[-1].norm(dim=2)[..., None], torch.ones(1, 500, 1)
    longest, half = (torch.zeros(1, 500, 4096),) * 2, torch.full((500,), 0.5)
    left = tiles_left_out(q, k, own, longest, half, 0.7, 1, 4096, False)
    # The scores of all keys are 0, so this is the share of the row's weight.
    assert (0.5 * (4096 - left)).min() > NEEDED


def test_the_running_bound_of_a_masked_model_holds():
    """Each side may have half of the weight that is left out."""
    q, ones = torch.zeros(65, 1, 1, 1), torch.ones(65, 1, 1, 1)
    for slope in torch.arange(3, 5, 0.005).double():
        seen = _seen(q, ones, ones, slope[None], 1.0, True)
        assert seen.measured[0] <= seen.farthest[0], slope
