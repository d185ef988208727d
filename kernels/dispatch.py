"""The entry point: `attention` checks its arguments, chooses a backend and calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.kernels import folded, scored, sdpa
from pretrain.kernels.call import Call, ScoreBias, ScoreFunction, describe_call

# ---- The choice of an attention backend, as a function of the call's description only ----


class Choice(NamedTuple):
    """A backend and its explanation for the log."""

    backend: str
    reason: str
    """Why this backend was chosen, and in which precision it computes."""


# Cached, because it is called for each layer of each micro batch, with few different calls.
@lru_cache(maxsize=1024)
def choose_backend(call: Call) -> Choice:
    """Return the best backend for a call.

    The best backend is the fastest known kernel that computes the method exactly, because
    comparisons of methods must give each method its best kernel. If inputs are cast, the reason
    says so. FlashAttention-2, FlashAttention-4 and FlexAttention are not backends, unless a
    measurement on a GPU shows that one of them is faster (benchmarks/gpu_day/candidates.py).

    Args:
        call: Description of the call.

    Raises:
        ValueError: No kernel can serve it.
    """
    names: tuple[str, ...] = ("triton", "folded", "sdpa")
    if call.bias == "scores":
        names = ("scored",)
        reason = "the method's function of scores in torch's own operations, a block of queries "
        reason += "at a time, with products in fp32"
    elif not call.is_cuda:
        names = ("sdpa",)
        reason = "torch's kernel for CPUs, with the bias in an fp32 mask in blocks"
    elif call.bias == "none" and not call.documents:
        names = ("sdpa",)
        reason = "torch's fused kernel, since nothing is added to the scores"
    else:
        reason = f"products of {call.dtype_name} numbers are added in fp32"
    for name in names:
        refusal = _refusal(name, call)
        if refusal is None:
            if name == "sdpa" and call.is_cuda and call.bias != "none":
                reason += "; slow, with a float mask in blocks and q, k and v in fp32"
            return Choice(name, reason)
        reason += f"; {name} cannot serve, {refusal}"
    raise ValueError(f"attention in {call.dtype_name} on this GPU: {refusal}. Choose fp32 or fp16")


def _triton_refusal(call: Call) -> str | None:
    """Return the reason why the Triton kernel cannot serve a call, or None if it can."""
    if not call.has_triton:
        return "the package triton is not installed"
    if call.older_than(8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    if call.head_dim > 256:
        # Wider tiles do not fit into shared memory.
        return f"it serves heads of width 256 at most, these have {call.head_dim}"
    if call.dtype == torch.float64:
        return f"it serves bf16, fp16 and fp32, these inputs are {call.dtype}"
    if not call.is_cuda:
        # Imported here because triton may not be installed.
        from pretrain.kernels.flash.device import INTERPRETED

        if not INTERPRETED:
            return "it needs a GPU (or Triton's interpreter)"
    return None


# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.


REFUSALS: dict[str, Callable[[Call], str | None]] = {
    "triton": _triton_refusal,
    "folded": folded.refusal,
    "sdpa": sdpa.refusal,
    "scored": scored.refusal,
}
"""Backend -> function that returns why it cannot serve a call, or None if it can."""


def _refusal(name: str, call: Call) -> str | None:
    if call.bias == "scores" and name != "scored":
        return "the positions are a function of the scores, which scored alone computes"
    return REFUSALS[name](call)


def attention(
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
    backend: str = "auto",
    skip: bool | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T + bias) v.

    The queries are the last positions of the keys. The bias of head h for query position i and key
    position j is -slopes[h] * |i - j| (ALiBi), or relative_attention_bias[h, bucket(i - j)] (T5),
    or nothing. It stays in fp32 and may need gradients. With `scores`, the softmax is applied to
    scores(scale * q k^T).

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        slopes: ALiBi slopes of this rank's heads, [H], fp32.
        relative_attention_bias: T5's table for this rank's heads, [H, num_buckets].
        relative_attention_max_distance: Distance at which the last bucket of the table begins.
        scores: The function of any other method, for this rank's heads.
        causal: Apply a causal mask.
        document_starts: For each query, the position of the first token of its document, int32 [B,
            queries]: the query at position i sees the keys from there to i. Needs a causal mask.
            The values are not checked: each must be at most i, and they must not decrease from one
            query to the next. None: queries see every key up to their own position.
        scale: Factor on the products q k^T, not on the bias; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped, with torch's default generator of the
            device.
        backend: "triton", "folded", "sdpa" or "scored", which is used or raises an error; or
            "auto", which chooses one (`choose_backend`) and logs the reason once per process.
        skip: For "triton" and "sdpa": leave out keys too far away to matter
            (`pretrain.kernels.flash`). True: at any length; False: never; None: where it is faster.

    Returns:
        The output, [queries, B, H, D] in the dtype of q.

    Raises:
        ValueError: The arguments do not fit each other, or the named backend does not exist or
            cannot serve them.
    """
    _check_arguments(q_SBHD, k_SBGD, v_SBGD, slopes, relative_attention_bias, causal, dropout_p)
    if (slopes is not None) + (relative_attention_bias is not None) + (scores is not None) > 1:
        raise ValueError("slopes, relative_attention_bias, scores: a model has one of them")
    if document_starts is not None:
        _check_documents(q_SBHD, document_starts, causal)
    bias = ScoreBias(
        slopes, relative_attention_bias, relative_attention_max_distance, causal, scores
    )
    call = describe_call(q_SBHD, k_SBGD, bias, dropout_p, document_starts is not None)
    if backend == "auto":
        backend, reason = choose_backend(call)
        _log_once(f"attention through {backend}: {reason}")
    elif backend not in REFUSALS:
        raise ValueError(f"attention backend {backend!r}: there are auto, {', '.join(REFUSALS)}")
    elif (refusal := _refusal(backend, call)) is not None:
        raise ValueError(f"attention backend {backend} cannot serve: {refusal}. Choose auto")
    arguments = (q_SBHD, k_SBGD, v_SBGD, bias, scale, dropout_p)
    autocasts = not q_SBHD.is_meta and torch.is_autocast_enabled(q_SBHD.device.type)
    # Autocast would round the bias with the mask, and give the output another dtype than q has.
    with torch.autocast(q_SBHD.device.type, enabled=False) if autocasts else nullcontext():
        if backend == "triton":
            # Imported here because triton may not be installed.
            from pretrain.kernels.flash.launch import attention_triton

            return attention_triton(*arguments, skip, document_starts=document_starts)
        if backend == "folded":
            return folded.attention_folded(*arguments)
        if backend == "scored":
            return scored.attention_scored(*arguments, document_starts)
        return sdpa.attention_sdpa(*arguments, document_starts, skip)


@cache
def _log_once(message: str) -> None:
    """Log a message the first time it occurs in this process."""
    logging.getLogger("pretrain.kernels").info(message)


def _check_arguments(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    slopes: Tensor | None,
    table: Tensor | None,
    causal: bool,
    dropout_p: float,
) -> None:
    """Raise ValueError if the arguments of `attention` do not fit each other."""
    q, k, v = tuple(q_SBHD.shape), tuple(k_SBGD.shape), tuple(v_SBGD.shape)
    if (
        not len(q) == len(k) == 4
        or k != v
        or (q[1], q[3]) != (k[1], k[3])
        or 0 in q
        or 0 in k
        or q[2] % k[2]
        or not q_SBHD.dtype == k_SBGD.dtype == v_SBGD.dtype
        or not q_SBHD.device == k_SBGD.device == v_SBGD.device
    ):
        kinds = {(x.dtype, x.device) for x in (q_SBHD, k_SBGD, v_SBGD)}
        raise ValueError(
            f"q {q}, k {k}, v {v} of {kinds}: expected [S, B, H, D] of one dtype on one device, "
            "none empty, k and v alike, B and D those of q, query heads a multiple of key heads"
        )
    if causal and q[0] > k[0]:
        raise ValueError(
            f"{q[0]} queries on {k[0]} keys under a causal mask: the first queries would see no key"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p = {dropout_p}: expected 0 <= dropout_p < 1")
    if slopes is not None and (slopes.shape != (q[2],) or slopes.dtype != torch.float32):
        raise ValueError(
            f"slopes {tuple(slopes.shape)} {slopes.dtype}: expected fp32, one for each of "
            f"the {q[2]} heads"
        )
    if table is not None and (table.dim() != 2 or table.shape[0] != q[2]):
        raise ValueError(
            f"relative_attention_bias {tuple(table.shape)}: expected [{q[2]} heads, num_buckets]"
        )


def _check_documents(q_SBHD: Tensor, document_starts: Tensor, causal: bool) -> None:
    """Raise ValueError if document_starts does not fit the other arguments of `attention`."""
    queries, batch = q_SBHD.shape[:2]
    if not causal:
        raise ValueError("document_starts with causal = False: it needs a causal mask")
    kind = (tuple(document_starts.shape), document_starts.dtype, document_starts.device)
    if kind != ((batch, queries), torch.int32, q_SBHD.device):
        raise ValueError(
            f"document_starts {kind[0]} {kind[1]} on {kind[2]}: expected ({batch}, {queries}) "
            f"torch.int32 on {q_SBHD.device}"
        )
