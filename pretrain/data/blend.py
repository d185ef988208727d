"""Compute which corpus every sample of a run comes from, as arithmetic and with O(1) memory.

Samples never cross corpora: each corpus has a grid of samples of its own. A blend deals the
consumed-sample indexes of a run out to its corpora, in exact integers whatever their size, and
every corpus passes through its own permutations (data/order.py), one for each pass over it.

Two corpora of shares A and B are easy to blend: of the first p samples, the first corpus gets
(p A + (A+B)/2) // (A+B), which is never off by more than 1/2. More corpora are blended by a binary
tree of such splits. A count that is off by e before a split is off by e s + 1/2 after it, where s
is the share of the branch. The smallest shares are joined first, so that errors are passed on to
small branches: the count of every corpus of the published run is at most 1.11 samples off, in any
number of samples from the beginning on, and those of random shares at most 1.6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pretrain.config import ConfigError, RunConfig
from pretrain.config.schema import CorpusSection
from pretrain.data import order
from pretrain.data.stream import TokenStream

MAX_TOTAL = 2**53
"""A checkpoint records no larger integers, and could not be read. Rounding to so many parts moves
no corpus by as much as a thousandth of a sample in 10^12."""


@dataclass(frozen=True)
class Segment:
    """A part of a run in which the blend is the same, as a checkpoint records it."""

    start: int
    """The consumed-sample index at which it begins."""
    samples: dict[str, int]
    """Corpus -> samples in it."""
    shares: dict[str, int]
    """Corpus -> its share, relative to those of the others."""
    consumed: dict[str, int]
    """Corpus -> samples of it that were consumed before `start`."""


class Split(NamedTuple):
    """A node of the tree: deals samples out to two branches."""

    left: Tree
    right: Tree
    share: int
    """The share of the left branch."""
    total: int
    """The shares of both branches."""


Tree = Split | int
"""A split, or the number of a corpus."""


class Blend:
    """Deals the samples of a run out to its corpora."""

    def __init__(self, segment: Segment, seed: int) -> None:
        """Make the tree.

        Args:
            segment: The corpora, which are numbered in the order of `segment.samples`.
            seed: Seed of the order of samples.
        """
        self.segment = segment
        self.names = tuple(segment.samples)
        self._seed = seed
        self._samples = [segment.samples[name] for name in self.names]
        self._before = [segment.consumed[name] for name in self.names]
        # A corpus that is alone is read in the order of runs that know no corpora.
        self._keys = self.names if len(self.names) > 1 else ("",)
        self._tree = tree_of(segment.shares)

    def locate(self, consumed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which samples stand at the given consumed-sample indexes.

        Args:
            consumed: Consumed-sample indexes, int64 [n], none before `segment.start`.

        Returns:
            (corpora, int64 [n]; samples within their corpora, int64 [n]).
        """
        positions = np.asarray(consumed, dtype=np.int64) - self.segment.start
        if len(positions) and positions.min() < 0:
            raise ValueError(f"sample {min(consumed)}: the blend begins at {self.segment.start}")
        corpora, samples = np.empty_like(positions), np.empty_like(positions)
        self._deal(self._tree, np.arange(len(positions)), positions, corpora, samples)
        for number, (size, name) in enumerate(zip(self._samples, self._keys, strict=True)):
            here = corpora == number
            draws = samples[here] + self._before[number]
            samples[here] = order.sample_ids(draws, size, self._seed, name)
        return corpora, samples

    def counts(self, consumed: int) -> dict[str, int]:
        """Return how many samples of each corpus are among the first `consumed` of the run."""
        counts = list(self._before)

        def count(tree: Tree, position: int) -> None:
            if isinstance(tree, int):
                counts[tree] += position
                return
            left = (position * tree.share + tree.total // 2) // tree.total
            count(tree.left, left)
            count(tree.right, position - left)

        count(self._tree, consumed - self.segment.start)
        return dict(zip(self.names, counts, strict=True))

    def passes_begun(self, before: int, after: int) -> dict[str, int]:
        """Return the corpora that begin another pass, with its number, from 2.

        Args:
            before: The first of some consecutive consumed-sample indexes.
            after: The index after the last one.
        """
        earlier, later = self.counts(before), self.counts(after)
        passes = {
            name: ((earlier[name] + size - 1) // size, (later[name] + size - 1) // size)
            for name, size in zip(self.names, self._samples, strict=True)
            if size
        }
        return {name: new for name, (old, new) in passes.items() if new > max(old, 1)}

    def _deal(
        self,
        tree: Tree,
        where: np.ndarray,
        positions: np.ndarray,
        corpora: np.ndarray,
        samples: np.ndarray,
    ) -> None:
        """Fill in the corpora of some samples, and which of their corpus's samples they are.

        Args:
            tree: Whose samples they are.
            where: Their places in `corpora` and `samples`, int64 [m].
            positions: Which of the tree's samples they are, int64 [m].
            corpora: Filled in at `where`.
            samples: Filled in at `where`: the number of samples of the corpus before each.
        """
        if not len(where):
            return
        if isinstance(tree, int):
            corpora[where], samples[where] = tree, positions
            return
        before, after = _count(tree, positions), _count(tree, positions + 1)
        left = after > before
        self._deal(tree.left, where[left], before[left], corpora, samples)
        self._deal(tree.right, where[~left], (positions - before)[~left], corpora, samples)


def _count(split: Split, positions: np.ndarray) -> np.ndarray:
    """Return how many of the first samples of a split go left, int64 [n], exactly."""
    rounds, rest = np.divmod(positions, split.total)
    if split.total > 2**31:
        # The product below may exceed 63 bits: Python's integers do not.
        rest = rest.astype(object)
    part = (rest * split.share + split.total // 2) // split.total
    counts: np.ndarray = rounds * split.share + part.astype(np.int64)
    return counts


def tree_of(shares: Mapping[str, int]) -> Tree:
    """Return the tree of splits: the two smallest shares are joined until one is left.

    Args:
        shares: Corpus -> share; corpora are numbered in this order. Those without a share are left
            out.
    """
    # By size and name, so that the tree does not depend on the order of the corpora.
    leaves: list[tuple[int, Tree]] = [
        (share, number)
        for share, _, number in sorted(
            ((share, name, number) for number, (name, share) in enumerate(shares.items()) if share),
            key=lambda leaf: (-leaf[0], leaf[1]),
        )
    ]
    while len(leaves) > 1:
        (small, right), (large, left) = leaves.pop(), leaves.pop()
        total = large + small
        place = next((i for i, leaf in enumerate(leaves) if leaf[0] < total), len(leaves))
        leaves.insert(place, (total, Split(left, right, large, total)))
    return leaves[0][1]


def blend_of(
    stream: TokenStream,
    sequence_length: int,
    corpora: Mapping[str, CorpusSection],
    *,
    seed: int,
    before: Segment | None = None,
    consumed: int = 0,
) -> Blend:
    """Return the blend of a run: the one it had, or from here on another one.

    Args:
        stream: The training split.
        sequence_length: Tokens that the model sees; a sample has one more.
        corpora: `data.corpora`, which has the shares; {} for shares proportional to size.
        seed: Seed of the order of samples.
        before: The segment that the checkpoint recorded; None for a run that begins, and in
            checkpoints of before there were blends.
        consumed: Samples consumed so far.

    Returns:
        The blend. If samples or shares are not those of `before`, a segment begins with it in which
        every corpus goes on where it stood.

    Raises:
        ConfigError: The corpora are not the data set's, or cannot be read at these shares.
    """
    samples = {
        corpus.name: order.num_samples(corpus.tokens, sequence_length) for corpus in stream.corpora
    }
    _check(stream, sequence_length, corpora, samples)
    shares = _shares(corpora, samples)
    start, counts = 0, dict.fromkeys(samples, 0)
    if before is not None:
        is_same = (before.samples, before.shares) == (samples, shares)
        start = before.start if is_same else consumed
        counts = before.consumed if is_same else Blend(before, seed).counts(consumed)
    ordered = {name: counts.get(name, 0) for name in samples}
    return Blend(Segment(start, samples, shares, ordered), seed)


def segment_of(
    config: RunConfig, stream: TokenStream, before: Segment | None = None, consumed: int = 0
) -> Segment:
    """Return the segment that a run goes on with, as `blend_of` does its blend.

    Args:
        config: The run.
        stream: Its training split.
        before: The segment that the checkpoint recorded; None for a run that begins.
        consumed: Samples consumed so far.
    """
    length, corpora, seed = config.data.sequence_length, config.data.corpora, config.run.seed
    blend = blend_of(stream, length, corpora, seed=seed, before=before, consumed=consumed)
    return blend.segment


def _epochs(corpus: CorpusSection | None) -> Fraction:
    """Return how often a pass reads a corpus: the decimal of the config file, exactly."""
    return Fraction(1 if corpus is None or corpus.epochs is None else str(corpus.epochs))


def _shares(corpora: Mapping[str, CorpusSection], samples: Mapping[str, int]) -> dict[str, int]:
    """Return the shares of the corpora, as integers without a common divisor.

    They are exact unless their sum would reach MAX_TOTAL, as with epochs = 0.3333333333333333.
    """
    exact = {}
    for name, size in samples.items():
        corpus = corpora.get(name)
        if corpus is not None and corpus.weight is not None:
            exact[name] = Fraction(str(corpus.weight))
        else:
            exact[name] = size * _epochs(corpus)
    unit = math.lcm(*(share.denominator for share in exact.values()))
    shares = {name: int(share * unit) for name, share in exact.items()}
    divisor, total = math.gcd(*shares.values()), sum(shares.values())
    if total // divisor < MAX_TOTAL:
        return {name: share // divisor for name, share in shares.items()}
    most = MAX_TOTAL - 1 - len(shares)
    return {name: share and max(1, share * most // total) for name, share in shares.items()}


def _check(
    stream: TokenStream,
    sequence_length: int,
    corpora: Mapping[str, CorpusSection],
    samples: Mapping[str, int],
) -> None:
    """Check that the config's corpora are the data set's, and that there is a sample to read.

    Args:
        stream: The training split.
        sequence_length: Tokens that the model sees.
        corpora: `data.corpora`.
        samples: Corpus -> samples in it.

    Raises:
        ConfigError: They are not, or there is none.
    """
    if corpora and corpora.keys() != samples.keys():
        raise ConfigError(
            f"data.corpora = {', '.join(corpora)}: the data set in {stream.directory} was built "
            f"from {', '.join(samples)}. Name these, or choose another data.directory"
        )
    tokens = f"data.sequence_length = {sequence_length}: a sample needs {sequence_length + 1} "
    for name, corpus in corpora.items():
        if corpus.weight is not None and not samples[name]:
            raise ConfigError(
                f"{tokens}tokens, but corpus {name} of {stream.directory}, which has a weight, has "
                f"fewer. Lower data.sequence_length, or build data.corpora.{name} from more text"
            )
    if not any(samples.values()):
        has = f"{len(stream)} tokens in all" if len(samples) == 1 else "no corpus of so many"
        raise ConfigError(
            f"{tokens}tokens, but {stream.directory} has {has}. Lower data.sequence_length, or "
            "build a data set from more text"
        )
