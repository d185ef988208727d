"""Define the tasks of test_fusion.py that worker processes run, as tasks.py does for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain.config import RunConfig
from tests.distributed import tasks


def run_uncompiled(task: str, *args: Any) -> Any:
    """Run a task of tasks.py with compiled regions executed as plain Python.

    Compilation costs many seconds. Everything else about the fused model stays as it is.

    Args:
        task: Name of the task.
        *args: Its arguments.
    """
    with torch.compiler.set_stance("force_eager"):
        return getattr(tasks, task)(*args)


def gradients_in_main_grad(
    config: RunConfig, state: dict[str, Tensor], tokens: Tensor
) -> dict[str, Tensor] | None:
    """Compute gradients in fp32 buffers that layers and hooks add to, as the optimizer does.

    Args:
        config: The run's config.
        state: Full fp32 weights by global name.
        tokens: Token ids of the global batch, [global batch, S + 1].

    Returns:
        On rank 0 the full gradients by global name; None elsewhere.
    """
    from pretrain.model.forward import run_schedule
    from pretrain.model.gpt import choose_fusion
    from pretrain.model.loss import accumulate_in_layers
    from pretrain.model.parameters import named_parameters
    from pretrain.optim.buckets import finalize_gradients, gradient
    from pretrain.training.step import _mean_loss

    topology, chunks = tasks._build_model_with(config, state)
    named = list(named_parameters(chunks))
    hooks_added: set[str] = set()
    for each in named:
        each.parameter.main_grad = torch.zeros(each.shape)
        each.parameter.register_post_accumulate_grad_hook(_adder(each.name, hooks_added))
    if choose_fusion(config).weight_gradients:
        in_layers = {id(parameter) for parameter in accumulate_in_layers(chunks)}
    else:
        in_layers = set()
    with torch.compiler.set_stance("force_eager"):
        run_schedule(chunks, tasks._split_among_ranks(config, topology, tokens), _mean_loss)
    for each in named:
        assert each.parameter.grad is None
        # Every matrix of a linear layer was added by the layer, and nothing else was.
        is_linear = "linear_" in each.name or each.name in (
            "output_layer.weight",
            "embedding.word_embeddings.weight",
        )
        expected = is_linear and each.name.endswith("weight") and config.train.fusion == "on"
        by_embedding = each.name == "embedding.word_embeddings.weight"
        if not by_embedding:
            assert (id(each.parameter) in in_layers) == expected, each.name
            assert (each.name not in hooks_added) == expected, each.name
    finalize_gradients(chunks)
    full = tasks._assemble(chunks, lambda p: gradient(p).float(), topology.layout.data)
    return full if topology.is_main else None


def sum_of_weight_gradients(precision: str) -> tuple[Tensor, Tensor]:
    """Add two micro batches' weight gradients to a buffer, and compute the same sum in fp64.

    Args:
        precision: A value of train.precision.
    """
    from pretrain import platform
    from pretrain.model.loss import add_weight_gradient, mark_stale

    generator = torch.Generator().manual_seed(2)
    # What an earlier step has left must not be read, not even to be multiplied by zero.
    total, expected = torch.full((48, 24), torch.nan), torch.zeros(48, 24, dtype=torch.float64)
    mark_stale(total)
    for _ in range(2):
        inputs, grad_output = (
            torch.randn(32, size, generator=generator).to(platform.DTYPES[precision])
            for size in (24, 48)
        )
        add_weight_gradient(inputs, grad_output, total)
        expected += grad_output.double().t() @ inputs.double()
    return total, expected


def split_gradients(one_buffer: bool) -> dict[str, Any]:
    """Differentiate through the split of self-attention into queries, keys and values.

    Args:
        one_buffer: The attention kernel writes its three gradients into one buffer.

    Returns:
        "gradient" and "expected", that of torch.split; "concatenations", how often one was copied
        together.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from pretrain.model.attention import _Split

    sizes, calls = [8, 4, 4], []

    class CountConcatenations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            calls.extend([function] * (function is torch.ops.aten.cat.default))
            return function(*args, **(kwargs or {}))

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return sum(x.square().sum() for x in inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            results = [2 * gradient * x for x in ctx.saved_tensors]
            if not one_buffer:
                return tuple(results)
            parts = torch.empty(5, 1, 3, 16).split(sizes, dim=-1)
            return tuple(part.copy_(x) for part, x in zip(parts, results))

    mixed = torch.randn(5, 1, 3, 16, generator=torch.Generator().manual_seed(4))
    mixed.requires_grad_()
    Kernel.apply(*mixed.split(sizes, dim=-1)).backward()
    expected, mixed.grad = mixed.grad, None
    with CountConcatenations():
        Kernel.apply(*_Split.apply(mixed, sizes)).backward()
    return {"gradient": mixed.grad, "expected": expected, "concatenations": len(calls)}


def kernels_of_compiled_regions() -> dict[str, int]:
    """Compile every region and count the kernels that Inductor generates, forward and backward."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
    from torch._inductor import config as inductor
    from torch._inductor import metrics

    from pretrain.model import loss

    x, residual = torch.randn(6, 2, 16, requires_grad=True), torch.randn(6, 2, 16)
    bias = torch.randn(16, requires_grad=True)
    logits, rows = torch.randn(12, 16), torch.rand(12)
    add = get_bias_dropout_add(training=True, fused=True)
    regions = {
        "bias-GELU": lambda: bias_gelu_impl(x, bias).sum().backward(),
        "bias-residual": lambda: add((x, bias), residual, 0.0),
        "loss, backward": lambda: loss._compiled_gradient(logits, rows.long(), rows, rows, rows),
    }
    counts = {}
    for name, region in regions.items():
        torch._dynamo.reset()
        metrics.reset()
        # Kernels from a cache are not counted.
        with inductor.patch(force_disable_caches=True):
            region()
        counts[name] = metrics.generated_kernel_count
    return counts


def losses_in_pieces(precision: str) -> dict[str, Any]:
    """Compute losses and gradients from logits of which only some rows are ever in fp32.

    Args:
        precision: A value of train.precision.

    Returns:
        "actual" and "expected" (torch's cross_entropy of fp32 logits): losses and gradients;
        "elements": elements of the largest fp32 tensor that existed, of 40 x 96 logits.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from pretrain import platform
    from pretrain.model import loss

    dtype = platform.DTYPES[precision]
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(20, 2, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(96, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(96, (20, 2), generator=generator)
    # A loss of its own weight for every token, as a mask would give.
    d_loss = torch.rand(20, 2, generator=generator)
    logits = (hidden @ weight.t()).float()
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(20, 2)
    gradients = torch.autograd.grad(expected, (hidden, weight), d_loss)
    elements = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal elements
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float32:
                elements = max(elements, out.numel())
            return out

    before, loss.ELEMENTS_AT_ONCE = loss.ELEMENTS_AT_ONCE, 7 * 96
    try:
        with Largest():
            actual = loss.linear_cross_entropy(hidden, weight, labels, loss.Options())
            results = torch.autograd.grad(actual, (hidden, weight), d_loss)
    finally:
        loss.ELEMENTS_AT_ONCE = before
    return {
        "actual": [actual.detach(), *results],
        "expected": [expected.detach(), *gradients],
        "elements": elements,
    }


def _adder(name: str, added: set[str]) -> Any:
    """Return a hook that adds a parameter's gradient to its buffer, unless its layer has done so.

    Args:
        name: The parameter's name.
        added: Gets the name when the hook has added something.
    """

    def add(parameter: Any) -> None:
        if getattr(parameter, "grad_added_to_main_grad", False):
            parameter.grad_added_to_main_grad = False
        else:
            parameter.main_grad.add_(parameter.grad)
            added.add(name)
        parameter.grad = None

    return add
