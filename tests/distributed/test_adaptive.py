"""Compare adaptive inputs and the adaptive softmax with torch's, and with the dense reference.

Everything is computed in fp32 on both sides. They differ in the order of their sums, as in
test_parallel_equals_dense.py, whose tolerance is used.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pretrain.config import RunConfig, num_parameters
from pretrain.data.stream import open_stream
from pretrain.evaluation.windows import Protocol
from pretrain.optim.optimizers import learning_rate
from tests.conftest import ALL_LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.distributed.test_optimizer import UNIT, WEIGHT, assert_losses_and_norms
from tests.distributed.test_parallel_equals_dense import (
    TOLERANCE,
    assert_close_by_name,
    assert_equals_dense,
    expected_of,
)
from tests.reference.dense_gpt import DenseGPT, random_state, train_dense

CUTOFFS = (64, 192)
LAYOUTS = {name: ALL_LAYOUTS[name] for name in ("one", "dp2", "zero2-cp2", "zero3-dp2")}


def adaptive_config(parallel=None, *, tied=True, **sections):
    model = {"adaptive_cutoffs": CUTOFFS, "tie_word_embeddings": tied, "num_layers": 2}
    model |= sections.pop("model", {})
    batch = {"micro_batch_size": 4}
    return tiny_config(model=model, parallel=parallel or {}, batch=batch, **sections)


def oracle(config):
    """Return torch's adaptive softmax in fp64 with random weights, and these for ours."""
    width, cutoffs = config.model.hidden_size, list(config.model.adaptive_cutoffs)
    size = config.padded_vocab_size
    module = nn.AdaptiveLogSoftmaxWithLoss(width, size, cutoffs, div_value=4.0).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    head = module.head.weight.detach()
    weights = {"embedding_0": head[: cutoffs[0]], "tails": head[cutoffs[0] :]}
    for i, (projection, words) in enumerate(module.tail, start=1):
        weights |= {f"projection_{i}": projection.weight.t(), f"embedding_{i}": words.weight}
    return module, {name: w.detach().float().clone() for name, w in weights.items()}


def test_losses_and_gradients_are_those_of_torchs_adaptive_softmax(pools):
    config = adaptive_config()
    module, weights = oracle(config)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(16, 3, 96, generator=generator)
    labels = torch.randint(0, 512, (3, 16), generator=generator)
    # The borders of every cluster.
    labels[0, :6] = torch.tensor([0, 63, 64, 191, 192, 511])
    factors = torch.rand(3, 16, generator=generator)
    run = pools(1).run
    losses, gradients, log_p = run(
        losses_and_gradients, config, weights, (hidden, labels, factors)
    )[0]
    rows = hidden.double().transpose(0, 1).reshape(48, 96).requires_grad_()
    expected = -module(rows, labels.flatten()).output.view(3, 16)
    (expected * factors).sum().backward()
    torch.testing.assert_close(losses, expected.float(), rtol=1e-5, atol=1e-5)
    head = module.head.weight.grad
    found = {"embedding_0": head[:64], "tails": head[64:]}
    for i, (projection, words) in enumerate(module.tail, start=1):
        found |= {
            f"projection_{i}": projection.weight.grad.t(),
            f"embedding_{i}": words.weight.grad,
        }
    found["hidden"] = rows.grad.view(3, 16, 96).transpose(0, 1)
    expected = {name: gradient.float() for name, gradient in found.items()}
    assert_close_by_name(gradients, expected, **TOLERANCE)
    full = module.log_prob(rows).view(3, 16, -1).transpose(0, 1)
    torch.testing.assert_close(log_p, full.float(), rtol=1e-5, atol=1e-5)
    # fp32 rounds each of 512 terms.
    assert log_p.double().exp().sum(-1).sub(1).abs().max() < 1e-5


@functools.cache
def _expected(tied):
    return expected_of(adaptive_config(tied=tied))


# Each pair of a layout, an output layer and a way to compute.
PAIRS = [("one", True, "on"), ("one", False, "off"), ("dp2", True, "off"), ("dp2", False, "on")]


@pytest.mark.parametrize(("layout", "tied", "fusion"), PAIRS)
def test_a_model_equals_the_dense_reference(pools, layout, tied, fusion):
    processes, parallel = LAYOUTS[layout]
    run = functools.partial(pools(processes).run, tasks.uncompiled)
    config = adaptive_config(parallel, tied=tied, train={"fusion": fusion})
    assert_equals_dense(run, config, _expected(tied))


@pytest.mark.parametrize("method", ["sinusoidal", "learned"])
def test_adaptive_inputs_are_normalized_scaled_and_given_positions(pools, method):
    sections = {
        "model": {"embedding_layernorm": True, "embedding_scale": 3.0},
        "position": {"method": method},
        "evaluation": {"lengths": [32]},
    }
    config = adaptive_config(**sections)
    state = random_state(config, seed=3)
    tokens = torch.randint(0, 512, (8, 33), generator=torch.Generator().manual_seed(5))
    expected = DenseGPT(config).load_global_state(state)(tokens[:, :-1])
    actual = pools(1).run(tasks.gradients, config, state, tokens)[0]
    torch.testing.assert_close(actual["logits"], expected.detach(), **TOLERANCE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_train_as_far_as_they_can_tell(pools, precision):
    """The first loss is as exact as weights of 8 or 11 bits are.

    The updates after it follow gradients that are rounded, too, so that the next five may be off by
    several times as much.
    """
    state, batches, losses, *_ = _trained(True)
    train = {"precision": precision}
    config = adaptive_config(train=train, optimizer={"initial_loss_scale_power": 8})
    task = [tasks.in_fp16_on_cpu] * (precision == "fp16") + [tasks.train_steps]
    actual = pools(2).run(*task, config, state, batches)[0]
    assert actual["losses"][0] == pytest.approx(losses[0], rel=UNIT[precision])
    assert actual["losses"] == pytest.approx(losses, rel=4 * UNIT[precision])


def _batches(steps):
    """Return batches in which some ranks have no token of the last tail."""
    generator = torch.Generator().manual_seed(9)
    batches = [torch.randint(0, 512, (8, 33), generator=generator) for _ in range(steps)]
    for batch in batches[1::2]:
        batch[:4].clamp_(max=100)
    return batches


@functools.cache
def _trained(tied):
    config = adaptive_config(tied=tied)
    state, batches = random_state(config, seed=11), _batches(6)
    rates = [learning_rate(config, step) for step in range(6)]
    return state, batches, *train_dense(config, state, batches, rates)


@pytest.mark.parametrize(("layout", "tied"), [*((name, True) for name in LAYOUTS), ("dp2", False)])
def test_zero_trains_as_adamw_does(pools, layout, tied):
    processes, parallel = LAYOUTS[layout]
    state, batches, losses, norms, weights = _trained(tied)
    config = adaptive_config(parallel, tied=tied)
    actual = pools(processes).run(tasks.train_steps, config, state, batches)[0]
    assert_losses_and_norms(actual, losses, norms)
    assert_close_by_name(actual["weights"], weights, **WEIGHT)


def test_initial_weights_are_those_of_fairseq(pools):
    """fairseq/modules/adaptive_input.py and adaptive_softmax.py, `init_weights`."""
    sizes = {"data": {"vocab_size": 5000}}
    cutoffs = {"adaptive_cutoffs": (1000, 2000), "make_vocab_size_divisible_by": 8}
    for tied in (True, False):
        config = adaptive_config(tied=tied, model=cutoffs, **sizes)
        found = pools(1).run(tasks.initial_weights, config)[0]
        assert sum(w.numel() for w in found.values()) == num_parameters(config)
        ours = {n: w for n, w in found.items() if n.startswith(("embedding.", "output_layer."))}
        for name, weight in ours.items():
            rows, columns = weight.shape
            if name.startswith("embedding.word_embeddings.embedding_"):
                # 24,000 draws and more of normal(0, 1 / sqrt(width)): 0.5 % of standard error.
                assert weight.std().item() == pytest.approx(columns**-0.5, rel=0.03), name
                continue
            # Linear(d, head) of fairseq's untied softmax holds both of these.
            if not tied and name in ("output_layer.embedding_0", "output_layer.tails"):
                rows = 1002
            bound = math.sqrt(6 / (rows + columns))
            assert weight.abs().max().item() == pytest.approx(bound, rel=0.06), name
            assert weight.abs().max().item() <= bound, name
            assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1), name


@pytest.mark.parametrize("layout", ["one", "zero3-dp2"])
def test_an_evaluation_scores_what_the_dense_reference_does(pools, tiny_data, layout):
    processes, parallel = LAYOUTS[layout]
    tokens = 320
    config = adaptive_config(
        parallel, data={"directory": str(tiny_data)}, evaluation={"max_tokens": tokens}
    )
    state = random_state(config, seed=3)
    stream = open_stream(config, "validation")
    ids = torch.from_numpy(np.append(stream.manifest.eos_id, stream.read(0, tokens)))
    with torch.no_grad():
        log_p = DenseGPT(config).load_global_state(state)(ids[:-1].view(10, 32))
    expected = -log_p.flatten(0, 1).gather(1, ids[1:, None]).view(10, 32)
    # Of sliding windows the last 8 tokens are scored alone, whose logits alone are computed.
    both = [Protocol("nonoverlapping", 32, 32), Protocol("sliding", 32, 8)]
    found, sliding = pools(processes).run(tasks.evaluate, config, state, both, 96)[0]
    assert found.tokens == sliding.tokens == tokens
    assert found.loss_nats == pytest.approx(expected.mean().item(), rel=1e-6)
    np.testing.assert_allclose(found.by_position.losses, expected.mean(0), rtol=1e-5)
    assert sliding.by_position.losses[-1] > 0 and sliding.loss_nats != found.loss_nats


# ---- tasks of the ranks --------------------------------------------------------------------------
def losses_and_gradients(config: RunConfig, weights: dict[str, Tensor], data: Any) -> Any:
    """Compute losses with `AdaptiveSoftmax`, and the gradients of their weighted sum.

    Args:
        config: The run's config.
        weights: Value of each parameter of the module.
        data: (hidden states [S, B, d], labels [B, S], weights of the losses [B, S]).

    Returns:
        (losses, gradients by name with that of the hidden states as "hidden", log probabilities).
    """
    from pretrain.model.adaptive import AdaptiveSoftmax

    layer = AdaptiveSoftmax(config.adaptive_clusters, config.model.hidden_size, None)
    layer.load_state_dict(weights, strict=True)
    hidden, labels, factors = data
    hidden = hidden.clone().requires_grad_()
    losses, _ = layer(hidden, labels=labels)
    (losses * factors).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters()} | {"hidden": hidden.grad}
    with torch.no_grad():
        log_p, _ = layer(hidden)
    return losses.detach(), found, log_p
