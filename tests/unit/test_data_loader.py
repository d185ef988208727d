"""Test that every rank, worker count and restart sees the same stream of batches."""

import gc
import threading
from itertools import islice

import numpy as np
import pytest
import torch

from pretrain.config import ConfigError
from pretrain.data import order
from pretrain.data.order import batches
from tests.unit.splits import blend_of, make_stream

LENGTH, GLOBAL, MICRO = 7, 16, 2
SETTINGS = {"sequence_length": LENGTH, "global_batch_size": GLOBAL, "micro_batch_size": MICRO}


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("loader"), {"text": 1000})


def steps(stream, count, **changes) -> torch.Tensor:
    """Return the first steps of a rank, int64 [steps, micro batches, micro batch, tokens]."""
    found = batches(stream, blend_of(stream, LENGTH, {}, seed=3), **SETTINGS | changes)
    return torch.stack([torch.stack(step) for step in islice(found, count)])


def in_order(found: torch.Tensor) -> torch.Tensor:
    """Flatten steps into the samples one after the other, [samples, tokens]."""
    return found.reshape(-1, found.shape[-1])


def test_a_batch_holds_the_samples_the_order_names(stream):
    found = steps(stream, 20)
    assert found.dtype == torch.int64 and found.shape == (20, GLOBAL // MICRO, MICRO, LENGTH + 1)
    samples = (1000 - 1) // LENGTH
    starts = LENGTH * order.sample_ids(np.arange(20 * GLOBAL), [samples], seed=3)
    assert np.array_equal(in_order(found).numpy(), starts[:, None] + np.arange(LENGTH + 1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_the_tail(stream, num_workers):
    whole = in_order(steps(stream, 24))
    for consumed in (0, GLOBAL, 7 * GLOBAL, 10 * GLOBAL, 5, 143):
        tail = in_order(steps(stream, 3, consumed_samples=consumed, num_workers=num_workers))
        assert torch.equal(tail, whole[consumed : consumed + 3 * GLOBAL])


def test_a_stream_of_exactly_one_sample_works_and_one_token_less_is_refused(tmp_path):
    assert torch.equal(
        in_order(steps(make_stream(tmp_path / "a", {"text": LENGTH + 1}), 1)),
        torch.arange(8).expand(GLOBAL, 8),
    )
    with pytest.raises(
        ConfigError, match=r"data\.sequence_length = 7: a sample needs 8 .* has fewer\. Lower data"
    ):
        blend_of(make_stream(tmp_path / "b", {"text": LENGTH}), LENGTH, {}, seed=3)


# ---- several corpora -----------------------------------------------------------------------------
SIZES = {"a": 601, "b": 97, "c": 5, "d": 303}
"""Tokens of each; corpus c is shorter than a sample."""


@pytest.fixture(scope="module")
def blended(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("blended"), SIZES)


@pytest.mark.parametrize(
    ("ranks", "num_workers", "consumed"), [(2, 0, 0), (4, 2, 0), (4, 2, 6 * GLOBAL)]
)
def test_ranks_and_workers_deliver_the_same_tokens_in_the_same_order(
    blended, ranks, num_workers, consumed
):
    """From the start and after a resume on more ranks. Ten steps pass the end of every corpus."""
    whole = in_order(steps(blended, 16))[consumed:][: 10 * GLOBAL]
    parts = [
        steps(
            blended,
            10,
            micro_batch_size=1,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            num_workers=num_workers,
            consumed_samples=consumed,
        ).reshape(10, GLOBAL // ranks, -1)
        for rank in range(ranks)
    ]
    assert torch.equal(in_order(torch.cat(parts, dim=1)), whole)


# ---- reading ahead -------------------------------------------------------------------------------
class Counted:
    """A stream that counts its calls, fails at one of them, and answers the first ones together."""

    def __init__(self, stream, fails_at: int | None = None, together: int = 1) -> None:
        self.manifest, self.starts = stream.manifest, stream.starts
        self.calls, self._stream = [], stream
        self._fails_at, self._meeting = fails_at, threading.Barrier(together)

    def read_batch(self, starts, count):
        self.calls.append(len(starts))
        if len(self.calls) == self._fails_at:
            raise ConfigError("shard x: a flipped bit")
        if len(self.calls) <= self._meeting.parties:
            # Where fewer threads read at once, the others never come, and this raises.
            self._meeting.wait(60)
        return self._stream.read_batch(starts, count)


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("read ahead")]


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_step_is_one_read_and_so_many_steps_are_read_ahead(stream, ahead):
    counted = Counted(stream, together=ahead)
    blend = blend_of(stream, LENGTH, {}, seed=3)
    found = batches(counted, blend, **SETTINGS, num_workers=ahead)
    list(islice(found, 3))
    assert len(readers()) == ahead
    found.close()
    assert readers() == []
    # The next are read while the third is trained on, or were not begun.
    assert set(counted.calls) == {GLOBAL} and 3 <= len(counted.calls) <= 3 + ahead


def test_what_a_read_raises_is_raised_at_its_step(stream):
    blend = blend_of(stream, LENGTH, {}, seed=3)
    found = batches(Counted(stream, fails_at=3), blend, **SETTINGS)
    assert torch.equal(in_order(torch.stack(next(found))), in_order(steps(stream, 1)))
    next(found)
    with pytest.raises(ConfigError, match="a flipped bit"):
        next(found)
    assert readers() == []


def test_a_loader_that_is_dropped_leaves_no_thread(stream):
    found = batches(stream, blend_of(stream, LENGTH, {}, seed=3), **SETTINGS)
    next(found)
    del found
    gc.collect()
    assert readers() == []
