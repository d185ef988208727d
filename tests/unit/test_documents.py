"""Test where documents begin in a sample, and what the key data.per_document_attention reaches."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch

from pretrain.config.rules import DOCUMENT_BACKENDS
from pretrain.config.schema import ModelSection
from pretrain.kernels.call import Call
from pretrain.kernels.dispatch import REFUSALS
from pretrain.model.forward import document_starts
from pretrain.plan.simulation import count_run
from tests.conftest import tiny_config

EOS = 2


def starts_by_walking(tokens: list[int]) -> list[int]:
    """Return document_starts of a row, by walking along it."""
    starts, first = [], 0
    for index, token in enumerate(tokens):
        starts.append(first)
        if token == EOS:
            first = index + 1
    return starts


@pytest.mark.parametrize("length", [1, 2, 33, 257])
def test_a_document_begins_behind_each_end(length):
    numbers = random.Random(length)
    rows = [[numbers.choice([EOS, 3, 4, 5]) for _ in range(length)] for _ in range(20)]
    rows += [[EOS] * length, [3] * length]
    starts = document_starts(torch.tensor(rows), EOS)
    assert starts.dtype == torch.int32
    assert starts.tolist() == [starts_by_walking(row) for row in rows]


def test_the_config_serves_the_backends_that_have_the_mask():
    call = Call(torch.bfloat16, 64, 9, 2, 2, "none", True, False, (9, 0), True, documents=True)
    without = {name for name, refusal in REFUSALS.items() if refusal(call) is not None}
    backends = set(get_args(ModelSection.model_fields["attention_backend"].annotation))
    assert set(DOCUMENT_BACKENDS) == backends - without


def test_a_step_launches_a_handful_of_kernels_more():
    """The starts are made once for each micro batch, and each layer's kernels read them."""
    launches = []
    for documents in (False, True):
        config = tiny_config(
            model={"num_layers": 2, "attention_backend": "triton"},
            data={"per_document_attention": documents},
        )
        counts = count_run(config)[0]
        launches.append(sum(cost.launches for cost in counts.kernels.values()))
    assert config.batch.global_batch_size // config.batch.micro_batch_size == 4
    assert launches[1] - launches[0] <= 4 * 8, launches
    assert launches[1] > launches[0]
