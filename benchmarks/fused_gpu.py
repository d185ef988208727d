"""Does it pay to fuse what stands beside attention? LayerNorm with its residual, bias-GELU, cross-entropy, in the 1.3B model's shapes.

Each candidate beside what the model does today (plain torch operations, one after the other), forward and backward, in
one run: milliseconds (medians) and the peak of memory above its inputs. Needs nothing but torch; about two minutes.
Usage: python -m benchmarks.fused_gpu [--write FILE] [--tokens 8192].
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, layer_norm, linear
from torch.utils.checkpoint import checkpoint

HIDDEN, FFN, VOCABULARY, CHUNKS, REPEATS = 2048, 8192, 50_304, 8, 20
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
Operation = Callable[..., Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="Also write the table to this Markdown file.")
    parser.add_argument(
        "--tokens", type=int, default=8192 if CUDA else 256, help="Tokens a micro batch."
    )
    arguments = parser.parse_args()
    name = (
        torch.cuda.get_device_name() if CUDA else "no GPU: on the CPU, where memory is not measured"
    )
    lines = [
        f"# What stands beside attention, on {name}",
        f"torch {torch.__version__}, {DTYPE}, {arguments.tokens} tokens; hidden {HIDDEN}, FFN {FFN}, vocabulary {VOCABULARY}; "
        "forward and backward, medians.\n",
        "| operation | way | ms | MiB at the peak | largest difference |",
        "|---|---|---:|---:|---:|",
    ]
    for operation, (inputs, ways) in operations(arguments.tokens).items():
        expected: list[Tensor] | None = None
        for way, function in ways.items():
            milliseconds, mebibytes, results = measure(function, inputs)
            expected = expected or results
            error = max(
                float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, expected)
            )
            lines.append(
                f"| {operation} | {way} | {milliseconds:.3f} | {mebibytes:,.0f} | {error:.1e} |"
            )
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if arguments.write is not None:
        arguments.write.write_text(text)


def operations(tokens: int) -> dict[str, tuple[list[Tensor], dict[str, Operation]]]:
    """Name -> (inputs, ways to compute it); the first way is the model's."""
    wide, narrow = random(tokens, FFN), random(tokens, HIDDEN)
    labels = torch.randint(VOCABULARY, (tokens,), device=DEVICE)

    def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
        return gelu(x + b, approximate="tanh")

    def norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = x + residual
        return total + layer_norm(total, (HIDDEN,), w, b)  # both are used further on

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return cross_entropy(linear(x, w).float(), labels)

    def chunked_loss(x: Tensor, w: Tensor, piece: Operation) -> Tensor:
        parts = zip(x.chunk(CHUNKS), labels.chunk(CHUNKS))
        sums = [checkpoint(piece, part, w, those, use_reentrant=False) for part, those in parts]
        return torch.stack(sums).sum() / tokens

    def piece(x: Tensor, w: Tensor, those: Tensor) -> Tensor:
        return cross_entropy(linear(x, w).float(), those, reduction="sum")

    compiled_piece = torch.compile(piece)
    return {
        "bias-GELU": (
            [wide, random(FFN)],
            {"plain": bias_gelu, "torch.compile": torch.compile(bias_gelu)},
        ),
        "residual + LayerNorm": (
            [narrow, random(tokens, HIDDEN), random(HIDDEN), random(HIDDEN)],
            {"plain": norm, "torch.compile": torch.compile(norm)},
        ),
        "logits + cross-entropy": (
            [narrow, random(VOCABULARY, HIDDEN, scale=0.02)],
            {
                "plain, fp32 logits": loss,
                "torch.compile": torch.compile(loss),
                f"{CHUNKS} pieces, recomputed": lambda x, w: chunked_loss(x, w, piece),
                f"{CHUNKS} pieces, compiled": lambda x, w: chunked_loss(x, w, compiled_piece),
            },
        ),
    }


def random(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(DTYPE)


def measure(function: Operation, inputs: list[Tensor]) -> tuple[float, float, list[Tensor]]:
    """(median milliseconds, MiB above what was allocated before, [output, gradients] in fp32)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    times, before, peak, results = [], 0.0, 0.0, []
    for turn in range(REPEATS + 3):  # the first three compile and warm up
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        output = function(*leaves)
        results = [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]
        if CUDA:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        if turn >= 3:
            times.append(1e3 * (time.perf_counter() - begin))
        results = [] if turn < REPEATS + 2 else results
    return statistics.median(times), peak, [x.float() for x in results]


if __name__ == "__main__":
    main()
