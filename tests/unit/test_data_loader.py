"""Test that every rank, worker count and restart sees the same stream of batches."""

from itertools import islice

import numpy as np
import pytest
import torch

from pretrain.config import ConfigError
from pretrain.data import order
from pretrain.data.loader import batches
from tests.unit.streams import make_stream

LENGTH, GLOBAL, MICRO = 7, 16, 2


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("loader"), {"text": 1000})


def steps(stream, count, **changes) -> torch.Tensor:
    """Return the first steps of a rank, int64 [steps, micro batches, micro batch, tokens]."""
    settings = {
        "seed": 3,
        "sequence_length": LENGTH,
        "global_batch_size": GLOBAL,
        "micro_batch_size": MICRO,
    } | changes
    return torch.stack([torch.stack(step) for step in islice(batches(stream, **settings), count)])


def in_order(found: torch.Tensor) -> torch.Tensor:
    """Flatten steps into the samples one after the other, [samples, tokens]."""
    return found.reshape(-1, found.shape[-1])


def test_a_batch_holds_the_samples_the_order_names(stream):
    found = steps(stream, 20)
    assert found.dtype == torch.int64 and found.shape == (20, GLOBAL // MICRO, MICRO, LENGTH + 1)
    samples = (1000 - 1) // LENGTH
    starts = LENGTH * order.sample_ids(np.arange(20 * GLOBAL), samples, seed=3)
    assert np.array_equal(in_order(found).numpy(), starts[:, None] + np.arange(LENGTH + 1))


def test_an_epoch_predicts_every_token_once(stream):
    samples = (1000 - 1) // LENGTH
    epoch = in_order(steps(stream, -(-samples // GLOBAL)))[:samples]
    assert torch.equal(epoch[:, 1:].flatten().sort().values, torch.arange(1, samples * LENGTH + 1))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_data_parallel_ranks_share_the_batch_in_its_order(stream, ranks):
    """Twelve steps cross an epoch border. No two samples have the same tokens."""
    whole = steps(stream, 12).reshape(12, GLOBAL, -1)
    parts = [
        steps(stream, 12, data_parallel_rank=rank, data_parallel_size=ranks).reshape(
            12, GLOBAL // ranks, -1
        )
        for rank in range(ranks)
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    first_epoch = torch.cat(parts, dim=1)[: (1000 - 1) // LENGTH // GLOBAL, :, 0]
    assert len(first_epoch.unique()) == first_epoch.numel(), "ranks overlap"


@pytest.mark.parametrize("micro_batch_size", [1, 4, 16])
def test_the_micro_batch_size_changes_no_order(stream, micro_batch_size):
    assert torch.equal(
        in_order(steps(stream, 5, micro_batch_size=micro_batch_size)), in_order(steps(stream, 5))
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_no_order(stream, num_workers):
    assert torch.equal(steps(stream, 12, num_workers=num_workers), steps(stream, 12))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_the_tail(stream, num_workers):
    whole = in_order(steps(stream, 24))
    for consumed in (0, GLOBAL, 7 * GLOBAL, 10 * GLOBAL, 5, 143):
        tail = in_order(steps(stream, 3, consumed_samples=consumed, num_workers=num_workers))
        assert torch.equal(tail, whole[consumed : consumed + 3 * GLOBAL])


def test_a_resumed_run_may_change_its_layout(stream):
    """Six steps on one rank, then three on four ranks with another micro batch size."""
    tail = [
        steps(
            stream,
            3,
            data_parallel_rank=rank,
            data_parallel_size=4,
            micro_batch_size=1,
            consumed_samples=6 * GLOBAL,
        )
        for rank in range(4)
    ]
    resumed = torch.cat([part.reshape(3, GLOBAL // 4, -1) for part in tail], dim=1)
    assert torch.equal(in_order(resumed), in_order(steps(stream, 9))[6 * GLOBAL :])


def test_a_stream_smaller_than_the_batch_goes_round(tmp_path):
    """With three samples and batches of 16, every epoch of three still holds each sample once."""
    found = in_order(steps(make_stream(tmp_path, {"text": 3 * LENGTH + 1}), 6))[:, 0]
    assert torch.equal(
        found.reshape(-1, 3).sort(dim=1).values, torch.tensor([0, 7, 14]).expand(32, 3)
    )


def test_a_stream_of_exactly_one_sample_works_and_one_token_less_is_refused(tmp_path):
    assert torch.equal(
        in_order(steps(make_stream(tmp_path / "a", {"text": LENGTH + 1}), 1)),
        torch.arange(8).expand(GLOBAL, 8),
    )
    with pytest.raises(
        ConfigError,
        match=r"data\.sequence_length = 7: .* has 7 tokens in all\. Lower data\.sequence_length",
    ):
        batches(
            make_stream(tmp_path / "b", {"text": LENGTH}),
            seed=0,
            sequence_length=LENGTH,
            global_batch_size=1,
            micro_batch_size=1,
        )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_leaves_the_random_state_alone(stream, num_workers):
    """Dropout draws from it, and a resumed run makes a loader where the first run made none."""
    before = torch.get_rng_state()
    steps(stream, 2, num_workers=num_workers)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_differ(stream):
    assert not torch.equal(steps(stream, 1), steps(stream, 1, seed=4))
