"""Time the fused operations beside attention against plain ones, in the shapes of the 1.3B model.

    python -m benchmarks.fused_gpu [--out FILE] [--tokens 8192]

For each operation the first row is what the model does with `train.fusion = "off"`, and the row
marked "model" what it does with "on". Beside them stand other ways to compute the same: Liger's
fused linear cross-entropy and DeepSpeed's fused AdamW, where they are installed. A row gives the
milliseconds of forward and backward (the median, and the range of the middle half of the turns),
the peak of memory above the inputs, and the largest difference from the first row. Rows are written
as they are measured.

It needs what training needs, and takes about three minutes on a GPU. On a CPU it only shows that
every row runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from pretrain import platform

HIDDEN, FFN, VOCABULARY = 2048, 8192, 50_304
PROBABILITY = 0.1
"""Dropout probability of the rows with dropout."""
REPEATS, WARM_UP_TURNS = 20, 3
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
PARAMETERS = 2**28 if CUDA else 2**20
"""Weights of the AdamW rows, a fifth of the model's."""
HEADER = (
    "| operation | way | ms | middle half | MiB at the peak | largest difference |\n"
    "|---|---|---:|---:|---:|---:|"
)
Turn = Callable[[], list[Tensor]]
"""One forward and backward pass, or one update. It returns what is compared."""


class Way(NamedTuple):
    """One way to compute an operation."""

    operation: str
    name: str
    turn: Turn
    is_random: bool = False
    """The result has random masks, and is not compared."""


def main() -> None:
    """Measure every way, and print or write a row for each at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Also write the table to this Markdown file.")
    parser.add_argument(
        "--tokens", type=int, default=8192 if CUDA else 64, help="Tokens a micro batch."
    )
    arguments = parser.parse_args()
    _start_megatron()
    name = torch.cuda.get_device_name() if CUDA else "no GPU: on the CPU, memory is not measured"
    lines = [
        f"# Operations beside attention, on {name}\n",
        f"torch {torch.__version__}, {DTYPE}, {arguments.tokens} tokens; hidden {HIDDEN}, "
        f"FFN {FFN}, vocabulary {VOCABULARY}; forward and backward.\n",
        HEADER,
    ]
    print("\n".join(lines), flush=True)
    expected: dict[str, list[Tensor]] = {}
    for way in all_ways(arguments.tokens):
        lines.append(_row(way, expected))
        print(lines[-1], flush=True)
        if arguments.out is not None:
            arguments.out.write_text("\n".join(lines) + "\n")


def _start_megatron() -> None:
    """Form Megatron's process groups of one rank, which its cross-entropy asks for."""
    platform.prepare(0)
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group(platform.backend(), store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def _row(way: Way, expected: dict[str, list[Tensor]]) -> str:
    """Measure a way and return its row of the table.

    Args:
        way: What to measure.
        expected: Results of the first way of each operation; this adds to it.
    """
    try:
        milliseconds, middle, mebibytes, results = measure(way.turn)
    # A library may be too old, or its kernels may not compile; the other rows do not depend on it.
    except Exception as error:
        reason = " ".join(str(error).split())[:80]
        return f"| {way.operation} | {way.name} | failed: {type(error).__name__}: {reason} | | | |"
    reference = expected.setdefault(way.operation, results)
    errors = [
        float((x - y).abs().max() / y.abs().max().clamp(min=1e-30))
        for x, y in zip(results, reference)
    ]
    difference = "random masks" if way.is_random else f"{max(errors):.1e}"
    return (
        f"| {way.operation} | {way.name} | {milliseconds:.3f} | {middle} | {mebibytes:,.0f} "
        f"| {difference} |"
    )


def all_ways(tokens: int) -> Iterator[Way]:
    """Yield every way to compute every operation, the plain one of each first.

    Args:
        tokens: Tokens in a micro batch.
    """
    yield from _bias_gelu(tokens)
    yield from _bias_dropout_add(tokens, 0.0)
    yield from _bias_dropout_add(tokens, PROBABILITY)
    yield from _layer_norm(tokens)
    yield from _loss(tokens)
    yield from _weight_gradient(tokens)
    yield from _adamw()


def _bias_gelu(tokens: int) -> Iterator[Way]:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    inputs = [random(tokens, 1, FFN), random(FFN)]

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return gelu(x + bias, approximate="tanh")

    yield Way("bias-GELU", "plain", _differentiated(plain, inputs))
    yield Way("bias-GELU", "Megatron's, compiled (model)", _differentiated(bias_gelu_impl, inputs))
    compiled = torch.compile(plain)
    yield Way("bias-GELU", "torch.compile", _differentiated(compiled, inputs))


def _bias_dropout_add(tokens: int, probability: float) -> Iterator[Way]:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    operation = f"bias-dropout-residual, p = {probability}"
    inputs = [random(tokens, 1, HIDDEN), random(HIDDEN), random(tokens, 1, HIDDEN, scale=2.0)]

    def add(fused: bool) -> Turn:
        function = get_bias_dropout_add(True, fused)
        return _differentiated(lambda x, bias, r: function((x, bias), r, probability), inputs)

    is_random = probability > 0
    yield Way(operation, "plain", add(fused=False), is_random)
    yield Way(operation, "Megatron's, compiled (model)", add(fused=True), is_random)


def _layer_norm(tokens: int) -> Iterator[Way]:
    inputs = [random(tokens, 1, HIDDEN), random(tokens, 1, HIDDEN), random(HIDDEN), random(HIDDEN)]

    def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total = x + residual
        # The model uses both terms further on: one as the residual, one as the layer's input.
        return total + layer_norm(total, (HIDDEN,), weight, bias)

    yield Way("residual + LayerNorm", "plain (model)", _differentiated(norm, inputs))
    compiled = torch.compile(norm)
    yield Way("residual + LayerNorm", "torch.compile", _differentiated(compiled, inputs))


def _loss(tokens: int) -> Iterator[Way]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from pretrain.model.loss import Options, linear_cross_entropy

    operation = "logits + cross-entropy"
    labels = torch.randint(VOCABULARY, (tokens, 1), device=DEVICE)
    inputs = [random(tokens, 1, HIDDEN), random(VOCABULARY, HIDDEN, scale=0.02)]

    def megatron(x: Tensor, weight: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x @ weight.t(), labels).mean()

    def fused(compiled: bool) -> Turn:
        options = Options(compiled=compiled)
        return _differentiated(
            lambda x, weight: linear_cross_entropy(x, weight, labels, options).mean(), inputs
        )

    yield Way(operation, "Megatron's, fp32 logits", _differentiated(megatron, inputs))
    yield Way(operation, "one copy of the logits, in pieces", fused(compiled=False))
    yield Way(operation, "one copy of the logits, compiled (model)", fused(compiled=True))
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        return
    liger = LigerFusedLinearCrossEntropyLoss()
    yield Way(
        operation,
        "Liger's fused linear cross-entropy",
        _differentiated(lambda x, w: liger(w, x.flatten(0, 1), labels.flatten()), inputs),
    )


def _weight_gradient(tokens: int) -> Iterator[Way]:
    """Yield ways to add the gradient of the MLP's first weight to its fp32 sum."""
    from pretrain.model.loss import add_weight_gradient

    operation = "weight gradient into an fp32 sum"
    inputs, grad_output = random(tokens, HIDDEN), random(tokens, FFN)
    sums = [torch.zeros(FFN, HIDDEN, device=DEVICE) for _ in range(2)]

    def plain() -> list[Tensor]:
        return [sums[0].add_(grad_output.t() @ inputs)]

    def fused() -> list[Tensor]:
        add_weight_gradient(inputs, grad_output, sums[1])
        return [sums[1]]

    yield Way(operation, "product, then sum", plain)
    yield Way(operation, "one product (model)", fused)


def _adamw() -> Iterator[Way]:
    """Yield ways to update PARAMETERS fp32 weights in 64 tensors."""
    operation = f"AdamW, {PARAMETERS / 1e6:.0f}M weights"

    def update(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Turn:
        weights = [nn.Parameter(random(PARAMETERS // 64).float()) for _ in range(64)]
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer = build(weights)

        def turn() -> list[Tensor]:
            optimizer.step()
            return [weights[0].detach()]

        return turn

    yield Way(operation, "torch, foreach", update(lambda w: torch.optim.AdamW(w, foreach=True)))
    yield Way(operation, "torch, fused", update(lambda w: torch.optim.AdamW(w, fused=True)))
    if CUDA:
        from deepspeed.ops.adam import FusedAdam

        # It compiles a CUDA extension, for which the machine needs nvcc.
        yield Way(operation, "DeepSpeed's FusedAdam", _built_late(lambda: update(FusedAdam)))


def _built_late(build: Callable[[], Turn]) -> Turn:
    """Return a turn that is built at its first call, so that a failure is that of its row."""
    turns: list[Turn] = []

    def turn() -> list[Tensor]:
        if not turns:
            turns.append(build())
        return turns[0]()

    return turn


def _differentiated(function: Callable[..., Tensor], inputs: list[Tensor]) -> Turn:
    """Return a turn of forward and backward; all inputs get gradients.

    Args:
        function: The operation.
        inputs: Its arguments.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]

    def turn() -> list[Tensor]:
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]

    return turn


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Return normal noise times `scale`, the same in every run."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(DTYPE)


def measure(turn: Turn) -> tuple[float, str, float, list[Tensor]]:
    """Time a turn.

    Returns:
        Median milliseconds, the range of the middle half, peak MiB above what was allocated before
        (0 on a CPU), and the results of the last turn in fp32.
    """
    times: list[float] = []
    before, peak, results = 0.0, 0.0, list[Tensor]()
    # The first turns compile and warm up.
    for number in range(REPEATS + WARM_UP_TURNS):
        # The results of earlier turns would count as memory.
        results = []
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        results = turn()
        if CUDA:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        if number >= WARM_UP_TURNS:
            times.append(1e3 * (time.perf_counter() - begin))
    low, median, high = statistics.quantiles(times, n=4)
    return median, f"{low:.3f} to {high:.3f}", peak, [x.float() for x in results]


if __name__ == "__main__":
    main()
