"""The confidence interval of a loss, against a closed form, scipy and texts of known mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pretrain.evaluation.records import GROUPS, cluster_interval, confidence_interval
from pretrain.evaluation.windows import BLOCKS, block_ends

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
    assert set(block_ends(ids, EOS).tolist()) <= set(np.cumsum(documents).tolist())
    # 6,400 tokens in one document: blocks of 100.
    assert block_ends(text(6400), EOS).tolist() == list(range(100, 6401, 100))
    # A document that ends soon after a block could end closes it.
    assert block_ends(text(130, 6270), EOS)[:3].tolist() == [130, 230, 330]


# ---- the interval --------------------------------------------------------------------------------
def blocks(seed: int, count: int = 64) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    counts = generator.integers(200, 400, count).astype(float)
    return counts * (3 + 0.2 * generator.standard_normal(count)), counts


def test_it_is_the_t_test_on_blocks_of_one_size():
    for count in (2, 3, 8, 16, GROUPS):
        losses = np.random.default_rng(count).standard_normal(count) * 9 + 300
        found = stats.ttest_1samp(losses / 100, 0).confidence_interval(0.95)
        expected = (found.low, found.high)
        # Student's t is found to its last digits; the sums are rounded in another order.
        assert confidence_interval(losses, np.full(count, 100.0)) == pytest.approx(
            expected, rel=1e-11
        )
    # Of more blocks, neighbors are taken together, here each two.
    losses = np.random.default_rng(0).standard_normal(64) + 3
    found = stats.ttest_1samp(losses.reshape(32, 2).mean(1), 0).confidence_interval(0.95)
    assert confidence_interval(losses, np.ones(64)) == pytest.approx(found, rel=1e-11)


def test_blocks_without_tokens_are_none():
    """As of masked tokens, of which a short block may have none."""
    losses, counts = np.array([3.0, 2.0, 4.0]), np.array([1.0, 1.0, 2.0])
    padded = [np.insert(values, [0, 1, 3], 0.0) for values in (losses, counts)]
    assert confidence_interval(*padded) == pytest.approx(confidence_interval(losses, counts))
    assert np.isnan(confidence_interval(np.array([0.0, 3.0]), np.array([0.0, 1.0]))).all()
    assert np.isnan(confidence_interval(np.zeros(2), np.zeros(2))).all()


def ar1(generator: np.random.Generator, texts: int, tokens: int, phi: float) -> np.ndarray:
    """Return losses [texts, tokens] of mean 3 and deviation 1 whose neighbors correlate by phi."""
    noise = generator.standard_normal((tokens, texts)) * math.sqrt(1 - phi**2)
    losses, last = np.empty((tokens, texts)), generator.standard_normal(texts)
    for t in range(tokens):
        last = phi * last + noise[t]
        losses[t] = last
    return 3 + losses.T


@pytest.mark.parametrize("phi", [0.0, 0.9])
@pytest.mark.parametrize("count", [8, 64])
def test_it_covers_the_mean_of_dependent_losses(phi, count):
    """In 95 of 100 texts the interval holds the true mean, however few the blocks.

    Blocks of 128 tokens are long against the 19 tokens over which losses of phi = 0.9 depend on
    each other. A percentile bootstrap over 8 blocks holds it in 88 of 100, and over 16 in 92.
    """
    texts = 1000
    sums = ar1(np.random.default_rng(2), texts, 128 * count, phi).reshape(texts, count, 128).sum(2)
    counts = np.full(count, 128.0)
    intervals = np.array([confidence_interval(text, counts) for text in sums])
    hits = int(((intervals[:, 0] <= 3) & (intervals[:, 1] >= 3)).sum())
    # 950 of 1000, and three standard deviations of the count are 21. At phi = 0.9 neighboring
    # blocks correlate by 0.08: the interval of 32 groups or fewer is at most 8 % too narrow, which
    # holds the mean in 93 of 100.
    least = 929 if phi == 0 else 906
    assert least <= hits <= 971


def test_clusters_of_any_size_are_covered():
    """Samples of few documents, whose sizes differ by far, as of needles in some plays."""
    generator = np.random.default_rng(4)
    texts, hits = 1000, 0
    for _ in range(texts):
        counts = generator.integers(4, 20, 6).astype(float)
        # Documents differ by as much as samples within one.
        sums = counts * generator.standard_normal(6) + np.sqrt(counts) * generator.standard_normal(
            6
        )
        low, high = cluster_interval(sums, counts)
        hits += low <= 0 <= high
    # Clusters of several sizes count for fewer: 93 of 100, less three standard deviations (2.4).
    assert 906 <= hits <= 971


@pytest.mark.parametrize(
    "losses", [[3.0], [3.0, math.nan], [3.0, math.inf]], ids=["one block", "nan", "infinity"]
)
def test_no_interval_is_nan(losses):
    found = confidence_interval(np.array(losses), np.ones(len(losses)))
    assert all(math.isnan(end) for end in found)
