"""Time the fused operations beside attention against plain ones, in the shapes of the 1.3B model.

    python -m benchmarks.fused_gpu [--out FILE] [--tokens 8192]

For each operation the first row is what the model does with `train.fusion = "off"`, and the row
marked "model" what it does with "on". Beside them stand other ways to compute the same: Liger's
fused linear cross-entropy, where it is installed. A row gives the
milliseconds of forward and backward (the median, and the range of the middle half of the turns),
the peak of memory above the inputs, and the largest difference from the first row. Rows are written
as they are measured.

It needs what training needs, and takes about three minutes on a GPU. On a CPU it only shows that
every row runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from benchmarks.gpu_day.results import markdown
from benchmarks.turns import rounds, summary, timed
from pretrain import platform

HIDDEN, FFN, VOCABULARY = 2048, 8192, 50_304
PROBABILITY = 0.1
"""Dropout probability of the rows with dropout."""
REPEATS, WARM_UP_TURNS = 20, 3
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
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
    head = (
        f"# Operations beside attention, on {name}\n\ntorch {torch.__version__}, {DTYPE}, "
        f"{arguments.tokens} tokens; hidden {HIDDEN}, FFN {FFN}, vocabulary {VOCABULARY}; forward "
        "and backward.\n\n"
    )
    rows: list[dict[str, Any]] = []
    expected: dict[str, list[Tensor]] = {}
    for way in all_ways(arguments.tokens):
        rows.append(_row(way, expected))
        print(rows[-1], flush=True)
        if arguments.out is not None:
            arguments.out.write_text(f"{head}{markdown(rows)}\n")


def _start_megatron() -> None:
    """Form Megatron's process groups of one rank, which its cross-entropy asks for."""
    platform.prepare(0)
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group(platform.backend(), store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def _row(way: Way, expected: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Measure a way and return its row of the table.

    Args:
        way: What to measure.
        expected: Results of the first way of each operation; this adds to it.
    """
    row, mebibytes, results = measure(way.turn)
    row = {"operation": way.operation, **row, "way": way.name, "MiB at the peak": mebibytes}
    if results and not way.is_random:
        reference = expected.setdefault(way.operation, results)
        row["largest difference"] = max(
            float((x - y).abs().max() / y.abs().max().clamp(min=1e-30))
            for x, y in zip(results, reference)
        )
    return row


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


def measure(turn: Turn) -> tuple[dict[str, Any], float, list[Tensor]]:
    """Time a turn.

    Returns:
        Its row of `summary`, the peak of MiB above what was allocated before (0 on a CPU), and the
        results of a turn in fp32.
    """
    before, peak = 0.0, 0.0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    # The first turns compile and warm up. No results are kept, which would count as memory.
    [row] = summary(list(rounds({"": timed(turn)}, REPEATS, WARM_UP_TURNS)))
    if CUDA:
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return row, peak, [] if isinstance(row["ms"], str) else [x.float() for x in turn()]


if __name__ == "__main__":
    main()
