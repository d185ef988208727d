"""The attention kernels that `pretrain.kernels.bench` times, and the cases it times them in."""

# Shape suffixes: S sequence, B batch, H heads, D width of a head.

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pretrain.kernels import flash4, skipping
from pretrain.kernels.bias import ScoreBias
from pretrain.kernels.dispatch import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over q, k and v, all [S, B, H, D]."""
HEADS = 16
MATERIALISED_BYTES = 2**33
"""Largest bias tensor that is materialised."""
INPUTS = ("gaussian", "peaked")
PEAK = 4.0
"""Factor on queries and keys of "peaked" inputs, whose scores spread 16 times as wide. They stand
in for a trained model's: with larger scores a head looks further, and fewer tiles are skipped."""


@dataclass(frozen=True)
class Case:
    """The attention call that all contestants make in turn."""

    length: int
    head_dim: int
    inputs: str
    """One of INPUTS."""
    backward: bool
    """Time forward and backward, not forward alone."""
    tokens: int
    """Tokens in a call: batch x length."""

    @property
    def flops(self) -> float:
        """Return the floating-point operations of a call, for a full causal half of the scores.

        The forward pass has two matrix products, the backward pass five.
        """
        forward = 2 * 2 * HEADS * self.head_dim * self.tokens * self.length / 2
        return forward * (3.5 if self.backward else 1.0)


@dataclass(frozen=True)
class Contestant:
    """A kernel with one way to use it."""

    name: str
    make: Callable[[Case, Tensor], Attend | str]
    """Returns what is timed, given the case and the slopes [H], or why it cannot serve the case."""
    missing: str | None = None
    """Why this machine does not have it, or None."""
    has_bias: bool = True
    """It computes ALiBi. The best of those that do not is what ALiBi is compared with."""
    visited: Callable[[Sequence[Tensor], Tensor], float] | None = None
    """Returns the share of the causal tiles that it visits, given q, k, v and slopes. Where it is
    None, speed does not depend on what q and k hold, and "peaked" inputs are not timed."""


def cpu_contestants(dtype: torch.dtype) -> list[Contestant]:
    """Return what a CPU has, and the Triton kernel as missing, so that the report says why."""
    no_gpu = "Triton's compiled kernel runs on a GPU"
    return [
        _backend("Triton, ALiBi", "triton", missing=no_gpu),
        _backend("SDPA in blocks, ALiBi", "sdpa"),
        _backend("folded, ALiBi", "folded", missing="it serves fp16 and bf16, this is fp32"),
        Contestant("SDPA, materialised ALiBi", partial(_materialised, dtype)),
        _sdpa_without_bias("SDPA flash, no bias", SDPBackend.FLASH_ATTENTION),
    ]


def gpu_contestants(dtype: torch.dtype) -> list[Contestant]:
    """Return what a GPU can have. Those that cannot serve a case say why in its rows."""
    triton = not_installed("triton")
    return [
        _backend("Triton, ALiBi", "triton", missing=triton, visited=_visited_by_triton),
        _backend("Triton, ALiBi, no skipping", "triton", missing=triton, skip=False),
        Contestant("Triton, zero slopes", _zero_slopes, triton),
        _backend("Triton, no bias", "triton", missing=triton, has_bias=False, slopes=None),
        _backend("folded, ALiBi", "folded"),
        _backend("FlexAttention, ALiBi", "flex"),
        _backend("FlashAttention-4, ALiBi", "flash4", visited=_visited_by_flash4),
        _backend("FlashAttention-4, ALiBi, no skipping", "flash4", skip=False),
        _backend("FlashAttention-2, ALiBi", "flash2"),
        _backend("SDPA in blocks, ALiBi", "sdpa"),
        Contestant("SDPA, materialised ALiBi", partial(_materialised, dtype)),
        _sdpa_without_bias("SDPA flash, no bias", SDPBackend.FLASH_ATTENTION),
        _sdpa_without_bias("SDPA cuDNN, no bias", SDPBackend.CUDNN_ATTENTION),
        _sdpa_without_bias("SDPA memory-efficient, no bias", SDPBackend.EFFICIENT_ATTENTION),
        _backend("SDPA as auto takes it, no bias", "auto", has_bias=False, slopes=None),
        Contestant(
            "FlashAttention-3, no bias",
            _flash3,
            not_installed("flash_attn_interface"),
            has_bias=False,
        ),
    ]


def _backend(
    name: str,
    backend: str,
    missing: str | None = None,
    has_bias: bool = True,
    visited: Callable[[Sequence[Tensor], Tensor], float] | None = None,
    **arguments: Any,
) -> Contestant:
    """Return one of the framework's backends, with ALiBi unless `arguments` say otherwise.

    Args:
        name: Name in the report.
        backend: Backend of `pretrain.kernels.dispatch.attention`.
        missing: Why this machine does not have it, or None.
        has_bias: It computes ALiBi.
        visited: Share of the causal tiles that it visits.
        **arguments: Further arguments of `attention`.
    """

    def make(case: Case, slopes: Tensor) -> Attend:
        return partial(attention, backend=backend, **({"slopes": slopes} | arguments))

    return Contestant(name, make, missing, has_bias, visited)


def _zero_slopes(case: Case, slopes: Tensor) -> Attend:
    """Return the Triton kernel with slopes of zero: the cost of ALiBi's arithmetic alone."""
    return partial(attention, backend="triton", slopes=torch.zeros_like(slopes))


def _sdpa_without_bias(name: str, backend: SDPBackend) -> Contestant:
    """Return one of torch's own kernels, which have no ALiBi: what attention costs without it."""

    def attend(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q_SBHD, k_SBHD, v_SBHD, is_causal=True)

    return Contestant(name, lambda case, slopes: attend, has_bias=False)


def _materialised(dtype: torch.dtype, case: Case, slopes: Tensor) -> Attend | str:
    """Return torch's kernel with a bias [1, H, S, S] that is made once, outside the clock."""
    if HEADS * case.length**2 * dtype.itemsize > MATERIALISED_BYTES:
        return "the bias is too large"
    position = torch.arange(case.length, device=slopes.device)
    distance = position[:, None] - position
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).to(dtype)[None]
    return partial(_sdpa, attn_mask=bias)


def _flash3(case: Case, slopes: Tensor) -> Attend:
    """Return FlashAttention-3, which has no bias."""
    attend = importlib.import_module("flash_attn_interface").flash_attn_func

    def call(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        out = attend(*(x.transpose(0, 1) for x in (q_SBHD, k_SBHD, v_SBHD)), causal=True)
        # Some versions return (out, logsumexp), others out alone.
        out_BSHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_BSHD.transpose(0, 1)

    return call


def _visited_by_triton(qkv: Sequence[Tensor], slopes: Tensor) -> float:
    """Return the share of the causal tiles that the Triton kernel's forward pass visits."""
    from pretrain.kernels.flash.host import visited_tiles

    q, k, v = qkv
    runs, schedule = visited_tiles(q, k, v, slopes)
    tiles = (schedule.forward.queries, schedule.key_tile)
    shares = skipping.share_visited(runs, len(q), len(k), *tiles, causal=True)
    return float(shares.mean())


def _visited_by_flash4(qkv: Sequence[Tensor], slopes: Tensor) -> float:
    """Return the share of the causal tiles in the lists that FlashAttention-4 is given."""
    q, k, v = qkv
    bias = ScoreBias(slopes, None, 128, True)
    counts = []
    for skip in (None, False):
        mask = flash4.block_mask(q, k, v, bias, None, skip)
        assert mask.full_kv_num_blocks is not None  # our lists always have both kinds
        counts.append((mask.kv_num_blocks + mask.full_kv_num_blocks).double().mean())
    return float(counts[0] / counts[1])


def _sdpa(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
    return scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)


def not_installed(package: str) -> str | None:
    """Return a message if the package is not installed, else None."""
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None
