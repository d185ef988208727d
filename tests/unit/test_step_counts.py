"""Check the counter: costs of operators, phases, synchronizations, and what the command prints."""

from __future__ import annotations

import functools
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from pretrain.config import RunConfig, load_config, num_parameters
from pretrain.model import num_matmul_parameters
from pretrain.plan import simulation
from pretrain.plan.command import read_target
from pretrain.plan.memory import buckets_of_rank, stages_of
from pretrain.plan.operators import (
    Collective,
    Counter,
    Kernels,
    OpClass,
    Phase,
    StepCounts,
    num_launches,
)
from pretrain.plan.simulation import PASSES, count_run
from pretrain.plan.timing import MODERN, OF_V100, Step

KB = 1024  # an fp32 matrix of 16 x 16


@pytest.fixture
def x():
    return torch.ones(16, 16)


def costs(function):
    """{(class, operator): (launches, bytes read and written)} of what a function runs."""
    with Counter() as counter:
        function()
    return {
        (kind, name): (cost.launches, cost.bytes_moved)
        for (_, kind, name), cost in counter.counts.kernels.items()
    }


@pytest.mark.parametrize(
    ("function", "kind", "name", "cost"),
    [
        (lambda x: x + 2 * torch.eye(16, device="cpu"), "elementwise", "add", (1, 3 * KB)),
        (lambda x: x @ x.clone(), "matmul", "mm", (1, 3 * KB)),
        (lambda x: x.copy_(x.half()), "copy/cast", "copy_", (1, KB // 2 + KB)),
        (lambda x: x.zero_(), "copy/cast", "zero_", (1, KB)),
        (lambda x: x.mul_(2), "elementwise", "mul_", (1, 2 * KB)),
        (lambda x: x.sum(), "reduction", "sum", (1, KB + 4)),
        (lambda x: torch.add(x, x, out=torch.empty_like(x)), "elementwise", "add", (1, 2 * KB)),
        # A row that is expanded to a matrix is read once.
        (lambda x: x[0].expand(16, 16).clone(), "copy/cast", "clone", (1, 64 + KB)),
        # Two rows of 64 bytes and two indices.
        (
            lambda x: F.embedding(torch.ones(2, dtype=torch.int64, device="cpu"), x),
            "embedding",
            "embedding",
            (1, 4 * 64 + 16),
        ),
        (lambda x: F.layer_norm(x, (16,)), "norm", "native_layer_norm", (1, 2 * KB + 2 * 64)),
    ],
)
def test_what_an_operator_costs(x, function, kind, name, cost):
    assert costs(lambda: function(x))[OpClass(kind), name] == cost


def test_views_and_allocations_launch_nothing(x):
    def free():
        x.view(-1), x.t(), x[0], x.split(4), x.expand(2, 16, 16), x.detach(), x.reshape(4, 64)
        torch.empty_like(x), x.new_empty(3), x.contiguous(), x.unsqueeze(0), x[:0].clone()

    assert costs(free) == {}


def test_the_fused_optimizer_reads_four_tensors_and_writes_three(x):
    weight = torch.nn.Parameter(x)
    weight.grad = torch.ones_like(x)
    adam = torch.optim.AdamW([weight], fused=True)
    adam.step()
    [cost] = [cost for key, cost in costs(adam.step).items() if key[0] == OpClass.OPTIMIZER]
    # Besides: the count of steps, 4 bytes.
    assert cost == (1, 7 * KB + 4)


def test_launches_of_operators_on_lists():
    """110 tensors a launch for an operator on one list, and 320 blocks of 65,536 elements."""
    for tensors, launches in (([1] * 221, 3), ([320 * 65_536], 1), ([320 * 65_536 + 1], 2)):
        lists = [torch.empty(numel, device="meta") for numel in tensors]
        assert num_launches(torch.ops.aten._foreach_mul_.Scalar, (lists, 2.0)) == launches


def test_phases_follow_markers_and_autograd(x):
    """A hook of the backward pass and a recomputed forward pass belong to the backward pass."""
    weight = x.clone().requires_grad_()

    def negate(parameter):
        parameter.grad.neg_()

    weight.register_post_accumulate_grad_hook(negate)
    with Counter() as counter:
        with counter.during(Phase.FORWARD):
            loss = checkpoint(lambda w: w.exp().sin().sum(), weight, use_reentrant=False)
            loss.backward()
        with counter.during(Phase.OPTIMIZER_STEP):
            weight.data.sub_(weight.grad)
        with counter.paused():
            x.exp()
    launches = {
        (phase.value, name): cost.launches
        for (phase, _, name), cost in counter.counts.kernels.items()
    }
    assert launches["forward", "exp"] == launches["backward", "exp"] == 1
    assert launches["backward", "neg_"] == launches["backward", "cos"] == 1
    assert launches["optimizer step", "sub_"] == 1
    assert ("other", "exp") not in launches


def test_the_host_waits_for_values_of_the_device_alone(x):
    with Counter() as counter:
        torch.tensor(1.0).add_(1).item()
        torch.zeros(3).tolist()
        assert counter.counts.synchronizations.total() == 0
        assert not counter.counts.kernels
        x.sum().item()
        x[0].tolist()
        bool(x[0, 0] > 0)
        torch.tensor([1.0], device="cpu")
    causes = [cause.split(" in ")[0] for _, cause in counter.counts.synchronizations.elements()]
    assert sorted(causes) == ["item", "item", "tensor from Python values", "tolist"]
    assert all(__name__ in cause for _, cause in counter.counts.synchronizations)


def test_what_a_rank_sends_and_what_shows():
    def each(name, size=4, asynchronous=True, behind=None):
        return Collective(name, "data", size, "float32", 100, Phase.BACKWARD, asynchronous, behind)

    names = ("allreduce", "allgather_base", "reduce_scatter_base", "alltoall_base")
    assert [each(name).wire_bytes for name in names] == [150.0, 75.0, 75.0, 75.0]
    assert [each(name, 2).wire_bytes for name in ("send", "recv")] == [100.0, 0.0]
    assert each("allreduce", 1).wire_bytes == 0
    assert each("send", 2, asynchronous=False, behind=0).is_exposed
    assert [each("send", 2, behind=n).is_exposed for n in (0, 3, None)] == [True, False, False]


LARGE = "configs/cc100_roberta/alibi_1024.toml"
PAGE = " ".join(Path("docs/performance.md").read_text().split())
TOKENS = 4 * 1024
"""Tokens of the one micro batch that a rank of `large` passes."""


OF_GPU = {"h200": ("bf16", 4, (9, 0)), "v100-32": ("fp16", 2, (7, 0))}
"""Precision, sequences in a micro batch and compute capability. V100s: those of the paper's run."""


@functools.cache
def large(
    num_layers: int,
    position: str = "alibi",
    percent: float = 1.0,
    optimizer: str = "adamw",
    model: tuple[str, ...] = (),
    gpu: str = "h200",
) -> tuple[RunConfig, StepCounts]:
    """The 1.3B run in 16 bit with few layers, on one of 128 ranks.

    Give nothing that is the default: a run is counted again for other arguments.
    """
    name = [f"optimizer.name={optimizer}", f"position.method={position}", *model]
    if optimizer != "adamw":
        name += ["optimizer.adam_beta2=", "optimizer.adam_eps="]
    if position == "rotary":
        name += [f"position.rotary_percent={percent}"]
    precision, sequences, capability = OF_GPU[gpu]
    batch = [f"batch.micro_batch_size={sequences}", f"batch.global_batch_size={128 * sequences}"]
    settings = [f"train.precision={precision}", *batch, f"model.num_layers={num_layers}"]
    config = load_config(LARGE, [*settings, *name])
    # Nobody looks at the weights, and drawing a hundred million of them takes a second.
    undrawn = patch.object(torch.Tensor, "normal_", lambda tensor, *_, **named: tensor)
    with patch.object(simulation, "CAPABILITY", capability), undrawn:
        [counts] = count_run(config).values()
    return config, counts


@pytest.mark.parametrize("changes", [{}, {"optimizer": "nag"}], ids=["adamw", "nag"])
def test_a_rank_of_128_in_one_process(changes):
    """Buckets, matrix products and the optimizer in closed form."""
    config, counts = large(1, **changes)
    # In each layer four products; the logits are one more. The backward pass has two for each.
    products = {
        phase: counts.total(phase, OpClass.MATMUL).launches
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert products == {Phase.FORWARD: 5, Phase.BACKWARD: 10}
    reduced = [each for each in counts.collectives if each.name.startswith("reduce_scatter")]
    padded = sum(each.num_bytes for each in reduced) // 4
    # Each bucket is padded to a multiple of twice the ranks, so that all parts are aligned.
    assert 0 <= padded - num_parameters(config) < len(reduced) * 2 * 128
    # Norm 4, cast 6, AdamW 32 or NAG 24 bytes a parameter of the shard, and NAG's weight decay 8 of
    # all but biases and norms.
    moved = counts.total(Phase.OPTIMIZER_STEP).bytes_moved
    known = (10 + config.optimizer.update_bytes) * padded // 128
    assert moved == pytest.approx(known, abs=4000)


def test_what_fused_kernels_move():
    """As counted with Inductor on a CPU: kB a token at hidden size 2,048, in 16 bit."""
    _, counts = large(1, model=BIASES)

    def kilobytes(name: str) -> float:
        # Beside the passes, the checks of the memory take sums.
        passes = [counts.total(phase, name=name) for phase in (Phase.FORWARD, Phase.BACKWARD)]
        return sum(each.bytes_moved for each in passes) / TOKENS / 1e3

    assert kilobytes("bias_gelu") == pytest.approx(32.8, rel=2e-3)
    # The second kernel of the backward pass is the sum for the bias, which torch's engine adds. The
    # bias of qkv has one over 3 d.
    assert kilobytes("bias_gelu_back") == pytest.approx(65.7 - 16.4, rel=5e-3)
    assert kilobytes("sum") == pytest.approx(16.4 + 12.3, rel=2e-3)
    assert kilobytes("bias_dropout_add") == pytest.approx(2 * 12.3, rel=2e-3)
    assert kilobytes("bias_gradient") == pytest.approx(2 * 4.1, rel=2e-3)
    logits = 50_304 / 1e3
    assert kilobytes("compiled_statistics") == pytest.approx(2 * logits, rel=1e-3)
    assert kilobytes("compiled_gradient") == pytest.approx(4 * logits, rel=1e-3)


BIASES = ("model.use_bias=true", "model.hidden_act=gelu_pytorch_tanh")
BETWEEN_PRODUCTS = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.NORM, OpClass.REDUCTION)


def cost(counts: StepCounts, *kinds: OpClass) -> Kernels:
    """The kernels of a forward and a backward pass, of all kinds or of some."""
    result = Kernels()
    for phase in PASSES:
        for kind in kinds or OpClass:
            part = counts.total(phase, kind)
            result.add(part.launches, part.bytes_moved)
    return result


@pytest.mark.parametrize(
    ("gpu", "model", "launches"),
    [("h200", (), 789), ("h200", BIASES, 1065), ("v100-32", (), 1257), ("v100-32", BIASES, 1608)],
)
def test_the_model_of_a_step_takes_what_is_counted(gpu, model, launches):
    """docs/performance.md: launches and bytes of a micro batch, and of what is between products."""
    is_modern = gpu == "h200"
    changes = {"model": model} if model else {}
    changes |= {} if is_modern else {"gpu": gpu}
    (config, one), (_, two) = large(1, **changes), large(2, **changes)
    costs = MODERN if is_modern else OF_V100

    assert cost(one).launches + 24 * (cost(two).launches - cost(one).launches) == launches
    assert f"{launches:,} launches" in PAGE or not is_modern
    modelled = costs.launches + costs.bias_launches * bool(model)
    assert 25 * modelled == pytest.approx(launches, rel=2e-3)
    if is_modern and not model:
        moved = 24 * cost(two).bytes_moved - 23 * cost(one).bytes_moved
        # The first micro batch does not read the sums that the later ones add to.
        overwritten = 4 * num_matmul_parameters(load_config(LARGE)) / 1e9
        assert moved / 1e9 == pytest.approx(65.25 - overwritten, rel=1e-2)
        assert f"{launches} launches and {moved / 1e9:.1f} GB a micro batch" in PAGE
    parts = [cost(each, *BETWEEN_PRODUCTS).bytes_moved for each in (one, two)]
    # Two bytes for each of the 2,048 channels of every token.
    element = 4096 * 1024 * config.batch.micro_batch_size
    elements = (parts[1] - parts[0]) / element
    # Norms read their inputs twice in the backward pass, of which the counter knows nothing.
    known = costs.stream + costs.mlp + costs.biases * bool(model) + costs.columns - 4
    if not is_modern:
        # Gradients of a layer's weights are copied to fp32.
        known += costs.first_sum * 12 * 2048**2 / element
    assert elements == pytest.approx(known, rel=2e-3)


def test_the_page_says_what_is_counted_between_ranks():
    """Buckets of 25 layers are those of the plan, which are counted of 1 and 2 layers."""
    for layers in (1, 2):
        config, counts = large(layers)
        reduced = [c for c in counts.collectives if c.name.startswith("reduce_scatter")]
        gathered = [c for c in counts.collectives if c.phase == Phase.WEIGHT_GATHER]
        buckets = len(buckets_of_rank(config, config.layout(128), 0))
        assert len(reduced) == len(gathered) == buckets
        assert {c.phase for c in reduced} == {Phase.BACKWARD}
        exposed, waits = sum(c.is_exposed for c in reduced), counts.synchronizations.total()
        assert (exposed, waits, sum(c.is_exposed for c in gathered)) == (1, 1, 0)
    whole = load_config(LARGE)
    buckets = len(buckets_of_rank(whole, whole.layout(128), 0))
    assert f"{buckets} reductions begin within the backward pass, and {exposed} of them" in PAGE
    assert f"{buckets} gathers, and {waits} wait of the host" in PAGE


@pytest.mark.parametrize("position", [("none", 1.0), ("rotary", 1.0), ("rotary", 0.25)])
def test_the_model_of_a_step_knows_what_positions_cost(position):
    """Beside ALiBi's layer, whose kernel does all of it: elements moved, and launches."""

    def layer(*position: object) -> tuple[float, int, Step]:
        (config, one), (_, two) = (large(n, *position) for n in (1, 2))
        layout = config.layout(128)
        target = read_target(128, "h200")
        step = Step(config, layout, stages_of(config, layout)[0], target)
        moved = [cost(each, *BETWEEN_PRODUCTS).bytes_moved for each in (one, two)]
        return (
            (moved[1] - moved[0]) / (4096 * TOKENS),
            cost(two).launches - cost(one).launches,
            step,
        )

    (elements, launches, step), (usual, few, alibi) = layer(*position), layer()
    assert step.elements(step.config.position) - alibi.elements(
        alibi.config.position
    ) == pytest.approx(elements - usual, rel=2e-3)
    gaps = [each.compute_lines["gaps between kernels"] for each in (step, alibi)]
    # Two or three more where heads are rotated in part, or without our kernel.
    added = (gaps[0] / gaps[1] - 1) * MODERN.launches
    assert added == pytest.approx(launches - few, abs=3)
    if position == ("rotary", 1.0):
        assert f"{elements - usual:.0f} elements of width d more, and {launches - few} l" in PAGE


def test_the_command_prints_a_table():
    from pretrain.cli.commands import app

    small = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2"]
    small += ["model.ffn_hidden_size=64", "data.sequence_length=16", "batch.micro_batch_size=1"]
    small += ["batch.global_batch_size=2", "parallel.world_size=2"]
    settings = [argument for each in small for argument in ("--set", each)]
    words = ["bench", "step", "configs/demo.toml", *settings]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    for text in ("optimizer step", "a micro batch: ", "the host waits", "data (2)"):
        assert text in result.output
