"""The entrance to attention: `attention` checks its arguments, chooses a backend and calls it."""

# Shape suffixes: S sequence (query or key), B batch, H query heads, G key heads, D width of a head.

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch
from torch import Tensor

from pretrain.kernels.bias import ScoreBias
from pretrain.kernels.flash2 import attention_flash2
from pretrain.kernels.flash2 import refusal as flash2_refusal
from pretrain.kernels.flex import attention_flex
from pretrain.kernels.flex import refusal as flex_refusal
from pretrain.kernels.reference import attention_reference
from pretrain.kernels.sdpa import attention_sdpa, needs_mask


def attention(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    slopes: Tensor | None = None,
    relative_attention_bias: Tensor | None = None,
    relative_attention_max_distance: int = 128,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    skip: bool | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T + bias) v.

    The queries are the last positions of the keys. The bias of head h for query position i and key
    position j is -slopes[h] * |i - j| (ALiBi), or relative_attention_bias[h, bucket(i - j)] (T5),
    or nothing. It stays in fp32 and may need gradients.

    Args:
        q_SBHD: Queries, [queries, B, H, D].
        k_SBGD: Keys, [keys, B, G, D], where G divides H.
        v_SBGD: Values, [keys, B, G, D].
        slopes: ALiBi slopes of this rank's heads, [H], fp32.
        relative_attention_bias: T5's table for this rank's heads, [H, num_buckets].
        relative_attention_max_distance: Distance at which the last bucket of the table begins.
        causal: Apply a causal mask.
        scale: Factor of the products q k^T, not of the bias; 1 / sqrt(D) if None.
        dropout_p: Probability that a weight is dropped, from torch's default generator of the
            device.
        backend: "triton", "flash2", "flex", "sdpa" or "reference", which then serves or fails; or
            "auto", which chooses one and logs the choice and its reason once per process.
        skip: For the Triton kernel only: skip tiles of keys too far away to matter
            (`pretrain.kernels.skipping`). True at any length, False never, None where it pays.

    Returns:
        The output, [queries, B, H, D] in the dtype of q.

    Raises:
        ValueError: The arguments do not fit each other, or the named backend does not exist or
            cannot serve them.
    """
    _check_arguments(q_SBHD, k_SBGD, v_SBGD, slopes, relative_attention_bias, causal, dropout_p)
    bias = ScoreBias(slopes, relative_attention_bias, relative_attention_max_distance, causal)
    if backend == "auto":
        backend, reason = _choose(q_SBHD, k_SBGD, bias, dropout_p)
        _log_once(f"attention through {backend}: {reason}")
    if backend == "triton":
        _raise_refusal(backend, _triton_refusal(q_SBHD))
        # Imported here because triton may not be installed.
        from pretrain.kernels.flash.host import attention_triton

        return attention_triton(q_SBHD, k_SBGD, v_SBGD, bias, scale, dropout_p, skip)
    if backend == "flash2":
        _raise_refusal(backend, flash2_refusal(q_SBHD, bias))
        return attention_flash2(q_SBHD, k_SBGD, v_SBGD, bias, scale, dropout_p)
    if backend == "sdpa":
        return attention_sdpa(q_SBHD, k_SBGD, v_SBGD, bias, scale, dropout_p)
    if backend == "flex":
        _raise_refusal(backend, flex_refusal(q_SBHD, dropout_p))
        return attention_flex(q_SBHD, k_SBGD, v_SBGD, bias, scale)
    if backend == "reference":
        return attention_reference(
            q_SBHD,
            k_SBGD,
            v_SBGD,
            slopes=slopes,
            relative_attention_bias=relative_attention_bias,
            relative_attention_max_distance=relative_attention_max_distance,
            causal=causal,
            scale=scale,
            dropout_p=dropout_p,
        ).to(q_SBHD.dtype)
    raise ValueError(
        f"attention backend {backend!r}: there are auto, triton, flash2, flex, sdpa and reference"
    )


def _choose(q_SBHD: Tensor, k_SBGD: Tensor, bias: ScoreBias, dropout_p: float) -> tuple[str, str]:
    """Return the first backend, in order of preference, that can serve the call, and the reason.

    Args:
        q_SBHD: Queries.
        k_SBGD: Keys.
        bias: Score bias and causality.
        dropout_p: Probability that a weight is dropped.

    Returns:
        The name of the backend, and a sentence for the log.
    """
    # Triton's interpreter serves CPU tensors, too, but is for tests only and never chosen.
    if q_SBHD.is_cuda and _triton_refusal(q_SBHD) is None:
        return (
            "triton",
            "it makes the bias inside the kernel, and one kernel for every method compares methods",
        )
    if flash2_refusal(q_SBHD, bias) is None:
        return "flash2", "it adds ALiBi inside its kernel"
    if not needs_mask(q_SBHD, k_SBGD, bias):
        return "sdpa", "nothing is added to the scores, so torch's fused kernel needs no mask"
    refusal = flex_refusal(q_SBHD, dropout_p)
    if refusal is None:
        return "flex", "it adds the bias inside the kernel and skips masked tiles"
    return "sdpa", f"with a float mask; flex cannot serve, {refusal}"


def _triton_refusal(q_SBHD: Tensor) -> str | None:
    """Return the reason why the Triton kernel cannot serve these queries, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    from pretrain.kernels.flash.host import refusal

    return refusal(q_SBHD)


def _raise_refusal(backend: str, refusal: str | None) -> None:
    """Raise ValueError if a backend that was asked for by name gave a reason to refuse."""
    if refusal is not None:
        raise ValueError(
            f"attention backend {backend} cannot serve: {refusal}. Choose auto or sdpa"
        )


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
    q, k, v = (tuple(x.shape) for x in (q_SBHD, k_SBGD, v_SBGD))
    four_dimensions = len(q) == len(k) == 4
    if (
        not four_dimensions
        or k != v
        or (q[1], q[3]) != (k[1], k[3])
        or q_SBHD.numel() * k_SBGD.numel() == 0
    ):
        raise ValueError(
            f"q {q}, k {k}, v {v}: expected [S, B, H, D], none empty, k and v alike, "
            "B and D those of q"
        )
    kinds = [(x.dtype, x.device) for x in (q_SBHD, k_SBGD, v_SBGD)]
    if kinds[0] != kinds[1] or kinds[0] != kinds[2]:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in kinds)
        raise ValueError(f"q, k and v are {found}: they must have one dtype and one device")
    if q[2] % k[2]:
        raise ValueError(
            f"{q[2]} query heads on {k[2]} key heads: query heads must be a multiple of key heads"
        )
    if causal and q[0] > k[0]:
        raise ValueError(
            f"{q[0]} queries on {k[0]} keys under a causal mask: the first queries would see no key"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p = {dropout_p}: expected 0 <= dropout_p < 1")
    if slopes is not None and table is not None:
        raise ValueError("both slopes and relative_attention_bias: a model has one or the other")
    if slopes is not None and (tuple(slopes.shape) != (q[2],) or slopes.dtype != torch.float32):
        raise ValueError(
            f"slopes {tuple(slopes.shape)} {slopes.dtype}: expected fp32, one for each of "
            f"the {q[2]} heads"
        )
    if table is not None and (table.dim() != 2 or table.shape[0] != q[2]):
        raise ValueError(
            f"relative_attention_bias {tuple(table.shape)}: expected [{q[2]} heads, num_buckets]"
        )
