"""Floating-point operations a token costs in training, and the share of a device's peak that a run reaches.

Pure arithmetic, without torch. Two conventions are in use for attention, and a number without its convention says
little, so both are offered:
- all of it: 12 n d L a token (n layers, d hidden, L tokens), as in PaLM (Chowdhery et al. 2022, appendix B) and
  llm-foundry (scripts/train/benchmarking);
- the causal half: 6 n d L, as Megatron-LM counts it (megatron/training/training.py, num_floating_point_operations).
"""

from __future__ import annotations

from pretrain.config import RunConfig

# Dense 16-bit tensor-core peaks in TFLOP/s, from NVIDIA's data sheets; those that print the number with 2:4 sparsity
# (Hopper and Blackwell) are halved. The first entry whose name is part of the device's name counts, so the more
# special name stands first.
_PEAK_TFLOPS = (
    ("V100S", 130.0),  # V100S PCIe (V100 data sheet; fp16: Volta has no bf16)
    ("V100-PCIE", 112.0),  # V100 PCIe (V100 data sheet)
    ("V100", 125.0),  # V100 SXM2 and SXM3 (V100 data sheet)
    ("A100", 312.0),  # A100 PCIe and SXM, 40 and 80 GB (A100 data sheet)
    ("H100 PCIe", 756.5),  # 1,513 with sparsity (H100 data sheet)
    ("H100 NVL", 835.5),  # 1,671 with sparsity (H100 NVL data sheet)
    (
        "H100",
        989.5,
    ),  # SXM5, which reports itself as "H100 80GB HBM3"; 1,979 with sparsity (H100 data sheet)
    ("H200 NVL", 835.5),  # 1,671 with sparsity (H200 data sheet)
    ("H200", 989.5),  # SXM, and GH200 with the same die; 1,979 with sparsity (H200 data sheet)
    ("GB200", 2500.0),  # 5,000 with sparsity, a GPU (GB200 NVL72 data sheet)
    ("B200", 2250.0),  # 4,500 with sparsity, a GPU (HGX B200 data sheet)
)


def num_matmul_parameters(config: RunConfig) -> int:
    """N: weights that take part in a matrix product for every token, of the whole model.

    Every linear layer, and the output layer over the padded vocabulary whether or not it is tied. Left out is what is
    looked up or added: the input embedding as such, position tables, biases, LayerNorms. So tying changes nothing,
    as it changes nothing in the work (the convention of nanochat's estimate_flops; llm-foundry's N, all parameters of
    a tied model, also counts the biases and norms and is 0.02 % larger for 25 layers of width 2048).
    """
    m = config.model
    qkv = (m.num_attention_heads + 2 * config.num_query_groups) * config.head_dim
    layer = m.hidden_size * (qkv + m.hidden_size + 2 * config.ffn_hidden_size)
    return m.num_layers * layer + config.padded_vocab_size * m.hidden_size


def flops_per_token(config: RunConfig, sequence_length: int, causal: bool) -> float:
    """Forward and backward FLOPs (a multiply-add is two) a token of a sequence of `sequence_length` tokens.

    6 N, and for the scores and their product with the values 12 n d L, or half of that with `causal`. Recomputed
    activations are not counted: the work the model needs, not the work the hardware does.
    """
    attention = 12 * config.model.num_layers * config.model.hidden_size * sequence_length
    return 6 * num_matmul_parameters(config) + attention * (0.5 if causal else 1.0)


def peak_tflops_per_second(device_name: str) -> float | None:
    """Dense fp16/bf16 peak of the device that torch calls `device_name`, in TFLOP/s; None when it is not in the table.

    A MIG slice carries the name of the whole device, whose peak it does not have: None.
    """
    name = device_name.upper()
    if " MIG " in name:
        return None
    return next((peak for part, peak in _PEAK_TFLOPS if part.upper() in name), None)


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, peak_tflops: float
) -> float:
    """MFU in 0..1: `tokens_per_second` of `flops_per_token` against `peak_tflops` TFLOP/s.

    Rate and peak must belong to the same devices: both of one, or both of all.
    """
    return tokens_per_second * flops_per_token / (peak_tflops * 1e12)
