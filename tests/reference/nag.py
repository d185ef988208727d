"""Implement fairseq's NAG from its formula, one weight at a time, as an oracle.

With weights w, gradient g, buffer v, momentum m, decay d, learning rate r and that of the update
before r' (fairseq/optim/nag.py):

    w = w (1 - r d) + m^2 (r / r') v - (1 + m) r g
    v = m (r / r') v - r g
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class FairseqNAG(torch.optim.Optimizer):
    """NAG with a buffer in units of updates, which is rescaled when the learning rate changes."""

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float) -> None:
        super().__init__(groups, {"lr": None, "rate_before": None, "weight_decay": 0.0})
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        m = self.momentum
        for group in self.param_groups:
            r, before = group["lr"], group["rate_before"]
            # fairseq begins with the rate of the first update. A rate of 0 has left a buffer of 0.
            share = r / before if before else 1.0
            for w in group["params"]:
                v = self.state[w].setdefault("v", torch.zeros_like(w))
                new = w * (1 - r * group["weight_decay"]) + m**2 * share * v - (1 + m) * r * w.grad
                self.state[w]["v"] = m * share * v - r * w.grad
                w.copy_(new)
            group["rate_before"] = r
