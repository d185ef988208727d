"""Test the Triton kernel against the dense reference in double precision.

It is compiled where there is a GPU, else interpreted. Tolerances are those of `test_dispatch`.
Block sizes are small, so that short sequences, which is all that the interpreter has time for, have
blocks of every kind: whole, masked, ragged and skipped.
"""

from functools import partial

import pytest
import torch

from pretrain.kernels.call import ScoreBias
from pretrain.kernels.dispatch import attention
from pretrain.kernels.flash.launch import (
    Blocks,
    Inputs,
    Options,
    Schedule,
    attention_triton,
    choose_schedule,
    run_forward,
)
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes
from tests.kernels import oracles
from tests.kernels.oracles import dropout_keep, random_qkv
from tests.kernels.test_dispatch import assert_as_good_as_plain_torch
from tests.kernels.test_skipping import share_visited

# Where the Triton kernel runs: compiled on a GPU, else in its interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Schedule(Blocks(32, 16, 4, 2), Blocks(16, 32, 4, 2), Blocks(16, 16, 4, 2), 32)
TABLE_DISTANCE = 40

# queries, keys, batch, heads, key heads, width, causal, bias, further arguments
CASES = {
    "whole tiles": (64, 64, 1, 2, 2, 16, True, "slopes", {}),
    "odd length, odd width": (65, 65, 1, 2, 2, 20, True, "slopes", {}),
    "shorter than a tile": (5, 5, 2, 2, 2, 32, True, "slopes", {}),
    "grouped queries": (49, 49, 2, 2, 1, 16, True, "slopes", {}),
    "keys from before": (37, 99, 1, 2, 2, 16, True, "slopes", {}),
    "one query": (1, 77, 1, 2, 2, 16, True, "slopes", {}),
    "slice of 12 heads": (33, 33, 1, 2, 2, 16, True, (12, 7), {}),
    "symmetric": (49, 49, 1, 2, 2, 16, False, "slopes", {}),
    "symmetric, more queries than keys": (70, 33, 1, 2, 2, 16, False, "slopes", {}),
    "slopes with gradient": (49, 49, 1, 2, 1, 16, True, "trained", {}),
    "symmetric slopes with gradient": (49, 60, 1, 2, 2, 16, False, "trained", {}),
    "nothing added": (33, 33, 1, 2, 2, 16, True, None, {}),
    "nothing added, symmetric": (33, 60, 1, 2, 2, 16, False, None, {}),
    "table": (98, 98, 1, 1, 1, 16, True, "table", {}),
    "table, grouped, keys from before": (33, 78, 1, 2, 1, 16, True, "table", {}),
    "symmetric table": (50, 60, 1, 2, 2, 16, False, "table", {}),
    "dropout": (41, 41, 2, 2, 2, 16, True, "slopes", {"dropout_p": 0.3}),
    "dropout, symmetric, trained": (40, 60, 1, 2, 2, 16, False, "trained", {"dropout_p": 0.3}),
    "dropout, table": (50, 50, 1, 2, 2, 16, True, "table", {"dropout_p": 0.3}),
    "scale": (33, 33, 1, 2, 2, 16, True, "slopes", {"scale": 0.7}),
    "negative scale": (33, 33, 1, 2, 2, 16, True, "slopes", {"scale": -0.7, "skip": False}),
}


def visited_tiles(
    q_SBHD: torch.Tensor,
    k_SBGD: torch.Tensor,
    v_SBGD: torch.Tensor,
    slopes: torch.Tensor,
    causal: bool = True,
    schedule: Schedule | None = None,
    document_starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Schedule]:
    """Run the forward pass with skipping and return the tiles it visited.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D].
        v_SBGD: Values, [keys, B, G, D].
        slopes: ALiBi slopes, [H].
        causal: Apply a causal mask.
        schedule: Block sizes; chosen by dtype, width and GPU if None.
        document_starts: As in `pretrain.kernels.dispatch.attention`, or None.

    Returns:
        Which tiles of keys each tile of queries visited, bool [B, H, query tiles, key tiles], as
        `oracles.visited_tiles` does; and the schedule, which says how large the tiles are.
    """
    options = Options(
        causal=causal,
        scale=q_SBHD.shape[3] ** -0.5,
        dropout_p=0.0,
        skip=True,
        schedule=schedule or choose_schedule(q_SBHD),
    )
    inputs = Inputs(q_SBHD, k_SBGD, v_SBGD, slopes, None, None, document_starts)
    _, _, plan = run_forward(inputs, options)
    query_tile, key_tile = options.schedule.forward.queries, options.schedule.key_tile
    visited = oracles.own_tiles(len(q_SBHD), len(k_SBGD), query_tile, key_tile)
    visited = visited.to(q_SBHD.device).expand_as(plan.thresholds).clone()
    counts, listed = plan.key_tiles[..., :1], plan.key_tiles[..., 1:].long()
    exists = torch.arange(listed.shape[3], device=listed.device) < counts
    # Entries beyond the count were never written, and are turned into the first that was.
    listed = torch.where(exists, listed, listed[..., :1].where(counts > 0, 0))
    visited |= torch.zeros_like(visited).scatter(3, listed, (counts > 0).expand_as(listed))
    return visited, options.schedule


def make(queries, keys, batch, heads, groups, width, causal, added, dtype, length=1.0):
    """Return (q, k, v, ScoreBias, leaves), q being multiplied by `length`."""
    generator = torch.Generator().manual_seed(queries * keys + width)
    shape = (queries, keys, batch, heads, groups, width)
    q, k, v = random_qkv(shape, generator, dtype, DEVICE)
    qkv = [(q.detach() * length).requires_grad_(), k, v]
    slopes = table = None
    if added in ("slopes", "trained"):
        slopes = alibi_slopes(heads).to(DEVICE).requires_grad_(added == "trained")
    if isinstance(added, tuple):
        # (heads of the whole model, first head of this rank)
        slopes = alibi_slopes(added[0])[added[1] : added[1] + heads].to(DEVICE)
    if isinstance(added, list):
        slopes = torch.tensor(added, device=DEVICE)
    if added == "table":
        table = torch.randn(heads, 32, generator=generator).to(DEVICE).requires_grad_()
    bias_leaves = [x for x in (slopes, table) if x is not None and x.requires_grad]
    return *qkv, ScoreBias(slopes, table, TABLE_DISTANCE, causal), [*qkv, *bias_leaves]


def differentiate(output, leaves):
    """Return [output, every gradient] for a loss that weighs every output differently."""
    towards = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(
        DEVICE, leaves[0].dtype
    )
    return [
        x.detach()
        for x in (output, *torch.autograd.grad((output * towards.to(output.dtype)).sum(), leaves))
    ]


def triton(q, k, v, bias, leaves, scale=None, dropout_p=0.0, skip=True, schedule=SMALL):
    """Return [output, every gradient] of the kernel."""
    torch.manual_seed(5)
    return differentiate(
        attention_triton(q, k, v, bias, scale, dropout_p, skip=skip, schedule=schedule), leaves
    )


def reference(q, k, v, bias, leaves, dtype, scale=None, dropout_p=0.0, **unused):
    """Return the reference's [output, every gradient] in `dtype`, with the kernel's dropout."""
    torch.manual_seed(5)
    shape = (q.shape[1], q.shape[2], len(q), len(k))
    seed = int(torch.randint(2**62, (1,), device=DEVICE)) if dropout_p > 0 else 0
    keep = dropout_keep(seed, shape, dropout_p).to(DEVICE) if dropout_p > 0 else None
    output = attention_reference(
        q,
        k,
        v,
        slopes=bias.slopes,
        relative_attention_bias=bias.table,
        relative_attention_max_distance=TABLE_DISTANCE,
        causal=bias.causal,
        scale=scale,
        dropout_p=dropout_p,
        keep=keep,
        dtype=dtype,
    )
    return [x.double() for x in differentiate(output, leaves)]


def assert_exact(made, dtype, **arguments):
    ours = [x.double() for x in triton(*made, **arguments)]
    exact, plain = (reference(*made, x, **arguments) for x in (torch.float64, dtype))
    assert_as_good_as_plain_torch(ours, plain, exact, dtype)


@pytest.mark.parametrize("case", CASES)
def test_exact_forward_and_backward(case):
    *shape, arguments = CASES[case]
    assert_exact(make(*shape, torch.float32), torch.float32, **arguments)


HALVES = {
    "odd length, odd width": torch.float16,
    "slopes with gradient": torch.bfloat16,
    "table": torch.bfloat16,
    "dropout": torch.bfloat16,
    "symmetric": torch.bfloat16,
}


@pytest.mark.parametrize(("case", "dtype"), HALVES.items())
def test_half_precision_is_exact(case, dtype):
    *shape, arguments = CASES[case]
    assert_exact(make(*shape, dtype), dtype, **arguments)


@pytest.mark.parametrize(("causal", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_gradients_of_slopes_do_not_suffer_from_the_rounded_output(causal, dtype):
    """Compare with fp64: the error is that of fp32 sums, far below plain torch's in this dtype.

    A delta made of the rounded output is off by half a unit of that dtype. Times the distance, it
    made these gradients up to 1.8 times as wrong as those of plain torch.
    """
    made = make(128, 128, 1, 1, 1, 16, causal, "trained", dtype)
    ours = triton(*made)[-1].double()
    exact, plain = (reference(*made, x)[-1] for x in (torch.float64, dtype))
    assert (ours - exact).norm() <= 0.01 * (plain - exact).norm()


@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (200, torch.float32)]
)
def test_blocks_of_the_tables_are_exact(width, dtype):
    """Use the schedules that models run with, at several of the widths they are made for."""
    assert_exact(make(150, 190, 1, 1, 1, width, True, "slopes", dtype), dtype, schedule=None)


@pytest.mark.parametrize(("causal", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_no_slope_and_the_largest(causal, dtype):
    """position.slopes may be 0 and 100, under which a query sees all keys alike or its own alone.

    The gradients of scores of the second head are 0. The kernel gets them as a difference of two
    sums of 16 products of up to 10, which rounds to some 2^-19 in fp32, and multiplies it by keys
    and queries.
    """
    made = make(49, 49, 1, 2, 2, 16, causal, [0.0, 100.0], dtype)
    ours = [x.double() for x in triton(*made)]
    exact, plain = (reference(*made, x) for x in (torch.float64, dtype))
    for x, y, truth in zip(ours, plain, exact):
        allowed = 2 * (y - truth).abs().max() + 4 * torch.finfo(dtype).eps * truth.abs().max()
        assert (x - truth).abs().max() <= allowed + 2.0**-17


def test_weights_far_from_one_are_exact():
    """Use scores up to +-30, so that the running softmax meets new maxima late."""
    assert_exact(
        make(65, 65, 1, 2, 2, 16, True, "slopes", torch.float32, length=8.0), torch.float32
    )


INPUTS = {
    "gaussian": lambda q, k, v: (q, k, v),
    "scale 8": lambda q, k, v: (q * 8, k, v),
    "constant": lambda q, k, v: (torch.full_like(q, 0.5), torch.full_like(k, 0.5), v),
    "one-hot": lambda q, k, v: (
        torch.zeros_like(q).index_fill_(3, torch.tensor([1], device=DEVICE), 4.0),
        k.sign(),
        v,
    ),
    "giant key": lambda q, k, v: (
        q,
        k * (1 + 1e4 * (torch.arange(len(k), device=DEVICE) == 3))[:, None, None, None],
        v,
    ),
    "giant value": lambda q, k, v: (
        q,
        k,
        v * (1 + 1e9 * (torch.arange(len(k), device=DEVICE) == 3))[:, None, None, None],
    ),
}


SHAPES = {"causal": (96, 96, 1), "symmetric, grouped": (32, 128, 2)}
"""Queries, keys and heads, which share their keys and values."""


@pytest.mark.parametrize(
    ("shape", "kind"), [*(("causal", kind) for kind in INPUTS), ("symmetric, grouped", "giant key")]
)
def test_skipping_visits_what_the_model_says_and_changes_nothing(kind, shape):
    causal = shape == "causal"
    queries, keys, heads = SHAPES[shape]
    q, k, v, _, _ = make(queries, keys, 1, heads, 1, 16, causal, None, torch.float32)
    q, k, v = (x.detach().requires_grad_() for x in INPUTS[kind](q, k, v))
    slopes = torch.tensor([2.0, 0.75][:heads], device=DEVICE)
    tiles = {"query_tile": SMALL.forward.queries, "key_tile": SMALL.key_tile}

    tiles_visited, _ = visited_tiles(q, k, v, slopes, causal, schedule=SMALL)
    model = oracles.visited_tiles(*(x.cpu() for x in (q, k, v, slopes)), causal=causal, **tiles)
    assert torch.equal(tiles_visited.cpu(), model.tiles_BHTK)
    share = share_visited(tiles_visited, queries, keys, causal=causal, **tiles)
    if kind in ("gaussian", "constant", "one-hot"):
        assert (share < 0.9).all()

    bias = ScoreBias(slopes, None, TABLE_DISTANCE, causal)
    on, off = (triton(q, k, v, bias, [q, k, v], skip=skip) for skip in (True, False))
    for name, x, y in zip("oqkv", on, off):
        # With equal keys the gradient of q is zero up to rounding, hence the absolute term.
        assert (x - y).abs().max() <= 2.0**-20 * max(y.abs().max(), 1e-2), name


def test_forward_and_backward_leave_out_the_same_tiles():
    """Keys that a tile of queries skips get no gradient at all from it and are not read."""
    q, k, v, _, _ = make(160, 160, 1, 1, 1, 16, True, None, torch.float32)
    q = q.detach().clone()
    # The next tile of queries visits all keys. For the first tile of keys, the range of query tiles
    # that visit it then includes this tile, which does not.
    q[128:160] *= 1e4
    bias = ScoreBias(torch.tensor([0.75], device=DEVICE), None, 0, True)
    queries = slice(96, 128)
    first = visited_tiles(q, k, v, bias.slopes, schedule=SMALL)[0][0, 0].int().argmax(dim=1)
    skipped = slice(first[3].item() * SMALL.key_tile)
    assert first[3] > 0 and first[4] == 0

    def gradients(skip, v_before, v_after):
        q_, k_, v_ = (x.detach().clone().requires_grad_() for x in (q, k, v_before))
        out = attention_triton(q_, k_, v_, bias, None, 0.0, skip=skip, schedule=SMALL)
        # Change what the backward pass reads without autograd noticing.
        v_.data[skipped] = v_after[skipped]
        return torch.autograd.grad(out[queries].sum(), (q_, k_, v_))

    nans = torch.full_like(v, float("nan"))
    assert gradients(True, v, nans)[0][queries].isfinite().all()
    _, dk, dv = gradients(True, v, v)
    assert (dk[skipped] == 0).all() and (dv[skipped] == 0).all()
    _, dk, dv = gradients(False, v, v)
    assert (dk[skipped] != 0).any() and (dv[skipped] != 0).any()
    assert gradients(False, v, nans)[0][queries].isnan().any()


@pytest.mark.parametrize(("far", "token"), [("v", 120), ("q", 125)])
def test_no_bit_depends_on_a_later_token(far, token):
    """Search over rare inputs: one giant row far back, and another in a later token.

    Each asks the tiles of queries that hold the later token to visit other tiles of keys. Outputs
    and gradients of queries before it must not notice.
    """
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(128, 1, 1, 16, generator=generator).to(DEVICE) for _ in range(3))
    # The last tile of queries just skips the first tile of keys, whose weights are so large that a
    # giant value shows: it must be visited then, whatever a later value is.
    q *= 0.1
    bias = ScoreBias(torch.tensor([0.37], device=DEVICE), None, 0, True)
    {"q": q, "v": v}[far][30] *= 1e9

    def earlier(*inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention_triton(*leaves, bias, None, 0.0, skip=True, schedule=SMALL)
        (dq,) = torch.autograd.grad(out[:token].sum(), leaves[:1])
        return out[:token].detach(), dq[:token]

    before = earlier(q, k, v)
    for name, giant in (("q", 1e9), ("k", 1e6), ("v", 1e9)):
        after = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        after[name][token] *= giant
        for x, y in zip(before, earlier(*after.values())):
            assert torch.equal(x, y), f"{name}: {(x - y).abs().max():.1e}"


def test_a_query_skips_for_itself_in_a_tile_that_others_visit():
    """Without a decision by query, a later token brings tiles back for all queries of its tile."""
    q, k, v, _, _ = make(128, 128, 1, 1, 1, 16, True, None, torch.float32)
    q, k, v = (x.detach().clone() for x in (q, k, v))
    slopes = torch.tensor([0.9], device=DEVICE)
    bias = ScoreBias(slopes, None, 0, True)
    plain = attention_triton(q, k, v, bias, None, 0.0, skip=True, schedule=SMALL)
    q[127] *= 1e4
    visits = oracles.visited_tiles(
        *(x.cpu() for x in (q, k, v, slopes)), query_tile=32, key_tile=SMALL.key_tile
    )
    assert visits.tiles_BHTK[0, 0, 3].all() and visits.rows_BHSK[0, 0, 127].all()
    assert not visits.rows_BHSK[0, 0, 96:127, 0].any()
    out = attention_triton(q, k, v, bias, None, 0.0, skip=True, schedule=SMALL)
    assert torch.equal(out[:127], plain[:127])
    # Keys of a tile that others visit have the gradients of weights that the query did not give.
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention_triton(*leaves, bias, None, 0.0, skip=True, schedule=SMALL)
    for x in torch.autograd.grad(out[96:127].sum(), leaves[1:]):
        assert 0 < x[:32].abs().max() <= 2.0**-24 * x[96:127].abs().max()


def test_nan_propagates_through_skipped_tiles():
    q, k, v, bias, _ = make(128, 128, 1, 2, 2, 16, True, None, torch.float32)
    bias = ScoreBias(torch.tensor([0.75, 0.5], device=DEVICE), None, 0, True)
    clean = attention_triton(q, k, v, bias, None, 0.0, skip=True, schedule=SMALL)
    query = torch.arange(128, device=DEVICE)
    for name, bad, where in (("q", torch.nan, 120), ("k", torch.inf, 5), ("v", torch.nan, 5)):
        inputs = {"q": q.detach().clone(), "k": k.detach().clone(), "v": v.detach().clone()}
        inputs[name][where, 0, 1, 3] = bad
        out = attention_triton(*inputs.values(), bias, None, 0.0, skip=True, schedule=SMALL)
        assert torch.equal(out[:, :, 0], clean[:, :, 0]), "the other head is not concerned"
        hit = ~out[:, 0, 1].isfinite().all(dim=1)
        seen = query == where if name == "q" else query >= where
        if name == "k":
            # A score of -inf is a weight of zero, as in plain attention.
            seen &= q[:, 0, 1, 3] > 0
        assert hit[seen].all() and not hit[: where // 32 * 32].any(), name


@pytest.mark.parametrize("case", ["grouped queries", "dropout, symmetric, trained"])
def test_every_element_is_written_and_runs_agree_to_the_last_bit(case, monkeypatch):
    *shape, arguments = CASES[case]
    made = make(*shape, torch.float32)
    once = triton(*made, **arguments)
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *size, **options: poison(empty(*size, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: poison(empty_like(x, **options)))
    poisoned = triton(*made, **arguments)
    assert all(torch.equal(x, y) for x, y in zip(once, poisoned, strict=True))


def poison(x):
    return x.fill_(
        float("nan") if x.is_floating_point() else 2**31 - 1 if x.dtype == torch.int32 else 0
    )


def test_views_of_a_fused_projection_are_read_where_they_lie():
    """Megatron splits one tensor [S, B, heads, (q, k, v), D], so none of them is contiguous."""
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(65, 2, 2, 3 * 16, generator=generator).to(DEVICE).requires_grad_()
    views = fused.split(16, dim=3)
    assert not any(x.is_contiguous() for x in views)
    bias = ScoreBias(alibi_slopes(2).to(DEVICE), None, 0, True)
    attend = partial(attention_triton, bias=bias, scale=None, dropout_p=0.0, schedule=SMALL)
    strided = differentiate(attend(*views, skip=True), [fused])
    whole = [x.detach().contiguous().requires_grad_() for x in views]
    dense = differentiate(attend(*whole, skip=True), whole)
    assert torch.equal(strided[0], dense[0])
    assert torch.equal(strided[1], torch.cat(dense[1:], dim=3))
    q, k, v = (x.detach() for x in views)
    # v is stored batch first, so that its strides differ from those of q and k.
    across = v.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(q, k, across, skip=True), dense[0])
    across[3, 1, 1] *= 1e15
    slopes = torch.tensor([1.0, 1.5], device=DEVICE)
    tiles_visited = visited_tiles(q * 0.1, k, across, slopes, schedule=SMALL)[0]
    tiles = {"query_tile": SMALL.forward.queries, "key_tile": SMALL.key_tile}
    model = oracles.visited_tiles(*(x.cpu() for x in (q * 0.1, k, across, slopes)), **tiles)
    assert torch.equal(tiles_visited.cpu(), model.tiles_BHTK)
    assert not torch.equal(*model.tiles_BHTK), "only that head of that sequence visits them"
    expanded = attend(*(x[:, :1].expand(-1, 2, -1, -1) for x in views))
    assert torch.equal(expanded[:, 0], expanded[:, 1]), "a stride of zero"


def test_dropout_replays_from_the_generator_and_keeps_its_share():
    q, k, v, bias, _ = make(49, 49, 1, 1, 1, 16, True, "slopes", torch.float32)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(attention_triton(q, k, v, bias, None, 0.3, schedule=SMALL))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    kept = dropout_keep(12345678901234567, (2, 4, 128, 128), 0.3).float()
    assert abs(kept.mean() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    by_head = kept.flatten(2).flatten(0, 1) - kept.mean()
    correlation = (by_head @ by_head.T / (0.21 * by_head.shape[1])).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / by_head.shape[1] ** 0.5, "heads draw apart"


def test_dispatch_serves_by_triton_or_says_why_not(monkeypatch):
    q, k, v, bias, _ = make(33, 33, 1, 2, 2, 16, True, "slopes", torch.float32)
    exact = attention_reference(q, k, v, slopes=bias.slopes)
    assert (attention(q, k, v, slopes=bias.slopes, backend="triton") - exact).abs().max() < 1e-5
    if DEVICE == "cpu":
        monkeypatch.setattr("pretrain.kernels.flash.device.INTERPRETED", False)
        with pytest.raises(ValueError, match="cannot serve: it needs a GPU"):
            attention(q, k, v, backend="triton")
