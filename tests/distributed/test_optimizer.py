"""Eight ZeRO steps in every layout equal those of a single process without any of it.

The reference is a dense model, clipping by the global norm and torch.optim.AdamW.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from pretrain.config import RunConfig
from pretrain.config.tensors import num_parameters
from pretrain.optim.optimizers import learning_rate
from tests.conftest import ALL_LAYOUTS, LAYOUTS, mark_torture, tiny_config
from tests.distributed import tasks
from tests.distributed.test_parallel_equals_dense import assert_close_by_name
from tests.reference.dense_gpt import learnable_batches, random_state, train_dense

STEPS = 8
# The gradients of both sides differ by rounding (test_parallel_equals_dense.py). Adam divides by
# the root of the second moment, so where a gradient is near zero the *direction* of an update is
# rounding too: a weight may then be off by a share of the learning rate (1e-3) per step. Losses and
# norms are means over all weights and stay near fp32 noise.
WEIGHT = {"rtol": 0, "atol": 5e-4}

REDUCTION_LAYOUTS = {
    "single": (1, {}),
    "pp2vpp2dp2": (4, LAYOUTS["pp2vpp2"][1]),
    "tp2dp2": (4, ALL_LAYOUTS["tp2sp"][1]),
    "pp2dp2": (4, LAYOUTS["pp2"][1]),
    "dp4": (4, {}),
}
# What a position method learns per head is shared by layers and stages, so a mistake would hide in
# its gradient and in its share of the norm.
METHODS = {
    "alibi": {"position": {"method": "alibi"}},
    "alibi-trainable": {
        "position": {"method": "alibi", "trainable_slopes": True},
        "optimizer": {"position_learning_rate_mult": 0.5},
    },
    "t5": {"position": {"method": "t5"}, "optimizer": {"position_learning_rate_mult": 10.0}},
    # Some of what it learns is shared by heads, and so by tensor ranks.
    "fire": {"position": {"method": "fire", "fire_threshold": 12}},
    "learned-untied": {
        "position": {"method": "learned"},
        "model": {"tie_word_embeddings": False},
        "evaluation": {"lengths": [32]},
    },
}
ZERO_LAYOUTS = [
    "zero2-dp2",
    "zero3-dp2",
    "zero2-tp2sp-dp2",
    "zero3-tp2sp-dp2",
    "tp2-dp2",
    "pp2-dp2",
    "cp2-dp2",
    "zero2-cp2",
    "zero3-cp2-dp2",
]
CASES = [(method, layout) for method in METHODS for layout in LAYOUTS]
CASES += [("alibi", layout) for layout in ZERO_LAYOUTS]
CASES += [("t5", "zero2-cp2"), ("t5", "zero3-cp2-dp2"), ("alibi-trainable", "cp2-dp2")]
CASES += [("t5", "zero2-tp2sp-dp2"), ("t5", "zero3-dp2"), ("alibi-trainable", "pp2-dp2")]
CASES += [("fire", "zero2-tp2sp-dp2"), ("fire", "zero3-tp2sp-dp2"), ("fire", "zero3-cp2-dp2")]
# Each kind of parallelism at each ZeRO stage, and each method once or twice.
CORE = {
    ("alibi", "tp2-dp2"),
    ("alibi-trainable", "tp2pp2sp"),
    ("t5", "zero2-tp2sp-dp2"),
    ("learned-untied", "pp2vpp2"),
    ("alibi-trainable", "cp2-dp2"),
    ("t5", "zero3-cp2-dp2"),
    ("fire", "zero3-tp2sp-dp2"),
}


def _config(
    method: str = "alibi", layers: int = 2, parallel: dict[str, Any] | None = None, **more: Any
) -> RunConfig:
    sections = {**METHODS[method], **more}
    model = {"num_layers": layers, **sections.pop("model", {})}
    return tiny_config(parallel=parallel or {}, model=model, **sections)


@functools.cache
def _expected(method: str = "alibi", layers: int = 2):
    config = _config(method, layers)
    state = random_state(config, seed=11)
    batches = learnable_batches(STEPS)
    rates = [learning_rate(config, step) for step in range(STEPS)]
    return state, batches, *train_dense(config, state, batches, rates)


def assert_losses_and_norms(actual, losses, norms, times: float = 1):
    assert actual["losses"] == pytest.approx(losses, rel=times * 2e-5)
    assert actual["norms"] == pytest.approx(norms, rel=times * 2e-4)


@pytest.mark.parametrize(("method", "layout"), mark_torture(CASES, CORE))
def test_steps_equal_adamw(pools, method, layout):
    processes, parallel = ALL_LAYOUTS[layout]
    # Two stages of two chunks have a layer in each.
    layers = 4 if "vpp" in layout else 2
    state, batches, losses, norms, weights = _expected(method, layers)
    config = _config(method, layers, parallel)
    actual = pools(processes).run(tasks.train_steps, config, state, batches)[0]
    assert_losses_and_norms(actual, losses, norms)
    assert losses[-1] < losses[0] - 0.2, "nothing was learned, so nothing was compared"
    assert max(norms) > config.optimizer.clip_grad, "nothing was clipped"
    assert_close_by_name(actual["weights"], weights, **WEIGHT)


def test_an_odd_number_of_parameters_trains(pools):
    config = _config("alibi-trainable", model={"num_attention_heads": 1})
    assert num_parameters(config) % 2 == 1
    state, batches = random_state(config, seed=11), learnable_batches(1)
    [found] = pools(1).run(tasks.train_steps, config, state, batches)
    assert math.isfinite(found["losses"][0])


def test_recomputing_replays_the_same_dropout(pools):
    """Recomputed activations give the same bits, so the same dropout masks were drawn again."""
    processes, parallel = ALL_LAYOUTS["tp2sp"]
    state, batches, losses, *_ = _expected()
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}
    results = {}
    for granularity in ("none", "selective", "full"):
        train = {"recompute_granularity": granularity}
        config = _config(parallel=parallel, model=dropout, train=train)
        found, *_ = pools(processes).run(tasks.train_steps, config, state, batches[:2])
        results[granularity] = found["losses"]
    assert results["none"] == results["selective"] == results["full"]
    assert results["none"] != pytest.approx(losses[:2], rel=1e-3), "nothing was dropped"


def test_fp16_scales_its_loss(pools):
    """The arithmetic is real fp16; only DeepSpeed's refusal of it on a CPU is lifted.

    fp16 rounds to 11 bits, so losses stay within 1 % of fp32's. A scale of 2^24 overflows until it
    has been halved often enough, and those steps must leave the weights alone.
    """
    processes, parallel = LAYOUTS["pp2"]
    state, batches, losses, *_ = _expected()

    def run(power: int, num_steps: int = STEPS):
        config = _config(
            parallel=parallel,
            train={"precision": "fp16"},
            optimizer={"initial_loss_scale_power": power},
        )
        task = tasks.in_fp16_on_cpu, tasks.train_steps
        return pools(processes).run(*task, config, state, batches[:num_steps])[0]

    assert run(12, num_steps=4)["losses"] == pytest.approx(losses[:4], rel=1e-2)
    skipped = [norm == float("inf") for norm in run(24)["norms"]]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    rounded = {name: weight.half().float() for name, weight in state.items()}
    assert_close_by_name(run(30, num_steps=1)["weights"], rounded, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_grows_the_loss_scale_is_a_step_like_any_other(pools, stage):
    """With NAG, because Adam's updates do not depend on the scale of gradients."""
    constant = {"lr_warmup_steps": 0, "lr_decay_style": "constant"}
    optimizer = {"name": "nag", "learning_rate": 0.5, "weight_decay": 0.0, "clip_grad": 0.0}
    config = _config(
        parallel={"zero_stage": stage},
        train={"precision": "fp16"},
        optimizer={**optimizer, "initial_loss_scale_power": 10},
        schedule=constant,
    )
    state, batches, *_ = _expected()
    losses, norms, _ = train_dense(config, state, batches[:4], [0.5] * 4)
    task = tasks.in_fp16_that_grows, tasks.train_steps
    found, _ = pools(2).run(*task, config, state, batches[:4])
    assert found["losses"] == pytest.approx(losses, rel=1e-3)
    assert found["norms"] == pytest.approx(norms, rel=1e-3)


# Unit roundoffs: half the distance from 1 to the next number.
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize(
    ("layout", "wire"),
    [("single", "fp32"), ("dp4", "fp32"), ("pp2dp2", "fp32"), ("tp2dp2", "bf16"), ("dp4", "fp16")],
)
def test_gradients_are_summed_over_ranks_in_fp32(pools, layout, wire):
    """The gradients of micro batches are added in fp32, and reducing them must keep that.

    Each rank's sum is rounded once to what travels. Sums of n terms in fp32 are off by at most
    n * 2^-24 times the sum of their magnitudes. Nothing is sent, nor rounded, on a single rank.
    """
    processes, parallel = REDUCTION_LAYOUTS[layout]
    config = _config(
        train={"precision": "fp16" if wire == "fp16" else "bf16"},
        parallel={**parallel, "gradient_reduce_dtype": wire},
        batch={"micro_batch_size": 1, "global_batch_size": 8},
        optimizer={"initial_loss_scale_power": 12},
    )
    state, batches, *_ = _expected()
    task = [tasks.in_fp16_on_cpu] * (wire == "fp16") + [tasks.reduce_gradients]
    ranks = pools(processes).run(*task, config, state, batches[0])
    rounding = 0.0 if wire == "fp32" else UNIT[wire]
    bound = 0.0 if processes == 1 else rounding + processes * UNIT["fp32"]
    for part in (part for rank in ranks for part in rank):
        assert part["error"] <= bound * part["terms"], part
    assert sum(part["sum"] for rank in ranks for part in rank) > 0
    if wire != "fp32":
        # What travels is really rounded: the option has an effect.
        assert max(part["error"] for rank in ranks for part in rank) > 0


def test_between_nodes_gradients_travel_in_two_stages(pools):
    """On two nodes of two ranks, a node's gradients are added up in fp32 before they leave it."""
    config = _config(
        train={"precision": "bf16"},
        parallel={"gradient_reduce_dtype": "bf16"},
        batch={"micro_batch_size": 1, "global_batch_size": 8},
    )
    state, batches, *_ = _expected()
    arguments = tasks.reduce_gradients_on_two_nodes, config, state, batches[0]
    ranks = pools(4).run(*arguments)
    # The groups can be made again, as by a program that trains two models.
    assert pools(4).run(*arguments) == ranks
    bound = UNIT["bf16"] + 4 * UNIT["fp32"]
    for part in (part for rank in ranks for part in rank["parts"]):
        assert part["error"] <= bound * part["terms"], part
    assert max(part["error"] for rank in ranks for part in rank["parts"]) > 0
    for number, rank in enumerate(ranks):
        node, peers = ((0, 1), (2, 3))[number // 2], ((0, 2), (1, 3))[number % 2]
        within, between = sorted(rank["sent"].items(), reverse=True)
        assert within[0] == ("reduce_scatter_tensor", node, "torch.float32")
        assert between[0] == ("all_to_all_single", peers, "torch.bfloat16")
        # Half of the node's sum is this rank's to pass on.
        assert within[1] == 2 * between[1] > 0


@pytest.mark.parametrize(
    ("layout", "method"),
    [("tp2", "alibi-trainable"), ("tp2pp2sp", "t5"), ("tp2", "learned-untied")],
)
def test_tensor_ranks_lay_out_their_buckets_alike(pools, layout, method):
    """Otherwise the sums of parameters that they all hold are taken in different orders.

    With three data-parallel ranks or more such copies then drift apart, by 1e-9 in 12 steps.
    """
    processes, parallel = {**LAYOUTS, **REDUCTION_LAYOUTS}[layout]
    config = tiny_config(parallel=parallel, **METHODS[method])
    ranks = pools(processes).run(tasks.bucket_layout, config)
    by_stage: dict[int, list] = {}
    for stage, buckets in ranks:
        by_stage.setdefault(stage, []).append(buckets)
    for buckets in by_stage.values():
        assert all(other == buckets[0] for other in buckets)
        assert len(buckets[0]) > 4


def test_nodes_are_used_where_they_hold_consecutive_ranks(pools):
    expected = {"aabb": 2, "aaaa": 4, "abcd": 1, "abab": 1, "aaab": 1, "abba": 1}
    assert pools(4).run(tasks.ranks_per_node, list(expected)) == [list(expected.values())] * 4


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp16"), (3, "bf16")])
def test_every_zero_stage_adds_up_in_fp32(pools, stage, precision):
    """DeepSpeed's reductions at stages 2 and 3 keep what those of stage 1 keep (tested above).

    4 ranks with 2 micro batches each: 8 terms. Sums in bf16 or fp16 would differ by some 1e-3.
    """
    task = [tasks.in_fp16_on_cpu] * (precision == "fp16") + [tasks.gradients_seen_by_adam]

    def gradients(zero_stage: int):
        config = _config(
            train={"precision": precision},
            parallel={"zero_stage": zero_stage},
            batch={"micro_batch_size": 1, "global_batch_size": 8},
            optimizer={"clip_grad": 0.0, "initial_loss_scale_power": 12},
        )
        state, batches, *_ = _expected()
        return pools(4).run(*task, config, state, batches[0])[0]

    expected, actual = gradients(1), gradients(stage)
    for name, value in expected.items():
        assert float((actual[name] - value).norm()) <= 8 * UNIT["fp32"] * float(value.norm()), name


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("dp4", "fp32"), ("tp2dp2", "bf16"), ("pp2vpp2dp2", "fp32")],
)
def test_overlapped_communication_changes_no_bit(pools, layout, precision):
    """Gradients travel within the last backward pass, weights during the next forward pass.

    What is sent late: layer norms and biases under sequence parallelism and the tied embedding of
    two stages, whose gradients `finalize_gradients` completes after the backward pass.
    """
    processes, parallel = REDUCTION_LAYOUTS[layout]
    # Two stages of two chunks have a layer in each.
    layers = 4 if "vpp" in layout else 2
    config = _config(
        layers=layers,
        parallel=parallel,
        train={"precision": precision},
        batch={"micro_batch_size": 1, "global_batch_size": 8},
    )
    state, batches, *_ = _expected(layers=layers)
    run = functools.partial(
        pools(processes).run, tasks.train_and_watch_reductions, config, state, batches[:2]
    )
    overlapped, serial = run(True), run(False)
    for one, other in zip(overlapped, serial):
        assert one["losses"] == other["losses"] and one["norms"] == other["norms"]
        assert all(torch.equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
        early = one["num_buckets"] - one["num_late_buckets"]
        assert early > 4, "too few buckets to overlap anything"
        # For each of the 2 steps.
        assert one["sent_within_backward"] == 2 * early
        assert one["sent_after_backward"] == 2 * one["num_late_buckets"]
        assert other["sent_within_backward"] == 0
        # Gathers that were still under way when the next forward pass began.
        assert one["weights_awaited_in_forward"] == one["num_buckets"]
        assert other["weights_awaited_in_forward"] == 0


def test_stages_train_where_replicas_trained_before_in_the_same_processes(pools):
    """The two in the middle had a tied embedding before, and have none now."""
    state, batches, losses, norms, _ = _expected(layers=4)
    for stages in (1, 4):
        parallel = {"pipeline_model_parallel_size": stages}
        config = _config(layers=4, parallel=parallel)
        actual = pools(4).run(tasks.train_steps, config, state, batches[:2])[0]
        assert_losses_and_norms(actual, losses[:2], norms[:2])
