"""Compute which tokens form a sample and which samples form a step, and deliver them.

The order of the data is a pure function of (seed, epoch, index), with O(1) memory for any size of
corpus. The only data state of a run and its checkpoints is therefore the number of samples
consumed, and the shares of a blend. Any layout, worker count or restart sees the same samples in
the same order.

Terms:

    consumed-sample index  counts samples over the whole run, all epochs and all ranks, from 0
    sample                 an interval of a corpus's tokens; the corpus has n of them
    epoch                  n consecutive samples of a corpus: the sample with index c among those
                           of its corpus has position c % n in epoch c // n, and every epoch has
                           its own permutation of the n samples
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.config import ConfigError, RunConfig
from pretrain.config.run import Rampup, batch_size_at
from pretrain.config.schema import CorpusSection
from pretrain.data.stream import TokenStream

if TYPE_CHECKING:
    import torch

_ROUNDS = 8
"""Rounds of the Feistel network.

Four rounds are enough for a large domain (Luby and Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions", 1988). The bound is weaker for small domains, so there
are eight.
"""


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Return the number of samples in a stream of `num_tokens` tokens.

    A sample is sequence_length + 1 tokens (inputs and shifted targets). Neighboring samples overlap
    by one token: the last target of a sample is the first input of the next, so no prediction is
    lost.
    """
    return max(0, (num_tokens - 1) // sequence_length)


def token_range(sample: int, sequence_length: int) -> tuple[int, int]:
    """Return (index of the first token, number of tokens) of a sample in its corpus."""
    return sample * sequence_length, sequence_length + 1


def sample_ids(
    consumed: np.ndarray,
    samples_per_epoch: Sequence[int],
    seed: int,
    names: Sequence[str] = ("",),
    corpora: np.ndarray | int = 0,
) -> np.ndarray:
    """Return the samples at the given consumed-sample indexes of their corpora.

    Pass many indexes at once: one index takes as many NumPy calls as thousands.

    Args:
        consumed: Consumed-sample indexes, int64 [n], from any mixture of epochs. In a blend, they
            count the samples of their corpus.
        samples_per_epoch: Number of samples in each corpus.
        seed: Seed of the order; one per run.
        names: The corpora of a blend. A run of a single corpus needs no name.
        corpora: The corpus of each index, as a position in `names`, int64 [n].

    Returns:
        Samples, int64 [n], each below its corpus's samples_per_epoch.
    """
    sizes = np.array(samples_per_epoch)[corpora]
    epochs, positions = np.divmod(np.asarray(consumed, dtype=np.int64), sizes)
    passes, which = np.unique(epochs * len(names) + corpora, return_inverse=True)
    keys = [
        _round_keys(seed, epoch, names[corpus])
        for epoch, corpus in (divmod(each, len(names)) for each in passes.tolist())
    ]
    return _permuted(positions, sizes, np.array(keys, np.uint64).reshape(-1, _ROUNDS)[which].T)


def rank_samples(
    consumed: int, global_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> range:
    """Return the consumed-sample indexes that one data-parallel rank takes in a step.

    Ranks take consecutive slices of the global batch. For every number of ranks the slices together
    are the same batch, so a run can resume on another layout.

    Args:
        consumed: Number of samples consumed before the step, over all ranks.
        global_batch_size: Samples in a step; a multiple of `data_parallel_size`.
        data_parallel_rank: The rank.
        data_parallel_size: The number of ranks.
    """
    share = global_batch_size // data_parallel_size
    first = consumed + data_parallel_rank * share
    return range(first, first + share)


def _permuted(indexes: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Map indexes through pseudorandom permutations of [0, sizes) ([n] or []) by keys [rounds, n].

    A keyed Feistel network permutes the smallest domain of 4^k >= size numbers. An image outside
    [0, size) is fed through the network again until it falls inside ("cycle walking": Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002), which takes fewer than four passes on
    average.
    """
    # The domain of a network has an even number of bits, 2 * half, so that its halves are equal.
    # The exponent of a float is the bit length of an integer below 2^53.
    half = np.maximum(1, (np.frexp((sizes - 1).astype(np.float64))[1] + 1) // 2)
    shape, sizes, half = indexes.shape, sizes.astype(np.uint64), half.astype(np.uint64)
    images = _feistel(indexes.astype(np.uint64), half, keys)
    sizes, half = np.broadcast_to(sizes, shape), np.broadcast_to(half, shape)
    while len(outside := np.flatnonzero(images >= sizes)):
        images[outside] = _feistel(images[outside], half[outside], keys[:, outside])
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Permute the numbers of 2 * half bits. A bijection for any round function `mix`."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    images: np.ndarray = (left << half) | right
    return images


def mix(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer modulo 2^64, so that every input bit affects every output bit.

    Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


@functools.lru_cache(2**12)
def _round_keys(seed: int, epoch: int, corpus: str) -> np.ndarray:
    """Return one 64-bit key per round.

    The keys are a hash of (seed, epoch, corpus) rather than a sum, so that neighboring seeds and
    epochs get unrelated permutations. "<u8" fixes the byte order, so that the keys are the same on
    every machine.
    """
    key = f"{seed} {epoch} {corpus}" if corpus else f"{seed} {epoch}"
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


# ---- Compute which corpus every sample of a run comes from ----
# Samples never cross corpora: each corpus has its own grid of samples. A blend assigns the
# consumed-sample indexes of a run to its corpora, in exact integers of any size, and every corpus
# has its own permutations, one for each pass over it.
#
# Two corpora with shares A and B are easy to blend: of the first p samples, the first corpus gets
# (p A + (A+B)/2) // (A+B), an error of at most 1/2. More corpora are blended by a binary tree of
# such splits. A count with an error of e before a split has an error of e s + 1/2 after it, where s
# is the share of the branch. The smallest shares are joined first, so that errors are passed on to
# small branches. In the published run, the count of every corpus after any number of samples has an
# error of at most 1.11 samples; with random shares, at most 1.6.


MAX_TOTAL = 2**53
"""Largest sum of shares, because a checkpoint cannot hold larger integers. Rounding to this many
parts moves no corpus by as much as a thousandth of a sample in 10^12."""


@dataclass(frozen=True)
class Segment:
    """A part of a run with a constant blend, as a checkpoint records it."""

    start: int
    """The consumed-sample index at which the segment begins."""
    samples: dict[str, int]
    """Corpus -> number of its samples."""
    shares: dict[str, int]
    """Corpus -> its share, relative to the other shares."""
    consumed: dict[str, int]
    """Corpus -> number of its samples before `start`: those consumed, or whole passes if samples
    of another number were."""


class Split(NamedTuple):
    """A node of the tree, which assigns samples to two branches."""

    left: int
    """Index of a corpus, or ~index of a split."""
    right: int
    share: int
    """The share of the left branch."""
    total: int
    """The sum of the shares of both branches."""


class Blend:
    """Assigns the samples of a run to its corpora."""

    def __init__(self, segment: Segment, seed: int) -> None:
        """Build the tree.

        Args:
            segment: The corpora, which are numbered in the order of `segment.samples`.
            seed: Seed of the order of samples.
        """
        self.segment = segment
        self.names = tuple(segment.samples)
        self._seed = seed
        self._samples = [segment.samples[name] for name in self.names]
        self._before = [segment.consumed[name] for name in self.names]
        # A single corpus has the same order as in a run without named corpora.
        self._keys = self.names if len(self.names) > 1 else ("",)
        self._root, self._splits = tree_of(segment.shares)
        # Use Python's integers if the products below may exceed 63 bits.
        dtype = object if sum(segment.shares.values()) > 2**31 else np.int64
        self._nodes = np.array(self._splits, dtype).reshape(-1, 4).T

    def locate(self, consumed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples at the given consumed-sample indexes.

        Args:
            consumed: Consumed-sample indexes, int64 [n], none before `segment.start`.

        Returns:
            (corpora, int64 [n]; samples within their corpora, int64 [n]).
        """
        positions = np.asarray(consumed, dtype=np.int64) - self.segment.start
        if len(positions) and positions.min() < 0:
            raise ValueError(f"sample {min(consumed)}: the blend begins at {self.segment.start}")
        corpora, samples = np.full_like(positions, self._root), positions.copy()
        # Move all samples down the tree together, one level at a time.
        while len(where := np.flatnonzero(corpora < 0)):
            left, right, share, total = self._nodes[:, ~corpora[where]]
            # Compute how many earlier samples go left, and whether this one does. Without divmod,
            # which NumPy does not have for Python integers.
            rounds, rest = samples[where] // total, samples[where] % total
            place = rest * share + total // 2
            before = (rounds * share + place // total).astype(np.int64)
            goes_left = (place % total + share >= total).astype(bool)
            samples[where] = np.where(goes_left, before, samples[where] - before)
            corpora[where] = np.where(goes_left, left, right)
        draws = samples + np.array(self._before)[corpora]
        return corpora, sample_ids(draws, self._samples, self._seed, self._keys, corpora)

    def counts(self, consumed: int) -> dict[str, int]:
        """Return how many of the run's first `consumed` samples each corpus has."""
        counts = list(self._before)

        def count(at: int, position: int) -> None:
            if at >= 0:
                counts[at] += position
                return
            split = self._splits[~at]
            left = (position * split.share + split.total // 2) // split.total
            count(split.left, left)
            count(split.right, position - left)

        count(self._root, consumed - self.segment.start)
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


def tree_of(shares: Mapping[str, int]) -> tuple[int, list[Split]]:
    """Return the root and the splits: the two smallest shares are joined until one is left.

    Args:
        shares: Corpus -> share; corpora are numbered in this order. Corpora with a share of 0 are
            left out.
    """
    splits: list[Split] = []
    # By size and name, so that the tree does not depend on the order of the corpora.
    by_size = sorted(enumerate(shares.items()), key=lambda each: (-each[1][1], each[1][0]))
    leaves = [(share, number) for number, (_, share) in by_size if share]
    while len(leaves) > 1:
        (small, right), (large, left) = leaves.pop(), leaves.pop()
        total = large + small
        place = next((i for i, leaf in enumerate(leaves) if leaf[0] < total), len(leaves))
        leaves.insert(place, (total, ~len(splits)))
        splits.append(Split(left, right, large, total))
    return leaves[0][1], splits


def segment_of(
    config: RunConfig,
    stream: TokenStream,
    before: Segment | None = None,
    consumed: int = 0,
    changed: Collection[str] = (),
) -> Segment:
    """Return the segment with which a run continues: that of its checkpoint, or a new one.

    Args:
        config: The run. `data.corpora` has the shares; without it they are proportional to size.
        stream: Its training split.
        before: The segment that the checkpoint recorded; None for a run that begins.
        consumed: Samples consumed so far.
        changed: Keys that change training and differ from the checkpoint's; "data.directory" if
            the training split does.

    Returns:
        The segment. If samples or shares differ from `before`, it is a new one, in which every
        corpus continues from its position, or begins its next pass if its samples or their order
        are other ones.

    Raises:
        ConfigError: The corpora are not the data set's, or cannot be read with these shares.
    """
    length = config.data.sequence_length
    samples = {
        corpus.name: num_samples(corpus.tokens, length) for corpus in stream.manifest.corpora
    }
    _check(config, stream, samples)
    shares = _shares(config.data.corpora, samples)
    start, counts = 0, dict.fromkeys(samples, 0)
    if before is not None:
        # A corpus begins its next pass if its samples are not those that were read, or are in
        # another order. They may be as many all the same. The order depends on the seed, and a
        # corpus has another order alone than among others (`Blend`).
        is_reordered = bool({"run.seed", "data.sequence_length", "data.tokenizer"} & {*changed})
        is_reordered |= (len(before.samples) > 1) != (len(samples) > 1)
        is_reordered |= "data.directory" in changed and before.samples == samples
        is_same = not is_reordered and (before.samples, before.shares) == (samples, shares)
        start = before.start if is_same else consumed
        counts = before.consumed if is_same else Blend(before, config.run.seed).counts(consumed)
        for name in before.samples.keys() & samples.keys():
            old = before.samples[name]
            if old and (is_reordered or samples[name] != old):
                counts[name] = -(-counts[name] // old) * samples[name]
    ordered = {name: counts.get(name, 0) for name in samples}
    return Segment(start, samples, shares, ordered)


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
            epochs = 1 if corpus is None or corpus.epochs is None else corpus.epochs
            exact[name] = size * Fraction(str(epochs))
    unit = math.lcm(*(share.denominator for share in exact.values()))
    shares = {name: int(share * unit) for name, share in exact.items()}
    divisor, total = math.gcd(*shares.values()), sum(shares.values())
    if total // divisor < MAX_TOTAL:
        return {name: share // divisor for name, share in shares.items()}
    most = MAX_TOTAL - 1 - len(shares)
    return {name: share and max(1, share * most // total) for name, share in shares.items()}


def _check(config: RunConfig, stream: TokenStream, samples: Mapping[str, int]) -> None:
    """Check that the config's corpora are the data set's, and that each has at least one sample.

    Args:
        config: The run.
        stream: The training split.
        samples: Corpus -> samples in it.

    Raises:
        ConfigError: The corpora differ, or one is shorter than a sample.
    """
    length, corpora = config.data.sequence_length, config.data.corpora
    if corpora and corpora.keys() != samples.keys():
        raise ConfigError(
            f"data.corpora = {', '.join(corpora)}: the data set in {stream.directory} was built "
            f"from {', '.join(samples)}. Name these, or choose another data.directory"
        )
    asked = [name for name, corpus in corpora.items() if corpus.weight or corpus.epochs]
    short = [name for name in asked or samples if not samples[name]]
    if len(short) == len(samples) or (asked and short):
        raise ConfigError(
            f"data.sequence_length = {length}: a sample needs {length + 1} "
            f"tokens, and of {stream.directory} the corpus {', '.join(short)} has fewer. Lower "
            "data.sequence_length, or build a data set from more text"
        )


# ---- Deliver the batches of a data-parallel rank, reading ahead of training ----
# The loader has no state to save: the caller counts the samples consumed, and a new loader that
# starts at that count continues the stream.


ORDERED_AT_ONCE = 4096
"""Number of samples whose order is computed at once; at least those of a step."""


def batches(
    stream: TokenStream,
    blend: Blend,
    *,
    sequence_length: int,
    global_batch_size: int,
    micro_batch_size: int,
    rampup_batch_size: Rampup | None = None,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    consumed_samples: int = 0,
    num_workers: int = 0,
) -> Generator[list[torch.Tensor], None, None]:
    """Return an endless iterator over the training steps of one data-parallel rank.

    The global batch consists of the micro batches of rank 0, then those of rank 1, and so on. It is
    the same for every number of ranks and workers. A corpus that is shorter than the global batch
    has several epochs within one step.

    Args:
        stream: The tokens to read.
        blend: The run's blend of corpora, which has the order of samples.
        sequence_length: Tokens that the model sees; a sample has one more.
        global_batch_size: Samples per step over all ranks; a multiple of
            micro_batch_size * data_parallel_size.
        micro_batch_size: Samples per forward pass.
        rampup_batch_size: How the batch size grows to global_batch_size; None: no ramp-up.
        data_parallel_rank: This rank.
        data_parallel_size: Number of data-parallel ranks.
        consumed_samples: Samples consumed before the first step, over all ranks.
        num_workers: Number of threads, each of which reads a step ahead; 0 means 1.

    Returns:
        An iterator over steps. A step is the list of this rank's micro batches of token ids, each
        int64 [micro_batch_size, sequence_length + 1]. Close it to end the threads.
    """

    def steps() -> Iterator[range]:
        """Yield the consumed-sample indexes of this rank's part of every step."""
        consumed = consumed_samples
        while True:
            size = batch_size_at(consumed, global_batch_size, rampup_batch_size)
            yield rank_samples(consumed, size, data_parallel_rank, data_parallel_size)
            consumed += size

    def first_tokens() -> Iterator[np.ndarray]:
        """Yield the first tokens of the samples of every step, int64 [samples of the step]."""
        corpus_starts, ahead = np.array([stream.starts[name] for name in blend.names]), steps()
        while True:
            # The order of many steps is computed at once, because that takes about 0.3 ms per
            # corpus, whether for one sample or for a thousand.
            several = [next(ahead)]
            while sum(map(len, several)) < ORDERED_AT_ONCE:
                several.append(next(ahead))
            corpora, samples = blend.locate(np.concatenate([np.asarray(step) for step in several]))
            found = corpus_starts[corpora] + samples * sequence_length
            yield from np.split(found, np.cumsum([len(step) for step in several])[:-1])

    count = sequence_length + 1
    return _read_ahead(stream, first_tokens(), count, micro_batch_size, num_workers)


def _read_ahead(
    stream: TokenStream,
    firsts: Iterator[np.ndarray],
    count: int,
    micro_batch_size: int,
    num_workers: int,
) -> Generator[list[torch.Tensor], None, None]:
    """Yield steps, while threads of this process read the next ones.

    Training mostly waits for the device or for other ranks, so a thread costs little and hides the
    latency of a disk. If the latency is long, several threads read several steps at once. If a
    thread raises an error, it is raised here at the thread's step.
    """
    # Imported here, because the order is also computed without training.
    import torch

    ahead = max(1, num_workers)
    with ThreadPoolExecutor(ahead, thread_name_prefix="read ahead") as readers:
        waiting = deque(
            readers.submit(stream.read_batch, next(firsts), count) for _ in range(ahead)
        )
        while True:
            tokens = torch.from_numpy(waiting.popleft().result())
            waiting.append(readers.submit(stream.read_batch, next(firsts), count))
            yield list(torch.split(tokens, micro_batch_size))


# ---- Choose the tokens that a masked model predicts, and their replacements ----
# As in BERT and RoBERTa (Devlin et al. 2019, section 3.1; Liu et al. 2019), 15 % of the tokens are
# chosen, of which 80 % are replaced by the mask, 10 % by a random token, and 10 % stay unchanged.
#
# The choice is a pure function of a token's place. In training the place is (seed, consumed-sample
# index, position), so any layout and any restart sees the same masks, and each epoch has different
# masks. In an evaluation it is the token's index in the text, so that every length, checkpoint and
# run predicts the same tokens.


SHARE = 0.15
"""Share of the tokens that are chosen."""
TEXT_BLOCK = 20
"""Evaluated texts are cut into blocks of this many tokens, and 15 % of each, three, are chosen."""
_TEXT = "validation text"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Ids = NDArray[np.int64]
Chosen = NDArray[np.bool_]


def num_chosen(length: int) -> int:
    """Return how many tokens of a sample of `length` tokens are chosen, at least 1.

    The number is the same for every sample, so that the mean loss of a batch does not depend on how
    ranks share the batch.
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
        mask_id: Id of the mask. Random tokens are below it.
    """
    numbers = _numbers(f"mask {seed}", np.asarray(samples, dtype=np.uint64), tokens.shape[1])
    chosen = _smallest(numbers[:, :, 0], num_chosen(tokens.shape[1]))
    return _replaced(tokens, chosen, numbers, mask_id), chosen


def mask_text(tokens: NDArray[np.generic], first: int, mask_id: int) -> tuple[Ids, Chosen]:
    """Return the inputs of a piece of a text, and which tokens are to be predicted.

    Args:
        tokens: Tokens of the text from `first` on, [n].
        first: Index of the first token in the text.
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

    Each row comes from a SplitMix64 generator that is seeded by a hash of the key and the row.
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
    """Return the tokens with the chosen ones replaced.

    Args:
        tokens: Any shape.
        chosen: The same shape.
        numbers: The same shape and 3. The second number decides how a token is replaced, the third
            one by which random token.
        mask_id: Id of the mask. Random tokens are below it.
    """
    share = numbers[..., 1].astype(np.float64) / 2.0**64
    random = (numbers[..., 2] % np.uint64(mask_id)).astype(np.int64)
    inputs = np.where(chosen & (share < 0.8), mask_id, tokens)
    return np.where(chosen & (share >= 0.8) & (share < 0.9), random, inputs)
