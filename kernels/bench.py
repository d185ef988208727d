"""`pretrain bench attention`: every way to attend that this machine has, side by side in one run.

The ways take turns, so that whatever else the machine does meets them all; the numbers are medians. TFLOP/s count the
whole causal half for everybody, so a kernel that skips work shows a higher rate, not less work.
"""

# Shape suffixes: S sequence, B batch, H heads, D width of a head.

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.dispatch import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS = 16
GPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
CPU_LENGTHS = (512, 1024, 2048)
CACHE_BYTES = 2**28
"""Zeroed before every timed call, so that no way finds its inputs in the cache (an H200's L2 holds 50 MB)."""
MATERIALISED_BYTES = 2**33
"""Largest bias tensor that is made."""
INPUTS = ("gaussian", "peaked")
PEAK = 4.0
"""Peaked: queries and keys this much larger than Gaussian ones, whose scores then spread 16 times as wide. It takes the
place of a trained model's, which look further: a tile is skipped later when scores are large."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    length: int
    head_dim: int
    inputs: str
    backward: bool
    tokens: int
    """Tokens a call: batch x length."""

    @property
    def flops(self) -> float:
        """Two products over the causal half of the scores; the backward pass takes 2.5 times as many (five products)."""
        forward = 2 * 2 * HEADS * self.head_dim * self.tokens * self.length / 2
        return forward * (3.5 if self.backward else 1.0)


def bench_attention(lengths: Sequence[int] | None = None, seconds: float = 480.0) -> str:
    """Runs the comparison in about `seconds`, prints each row as it is known, and returns the whole as Markdown."""
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "no GPU: the CPU's own ways, fp32"
    lengths = lengths or (GPU_LENGTHS if cuda else CPU_LENGTHS)
    cases = [
        Case(length, width, inputs, backward, max(length, 65_536 if cuda else 2048))
        for width in (64, 128) for inputs in (INPUTS if cuda else INPUTS[:1]) for length in lengths
        for backward in (False, True)
    ]  # fmt: skip
    dtype = torch.bfloat16 if cuda else torch.float32
    ways = [way for way in _ways(cuda, dtype) if way.missing is None]
    lines = [
        f"# Attention on {name}",
        f"torch {torch.__version__}, {_version('triton')}; {HEADS} heads, {dtype}, causal; milliseconds, medians, and in brackets "
        f"TFLOP/s of the full causal work; \"peaked\" inputs have scores {PEAK**2:.0f} times as wide as \"gaussian\" ones.",
        *(f"- {way.name}: absent, {way.missing}" for way in _ways(cuda, dtype) if way.missing is not None),
        "",
        *_header(ways),
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    for case in cases:
        lines.append(_row(case, ways, dtype, seconds / len(cases)))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Way:
    """A contestant: `make(case, slopes)` gives what is timed, or says in a string why this case is not for it."""

    name: str
    make: Callable[[Case, Tensor], Attend | str]
    missing: str | None = None


def _ways(cuda: bool, dtype: torch.dtype) -> list[Way]:
    ours = [_ours(name, cuda, **more) for name, more in
            (("ours", {}), ("ours, no skipping", {"skip": False}))]  # fmt: skip
    if not cuda:
        return [*ours, _fallback(), Way("SDPA, bias made beforehand", partial(_materialised, dtype)), _plain("SDPA, no bias", SDPBackend.FLASH_ATTENTION)]  # fmt: skip
    return [
        *ours,
        Way("ours, zero slopes", lambda case, slopes: partial(attention, backend="triton"), _no_triton(cuda)),
        _plain("SDPA flash, no bias", SDPBackend.FLASH_ATTENTION),
        _plain("SDPA cuDNN, no bias", SDPBackend.CUDNN_ATTENTION),
        Way("FlexAttention, ALiBi", lambda case, slopes: partial(attention, slopes=slopes, backend="flex")),
        Way("SDPA, bias made beforehand", partial(_materialised, dtype)),
        Way("FlashAttention-2, ALiBi", lambda case, slopes: partial(attention, slopes=slopes, backend="flash2"), _absent("flash_attn")),
        Way("FlashAttention-3, no bias", _flash3, _absent("flash_attn_interface")),
    ]  # fmt: skip


def _ours(name: str, cuda: bool, **more: Any) -> Way:
    return Way(
        name,
        lambda case, slopes: partial(attention, slopes=slopes, backend="triton", **more),
        _no_triton(cuda),
    )


def _fallback() -> Way:
    return Way(
        "SDPA with our mask", lambda case, slopes: partial(attention, slopes=slopes, backend="sdpa")
    )


def _plain(name: str, backend: SDPBackend) -> Way:
    def attend(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q_SBHD, k_SBHD, v_SBHD, is_causal=True)

    return Way(name, lambda case, slopes: attend)


def _materialised(dtype: torch.dtype, case: Case, slopes: Tensor) -> Attend | str:
    if HEADS * case.length**2 * dtype.itemsize > MATERIALISED_BYTES:
        return "too large"
    position = torch.arange(case.length, device=slopes.device)
    distance = position[:, None] - position
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf).to(dtype)[None]
    return partial(_sdpa, attn_mask=bias)


def _flash3(case: Case, slopes: Tensor) -> Attend:
    attend = importlib.import_module("flash_attn_interface").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(*(x.transpose(0, 1) for x in (q, k, v)), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)

    return call


def _sdpa(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
    return scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)


def _no_triton(cuda: bool) -> str | None:
    return _absent("triton") if cuda else "Triton's compiled kernel runs on a GPU"


def _absent(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"the package {package} is not installed"


def _version(package: str) -> str:
    return f"{package} {importlib.import_module(package).__version__}" if importlib.util.find_spec(package) else f"no {package}"  # fmt: skip


def _header(ways: Sequence[Way]) -> list[str]:
    columns = ["width", "length", "inputs", "", *(way.name for way in ways)]
    return ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]


def _row(case: Case, ways: Sequence[Way], dtype: torch.dtype, seconds: float) -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = _compare(case, ways, dtype, device, seconds)
    cells = [
        t if isinstance(t, str) else f"{1e3 * t:.3f} ({case.flops / t / 1e12:.3g})" for t in times
    ]
    what = "forward + backward" if case.backward else "forward"
    return (
        "| " + " | ".join([str(case.head_dim), str(case.length), case.inputs, what, *cells]) + " |"
    )


def _compare(
    case: Case, ways: Sequence[Way], dtype: torch.dtype, device: torch.device, seconds: float
) -> list[float | str]:
    """Median seconds of each way, or why there are none; they take turns until `seconds` are over."""
    slopes = alibi_slopes(HEADS).to(device)
    generator = torch.Generator(device).manual_seed(0)
    # q and k as slices of one tensor, as a fused qkv projection leaves them.
    shape = (case.length, case.tokens // case.length, HEADS, 3, case.head_dim)
    qkv = torch.randn(shape, generator=generator, device=device)
    if case.inputs == "peaked":
        qkv[..., :2, :] *= PEAK
    leaves = [x.requires_grad_(case.backward) for x in qkv.to(dtype).unbind(3)]
    calls = [way.make(case, slopes) for way in ways]
    results: list[list[float] | str] = [call if isinstance(call, str) else [] for call in calls]
    flush = (
        torch.empty(CACHE_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    )
    # The first turn compiles, which may take a minute once, and is not counted, neither is the second.
    turn, deadline = 0, time.monotonic() + 3600
    while time.monotonic() < deadline or turn < 5:
        for number, call in enumerate(calls):
            if isinstance(results[number], str):
                continue
            try:
                taken = _time(call, leaves, case.backward, flush)  # type: ignore[arg-type]
            except (
                Exception
            ) as error:  # one way's failure is a cell of the table, not the end of the others
                results[number] = type(error).__name__
                print(f"{ways[number].name} at {case}: {error}", file=sys.stderr)
                continue
            if turn > 1:
                results[number].append(taken)  # type: ignore[union-attr]
        turn += 1
        if turn == 1:
            deadline = time.monotonic() + seconds
    return [r if isinstance(r, str) else statistics.median(r) for r in results]


def _time(attend: Attend, leaves: Sequence[Tensor], backward: bool, flush: Tensor | None) -> float:
    """Seconds of one call, on the device's own clock where it has one."""
    if flush is None:
        begin = time.perf_counter()
        _call(attend, leaves, backward)
        return time.perf_counter() - begin
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    _call(attend, leaves, backward)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _call(attend: Attend, leaves: Sequence[Tensor], backward: bool) -> None:
    out = attend(*leaves)
    if backward:
        torch.autograd.grad(out, leaves, out.detach())
