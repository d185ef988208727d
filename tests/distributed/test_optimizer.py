"""Twenty ZeRO steps in every layout equal those of a single process without any of it.

The reference is a dense model, clipping by the global norm and torch.optim.AdamW.
"""

from __future__ import annotations

import functools

import pytest
import torch

from pretrain.optim.schedule import learning_rate
from tests.conftest import LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.reference.dense_gpt import random_state, train_dense

STEPS = 20
# The gradients of both sides differ by rounding (test_parallel_equals_dense.py). Adam divides by
# the root of the second moment, so where a gradient is near zero the *direction* of an update is
# rounding too: a weight may then be off by a share of the learning rate (1e-3) per step. Losses and
# norms are means over all weights and stay near fp32 noise.
LOSS = {"rel": 2e-5}
NORM = {"rel": 2e-4}
WEIGHT = {"rtol": 0, "atol": 5e-4}

ZERO_LAYOUTS = {
    "zero2-dp2": (2, {"zero_stage": 2}),
    "zero3-dp2": (2, {"zero_stage": 3}),
    "zero2-tp2sp-dp2": (
        4,
        {"zero_stage": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "zero3-tp2sp-dp2": (
        4,
        {"zero_stage": 3, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "zero1-tp2-dp2": (4, {"tensor_model_parallel_size": 2}),
    "zero1-pp2-dp2": (4, {"pipeline_model_parallel_size": 2}),
}
# What a position method learns per head is shared by layers and stages, so a mistake would hide in
# its gradient and in its share of the norm.
METHODS = {
    "alibi": {"position": {"method": "alibi"}},
    "alibi-trainable": {"position": {"method": "alibi", "trainable_slopes": True}},
    "t5": {"position": {"method": "t5"}},
    "learned-untied": {
        "position": {"method": "learned"},
        "model": {"tie_word_embeddings": False},
        "evaluation": {"lengths": [32]},
    },
}
CASES = [(method, layout) for method in METHODS for layout in LAYOUTS] + [
    ("alibi", layout) for layout in ZERO_LAYOUTS
]
CASES += [("t5", "zero2-tp2sp-dp2"), ("alibi-trainable", "zero1-pp2-dp2")]


@functools.cache
def _expected(method: str):
    config = tiny_config(**METHODS[method])
    state = random_state(config, seed=11)
    generator = torch.Generator().manual_seed(13)
    # A learnable pattern (each sequence counts up by its own stride), so that the loss moves.
    start, stride = (
        torch.randint(0, 500, (STEPS, 8, 1), generator=generator),
        torch.randint(1, 4, (STEPS, 8, 1), generator=generator),
    )
    batches = list((start + stride * torch.arange(33)) % 500)
    rates = [learning_rate(config, step) for step in range(STEPS)]
    return state, batches, *train_dense(config, state, batches, rates)


@pytest.mark.parametrize(("method", "layout"), CASES)
def test_twenty_steps_equal_adamw(pools, method, layout):
    processes, parallel = (LAYOUTS | ZERO_LAYOUTS)[layout]
    state, batches, losses, norms, weights = _expected(method)
    config = tiny_config(parallel=parallel, **METHODS[method])
    actual = pools(processes).run(tasks.train_steps, config, state, batches)[0]
    assert actual["losses"] == pytest.approx(losses, **LOSS)
    assert actual["norms"] == pytest.approx(norms, **NORM)
    assert losses[-1] < losses[0] - 0.2, "nothing was learned, so nothing was compared"
    assert max(norms) > config.optimizer.clip_grad, "nothing was clipped"
    for name, expected in weights.items():
        torch.testing.assert_close(
            actual["weights"][name], expected, **WEIGHT, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2sp"])
def test_recomputing_replays_the_same_dropout(pools, layout):
    """Recomputed activations give the same bits, so the same dropout masks were drawn again."""
    processes, parallel = LAYOUTS[layout]
    state, batches, *_ = _expected("alibi")
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    results = {}
    for granularity in ("none", "selective", "full"):
        config = tiny_config(
            parallel=parallel, model=dropout, train={"recompute_granularity": granularity}
        )
        results[granularity] = pools(processes).run(tasks.train_steps, config, state, batches[:4])[
            0
        ]["losses"]
    assert results["none"] == results["selective"] == results["full"]
    without = pools(processes).run(
        tasks.train_steps, tiny_config(parallel=parallel), state, batches[:4]
    )[0]["losses"]
    assert results["none"] != without


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_fp16_scales_its_loss(pools, layout):
    """The arithmetic is real fp16; only DeepSpeed's refusal of it on a CPU is lifted.

    fp16 rounds to 11 bits, so losses stay within 1 % of fp32's. A scale of 2^30 overflows until it
    has been halved often enough, and those steps must leave the weights alone.
    """
    processes, parallel = LAYOUTS[layout]
    state, batches, losses, *_ = _expected("alibi")

    def run(power: int):
        config = tiny_config(
            parallel=parallel,
            train={"precision": "fp16"},
            optimizer={"initial_loss_scale_power": power},
        )
        return pools(processes).run(tasks.train_steps_in_fp16_on_cpu, config, state, batches)[0]

    assert run(12)["losses"] == pytest.approx(losses, rel=1e-2)
    overflowing = run(30)
    skipped = [n == float("inf") for n in overflowing["norms"]]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert overflowing["weights_after_first_step_unchanged"]


@pytest.mark.parametrize("processes", [1, 4])
def test_bf16_gradients_are_summed_over_ranks_in_fp32(pools, processes):
    """The gradients of micro batches are added in fp32, and reducing them must keep that.

    A mean of n fp32 values that are added one after the other has a relative error of at most about
    n * 2^-24 in its norm. A sum in bf16, whose unit is 2^-8, would be off by some 3e-3 for 4 ranks.
    """
    config = tiny_config(
        train={"precision": "bf16"}, batch={"micro_batch_size": 1, "global_batch_size": 8}
    )
    state, batches, *_ = _expected("alibi")
    [result, *_] = pools(processes).run(tasks.error_of_reduced_gradients, config, state, batches[0])
    assert max(result["errors"].values()) <= processes * 2.0**-24, result
    assert result["dtypes"] == ([] if processes == 1 else ["torch.float32"])
