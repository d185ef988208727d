"""Attention through FlashAttention-2 (the package `flash_attn`), which adds ALiBi in its kernel."""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

import importlib

from torch import Tensor

from pretrain.kernels.call import NO_DOCUMENTS, Call, ScoreBias


def refusal(call: Call) -> str | None:
    """Return the reason why FlashAttention-2 cannot serve this call, or None if it can."""
    if call.documents:
        return NO_DOCUMENTS
    if not call.is_cuda:
        return "it runs on CUDA only"
    if "flash_attn" not in call.installed:
        return "the package flash_attn is not installed"
    if call.older_than(8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    if not call.is_half:
        return f"it does not support {call.dtype_name}"
    if call.head_dim > 256 or call.head_dim % 8:
        return f"it needs a head width that is a multiple of 8 and at most 256, not {call.head_dim}"
    if call.bias == "table":
        return "it has no bias other than ALiBi"
    if call.bias == "trained slopes":
        return "it does not compute a gradient for slopes"
    return None


def attention_flash2(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """Compute attention by FlashAttention-2.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        bias: Slopes or nothing, and whether attention is causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.

    Returns:
        The output, [queries, B, H, D].
    """
    q, k, v = (x.transpose(0, 1) for x in (q_SBHD, k_SBGD, v_SBGD))
    attend = importlib.import_module("flash_attn").flash_attn_func
    # From version 2.1 on, flash_attn takes the queries for the last positions of the keys, as we
    # do. Without `deterministic` its backward pass adds dq with atomics, in an order that varies.
    out: Tensor = attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=bias.causal,
        alibi_slopes=bias.slopes,
        deterministic=True,
    )
    return out.transpose(0, 1)
