"""Causal ALiBi folded into extra columns of q and k, for kernels that take no bias.

Torch's memory-efficient kernel (the only fused one that a V100 has), its flash kernel and cuDNN's
compute softmax(scale * q k^T) v under a causal mask, but accept ALiBi only as a mask in memory.
They need no mask, because a softmax does not change when a row of scores is shifted:

    -slope * (i - j) = slope * (j - c) - slope * (i - c)

The second term is the same for all keys j of query i and drops out, for any c. The first term is a
product of a number of the head and a number of the key, so a few more columns can express it:

    scale * (q . k + sum over columns of a_h * b_j) = scale * q . k + slope * (j - c)

**Exact positions.** A position j - c is an integer; fp16 holds integers exactly up to 2^11, bf16 up
to 2^8. The position is therefore split into `high`, a multiple of a power of two, and `low`, the
rest. Both are exact up to MAX_POSITION.

**Exact slopes.** a_h represents slope / scale, which is irrational in general. It is split into
three parts, each the rounded remainder of the previous one. Together they hold 24 bits in bf16, as
many as the fp32 slope itself, and 33 in fp16. Each remainder is multiplied by a power of two and
its columns of k are divided by it, so that no part falls below the smallest fp16 number.

This gives six columns: each of the three parts of the slope times `high` and `low`. A product of
two fp16 or bf16 numbers is exact in fp32, in which the kernels sum (tensor cores included).

**The remaining error** is rounding in these fp32 sums. The term slope * (j - c) / scale grows with
the distance of the key from c, and adding to a large number costs absolute precision. Therefore c
is the middle of the queries, and one call takes at most QUERY_CHUNK queries: near the diagonal,
where weights are large, |j - c| is at most QUERY_CHUNK / 2. The extra columns come last, because
kernels sum in the order of columns: q . k is complete before a large number is added to it.
tests/kernels/test_folded.py has the bound.
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head,
# E extra columns.

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from pretrain.kernels.call import NO_DOCUMENTS, Call, ScoreBias
from pretrain.kernels.sdpa import ALIGNMENT, aligned, only_fused, sdpa_without_bias

QUERY_CHUNK = 2048
"""Largest number of queries in one call, which bounds the rounding error of steep heads
(tests/kernels/test_folded.py). Training lengths up to this need one call."""
SLOPE_PARTS = 3
"""Number of parts, in the dtype of q, that sum to a slope."""
POSITION_BASES = {torch.float16: 2**6, torch.bfloat16: 2**8}
"""`high` is a multiple of this and `low` at most half of it. A small base keeps the sum
|high| + |low| close to |high + low|; bf16 holds multiples of 2^8 exactly up to 2^16, fp16 multiples
of 2^6 up to its largest number."""
SLOPE_FACTORS = {torch.float16: 2**11, torch.bfloat16: 2**8}
"""Factor on each remainder of a slope, about the factor by which rounding makes it smaller."""
MAX_POSITION = 60_000
"""Largest |j - c|, below fp16's largest number, 65,504."""


def refusal(call: Call) -> str | None:
    """Return the reason why folding cannot serve this call, or None if it can."""
    if call.documents:
        return NO_DOCUMENTS
    if call.dtype not in POSITION_BASES:
        return f"it serves fp16 and bf16, this is {call.dtype_name}"
    if call.bias != "slopes":
        return "it folds ALiBi with fixed slopes, and nothing else"
    if not call.causal:
        return "the symmetric bias -slope * |i - j| does not fold; it needs a causal mask"
    if call.num_keys > MAX_POSITION:
        return f"it serves {MAX_POSITION} keys at most, these are {call.num_keys}"
    if call.dtype == torch.bfloat16 and call.older_than(8, 0):
        return "bf16 needs a GPU of compute capability 8.0 or more"
    if not call.is_cuda and call.dropout:
        return "torch's CPU kernel for dropout rounds scores to the dtype of q"
    return None


def attention_folded(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """Compute causal ALiBi attention by a kernel that takes no bias.

    Nothing is cast: products are of fp16 or bf16 numbers, and sums are in fp32. The extra columns
    are constants without gradients. They are computed once for a tensor of slopes, and again after
    torch's version counter shows a change. Changes through `slopes.data.copy_(...)` or NumPy are
    not noticed: change slopes in place under `torch.no_grad()`.

    Args:
        q_SBHD: Queries, [queries, B, H, D], fp16 or bf16. They are the last positions of the keys.
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        bias: Fixed slopes of this rank's heads; causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.

    Returns:
        The output, [queries, B, H, D] in the dtype of q.
    """
    num_queries, num_keys, width = q_SBHD.shape[0], k_SBGD.shape[0], q_SBHD.shape[3]
    scale = width**-0.5 if scale is None else scale
    if scale <= 0:
        # The columns divide by the scale, and torch's own causal mask needs a positive one.
        q_SBHD, scale = (-q_SBHD, -scale) if scale else (0 * q_SBHD, 1.0)
    assert bias.slopes is not None  # checked by `refusal`
    q = _widened(q_SBHD, _cached_query_columns(bias.slopes, scale, q_SBHD.dtype))
    # The backward pass keeps q, k and v. The widened q and k are copies, so v must be one too: a
    # view of the fused qkv projection would keep the whole projection in memory.
    value_width = aligned(width) if _takes_narrow_values(q) else q.shape[3]
    if value_width == width:
        v_SBGD = v_SBGD.contiguous()
    else:
        v_SBGD = torch.nn.functional.pad(v_SBGD, (0, value_width - width))

    outputs = []
    for start in range(0, num_queries, QUERY_CHUNK):
        queries = min(QUERY_CHUNK, num_queries - start)
        keys = num_keys - num_queries + start + queries
        columns_SE = _kept_key_columns(
            keys, keys - queries // 2, q.dtype, q.device, active_fake_mode()
        )
        k = _widened(k_SBGD[:keys], columns_SE[:, None, None])
        with only_fused():
            out = sdpa_without_bias(q[start : start + queries], k, v_SBGD[:keys], scale, dropout_p)
        outputs.append(out[..., :width])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _cached_query_columns(slopes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return `query_columns`, computed once for the slopes that all layers and steps share.

    Args:
        slopes: [H], fp32.
        scale: Factor that the kernel applies to q k^T.
        dtype: Dtype of q: fp16 or bf16.
    """
    if slopes.is_inference():
        # Not cached, because inference tensors have no version counter to detect changes.
        return query_columns(slopes, scale, dtype)
    version = slopes._version, active_fake_mode()
    return _kept_query_columns(slopes, scale, dtype, version)


def query_columns(
    slopes: Tensor, scale: float, dtype: torch.dtype, version: object = None
) -> Tensor:
    """Return the extra columns of q, which hold slope / scale of each head.

    Args:
        slopes: [H], fp32.
        scale: Factor that the kernel applies to q k^T.
        dtype: Dtype of q: fp16 or bf16.
        version: Not used; a key of the cache.

    Returns:
        [H, E] in `dtype`: each part of the slope twice, for `high` and for `low`.
    """
    remainder, parts = slopes.detach().double() / scale, []
    for _ in range(SLOPE_PARTS):
        part = remainder.to(dtype)
        remainder = (remainder - part.double()) * SLOPE_FACTORS[dtype]
        parts += [part, part]
    return torch.stack(parts, dim=1)


def key_columns(
    num_keys: int, center: int, dtype: torch.dtype, device: torch.device, mode: object = None
) -> Tensor:
    """Return the extra columns of k, which hold the position of each key relative to `center`.

    Args:
        num_keys: Number of keys; the first has position 0.
        center: The position that is represented by 0.
        dtype: Dtype of k: fp16 or bf16.
        device: Device of the result.
        mode: Not used; a key of the cache.

    Returns:
        [S, E] in `dtype`: `high` and `low` for each part of the slope, divided by the factor that
        the part was multiplied by.
    """
    base, factor = POSITION_BASES[dtype], SLOPE_FACTORS[dtype]
    position = torch.arange(-center, num_keys - center, device=device)
    high = torch.div(position + base // 2, base, rounding_mode="floor") * base
    both_SE = torch.stack([high, position - high], dim=1)
    # Dividing by powers of two is exact, in fp16 too: no result is below 2^-22, and fp16 holds
    # multiples of 2^-24.
    parts = [both_SE.double() / factor**part for part in range(SLOPE_PARTS)]
    return torch.cat(parts, dim=1).to(dtype)


# Computed once for all layers and, in training, for all steps. A tensor is a key of a cache by its
# identity, and so is a mode. The mode is a key, because columns of a fake mode (in which
# `pretrain.plan` counts) have no values: neither real calls nor other modes must get them.
_kept_query_columns = lru_cache(maxsize=16)(torch.inference_mode(False)(query_columns))
_kept_key_columns = lru_cache(maxsize=64)(torch.inference_mode(False)(key_columns))


def _takes_narrow_values(q_SBHD: Tensor) -> bool:
    """Return True if torch's kernel for the widened queries accepts values of another width.

    The memory-efficient kernel does. It is used on GPUs below compute capability 8.0 and for widths
    above 256; otherwise torch uses cuDNN's or the flash kernel, which need values as wide as keys.
    """
    if not q_SBHD.is_cuda:
        return False
    old = torch.cuda.get_device_capability(q_SBHD.device) < (8, 0)
    return old or q_SBHD.shape[3] > 256


def _widened(x_SBHD: Tensor, columns: Tensor) -> Tensor:
    """Return x with the columns, and zeros up to the next multiple of ALIGNMENT, appended.

    Args:
        x_SBHD: [S, B, H, D].
        columns: [..., E], broadcast over the dimensions that it lacks.
    """
    extra = columns.shape[-1]
    zeros = -(x_SBHD.shape[3] + extra) % ALIGNMENT
    columns = torch.nn.functional.pad(columns, (0, zeros))
    return torch.cat([x_SBHD, columns.expand(*x_SBHD.shape[:3], -1)], dim=3)
