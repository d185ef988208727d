"""Test that the order of the data is a random-looking permutation, the same for every layout."""

import hashlib

import numpy as np
import pytest

from pretrain.data import order

SIZES = [*range(1, 66), 127, 128, 129, 255, 257, 997, 1023, 1024, 1025, 4095, 4097, 10007]


def images(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return order.permutation(np.arange(size), size, seed, epoch)


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
        assert order.permutation(asked, size, seed, epoch).tolist() == expected


def test_permutation_stays_what_it_is():
    """Recorded from version 1 of the data format; a change would reorder the data of every run."""
    assert images(10, seed=1234).tolist() == [3, 6, 4, 5, 7, 1, 9, 8, 2, 0]


def test_any_part_of_the_permutation_can_be_asked_for_alone():
    whole = images(1000, seed=3)
    assert [
        int(order.permutation(np.array([i]), 1000, 3, 0)[0]) for i in range(0, 1000, 37)
    ] == whole[::37].tolist()
    assert np.array_equal(
        order.permutation(np.array([999, 0, 999]), 1000, 3, 0), whole[[999, 0, 999]]
    )


def test_a_corpus_of_any_size_costs_no_memory():
    """A table of this permutation of 10^15 samples would take 8 PB."""
    asked = np.arange(10**15 - 1000, 10**15)
    found = order.permutation(asked, 10**15, 0, 0)
    assert len(np.unique(found)) == 1000
    assert found.min() >= 0 and found.max() < 10**15


def test_seeds_and_epochs_give_unrelated_permutations():
    """Two random permutations agree Poisson(1) times; more than 10 times has probability 1e-8."""
    size = 4097
    several = [
        images(size, seed, epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (10, 0), (0, 10)]
    ]
    for i, first in enumerate(several):
        for second in several[:i]:
            assert (first == second).sum() <= 10


@pytest.mark.parametrize("size", [997, 4096, 10007])
@pytest.mark.parametrize("seed", [0, 1, 1234])
def test_permutation_looks_random(size, seed):
    """Check correlations and a chi-square statistic, with bounds at five standard deviations.

    The correlation of n random pairs has standard deviation 1 / sqrt(n). A chi-square statistic of
    k degrees of freedom has mean k and variance 2 k.
    """
    found = images(size, seed)
    for other in (np.arange(size), np.roll(found, 1), np.roll(found, 2)):
        assert abs(np.corrcoef(found, other)[0, 1]) < 5 / np.sqrt(size)
    bins = 12
    cells, _, _ = np.histogram2d(np.arange(size), found, bins=bins)
    expected = np.outer(cells.sum(1), cells.sum(0)) / size
    statistic, degrees = ((cells - expected) ** 2 / expected).sum(), (bins - 1) ** 2
    assert abs(statistic - degrees) < 5 * np.sqrt(2 * degrees)


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


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own():
    ids = order.sample_ids(np.arange(5 * 101), 101, seed=9).reshape(5, 101)
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(101), (5, 1)))
    assert len(np.unique(ids, axis=0)) == 5
    assert np.array_equal(ids[3], images(101, seed=9, epoch=3))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_the_global_batch_in_its_order(ranks):
    for consumed in (0, 16, 1600):
        slices = [list(order.rank_samples(consumed, 16, rank, ranks)) for rank in range(ranks)]
        assert {len(s) for s in slices} == {16 // ranks}
        assert [index for s in slices for index in s] == list(range(consumed, consumed + 16))
