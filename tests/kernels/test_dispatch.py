"""Test outputs and all gradients of every backend against the dense reference in double precision.

The tolerance is twice the error of plain torch doing the same computation in the same dtype, as in
FlashAttention's own tests, plus a few units in the last place of the largest value, for cases where
plain torch happens to be exact.
"""

import logging
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from pretrain.kernels import sdpa
from pretrain.kernels.dispatch import _log_once, attention
from pretrain.kernels.reference import attention_reference
from pretrain.positions.alibi import alibi_slopes
from tests.kernels.oracles import random_qkv

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# queries, keys, batch, heads, key heads, head width, causal, bias
CASES = {
    "one block": (128, 128, 2, 8, 8, 16, True, "slopes"),
    "odd lengths, several blocks": (331, 331, 1, 8, 8, 16, True, "slopes"),
    "twelve heads, odd width": (65, 65, 2, 12, 12, 20, True, "slopes"),
    "grouped queries": (97, 97, 2, 8, 2, 16, True, "slopes"),
    "keys from before": (37, 301, 1, 8, 4, 16, True, "slopes"),
    "one query": (1, 77, 3, 8, 8, 16, True, "slopes"),
    "no slope and large ones": (331, 331, 1, 3, 3, 16, True, [0.0, 100.0, 1e-7]),
    "symmetric, no slope and large ones": (300, 300, 1, 3, 3, 16, False, [0.0, 100.0, 1e-7]),
    "symmetric": (300, 300, 1, 8, 8, 16, False, "slopes"),
    "symmetric, more queries than keys": (290, 33, 1, 8, 8, 16, False, "slopes"),
    "table": (270, 270, 1, 8, 8, 16, True, "table"),
    "table, keys from before": (33, 200, 2, 12, 6, 16, True, "table"),
    "symmetric table": (150, 150, 1, 8, 8, 16, False, "table"),
    "nothing added": (129, 129, 2, 8, 4, 16, True, None),
    "nothing added, keys from before": (50, 129, 2, 8, 8, 16, True, None),
    "nothing added, symmetric": (60, 129, 2, 8, 8, 16, False, None),
}


def make(case, dtype, device="cpu"):
    """Return (q, k, v) and the bias arguments of a case, all leaves that require gradients."""
    *shape, causal, added = CASES[case]
    queries, keys, _, heads, *_ = shape
    generator = torch.Generator().manual_seed(queries * keys)
    qkv = random_qkv(shape, generator, dtype, device)
    arguments = {"causal": causal}
    if added == "slopes":
        arguments["slopes"] = alibi_slopes(heads).to(device).requires_grad_()
    if isinstance(added, list):
        arguments["slopes"] = torch.tensor(added, device=device).requires_grad_()
    if added == "table":
        arguments["relative_attention_bias"] = (
            torch.randn(heads, 32, generator=generator).to(device).requires_grad_()
        )
    return qkv, arguments


def run(function, qkv, arguments, **more):
    """Return [output, every gradient] as fp64, for a loss that weighs every output differently."""
    leaves = [
        *qkv,
        *(x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad),
    ]
    output = function(*qkv, **arguments, **more)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(
        output.device, qkv[0].dtype
    )
    gradients = torch.autograd.grad((output * weights.to(output.dtype)).sum(), leaves)
    return [x.detach().double() for x in (output, *gradients)]


def assert_as_good_as_plain_torch(ours, plain, exact, dtype):
    for name, x, y, truth in zip(("output", "q", "k", "v", "bias"), ours, plain, exact):
        # The gradient of a slope sums over all scores, so there the order of summation shows more.
        units = 16 if name == "bias" else 4
        allowed = 2 * (y - truth).abs().max() + units * torch.finfo(dtype).eps * truth.abs().max()
        error = (x - truth).abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def assert_exact(ours, qkv, arguments, dtype, **more):
    exact = run(attention_reference, qkv, arguments)
    plain = run(attention_reference, qkv, arguments, dtype=dtype)
    assert_as_good_as_plain_torch(run(ours, qkv, arguments, **more), plain, exact, dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_is_exact_forward_and_backward(case, dtype):
    qkv, arguments = make(case, dtype)
    assert_exact(attention, qkv, arguments, dtype, backend="sdpa")


@pytest.mark.parametrize("case", CASES)
def test_fused_sdpa_is_exact_with_fixed_bias(case):
    """A mask that needs no gradient takes torch's fused kernel, another path than a trained one."""
    qkv, arguments = make(case, torch.float32)
    arguments = {
        key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()
    }
    assert_exact(attention, qkv, arguments, torch.float32)


@pytest.mark.parametrize("case", ["odd width", "odd width, nothing added", "odd width, symmetric"])
def test_padded_heads_are_those_of_the_given_width(case, monkeypatch):
    """Pad on a CPU as on a GPU: the scale stays that of the heads, and gradients are as wide."""
    widths = []
    unpadded = sdpa.needs_mask

    def record(q, k, bias):
        widths.append((q.shape[3], k.shape[3]))
        return unpadded(q, k, bias)

    monkeypatch.setattr(sdpa, "needs_mask", record)
    monkeypatch.setattr(sdpa, "_wants_padding", lambda q: q.shape[3] % 8 != 0)
    monkeypatch.setitem(CASES, "odd width", (65, 65, 2, 12, 12, 12, True, "slopes"))
    monkeypatch.setitem(CASES, "odd width, nothing added", (65, 65, 2, 8, 4, 12, True, None))
    monkeypatch.setitem(CASES, "odd width, symmetric", (60, 129, 2, 8, 8, 13, False, None))
    qkv, arguments = make(case, torch.float32)
    assert_exact(attention, qkv, arguments, torch.float32, backend="sdpa")
    assert widths == [(16, 16)]


@torch.no_grad()
def test_half_precision_does_not_blur_far_keys():
    """In bf16, dozens of neighboring keys far back would share one bias."""
    length, block = 2048, 256
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, 1, 4, 16, generator=generator).bfloat16() for _ in range(3))
    # Shallow slopes, which look far back. None is a power of two, which bf16 would hold exactly.
    slopes = torch.tensor([0.011, 0.007, 0.005, 0.003])
    exact = attention_reference(q, k, v, slopes=slopes)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, slopes=slopes)
    assert torch.equal(out, attention(q, k, v, slopes=slopes))
    error = (out.double() - exact).abs().mean(dim=(1, 2, 3))
    # An average over more keys is smaller, and so is its rounding, so the error must fall along the
    # sequence.
    assert error[-block:].mean() < error[block : 2 * block].mean()


def test_slices_of_the_slopes_give_slices_of_the_heads():
    """Compare two tensor-parallel ranks, each with its slice of heads and slopes, with one rank."""
    (q, k, v), _ = make("odd lengths, several blocks", torch.float32)
    slopes = alibi_slopes(8)
    halves = [
        attention(q[:, :, s], k[:, :, s], v[:, :, s], slopes=slopes[s])
        for s in (slice(0, 4), slice(4, 8))
    ]
    whole = attention(q, k, v, slopes=slopes)
    # Heads do not interact, so the results must be identical.
    torch.testing.assert_close(torch.cat(halves, dim=2), whole, rtol=0, atol=0)
    local = attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], slopes=alibi_slopes(4))
    # Slopes made for the local number of heads are those of another model.
    assert (local - whole[:, :, 4:]).abs().max() > 0.1


def test_scale_leaves_the_bias_alone():
    (q, k, v), arguments = make("one block", torch.float32)
    for scale in (0.1, 1.0):
        # The reference's default scale divides by sqrt(16).
        exact = attention_reference(q.detach() * scale * 4, k, v, **arguments)
        ours = attention(q, k, v, scale=scale, **arguments).double()
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-5)
    q, k, v = torch.randn(3, 5, 1, 1, 8)
    means = v.cumsum(0) / torch.arange(1, 6).view(5, 1, 1, 1)
    torch.testing.assert_close(attention(q, k, v, scale=0.0), means)


MEASURE = """
import resource, torch
from pretrain.positions.alibi import alibi_slopes
from pretrain.kernels.dispatch import attention
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
slopes, table = alibi_slopes(8), torch.randn(8, 32).requires_grad_()
def go(length):
    q, k, v = (torch.randn(length, 1, 8, 16) for _ in range(3))
    with torch.no_grad():
        attention(q, k, v, slopes=slopes)
        attention(q, k, v, relative_attention_bias=table)
    q.requires_grad_()
    attention(q, k, v, slopes=slopes).sum().backward()
go(600)
before = peak()
go(4096)
print(peak() - before)
"""


def test_memory_grows_with_the_length_not_its_square():
    """At 4,096 tokens, scores [8, S, S] would take 512 MiB; q, k and v take 2 MiB each."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    assert float(result.stdout) < 128, f"{result.stdout.strip()} MiB more for 4096 tokens"


def test_dropout_replays_and_keeps_the_mean():
    (q, k, _), arguments = make("odd lengths, several blocks", torch.float32)
    ones, outputs = torch.ones_like(k), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(attention(q, k, ones, dropout_p=0.25, backend="sdpa", **arguments).detach())
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    # Every row of weights sums to 1 on average. There are 331 * 8 rows, each with a standard
    # deviation of at most sqrt(p / (1 - p)) = 0.58; 5 sigma are allowed.
    assert abs(outputs[0].mean() - 1) < 5 * 0.58 / (331 * 8) ** 0.5


def test_choice_is_logged_once_with_its_reason(caplog):
    (q, k, v), arguments = make("one block", torch.float32)
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="pretrain.kernels"):
        for _ in range(3):
            attention(q, k, v, **arguments)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "attention through sdpa: torch's kernel for CPUs, with the bias in an fp32 mask in blocks"
    ]


def test_forced_backend_serves_or_refuses():
    (q, k, v), arguments = make("one block", torch.float32)
    with pytest.raises(ValueError, match="folded cannot serve: "):
        attention(q, k, v, backend="folded", **arguments)
    with pytest.raises(ValueError, match="'flash': there are auto, triton, folded, sdpa"):
        attention(q, k, v, backend="flash", **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slopes": alibi_slopes(4)}, "one for each of the 8 heads"),
        ({"slopes": alibi_slopes(8).bfloat16()}, "expected fp32"),
        (
            {"slopes": alibi_slopes(8), "relative_attention_bias": torch.zeros(8, 32)},
            "a model has one of them",
        ),
        ({"relative_attention_bias": torch.zeros(32, 8)}, "expected \\[8 heads, num_buckets\\]"),
        ({"dropout_p": 1.0}, "dropout_p = 1.0"),
        ({"k": torch.zeros(5, 2, 3, 16)}, "a multiple of key heads"),
        ({"k": torch.zeros(4, 2, 8, 16)}, "5 queries on 4 keys"),
        ({"k": torch.zeros(0, 2, 8, 16)}, "none empty"),
        ({"k": torch.zeros(5, 1, 8, 16)}, "B and D those of q"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    k = change.get("k", torch.zeros(5, 2, 8, 16))
    rest = {key: value for key, value in change.items() if key != "k"}
    with pytest.raises(ValueError, match=message):
        attention(torch.zeros(5, 2, 8, 16), k, k, **rest)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_cuda_is_exact_forward_and_backward(case, backend):
    qkv, arguments = make(case, torch.bfloat16, "cuda")
    assert_exact(attention, qkv, arguments, torch.bfloat16, backend=backend)


class Mixed(NamedTuple):
    """A function of everything that a method may use: scores, queries, keys, positions, a window.

    It is not symmetric in distance, hides single keys, and learns a number for each head.
    """

    learned: torch.Tensor
    window: int | None

    def of_heads(self, heads):
        return self._replace(learned=self.learned[heads])

    def __call__(self, scores, q, k, queries, keys):
        gate = (q[..., :1] + k[..., :1].mT).sigmoid()
        place = (queries[:, None] + 1).log() - 0.01 * keys
        learned = self.learned[:, None, None].to(scores.dtype)
        hidden = (keys % 7 == 3) & (queries[:, None] != keys)
        return (scores * gate + learned * place).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["symmetric", "odd lengths, several blocks", "keys from before"])
def test_a_function_of_scores_is_exact_forward_and_backward(case, dtype, window):
    """In blocks of 256 queries, each computed again in the backward pass."""
    qkv, arguments = make(case, dtype)
    learned = torch.linspace(-1, 1, qkv[0].shape[2]).requires_grad_()
    arguments = {"causal": arguments["causal"], "learned": learned}
    if arguments["causal"]:
        start = (len(qkv[1]) - len(qkv[0])) // 2
        arguments["document_starts"] = torch.full(qkv[0].shape[1::-1], start, dtype=torch.int32)

    def through(function):
        def call(*qkv, learned, **more):
            return function(*qkv, scores=Mixed(learned, window), **more)

        return call

    exact = run(through(attention_reference), qkv, arguments)
    plain = run(through(attention_reference), qkv, arguments, dtype=dtype)
    assert_as_good_as_plain_torch(run(through(attention), qkv, arguments), plain, exact, dtype)


def test_the_second_computation_of_a_block_drops_the_same_weights():
    """The output is linear in v, so it is the product of v and the gradient by v, mask by mask."""
    qkv, _ = make("odd lengths, several blocks", torch.float32)
    function = Mixed(torch.zeros(qkv[0].shape[2]), None)
    out = attention(*qkv, scores=function, dropout_p=0.3)
    [d_v] = torch.autograd.grad(out.sum(), qkv[2])
    assert (d_v * qkv[2]).sum().item() == pytest.approx(out.sum().item(), rel=1e-4)
    assert not torch.equal(out, attention(*qkv, scores=function))
    with pytest.raises(ValueError, match="a function of the scores, which scored alone computes"):
        attention(*qkv, scores=function, backend="sdpa")


def test_a_second_backward_pass_fails_in_words():
    """What the first one freed would count as zero."""
    x = torch.randn(300, 1, 2, 8, requires_grad=True)
    loss = attention(x, x, x, slopes=alibi_slopes(2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()
