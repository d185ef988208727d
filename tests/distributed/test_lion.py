"""An optimizer is one class: Lion trains, is saved, goes on in another layout and is planned."""

from __future__ import annotations

import pytest
import torch

from pretrain.checkpoint.load import load_global_state
from pretrain.checkpoint.manifest import open_checkpoint
from pretrain.checkpoint.tools import show_source
from pretrain.config import ConfigError, dump_config, load_config, parse_config
from pretrain.config.trajectory import differences
from pretrain.optim.optimizers import learning_rate
from pretrain.plan.command import planned, read_target
from pretrain.plan.memory import stages_of
from pretrain.rundir.checkpoints import find_checkpoint
from tests.conftest import ALL_LAYOUTS, TINY, directories, tiny_config
from tests.distributed import tasks
from tests.distributed.lion import Lion  # registers it, in the workers by way of the config
from tests.reference.dense_gpt import DenseGPT, is_decayed, learnable_batches, random_state

LION = {"name": "lion", "learning_rate": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
STEPS = 8


def dense(config, state) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process in fp64, by the formula, without any of our optimizer."""
    model = DenseGPT(config).load_global_state(state).double()
    named = dict(model.named_parameters())
    momenta = {name: torch.zeros_like(p) for name, p in named.items()}
    losses = []
    for step, ids in enumerate(learnable_batches(STEPS)):
        model.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(named.values(), LION["clip_grad"])
        rate = learning_rate(config, step)
        for name, p in named.items():
            m, decay = momenta[name], LION["weight_decay"] * is_decayed(name, p)
            with torch.no_grad():
                p -= rate * (torch.sign(0.9 * m + 0.1 * p.grad) + decay * p)
            momenta[name] = 0.99 * m + 0.01 * p.grad
    return losses, {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("layout", ["dp2", "zero2-dp2"])
def test_steps_equal_the_plain_formula(pools, layout):
    """A weight is off by rates where the gradient is rounding, as that of keys' biases, which are a
    five-hundredth of all: softmax does not see them.
    """
    processes, parallel = ALL_LAYOUTS[layout]
    config = tiny_config(model={"num_layers": 2}, parallel=parallel, optimizer=LION)
    state = random_state(config, seed=11)
    losses, weights = dense(config, state)
    actual = pools(processes).run(tasks.train_steps, config, state, learnable_batches(STEPS))[0]
    assert actual["losses"] == pytest.approx(losses, rel=2e-5)
    assert losses[-1] < losses[0] - 0.1, "nothing was learned, so nothing was compared"
    off = torch.cat([(actual["weights"][n] - w).abs().flatten() for n, w in weights.items()])
    assert (off > 1e-6).double().mean() < 4e-3
    assert off.max() <= 2.1 * sum(learning_rate(config, step) for step in range(STEPS))


def test_its_state_is_saved_and_resumed_in_another_layout(pools, tiny_data, tmp_path):
    def config(name, parallel):
        return tiny_config(
            **directories(tmp_path / name, tiny_data),
            model={"num_layers": 2},
            parallel=parallel,
            batch={"micro_batch_size": 4},
            optimizer=LION,
        )

    expected = pools(2).run(tasks.continue_run, config("whole", {}), "auto", 3)[0]
    losses = []
    for layout, until in (("zero3-dp2", 1), ("tp2pp2sp", 2), ("dp2", 3)):
        processes, parallel = ALL_LAYOUTS[layout]
        part = pools(processes).run(tasks.continue_run, config("moving", parallel), "auto", until)
        assert part[0]["began"] == until - 1
        losses += part[0]["losses"]
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    whole, moved = (find_checkpoint(tmp_path / name) for name in ("whole", "moving"))
    a, b = (load_global_state(open_checkpoint(each)) for each in (whole, moved))
    off = torch.cat([(a[name] - b[name]).abs().flatten() for name in a])
    assert (off > 1e-6).double().mean() < 4e-3
    kinds = {name.partition("/")[0] for name in open_checkpoint(moved).index.tensors}
    assert kinds == {"master", "lion_momentum"}
    shown = show_source(moved)
    assert "3 by Lion" in shown and "momentum of Lion" in shown


def test_an_update_that_is_left_out_changes_nothing():
    from pretrain.optim.zero import FlatOptimizer

    weights = torch.nn.Parameter(torch.randn(7, generator=torch.Generator().manual_seed(1)))
    optimizer = FlatOptimizer(Lion(learning_rate=0.1), [{"params": [weights], "weight_decay": 0.1}])
    before = weights.detach().clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    weights.grad = torch.full_like(weights, float("nan"))
    optimizer.step()
    state = optimizer.state[weights]
    assert torch.equal(weights, before) and not state["lion_momentum"].any() and not state["step"]
    optimizer.found_inf = torch.tensor(0.0)
    weights.grad = torch.full_like(weights, 8.0)
    optimizer.step()
    torch.testing.assert_close(weights.detach(), before * 0.99 - 0.1)
    torch.testing.assert_close(state["lion_momentum"], torch.full_like(before, 0.02))
    assert int(state["step"]) == 1


def test_its_keys_are_its_own_and_its_costs_are_planned(tmp_path):
    lion, adamw = tiny_config(optimizer=LION), tiny_config()
    (tmp_path / "run.toml").write_text(dump_config(lion))
    assert load_config(tmp_path / "run.toml") == lion and lion.optimizer.lion_beta2 == 0.99
    with pytest.raises(
        ConfigError, match='"lion" has the keys lion_beta1, lion_beta2 and not this one'
    ):
        tiny_config(optimizer={**LION, "adam_beta1": 0.5})
    # Its keys come with its name, which is reported.
    changed = {d.key for d in differences(lion, adamw)}
    assert "optimizer.name" in changed and not any("lion" in key for key in changed)
    target = read_target(8, "h200")
    found = {}
    for name in ("lion", "nag", "adamw"):
        tables = {**TINY, "optimizer": {**TINY["optimizer"], "name": name}}
        run = parse_config(tables | {"train": {"num_steps": 20, "precision": "bf16"}}, "lion")
        layout = run.layout(4)
        found[name] = planned(run, layout, stages_of(run, layout), target)
    # Of each parameter 4 bytes less than AdamW keeps; AdamW moves 8 more bytes.
    elements = sum(b.num_elements for b in stages_of(lion, lion.layout(4))[0].buckets)
    less = found["adamw"].memory.optimizer - found["lion"].memory.optimizer
    assert less == found["adamw"].memory.optimizer - found["nag"].memory.optimizer == elements
    times = {name: each.timing.lines["optimizer"] for name, each in found.items()}
    # Norm and cast 10; AdamW 32; NAG 24 and its decay 8; Lion 24.
    assert times["lion"] / times["adamw"] == pytest.approx(34 / 42)
    assert times["nag"] == times["adamw"]
