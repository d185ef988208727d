"""Deliver the batches of a data-parallel rank through torch's DataLoader.

The loader keeps no state worth saving: the caller counts the samples consumed, and a new loader
that starts at that count continues the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pretrain.config import ConfigError
from pretrain.data import order
from pretrain.data.stream import TokenStream


def batches(
    stream: TokenStream,
    *,
    seed: int,
    sequence_length: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    consumed_samples: int = 0,
    num_workers: int = 0,
) -> Iterator[list[torch.Tensor]]:
    """Return an endless iterator over the training steps of one data-parallel rank.

    The micro batches of rank 0, then those of rank 1 and so on, form the global batch. It is the
    same for every number of ranks and workers. A stream that is shorter than the global batch
    passes through several epochs within one step.

    Args:
        stream: The tokens to read.
        seed: Seed of the order of samples.
        sequence_length: Tokens that the model sees; a sample has one more.
        global_batch_size: Samples per step over all ranks; a multiple of
            micro_batch_size * data_parallel_size.
        micro_batch_size: Samples per forward pass.
        data_parallel_rank: This rank.
        data_parallel_size: Number of data-parallel ranks.
        consumed_samples: Samples consumed before the first step, over all ranks.
        num_workers: DataLoader worker processes; 0 reads in this process.

    Returns:
        An iterator over steps. A step is the list of this rank's micro batches of token ids, each
        int64 [micro_batch_size, sequence_length + 1].

    Raises:
        ConfigError: if the stream is shorter than one sample.
    """
    samples_per_epoch = order.num_samples(len(stream), sequence_length)
    if samples_per_epoch == 0:
        raise ConfigError(
            f"data.sequence_length = {sequence_length}: a sample needs {sequence_length + 1} "
            f"tokens, but {stream.directory} has {len(stream)} tokens in all. Lower "
            "data.sequence_length, or build a data set from more text"
        )
    micro_batch_indexes = (
        list(micro_batch)
        for step_start in count(consumed_samples, global_batch_size)
        for micro_batch in _split(
            order.rank_samples(
                step_start, global_batch_size, data_parallel_rank, data_parallel_size
            ),
            micro_batch_size,
        )
    )
    loader = DataLoader(
        _Samples(stream, samples_per_epoch, sequence_length, seed),
        batch_sampler=micro_batch_indexes,
        collate_fn=torch.from_numpy,
        num_workers=num_workers,
        # A private generator: DataLoader draws a base seed when iteration starts. Drawn from
        # torch's default generator, it would shift the dropout masks of a resumed run against an
        # uninterrupted one.
        generator=torch.Generator(),
    )
    num_microbatches = global_batch_size // data_parallel_size // micro_batch_size
    return _group_into_steps(iter(loader), num_microbatches)


class _Samples(Dataset[torch.Tensor]):
    """Map consumed-sample indexes to tokens. Independent of batch sizes, ranks and workers."""

    def __init__(
        self, stream: TokenStream, samples_per_epoch: int, sequence_length: int, seed: int
    ) -> None:
        self._stream = stream
        self._samples_per_epoch = samples_per_epoch
        self._sequence_length = sequence_length
        self._seed = seed

    def __getitems__(self, consumed: list[int]) -> np.ndarray:
        """Read a whole micro batch, int64 [len(consumed), sequence_length + 1].

        DataLoader's fetcher prefers this method over one __getitem__ call per sample
        (torch/utils/data/_utils/fetch.py), and the order of samples is computed once per batch.
        """
        ids = order.sample_ids(np.array(consumed), self._samples_per_epoch, self._seed)
        ranges = [order.token_range(int(i), self._sequence_length) for i in ids]
        return np.stack([self._stream.read(start, length) for start, length in ranges])


def _split(indexes: range, size: int) -> Iterator[range]:
    """Split a range into consecutive ranges of `size`."""
    return (indexes[start : start + size] for start in range(0, len(indexes), size))


def _group_into_steps(
    micro_batches: Iterator[torch.Tensor], num_microbatches: int
) -> Iterator[list[torch.Tensor]]:
    while True:
        yield list(islice(micro_batches, num_microbatches))
