"""Time every attention kernel that this machine has, and the candidates beside them, in turns.

    python -m benchmarks.gpu_day.attention_speed --out RESULTS

Cases come in the order of their importance. TFLOP/s count the work of a full causal half for every
kernel: one that skips tiles shows a higher rate, not less work. "peaked" queries and keys are four
times as large. They stand in for a trained model's: with larger scores a head looks further, and
fewer tiles are skipped; only kernels that skip are timed with them.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_day.candidates import attend_by
from benchmarks.gpu_day.results import Rows
from benchmarks.gpu_day.sizes import CUDA
from benchmarks.turns import Way, rounds, summary
from pretrain.kernels.call import ScoreBias
from pretrain.kernels.dispatch import attention
from pretrain.kernels.flash.launch import Blocks, attention_triton, choose_schedule
from pretrain.positions.alibi import alibi_slopes

PART = "attention-speed"
HEADS = 16
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
TOKENS = 65_536 if CUDA else 2048
"""In a call: batch x length, at least one sequence."""
LENGTHS = (1024, 16_384, 4096, 2048, 8192, 512, 32_768, 65_536) if CUDA else (512,)
CALLS = 50
"""Turns of each kernel in a case, unless SECONDS pass before."""
SECONDS = 20.0
CACHE_BYTES = 2**28
"""Bytes that are zeroed before a call, so that no kernel finds its inputs in the L2 cache."""
SPIN_CYCLES = 20_000_000
"""For which the GPU is kept busy while the host queues a call: about 10 ms."""


class Case(NamedTuple):
    """Describes the inputs that all kernels compute on in turn."""

    length: int
    inputs: str
    """ "gaussian" or "peaked"."""
    passes: str
    """ "forward" or "both"."""
    head_dim: int


CASES = [
    Case(*case) for case in product(LENGTHS, ("gaussian", "peaked"), ("both", "forward"), (128, 64))
]
BLOCKS = {
    # Two blocks of four warps share a multiprocessor, so that one's softmax runs beside the other's
    # products; each reads keys and values by itself, which is twice the traffic with the L2 cache.
    128: {
        "forward and dq in 64 rows": {
            "forward": Blocks(64, 64, 4, 3),
            "dq": Blocks(64, 64, 4, 2),
        },
        "dq in 64 rows": {"dq": Blocks(64, 64, 4, 2)},
        # No spills, but products of 32 columns read shared memory faster than it delivers.
        "dkdv by 32 queries": {"dkdv": Blocks(32, 128, 8, 3)},
    },
    64: {"dq in 64 rows": {"dq": Blocks(64, 64, 4, 3)}},
}
"""Head width -> block sizes of which only a GPU can say whether they beat those of the product."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over q, k and v, all [S, B, H, D]."""


def torch_kernel(backend: SDPBackend) -> Attend:
    """Return one of torch's own kernels, which have no ALiBi."""

    def attend(*qkv: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)

    return attend


def flash_attention(package: str, **options: Any) -> Attend:
    """Return FlashAttention-2 or -3, which raises where it is not installed."""

    def attend(*qkv: Tensor) -> Tensor:
        function = importlib.import_module(package).flash_attn_func
        out = function(*(x.transpose(0, 1) for x in qkv), causal=True, **options)
        # Some versions return (out, logsumexp), others out alone.
        out_BSHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_BSHD.transpose(0, 1)

    return attend


def other_blocks(slopes: Tensor, changed: dict[str, Blocks]) -> Attend:
    """Return our kernel with other block sizes than the product's."""

    def attend(*qkv: Tensor) -> Tensor:
        schedule = choose_schedule(qkv[0])._replace(**changed)
        bias = ScoreBias(slopes, None, 128, True)
        return attention_triton(*qkv, bias, None, 0.0, skip=False, schedule=schedule)

    return attend


def kernels(slopes: Tensor, head_dim: int) -> dict[str, Attend]:
    """Return every kernel by its name; those with "skips" depend on what q and k hold."""
    ours = partial(attention, slopes=slopes)
    flash4 = partial(attend_by("flash4"), slopes=slopes)
    no_slopes = torch.zeros_like(slopes)
    return {
        "Triton, ALiBi, skips": partial(ours, backend="triton"),
        "Triton, ALiBi": partial(ours, backend="triton", skip=False),
        **{
            f"Triton, ALiBi, {name}": other_blocks(slopes, changed)
            for name, changed in BLOCKS[head_dim].items()
        },
        "Triton, zero slopes": partial(attention, slopes=no_slopes, backend="triton"),
        "Triton, no bias": partial(attention, backend="triton"),
        "folded, ALiBi": partial(ours, backend="folded"),
        "SDPA in blocks, ALiBi": partial(ours, backend="sdpa"),
        "FlexAttention, ALiBi": partial(attend_by("flex"), slopes=slopes),
        "FlashAttention-4, ALiBi, skips": flash4,
        "FlashAttention-4, ALiBi": partial(flash4, skip=False),
        # Without `deterministic` its backward pass adds dq with atomics, in an order that varies.
        "FlashAttention-2, ALiBi": flash_attention(
            "flash_attn", alibi_slopes=slopes, deterministic=True
        ),
        "FlashAttention-3, no bias": flash_attention("flash_attn_interface"),
        "SDPA flash, no bias": torch_kernel(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN, no bias": torch_kernel(SDPBackend.CUDNN_ATTENTION),
        "SDPA memory-efficient, no bias": torch_kernel(SDPBackend.EFFICIENT_ATTENTION),
        "as auto takes it, no bias": partial(attention, backend="auto"),
    }


def device_time(call: Callable[[], object]) -> Way:
    """Return a way that takes the device's own time, without what the host needs to launch.

    The GPU is kept busy until the host has queued the call. In a training step the host is ahead of
    the GPU, too.
    """
    if not CUDA:

        def on_host() -> float:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin

        return on_host
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")

    def on_gpu() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]  # torch
        flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return on_gpu


def measure(case: Case) -> list[dict[str, Any]]:
    """Let the kernels take turns in a case, and return a row for each."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (case.length, max(1, TOKENS // case.length), HEADS, 3, case.head_dim)
    qkv = torch.randn(shape, generator=generator, device=DEVICE)
    if case.inputs == "peaked":
        qkv[..., :2, :] *= 4
    # Slices of one tensor, as of a fused qkv projection.
    leaves = [x.requires_grad_(case.passes == "both") for x in qkv.to(DTYPE).unbind(3)]

    def call(attend: Attend) -> None:
        out = attend(*leaves)
        if case.passes == "both":
            torch.autograd.grad(out, leaves, out.detach())

    ways = {
        name: device_time(partial(call, attend))
        for name, attend in kernels(alibi_slopes(HEADS).to(DEVICE), case.head_dim).items()
        if case.inputs == "gaussian" or "skips" in name
    }
    found = summary(list(rounds(ways, CALLS, seconds=SECONDS if CUDA else 0)))
    # Two products in the forward pass and five in the backward pass, of half of the scores.
    flops = (7 if case.passes == "both" else 2) * shape[1] * HEADS * case.length**2 * case.head_dim
    measured = [row for row in found if isinstance(row["ms"], float)]
    without = [row["ms"] for row in measured if "no bias" in row["way"]]
    for row in measured:
        row["TFLOP/s"] = flops / row["ms"] / 1e9
        if without:
            row["of the fastest without a bias"] = row["ms"] / min(without)
    return found


def main() -> None:
    """Measure every case that has no rows yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    rows = Rows(parser.parse_args().out, PART)
    for case in CASES:
        if not rows.has(**case._asdict()):
            for row in measure(case):
                rows.add({**case._asdict(), **row})


if __name__ == "__main__":
    main()
