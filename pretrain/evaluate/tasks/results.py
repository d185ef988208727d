"""Turn losses of sequences into records: means over samples, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.evaluate.spread import cluster_interval
from pretrain.evaluate.tasks.rows import Arm, Cell
from pretrain.evaluate.tasks.scoring import Score

FIELDS = (
    "run",
    "step",
    "method",
    "seed",
    "train_length",
    "tokenizer",
    "validation",
    "precision",
    "task",
    "length",
    "depth",
    "distance",
    "measure",
    "value",
    "low",
    "high",
    "n",
    "documents",
    "tokens",
    "checkpoint",
)
"""Keys of a record in tasks.json and columns of tasks.csv."""
MEASURES = ("gain_nats", "loss_nats", "accuracy")
"""What is measured of every cell: the gain from the context, the loss with it, and the share of
scored tokens that the model then holds for the most probable ones. In nats per token."""
Record = Mapping[str, Any]
Samples = NDArray[np.float64]


def measure(cell: Cell, score: Score) -> Iterator[dict[str, Any]]:
    """Yield the records of a cell, with the keys of FIELDS from "task" to "tokens".

    Args:
        cell: A task at one length.
        score: Scores one arm.
    """
    losses = {name: _by_sample(arm, score(arm), cell.samples) for name, arm in cell.arms.items()}
    for place in cell.places:
        helped, alone = losses[place.helped], losses[place.alone]
        # The gain is a mean of differences within samples, which share all but the context.
        values = dict(zip(MEASURES, (alone[:, 0] - helped[:, 0], helped[:, 0], helped[:, 1])))
        arm = cell.arms[place.helped]
        for name, samples in values.items():
            low, high = interval(samples, cell.clusters)
            yield {
                "task": cell.task,
                "length": cell.length,
                "depth": place.depth,
                "distance": place.distance,
                "measure": name,
                "value": float(samples.mean()),
                "low": low,
                "high": high,
                "n": len(samples),
                "documents": cell.documents,
                "tokens": len(arm.rows) * arm.scored,
            }


def _by_sample(arm: Arm, scores: NDArray[np.float64], samples: int) -> Samples:
    """Return the means [samples, 2] of [rows, 2], whose rows all score as many tokens."""
    sums, counts = np.zeros((samples, 2)), np.zeros(samples)
    owners = np.array([row.sample for row in arm.rows])
    np.add.at(sums, owners, scores)
    np.add.at(counts, owners, 1)
    return sums / counts[:, None]


def interval(samples: Samples, clusters: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of the mean of samples that come in clusters.

    Args:
        samples: [n] values.
        clusters: [n] the cluster of each. Samples of one document are alike, so that many of them
            know little more than one.

    Returns:
        (low, high); (None, None) with a single cluster, and (nan, nan) if a value is not finite.
    """
    if not np.isfinite(samples).all():
        return math.nan, math.nan
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    sums, counts = np.bincount(cluster, samples), np.bincount(cluster).astype(np.float64)
    low, high = cluster_interval(sums.astype(np.float64), counts)
    return (None, None) if math.isnan(low) else (low, high)
