"""Who serves which attention: the one entrance, `attention`, and the one place that chooses."""

# Shape suffixes: S sequence (query or key), B batch, H heads, D width of a head.

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
    k_SBHD: Tensor,
    v_SBHD: Tensor,
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
    """softmax(scale * q k^T + bias) v, [S, B, H, D] in q's dtype.

    q [queries, B, H, D], k and v [keys, B, G, D] with G dividing H; the queries are the last positions of the keys.
    The bias is -slopes[h] * |i - j| for `slopes` [H] (ALiBi), or relative_attention_bias[h, bucket(i - j)] for a table
    [H, num_buckets] (T5); both belong to this rank's heads, stay fp32, and may need gradients. `scale` is 1 / sqrt(D)
    if left out and does not touch the bias. `dropout_p` > 0 draws from torch's default generator of the device.
    `backend` "auto" chooses, and says in the log "kernels" what and why, once a process; a named one serves or refuses.
    `skip` is for the Triton kernel: whether it leaves out tiles of keys too far back to matter (`pretrain.kernels.skipping`);
    None where that pays.
    Raises ValueError on shapes that do not fit, and when the named backend cannot serve, saying why.
    """
    _check(q_SBHD, k_SBHD, v_SBHD, slopes, relative_attention_bias, causal, dropout_p)
    bias = ScoreBias(slopes, relative_attention_bias, relative_attention_max_distance, causal)
    if backend == "auto":
        backend, reason = _choose(q_SBHD, k_SBHD, bias, dropout_p)
        _say_once(f"attention through {backend}: {reason}")
    if backend == "triton":
        if (refusal := _triton_refusal(q_SBHD)) is not None:
            raise ValueError(
                f"attention backend triton cannot serve: {refusal}. Choose auto or sdpa"
            )
        from pretrain.kernels.flash.host import (
            attention_triton,  # not before it is wanted: triton may not be installed
        )

        return attention_triton(q_SBHD, k_SBHD, v_SBHD, bias, scale, dropout_p, skip)
    if backend == "flash2":
        if (refusal := flash2_refusal(q_SBHD, bias)) is not None:
            raise ValueError(
                f"attention backend flash2 cannot serve: {refusal}. Choose auto or sdpa"
            )
        return attention_flash2(q_SBHD, k_SBHD, v_SBHD, bias, scale, dropout_p)
    if backend == "sdpa":
        return attention_sdpa(q_SBHD, k_SBHD, v_SBHD, bias, scale, dropout_p)
    if backend == "flex":
        if (refusal := flex_refusal(q_SBHD, dropout_p)) is not None:
            raise ValueError(f"attention backend flex cannot serve: {refusal}. Choose auto or sdpa")
        return attention_flex(q_SBHD, k_SBHD, v_SBHD, bias, scale)
    if backend == "reference":
        return attention_reference(
            q_SBHD, k_SBHD, v_SBHD, slopes=slopes, relative_attention_bias=relative_attention_bias,
            relative_attention_max_distance=relative_attention_max_distance, causal=causal, scale=scale,
            dropout_p=dropout_p,
        ).to(q_SBHD.dtype)  # fmt: skip
    raise ValueError(
        f"attention backend {backend!r}: there are auto, triton, flash2, flex, sdpa and reference"
    )


def _choose(q_SBHD: Tensor, k_SBHD: Tensor, bias: ScoreBias, dropout_p: float) -> tuple[str, str]:
    """(backend, why), first that serves."""
    if q_SBHD.is_cuda and _triton_refusal(q_SBHD) is None:
        return (
            "triton",
            "it makes the bias inside the kernel, and one kernel for every method compares methods",
        )
    if flash2_refusal(q_SBHD, bias) is None:
        return "flash2", "it adds ALiBi inside its kernel"
    if not needs_mask(q_SBHD, k_SBHD, bias):
        return "sdpa", "nothing is added to the scores, so torch's fused kernel needs no mask"
    refusal = flex_refusal(q_SBHD, dropout_p)
    if refusal is None:
        return "flex", "it adds the bias inside the kernel and skips masked tiles"
    return "sdpa", f"with a float mask; flex cannot serve, {refusal}"


def _triton_refusal(q_SBHD: Tensor) -> str | None:
    """Why the Triton kernel cannot serve this, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    from pretrain.kernels.flash.host import refusal

    return refusal(q_SBHD)


@cache
def _say_once(message: str) -> None:
    logging.getLogger("kernels").info(message)


def _check(
    q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, slopes: Tensor | None, table: Tensor | None,
    causal: bool, dropout_p: float,
) -> None:  # fmt: skip
    q, k, v = (tuple(x.shape) for x in (q_SBHD, k_SBHD, v_SBHD))
    if (
        len(q) != 4
        or len(k) != 4
        or k != v
        or (q[1], q[3]) != (k[1], k[3])
        or q_SBHD.numel() * k_SBHD.numel() == 0
    ):
        raise ValueError(
            f"q {q}, k {k}, v {v}: want [S, B, H, D], none empty, k and v alike, B and D those of q"
        )
    kinds = [(x.dtype, x.device) for x in (q_SBHD, k_SBHD, v_SBHD)]
    if kinds[0] != kinds[1] or kinds[0] != kinds[2]:
        raise ValueError(
            "q, k and v are " + ", ".join(f"{x} on {y}" for x, y in kinds) + ": want them alike"
        )
    if q[2] % k[2]:
        raise ValueError(f"{q[2]} query heads on {k[2]} key heads: want a multiple")
    if causal and q[0] > k[0]:
        raise ValueError(
            f"{q[0]} queries on {k[0]} keys under a causal mask: the first queries would see no key"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p = {dropout_p}: want 0 <= dropout_p < 1")
    if slopes is not None and table is not None:
        raise ValueError("both slopes and relative_attention_bias: a model has one or the other")
    if slopes is not None and (tuple(slopes.shape) != (q[2],) or slopes.dtype != torch.float32):
        raise ValueError(
            f"slopes {tuple(slopes.shape)} {slopes.dtype}: want fp32, one for each of the {q[2]} heads"
        )
    if table is not None and (table.dim() != 2 or table.shape[0] != q[2]):
        raise ValueError(
            f"relative_attention_bias {tuple(table.shape)}: want [{q[2]} heads, num_buckets]"
        )
