"""Test attention by document: queries see nothing before the start of their own document.

Every backend is compared with the dense reference in double precision, which in turn must give what
each document gives alone.
"""

import pytest
import torch

from pretrain.kernels.call import ScoreBias
from pretrain.kernels.dispatch import REFUSALS, attention, choose_backend
from pretrain.kernels.flash.launch import attention_triton
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes
from tests.kernels.oracles import dropout_keep, random_qkv
from tests.kernels.test_choice import ALIBI
from tests.kernels.test_dispatch import assert_as_good_as_plain_torch, assert_exact, run
from tests.kernels.test_flash import DEVICE, SMALL, visited_tiles

# Lengths of the documents of each sequence of the batch.
LENGTHS = {
    "several": [[40, 1, 1, 70, 18], [130]],
    "at tile borders": [[32, 64, 34], [16, 16, 98]],
    "one token each": [[1] * 130, [129, 1]],
    "longer than a block of queries": [[200, 5, 95], [3, 297]],
}
BIASES = ["slopes", "table", None]


def starts_of(documents, device="cpu"):
    """Return document_starts, int32 [B, S], of the lengths of each sequence's documents."""
    rows = []
    for lengths in documents:
        first = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        rows.append(first.repeat_interleave(torch.tensor(lengths)))
    return torch.stack(rows).int().to(device)


def make(documents, added, dtype, heads=4, groups=2, width=16, device="cpu"):
    """Return (q, k, v) and the bias arguments, all leaves that require gradients."""
    length, generator = sum(documents[0]), torch.Generator().manual_seed(3)
    shape = (length, length, len(documents), heads, groups, width)
    qkv = random_qkv(shape, generator, dtype, device)
    arguments = {}
    if added == "slopes":
        arguments["slopes"] = alibi_slopes(heads).to(device).requires_grad_()
    if added == "table":
        table = torch.randn(heads, 32, generator=generator)
        arguments["relative_attention_bias"] = table.to(device).requires_grad_()
        arguments["relative_attention_max_distance"] = 40
    return qkv, arguments


def document_by_document(q, k, v, documents, **arguments):
    """Return the reference's output of every document alone, put together again."""
    rows = []
    for row, lengths in enumerate(documents):
        parts = [x[:, row : row + 1].split(lengths) for x in (q, k, v)]
        rows.append(torch.cat([attention_reference(*one, **arguments) for one in zip(*parts)]))
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("added", BIASES)
@pytest.mark.parametrize("case", LENGTHS)
def test_the_reference_gives_what_each_document_gives_alone(case, added):
    documents = LENGTHS[case]
    qkv, arguments = make(documents, added, torch.float64)
    # Gradients of fp32 leaves would be summed in fp32.
    for name in ("slopes", "relative_attention_bias"):
        if name in arguments:
            arguments[name] = arguments[name].detach().double().requires_grad_()
    packed = run(attention_reference, qkv, arguments, document_starts=starts_of(documents))
    alone = run(document_by_document, qkv, arguments, documents=documents)
    for x, y in zip(packed, alone):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", BIASES)
@pytest.mark.parametrize("case", LENGTHS)
def test_sdpa_is_exact_forward_and_backward(case, added, dtype):
    documents = LENGTHS[case]
    qkv, arguments = make(documents, added, dtype)
    arguments["document_starts"] = starts_of(documents)
    assert_exact(attention, qkv, arguments, dtype)


@torch.no_grad()
def test_no_bit_of_a_document_depends_on_another():
    documents = [[40, 60, 30]]
    (q, k, v), arguments = make(documents, "slopes", torch.float32)
    arguments["document_starts"] = starts_of(documents)
    before = attention(q, k, v, **arguments)
    for x in (q, k, v):
        x[:40] = 7.0
        x[100:] = -3.0
    after = attention(q, k, v, **arguments)
    assert torch.equal(before[40:100], after[40:100])
    assert not torch.equal(before[:40], after[:40])


def test_backends_without_the_mask_refuse_and_are_never_chosen():
    on_gpu = ALIBI._replace(documents=True, capability=(9, 0))
    for bias in ("none", "slopes", "trained slopes", "table"):
        assert choose_backend(on_gpu._replace(bias=bias)).backend == "triton"
        # A V100, without the Triton kernel.
        old = on_gpu._replace(bias=bias, capability=(7, 0), dtype=torch.float16)
        assert choose_backend(old).backend == "sdpa"
        assert choose_backend(on_gpu._replace(bias=bias, capability=None)).backend == "sdpa"
    assert REFUSALS["folded"](on_gpu) == "it has no mask by document"
    qkv, _ = make([[9]], None, torch.float32)
    with pytest.raises(ValueError, match=r"folded.*no mask by document"):
        attention(*qkv, document_starts=starts_of([[9]]), backend="folded")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "causal = False"),
        ({"document_starts": starts_of([[4, 5]]).long()}, r"torch\.int64"),
        ({"document_starts": starts_of([[4, 4]])}, r"\(1, 8\)"),
        ({"document_starts": starts_of([[9], [9]])}, r"expected \(1, 9\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    qkv, _ = make([[4, 5]], None, torch.float32)
    with pytest.raises(ValueError, match=message):
        attention(*qkv, **({"document_starts": starts_of([[4, 5]])} | change))


# With the small blocks of SMALL, few tokens have blocks of every kind: whole, cut by the causal
# mask, by a border of documents, by both, hidden and skipped.
TRITON = {
    "several": [[23, 1, 1, 32, 9], [66]],
    "at tile borders": [[32, 32, 6], [16, 54]],
    "one token each": [[1] * 20 + [21]],
    "begins in the last block": [[65, 3]],
}


def triton(q, k, v, skip=True, dropout_p=0.0, schedule=SMALL, document_starts=None, **arguments):
    """Return the kernel's output with small blocks."""
    bias = ScoreBias(
        arguments.get("slopes"),
        arguments.get("relative_attention_bias"),
        arguments.get("relative_attention_max_distance", 128),
        True,
    )
    return attention_triton(
        q, k, v, bias, None, dropout_p, skip, schedule, document_starts=document_starts
    )


def assert_triton_is_exact(documents, added, dtype, queries=None):
    qkv, arguments = make(documents, added, dtype, heads=2, groups=1, device=DEVICE)
    arguments["document_starts"] = starts_of(documents, DEVICE)
    if queries is not None:
        qkv[0] = qkv[0].detach()[-queries:].requires_grad_()
        arguments["document_starts"] = arguments["document_starts"][:, -queries:].contiguous()
    assert_exact(triton, qkv, arguments, dtype)


@pytest.mark.parametrize(
    ("case", "added"),
    [*((case, "slopes") for case in TRITON), ("several", "table"), ("several", None)],
)
def test_triton_is_exact_forward_and_backward(case, added):
    assert_triton_is_exact(TRITON[case], added, torch.float32)


def test_triton_is_exact_for_the_last_queries():
    assert_triton_is_exact(TRITON["several"], "slopes", torch.float32, queries=37)


def test_triton_is_exact_in_half_precision():
    assert_triton_is_exact([[23, 1, 1, 40]], "table", torch.bfloat16)


def test_triton_drops_the_weights_of_the_same_pairs():
    documents, dropout_p = [[21, 29]], 0.3
    qkv, arguments = make(documents, "slopes", torch.float32, heads=2, groups=1, device=DEVICE)
    arguments["document_starts"] = starts_of(documents, DEVICE)
    torch.manual_seed(5)
    keep = dropout_keep(
        int(torch.randint(2**62, (1,), device=DEVICE)), (1, 2, 50, 50), dropout_p
    ).to(DEVICE)
    options = {"dropout_p": dropout_p, "keep": keep}
    exact = run(attention_reference, qkv, arguments, **options)
    plain = run(attention_reference, qkv, arguments, **options, dtype=torch.float32)
    torch.manual_seed(5)
    ours = run(triton, qkv, arguments, dropout_p=dropout_p)
    assert_as_good_as_plain_torch(ours, plain, exact, torch.float32)


@pytest.mark.parametrize(("added", "skip"), [("slopes", True), ("slopes", False), ("table", True)])
def test_triton_loads_nothing_of_tiles_in_other_documents(added, skip):
    """Fill other documents with NaN, of which a single load would show: 0 times NaN is NaN.

    Borders lie between blocks of every kernel, so that no block belongs to two documents.
    """
    documents = [[32, 64, 32]]
    qkv, arguments = make(documents, added, torch.float32, heads=1, groups=1, device=DEVICE)
    arguments["document_starts"] = starts_of(documents, DEVICE)
    towards = torch.randn(128, 1, 1, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    middle, others = slice(32, 96), [*range(32), *range(96, 128)]
    clean = triton(*qkv, skip=skip, **arguments)
    expected = torch.autograd.grad((clean * towards)[middle].sum(), qkv)

    with torch.no_grad():
        for x in qkv:
            x[others] = torch.nan
    towards[others] = torch.nan
    out = triton(*qkv, skip=skip, **arguments)
    gradients = torch.autograd.grad(out, qkv, towards)
    assert torch.equal(out[middle], clean[middle])
    for name, x, y in zip("qkv", gradients, expected):
        assert torch.equal(x[middle], y[middle]), name
    assert out[others].isnan().all()


@torch.no_grad()
def test_lists_of_tiles_hold_the_tiles_of_the_document():
    """With slopes so shallow that ALiBi hides nothing, what is left out is what documents hide."""
    documents = [[70, 58], [1, 96, 31]]
    (q, k, v), _ = make(documents, None, torch.float32, heads=1, groups=1, device=DEVICE)
    starts = starts_of(documents, DEVICE)
    visited, _ = visited_tiles(
        q, k, v, torch.full((1,), 1e-6, device=DEVICE), schedule=SMALL, document_starts=starts
    )
    key = torch.arange(128, device=DEVICE)
    query = key[:, None]
    seen = (key <= query) & (key >= starts[:, :, None])
    tiles = seen.view(2, 4, 32, 4, 32).any(dim=4).any(dim=2)
    assert torch.equal(visited, tiles[:, None])


@torch.no_grad()
def test_skipping_within_documents_loses_nothing_and_sees_nothing_later():
    """Steep slopes skip tiles of long documents; later tokens then move no bit of earlier ones."""
    documents = [[30, 98]]
    (q, k, v), _ = make(documents, None, torch.float32, heads=1, groups=1, device=DEVICE)
    slopes, starts = torch.tensor([1.0], device=DEVICE), starts_of(documents, DEVICE)
    arguments = {"slopes": slopes, "document_starts": starts}
    exact = attention_reference(q, k, v, **arguments)
    out = triton(q, k, v, **arguments)
    assert (out - exact).abs().max() < 1e-5
    steep, shallow = (
        visited_tiles(q, k, v, some, schedule=SMALL, document_starts=starts)[0].sum(dim=(2, 3))
        for some in (slopes, slopes * 1e-6)
    )
    assert (steep < shallow).all(), (steep, shallow)
    for position in (100, 127):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[position:] *= 50
        assert torch.equal(triton(*changed, **arguments)[:position], out[:position])
