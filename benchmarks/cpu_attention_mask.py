"""Compare the forms in which torch's fused attention can be given ALiBi's mask on a CPU.

    python -m benchmarks.cpu_attention_mask [--out FILE]

This is what chose the overlapping view and the block of queries in `pretrain.kernels.sdpa`. It
takes about a minute, on one thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pretrain.kernels.sdpa
from benchmarks.gpu_day.results import markdown
from benchmarks.turns import Way, rounds, summary, timed
from pretrain.kernels.dispatch import attention
from pretrain.positions.alibi import alibi_slopes

HEADS, TOKENS = 8, 4096
SLOPES = alibi_slopes(HEADS)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over q, k and v, all [S, B, H, D]."""


def main() -> None:
    """Run all comparisons, print them as Markdown and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Also write the tables to this Markdown file.")
    path = parser.parse_args().out
    torch.set_num_threads(1)
    sections = [
        "# The ALiBi mask in attention on a CPU",
        f"Machine: {os.cpu_count()} {platform.machine()} CPU cores, torch {torch.__version__} on "
        f"one thread, fp32. {HEADS} heads, {TOKENS} tokens a call (batch x length). Milliseconds "
        "of processor time, which other work on the machine disturbs little, medians. "
        "`python -m benchmarks.cpu_attention_mask` makes this anew.",
        masks(),
        blocks(),
    ]
    text = "\n\n".join(sections) + "\n"
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def masks() -> str:
    """Compare `attention` with dense masks, with one overlapping view, and with no bias at all."""
    rows = []
    for width in (16, 64):
        for length in (128, 512, 2048):
            batch = TOKENS // length
            mask = dense_mask(length)
            full = mask.expand(batch, -1, -1, -1).contiguous()
            ways: dict[str, Attend] = {
                "ours": partial(attention, slopes=SLOPES),
                "dense [1, H, S, S]": partial(fused, attn_mask=mask),
                "dense [B, H, S, S]": partial(fused, attn_mask=full),
                "one overlapping view": whole_view,
                "causal, no bias": partial(fused, is_causal=True),
            }
            for backward in (False, True):
                times = compare(ways, make_qkv(length, batch, width), backward, repeats=3)
                row = {"width": width, "length": length, "backward": backward, **times}
                rows.append(row | {"dense / ours": times["dense [1, H, S, S]"] / times["ours"]})
    return (
        "## Ways to give the mask\n\n"
        "Dense masks are made beforehand, outside the clock; ours is made in every call.\n\n"
        + markdown(rows)
    )


def blocks() -> str:
    """Compare numbers of queries that `attention_sdpa` serves at a time."""
    sizes, rows, chosen = (64, 128, 256, 512), [], pretrain.kernels.sdpa.QUERY_BLOCK

    def with_block(size: int) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pretrain.kernels.sdpa.QUERY_BLOCK = size
            return attention(q, k, v, slopes=SLOPES)

        return attend

    ways = {f"{size} queries": with_block(size) for size in sizes}
    for length in (512, 2048, 4096):
        times = compare(ways, make_qkv(length, TOKENS // length, 64), backward=True, repeats=3)
        rows.append({"length": length, **times})
    pretrain.kernels.sdpa.QUERY_BLOCK = chosen
    return (
        f"## Queries at a time (head width 64, forward + backward; {chosen} is used)\n\n"
        + markdown(rows)
    )


def make_qkv(length: int, batch: int, width: int) -> list[Tensor]:
    """Return random q, k and v, [length, batch, HEADS, width]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, batch, HEADS, width, generator=generator) for _ in range(3)]


def dense_mask(length: int) -> Tensor:
    """Return the whole mask, [1, H, S, S] in fp32."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (-SLOPES[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)[None]


def fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call torch's fused attention.

    Args:
        q: Queries, [S, B, H, D].
        k: Keys, the same.
        v: Values, the same.
        **options: Further arguments of `scaled_dot_product_attention`.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)


def whole_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Serve all queries at once, reversed, with an overlapping view of [H, distances] as mask."""
    length = q.shape[0]
    distances = torch.arange(length - 1, -length, -1)
    bias = (-SLOPES[:, None] * distances).masked_fill(distances < 0, -torch.inf)
    return fused(q.flip(0), k, v, attn_mask=bias.unfold(-1, length, 1)[None]).flip(0)


def compare(
    ways: dict[str, Attend], qkv: list[Tensor], backward: bool, repeats: int
) -> dict[str, float]:
    """Let the ways take turns, so that whatever else the machine does affects all alike.

    Args:
        ways: What to compare, by name.
        qkv: Inputs, [S, B, H, D].
        backward: Time forward and backward, not forward alone.
        repeats: Turns to count, after one that warms up.

    Returns:
        Median milliseconds of processor time of each.
    """

    def way(attend: Attend) -> Way:
        def call() -> None:
            inputs = [x.detach().requires_grad_(backward) for x in qkv]
            output = attend(*inputs).reshape(*qkv[0].shape[:2], -1)
            if backward:
                torch.autograd.backward(output, output.detach())

        return timed(call, clock=time.process_time)

    found = rounds({name: way(attend) for name, attend in ways.items()}, repeats)
    return {row["way"]: row["ms"] for row in summary(list(found))}


if __name__ == "__main__":
    main()
