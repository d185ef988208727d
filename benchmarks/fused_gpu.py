"""Measure whether it pays to fuse the operations beside attention, in the shapes of the 1.3B model.

    python -m benchmarks.fused_gpu [--write FILE] [--tokens 8192]

The operations are LayerNorm with its residual, bias-GELU, and logits with cross-entropy. Each is
compared with what the model does today, plain torch operations one after the other, forward and
backward: milliseconds (medians) and the peak of memory above the inputs. This needs torch alone and
takes about two minutes.
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

HIDDEN, FFN, VOCABULARY = 2048, 8192, 50_304
CHUNKS = 8
"""Pieces into which the tokens are cut where logits are recomputed piece by piece."""
REPEATS, WARM_UP_TURNS = 20, 3
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
Operation = Callable[..., Tensor]


def main() -> None:
    """Measure every operation, print the table and write it if asked to."""
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
        f"torch {torch.__version__}, {DTYPE}, {arguments.tokens} tokens; hidden {HIDDEN}, "
        f"FFN {FFN}, vocabulary {VOCABULARY}; forward and backward, medians.\n",
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
    """Return, for each operation, its inputs and the ways to compute it, the model's own first.

    Args:
        tokens: Tokens in a micro batch.
    """
    wide, narrow = random(tokens, FFN), random(tokens, HIDDEN)
    labels = torch.randint(VOCABULARY, (tokens,), device=DEVICE)

    def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
        return gelu(x + b, approximate="tanh")

    def norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = x + residual
        # The model uses both terms further on: one as the residual, one as the layer's input.
        return total + layer_norm(total, (HIDDEN,), w, b)

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
    """Return normal noise times `scale`, the same in every run."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(DTYPE)


def measure(function: Operation, inputs: list[Tensor]) -> tuple[float, float, list[Tensor]]:
    """Time forward and backward of one way to compute an operation.

    Args:
        function: What to time.
        inputs: Its arguments; all get gradients.

    Returns:
        Median milliseconds, peak MiB above what was allocated before (0 on a CPU), and the output
        and gradients in fp32.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    times: list[float] = []
    before, peak, results = 0.0, 0.0, list[Tensor]()
    # The first turns compile and warm up.
    for turn in range(REPEATS + WARM_UP_TURNS):
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
        if turn >= WARM_UP_TURNS:
            times.append(1e3 * (time.perf_counter() - begin))
        # Only the last turn's results are returned; earlier ones would count as memory.
        if turn < REPEATS + WARM_UP_TURNS - 1:
            results = []
    return statistics.median(times), peak, [x.float() for x in results]


if __name__ == "__main__":
    main()
