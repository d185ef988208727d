"""The dense oracle: attention written out from its definition, in double precision, one score matrix a head."""

# Shape suffixes: S sequence (query or key), B batch, H query heads, D width of a head.

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.kernels.bias import relative_buckets


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
    keep: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """softmax(scale * q k^T + bias) v, [S, B, H, D] in `dtype`; arguments as `pretrain.kernels.dispatch.attention` takes them.

    `keep` [B, H, queries, keys] says which weights dropout keeps, in place of torch's generator.
    In a half-precision `dtype` products are rounded to it, bias and softmax stay fp32: what a plain torch model does.
    Memory is several times B * H * queries * keys.
    """
    (num_queries, num_keys), (heads, head_dim) = (
        (q_SBHD.shape[0], k_SBHD.shape[0]),
        q_SBHD.shape[2:],
    )
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
    weights = scores.softmax(dim=-1)
    if keep is None:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    else:
        weights = torch.where(keep, weights / (1 - dropout_p), 0)
    return (weights.to(dtype) @ v).permute(2, 0, 1, 3)


def dropout_keep(seed: int, shape: tuple[int, int, int, int], dropout_p: float) -> Tensor:
    """Which weights the Triton kernel keeps, bool [B, H, queries, keys]: element (b H + h, query, key) of the stream `seed`.

    Philox4x32 of 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3), the
    counter being (key, query, head, 0); the upper 24 bits of the first word, as a fraction, are kept from `dropout_p` on.
    """
    batch, heads, num_queries, num_keys = shape
    word = (1 << 32) - 1
    head, query, key = torch.meshgrid(
        *(torch.arange(n) for n in (batch * heads, num_queries, num_keys)), indexing="ij"
    )
    counter = [key, query, head, torch.zeros_like(key)]
    key_low, key_high = seed & word, seed >> 32
    for _ in range(7):
        # int64 products wrap, and a shift keeps the sign: the mask mends both
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (high >> 32) & word ^ counter[1] ^ key_low, high & word,
            (low >> 32) & word ^ counter[3] ^ key_high, low & word,
        ]  # fmt: skip
        key_low, key_high = (key_low + 0x9E3779B9) & word, (key_high + 0xBB67AE85) & word
    kept = (counter[0] >> 8).float() / (1 << 24) >= dropout_p
    return kept.reshape(shape)
