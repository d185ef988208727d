"""The dense oracle: attention written out from its definition, in double precision, one score matrix a head."""

# Shape suffixes: S sequence (query or key), B batch, H query heads, D width of a head.

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bias import relative_buckets


def attention_reference(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    *,
    slopes: Tensor | None = None,
    relative_attention_bias: Tensor | None = None,
    relative_attention_max_distance: int = 128,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """softmax(scale * q k^T + bias) v, [S, B, H, D] in `dtype`; arguments as `kernels.attention` takes them.

    In a half-precision `dtype` products are rounded to it, bias and softmax stay fp32: what a plain torch model does.
    Memory is several times B * H * queries * keys.
    """
    (num_queries, num_keys), (heads, head_dim) = (q_SBHD.shape[0], k_SBHD.shape[0]), q_SBHD.shape[2:]
    q, k, v = (x.to(dtype).permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))

    query_position = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    distance = query_position[:, None] - torch.arange(num_keys, device=q.device)
    score_dtype = torch.promote_types(dtype, torch.float32)
    scores = (q @ k.mT * (head_dim**-0.5 if scale is None else scale)).to(score_dtype)
    if slopes is not None:
        scores = scores - slopes.to(score_dtype)[:, None, None] * distance.abs()
    if relative_attention_bias is not None:
        num_buckets = relative_attention_bias.shape[1]
        buckets = relative_buckets(distance, num_buckets, relative_attention_max_distance, causal)
        scores = scores + relative_attention_bias.to(score_dtype)[:, buckets]
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    weights = torch.nn.functional.dropout(scores.softmax(dim=-1), dropout_p)
    return (weights.to(dtype) @ v).permute(2, 0, 1, 3)
