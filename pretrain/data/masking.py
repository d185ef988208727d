"""Choose the tokens that a masked model predicts, and what stands in their places.

As in BERT and RoBERTa (Devlin et al. 2019, section 3.1; Liu et al. 2019), 15 % of the tokens are
chosen, of which 80 % are replaced by the mask, 10 % by a random token, and 10 % stay as they are.

All of it is a pure function of where a token stands. In training that is (seed, consumed-sample
index, position), so any layout and any restart sees the same masks, and each epoch has other ones.
In an evaluation it is the token's index in the text, so that every length, checkpoint and run
predicts the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pretrain.data.order import mix

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
