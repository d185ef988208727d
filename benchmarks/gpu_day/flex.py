"""Attention through torch's FlexAttention, which compiles bias and mask into a CUDA kernel.

torch.nn.attention.flex_attention is imported where it is used, because it loads the compiler,
torch._dynamo, which runs with another attention do not need.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pretrain.kernels.call import NO_DOCUMENTS, Call, ScoreBias

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def refusal(call: Call) -> str | None:
    """Return the reason why FlexAttention cannot serve this call, or None if it can."""
    if call.documents:
        return NO_DOCUMENTS
    if not call.is_cuda:
        return "it has no backward on CPU (torch 2.13)"
    if not call.has_triton:
        return "the package triton is not installed"
    if call.older_than(8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    if call.dropout:
        return "it has no dropout"
    if not 16 <= call.head_dim <= 256:
        return f"it is used with heads of width 16 to 256, these have {call.head_dim}"
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it is used in bf16, fp16 and fp32, this is {call.dtype_name}"
    return None


def attention_flex(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    compiled: bool = True,
) -> Tensor:
    """Compute attention by FlexAttention.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        bias: Bias of this rank's heads, and whether attention is causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        compiled: Compile the kernel. Uncompiled it is dense and slow but exact, also runs on a CPU
            and has no gradients there: for tests.

    Returns:
        The output, [queries, B, H, D].
    """
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBGD, v_SBGD))
    num_queries, num_keys = q.shape[2], k.shape[2]
    # The queries are the last positions of the keys.
    first_position = scalar(num_keys - num_queries, q.device)
    attend = compiled_flex_attention() if compiled else flex_attention
    out: Tensor = attend(
        q,
        k,
        v,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        score_mod=_score_mod(first_position, bias),
        block_mask=_causal_block_mask(num_queries, num_keys, q.device) if bias.causal else None,
    )
    return out.permute(2, 0, 1, 3)


def _score_mod(first_position: Tensor, bias: ScoreBias) -> Callable[..., Tensor] | None:
    """Return the function that adds the bias to one score, in fp32, or None if there is none.

    Gradients of slopes and table flow through the tensors that it captures.
    """
    if (slopes := bias.slopes) is not None:
        return lambda score, b, h, i, j: score - slopes[h] * (first_position + i - j).abs()
    if bias.table is not None:
        # Beyond max_distance the bucket no longer changes, in either direction, so a short row per
        # head holds every bias.
        reach = bias.max_distance
        row = bias.at(torch.arange(-reach, reach + 1, device=first_position.device))
        far = scalar(reach, first_position.device)
        return lambda score, b, h, i, j: (
            score + row[h, torch.clamp(first_position + i - j, -far, far) + far]
        )
    return None


def scalar(value: int, device: torch.device) -> Tensor:
    """Return `value` as a tensor that a score_mod may capture."""
    # With a captured int, the compiler would make a new kernel for each value, or fail (torch
    # 2.13).
    return torch.full((), value, dtype=torch.int32, device=device)


@lru_cache(maxsize=8)
def _causal_block_mask(num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Return which tiles hold a key that some query may see.

    Making it takes queries * keys bytes for a moment, hence the cache.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    first_position = scalar(num_keys - num_queries, device)
    return create_block_mask(
        lambda b, h, i, j: j <= first_position + i,
        None,
        None,
        num_queries,
        num_keys,
        device=str(device),
    )


@lru_cache(maxsize=1)
def compiled_flex_attention() -> Any:
    """Return torch's FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    # With fullgraph, what cannot be compiled fails. Without it, FlexAttention would silently fall
    # back to its dense implementation.
    return torch.compile(flex_attention, fullgraph=True)
