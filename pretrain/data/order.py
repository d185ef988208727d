"""Compute which tokens form a sample and which samples form a step.

The order of the data is a pure function of (seed, epoch, index), with O(1) memory whatever the
size of the corpus. The only data state of a run, and the only one in a checkpoint, is therefore
the number of samples consumed, with the shares of a blend (data/blend.py): any layout, worker count
or restart sees the same samples in the same order.

Terms:

    consumed-sample index  counts samples over the whole run, all epochs and all ranks, from 0
    sample                 an interval of a corpus's tokens; the corpus has n of them
    epoch                  n consecutive samples of a corpus: the one of index c, counted among the
                           samples of this corpus, is position c % n of epoch c // n, and every
                           epoch has its own permutation of the n samples
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8
"""Rounds of the Feistel network.

Four rounds suffice for a large domain (Luby and Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions", 1988). The bound degrades on small domains, so this uses
eight.
"""


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Return the number of samples in a stream of `num_tokens` tokens.

    A sample is sequence_length + 1 tokens (inputs and shifted targets). Neighbouring samples
    overlap by one token: the last target of one is the first input of the next, so no prediction
    is lost.
    """
    return max(0, (num_tokens - 1) // sequence_length)


def token_range(sample: int, sequence_length: int) -> tuple[int, int]:
    """Return (index of the first token, number of tokens) of a sample in its corpus."""
    return sample * sequence_length, sequence_length + 1


def sample_ids(
    consumed: np.ndarray, samples_per_epoch: int, seed: int, corpus: str = ""
) -> np.ndarray:
    """Return the samples of a corpus that stand at the given consumed-sample indexes.

    Args:
        consumed: Consumed-sample indexes, int64 [n], from any mixture of epochs. In a blend, they
            count the samples of this corpus.
        samples_per_epoch: Number of samples in the corpus.
        seed: Seed of the order; one per run.
        corpus: Name of the corpus in a blend. A run of a single corpus needs none.

    Returns:
        Samples, int64 [n], each in [0, samples_per_epoch).
    """
    epochs, positions = np.divmod(np.asarray(consumed, dtype=np.int64), samples_per_epoch)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        ids[in_epoch] = permutation(
            positions[in_epoch], samples_per_epoch, seed, int(epoch), corpus
        )
    return ids


def rank_samples(
    consumed: int, global_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> range:
    """Return the consumed-sample indexes that one data-parallel rank takes in a step.

    Ranks take consecutive slices of the global batch. Their slices, one after the other, are the
    same batch for every number of ranks, which is what lets a run resume on another layout.

    Args:
        consumed: Number of samples consumed before the step, over all ranks.
        global_batch_size: Samples in a step; a multiple of `data_parallel_size`.
        data_parallel_rank: The rank that asks.
        data_parallel_size: The number of ranks.
    """
    share = global_batch_size // data_parallel_size
    first = consumed + data_parallel_rank * share
    return range(first, first + share)


def permutation(
    indexes: np.ndarray, size: int, seed: int, epoch: int, corpus: str = ""
) -> np.ndarray:
    """Map indexes through a pseudorandom permutation of [0, size).

    A keyed Feistel network permutes the smallest domain of 4^k >= size numbers. An image outside
    [0, size) is fed through the network again until it falls inside ("cycle walking": Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002), which takes fewer than four passes on
    average. An index costs the same alone or among many.

    Args:
        indexes: int64 [n], each in [0, size).
        size: Size of the permuted domain.
        seed: Selects the permutation, together with `epoch`.
        epoch: Selects the permutation, together with `seed`.
        corpus: Selects the permutation, together with `seed`.

    Returns:
        Images of the indexes, int64 [n], each in [0, size).
    """
    # The domain of the network has an even number of bits, 2 * half, so that its halves are equal.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch, corpus)
    images = _feistel(np.asarray(indexes).astype(np.uint64), half, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """Permute the numbers of 2 * half bits. A bijection whatever the round function `mix` is."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right


def mix(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer modulo 2^64, so that every input bit affects every output bit.

    Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _round_keys(seed: int, epoch: int, corpus: str) -> np.ndarray:
    """Return one 64-bit key per round.

    The keys are a hash of (seed, epoch, corpus) rather than a sum, so that neighbouring seeds and
    epochs get unrelated permutations. "<u8" fixes the byte order: the keys are the same on
    every machine.
    """
    key = f"{seed} {epoch} {corpus}" if corpus else f"{seed} {epoch}"
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")
