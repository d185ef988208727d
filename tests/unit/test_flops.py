"""Test FLOP counts against a count of every matrix product, and device peaks by torch's names."""

import pytest

from pretrain.config import RunConfig, load_config
from pretrain.model import (
    flops_per_token,
    model_flops_utilization,
    num_matmul_parameters,
    peak_tflops_per_second,
)
from tests.changed import ROOT

DEMO = ROOT / "configs/demo.toml"


def matmul_flops(config: RunConfig, length: int, causal: bool) -> float:
    """Count the FLOPs of a whole sequence, product by product.

    A product [m, k] x [k, n] costs 2 m k n. For each product of the forward pass, the backward pass
    has two of the same size, for the gradients of the input and of the weight; hence the factor of
    three.
    """
    m, head_dim = config.model, config.head_dim
    groups, ffn = config.num_query_groups, config.ffn_hidden_size

    def product(rows: float, inner: float, columns: float) -> float:
        return 2 * rows * inner * columns

    heads = m.num_attention_heads
    attention = heads * (product(length, head_dim, length) + product(length, length, head_dim))
    layer = (
        product(length, m.hidden_size, (heads + 2 * groups) * head_dim)
        + attention * (0.5 if causal else 1)
        + product(length, heads * head_dim, m.hidden_size)
        + product(length, m.hidden_size, 2 * ffn if m.gated_linear_unit else ffn)
        + product(length, ffn, m.hidden_size)
    )
    return 3 * (m.num_layers * layer + product(length, m.hidden_size, config.padded_vocab_size))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [128, 2048])
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_query_groups=2"],
        ["model.ffn_hidden_size=384"],
        ["model.gated_linear_unit=true", "model.kv_channels=24"],
    ],
)
def test_flops_equal_a_count_of_every_product(length, causal, overrides):
    config = load_config(DEMO, overrides)
    assert flops_per_token(config, length, causal) * length == matmul_flops(config, length, causal)


def test_an_adaptive_softmax_costs_its_head_and_the_projections_of_the_words():
    """Of one cluster alone, as every token of the head costs it."""
    plain, adaptive = load_config(DEMO), load_config(DEMO, ["model.adaptive_cutoffs=[500,2000]"])
    layers = num_matmul_parameters(plain) - plain.padded_vocab_size * 128
    # The words' projection to hidden_size, and the logits of 500 words and two tails.
    assert num_matmul_parameters(adaptive) == layers + 128 * 128 + (500 + 2) * 128


def test_published_throughput_gives_the_published_utilization():
    # llm-foundry's table for MPT-1B (24 layers of width 2048, no biases, vocabulary 50,368, learned
    # positions) on 8 H100 at L = 1024: 48,910 tokens/s per GPU are 41.95 % MFU, with all of
    # attention counted. Their N also counts the position table and the norms (0.17 %), and the
    # numbers are rounded, hence the tolerance of 0.3 %.
    shape = [
        "model.num_layers=24",
        "model.hidden_size=2048",
        "model.num_attention_heads=16",
        "data.vocab_size=50368",
        "data.sequence_length=1024",
        "evaluation.lengths=[1024]",
        "model.use_bias=false",
    ]
    flops = flops_per_token(load_config(DEMO, shape), 1024, causal=False)
    mfu = model_flops_utilization(48_910, flops, peak_tflops_per_second("NVIDIA H100 80GB HBM3"))
    assert mfu == pytest.approx(0.4195, rel=0.003)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100S-PCIE-32GB", 130.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_by_the_names_torch_reports(name, peak):
    assert peak_tflops_per_second(name) == peak
