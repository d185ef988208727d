"""Attention with ALiBi on a CPU: the ways to give torch's fused kernel its mask, timed in one run.

Usage: python benchmarks/attention_cpu.py [--write FILE]. One thread, about a minute.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pretrain.kernels.sdpa
from pretrain.kernels.alibi import alibi_slopes
from pretrain.kernels.dispatch import attention

HEADS, TOKENS = 8, 4096
SLOPES = alibi_slopes(HEADS)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # [S, B, H, D] in and out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="Also write the tables to this Markdown file.")
    path = parser.parse_args().write
    torch.set_num_threads(1)
    sections = [
        "# Attention with ALiBi on a CPU",
        f"Machine: {os.cpu_count()} {platform.machine()} CPU cores, torch {torch.__version__} on one thread, fp32. {HEADS} "
        f"heads, {TOKENS} tokens a call (batch x length). Milliseconds of processor time, which other work on the "
        "machine disturbs little, medians. `python benchmarks/attention_cpu.py` makes this anew.",
        long_forward(),  # first: the peak of a process only grows
        masks(),
        blocks(),
    ]
    text = "\n\n".join(sections) + "\n"
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def long_forward(length: int = 32_768) -> str:
    """Time and memory of one forward far beyond what scores of [heads, length, length] could fit."""
    q, k, v = make_qkv(length, 1, 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        start = time.process_time()
        attention(q, k, v, slopes=SLOPES)
        seconds = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    dense = HEADS * length**2 * 4 / 2**20
    return (
        f"One forward of {length} tokens, head width 16: {seconds:.1f} s, {peak:.0f} MiB more at its peak; "
        f"an fp32 mask of [heads, length, length] alone would be {dense:.0f} MiB."
    )


def masks() -> str:
    """Ours beside one dense mask made beforehand, in its layouts, and beside torch's causal kernel without any bias."""
    rows = []
    for width in (16, 64):
        for length in (128, 512, 2048):
            batch = TOKENS // length
            mask = dense_mask(length)
            full = mask.expand(batch, -1, -1, -1).contiguous()
            ways: dict[str, Attend] = {
                "ours": lambda q, k, v: attention(q, k, v, slopes=SLOPES),
                "dense [1, H, S, S]": lambda q, k, v, mask=mask: fused(q, k, v, attn_mask=mask),
                "dense [B, H, S, S]": lambda q, k, v, full=full: fused(q, k, v, attn_mask=full),
                "dense, q k v copied": lambda q, k, v, mask=mask: fused(
                    q, k, v, copy=True, attn_mask=mask
                ),
                "one overlapping view": whole_view,
                "causal, no bias": lambda q, k, v: fused(q, k, v, is_causal=True),
            }
            for backward in (False, True):
                times = compare(ways, make_qkv(length, batch, width), backward, repeats=3)
                ratio = times["dense [1, H, S, S]"] / times["ours"]
                what = "forward + backward" if backward else "forward"
                rows.append(
                    [
                        str(width),
                        str(length),
                        what,
                        *(f"{t:.1f}" for t in times.values()),
                        f"{ratio:.2f}",
                    ]
                )
    title = "## Ways to give the mask\n\nDense masks are made beforehand, outside the clock; ours is made in every call.\n"
    return title + "\n" + table(["width", "length", "", *ways, "dense / ours"], rows)


def blocks() -> str:
    """Ours by the number of queries served at a time."""
    sizes, rows, chosen = (64, 128, 256, 512), [], pretrain.kernels.sdpa.QUERY_BLOCK

    def with_block(size: int) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pretrain.kernels.sdpa.QUERY_BLOCK = size
            return attention(q, k, v, slopes=SLOPES)

        return attend

    ways = {f"{size} queries": with_block(size) for size in sizes}
    for length in (512, 2048, 4096):
        times = compare(ways, make_qkv(length, TOKENS // length, 64), backward=True, repeats=3)
        rows.append([str(length), *(f"{t:.1f}" for t in times.values())])
    pretrain.kernels.sdpa.QUERY_BLOCK = chosen
    return (
        f"## Queries at a time (head width 64, forward + backward; {chosen} is used)\n\n"
        + table(["length", *ways], rows)
    )


def make_qkv(length: int, batch: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, batch, HEADS, width, generator=generator) for _ in range(3)]


def dense_mask(length: int) -> Tensor:
    """fp32 [1, H, S, S]."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (-SLOPES[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)[None]


def fused(q: Tensor, k: Tensor, v: Tensor, copy: bool = False, **options: object) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if copy:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)  # type: ignore[arg-type]


def whole_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All queries at once, reversed, with the mask as an overlapping view of [H, distances]."""
    length = q.shape[0]
    distances = torch.arange(length - 1, -length, -1)
    bias = (-SLOPES[:, None] * distances).masked_fill(distances < 0, -torch.inf)
    return fused(q.flip(0), k, v, attn_mask=bias.unfold(-1, length, 1)[None]).flip(0)


def compare(
    ways: dict[str, Attend], qkv: list[Tensor], backward: bool, repeats: int
) -> dict[str, float]:
    """Median milliseconds of each way; they take turns, so that whatever else the machine does meets them all."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, attend in ways.items():
            inputs = [x.detach().requires_grad_(backward) for x in qkv]
            start = time.process_time()
            output = attend(*inputs).reshape(*qkv[0].shape[:2], -1)
            if backward:
                output.backward(output.detach())
            if turn > 0:  # the first warms up
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(t) for name, t in times.items()}


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
