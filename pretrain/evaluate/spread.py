"""Estimate how far a mean loss would move if other text of the same kind were scored.

The losses of neighbouring tokens depend on each other, so their standard error is not that of as
many independent numbers. The bootstrap resamples contiguous blocks of text instead. The blocks
depend on the text alone: every length, protocol and checkpoint that scores the same text has the
same ones, so that differences can be taken block by block.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

BLOCKS = 64
"""A text is cut into at most so many blocks and, if it has as many tokens, at least half of them.
More blocks make the interval itself less noisy; fewer, longer ones cover dependence over a longer
distance."""
RESAMPLES = 10_000
"""Draws of the bootstrap. The ends of the interval are then exact to about 1 % of its width."""
COVERAGE = 0.95


def block_ends(ids: NDArray[np.generic], eos_id: int) -> NDArray[np.int64]:
    """Return where the blocks of a text end, each the index after its last token.

    A block is 1 / BLOCKS of the text, and goes on to the next end of a document unless that would
    double it. So documents that are short stay whole, and of a long one several blocks are made.
    What two documents say does not depend on each other; what two blocks of a long document say may
    a little, which the interval cannot know.

    Args:
        ids: The tokens of the text.
        eos_id: The token that ends every document.
    """
    tokens = len(ids)
    size = -(-tokens // BLOCKS)
    documents = np.flatnonzero(ids == eos_id) + 1
    ends, start = [], 0
    while start < tokens:
        end = start + size
        next_document = np.searchsorted(documents, end)
        if next_document < len(documents) and documents[next_document] < end + size:
            end = int(documents[next_document])
        # What is left over is too short to be a block of its own.
        start = end if tokens - end >= size // 2 + 1 else tokens
        ends.append(start)
    return np.array(ends, dtype=np.int64)


def confidence_interval(
    losses: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[float, float]:
    """Return a 95 % confidence interval of a mean loss: the percentile bootstrap over blocks.

    Whole blocks are drawn with replacement, as many as there are, and the mean over all tokens of
    the drawn blocks is taken. The draws are always the same.

    Args:
        losses: [blocks] summed losses of each block.
        counts: [blocks] tokens of each block.

    Returns:
        Its ends; nan where a loss is not finite, or there are fewer than two blocks.
    """
    if len(losses) < 2 or not np.isfinite(losses).all():
        return np.nan, np.nan
    draws = _draws(len(losses))
    means = (draws @ losses) / (draws @ counts)
    tail = 100 * (1 - COVERAGE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


@functools.lru_cache(maxsize=2)
def _draws(blocks: int) -> NDArray[np.float64]:
    """Return how often each block is drawn, [RESAMPLES, blocks]."""
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(blocks, np.full(blocks, 1 / blocks), RESAMPLES)
    return drawn.astype(np.float64)
