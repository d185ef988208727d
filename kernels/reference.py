"""The dense reference: attention by its definition, in double precision.

Every backend is tested against it. It shares no code with them except the rule for buckets, which
is tested against transformers.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.kernels.call import ScoreFunction, relative_buckets


def attention_reference(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    slopes: Tensor | None = None,
    relative_attention_bias: Tensor | None = None,
    relative_attention_max_distance: int = 128,
    scores: ScoreFunction | None = None,
    causal: bool = True,
    document_starts: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute softmax(scale * q k^T + bias) v with all scores in memory.

    In a half-precision `dtype`, products are rounded to it while bias and softmax stay in fp32,
    which is what a plain torch model does. Memory is several times B * H * queries * keys.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        slopes: ALiBi slopes, [H].
        relative_attention_bias: T5's table, [H, num_buckets].
        relative_attention_max_distance: Distance at which the last bucket of the table begins.
        scores: A function that is applied to the scores.
        causal: Apply a causal mask.
        document_starts: For each query, the position of the first token of its document, [B,
            queries]; keys before it are hidden. None hides none.
        scale: Factor on the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.
        keep: Weights that dropout keeps, [B, H, queries, keys]; drawn from torch's generator if
            None.
        dtype: Dtype of the computation.

    Returns:
        The output, [queries, B, H, D] in `dtype`.
    """
    num_queries, num_keys, heads, head_dim = q_SBHD.shape[0], k_SBGD.shape[0], *q_SBHD.shape[2:]
    q, k, v = (x.to(dtype).permute(1, 2, 0, 3) for x in (q_SBHD, k_SBGD, v_SBGD))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))

    # The queries are the last positions of the keys.
    query_position = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    distance = query_position[:, None] - torch.arange(num_keys, device=q.device)
    score_dtype = torch.promote_types(dtype, torch.float32)
    scaled = (q @ k.mT * (head_dim**-0.5 if scale is None else scale)).to(score_dtype)
    if slopes is not None:
        scaled = scaled - slopes.to(score_dtype)[:, None, None] * distance.abs()
    if relative_attention_bias is not None:
        num_buckets = relative_attention_bias.shape[1]
        buckets = relative_buckets(distance, num_buckets, relative_attention_max_distance, causal)
        scaled = scaled + relative_attention_bias.to(score_dtype)[:, buckets]
    if scores is not None:
        key_positions = torch.arange(num_keys, device=q.device)
        wide_q, wide_k = q.to(score_dtype), k.to(score_dtype)
        scaled = scores(scaled, wide_q, wide_k, query_position, key_positions)
        if scores.window is not None:
            scaled = scaled.masked_fill(distance.abs() >= scores.window, -torch.inf)
    if causal:
        scaled = scaled.masked_fill(distance < 0, -torch.inf)
    if document_starts is not None:
        key_position = torch.arange(num_keys, device=q.device)
        before_BHSS = key_position < document_starts[:, None, :, None]
        scaled = scaled.masked_fill(before_BHSS, -torch.inf)
    weights = scaled.softmax(dim=-1)
    if keep is None:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    else:
        weights = torch.where(keep, weights / (1 - dropout_p), 0)
    return (weights.to(dtype) @ v).permute(2, 0, 1, 3)
