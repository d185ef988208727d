"""Attention through torch's scaled_dot_product_attention.

Without a bias this is torch's fastest kernel: on a GPU cuDNN's, the flash or the memory-efficient
one. With a bias it takes a float mask. This serves every CPU, and on a GPU the calls that no other
backend serves, where q, k and v are cast to fp32 (the log says so at the start).
"""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.functional import pad, scaled_dot_product_attention

from pretrain.kernels.call import Call, ScoreBias
from pretrain.kernels.reach import has_values, key_windows

QUERY_BLOCK = 256
"""Queries in one call of torch's kernel. A block gets no keys after its last query, which halves
the work for long causal sequences. Of 64, 128, 256 and 512, 256 was the fastest at 2,048 and 4,096
tokens, and within 3 % of the fastest at 512 (benchmarks/results/cpu_attention_mask.md)."""

SKIPPED_FROM = 4096
"""Number of keys from which on it is faster to compute which keys matter and skip the others
(`pretrain.kernels.reach`)."""

KEY_TILE = 64
"""Windows of keys begin and end at multiples of this."""

KEYS_OF_A_CALL = 256
"""Overhead of a call of torch's kernel for a block of queries, as a number of keys of one head."""

Window = tuple[slice, int, int]
"""The keys for a call of torch's kernel: key heads, the first key, the key after the last."""

ALIGNMENT = 8
"""The fused kernels of a GPU need head widths that are multiples of this. The memory-efficient
kernel needs 16-byte rows of q and v: 8 numbers of fp16 or bf16, and 4 of fp32 from compute
capability 8.0 on (`minimum_gemm_alignment` in torch's sdp_utils.cpp)."""


def attention_sdpa(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
    document_starts: Tensor | None = None,
    skip: bool | None = None,
) -> Tensor:
    """Compute attention by torch's fused kernels, a block of queries at a time.

    Bias, causality and documents are in a mask, which has at most QUERY_BLOCK queries by all keys
    in memory. On a CPU, torch computes dropout and masks that need a gradient by its unfused path,
    which stores the scores. On a GPU, heads whose width is not a multiple of ALIGNMENT are padded
    with zeros, which change neither scores nor output.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        bias: Bias of this rank's heads, and whether attention is causal.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.
        document_starts: As in `pretrain.kernels.dispatch.attention`, or None.
        skip: Leave out keys too far away to matter (`pretrain.kernels.reach`). True: at any length;
            False: never; None: where it is faster.

    Returns:
        The output, [queries, B, H, D] in the dtype of q.
    """
    width = q_SBHD.shape[3]
    if _wants_padding(q_SBHD):
        # The default scale depends on the width before padding.
        scale = width**-0.5 if scale is None else scale
        q, k, v = (pad(x, (0, aligned(width) - width)) for x in (q_SBHD, k_SBGD, v_SBGD))
        padded = attention_sdpa(q, k, v, bias, scale, dropout_p, document_starts, skip)
        return padded[..., :width]
    # Torch's own causal mask gives NaN with such a scale on a CPU (torch 2.13).
    is_odd = bias.causal and scale is not None and scale <= 0 and not q_SBHD.is_cuda
    if document_starts is None and not is_odd and not needs_mask(q_SBHD, k_SBGD, bias):
        # On a CPU, torch computes dropout only by its unfused path.
        with only_fused() if q_SBHD.is_cuda else contextlib.nullcontext():
            return sdpa_without_bias(q_SBHD, k_SBGD, v_SBGD, scale, dropout_p, bias.causal)
    dtype = q_SBHD.dtype
    if q_SBHD.is_cuda and (bias.slopes is not None or bias.table is not None):
        # On CUDA the fused kernel for masks needs mask and q in the same dtype, and a mask in half
        # precision cannot distinguish far keys. On a CPU the kernel takes an fp32 mask with
        # half-precision q (torch 2.13, FlashAttentionKernel.cpp).
        q_SBHD, k_SBGD, v_SBGD = q_SBHD.float(), k_SBGD.float(), v_SBGD.float()
    q, k, v = equal = _with_equal_heads(q_SBHD, k_SBGD, v_SBGD, masked=True)
    q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
    num_queries, num_keys = q.shape[2], k.shape[2]
    # Without a bias the mask consists of 0 and -inf, which every dtype can hold. The mask has the
    # dtype of fp64 queries, because torch's CPU kernel misreads an fp32 mask with these, without an
    # error (torch 2.13: outputs differ by 3).
    mask_dtype = q.dtype if q.is_cuda or q.dtype == torch.float64 else torch.float32
    size = num_queries, num_keys, mask_dtype, q.device
    attend = partial(
        scaled_dot_product_attention,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if num_queries <= QUERY_BLOCK:
        slopes = bias.slopes
        varies = slopes is not None and (slopes.requires_grad or slopes.is_inference())
        is_kept = num_queries == num_keys and bias.table is None and not varies
        version = slopes._version if is_kept and slopes is not None else 0
        mode = q.fake_mode if isinstance(q, FakeTensor) else None
        mask = (_kept_mask if is_kept else _small_mask)(bias, size, version, mode)
        mask = within_documents(mask, document_starts)
        return attend(q, k, v, attn_mask=mask).permute(2, 0, 1, 3).to(dtype)
    added = _added(bias, size)
    windows = _windows(equal, bias, scale, dropout_p, document_starts, skip)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, added))
    starts = None if document_starts is None else document_starts.flip(1)
    out: Tensor = _Blocks.apply(q.flip(2), k, v, added, starts, windows, attend, wanted)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return out.flip(2).permute(2, 0, 1, 3).to(dtype)


Size = tuple[int, int, torch.dtype, torch.device]
"""Numbers of queries and keys, and dtype and device of a mask."""


def _added(bias: ScoreBias, size: Size) -> Tensor:
    """Return what is added to scores, [H or 1, queries + keys - 1], in the order of the keys.

    The bias depends only on the distance, so these numbers suffice. With the queries in reverse
    order, the mask row of query r is entries r .. r + num_keys - 1, so `unfold` gives the mask
    [H, queries, keys] as an overlapping view, without a copy.
    """
    num_queries, num_keys, dtype, device = size
    distances = torch.arange(num_keys - 1, -num_queries, -1, device=device)
    added = bias.at(distances)
    if bias.causal:
        added = added.masked_fill(distances < 0, -torch.inf)
    return added.to(dtype)


def _small_mask(bias: ScoreBias, size: Size, version: int, mode: FakeTensorMode | None) -> Tensor:
    """Return the mask [1, H or 1, queries, keys] for at most one block of queries.

    The version and the mode are keys of the cache `_kept_mask`: all layers and steps share their
    slopes, and so one mask, like the columns of `pretrain.kernels.folded`.
    """
    # Reversing such a small mask, which copies it, is cheaper than reversing queries and output.
    return _added(bias, size).unfold(-1, size[1], 1).flip(-2)[None]


# Outside inference mode, because its tensors could not be saved for a backward pass.
_kept_mask = lru_cache(maxsize=4)(torch.inference_mode(False)(_small_mask))


class _Blocks(torch.autograd.Function):
    """Attention of blocks of queries, each head with its own window of keys, the last query first.

    Each call of torch's kernel has its own graph, from slices of q, k, v and the bias to a part of
    the output. Autograd would expand the gradient of each slice to the size of the whole tensor, so
    memory traffic would grow with the square of the length. Here the gradients of slices are added
    to one buffer for each tensor, in fp32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        added: Tensor,
        document_starts: Tensor | None,
        windows: list[list[Window]],
        attend: Callable[..., Tensor],
        wanted: bool,
    ) -> Tensor:
        inputs, num_queries = (q_BHSD, k_BGSD, v_BGSD, added), q_BHSD.shape[2]
        shared = q_BHSD.shape[1] // k_BGSD.shape[1]
        out_BHSD = torch.empty(q_BHSD.shape, dtype=q_BHSD.dtype, device=q_BHSD.device)
        ctx.inputs, ctx.calls = [(x.shape, x.dtype, x.device) for x in inputs], []
        for start, of_block in zip(range(0, num_queries, QUERY_BLOCK), windows):
            rows = slice(start, min(start + QUERY_BLOCK, num_queries))
            for groups, first, end in of_block:
                heads = slice(groups.start * shared, groups.stop * shared)
                keys = slice(None), groups, slice(first, end)
                places = (
                    (slice(None), heads, rows),
                    keys,
                    keys,
                    # Row 0 of the mask belongs to the query at position num_keys - 1 - start,
                    # column 0 to key `first`. Without a bias one row serves all heads.
                    (
                        heads if len(added) > 1 else slice(None),
                        slice(rows.start + first, rows.stop + end - 1),
                    ),
                )
                parts = [x[place] for x, place in zip(inputs, places)]
                if wanted:
                    parts = [
                        part.detach().requires_grad_(needed)
                        for part, needed in zip(parts, ctx.needs_input_grad)
                    ]
                with torch.set_grad_enabled(wanted):
                    q, k, v, row = parts
                    mask = row.unfold(-1, end - first, 1)[None]
                    if document_starts is not None:
                        mask = within_documents(mask, document_starts[:, rows], first)
                    if q.is_cuda:
                        # Copy it, because the CUDA kernel needs aligned rows, which an overlapping
                        # view does not have.
                        mask = mask.contiguous()
                    out = attend(q, k, v, attn_mask=mask)
                out_BHSD[places[0]] = out.detach()
                if wanted:
                    ctx.calls.append((out, parts, places))
        return out_BHSD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
            if needed
            else None
            for (shape, dtype, device), needed in zip(ctx.inputs, ctx.needs_input_grad)
        ]
        if not ctx.calls:
            raise RuntimeError("a second backward pass through attention. Compute its output again")
        while ctx.calls:
            # Pop the call, so that its saved tensors are freed after use.
            out, parts, places = ctx.calls.pop()
            leaves = [part for part in parts if part.requires_grad]
            found = iter(torch.autograd.grad(out, leaves, d_out_BHSD[places[0]]))
            for place, gradient in zip(places, gradients):
                if gradient is not None:
                    gradient[place] += next(found)
        cast = (
            None if gradient is None else gradient.to(dtype)
            for gradient, (_, dtype, _) in zip(gradients, ctx.inputs)
        )
        return *cast, None, None, None, None


def _windows(
    qkv: tuple[Tensor, Tensor, Tensor],
    bias: ScoreBias,
    scale: float | None,
    dropout_p: float,
    document_starts: Tensor | None,
    skip: bool | None,
) -> list[list[Window]]:
    """Return the keys for each block of queries, beginning with the block of the last queries.

    Args:
        qkv: Queries [queries, B, H, D], keys and values [keys, B, G, D].
        bias: Bias and causality.
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.
        document_starts: As in `attention_sdpa`.
        skip: The same.

    Returns:
        The windows of each block. Key heads with similar reaches share a window.
    """
    q, k, v = qkv
    num_queries, num_keys, groups = len(q), len(k), k.shape[2]
    starts = range(0, num_queries, QUERY_BLOCK)
    # A block gets no keys after its last query.
    ends = [num_keys - start if bias.causal else num_keys for start in starts]
    slopes = bias.slopes
    if skip is None:
        skip = num_keys >= SKIPPED_FROM and not dropout_p
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
    able = bias.causal or num_queries == num_keys
    if not (skip and able) or slopes is None or not has_values(q, slopes):
        return [[(slice(0, groups), 0, end)] for end in ends]
    both = key_windows(
        q, k, v, slopes, q.shape[3] ** -0.5 if scale is None else scale, bias.causal,
        queries=QUERY_BLOCK, tile=KEY_TILE, gradients=wanted, document_starts=document_starts,
    )  # fmt: skip
    firsts, lasts = torch.stack(both).mT.tolist()
    return [_parts(first, last) for first, last in zip(firsts, lasts)]


def _parts(firsts: list[int], lasts: list[int]) -> list[Window]:
    """Group neighboring key heads into calls where extra keys cost less than another call."""
    parts: list[Window] = []
    for group, (first, last) in enumerate(zip(firsts, lasts)):
        if parts:
            heads, first_of_part, last_of_part = parts[-1]
            start, end = min(first, first_of_part), max(last, last_of_part)
            count = group - heads.start
            apart = (last - first) + count * (last_of_part - first_of_part)
            if (count + 1) * (end - start) <= apart + KEYS_OF_A_CALL:
                parts[-1] = (slice(heads.start, group + 1), start, end)
                continue
        parts.append((slice(group, group + 1), first, last))
    return parts


def within_documents(mask_BHSS: Tensor, document_starts: Tensor | None, first: int = 0) -> Tensor:
    """Return scores, or a mask of them, that also hide the keys before each query's document.

    Args:
        mask_BHSS: The scores, or what is added to them, [1 or B, 1 or H, queries, keys].
        document_starts: Document starts of these queries, [B, queries]; None changes nothing.
        first: Position of the key in column 0.

    Returns:
        [B, 1 or H, queries, keys].
    """
    if document_starts is None:
        return mask_BHSS
    key = torch.arange(first, first + mask_BHSS.shape[3], device=mask_BHSS.device)
    return mask_BHSS.masked_fill(key < document_starts[:, None, :, None], -torch.inf)


def aligned(width: int) -> int:
    """Return the width to which heads are padded for the fused kernels of a GPU."""
    return width + -width % ALIGNMENT


def _wants_padding(q_SBHD: Tensor) -> bool:
    """Return True if heads must be padded, so that the fused kernels of a GPU serve them."""
    return q_SBHD.is_cuda and q_SBHD.shape[3] % ALIGNMENT != 0


def needs_mask(q_SBHD: Tensor, k_SBGD: Tensor, bias: ScoreBias) -> bool:
    """Return True if the call has a bias, or a causal mask that the device's kernels do not have.

    Torch's flag `is_causal` assumes that the queries are the first positions of the keys. Here they
    are the last, which differs if there are fewer queries than keys. CUDA has kernels for this case
    too, and a CPU does not.

    Args:
        q_SBHD: Queries.
        k_SBGD: Keys.
        bias: Score bias and causality.
    """
    biased = bias.slopes is not None or bias.table is not None
    fewer_queries = bias.causal and q_SBHD.shape[0] != k_SBGD.shape[0]
    return biased or (fewer_queries and not q_SBHD.is_cuda)


def refusal(call: Call) -> str | None:
    """Return the reason why torch's kernels cannot serve this call, or None if they can."""
    if call.is_cuda and call.dtype == torch.float64:
        return "no fused kernel computes in fp64 on a GPU"
    if call.bias == "none" and call.dtype == torch.bfloat16 and call.older_than(8, 0):
        return "bf16 needs a GPU of compute capability 8.0 or more"
    return None


@contextlib.contextmanager
def only_fused() -> Iterator[None]:
    """Make torch raise an error instead of using its unfused path.

    That path stores all scores and, on a CPU, rounds them to half precision. Among the fused
    kernels torch takes the first one that supports the call, in its own order
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). This sets only one of the five flags
    that torch's `sdpa_kernel` sets, in 1.6 us instead of 11.6.
    """
    enabled = torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.backends.cuda.enable_math_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_math_sdp(enabled)


def sdpa_without_bias(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    scale: float | None,
    dropout_p: float,
    causal: bool = True,
) -> Tensor:
    """Compute attention without a bias, the queries being the last positions of the keys.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        scale: Factor of the products q k^T; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped.
        causal: Apply a causal mask.

    Returns:
        The output, [queries, B, H, D].
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in _with_equal_heads(q_SBHD, k_SBGD, v_SBGD))
    mask = None
    if causal and q.shape[2] != k.shape[2]:
        # Imported here because it loads the compiler, torch._dynamo, which no other run needs.
        from torch.nn.attention.bias import causal_lower_right

        # A symbolic mask, which torch does not materialize on CUDA (torch/nn/attention/bias.py).
        mask = causal_lower_right(q.shape[2], k.shape[2])
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.permute(2, 0, 1, 3)


def _with_equal_heads(
    q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, masked: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, with key heads repeated if torch's kernel cannot share them.

    The memory-efficient kernel, which is used for masks, fp32, heads wider than 256 and GPUs below
    compute capability 8.0, does not support grouped queries (torch 2.13, sdp_utils.cpp). Nor do the
    kernels for fewer queries than keys.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D].
        v_SBGD: Values, [keys, B, G, D].
        masked: Whether the kernel gets a mask.
    """
    repeats = q_SBHD.shape[2] // k_SBGD.shape[2]
    shares = not q_SBHD.is_cuda or (
        not masked
        and q_SBHD.dtype in (torch.float16, torch.bfloat16)
        and q_SBHD.shape[3] <= 256
        and q_SBHD.shape[0] == k_SBGD.shape[0]
        and torch.cuda.get_device_capability(q_SBHD.device) >= (8, 0)
    )
    if repeats == 1 or shares:
        return q_SBHD, k_SBGD, v_SBGD
    k_SBHD, v_SBHD = (x.repeat_interleave(repeats, dim=2) for x in (k_SBGD, v_SBGD))
    return q_SBHD, k_SBHD, v_SBHD
