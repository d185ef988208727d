"""Check the counter: costs of operators, phases, synchronisations, and what the command prints."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from pretrain.config import ConfigError, load_config, num_parameters
from pretrain.plan.counter import Collective, Counter, Kernels, Phase
from pretrain.plan.operators import OpClass, num_launches
from pretrain.plan.step import count_run

KB = 1024  # an fp32 matrix of 16 x 16


@pytest.fixture
def x():
    return torch.ones(16, 16)


def costs(function):
    """{(class, operator): (launches, bytes read, bytes written)} of what a function runs."""
    with Counter() as counter:
        function()
    return {
        (kind, name): (cost.launches, cost.bytes_read, cost.bytes_written)
        for (_, kind, name), cost in counter.counts.kernels.items()
    }


@pytest.mark.parametrize(
    ("function", "kind", "name", "cost"),
    [
        (lambda x: x + 2 * torch.eye(16, device="cpu"), "elementwise", "add", (1, 2 * KB, KB)),
        (lambda x: x + x, "elementwise", "add", (1, KB, KB)),
        (lambda x: x @ x.clone(), "matmul", "mm", (1, 2 * KB, KB)),
        (lambda x: x.copy_(x.half()), "copy/cast", "copy_", (1, KB // 2, KB)),
        (lambda x: x.half(), "copy/cast", "_to_copy", (1, KB, KB // 2)),
        (lambda x: x.zero_(), "copy/cast", "zero_", (1, 0, KB)),
        (lambda x: x.mul_(2), "elementwise", "mul_", (1, KB, KB)),
        (lambda x: x.sum(), "reduction", "sum", (1, KB, 4)),
        (lambda x: torch.maximum(x, x), "elementwise", "maximum", (1, KB, KB)),
        (lambda x: torch.add(x, x, out=torch.empty_like(x)), "elementwise", "add", (1, KB, KB)),
        # A row that is expanded to a matrix is read once.
        (lambda x: x[0].expand(16, 16).clone(), "copy/cast", "clone", (1, 64, KB)),
        # Two rows of 64 bytes and two indices.
        (
            lambda x: F.embedding(torch.ones(2, dtype=torch.int64, device="cpu"), x),
            "embedding",
            "embedding",
            (1, 2 * 64 + 16, 2 * 64),
        ),
        (lambda x: F.layer_norm(x, (16,)), "norm", "native_layer_norm", (1, KB, KB + 2 * 64)),
        (lambda x: F.gelu(x), "elementwise", "gelu", (1, KB, KB)),
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
    assert cost == (1, 4 * KB + 4, 3 * KB)


@pytest.mark.parametrize(
    ("tensors", "launches"),
    [
        ([1] * 10, 1),
        # 110 tensors a launch for an operator on one list.
        ([1] * 221, 3),
        # 320 blocks of 65,536 elements a launch.
        ([320 * 65_536], 1),
        ([320 * 65_536 + 1], 2),
    ],
)
def test_launches_of_operators_on_lists(tensors, launches):
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
        assert counter.counts.synchronisations.total() == 0
        assert not counter.counts.kernels
        x.sum().item()
        x[0].tolist()
        bool(x[0, 0] > 0)
        torch.tensor([1.0], device="cpu")
    causes = [cause.split(" in ")[0] for _, cause in counter.counts.synchronisations.elements()]
    assert sorted(causes) == ["item", "item", "tensor from Python values", "tolist"]
    assert all(__name__ in cause for _, cause in counter.counts.synchronisations)


def test_a_kernel_that_the_dispatcher_does_not_see_writes_what_is_fresh(x):
    with Counter() as counter:
        out = torch.empty_like(x)
        counter.launch(OpClass.ATTENTION, "kernel", [x, out])
        counter.launch(OpClass.ATTENTION, "kernel", [x, out])
    cost = counter.counts.total(kind=OpClass.ATTENTION)
    assert (cost.launches, cost.bytes_read, cost.bytes_written) == (2, 3 * KB, KB)


@pytest.mark.parametrize(
    ("name", "size", "sent"),
    [
        ("allreduce", 4, 150.0),
        ("allgather_base", 4, 75.0),
        ("reduce_scatter_base", 4, 75.0),
        ("alltoall_base", 4, 75.0),
        ("send", 2, 100.0),
        ("recv", 2, 0.0),
        ("allreduce", 1, 0.0),
    ],
)
def test_what_a_rank_sends(name, size, sent):
    each = Collective(name, "data", size, "float32", 100, Phase.BACKWARD, asynchronous=True)
    assert each.wire_bytes == sent


@pytest.mark.parametrize(
    ("asynchronous", "hidden_behind", "exposed"),
    [
        (False, Kernels(), True),
        (True, Kernels(), True),
        (True, Kernels(launches=3), False),
        (True, None, False),
    ],
)
def test_what_is_exposed(asynchronous, hidden_behind, exposed):
    each = Collective("send", "data", 2, "float32", 1, Phase.BACKWARD, asynchronous, hidden_behind)
    assert each.is_exposed is exposed


def test_a_rank_of_128_in_one_process():
    """The 1.3B run, with fewer layers: its collectives and its matrix products in closed form."""
    config = load_config(
        "configs/cc100_roberta/alibi_1024.toml",
        ["model.num_layers=1", "batch.global_batch_size=256"],
    )
    [counts] = count_run(config).values()
    # In each layer four products; the logits are one more. The backward pass has two for each.
    products = {
        phase: counts.total(phase, OpClass.MATMUL).launches
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert products == {Phase.FORWARD: 5, Phase.BACKWARD: 10}
    # The Triton kernels: norms and forward; delta, dk and dv, dq.
    kernels = {
        name: cost.launches
        for (_, kind, name), cost in counts.kernels.items()
        if kind == OpClass.ATTENTION
    }
    assert kernels == dict.fromkeys(
        ("norms_kernel", "forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"), 1
    )
    data = [each for each in counts.collectives if each.group == "data"]
    assert {each.group_size for each in data} == {128}
    sent = sum(each.wire_bytes for each in data if "gather" in each.name)
    assert sent == pytest.approx(2 * num_parameters(config) * 127 / 128, rel=1e-6)


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    from pretrain.cli import app

    small = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2"]
    small += ["model.ffn_hidden_size=64", "data.sequence_length=16", "batch.micro_batch_size=1"]
    small += ["batch.global_batch_size=2", "parallel.world_size=2"]
    settings = [argument for each in small for argument in ("--set", each)]
    file = tmp_path / "step.json"
    result = CliRunner().invoke(
        app,
        ["bench", "step", "configs/demo.toml", *settings, "--count", "--json", str(file)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    for text in ("gradient reduction", "a micro batch: ", "the host waits", "data (2)"):
        assert text in result.output
    counted = json.loads(file.read_text())
    assert counted["layout"]["data"] == 2
    [stage] = counted["stages"]
    assert {each["phase"] for each in stage["kernels"]} >= {"forward", "backward"}
    assert any(each["group"] == "world" for each in stage["collectives"])
    assert sum(each["times"] for each in stage["synchronisations"]) > 0


def test_the_command_says_what_it_needs():
    from pretrain.cli import app

    with pytest.raises(ConfigError, match="Add --count"):
        CliRunner().invoke(app, ["bench", "step", "configs/demo.toml"], catch_exceptions=False)
