"""The long-context tasks, against a model that copies perfectly and one that knows nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.stream import TokenStream
from pretrain.evaluate.tasks.results import measure
from pretrain.evaluate.tasks.rows import (
    Arm,
    Cell,
    Text,
    long_documents,
    make_cell,
)
from tests.unit.splits import write_split

VOCABULARY, EOS = 512, 0
CUT = 64


def make_text(folder: Path, lengths: list[int], seed: int = 1) -> Text:
    """A validation text of documents of these lengths; its tokens are random, EOS left out."""
    random = np.random.default_rng(0)
    documents = [
        np.append(random.choice(np.arange(3, VOCABULARY), length), EOS) for length in lengths
    ]
    write_split(folder, {"all": [documents]}, split="validation")
    stream = TokenStream(folder / "validation")
    return Text(stream, seed, long_documents(stream, 2 * CUT))


def uniform(arm: Arm) -> np.ndarray:
    """Score an arm with a model that gives every token of the vocabulary the same probability."""
    return np.array([[math.log(VOCABULARY), 0.0]] * len(arm.rows))


def copier(arm: Arm) -> np.ndarray:
    """Score with a model that is sure of what followed the longest context it has seen before.

    It knows nothing where the last token is new.
    """
    return np.array([copied(row.tokens(), arm) for row in arm.rows])


def copied(tokens: np.ndarray, arm: Arm) -> list[float]:
    assert tokens.shape == (arm.length + 1,) and tokens.dtype == np.int64
    losses, right = [], []
    for target in range(len(tokens) - arm.scored, len(tokens)):
        context = tokens[:target]
        longest, follower = 0, None
        for end in range(1, target):
            same = 0
            while same < end and context[end - 1 - same] == context[target - 1 - same]:
                same += 1
            if same > longest:
                longest, follower = same, tokens[end]
        if follower is None:
            losses.append(math.log(VOCABULARY))
        else:
            losses.append(0.0 if follower == tokens[target] else 20.0)
        right.append(follower == tokens[target])
    return [float(np.mean(losses)), float(np.mean(right))]


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return make_text(tmp_path, [900, 40, 300, 150])


def values(cell: Cell, score, name: str) -> list[float]:
    return [r["value"] for r in measure(cell, score, 0) if r["measure"] == name]


@pytest.mark.parametrize("task", ["needle", "induction", "documents"])
def test_a_model_that_knows_nothing_gains_nothing(text, task):
    cell = make_cell(task, text, 128, 8, CUT)
    assert values(cell, uniform, "gain_nats") == [0.0] * len(cell.places)
    assert values(cell, uniform, "loss_nats") == pytest.approx(
        [math.log(VOCABULARY)] * len(cell.places), rel=1e-15
    )
    assert values(cell, uniform, "accuracy") == [0.0] * len(cell.places)


@pytest.mark.parametrize("task", ["needle", "induction"])
@pytest.mark.parametrize("length", [64, 128, 300])
def test_a_perfect_copier_loses_nothing_wherever_it_has_to_look(text, task, length):
    cell = make_cell(task, text, length, 6, CUT)
    assert values(cell, copier, "loss_nats") == [0.0] * len(cell.places)
    assert values(cell, copier, "accuracy") == [1.0] * len(cell.places)
    # Without the first copy it finds shorter matches at best, and is wrong.
    assert min(values(cell, copier, "gain_nats")) > 3
