"""Test which backend serves which call on which GPU: the choice takes a description, no GPU."""

import pytest
import torch

from pretrain.kernels import folded, sdpa
from pretrain.kernels.call import Call, ScoreBias, describe_call, has_triton
from pretrain.kernels.dispatch import REFUSALS, attention, choose_backend

V100, A100, H100, B200 = (7, 0), (8, 0), (9, 0), (10, 0)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ALIBI = Call(
    dtype=BF16,
    head_dim=128,
    num_queries=1024,
    num_keys=1024,
    heads=16,
    groups=16,
    bias="slopes",
    causal=True,
    dropout=False,
    capability=H100,
    has_triton=True,
)


def call(**changes):
    return ALIBI._replace(**changes)


# What differs from ALiBi, bf16, width 128 and Triton on an H100; the backend; words of the reason.
CHOICES = [
    # Each method's best kernel: no mask, no bias, no Triton kernel where nothing is added.
    ({"bias": "none"}, "sdpa", ["cuDNN or flash", "bf16 numbers are added in fp32"]),
    ({"bias": "none", "capability": A100, "num_queries": 3}, "sdpa", ["cuDNN or flash"]),
    ({"bias": "none", "causal": False}, "sdpa", ["needs no mask"]),
    ({"bias": "none", "dtype": FP32}, "sdpa", ["memory-efficient", "fp32 numbers"]),
    ({"bias": "none", "head_dim": 320}, "sdpa", ["memory-efficient"]),
    ({"bias": "none", "dtype": FP16, "capability": V100}, "sdpa", ["memory-efficient", "fp16"]),
    ({"bias": "none", "head_dim": 257}, "sdpa", ["memory-efficient", "257 are padded to 264"]),
    # ALiBi.
    ({}, "triton", ["inside the kernel", "bf16 numbers are added in fp32"]),
    ({"capability": A100, "dropout": True}, "triton", []),
    ({"bias": "trained slopes"}, "triton", []),
    ({"causal": False}, "triton", []),
    ({"dtype": FP32}, "triton", ["fp32 numbers"]),
    ({"dtype": FP16, "capability": V100}, "folded", ["exact in fp16", "no mask", "8.0 or more"]),
    ({"dtype": FP16, "capability": V100, "dropout": True}, "folded", []),
    ({"dtype": FP16, "capability": V100, "num_queries": 5}, "folded", []),
    ({"head_dim": 320}, "folded", ["width 256 at most", "exact in bf16"]),
    ({"has_triton": False}, "folded", ["triton is not installed"]),
    # What only a mask expresses is cast to fp32 on a GPU, and the log says so.
    (
        {"dtype": FP16, "capability": V100, "bias": "trained slopes"},
        "sdpa",
        ["float mask", "cast from fp16, products are in fp32", "fixed slopes, and nothing else"],
    ),
    ({"dtype": FP16, "capability": V100, "causal": False}, "sdpa", ["cast from fp16"]),
    ({"dtype": BF16, "capability": V100}, "sdpa", ["cast from bf16"]),
    ({"dtype": FP32, "capability": V100}, "sdpa", ["slow: products are in fp32"]),
    ({"head_dim": 320, "bias": "trained slopes"}, "sdpa", ["cast from bf16"]),
    ({"head_dim": 257, "bias": "table"}, "sdpa", ["in fp32, heads of width 257 are padded to 264"]),
    # T5.
    ({"bias": "table"}, "triton", []),
    ({"bias": "table", "dtype": FP16, "capability": V100}, "sdpa", ["cast from fp16"]),
    ({"bias": "table", "head_dim": 320}, "sdpa", ["width 256 at most", "cast from bf16"]),
    # CPUs.
    ({"capability": None, "dtype": FP32}, "sdpa", ["fp32 mask in blocks", "q, k and v in fp32"]),
    ({"capability": None, "bias": "none"}, "sdpa", ["needs no mask", "q, k and v in bf16"]),
    ({"capability": None, "bias": "none", "num_queries": 5}, "sdpa", ["fp32 mask in blocks"]),
    ({"capability": None, "dtype": FP64, "head_dim": 320}, "sdpa", []),
]


@pytest.mark.parametrize(("changes", "backend", "words"), CHOICES)
def test_choice(changes, backend, words):
    choice = choose_backend(call(**changes))
    assert choice.backend == backend, choice
    for word in words:
        assert word in choice.reason
    # A cast is said, and only a cast.
    masked = "mask in blocks; slow" in choice.reason
    is_cast = masked and call(**changes).dtype != FP32
    assert ("cast from" in choice.reason) == is_cast
    # So is padding.
    described = call(**changes)
    is_padded = backend == "sdpa" and described.is_cuda and described.head_dim % 8 != 0
    assert ("padded" in choice.reason) == is_padded


@pytest.mark.parametrize("bias", ["none", "slopes", "trained slopes", "table"])
@pytest.mark.parametrize("capability", [V100, A100, H100, B200])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("head_dim", [20, 128, 320])
@pytest.mark.parametrize("causal", [True, False])
def test_a_chosen_backend_does_not_refuse(bias, capability, dtype, head_dim, causal):
    described = call(
        bias=bias, capability=capability, dtype=dtype, head_dim=head_dim, causal=causal
    )
    if bias == "none" and dtype == BF16 and capability == V100:
        with pytest.raises(ValueError, match="bf16 on this GPU"):
            choose_backend(described)
        return
    chosen = choose_backend(described).backend
    assert REFUSALS[chosen](described) is None


def row_alignment(capability, dtype):
    """Return what torch's memory-efficient kernel wants widths of q and v to be multiples of.

    This is `minimum_gemm_alignment` of torch 2.13 (aten/src/ATen/native/transformers/cuda/
    sdp_utils.cpp).
    """
    uses_tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and dtype != FP32)
    least = 4 if capability >= (8, 0) else 1
    return max(least, 4 if dtype == FP32 else 8) if uses_tensor_cores else least


@pytest.mark.parametrize("width", [1, 4, 12, 20, 64, 130, 257])
@pytest.mark.parametrize("slopes", [None, torch.ones(4)])
@pytest.mark.parametrize("queries", [3, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(V100, FP16), (V100, FP32), (A100, FP16), (A100, BF16), (A100, FP32), (H100, BF16)],
)
def test_torch_s_kernels_get_widths_that_they_serve(
    width, slopes, queries, causal, capability, dtype, monkeypatch
):
    """Watch what torch's function is called with, for GPUs that are only described."""
    given = []

    def record(q, k, v, **_):
        given.append((q.shape[3], k.shape[3], v.shape[3]))
        return q.new_empty(*q.shape[:3], v.shape[3])

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", record)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("pretrain.kernels.call.has_triton", lambda: False)
    q = torch.zeros(queries, 1, 4, width, dtype=dtype)
    k = torch.zeros(7, 1, 2, width, dtype=dtype)
    out = attention(q, k, k, slopes=slopes, causal=causal)
    assert out.shape == q.shape and out.dtype == dtype
    for width_q, width_k, width_v in given:
        assert width_q == width_k >= width and width_v >= width
        assert width_q % row_alignment(capability, dtype) == 0
        assert width_v % row_alignment(capability, dtype) == 0
    assert given


@pytest.mark.parametrize("bias", ["none", "slopes", "table"])
def test_double_precision_on_a_gpu_is_refused(bias):
    with pytest.raises(ValueError, match=r"fp64 on this GPU: no fused kernel .* reference"):
        choose_backend(call(dtype=FP64, bias=bias))


def test_named_backends_refuse_what_they_cannot_serve():
    assert "8.0 or more" in folded.refusal(call(dtype=BF16, capability=V100))
    assert "float64" in REFUSALS["triton"](call(dtype=FP64))
    assert "not installed" in REFUSALS["triton"](call(has_triton=False))


@pytest.mark.parametrize(
    ("slopes", "table", "kind"),
    [
        (None, None, "none"),
        (torch.ones(4), None, "slopes"),
        (torch.ones(4, requires_grad=True), None, "trained slopes"),
        (None, torch.ones(4, 32), "table"),
    ],
)
def test_a_call_is_described_as_it_is(slopes, table, kind):
    q, k = torch.zeros(3, 1, 4, 20, dtype=FP16), torch.zeros(7, 1, 2, 20, dtype=FP16)
    described = describe_call(q, k, ScoreBias(slopes, table, 128, kind != "table"), 0.1)
    assert described == Call(
        dtype=FP16,
        head_dim=20,
        num_queries=3,
        num_keys=7,
        heads=4,
        groups=2,
        bias=kind,
        causal=kind != "table",
        dropout=True,
        capability=None,
        has_triton=has_triton(),
    )
