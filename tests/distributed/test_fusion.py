"""Compare the model with fused operations with the dense reference and with the plain model.

Compiled regions run as plain Python here, except where a test says so: compiling takes seconds for
each region and data type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import TestCase
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pretrain import platform
from pretrain.config import RunConfig
from tests.conftest import ALL_LAYOUTS
from tests.distributed import tasks
from tests.distributed.test_optimizer import _config as steps_config
from tests.distributed.test_optimizer import _expected as expected_steps
from tests.distributed.test_optimizer import assert_losses_and_norms
from tests.distributed.test_parallel_equals_dense import (
    TOLERANCE,
    assert_close_by_name,
    assert_equals_dense,
    variant_config,
)
from tests.distributed.test_parallel_equals_dense import _expected as expected_gradients

# Beside the default model: erf GELU, an untied output layer, SwiGLU.
CASES = [("alibi", layout) for layout in ("tp2sp", "pp2vpp2")] + [
    (variant, layout)
    for variant in ("alibi-trainable", "alibi-grouped", "rotary-modern")
    for layout in ("one", "tp2sp")
]


def fused(config, **train):
    """Return the config with every fusion on."""
    return config.model_copy(
        update={"train": config.train.model_copy(update={"fusion": "on", **train})}
    )


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_fused_losses_and_gradients_equal_the_dense_reference(pools, variant, layout):
    processes, parallel = ALL_LAYOUTS[layout]
    run = partial(pools(processes).run, tasks.uncompiled)
    config = fused(variant_config(variant, 8, parallel))
    assert_equals_dense(run, config, expected_gradients(variant, 8))


@pytest.mark.parametrize("layout", ["pp2vpp2", "tp2pp2sp"])
def test_a_fused_model_trains_as_adamw_does(pools, layout):
    """Losses and norms of three steps, each of which follows from the weights of the one before.

    The layers add their weights' gradients to the optimizer's sums, which are not overwritten then.
    An installed APEX is left aside: its product does not know our marks, and gradients were lost.
    """
    processes, parallel = ALL_LAYOUTS[layout]
    # Two stages of two chunks have a layer in each.
    layers = 4 if "vpp" in layout else 2
    state, batches, losses, norms, _ = expected_steps(layers=layers)
    config = fused(steps_config(layers=layers, parallel=parallel))
    task = tasks.uncompiled, steps_with_apex
    actual = pools(processes).run(*task, config, state, batches[:3])[0]
    assert_losses_and_norms(actual, losses[:3], norms[:3])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weight_gradients_are_summed_in_fp32(pools, precision):
    """Products of 16-bit numbers are exact in fp32; sums over 64 tokens round 64 times at most."""
    actual, expected = pools(1).run(sum_of_weight_gradients, precision)[0]
    # Relative to the sum of magnitudes, of which the second tensor holds the largest.
    assert (actual - expected).abs().max() < 64 * 2**-24 * expected.abs().max()


def test_where_no_product_adds_to_fp32_hooks_add_the_gradients(pools):
    """A CPU refuses `out_dtype`, as some releases of torch or cuBLAS may on a GPU."""
    state, batches, losses, norms, _ = expected_steps()
    config = fused(steps_config())
    task = tasks.uncompiled, steps_with_the_product_of_a_gpu
    actual, fuses, log = pools(1).run(*task, config, state, batches[:2])[0]
    assert_losses_and_norms(actual, losses[:2], norms[:2])
    assert not fuses and "aten::mm.dtype_out" in log[0]
    assert "Weight gradients are rounded to the training precision" in log[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_logits_never_exist_in_fp32_all_at_once(pools, precision):
    """Seven rows of 40 are converted at once; losses and gradients are those of all at once.

    In 16 bit both round the gradient of the logits once, after the same fp32 arithmetic, so they
    differ in what lies on the edge between two numbers, by one unit in the last place.
    """
    result = pools(1).run(losses_in_pieces, precision)[0]
    epsilon = {"fp32": 2**-22, "bf16": 2**-8, "fp16": 2**-11}[precision]
    losses, *gradients = zip(result["actual"], result["expected"])
    torch.testing.assert_close(*losses, rtol=2**-20, atol=2**-20)
    for actual, expected in gradients:
        assert actual.dtype == expected.dtype
        error = (actual.double() - expected.double()).abs().max()
        assert error < 2 * epsilon * expected.abs().max()
    if precision != "fp32":
        assert result["elements"] == 7 * 96


@pytest.mark.parametrize("one_buffer", [True, False])
def test_gradients_of_queries_keys_and_values_in_one_buffer_are_not_copied(pools, one_buffer):
    actual = pools(1).run(split_gradients, one_buffer)[0]
    assert torch.equal(actual["gradient"], actual["expected"])
    assert actual["concatenations"] == (0 if one_buffer else 1)


@pytest.mark.torture
def test_compiled_regions_replay_their_dropout(pools):
    """Recomputed layers draw the same masks, to the last bit."""
    state, batches, *_ = expected_steps()
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    results = {}
    for recomputed in ("none", "full"):
        train = {"recompute_granularity": recomputed, "fusion": "on"}
        config = steps_config(model=dropout, train=train)
        results[recomputed] = pools(1).run(tasks.train_steps, config, state, batches[:3])[0]
    assert results["full"]["losses"] == results["none"]["losses"]
    assert results["full"]["norms"] == results["none"]["norms"]


def test_compiled_regions_are_one_kernel_in_each_direction_and_change_nothing(pools):
    """Losses of three steps agree with AdamW's on one process as two orders of fp32 sums do.

    Kernels are counted by Inductor, for C++; the same graphs become Triton kernels on a GPU.
    """
    state, batches, losses, norms, _ = expected_steps()
    config = steps_config(train={"fusion": "on"})
    task = count_kernels, tasks.train_steps
    actual, num_kernels = pools(1).run(*task, config, state, batches[:3])[0]
    assert_losses_and_norms(actual, losses[:3], norms[:3])
    # One each way of bias-residual and of bias-GELU. The loss looks for a maximum and adds up
    # before it takes a logarithm: three forward, and one back.
    assert num_kernels == 8


@pytest.mark.torture
def test_layers_that_inductor_compiles_have_the_gradients_of_the_dense_reference(pools):
    """A learned table gets its gradient through attention's operation."""
    state, tokens, *_, gradients = expected_gradients("t5", 8)
    config = fused(variant_config("t5", 8, {}), fusion="layers")
    unclipped = config.optimizer.model_copy(update={"clip_grad": 0.0})
    config = config.model_copy(update={"optimizer": unclipped})
    task = count_kernels, tasks.gradients_seen_by_adam
    actual, num_kernels = pools(1).run(*task, config, state, tokens)[0]
    assert_close_by_name(actual, gradients, **TOLERANCE)
    assert num_kernels > 8, "only regions are compiled"


@pytest.mark.parametrize(
    ("variant", "layout", "recomputed", "graphs", "how"),
    [
        ("t5", "pp2", "none", [2, 5], [tasks.traced]),
        # The scores of one layer are a function, which autograd computes again by itself.
        ("hybrid", "one", "full", [8], [tasks.traced]),
    ],
)
def test_compiled_layers_are_one_graph_with_the_gradients_of_the_dense_reference(
    pools, variant, layout, recomputed, graphs, how
):
    """A learned table gets its gradient through attention's operation.

    Four layers share a graph. The logits, without a gradient, take one more, or two where hidden
    states of another stage come in; the loss takes two.
    """
    processes, parallel = ALL_LAYOUTS[layout]
    state, tokens, _, loss, gradients = expected_gradients(variant, 8)
    config = variant_config(variant, 8, parallel)
    config = fused(config, fusion="layers", recompute_granularity=recomputed)
    task = *how, compiled, tasks.gradients
    results = pools(processes).run(*task, config, state, tokens)
    actual = results[0][0]
    assert actual["loss"] == pytest.approx(loss, rel=1e-6)
    assert_close_by_name(actual["gradients"], gradients, **TOLERANCE)
    assert [found for _, found, _ in results] == graphs
    assert all((breaks, kept) == ({}, {}) for _, _, (breaks, kept) in results)


def test_attention_keeps_nothing_of_forward_passes_without_a_backward_pass(pools):
    """Compiled layers in training: a loss keeps all four layers' graphs, and only while it lives.

    Evaluation, with or without gradients, does not compile and keeps nothing.
    """
    state, tokens, *_ = expected_gradients("alibi", 8)
    config = fused(variant_config("alibi", 8, {}), fusion="layers")
    assert pools(1).run(tasks.traced, graphs_kept_by_forward_passes, config, state, tokens)[0] == {
        "training, with gradients": (4, 0),
        "training, without": (0, 0),
        "evaluation, with gradients": (0, 0),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_of_8_bits_are_those_of_the_cast_factors(precision):
    """Output and gradients against fp64, rounded once to the training precision."""
    from pretrain.model.loss import Float8Product

    dtype, generator = platform.DTYPES[precision], torch.Generator().manual_seed(8)
    x, w, g = (
        (torch.randn(*shape, generator=generator) * size).to(dtype)
        for shape, size in (((5, 3, 64), 3.0), ((48, 64), 0.02), ((5, 3, 48), 1e-6))
    )
    x.requires_grad_(), w.requires_grad_()
    out = Float8Product.apply(x, w)
    out.backward(g)

    def cast(tensor, kind):
        scale = tensor.detach().float().abs().max() / torch.finfo(kind).max
        return (tensor.detach().float() / scale).to(kind).double() * scale.double()

    eight, wide = cast(w, torch.float8_e4m3fn), cast(g, torch.float8_e5m2)
    rows = x.detach().double().flatten(0, 1)
    epsilon = torch.finfo(dtype).eps
    for actual, expected in (
        (out, cast(x, torch.float8_e4m3fn) @ eight.t()),
        (x.grad, wide @ eight),
        (w.grad, g.double().flatten(0, 1).t() @ rows),
    ):
        assert actual.dtype == dtype
        error = (actual.detach().double() - expected).abs().max()
        assert error < 2 * epsilon * expected.abs().max()
    # Four significant bits: the products differ from those of whole numbers, but by little.
    exact = rows @ w.detach().double().t()
    assert 0.01 < (out.detach().double().flatten(0, 1) - exact).norm() / exact.norm() < 0.06


@pytest.mark.parametrize("how", [[tasks.traced], pytest.param([], marks=pytest.mark.torture)])
def test_a_model_trains_with_products_of_8_bits_and_scores_without(pools, how):
    """Layers stay one graph. Losses follow those of AdamW in fp32 as far as four bits allow."""
    state, batches, losses, *_ = expected_steps()
    config = steps_config(train={"fusion": "layers", "fp8": True})
    # A CPU takes 40 ms for a product of 8 bits.
    task = *how, compiled, tasks.train_steps
    actual, graphs, (breaks, _) = pools(1).run(*task, config, state, batches[:2])[0]
    # One of the layers, two of the loss.
    assert (graphs, breaks) == (3, {})
    assert actual["losses"] == pytest.approx(losses[:2], rel=0.02)
    assert actual["losses"] != pytest.approx(losses[:2], rel=1e-5)
    # What was compiled for one kind of product is not taken for the other.
    plain = steps_config(train={"fusion": "layers"})
    actual = pools(1).run(*how, tasks.train_steps, plain, state, batches[:1])[0]
    assert actual["losses"] == pytest.approx(losses[:1], rel=1e-5)
    state, tokens, _, loss, _ = expected_gradients("alibi", 8)
    config = fused(variant_config("alibi", 8, {}), fusion="layers", fp8=True)
    evaluated = pools(1).run(*how, evaluated_loss, config, state, tokens)[0]
    assert evaluated == pytest.approx(loss, rel=1e-6)


# ---- tasks of the ranks --------------------------------------------------------------------------
def sum_of_weight_gradients(precision: str) -> tuple[Tensor, Tensor]:
    """Add two micro batches' weight gradients to a buffer, and compute the same sum in fp64.

    Args:
        precision: A value of train.precision.
    """
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


def steps_with_apex(config: RunConfig, state: dict[str, Tensor], batches: list[Tensor]) -> Any:
    """Train where Megatron has found APEX's extension, which NVIDIA's containers ship."""
    from megatron.core.tensor_parallel import layers

    def add(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.addmm_(grad_output.t(), inputs)

    apex = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    found = {"_grad_accum_fusion_available": True, "fused_weight_gradient_mlp_cuda": apex}
    with patch.multiple(layers, create=True, **found):
        return tasks.train_steps(config, state, batches)


def steps_with_the_product_of_a_gpu(
    config: RunConfig, state: dict[str, Tensor], batches: list[Tensor]
) -> tuple[Any, bool, list[str]]:
    """Train where a product that only a GPU has is tried on the CPU.

    Returns:
        What `tasks.train_steps` returns; whether products add weight gradients; what is logged.
    """

    from pretrain.model.gpt import choose_fusion

    def tried() -> bool:
        return platform._adds(torch.bfloat16, torch.device("cpu"))

    with (
        patch.object(platform, "can_accumulate_products", tried),
        TestCase().assertLogs("pretrain.kernels", "INFO") as log,
    ):
        found = tasks.train_steps(config, state, batches)
        return found, choose_fusion(config).weight_gradients, log.output


def compiled(task: Callable[..., Any], *arguments: Any) -> tuple[Any, int, tuple[Any, Any]]:
    """Return what a task returns, the number of graphs, their breaks, and what attention kept."""
    from torch._dynamo.utils import counters

    from pretrain.model import attention

    torch._dynamo.reset()
    counters.clear()
    found = task(*arguments)
    graphs = counters["stats"]["unique_graphs"]
    return found, graphs, (dict(counters["graph_break"]), dict(attention._GRAPHS))


def graphs_kept_by_forward_passes(
    config: RunConfig, state: dict[str, Tensor], tokens: Tensor
) -> dict[str, tuple[int, int]]:
    """Return how many graphs attention keeps of a forward pass: while its loss lives, and after."""
    from pretrain.model import attention
    from pretrain.model.forward import run_schedule

    # What a process compiles for one test would count towards torch's limit in others.
    torch._dynamo.reset()
    _, chunks = tasks._build_model_with(config, state)
    found = {}
    for name, training, wanted in (
        ("training, with gradients", True, True),
        ("training, without", True, False),
        ("evaluation, with gradients", False, True),
    ):
        chunks[0].train(training)
        with torch.set_grad_enabled(wanted):
            loss = run_schedule(chunks, [tokens], lambda x: (x.mean(), x), forward_only=True)
        kept = len(attention._GRAPHS)
        del loss
        found[name] = kept, len(attention._GRAPHS)
    torch._dynamo.reset()
    return found


def evaluated_loss(config: Any, state: dict[str, Tensor], tokens: Tensor) -> float:
    """Return the mean loss of a model that is switched to evaluation."""
    from pretrain.model.forward import run_schedule

    _, chunks = tasks._build_model_with(config, state)
    batches = [tokens]
    with torch.no_grad():
        chunks[0].eval()
        kept = run_schedule(chunks, batches, lambda x: (x.sum(), x.mean()), forward_only=True)
    return float(kept[0])


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


def count_kernels(task: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return what a task returns, and how many kernels Inductor makes for it."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    # Kernels from a cache are not counted. What the C++ compiler made is taken from its cache.
    with inductor.patch(fx_graph_cache=False), autograd.patch(enable_autograd_cache=False):
        return task(*arguments), metrics.generated_kernel_count


def losses_in_pieces(precision: str) -> dict[str, Any]:
    """Compute losses and gradients from logits of which only some rows are ever in fp32.

    Args:
        precision: A value of train.precision.

    Returns:
        "actual" and "expected" (torch's cross_entropy of fp32 logits): losses and gradients;
        "elements": elements of the largest fp32 tensor that existed, of 40 x 96 logits.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

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
