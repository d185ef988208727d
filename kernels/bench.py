"""Time every attention kernel that this machine has, side by side in one run.

`pretrain bench attention` calls this. On a machine that has torch and Triton but not the rest of
the framework's dependencies, run it as

    python -m pretrain.kernels.bench [--lengths 1024,16384] [--seconds 480] [--write FILE]

The contestants take turns, so that whatever else the machine does affects all alike, and the
results are medians. TFLOP/s count the work of a full causal half for every contestant: a kernel
that skips tiles shows a higher rate, not less work.
"""

# Shape suffixes: S sequence, B batch, H heads, D width of a head.

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.dispatch import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over q, k and v, all [S, B, H, D]."""
HEADS = 16
GPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
CPU_LENGTHS = (512, 1024, 2048)
CACHE_BYTES = 2**28
"""Bytes that are zeroed before every timed call, so that no contestant finds its inputs in the L2
cache (50 MB on an H100 or H200)."""
MATERIALISED_BYTES = 2**33
"""Largest bias tensor that is materialised."""
INPUTS = ("gaussian", "peaked")
PEAK = 4.0
"""Factor on queries and keys of "peaked" inputs, whose scores spread 16 times as wide. They stand
in for a trained model's: with larger scores a head looks further, and fewer tiles are skipped."""
WARM_UP_TURNS = 2
"""Turns that are not counted. The first one compiles."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

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
        """Floating-point operations of a call, for a full causal half of the scores.

        The forward pass has two matrix products, the backward pass five.
        """
        forward = 2 * 2 * HEADS * self.head_dim * self.tokens * self.length / 2
        return forward * (3.5 if self.backward else 1.0)


@dataclass(frozen=True)
class Contestant:
    """One column of the table."""

    name: str
    make: Callable[[Case, Tensor], Attend | str]
    """Returns what is timed, given the case and the slopes [H], or why it cannot serve the case."""
    missing: str | None = None
    """Why this machine does not have it, or None."""


def parse_lengths(text: str) -> list[int]:
    """Parse a comma-separated list of sequence lengths.

    Raises:
        ValueError: Something in the list is not a positive integer.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise ValueError(
            f"--lengths {text}: expected numbers of tokens, comma-separated, as in 1024,16384"
        )
    return lengths


def bench_attention(lengths: Sequence[int] | None = None, seconds: float = 480.0) -> str:
    """Run the comparison and print each row when it is done.

    Args:
        lengths: Sequence lengths; GPU_LENGTHS or CPU_LENGTHS if None.
        seconds: About how long to measure in all, without compilation.

    Returns:
        The whole table, as Markdown.
    """
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    cases = _cases(lengths or (GPU_LENGTHS if cuda else CPU_LENGTHS), cuda)
    contestants = _gpu_contestants(dtype) if cuda else _cpu_contestants(dtype)
    present = [contestant for contestant in contestants if contestant.missing is None]
    lines = [*_preamble(contestants, dtype), *_header(present)]
    print("\n".join(lines), flush=True)
    for case in cases:
        lines.append(_row(case, present, dtype, seconds / len(cases)))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def _cases(lengths: Sequence[int], cuda: bool) -> list[Case]:
    """Return the rows of the table. A CPU is given fewer tokens and Gaussian inputs only."""
    return [
        Case(length, head_dim, inputs, backward, max(length, 65_536 if cuda else 2048))
        for head_dim in (64, 128)
        for inputs in (INPUTS if cuda else INPUTS[:1])
        for length in lengths
        for backward in (False, True)
    ]


def _cpu_contestants(dtype: torch.dtype) -> list[Contestant]:
    """Return what a CPU has. The Triton kernel is listed as missing, so that the table says why."""
    no_gpu = "Triton's compiled kernel runs on a GPU"
    return [
        _backend("Triton kernel, ALiBi", "triton", missing=no_gpu),
        _backend("SDPA in blocks, ALiBi", "sdpa"),
        Contestant("SDPA, materialised ALiBi", partial(_materialised, dtype)),
        _sdpa_without_bias("SDPA, no bias", SDPBackend.FLASH_ATTENTION),
    ]


def _gpu_contestants(dtype: torch.dtype) -> list[Contestant]:
    """Return what a GPU can have."""
    triton, flash2 = _not_installed("triton"), _not_installed("flash_attn")
    return [
        _backend("Triton kernel, ALiBi", "triton", missing=triton),
        _backend("Triton kernel, ALiBi, no skipping", "triton", missing=triton, skip=False),
        _backend("Triton kernel, no bias", "triton", missing=triton, slopes=None),
        _sdpa_without_bias("SDPA flash, no bias", SDPBackend.FLASH_ATTENTION),
        _sdpa_without_bias("SDPA cuDNN, no bias", SDPBackend.CUDNN_ATTENTION),
        _backend("FlexAttention, ALiBi", "flex"),
        Contestant("SDPA, materialised ALiBi", partial(_materialised, dtype)),
        _backend("FlashAttention-2, ALiBi", "flash2", missing=flash2),
        Contestant("FlashAttention-3, no bias", _flash3, _not_installed("flash_attn_interface")),
    ]


def _backend(name: str, backend: str, missing: str | None = None, **arguments: Any) -> Contestant:
    """Return one of the framework's backends, with ALiBi unless `arguments` say otherwise.

    Args:
        name: Title of the column.
        backend: Backend of `pretrain.kernels.dispatch.attention`.
        missing: Why this machine does not have it, or None.
        **arguments: Further arguments of `attention`.
    """

    def make(case: Case, slopes: Tensor) -> Attend:
        return partial(attention, backend=backend, **({"slopes": slopes} | arguments))

    return Contestant(name, make, missing)


def _sdpa_without_bias(name: str, backend: SDPBackend) -> Contestant:
    """Return one of torch's own kernels, which have no ALiBi: what attention costs without it."""

    def attend(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q_SBHD, k_SBHD, v_SBHD, is_causal=True)

    return Contestant(name, lambda case, slopes: attend)


def _materialised(dtype: torch.dtype, case: Case, slopes: Tensor) -> Attend | str:
    """Return torch's kernel with a bias [1, H, S, S] that is made once, outside the clock."""
    if HEADS * case.length**2 * dtype.itemsize > MATERIALISED_BYTES:
        return "too large"
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


def _sdpa(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBHD, v_SBHD))
    return scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)


def _not_installed(package: str) -> str | None:
    """Return a message if the package is not installed, else None."""
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None


def _preamble(contestants: Sequence[Contestant], dtype: torch.dtype) -> list[str]:
    """Return the lines above the table: device, versions, units, and what is missing and why."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = "no GPU: the CPU's own kernels, fp32"
    triton = "no triton"
    if _not_installed("triton") is None:
        triton = f"triton {importlib.import_module('triton').__version__}"
    return [
        f"# Attention on {device}",
        f"torch {torch.__version__}, {triton}; {HEADS} heads, {dtype}, causal; milliseconds, "
        "medians, and in brackets TFLOP/s of the full causal work; "
        f'"peaked" inputs have scores {PEAK**2:.0f} times as wide as "gaussian" ones.',
        *(f"- {c.name}: absent, {c.missing}" for c in contestants if c.missing is not None),
        "",
    ]


def _header(contestants: Sequence[Contestant]) -> list[str]:
    columns = ["width", "length", "inputs", "", *(contestant.name for contestant in contestants)]
    return ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]


def _row(case: Case, contestants: Sequence[Contestant], dtype: torch.dtype, seconds: float) -> str:
    """Measure one case and return its line of the table.

    Args:
        case: What to measure.
        contestants: The columns.
        dtype: Dtype of q, k and v.
        seconds: How long to measure.
    """
    cells = [
        result
        if isinstance(result, str)
        else f"{1e3 * result:.3f} ({case.flops / result / 1e12:.3g})"
        for result in _compare(case, contestants, dtype, seconds)
    ]
    passes = "forward + backward" if case.backward else "forward"
    columns = [str(case.head_dim), str(case.length), case.inputs, passes, *cells]
    return "| " + " | ".join(columns) + " |"


def _compare(
    case: Case, contestants: Sequence[Contestant], dtype: torch.dtype, seconds: float
) -> list[float | str]:
    """Let the contestants take turns until the time is over.

    Args:
        case: What to measure.
        contestants: Who takes turns.
        dtype: Dtype of q, k and v.
        seconds: How long to measure, not counting the first turn, which compiles.

    Returns:
        For each contestant its median seconds, or a string that says why there are none.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    slopes = alibi_slopes(HEADS).to(device)
    leaves = _inputs(case, dtype, device)
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device) if cuda else None
    calls: dict[int, Attend] = {}
    failures: dict[int, str] = {}
    for number, contestant in enumerate(contestants):
        made = contestant.make(case, slopes)
        if isinstance(made, str):
            failures[number] = made
        else:
            calls[number] = made
    times: dict[int, list[float]] = {number: [] for number in calls}

    turn, deadline = 0, 0.0
    # At least three turns are counted, however slow they are.
    while time.monotonic() < deadline or turn < WARM_UP_TURNS + 3:
        for number in list(calls):
            # The failure of one contestant is a cell of the table, not the end of the others.
            try:
                taken = _time(calls[number], leaves, case.backward, flush)
            except Exception as error:
                failures[number] = type(error).__name__
                del calls[number]
                print(f"{contestants[number].name} at {case}: {error}", file=sys.stderr)
                continue
            if turn >= WARM_UP_TURNS:
                times[number].append(taken)
        turn += 1
        if turn == 1:
            deadline = time.monotonic() + seconds
    return [
        failures[number] if number in failures else statistics.median(times[number])
        for number in range(len(contestants))
    ]


def _inputs(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return q, k and v [S, B, H, D], slices of one tensor as of a fused qkv projection."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.length, case.tokens // case.length, HEADS, 3, case.head_dim)
    qkv = torch.randn(shape, generator=generator, device=device)
    if case.inputs == "peaked":
        qkv[..., :2, :] *= PEAK
    return [x.requires_grad_(case.backward) for x in qkv.to(dtype).unbind(3)]


def _time(attend: Attend, leaves: Sequence[Tensor], backward: bool, flush: Tensor | None) -> float:
    """Time one call, by the GPU's own clock where there is one.

    Args:
        attend: What to time.
        leaves: q, k and v.
        backward: Include the backward pass.
        flush: A tensor on the GPU to overwrite first, which empties the cache; None on a CPU.

    Returns:
        Seconds.
    """
    if flush is None:
        begin = time.perf_counter()
        _call(attend, leaves, backward)
        return time.perf_counter() - begin
    flush.zero_()
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
    start.record()
    _call(attend, leaves, backward)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _call(attend: Attend, leaves: Sequence[Tensor], backward: bool) -> None:
    out = attend(*leaves)
    if backward:
        torch.autograd.grad(out, leaves, out.detach())


def main() -> None:
    """Run the comparison from the command line, with nothing installed but torch and triton."""
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.kernels.bench",
        description="Time every attention kernel that this machine has, side by side.",
    )
    parser.add_argument("--lengths", help="Tokens, comma-separated; default: 512 to 65536.")
    parser.add_argument(
        "--seconds",
        type=float,
        default=480.0,
        help="About how long it may take, without compilation.",
    )
    parser.add_argument("--write", type=Path, help="Also write the table to this Markdown file.")
    arguments = parser.parse_args()
    try:
        lengths = parse_lengths(arguments.lengths) if arguments.lengths else None
    except ValueError as error:
        parser.error(str(error))
    text = bench_attention(lengths, arguments.seconds)
    if arguments.write is not None:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
