"""Which tokens are sample i, and which samples are a step: arithmetic alone, in O(1) memory whatever the corpus size.

The only state of the data is how many samples were consumed. Sample c of a run (counted from 0 over all epochs and
ranks) is position c % n of epoch c // n, and each epoch visits the n samples of the stream in its own permutation.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8
"""Four rounds of a Feistel network look random on large domains (Luby and Rackoff 1988); small ones take more."""


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Samples in a stream. Each is sequence_length + 1 tokens: neighbours share one, the last target, first input."""
    return max(0, (num_tokens - 1) // sequence_length)


def token_range(sample: int, sequence_length: int) -> tuple[int, int]:
    """(first token, number of tokens) of sample `sample` in the stream."""
    return sample * sequence_length, sequence_length + 1


def sample_ids(consumed: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Stream samples in [0, samples), int64, behind the consumed-sample indexes `consumed` (int64, any epochs)."""
    epochs, positions = np.divmod(np.asarray(consumed, dtype=np.int64), samples)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        ids[now] = permutation(positions[now], samples, seed, int(epoch))
    return ids


def rank_samples(consumed: int, global_batch_size: int, rank: int, ranks: int) -> range:
    """Consumed-sample indexes that data-parallel rank `rank` of `ranks` takes in the step that starts at `consumed`.

    Ranks take consecutive slices, so the ranks' slices one after the other are the same batch whatever their number.
    `global_batch_size` must be a multiple of `ranks`.
    """
    share = global_batch_size // ranks
    return range(consumed + rank * share, consumed + (rank + 1) * share)


def permutation(indexes: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `indexes` (int64, in [0, size)) under a permutation of [0, size) chosen by (seed, epoch).

    A keyed Feistel network permutes the next power of four; an image beyond `size` is sent through again until it is
    inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), under four times on
    average. Each index costs the same, alone or among many.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    images = _feistel(np.asarray(indexes).astype(np.uint64), half, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A bijection on the numbers of 2 * half bits, whatever the round function."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014), modulo 2^64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, epoch: int) -> np.ndarray:
    """One 64-bit key a round; a hash, so that neighbouring seeds and epochs have nothing in common."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")
