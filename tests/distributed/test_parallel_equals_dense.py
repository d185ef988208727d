"""Every position method in every layout: logits and gradients equal an independent dense GPT's, from the same weights."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.conftest import LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.reference.dense_gpt import DenseGPT, random_state

# Both sides compute in fp32 and differ in the order of their sums: 2^-24 a term over a few hundred terms, some layers
# deep. Seen over all cases: logits within 1e-5 of values up to 3, gradients within 4e-6 of values up to 1.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}

# Each method with other knobs of the model turned, so that they are seen sharded too.
VARIANTS = {
    "alibi": {},
    "alibi-trainable": {"position": {"trainable_slopes": True}, "model": {"hidden_act": "gelu"}},
    "alibi-grouped": {"model": {"num_query_groups": 4, "tie_word_embeddings": False}},
    "alibi-uneven": {"model": {"num_layers": 5}},
    "sinusoidal": {"model": {"hidden_act": "relu"}},
    "rotary": {"model": {"tie_word_embeddings": False}},
    "t5": {"model": {"use_bias": False}},
    "learned": {"evaluation": {"lengths": [32]}},
    "none": {"model": {"use_bias": False, "tie_word_embeddings": False}},
}


def _config(variant: str, heads: int, parallel: dict):
    sections = {name: dict(keys) for name, keys in VARIANTS[variant].items()}
    sections.setdefault("model", {})["num_attention_heads"] = heads
    sections.setdefault("position", {})["method"] = variant.split("-")[0]
    return tiny_config(parallel=parallel, **sections)


@functools.cache
def _expected(variant: str, heads: int):
    config = _config(variant, heads, {})
    state = random_state(config, seed=3)
    tokens = torch.randint(0, 512, (8, 33), generator=torch.Generator().manual_seed(5))
    model = DenseGPT(config).load_global_state(state)
    logits = model(tokens[:, :-1])
    loss = model.loss(tokens)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return state, tokens, logits.detach(), float(loss), gradients


@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_the_dense_reference(pools, variant, layout, heads):
    processes, parallel = LAYOUTS[layout]
    state, tokens, logits, loss, gradients = _expected(variant, heads)
    actual = pools(processes).run(
        tasks.gradients, _config(variant, heads, parallel), state, tokens
    )[0]
    torch.testing.assert_close(actual["logits"], logits, **TOLERANCE)
    assert actual["loss"] == pytest.approx(loss, rel=1e-6)
    assert actual["gradients"].keys() == gradients.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(
            actual["gradients"][name], expected, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_comparison_would_notice_slopes_of_local_heads(pools):
    """The classic mistake (each tensor rank takes the slopes of its own head count) is far outside the tolerance."""
    state, tokens, logits, *_ = _expected("alibi", 8)
    wrong = DenseGPT(_config("alibi", 8, {})).load_global_state(state)
    wrong._score_bias = lambda length, p, like: _local_slopes_bias(length, like)
    assert (wrong(tokens[:, :-1]) - logits).abs().max() > 100 * TOLERANCE["atol"]


def _local_slopes_bias(length: int, like: torch.Tensor) -> torch.Tensor:
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / 4) for h in range(4)] * 2)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    return (-slopes[:, None, None] * distance).to(like).masked_fill(distance < 0, float("-inf"))
