"""Compare the model with fused operations with the dense reference and with the plain model.

Compiled regions run as plain Python here, except in the last two tests: compiling takes seconds for
each region and data type.
"""

from __future__ import annotations

import pytest
import torch

from pretrain.evaluation.perplexity import Protocol
from tests.conftest import LAYOUTS, mark_torture, tiny_config
from tests.distributed import fusion_tasks, tasks
from tests.distributed.test_optimizer import LOSS, NORM
from tests.distributed.test_optimizer import _expected as expected_steps
from tests.distributed.test_parallel_equals_dense import TOLERANCE, variant_config
from tests.distributed.test_parallel_equals_dense import _expected as expected_gradients
from tests.reference.dense_gpt import random_state

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ALL_LAYOUTS = {"one": (1, {}), "tp2sp": (2, SP), **LAYOUTS}
# Every layout, and beside the default model: erf GELU, an untied output layer, neither bias.
CASES = [("alibi", layout) for layout in ALL_LAYOUTS] + [
    (variant, layout)
    for variant in ("alibi-trainable", "alibi-grouped", "none")
    for layout in ("one", "tp2sp")
]

CORE = {case for case in CASES if case[1] in ("one", "tp2sp")} | {
    ("alibi", "tp2pp2sp"),
    ("alibi", "pp2vpp2"),
}


def fused(config, **train):
    """Return the config with every fusion on."""
    return config.model_copy(
        update={"train": config.train.model_copy(update={"fusion": "on", **train})}
    )


@pytest.mark.parametrize(("variant", "layout"), mark_torture(CASES, CORE))
def test_fused_losses_and_gradients_equal_the_dense_reference(pools, variant, layout):
    processes, parallel = ALL_LAYOUTS[layout]
    state, tokens, logits, loss, gradients = expected_gradients(variant, 8)
    config = fused(variant_config(variant, 8, parallel))
    task = fusion_tasks.run_uncompiled
    actual = pools(processes).run(task, "gradients", config, state, tokens)[0]
    torch.testing.assert_close(actual["logits"], logits, **TOLERANCE)
    assert actual["loss"] == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(actual["gradients"], gradients, **TOLERANCE)


@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2", "tp2pp2sp"])
def test_a_fused_model_trains_as_adamw_does(pools, layout):
    """Losses and norms of six steps, each of which follows from the weights of the one before.

    The layers add their weights' gradients to the optimizer's sums, which are not overwritten then.
    """
    processes, parallel = ALL_LAYOUTS[layout]
    state, batches, losses, norms, _ = expected_steps("alibi")
    config = fused(tiny_config(parallel=parallel))
    task = fusion_tasks.run_uncompiled
    actual = pools(processes).run(task, "train_steps", config, state, batches[:6])[0]
    assert actual["losses"] == pytest.approx(losses[:6], **LOSS)
    assert actual["norms"] == pytest.approx(norms[:6], **NORM)


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("alibi", "one"),
        ("alibi", "tp2pp2sp"),
        ("alibi", "pp2vpp2"),
        ("alibi-grouped", "one"),
        ("alibi-grouped", "tp2sp"),
    ],
)
def test_layers_add_their_weight_gradients_to_fp32_buffers(pools, variant, layout):
    """Tied and untied, over several micro batches, each of which adds to the same buffers."""
    processes, parallel = ALL_LAYOUTS[layout]
    state, tokens, _, _, gradients = expected_gradients(variant, 8)
    config = fused(variant_config(variant, 8, parallel))
    task = fusion_tasks.gradients_in_main_grad
    actual = pools(processes).run(task, config, state, tokens)[0]
    assert_same_gradients(actual, gradients, **TOLERANCE)


@pytest.mark.parametrize("layout", ["one", "tp2sp"])
def test_bf16_gradients_are_as_good_as_those_of_the_plain_model(pools, layout):
    """Their distance from the fp32 gradients comes from bf16 weights and activations.

    Run as plain Python, Megatron's bias-GELU rounds each of its ten operations to bf16, which a
    compiled region does not: so up to a tenth more is allowed. 2 % more were seen.
    """
    processes, parallel = ALL_LAYOUTS[layout]
    state, tokens, _, _, exact = expected_gradients("alibi", 8)
    errors = {}
    for fusion in ("off", "on"):
        config = tiny_config(parallel=parallel, train={"precision": "bf16", "fusion": fusion})
        task = fusion_tasks.gradients_in_main_grad
        actual = pools(processes).run(task, config, state, tokens)[0]
        errors[fusion] = sum(
            float((actual[name] - exact[name]).norm() / exact[name].norm()) for name in exact
        )
    assert errors["on"] < 1.1 * errors["off"], errors


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weight_gradients_are_summed_in_fp32(pools, precision):
    """Products of 16-bit numbers are exact in fp32; sums over 64 tokens round 64 times at most."""
    actual, expected = pools(1).run(fusion_tasks.sum_of_weight_gradients, precision)[0]
    # Relative to the sum of magnitudes, of which the second tensor holds the largest.
    assert (actual - expected).abs().max() < 64 * 2**-24 * expected.abs().max()


@pytest.mark.parametrize("layout", ["one", "tp2", "zero3-dp2"])
def test_a_fused_model_scores_the_same_tokens(pools, tiny_data, layout):
    """Sliding windows score the last tokens of a window alone, whose logits alone are computed."""
    layouts = {**ALL_LAYOUTS, "zero3-dp2": (2, {"zero_stage": 3})}
    processes, parallel = layouts[layout]
    config = tiny_config(
        data={"directory": str(tiny_data)}, parallel=parallel, evaluation={"max_tokens": 300}
    )
    state = random_state(config, seed=3)
    arguments = (state, [Protocol("sliding", 32, 8)], 96)
    [plain] = pools(processes).run(tasks.evaluate, config, *arguments)[0]
    task = fusion_tasks.run_uncompiled
    [actual] = pools(processes).run(task, "evaluate", fused(config), *arguments)[0]
    assert actual.tokens == plain.tokens == 300
    # fp32 sums of 512 exponentials and of 300 losses, in another order under tensor parallelism.
    assert actual.loss_nats == pytest.approx(plain.loss_nats, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_logits_never_exist_in_fp32_all_at_once(pools, precision):
    """Seven rows of 40 are converted at once; losses and gradients are those of all at once.

    In 16 bit both round the gradient of the logits once, after the same fp32 arithmetic, so they
    differ in what lies on the edge between two numbers, by one unit in the last place.
    """
    result = pools(1).run(fusion_tasks.losses_in_pieces, precision)[0]
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
    actual = pools(1).run(fusion_tasks.split_gradients, one_buffer)[0]
    assert torch.equal(actual["gradient"], actual["expected"])
    assert actual["concatenations"] == (0 if one_buffer else 1)


@pytest.mark.parametrize(("granularity",), mark_torture([("full",), ("selective",)], {("full",)}))
def test_compiled_regions_replay_their_dropout_and_change_nothing_else(pools, granularity):
    """Train with compiled regions.

    Recomputed layers draw the same masks, to the last bit. Without dropout, losses of three steps
    agree with the plain model's as two orders of fp32 sums do.
    """
    state, batches, *_ = expected_steps("alibi")
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    results = {}
    for recomputed in ("none", granularity):
        config = tiny_config(
            model=dropout, train={"recompute_granularity": recomputed, "fusion": "on"}
        )
        results[recomputed] = pools(1).run(tasks.train_steps, config, state, batches[:3])[0]
    assert results[granularity]["losses"] == results["none"]["losses"]
    assert results[granularity]["norms"] == results["none"]["norms"]
    for fusion in ("off", "on"):
        config = tiny_config(train={"fusion": fusion})
        results[fusion] = pools(1).run(tasks.train_steps, config, state, batches[:3])[0]
    assert results["on"]["losses"] == pytest.approx(results["off"]["losses"], **LOSS)
    assert results["on"]["norms"] == pytest.approx(results["off"]["norms"], **NORM)
    assert results["on"]["losses"] != results["none"]["losses"]


def test_a_compiled_region_is_one_kernel_in_each_direction(pools):
    """Counted by Inductor, for C++; the same graphs become Triton kernels on a GPU."""
    counts = pools(1).run(fusion_tasks.kernels_of_compiled_regions)[0]
    assert counts == {"bias-GELU": 2, "bias-residual": 1, "loss, backward": 1}


def assert_same_gradients(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
