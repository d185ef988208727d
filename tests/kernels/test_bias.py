"""Test slopes and buckets against literal values and against transformers."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from pretrain.kernels.call import of_heads, relative_buckets
from pretrain.kernels.dispatch import attention
from pretrain.positions.alibi import alibi_slopes
from tests.conftest import tiny_config
from tests.reference.content import CONTENT
from tests.reference.dense_gpt import random_state
from tests.reference.positions import ORACLES

EIGHT = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
ODD_SIXTEENTHS = [
    0.70710678,
    0.35355339,
    0.17677670,
    0.08838835,
    0.04419417,
    0.02209709,
    0.01104854,
    0.00552427,
]


def test_slopes_of_powers_of_two_are_the_papers():
    assert alibi_slopes(8).tolist() == EIGHT
    # Sixteen heads: 2^-0.5, 2^-1, .. 2^-8, which are the two lists above interleaved.
    expected = [slope for pair in zip(ODD_SIXTEENTHS, EIGHT) for slope in pair]
    # The tolerance is for the eight digits that are written above.
    torch.testing.assert_close(alibi_slopes(16), torch.tensor(expected), rtol=1e-6, atol=0)


def test_slopes_of_twelve_heads_are_those_of_the_authors_code():
    """They are those of 8 heads, then every second of 16; the formula would begin with 2^(-2/3)."""
    torch.testing.assert_close(
        alibi_slopes(12), torch.tensor(EIGHT + ODD_SIXTEENTHS[:4]), rtol=1e-6, atol=0
    )
    assert alibi_slopes(1).tolist() == [2.0**-8]


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
    ("method", "keys"),
    [*((method, {}) for method in ORACLES), ("kerple", {"kerple_kernel": "power"})],
)
def test_methods_of_scores_are_those_of_their_papers(method, keys):
    """Weights and gradients in fp64, of the last queries of a sequence, beyond L and the window.

    What is learned is fp32, as the model's masters are, and so are its gradients.
    """
    config = tiny_config(
        position={"method": method, **keys},
        model={"num_attention_heads": 4},
    )
    names = config.position.tensors(config)
    given = random_state(config, seed=1)
    own = {name.removeprefix("position."): given[name].requires_grad_() for name in names}
    length, first = 600, 500
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(1, 4, length, length, dtype=torch.float64, generator=generator)
    weigh = torch.randn(1, 4, length - first, length, dtype=torch.float64, generator=generator)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[first:]
    places = torch.arange(length)
    function = config.position.score_terms(config, slice(0, 4), own, scores.device)["scores"]
    halves = [function.of_heads(slice(0, 3)), function.of_heads(slice(3, 4))]
    q = k = scores.new_zeros(1, 4, 0, 1)
    ours = torch.cat(
        [
            f(x, q, k, places[first:], places)
            for f, x in zip(halves, scores[:, :, first:].split([3, 1], 1))
        ],
        1,
    )
    if function.window is not None:
        ours = ours.masked_fill(places[first:, None] - places >= function.window, -torch.inf)
    theirs = ORACLES[method](scores, config, own)[:, :, first:]
    found = []
    for each in (ours, theirs):
        weights = each.masked_fill(later, -torch.inf).softmax(-1)
        gradients = torch.autograd.grad((weights * weigh).sum(), list(own.values())) if own else ()
        found.append([weights, *gradients])
    for a, b in zip(*found):
        # A number that is added to all scores of a head, as FIRE's last one, has a gradient of 0.
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6 * b.abs().max().item() + 1e-12)


@pytest.mark.parametrize(
    ("method", "sides"),
    [
        *((method, "next_token") for method in CONTENT),
        ("shaw", "masked"),
        ("transformer_xl", "masked"),
    ],
)
def test_attention_of_methods_that_read_the_content_is_that_of_their_papers(method, sides):
    """Outputs and gradients in fp64, in two blocks of queries, for a part of the heads and rows."""
    config = tiny_config(position={"method": method}, train={"objective": sides})
    shapes, generator = CONTENT[method].shapes(config), torch.Generator().manual_seed(1)
    double = {"dtype": torch.float64, "generator": generator}
    own = {name: 0.5 * torch.randn(shape, **double) for name, shape in shapes.items()}
    q, k, v = (torch.randn(300, 1, 8, 12, **double) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v, *own.values())]
    position, heads, causal = config.position, slice(2, 8), sides == "next_token"
    terms = position.score_terms(config, slice(0, 8), position.own_of_layer(2, own), q.device)
    rows = slice(10, 300) if causal else slice(0, 300)
    turned = position.queries_and_keys(config, q[rows], k, 0, 300)
    ours = attention(
        *(x[:, :, heads] for x in (*turned, v)), **of_heads(terms, heads), causal=causal
    )
    scores = CONTENT[method].products(*(x.permute(1, 2, 0, 3) for x in (q, k)), config, own, 2)
    if causal:
        later = torch.ones(300, 300, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    theirs = (scores / 12**0.5).softmax(-1) @ v.permute(1, 2, 0, 3)
    theirs = theirs.permute(2, 0, 1, 3)[rows, :, heads]
    weigh = torch.randn(ours.shape, **double)
    found = [[x, *torch.autograd.grad((x * weigh).sum(), inputs)] for x in (ours, theirs)]
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
