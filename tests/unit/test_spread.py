"""The confidence interval of a loss, against a closed form, scipy and texts of known mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pretrain.evaluate.spread import BLOCKS, block_ends, confidence_interval

EOS = 0


def text(*documents: int) -> np.ndarray:
    """Return the tokens of documents of these lengths, their last token among them."""
    return np.concatenate([[*([7] * (size - 1)), EOS] for size in documents])


# ---- blocks --------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 100, 127, 128, 1000, 16_384, 137_001])
@pytest.mark.parametrize("documents", ["none", "short", "long"])
def test_blocks_cover_the_text_once_and_are_enough_and_alike(tokens, documents):
    ids = np.full(tokens, 7)
    if documents != "none":
        size = 5 if documents == "short" else tokens // 3 + 1
        ids[size - 1 :: size] = EOS
    ends = block_ends(ids, EOS)
    sizes = np.diff(ends, prepend=0)
    whole = -(-tokens // BLOCKS)
    assert ends[-1] == tokens and sizes.min() >= 1
    assert sizes.max() <= 2 * whole + whole // 2 and (tokens < BLOCKS or len(sizes) >= BLOCKS // 3)
    assert len(sizes) <= BLOCKS


def test_short_documents_stay_whole_and_long_ones_are_cut():
    documents = [37, 60, 12, 91, 45, 80] * 40
    ids = text(*documents)
    ends = set(block_ends(ids, EOS).tolist())
    assert ends <= set(np.cumsum(documents).tolist())
    # 6,400 tokens in one document: blocks of 100.
    assert block_ends(text(6400), EOS).tolist() == list(range(100, 6401, 100))
    # A document that ends soon after a block could end closes it.
    assert block_ends(text(130, 6270), EOS)[:3].tolist() == [130, 230, 330]


# ---- the interval --------------------------------------------------------------------------------
def blocks(seed: int, count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    counts = generator.integers(200, 400, count).astype(float)
    return counts * (3 + 0.2 * generator.standard_normal(count)), counts


def test_it_is_the_closed_form_where_that_holds():
    """The mean is a ratio of sums, whose variance is that of the residuals of the blocks."""
    for seed in range(5):
        losses, counts = blocks(seed)
        mean = losses.sum() / counts.sum()
        residuals = losses - mean * counts
        error = math.sqrt((residuals**2).sum()) / counts.sum()
        low, high = confidence_interval(losses, counts)
        # Its ends are quantiles of 10,000 draws, known to about 1 % of the width each; the 64
        # blocks' own skewness moves them by some percent more.
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.06)
        assert (low + high) / 2 == pytest.approx(mean, abs=0.15 * error)


def test_it_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    losses, counts = blocks(1)
    found = stats.bootstrap(
        (losses, counts),
        lambda a, b, axis: a.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=10_000,
        method="percentile",
        rng=np.random.default_rng(5),
    ).confidence_interval
    low, high = confidence_interval(losses, counts)
    width = high - low
    assert (low, high) == pytest.approx((found.low, found.high), abs=0.03 * width)


def ar1(generator: np.random.Generator, texts: int, tokens: int, phi: float) -> np.ndarray:
    """Return losses [texts, tokens] of mean 3 and deviation 1 whose neighbours correlate by phi."""
    noise = generator.standard_normal((tokens, texts)) * math.sqrt(1 - phi**2)
    losses, last = np.empty((tokens, texts)), generator.standard_normal(texts)
    for t in range(tokens):
        last = phi * last + noise[t]
        losses[t] = last
    return 3 + losses.T


@pytest.mark.parametrize("phi", [0.0, 0.9])
def test_it_covers_the_mean_of_dependent_losses(phi):
    """In 95 of 100 texts the interval holds the true mean.

    Blocks of 128 tokens are long against the 19 tokens over which losses of phi = 0.9 depend on
    each other. An interval from single tokens would hold it in 35 of 100.
    """
    texts, tokens = 400, 8192
    losses = ar1(np.random.default_rng(2), texts, tokens, phi)
    ends = block_ends(np.full(tokens, 7), EOS)
    starts = np.concatenate([[0], ends[:-1]])
    counts = np.diff(ends, prepend=0).astype(float)
    hits = 0
    for sums in np.add.reduceat(losses, starts, axis=1):
        low, high = confidence_interval(sums, counts)
        hits += low <= 3 <= high
    # 64 blocks: a percentile bootstrap covers 94.4 %. Of 400 texts that is 378, and four standard
    # deviations of the count are 18; at phi = 0.9 what crosses a block's end takes 1.5 % more.
    assert 354 <= hits <= 396


def test_the_same_draws_for_all_so_that_differences_pair():
    losses, counts = blocks(3)
    low, high = confidence_interval(losses, counts)
    # Another model that is worse by 0.5 nats at every token has the same interval, moved.
    moved = confidence_interval(losses + 0.5 * counts, counts)
    assert moved == pytest.approx((low + 0.5, high + 0.5), rel=1e-12)
    assert confidence_interval(losses, counts) == (low, high)


@pytest.mark.parametrize(
    "losses", [[3.0], [3.0, math.nan], [3.0, math.inf]], ids=["one block", "nan", "infinity"]
)
def test_no_interval_is_nan(losses):
    found = confidence_interval(np.array(losses), np.ones(len(losses)))
    assert all(math.isnan(end) for end in found)
