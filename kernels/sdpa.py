"""Attention through torch's scaled_dot_product_attention with a float mask.

This serves every CPU, and the GPUs that no other backend serves.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pretrain.kernels.bias import ScoreBias

QUERY_BLOCK = 256
"""Queries served by one call of torch's kernel. A block is not given the keys after its last query,
which halves the work of long causal sequences. Of 64, 128, 256 and 512, 256 was the fastest at
2,048 and 4,096 tokens and within 3 % of it at 512 (benchmarks/results/cpu_attention_mask.md)."""


def attention_sdpa(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """Compute attention by torch's fused kernels, a block of queries at a time.

    At most QUERY_BLOCK queries by all keys of the mask are in memory at once. On a CPU, torch
    serves dropout and masks that need a gradient by its unfused path, which stores the scores.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        bias: Bias of this rank's heads, and whether attention is causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.

    Returns:
        The output, [queries, B, H, D] in the dtype of q.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBGD, v_SBGD))
    attend = partial(
        scaled_dot_product_attention,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if not needs_mask(q_SBHD, k_SBGD, bias):
        return attend(q, k, v, is_causal=bias.causal).permute(2, 0, 1, 3)
    if q.is_cuda:
        # On CUDA the fused kernel for masks needs mask and q in one dtype, and a mask in half
        # precision cannot tell far keys apart. On a CPU it takes an fp32 mask with half-precision q
        # (torch 2.13, FlashAttentionKernel.cpp).
        q, k, v = q.float(), k.float(), v.float()

    num_queries, num_keys = q.shape[2], k.shape[2]
    # The bias depends on the distance only, so [H, distances] contains all of it. With the queries
    # in reverse order, the mask row of query r is entries r .. r + num_keys - 1, so `unfold` gives
    # the mask [H, queries, keys] as an overlapping view of it, without a copy.
    distances = torch.arange(num_keys - 1, -num_queries, -1, device=q.device)
    added = bias.at(distances)
    if bias.causal:
        added = added.masked_fill(distances < 0, -torch.inf)
    if num_queries <= QUERY_BLOCK:
        # Reversing so small a mask, which copies it, is cheaper than reversing queries and output.
        mask = added.unfold(-1, num_keys, 1).flip(-2)[None]
        return attend(q, k, v, attn_mask=mask).permute(2, 0, 1, 3).to(q_SBHD.dtype)
    reversed_q, blocks = q.flip(2), []
    for start in range(0, num_queries, QUERY_BLOCK):
        queries = min(QUERY_BLOCK, num_queries - start)
        # The first of the reversed queries stands at position num_keys - 1 - start.
        keys = num_keys - start if bias.causal else num_keys
        mask = added[:, start : start + queries + keys - 1].unfold(-1, keys, 1)[None]
        if q.is_cuda:
            # The CUDA kernel needs aligned rows, which an overlapping view does not have.
            mask = mask.contiguous()
        block = reversed_q[:, :, start : start + queries]
        blocks.append(attend(block, k[:, :, :keys], v[:, :, :keys], attn_mask=mask))
    return torch.cat(blocks, dim=2).flip(2).permute(2, 0, 1, 3).to(q_SBHD.dtype)


def needs_mask(q_SBHD: Tensor, k_SBGD: Tensor, bias: ScoreBias) -> bool:
    """Return True if torch's `is_causal` flag alone cannot express the call.

    The flag takes the queries for the first positions of the keys. Here they are the last ones, so
    the two agree only if there are as many queries as keys.

    Args:
        q_SBHD: Queries.
        k_SBGD: Keys.
        bias: Score bias and causality.
    """
    biased = bias.slopes is not None or bias.table is not None
    return biased or (bias.causal and q_SBHD.shape[0] != k_SBGD.shape[0])
