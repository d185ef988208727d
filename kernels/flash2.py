"""Attention through FlashAttention-2 (package `flash_attn`, where it is installed), which adds ALiBi inside its kernel."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from pretrain.kernels.bias import ScoreBias


def refusal(q_SBHD: Tensor, bias: ScoreBias) -> str | None:
    """Why FlashAttention-2 cannot serve this, or None if it can."""
    if not q_SBHD.is_cuda:
        return "it runs on CUDA alone"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash_attn is not installed"
    if torch.cuda.get_device_capability(q_SBHD.device) < (8, 0):
        return "it wants a GPU of compute capability 8.0 or more"
    if q_SBHD.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {q_SBHD.dtype}"
    if q_SBHD.shape[3] > 256 or q_SBHD.shape[3] % 8:
        return f"it wants heads of a multiple of 8, at most 256 wide, these have {q_SBHD.shape[3]}"
    if bias.table is not None:
        return "it has no bias but ALiBi's"
    if bias.slopes is not None and bias.slopes.requires_grad:
        return "it gives slopes no gradient"
    return None


def attention_flash2(
    q_SBHD: Tensor,
    k_SBHD: Tensor,
    v_SBHD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """As `pretrain.kernels.dispatch.attention`. Its queries, too, are the last positions of the keys (flash_attn 2.1 and up)."""
    q, k, v = (x.transpose(0, 1) for x in (q_SBHD, k_SBHD, v_SBHD))
    attend = importlib.import_module("flash_attn").flash_attn_func
    out = attend(q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=bias.causal, alibi_slopes=bias.slopes,
                 deterministic=True)  # fmt: skip
    return out.transpose(0, 1)
