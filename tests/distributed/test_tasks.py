"""Long-context tasks against the dense reference, sequence by sequence, on any layout."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pretrain.data.stream import TokenStream
from pretrain.evaluation.tasks import Arm, Text, long_documents, make_cell, measure
from tests.conftest import ALL_LAYOUTS, LAYOUTS, tiny_config
from tests.distributed import tasks
from tests.reference.dense_gpt import DenseGPT, random_state

CELLS = [("needle", 64), ("induction", 96), ("documents", 96)]
SAMPLES = 5
LENGTH = 32


def _config(data, parallel=None):
    return tiny_config(
        data={"directory": str(data)},
        parallel=parallel or {},
        evaluation={"tokens_per_batch": 150},
    )


@functools.cache
def _expected(data):
    """Measure with the dense reference, one sequence at a time."""
    config = _config(data)
    model = DenseGPT(config).load_global_state(random_state(config, seed=3))

    def score(arm: Arm) -> np.ndarray:
        found = []
        for row in arm.rows:
            tokens = torch.from_numpy(row.tokens())
            with torch.no_grad():
                logits = model(tokens[None, :-1])[0, -arm.scored :]
            targets = tokens[-arm.scored :]
            right = (logits.argmax(-1) == targets).double().mean().item()
            losses = F.cross_entropy(logits, targets, reduction="none")
            found.append([losses.double().mean().item(), right])
        return np.array(found)

    stream = TokenStream(data / "validation")
    text = Text(stream, 1, long_documents(stream, 2 * LENGTH))
    cells = [make_cell(task, text, length, SAMPLES, LENGTH) for task, length in CELLS]
    return [record for cell in cells for record in measure(cell, score)]


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_every_layout_measures_what_the_dense_reference_does(pools, tiny_data, layout):
    processes, parallel = ALL_LAYOUTS[layout]
    config = _config(tiny_data, parallel)
    state = random_state(config, seed=3)
    ranks = pools(processes).run(tasks.measure_tasks, config, state, CELLS, SAMPLES)
    expected = _expected(tiny_data)
    assert any(record["value"] > 0 for record in expected if record["measure"] == "accuracy")
    for records in ranks:
        assert len(records) == len(expected)
        for record, reference in zip(records, expected):
            # Losses near 6 nats whose fp32 logits agree within 2e-5 (test_evaluation.py); a gain is
            # the difference of two.
            for key in ("value", "low", "high"):
                assert record[key] == pytest.approx(reference[key], abs=5e-5), record
            assert {**record, **dict.fromkeys(("value", "low", "high"))} == {
                **reference,
                **dict.fromkeys(("value", "low", "high")),
            }
