"""Batches for a data-parallel rank, from torch's DataLoader. The caller keeps the only state: samples consumed."""

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
    """Steps without end, from the one that starts `consumed_samples` (over all ranks) into the run.

    A step is this rank's micro batches, each int64 [micro_batch_size, sequence_length + 1]. The micro batches of rank
    0, then those of rank 1 and so on are the global batch, the same for every number of ranks and workers.
    `global_batch_size` must be a multiple of `micro_batch_size * data_parallel_size`. A stream shorter than the batch
    goes through several epochs in one. Raises ConfigError when the stream is shorter than one sample.
    """
    samples = order.num_samples(len(stream), sequence_length)
    if samples == 0:
        raise ConfigError(
            f"data.sequence_length = {sequence_length}: a sample is one token longer, and {stream.directory} has "
            f"{len(stream)} tokens in all. Lower data.sequence_length, or build a data set from more text"
        )
    share = global_batch_size // data_parallel_size
    indexes = (
        list(micro)
        for step in count(consumed_samples, global_batch_size)
        for micro in _cut(
            order.rank_samples(step, global_batch_size, data_parallel_rank, data_parallel_size),
            micro_batch_size,
        )
    )
    loader = DataLoader(
        _Samples(stream, samples, sequence_length, seed),
        batch_sampler=indexes,
        collate_fn=torch.from_numpy,
        num_workers=num_workers,
        # Its own: DataLoader draws a number at the start, which would shift the dropout masks of a resumed run.
        generator=torch.Generator(),
    )
    return _steps(iter(loader), share // micro_batch_size)


class _Samples(Dataset):
    """Consumed-sample indexes -> tokens. Knows no batch size, rank or worker."""

    def __init__(self, stream: TokenStream, samples: int, sequence_length: int, seed: int) -> None:
        self._stream, self._samples, self._sequence_length, self._seed = (
            stream,
            samples,
            sequence_length,
            seed,
        )

    def __getitems__(self, consumed: list[int]) -> np.ndarray:
        """DataLoader's call for a whole batch: int64 [len(consumed), sequence_length + 1]."""
        ids = order.sample_ids(np.array(consumed), self._samples, self._seed)
        return np.stack(
            [self._stream.read(*order.token_range(int(i), self._sequence_length)) for i in ids]
        )


def _cut(indexes: range, size: int) -> Iterator[range]:
    return (indexes[start : start + size] for start in range(0, len(indexes), size))


def _steps(
    micro_batches: Iterator[torch.Tensor], num_microbatches: int
) -> Iterator[list[torch.Tensor]]:
    while True:
        yield list(islice(micro_batches, num_microbatches))
