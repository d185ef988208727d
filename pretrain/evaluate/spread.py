"""Estimate how far a mean loss would move if other text of the same kind were scored.

The losses of neighbouring tokens depend on each other, so their standard error is not that of as
many independent numbers. That of blocks of the text is taken instead, which depend on each other
the less the longer they are. The blocks depend on the text alone: every length, protocol and
checkpoint that scores the same text has the same ones, so that differences can be taken block by
block.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

BLOCKS = 64
"""A text is cut into at most so many blocks and, if it has as many tokens, at least half of them.
Losses are kept by block."""
GROUPS = 32
"""Neighbouring blocks are taken together to at most so many groups for an interval. More make the
interval itself less noisy; fewer, longer ones cover dependence over a longer distance. Measured on
16,384 tokens of the demo's validation text (docs/decisions.md): 64 groups are 10 % too narrow."""
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
    """Return a 95 % confidence interval of a mean loss over the blocks of a text.

    Args:
        losses: [blocks] summed losses of each block, in the order of the text.
        counts: [blocks] tokens of each block.

    Returns:
        Its ends; nan where a loss is not finite, or fewer than two blocks have tokens.
    """
    if len(losses) > GROUPS:
        starts = np.arange(GROUPS) * len(losses) // GROUPS
        losses, counts = np.add.reduceat(losses, starts), np.add.reduceat(counts, starts)
    return cluster_interval(losses, counts)


def cluster_interval(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[float, float]:
    """Return a 95 % confidence interval of a mean over values that come in clusters.

    The mean is a ratio, of all sums to all counts, whose variance is that of the residuals of the
    clusters (Cochran, "Sampling Techniques", 1977, section 6.3), with Student's t for as many. Of
    clusters of one size it is the interval of the t-test on their means.

    Args:
        sums: [clusters] sum of the values of each cluster; clusters do not depend on each other.
        counts: [clusters] how many values each has.

    Returns:
        Its ends; nan where a sum is not finite, or fewer than two clusters have values.
    """
    # A cluster without values says nothing about how far apart clusters are.
    clusters = int(np.count_nonzero(counts))
    if clusters < 2 or not np.isfinite(sums).all():
        return np.nan, np.nan
    mean = sums.sum() / counts.sum()
    squares = np.square(sums - mean * counts).sum() * clusters / (clusters - 1)
    half = student_t(clusters - 1) * np.sqrt(squares) / counts.sum()
    return float(mean - half), float(mean + half)


@functools.cache
def student_t(freedom: int) -> float:
    """Return the number that Student's t exceeds, up or down, in 5 % of cases.

    Args:
        freedom: Degrees of freedom, 1 or more.
    """
    low, high = 0.0, 13.0
    # Until the two are neighbours, or one number: some 55 halvings.
    while low < (middle := (low + high) / 2) < high:
        if _share_within(middle, freedom) < COVERAGE:
            low = middle
        else:
            high = middle
    return high


def _share_within(t: float, freedom: int) -> float:
    """Return the probability that Student's t lies between -t and t.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * n / (n + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
