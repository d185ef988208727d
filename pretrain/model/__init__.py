"""Megatron's GPT with this project's attention, positions and loss.

This file counts its floating-point operations and the model FLOPs utilization, without torch. Two
conventions for attention are in use, and a utilization means little without its convention, so both
are offered (n layers, d channels of all heads together, L tokens):

    full             12 n d L per token, as in PaLM (Chowdhery et al. 2022, appendix B) and
                     llm-foundry (scripts/train/benchmarking)
    the causal half  6 n d L per token, as in Megatron-LM (megatron/training/training.py,
                     num_floating_point_operations)
"""

from __future__ import annotations

import math

from pretrain.config import RunConfig
from pretrain.positions.base import by_layer

# Dense 16-bit tensor-core peaks in TFLOP/s, from NVIDIA's data sheets. For Hopper and Blackwell
# these print the peak with 2:4 sparsity, twice the dense one; the comments give that number. The
# first entry whose name is part of the device's name counts, so more specific names come first.
_PEAK_TFLOPS = (
    # V100 data sheet, fp16: Volta has no bf16. V100S is PCIe; plain "V100" is SXM2 and SXM3.
    ("V100S", 130.0),
    ("V100-PCIE", 112.0),
    ("V100", 125.0),
    # A100 data sheet: PCIe and SXM, 40 and 80 GB.
    ("A100", 312.0),
    # H100 data sheets: 1,513 (PCIe), 1,671 (NVL) and 1,979 (SXM5) with sparsity. The SXM5 module
    # reports itself as "H100 80GB HBM3".
    ("H100 PCIe", 756.5),
    ("H100 NVL", 835.5),
    ("H100", 989.5),
    # H200 data sheet: 1,671 (NVL) and 1,979 (SXM) with sparsity. "GH200" contains "H200", and has
    # the same die as the SXM module.
    ("H200 NVL", 835.5),
    ("H200", 989.5),
    # GB200 NVL72 data sheet, per GPU: 5,000 with sparsity.
    ("GB200", 2500.0),
    # HGX B200 data sheet, per GPU: 4,500 with sparsity.
    ("B200", 2250.0),
)


def num_matmul_parameters(config: RunConfig) -> int:
    """Return N, the number of weights of the whole model that multiply every token.

    N counts every linear layer, and the output layer over the padded vocabulary whether or not it
    is tied. It leaves out what is looked up or added: the input embedding, position tables, biases
    and norms. Tying therefore does not change N, just as it does not change the work. This is the
    convention of nanochat's `estimate_flops`. llm-foundry's N, all parameters of a tied model,
    also counts biases and norms; it is 0.02 % larger for 25 layers of width 2048.

    Of adaptive inputs and an adaptive softmax, N counts only the head. The work in the tails, whose
    products are narrow, depends on the text.
    """
    m = config.model
    # The projections to queries and from attention's output, and those to keys and values.
    heads = 2 * (m.num_attention_heads + config.num_query_groups) * config.head_dim
    layer = m.hidden_size * (heads + (2 + m.gated_linear_unit) * config.ffn_hidden_size)
    words = config.padded_vocab_size * m.hidden_size
    if clusters := config.adaptive_clusters:
        head = clusters[0].size + len(clusters) - 1
        words = (head + m.hidden_size) * m.hidden_size
    return m.num_layers * layer + words


def flops_per_token(config: RunConfig, sequence_length: int, causal: bool) -> float:
    """Return the model FLOPs of one token, forward and backward.

    FLOPs = 6 N + 12 n d L, or 6 N + 6 n d L with `causal`. A multiply-add counts as two
    operations, and the backward pass costs twice the forward pass, hence 6 N. The second term is
    the product of queries and keys and the product of scores and values. Recomputed activations
    are not counted: this is the work that the model requires, not the work that the hardware does.
    data.per_document_attention does not reduce the second term here, although its attention needs
    less, by an amount that depends on the text. For a masked model both conventions count all of
    the second term.

    Args:
        config: The run's config.
        sequence_length: L, tokens in a sequence.
        causal: Count only the lower triangle of the scores (see the module's docstring).
    """
    channels = config.model.num_attention_heads * config.head_dim
    attention = 12 * config.model.num_layers * channels * sequence_length
    is_half = causal and not config.is_masked
    return 6 * num_matmul_parameters(config) + attention * (0.5 if is_half else 1.0)


REACH = 32.0
"""How far back an ALiBi head sees, as tokens x slope. Assumed: a model of 1.3M parameters trained
on text saw 64 x 2^h tokens in a head of slope 2^-(h + 1), and heads with equal scores see 28
(24 ln 2 + ln N for N = 65,536 keys, `pretrain.kernels.reach`)."""
ALL_UP_TO = 1024
"""Within this distance in tokens all keys count: the speeds of attention that `pretrain plan` uses
are those of this length."""


def reaches(config: RunConfig) -> list[list[float]]:
    """Return the most keys that each head sees, for each kind of layer."""
    length, heads = config.data.sequence_length, config.model.num_attention_heads
    found = []
    for each in by_layer(config):
        end = min(each.position.visible(config) or length, length)
        slopes = each.position.head_slopes(config) or [0] * heads
        far = [REACH / slope if slope > 0 else math.inf for slope in slopes]
        found.append([min(max(tokens, ALL_UP_TO), end) for tokens in far])
    return found


def keys_per_query(config: RunConfig, context: int = 1) -> list[float]:
    """Return how many keys a query of each head sees, as the mean over queries and layers.

    This is half of the sequence, or less; for the queries of the last of several parts it may be
    nearly the whole sequence.

    Args:
        config: The run.
        context: Number of parts of the sequence; the queries are those of the last part.
    """
    length = config.data.sequence_length

    def seen(most: float, queries: float) -> float:
        # Total over the first queries, of which the first `most` have fewer keys before them.
        most = min(most, queries)
        return most * queries - most * most / 2

    size = length / context
    means = [
        [(seen(most, length) - seen(most, length - size)) / size for most in layer]
        for layer in reaches(config)
    ]
    return [sum(head) / len(means) for head in zip(*means)]


def received_share(config: RunConfig, context: int) -> float:
    """Return which share of the keys before the last part of a sequence the last part sees."""
    before = config.data.sequence_length * (1 - 1 / context)
    near = [min(most, before) for layer in reaches(config) for most in layer]
    return sum(near) / len(near) / before


def attention_share(config: RunConfig) -> float:
    """Return the share of the causal half of attention that is within the reach, in 0..1."""
    seen = keys_per_query(config)
    return 2 * sum(seen) / len(seen) / config.data.sequence_length


def peak_tflops_per_second(device_name: str) -> float | None:
    """Return the dense fp16/bf16 peak of a device in TFLOP/s, or None if it is not known.

    Args:
        device_name: The name that torch.cuda.get_device_name() reports.
    """
    name = device_name.upper()
    # A MIG slice carries the name of the whole device but has only a part of its peak.
    if " MIG " in name:
        return None
    return next((peak for part, peak in _PEAK_TFLOPS if part.upper() in name), None)


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, peak_tflops: float
) -> float:
    """Return the model FLOPs utilization (MFU), in 0..1.

    The rate and the peak must belong to the same devices: both to one, or both to all of them.

    Args:
        tokens_per_second: Training throughput.
        flops_per_token: From the function of that name.
        peak_tflops: Peak of the devices in TFLOP/s.
    """
    return tokens_per_second * flops_per_token / (peak_tflops * 1e12)
