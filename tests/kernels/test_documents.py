"""Test attention by document: queries see nothing before the start of their own document.

Every backend is compared with the dense reference in double precision, which in turn must give what
each document gives alone.
"""

import pytest
import torch

from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.choice import choose_backend
from pretrain.kernels.dispatch import REFUSALS, attention
from pretrain.kernels.reference import attention_reference
from tests.kernels.test_choice import ALIBI
from tests.kernels.test_dispatch import assert_as_good_as_plain_torch, run

# Lengths of the documents of each sequence of the batch.
LENGTHS = {
    "several": [[40, 1, 1, 70, 18], [130]],
    "at tile borders": [[32, 64, 34], [16, 16, 98]],
    "one token each": [[1] * 130, [129, 1]],
    "longer than a block of queries": [[200, 5, 95], [3, 297]],
}
BIASES = ["slopes", "table", None]


def starts_of(documents):
    """Return document_starts, int32 [B, S], of the lengths of each sequence's documents."""
    rows = []
    for lengths in documents:
        first = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        rows.append(first.repeat_interleave(torch.tensor(lengths)))
    return torch.stack(rows).int()


def make(documents, added, dtype, heads=4, groups=2, width=16):
    """Return (q, k, v) and the bias arguments, all leaves that require gradients."""
    length, generator = sum(documents[0]), torch.Generator().manual_seed(3)
    qkv = [
        torch.randn(length, len(documents), count, width, generator=generator)
        .to(dtype)
        .requires_grad_()
        for count in (heads, groups, groups)
    ]
    arguments = {}
    if added == "slopes":
        arguments["slopes"] = alibi_slopes(heads).requires_grad_()
    if added == "table":
        table = torch.randn(heads, 32, generator=generator)
        arguments["relative_attention_bias"] = table.requires_grad_()
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
    exact = run(attention_reference, qkv, arguments)
    plain = run(attention_reference, qkv, arguments, dtype=dtype)
    assert_as_good_as_plain_torch(run(attention, qkv, arguments), plain, exact, dtype)


@pytest.mark.parametrize("added", BIASES)
def test_one_document_is_attention_without_documents(added):
    """A mask that hides nothing changes nothing but the path: the same sums in another kernel."""
    qkv, arguments = make([[300]], added, torch.float32)
    whole = run(attention, qkv, arguments)
    one = run(attention, qkv, arguments, document_starts=starts_of([[300]]))
    for x, y in zip(whole, one):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


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
    everything = frozenset({"triton", "flash_attn", "flash_attn.cute"})
    on_gpu = ALIBI._replace(documents=True, installed=everything, capability=(9, 0))
    for bias in ("none", "slopes", "trained slopes", "table"):
        assert choose_backend(on_gpu._replace(bias=bias)).backend == "triton"
        # A V100, without the Triton kernel.
        old = on_gpu._replace(bias=bias, capability=(7, 0), dtype=torch.float16)
        assert choose_backend(old).backend == "sdpa"
        assert choose_backend(on_gpu._replace(bias=bias, capability=None)).backend == "sdpa"
    for backend in ("flash2", "flash4", "flex", "folded"):
        assert REFUSALS[backend](on_gpu) == "it has no mask by document"
    qkv, _ = make([[9]], None, torch.float32)
    with pytest.raises(ValueError, match=r"flex.*no mask by document"):
        attention(*qkv, document_starts=starts_of([[9]]), backend="flex")


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


def test_fewer_queries_than_keys_are_refused():
    q, k, v = make([[9]], None, torch.float32)[0]
    with pytest.raises(ValueError, match="5 queries and 9 keys"):
        attention(q[4:], k, v, document_starts=starts_of([[5]]))
