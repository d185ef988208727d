"""Attention through FlexAttention: the compiled CUDA kernel computes bias and mask itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from pretrain.kernels.bias import ScoreBias


def refusal(q_SBHD: Tensor, dropout_p: float) -> str | None:
    """Why FlexAttention cannot serve this, or None if it can."""
    if not q_SBHD.is_cuda:
        return "it has no backward on CPU (torch 2.13)"
    if torch.cuda.get_device_capability(q_SBHD.device) < (8, 0):
        return "it wants a GPU of compute capability 8.0 or more"
    if dropout_p > 0:
        return "it has no dropout"
    if q_SBHD.shape[3] < 16:
        return f"it wants heads of width 16 or more, these have {q_SBHD.shape[3]}"
    return None


def attention_flex(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    compiled: bool = True,
) -> Tensor:
    """As `pretrain.kernels.dispatch.attention`. Not compiled it is slow, dense and right, on a CPU too, without gradients."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
    num_queries, num_keys = q.shape[2], k.shape[2]
    first = _scalar(num_keys - num_queries, q.device)  # position of the first query
    out = (_compiled() if compiled else flex_attention)(
        q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        score_mod=_score_mod(first, bias),
        block_mask=_causal_block_mask(num_queries, num_keys, q.device) if bias.causal else None,
    )  # fmt: skip
    return out.permute(2, 0, 1, 3)


def _score_mod(first: Tensor, bias: ScoreBias) -> Callable[..., Tensor] | None:
    """What the kernel does to one score, in fp32. Captured tensors get their gradients through it."""
    if (slopes := bias.slopes) is not None:
        return lambda score, b, h, i, j: score - slopes[h] * (first + i - j).abs()
    if bias.table is not None:
        # From max_distance on, either way, the bucket stays the same: a short row a head holds every bias.
        row = bias.at(torch.arange(-bias.max_distance, bias.max_distance + 1, device=first.device))
        far = _scalar(bias.max_distance, first.device)
        return lambda score, b, h, i, j: score + row[h, torch.clamp(first + i - j, -far, far) + far]
    return None


def _scalar(value: int, device: torch.device) -> Tensor:
    # What the lambdas capture is a tensor: of an int the compiler makes a new kernel a value, or (torch 2.13) fails.
    return torch.full((), value, dtype=torch.int32, device=device)


@lru_cache(maxsize=8)
def _causal_block_mask(num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Which tiles hold a key that some query may see. Making one takes queries * keys bytes for a moment."""
    first = _scalar(num_keys - num_queries, device)
    return create_block_mask(
        lambda b, h, i, j: j <= first + i, None, None, num_queries, num_keys, device=str(device)
    )


@lru_cache(maxsize=1)
def _compiled() -> Any:
    # fullgraph: where it cannot be compiled it fails, rather than run dense without saying so.
    return torch.compile(flex_attention, fullgraph=True)
