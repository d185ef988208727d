"""The counts of a step before and after, for the tables of docs/performance.md.

The inputs of the model stand in `pretrain.plan.hardware` and `pretrain.plan.hardware`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counted:
    """Kernels of one class, before and after."""

    launches: tuple[int, int]
    gigabytes: tuple[float, float]
    """Read and written."""


COUNTED = {
    "matrix products, forward": Counted((101, 101), (9.86, 9.86)),
    "attention, forward": Counted((50, 25), (2.52, 1.68)),
    "elementwise, forward": Counted((184, 109), (18.37, 8.39)),
    "copies, forward": Counted((13, 9), (1.27, 0.03)),
    "norms, forward": Counted((51, 51), (1.71, 1.71)),
    "reductions, forward": Counted((2, 1), (1.65, 0.41)),
    "matrix products, backward": Counted((202, 202), (19.72, 27.89)),
    "attention, backward": Counted((75, 75), (5.49, 5.49)),
    "elementwise, backward": Counted((385, 282), (26.16, 9.41)),
    "copies, backward": Counted((333, 1), (11.93, 0.0)),
    "norms, backward": Counted((102, 102), (2.57, 2.57)),
    "reductions, backward": Counted((100, 100), (3.78, 3.78)),
    "all of a micro batch": Counted((1606, 1066), (105.28, 71.48)),
    "optimizer step, one rank": Counted((791, 311), (122.6, 57.2)),
    "optimizer step, each of 128": Counted((343, 142), (17.2, 0.45)),
    "gradient reduction, each of 128": Counted((4, 0), (21.8, 0.0)),
}
"""What `pretrain bench step` counts in bf16, in micro batches of 4 sequences. The whole
micro batch has the embedding and the schedule's own few kernels as well. After, the matrix products
of the backward pass also add up the gradients. That is the cost of every micro batch of a step but
the first, which overwrites the sums and reads 5.45 GB less."""
