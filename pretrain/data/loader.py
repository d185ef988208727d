"""Deliver the batches of a data-parallel rank, read ahead of training.

The loader keeps no state worth saving: the caller counts the samples consumed, and a new loader
that starts at that count continues the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from pretrain.config.run import Rampup, batch_size_at
from pretrain.data import order
from pretrain.data.order import Blend, blend_of
from pretrain.data.stream import TokenStream

ORDERED_AT_ONCE = 4096
"""Samples of which the order is computed at once, or those of a step if they are more."""


def batches(
    stream: TokenStream,
    *,
    seed: int,
    sequence_length: int,
    global_batch_size: int,
    micro_batch_size: int,
    rampup_batch_size: Rampup | None = None,
    blend: Blend | None = None,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    consumed_samples: int = 0,
    num_workers: int = 0,
) -> Generator[list[torch.Tensor], None, None]:
    """Return an endless iterator over the training steps of one data-parallel rank.

    The micro batches of rank 0, then those of rank 1 and so on, form the global batch. It is the
    same for every number of ranks and workers. A corpus that is shorter than the global batch
    passes through several epochs within one step.

    Args:
        stream: The tokens to read.
        seed: Seed of the order of samples.
        sequence_length: Tokens that the model sees; a sample has one more.
        global_batch_size: Samples per step over all ranks; a multiple of
            micro_batch_size * data_parallel_size.
        micro_batch_size: Samples per forward pass.
        rampup_batch_size: How the batch size grows to global_batch_size; None: it has that size.
        blend: The run's blend of corpora. Default: every corpus by its size.
        data_parallel_rank: This rank.
        data_parallel_size: Number of data-parallel ranks.
        consumed_samples: Samples consumed before the first step, over all ranks.
        num_workers: Threads that read ahead, each a step; 0 is 1.

    Returns:
        An iterator over steps. A step is the list of this rank's micro batches of token ids, each
        int64 [micro_batch_size, sequence_length + 1]. Close it to end the threads.

    Raises:
        ConfigError: if the stream is shorter than one sample.
    """
    blend = blend or blend_of(stream, sequence_length, {}, seed=seed)

    def steps() -> Iterator[range]:
        """Yield the consumed-sample indexes of this rank's part of every step."""
        consumed = consumed_samples
        while True:
            size = batch_size_at(consumed, global_batch_size, rampup_batch_size)
            yield order.rank_samples(consumed, size, data_parallel_rank, data_parallel_size)
            consumed += size

    firsts = _first_tokens(stream, blend, sequence_length, steps())
    return _read_ahead(stream, firsts, sequence_length + 1, micro_batch_size, num_workers)


def _first_tokens(
    stream: TokenStream, blend: Blend, sequence_length: int, steps: Iterator[range]
) -> Iterator[np.ndarray]:
    """Yield where in the stream the samples of every step begin, int64 [samples of the step].

    To compute it costs some 0.3 ms a corpus, for one sample or for a thousand, so the order of many
    steps is computed at once.
    """
    starts = {corpus.name: corpus.start for corpus in stream.corpora}
    corpus_starts = np.array([starts[name] for name in blend.names])
    while True:
        several = [next(steps)]
        while sum(map(len, several)) < ORDERED_AT_ONCE:
            several.append(next(steps))
        corpora, samples = blend.locate(np.concatenate([np.asarray(step) for step in several]))
        found = corpus_starts[corpora] + samples * sequence_length
        yield from np.split(found, np.cumsum([len(step) for step in several])[:-1])


def _read_ahead(
    stream: TokenStream,
    firsts: Iterator[np.ndarray],
    count: int,
    micro_batch_size: int,
    num_workers: int,
) -> Generator[list[torch.Tensor], None, None]:
    """Yield steps, of which the next ones are read meanwhile by threads of this process.

    Training waits for the device or for other ranks most of the time, so a thread costs it little
    and hides a disk's latency; where that is long, several steps are read at once. What a thread
    raises is raised here, at its step.
    """
    ahead = max(1, num_workers)
    with ThreadPoolExecutor(ahead, thread_name_prefix="read ahead") as readers:
        waiting = deque(
            readers.submit(stream.read_batch, next(firsts), count) for _ in range(ahead)
        )
        while True:
            tokens = torch.from_numpy(waiting.popleft().result())
            waiting.append(readers.submit(stream.read_batch, next(firsts), count))
            yield list(torch.split(tokens, micro_batch_size))
