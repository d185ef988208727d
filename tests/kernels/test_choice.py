"""Test which backend serves which call on which GPU: the choice takes a description, no GPU."""

import pytest
import torch

from pretrain.kernels import folded
from pretrain.kernels.call import Call, ScoreBias, describe_call, has_triton
from pretrain.kernels.dispatch import REFUSALS, choose_backend

V100, A100, H100, B200 = (7, 0), (8, 0), (9, 0), (10, 0)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ALIBI = Call(
    dtype=BF16,
    head_dim=128,
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


# What differs from ALiBi, bf16, width 128 and Triton on an H100; the backend.
CHOICES = [
    # Each method's best kernel: no mask, no bias, no Triton kernel where nothing is added.
    ({"bias": "none"}, "sdpa"),
    ({"bias": "none", "causal": False}, "sdpa"),
    ({"bias": "none", "dtype": FP16, "capability": V100}, "sdpa"),
    ({"bias": "none", "documents": True}, "triton"),
    # ALiBi.
    ({}, "triton"),
    ({"capability": A100, "dropout": True}, "triton"),
    ({"bias": "trained slopes"}, "triton"),
    ({"causal": False}, "triton"),
    ({"dtype": FP32}, "triton"),
    ({"dtype": FP16, "capability": V100}, "folded"),
    ({"dtype": FP16, "capability": V100, "dropout": True}, "folded"),
    ({"head_dim": 320}, "folded"),
    ({"has_triton": False}, "folded"),
    # What only a mask expresses.
    ({"dtype": FP16, "capability": V100, "bias": "trained slopes"}, "sdpa"),
    ({"dtype": FP16, "capability": V100, "causal": False}, "sdpa"),
    ({"dtype": BF16, "capability": V100}, "sdpa"),
    ({"dtype": FP32, "capability": V100}, "sdpa"),
    ({"head_dim": 320, "bias": "trained slopes"}, "sdpa"),
    # T5.
    ({"bias": "table"}, "triton"),
    ({"bias": "table", "dtype": FP16, "capability": V100}, "sdpa"),
    ({"bias": "table", "head_dim": 320}, "sdpa"),
    # CPUs.
    ({"capability": None, "dtype": FP32}, "sdpa"),
    ({"capability": None, "bias": "none"}, "sdpa"),
    ({"capability": None, "dtype": FP64, "head_dim": 320}, "sdpa"),
]


@pytest.mark.parametrize(("changes", "backend"), CHOICES)
def test_choice(changes, backend):
    described = call(**changes)
    choice = choose_backend(described)
    assert choice.backend == backend, choice
    # A cast to fp32 is said, and so is why no faster backend serves.
    is_cast = backend == "sdpa" and described.is_cuda and described.bias != "none"
    assert ("q, k and v in fp32" in choice.reason) == is_cast
    assert ("triton cannot serve, " in choice.reason) == (is_cast or backend == "folded")


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
    assert REFUSALS[choose_backend(described).backend](described) is None


def test_named_backends_refuse_what_they_cannot_serve():
    assert "8.0 or more" in folded.refusal(call(dtype=BF16, capability=V100))
    on_cpu = call(dtype=FP16, capability=None, dropout=True)
    assert "rounds scores to the dtype of q" in folded.refusal(on_cpu)
    assert "float64" in REFUSALS["triton"](call(dtype=FP64))
    assert "not installed" in REFUSALS["triton"](call(has_triton=False))
    with pytest.raises(ValueError, match=r"fp64 on this GPU: no fused kernel"):
        choose_backend(call(dtype=FP64))


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
        num_keys=7,
        heads=4,
        groups=2,
        bias=kind,
        causal=kind != "table",
        dropout=True,
        capability=None,
        has_triton=has_triton(),
    )
