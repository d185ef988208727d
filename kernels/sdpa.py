"""Attention through torch's scaled_dot_product_attention with a float mask: every CPU, and GPUs nothing else serves."""

# Shape suffixes: S sequence (query or key), B batch, H heads, D width of a head.

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pretrain.kernels.bias import ScoreBias

QUERY_BLOCK = 256
"""Queries served at a time. A block meets no key after its last query, which halves the work of long causal sequences;
256 is the best of 64 to 512 over lengths 512 to 4096 (benchmarks/results/attention_cpu.md)."""


def attention_sdpa(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """As `pretrain.kernels.dispatch.attention`. No more of a mask is ever in memory than QUERY_BLOCK queries by all keys.

    torch serves a mask that needs a gradient, and dropout, on a CPU by its unfused path, which keeps the scores.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
    attend = partial(
        scaled_dot_product_attention,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if not needs_mask(q_SBHD, k_SBHD, bias):
        return attend(q, k, v, is_causal=bias.causal).permute(2, 0, 1, 3)
    if q.is_cuda:
        # The fused kernel for masks on CUDA wants mask and q of one dtype, and a mask in half precision cannot tell
        # far keys apart. On CPU (torch 2.13, FlashAttentionKernel.cpp) an fp32 mask with half-precision q is served.
        q, k, v = q.float(), k.float(), v.float()

    num_queries, num_keys = q.shape[2], k.shape[2]
    # The bias depends on the distance alone, so [H, distances] says it all: with the queries in reverse order the row
    # of query r is entries r .. r + num_keys - 1, and `unfold` shows [H, queries, keys] as an overlapping view of it.
    distances = torch.arange(num_keys - 1, -num_queries, -1, device=q.device)
    added = (
        bias.at(distances).masked_fill(distances < 0, -torch.inf)
        if bias.causal
        else bias.at(distances)
    )
    if (
        num_queries <= QUERY_BLOCK
    ):  # so small a mask is cheaper to turn round than queries and output
        mask = added.unfold(-1, num_keys, 1).flip(-2)[None]
        return attend(q, k, v, attn_mask=mask).permute(2, 0, 1, 3).to(q_SBHD.dtype)
    reversed_q, blocks = q.flip(2), []
    for start in range(0, num_queries, QUERY_BLOCK):
        queries = min(QUERY_BLOCK, num_queries - start)
        keys = num_keys - start if bias.causal else num_keys
        mask = added[:, start : start + queries + keys - 1].unfold(-1, keys, 1)[None]
        if q.is_cuda:
            mask = mask.contiguous()  # there the kernel wants aligned rows
        block = reversed_q[:, :, start : start + queries]
        blocks.append(attend(block, k[:, :, :keys], v[:, :, :keys], attn_mask=mask))
    return torch.cat(blocks, dim=2).flip(2).permute(2, 0, 1, 3).to(q_SBHD.dtype)


def needs_mask(q_SBHD: Tensor, k_SBHD: Tensor, bias: ScoreBias) -> bool:
    """Whether scores need more than torch's `is_causal`, which takes queries for the first positions, not the last."""
    biased = bias.slopes is not None or bias.table is not None
    return biased or (bias.causal and q_SBHD.shape[0] != k_SBHD.shape[0])
