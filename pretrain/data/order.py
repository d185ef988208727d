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
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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


# ---- Choose the tokens that a masked model predicts, and what stands in their places ----
# As in BERT and RoBERTa (Devlin et al. 2019, section 3.1; Liu et al. 2019), 15 % of the tokens are
# chosen, of which 80 % are replaced by the mask, 10 % by a random token, and 10 % stay as they are.
#
# All of it is a pure function of where a token stands. In training that is (seed, consumed-sample
# index, position), so any layout and any restart sees the same masks, and each epoch has other
# ones. In an evaluation it is the token's index in the text, so that every length, checkpoint and
# run predicts the same tokens.


SHARE = 0.15
"""Share of the tokens that are chosen."""
TEXT_BLOCK = 20
"""Tokens of an evaluated text of which 15 %, three, are chosen."""
_TEXT = "validation text"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Ids = NDArray[np.int64]
Chosen = NDArray[np.bool_]


def num_chosen(length: int) -> int:
    """Return how many tokens of a sample of `length` tokens are chosen: the same of each, >= 1.

    Since it is the same, the mean loss of a batch does not depend on how ranks share it.
    """
    return max(1, round(SHARE * length))


def mask_samples(
    tokens: Ids, samples: Sequence[int], seed: int, mask_id: int
) -> tuple[Ids, Chosen]:
    """Return the inputs of training samples, and which tokens are to be predicted.

    Args:
        tokens: The samples' tokens, [B, S].
        samples: Their consumed-sample indexes, [B].
        seed: The run's seed.
        mask_id: What most chosen tokens are replaced by. Random tokens are below it.
    """
    numbers = _numbers(f"mask {seed}", np.asarray(samples, dtype=np.uint64), tokens.shape[1])
    chosen = _smallest(numbers[:, :, 0], num_chosen(tokens.shape[1]))
    return _replaced(tokens, chosen, numbers, mask_id), chosen


def mask_text(tokens: NDArray[np.generic], first: int, mask_id: int) -> tuple[Ids, Chosen]:
    """Return the inputs of a piece of a text, and which tokens are to be predicted.

    Args:
        tokens: Tokens `first` and following of the text, [n].
        first: Index of the first of them in the text.
        mask_id: As in `mask_samples`.
    """
    begin, end = first // TEXT_BLOCK, -(-(first + len(tokens)) // TEXT_BLOCK)
    numbers = _numbers(_TEXT, np.arange(begin, end, dtype=np.uint64), TEXT_BLOCK)
    chosen = _smallest(numbers[:, :, 0], num_chosen(TEXT_BLOCK)).reshape(-1)
    piece = slice(first - begin * TEXT_BLOCK, first - begin * TEXT_BLOCK + len(tokens))
    of_piece = numbers.reshape(-1, 3)[piece]
    ids = np.asarray(tokens, dtype=np.int64)
    return _replaced(ids, chosen[piece], of_piece, mask_id), chosen[piece]


def _numbers(key: str, rows: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Return three random numbers for each position of each row, [rows, length, 3].

    Each row is a SplitMix64 generator, which begins at a hash of the key and the row.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    begin = mix(np.frombuffer(digest, dtype="<u8") ^ mix(rows + np.uint64(1)))
    counter = np.arange(1, 3 * length + 1, dtype=np.uint64) * _GOLDEN
    return mix(begin[:, None] + counter).reshape(len(rows), length, 3)


def _smallest(numbers: NDArray[np.uint64], count: int) -> Chosen:
    """Return where the `count` smallest numbers of each row are."""
    chosen = np.zeros(numbers.shape, dtype=bool)
    order = np.argsort(numbers, axis=1, kind="stable")[:, :count]
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def _replaced(tokens: Ids, chosen: Chosen, numbers: NDArray[np.uint64], mask_id: int) -> Ids:
    """Return the tokens with what stands in the places of those that are chosen.

    Args:
        tokens: Any shape.
        chosen: The same shape.
        numbers: The same shape and 3. The second numbers say what becomes of a token, the third
            ones which random token.
        mask_id: The mask. Random tokens are below it.
    """
    share = numbers[..., 1].astype(np.float64) / 2.0**64
    random = (numbers[..., 2] % np.uint64(mask_id)).astype(np.int64)
    inputs = np.where(chosen & (share < 0.8), mask_id, tokens)
    return np.where(chosen & (share >= 0.8) & (share < 0.9), random, inputs)
