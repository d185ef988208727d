"""Deliver the batches of a data-parallel rank, read ahead of training.

The loader keeps no state worth saving: the caller counts the samples consumed, and a new loader
that starts at that count continues the stream.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pretrain.config import ConfigError, RunFailed
from pretrain.config.run import Rampup, batch_size_at
from pretrain.data import order
from pretrain.data.blend import Blend, blend_of
from pretrain.data.stream import TokenStream

ORDERED_AT_ONCE = 4096
"""Samples of which the order is computed at once, or those of a step if they are more."""
DEATH_SECONDS = 5.0
"""The longest wait for the system's word that a worker has ended."""


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
        num_workers: Worker processes that read; 0 reads in a thread of this process.

    Returns:
        An iterator over steps. A step is the list of this rank's micro batches of token ids, each
        int64 [micro_batch_size, sequence_length + 1]. Close it to end the thread that reads ahead.

    Raises:
        ConfigError: if the stream is shorter than one sample.
    """
    blend = blend or blend_of(stream, sequence_length, {}, seed=seed)
    samples = _Samples(stream, blend, sequence_length)

    def steps() -> Iterator[range]:
        """Yield the consumed-sample indexes of this rank's part of every step."""
        consumed = consumed_samples
        while True:
            size = batch_size_at(consumed, global_batch_size, rampup_batch_size)
            yield order.rank_samples(consumed, size, data_parallel_rank, data_parallel_size)
            consumed += size

    if num_workers:
        return _from_workers(samples, steps, micro_batch_size, num_workers)
    return _read_ahead(samples, steps(), micro_batch_size)


class _Samples(Dataset[torch.Tensor]):
    """Map consumed-sample indexes to tokens. Independent of batch sizes, ranks and workers."""

    def __init__(self, stream: TokenStream, blend: Blend, sequence_length: int) -> None:
        self._stream = stream
        self._blend = blend
        self._sequence_length = sequence_length
        starts = {corpus.name: corpus.start for corpus in stream.corpora}
        self._corpus_starts = np.array([starts[name] for name in blend.names])

    def first_tokens(self, consumed: np.ndarray) -> np.ndarray:
        """Return where in the stream some samples begin, int64 [n]."""
        corpora, samples = self._blend.locate(consumed)
        starts: np.ndarray = self._corpus_starts[corpora] + samples * self._sequence_length
        return starts

    def read(self, first_tokens: np.ndarray) -> np.ndarray:
        """Read the samples that begin there, int64 [n, sequence_length + 1]."""
        return self._stream.read_batch(first_tokens, self._sequence_length + 1)

    def __getitems__(self, consumed: Sequence[int]) -> np.ndarray | Exception:
        """Read a micro batch.

        DataLoader's fetcher prefers this method over one __getitem__ call per sample
        (torch/utils/data/_utils/fetch.py). An error that has a message for the user is returned:
        one that is raised would reach the rank with the worker's traceback in its message.
        """
        try:
            return self.read(self.first_tokens(np.asarray(consumed)))
        except (ConfigError, RunFailed) as error:
            # The cause is left out, because it may hold objects that cannot be sent to a process.
            return type(error)(*error.args)


def _read_ahead(
    samples: _Samples, steps: Iterator[range], micro_batch_size: int
) -> Generator[list[torch.Tensor], None, None]:
    """Yield steps, of which the next one is read meanwhile by a thread of this process.

    Training waits for the device or for other ranks most of the time, so the thread costs it little
    and hides a disk's latency. What it raises is raised here.
    """
    orders = _first_tokens(samples, steps)

    def read_step() -> torch.Tensor:
        return torch.from_numpy(samples.read(next(orders)))

    with ThreadPoolExecutor(1, thread_name_prefix="read ahead") as reader:
        following = reader.submit(read_step)
        while True:
            tokens, following = following.result(), reader.submit(read_step)
            yield [
                tokens[first : first + micro_batch_size]
                for first in range(0, len(tokens), micro_batch_size)
            ]


def _first_tokens(samples: _Samples, steps: Iterator[range]) -> Iterator[np.ndarray]:
    """Yield where the samples of every step begin; the order is computed for many at once.

    To compute it costs some 0.3 ms a corpus, for one sample or for a thousand.
    """
    while True:
        several = [next(steps)]
        while sum(map(len, several)) < ORDERED_AT_ONCE:
            several.append(next(steps))
        found = samples.first_tokens(np.concatenate([np.asarray(step) for step in several]))
        yield from np.split(found, np.cumsum([len(step) for step in several])[:-1])


def _from_workers(
    samples: _Samples,
    steps: Callable[[], Iterator[range]],
    micro_batch_size: int,
    num_workers: int,
) -> Generator[list[torch.Tensor], None, None]:
    """Yield steps that worker processes read, a micro batch each at a time."""
    loader = DataLoader(
        samples,
        batch_sampler=(
            list(step[first : first + micro_batch_size])
            for step in steps()
            for first in range(0, len(step), micro_batch_size)
        ),
        collate_fn=_to_tensor,
        num_workers=num_workers,
        worker_init_fn=_ignore_interrupts,
        # A private generator: DataLoader draws a base seed when iteration starts. Drawn from
        # torch's default generator, it would shift the dropout masks of a resumed run against an
        # uninterrupted one.
        generator=torch.Generator(),
    )
    # The workers inherit what is blocked. Before `_ignore_interrupts` has run in one, Ctrl-C would
    # end it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        workers = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    micro_batches = _unless_failed(workers)
    for step in steps():
        yield list(islice(micro_batches, len(step) // micro_batch_size))


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a worker: a terminal sends it to all, and the rank trains until it saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _to_tensor(read: Any) -> torch.Tensor | Exception:
    """Return what a worker sends: the tokens as a tensor, or an error as it is."""
    return read if isinstance(read, Exception) else torch.from_numpy(read)


def _unless_failed(received: Iterator[torch.Tensor | Exception]) -> Iterator[torch.Tensor]:
    """Yield what workers sent, and raise the first error among it."""
    try:
        for each in received:
            if isinstance(each, Exception):
                raise each
            yield each
    except (EOFError, ConnectionError):
        # A worker may be killed while a batch is fetched from it (torch/multiprocessing/
        # reductions.py). The system tells of its end a moment later; torch then raises what ended.
        time.sleep(DEATH_SECONDS)
        raise


@contextlib.contextmanager
def worker_failures() -> Iterator[None]:
    """Turn the end of a worker process, which torch raises wherever the rank is, into a RunFailed.

    Raises:
        RunFailed: A worker was killed.
    """
    try:
        yield
    except RuntimeError as error:
        # torch/utils/data/_utils/signal_handling.py and dataloader.py
        if not str(error).startswith("DataLoader worker"):
            raise
        reason = str(error).splitlines()[0].strip(" .")
        raise RunFailed(
            f"a process that reads the data ended ({reason}). The machine may be short of memory "
            "or of /dev/shm: lower data.num_workers, or set it to 0"
        ) from None
