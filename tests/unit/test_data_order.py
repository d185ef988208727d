"""Test that the order of the data is a random-looking permutation, the same for every layout."""

import hashlib

import numpy as np
import pytest

from pretrain.data import order

SIZES = [*range(1, 66), 127, 128, 129, 255, 257, 997, 1023, 1024, 1025, 4095, 4097, 10007]


def permuted(indexes: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the samples at these positions of an epoch."""
    return order.sample_ids(epoch * size + indexes, [size], seed)


def images(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permuted(np.arange(size), size, seed, epoch)


@pytest.mark.parametrize("epoch", [0, 1])
def test_permutation_is_a_bijection_at_every_size(epoch):
    for size in SIZES:
        assert np.array_equal(np.sort(images(size, seed=7, epoch=epoch)), np.arange(size)), size


def test_permutation_equals_the_textbook_in_python_integers():
    """Compute the same network one number at a time, without numpy's fixed-width arithmetic."""

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    def image(index: int, size: int, seed: int, epoch: int) -> int:
        half = next(h for h in range(1, 33) if 4**h >= size)
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=64).digest()
        while True:
            left, right = divmod(index, 2**half)
            for i in range(0, 64, 8):
                key = int.from_bytes(digest[i : i + 8], "little")
                left, right = right, left ^ mix(right ^ key) % 2**half
            index = left * 2**half + right
            if index < size:
                return index

    for size, seed, epoch in [(1, 0, 0), (5, 3, 1), (1000, 1, 2), (10**12 + 39, 2**63, 10**6)]:
        asked = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
        expected = [image(int(i), size, seed, epoch) for i in asked]
        assert permuted(asked, size, seed, epoch).tolist() == expected


def test_permutation_stays_what_it_is():
    """Recorded from version 1 of the data format; a change would reorder the data of every run."""
    assert images(10, seed=1234).tolist() == [3, 6, 4, 5, 7, 1, 9, 8, 2, 0]


def test_small_streams_are_shuffled_too():
    """Three samples have six orders. Over 6,000 epochs each comes 1,000 times, within 5 x 29.

    29 is the standard deviation, sqrt(6000 * 1/6 * 5/6).
    """
    orders, counts = np.unique(
        [images(3, seed=5, epoch=e) for e in range(6000)], axis=0, return_counts=True
    )
    assert len(orders) == 6
    assert np.abs(counts - 1000).max() < 5 * 29


def test_samples_cover_the_stream_and_share_one_token():
    """With 11 tokens and L = 5, inputs are 0-4 and 5-9, targets 1-5 and 6-10."""
    assert [order.num_samples(n, 5) for n in (0, 1, 5, 6, 10, 11, 16)] == [0, 0, 0, 1, 1, 2, 3]
    assert [order.token_range(i, 5) for i in range(2)] == [(0, 6), (5, 6)]


# ---- at the size of a run ------------------------------------------------------------------------


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return a chi-square statistic in standard deviations from its mean.

    Its mean is the number of degrees of freedom k, and its variance 2 k.
    """
    degrees = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**31, 50)])
def test_a_million_samples_are_shuffled_well(seed, epoch):
    """Displacement, neighbors and the place of neighbors, each within five deviations.

    The displacement |image - index| of a random permutation of n has the triangular density
    2 (n - d) / n^2, and so has the distance of the images of two neighbors. The serial correlation
    has the standard deviation 1 / sqrt(n). A permutation has on average one fixed point, and one
    pair of neighbors whose images are next to each other in this order; 12 or more of either
    have a probability of 1e-9.
    """
    size, bins = 10**6, 1000
    found = permuted(np.arange(size), size, seed, epoch)
    edges = np.arange(bins + 1) / bins
    triangular = size * np.diff(2 * edges - edges**2)
    displacement = np.histogram(np.abs(found - np.arange(size)) / size, edges)[0]
    assert abs(chi_square(displacement, triangular)) < 5
    jumps = np.diff(found)
    distance = np.histogram(np.abs(jumps) / size, edges)[0]
    assert abs(chi_square(distance, triangular * (1 - 1 / size))) < 5
    for lag in (1, 2, 64, 1024):
        assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 5 / np.sqrt(size)
    assert (found == np.arange(size)).sum() < 12 and (jumps == 1).sum() < 12
    # Every stretch of the order is spread over the whole corpus: ten thousand samples, 100 bins.
    for start in range(0, size, 250_000):
        part = np.histogram(found[start : start + 10_000], 100, (0, size))[0]
        assert abs(chi_square(part, np.full(100, 100.0))) < 5
