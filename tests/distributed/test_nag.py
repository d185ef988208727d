"""The published recipe of WikiText-103: NAG, dropout of activations and no final LayerNorm.

NAG's updates are linear in the gradients, so weights are compared within the rounding of sums.
"""

from __future__ import annotations

import functools

import pytest
import torch

from pretrain.optim.optimizers import learning_rate
from tests.conftest import ALL_LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.distributed.test_parallel_equals_dense import assert_close_by_name
from tests.reference.dense_gpt import (
    DenseGPT,
    is_decayed,
    learnable_batches,
    random_state,
    train_dense,
)
from tests.reference.nag import FairseqNAG

STEPS = 20
NAG = {"name": "nag", "learning_rate": 0.05, "momentum": 0.9, "clip_grad": 0.1}
WARMUP = {"lr_decay_style": "cosine", "lr_warmup_steps": 4, "lr_warmup_init": 1e-7}
RECIPE = {
    "model": {"final_layernorm": False, "hidden_act": "relu"},
    "optimizer": NAG,
    "schedule": {**WARMUP, "min_learning_rate": 1e-4},
}


@functools.cache
def _expected():
    config = tiny_config(**RECIPE)
    state = random_state(config, seed=11)
    rates = [learning_rate(config, step) for step in range(STEPS)]
    return state, *train_dense(config, state, learnable_batches(STEPS), rates)


def test_steps_equal_fairseqs_formula(pools):
    """On two ranks; how ZeRO shards an optimizer is shown by the tests of AdamW and Lion."""
    state, losses, norms, weights = _expected()
    config = tiny_config(**RECIPE)
    actual = pools(2).run(tasks.train_steps, config, state, learnable_batches(STEPS))[0]
    assert actual["losses"] == pytest.approx(losses, rel=2e-5)
    assert actual["norms"] == pytest.approx(norms, rel=2e-4)
    assert losses[-1] < losses[0] - 0.2, "nothing was learned, so nothing was compared"
    assert max(norms) > config.optimizer.clip_grad, "nothing was clipped"
    assert "decoder.final_layernorm.weight" not in weights
    assert_close_by_name(actual["weights"], weights, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("layout", "recompute"), [("tp2sp", "full"), ("dp2", "none")])
def test_activations_are_dropped_by_the_masks_of_each_rank(pools, layout, recompute):
    """The dense reference with the masks that the ranks' generators give: losses and updates."""
    processes, parallel = ALL_LAYOUTS[layout]
    data = 1 if layout.startswith("tp2") else 2
    model = {**RECIPE["model"], "activation_dropout": 0.3}
    recipe = {**RECIPE, "model": model, "train": {"recompute_granularity": recompute}}
    config = tiny_config(parallel=parallel, **recipe, batch={"micro_batch_size": 8 // data})
    state, given = random_state(config, seed=11), learnable_batches(3)
    masks = pools(processes).run(tasks.activation_masks, config, 3)[0]
    actual = pools(processes).run(tasks.train_steps, config, state, given)[0]
    dense = DenseGPT(config).load_global_state(state)
    named = dict(dense.named_parameters())
    groups = [
        {"params": [p], "weight_decay": config.optimizer.weight_decay * is_decayed(name, p)}
        for name, p in named.items()
    ]
    optimizer = FairseqNAG(groups, config.optimizer.momentum)
    losses = []
    for step, ids in enumerate(given):
        dense.activation_masks = masks[step]
        optimizer.zero_grad()
        loss = dense.loss(ids)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(named.values(), config.optimizer.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
    assert actual["losses"] == pytest.approx(losses, rel=2e-6)
    for name, expected in named.items():
        torch.testing.assert_close(actual["weights"][name], expected, rtol=0, atol=2e-6)
    _check_statistics(masks, config.model.activation_dropout)


def _check_statistics(masks: list[list[torch.Tensor]], p: float) -> None:
    """Masks keep a share of 1 - p, and those of two steps, layers, halves of ranks are unrelated.

    Each bound is five standard errors of a mean of independent draws.
    """
    every = torch.stack([mask for step in masks for mask in step])
    kept = (every != 0).double()
    assert torch.equal(every, (kept / (1 - p)).float())
    assert abs(kept.mean() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    agreement = p**2 + (1 - p) ** 2
    channels, rows = kept.shape[-1] // 2, kept.shape[1] // 2
    pairs = [
        (kept[..., :channels], kept[..., channels:]),
        (kept[:, :rows], kept[:, rows:]),
        (kept[:-1], kept[1:]),
    ]
    for a, b in pairs:
        bound = 5 * (agreement * (1 - agreement) / a.numel()) ** 0.5
        assert abs((a == b).double().mean() - agreement) < bound


def test_an_evaluation_drops_nothing(pools):
    plain, dropping = tiny_config(), tiny_config(model={"activation_dropout": 0.5})
    state, tokens = random_state(plain, seed=3), learnable_batches(1)[0]
    with_it, without = (
        pools(1).run(tasks.evaluated_logits, config, state, tokens)[0]
        for config in (dropping, plain)
    )
    assert torch.equal(with_it, without)
