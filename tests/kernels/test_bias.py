"""Test buckets against transformers, and attention of position methods against their papers."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from pretrain.kernels.call import of_heads, relative_buckets
from pretrain.kernels.dispatch import attention
from tests.conftest import tiny_config
from tests.reference.content import CONTENT
from tests.reference.dense_gpt import random_state
from tests.reference.positions import ORACLES, distances

OF_THE_TEXT = {"slopes": {"first": 2 ** (-8 / 6), "last": 2.0**-8}}
"""Slopes 2^(-8 (h + 1) / n) of 6 heads, as in the paper's section 3 and tutorials for any n."""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (8, 1000)])
def test_buckets_equal_those_of_transformers(causal, num_buckets, max_distance):
    distances = torch.arange(-3000, 3001)
    theirs = T5Attention._relative_position_bucket(
        -distances, not causal, num_buckets, max_distance
    )
    assert torch.equal(relative_buckets(distances, num_buckets, max_distance, causal), theirs)


def test_buckets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected at least 4 buckets"):
        relative_buckets(torch.arange(4), 2, 128, causal=False)
    with pytest.raises(ValueError, match="a distance above 16"):
        relative_buckets(torch.arange(4), 32, 16, causal=True)


@pytest.mark.parametrize(
    ("method", "keys", "sides"),
    [
        *((method, {}, "next_token") for method in CONTENT | ORACLES),
        ("kerple", {"kerple_kernel": "power"}, "next_token"),
        ("alibi", OF_THE_TEXT, "next_token"),
        ("alibi", OF_THE_TEXT, "masked"),
        ("shaw", {}, "masked"),
        ("transformer_xl", {}, "masked"),
    ],
)
def test_attention_is_that_of_the_methods_papers(method, keys, sides):
    """Outputs and gradients in fp64, in two blocks of queries, for a part of the heads and rows.

    The sequence reaches beyond the training length and the window.
    """
    of_model = 6 if keys is OF_THE_TEXT else 8
    config = tiny_config(
        position={"method": method, **keys},
        train={"objective": sides},
        model={"num_attention_heads": of_model, "hidden_size": 12 * of_model},
    )
    double = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(1)}
    if method in CONTENT:
        shapes = CONTENT[method].shapes(config)
        own = {name: 0.5 * torch.randn(shape, **double) for name, shape in shapes.items()}
    else:
        state, names = random_state(config, seed=1), config.position.tensors(config)
        own = {name.removeprefix("position."): state[name].double() for name in names}
    q, k, v = (torch.randn(300, 1, of_model, 12, **double) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v, *own.values())]
    position, heads, causal = config.position, slice(2, of_model), sides == "next_token"
    terms = position.score_terms(
        config, slice(0, of_model), position.own_of_layer(2, own), q.device
    )
    rows = slice(10, 300) if causal else slice(0, 300)
    turned = position.queries_and_keys(config, q[rows], k, 0, 300)
    ours = attention(
        *(x[:, :, heads] for x in (*turned, v)), **of_heads(terms, heads), causal=causal
    )
    of_query, of_key, of_value = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if method in CONTENT:
        scores = CONTENT[method].products(of_query, of_key, config, own, 2) / 12**0.5
    elif method == "alibi":
        slopes = 2.0 ** (-8 * torch.arange(1, of_model + 1, dtype=torch.float64) / of_model)
        scores = of_query @ of_key.mT / 12**0.5
        scores = scores - slopes[:, None, None] * distances(scores)
    else:
        scores = ORACLES[method](of_query @ of_key.mT / 12**0.5, config, own)
    if causal:
        scores = scores.masked_fill(torch.ones(300, 300, dtype=torch.bool).triu(1), -torch.inf)
    theirs = (scores.softmax(-1) @ of_value).permute(2, 0, 1, 3)[rows, :, heads]
    weigh = torch.randn(ours.shape, **double)
    found = [[x, *torch.autograd.grad((x * weigh).sum(), inputs)] for x in (ours, theirs)]
    # Functions of the scores hold what is learned, and its gradient, in fp32.
    near = 1e-9 if method in CONTENT else 2e-6
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=near, atol=near * b.abs().max().item() + 1e-9)


def test_slopes_that_are_changed_in_place_change_a_mask_that_is_kept():
    q, k, v = torch.randn(3, 16, 1, 2, 8).unbind()
    slopes = torch.tensor([0.5, 0.25])
    before = attention(q, k, v, slopes=slopes, backend="sdpa")
    slopes.mul_(0.1)
    after = attention(q, k, v, slopes=slopes, backend="sdpa")
    assert not torch.allclose(before, after)
    assert torch.equal(after, attention(q, k, v, slopes=slopes.clone(), backend="sdpa"))
