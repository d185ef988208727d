"""NAG against fairseq's formula in fp64."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch

from pretrain.optim.optimizers import NAG, OPTIMIZERS
from pretrain.optim.zero import FlatOptimizer
from tests.reference.nag import FairseqNAG

SHAPES = [(7,), (5, 3), (1,)]


def made(seed: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def groups(parameters: list[torch.nn.Parameter], decay: float) -> list[dict]:
    """Of which one is empty, as DeepSpeed's ZeRO 3 leaves them, and one is not decayed."""
    return [
        {"params": parameters[:1], "weight_decay": 0.0},
        {"params": [], "weight_decay": decay},
        {"params": parameters[1:], "weight_decay": decay},
    ]


def nag(groups: list[dict], lr: float, momentum: float) -> FlatOptimizer:
    return FlatOptimizer(NAG(learning_rate=lr, momentum=momentum), groups)


def pull(weights: list[torch.nn.Parameter], target: torch.Tensor) -> None:
    """Give every weight the gradient of a function of all of them, so that errors would grow."""
    for w in weights:
        w.grad = (w.detach() - target + w.detach().sin()).to(w.dtype)


@pytest.mark.parametrize("seed", range(20))
def test_any_schedule_gives_what_fairseqs_formula_gives(seed):
    """In fp64, whatever the rates; a warm-up may begin at 0, and a rate of 0 stand in between.

    The buffers are of different kinds, so that this is algebra and no repetition.
    """
    chance = random.Random(seed)
    momentum = chance.choice([0.5, 0.9, 0.99])
    decay = chance.choice([0.0, 0.1])
    rates = [chance.choice([0.0, 1e-7])] + [10 ** chance.uniform(-4, -1.5) for _ in range(60)]
    rates[30] = chance.choice([0.0, rates[30]])
    ours, theirs = made(seed, torch.float64), made(seed, torch.float64)
    optimizer = nag(groups(ours, decay), lr=1.0, momentum=momentum)
    oracle = FairseqNAG(groups(theirs, decay), momentum)
    for step, rate in enumerate(rates):
        for each, weights in ((optimizer, ours), (oracle, theirs)):
            pull(weights, torch.tensor(float(step % 5), dtype=torch.float64))
            for group in each.param_groups:
                group["lr"] = rate
            each.step()
    for a, b in zip(ours, theirs):
        # 61 updates of 1e-16 each, grown by the momentum.
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(ours, made(seed, torch.float64)))


@pytest.mark.parametrize("first", [True, False])
def test_an_update_that_is_left_out_changes_nothing(first):
    """Neither weights nor momentum nor the count, and weights are not decayed."""
    weights = made(1, torch.float32)
    optimizer = nag(groups(weights, 0.5), lr=0.1, momentum=0.9)
    if not first:
        pull(weights, torch.tensor(1.0))
        optimizer.step()
    before = [w.detach().clone() for w in weights]
    kept = [optimizer.state[w]["momentum_buffer"].clone() for w in weights] if not first else []
    for w in weights:
        w.grad = torch.full_like(w, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights))
    for number, w in enumerate(weights):
        state = optimizer.state[w]
        expected = torch.zeros_like(w) if first else kept[number]
        assert torch.equal(state["momentum_buffer"], expected)
        assert int(state["step"]) == (0 if first else 1)
    # And the next one divides the gradient.
    optimizer.found_inf = torch.tensor(0.0)
    g = torch.ones_like(weights[0])
    weights[0].grad = 4 * g
    buffer = 0.9 * optimizer.state[weights[0]]["momentum_buffer"] + g
    expected = weights[0].detach() - 0.1 * (g + 0.9 * buffer)
    optimizer.step()
    torch.testing.assert_close(weights[0].detach(), expected, rtol=1e-6, atol=1e-7)


def test_no_other_module_knows_an_optimizer_by_name():
    """Neither "adamw" nor "nag" stands as a word in the code of another room."""
    root = Path(__file__).parents[2]
    found = []
    for path in [*(root / "pretrain").rglob("*.py"), *(root / "launcher").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in OPTIMIZERS:
                found.append(path.relative_to(root).as_posix())
    assert set(found) == {"pretrain/optim/optimizers.py"}
