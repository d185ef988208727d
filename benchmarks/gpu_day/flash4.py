"""ALiBi attention through FlashAttention-4, by way of torch's FlexAttention.

The package `flash-attn-4` (imported as `flash_attn.cute`) has no ALiBi, but takes a function of the
score and lists of the tiles to visit. FlexAttention compiles both for it if its kernel option
BACKEND is "FLASH" (torch/_inductor/kernel/flex/flex_flash_attention.py, torch 2.13). That interface
is used, and not FlashAttention-4's own, which wants the function written in its device language and
still changes between beta releases.

It was written from the sources of torch 2.13 and FlashAttention of August 2026 and has not run on a
GPU. Its backward pass adds dq by atomics, so that a run with it would not repeat bit for bit.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu_day.block_lists import KEY_TILE, BlockLists, causal_lists, skipping_lists
from benchmarks.gpu_day.flex import compiled_flex_attention, scalar
from pretrain.kernels.call import NO_DOCUMENTS, Call, ScoreBias

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MIN_SKIP_KEYS = 4096
"""Number of keys from which tiles are skipped by default. The lists are made before the kernel, by
some thirty operations that read q, k and v once more."""


def refusal(call: Call) -> str | None:
    """Return the reason why FlashAttention-4 cannot serve this call, or None if it can."""
    if call.documents:
        return NO_DOCUMENTS
    if call.capability is None or call.capability[0] not in (9, 10):
        return "it needs a GPU of compute capability 9.x or 10.x"
    if not _is_installed():
        return "the package flash-attn-4 is not installed"
    # Imported here for the reason that benchmarks/gpu_day/flex.py states.
    from torch.nn.attention import flex_attention as torch_flex

    options = getattr(torch_flex, "FlexKernelOptions", None)
    if "BACKEND" not in getattr(options, "__annotations__", {}):
        return f"FlexAttention of torch {torch.__version__} has no option BACKEND"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"it serves fp16 and bf16, this is {call.dtype_name}"
    if call.head_dim > 128 or call.head_dim % 8:
        return f"it needs a head width that is a multiple of 8 and at most 128, not {call.head_dim}"
    if call.bias in ("table", "trained slopes"):
        return "it computes no gradient for a bias"
    if not call.causal:
        return "it is used with a causal mask only"
    if call.dropout:
        return "it has no dropout"
    if call.heads != call.groups:
        return "it is used with as many key heads as query heads only"
    return None


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        # The package above it is missing.
        return False


def attention_flash4(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    skip: bool | None = None,
) -> Tensor:
    """Compute causal attention by FlashAttention-4.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, H, D].
        v_SBGD: Values, [keys, B, H, D].
        bias: Fixed slopes or nothing; causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        skip: Skip tiles of keys that cannot matter: True at any length, False never, None from
            MIN_SKIP_KEYS keys on. Only slopes make tiles skippable, and only where there are as
            many queries as keys.

    Returns:
        The output, [queries, B, H, D].
    """
    first_position = scalar(len(k_SBGD) - len(q_SBHD), q_SBHD.device)
    slopes = bias.slopes

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        return score - slopes[h] * (first_position + i - j)

    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBGD, v_SBGD))
    out: Tensor = compiled_flex_attention()(
        q,
        k,
        v,
        scale=scale,
        score_mod=None if slopes is None else score_mod,
        block_mask=block_mask(q_SBHD, k_SBGD, v_SBGD, bias, scale, skip),
        kernel_options={"BACKEND": "FLASH"},
    )
    return out.permute(2, 0, 1, 3)


def block_mask(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    skip: bool | None,
) -> BlockMask:
    """Return the tiles to visit and the causal mask, in FlexAttention's form.

    Args:
        q_SBHD: Queries.
        k_SBGD: Keys.
        v_SBGD: Values.
        bias: Fixed slopes or nothing; causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        skip: As in `attention_flash4`.
    """
    num_queries, num_keys = len(q_SBHD), len(k_SBGD)
    query_tile = _query_tile(q_SBHD.device)
    wanted = num_keys >= MIN_SKIP_KEYS if skip is None else skip
    if not wanted or bias.slopes is None or num_queries != num_keys:
        return _causal_block_mask(num_queries, num_keys, query_tile, q_SBHD.device)
    with torch.no_grad():
        scale = q_SBHD.shape[3] ** -0.5 if scale is None else scale
        lists = skipping_lists(q_SBHD, k_SBGD, v_SBGD, bias.slopes, query_tile, scale)
    return _block_mask(lists, num_queries, num_keys, query_tile)


@lru_cache(maxsize=8)
def _causal_block_mask(
    num_queries: int, num_keys: int, query_tile: int, device: torch.device
) -> BlockMask:
    """Return the mask without skipping."""
    lists = causal_lists(num_queries, num_keys, query_tile, device)
    return _block_mask(lists, num_queries, num_keys, query_tile)


def _block_mask(lists: BlockLists, num_queries: int, num_keys: int, query_tile: int) -> BlockMask:
    """Return FlexAttention's form of the lists. It derives those of the backward pass from them.

    Args:
        lists: Tiles to visit.
        num_queries: Number of queries.
        num_keys: Number of keys.
        query_tile: Queries in a tile.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first_position = scalar(num_keys - num_queries, lists.full.device)
    return BlockMask.from_kv_blocks(
        lists.partial_counts,
        lists.partial,
        lists.full_counts,
        lists.full,
        BLOCK_SIZE=(query_tile, KEY_TILE),
        mask_mod=lambda b, h, i, j: j <= first_position + i,
        seq_lengths=(num_queries, num_keys),
    )


def _query_tile(device: torch.device) -> int:
    """Return the number of queries in a tile that the kernel wants on this GPU.

    On compute capability 10 its programs serve two tiles of 128 queries each, and the lists must be
    for both (flash_attn/cute/block_sparsity.py, infer_block_sparse_expected_shapes).
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10:
        return 256
    return 128
