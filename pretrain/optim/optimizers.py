"""Nesterov's accelerated gradient as in fairseq, computed by torch's fused SGD.

fairseq's update (fairseq/optim/nag.py) of weights w with gradient g and buffer v, where r is the
learning rate, r' that of the update before, m the momentum and d the weight decay:

    w = w (1 - r d) + m^2 (r / r') v - (1 + m) r g
    v = m (r / r') v - r g

With v = -r' b the rates before cancel, and what is left is torch.optim.SGD(nesterov=True):

    b = m b + g
    w = w (1 - r d) - r (g + m b)

So b, a sum of gradients, is what is kept. It does not depend on the learning rate, which may change
from step to step. An update with a rate of 0 leaves v = 0, hence b = 0 is set behind such a one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class NAG(torch.optim.SGD):
    """torch's fused SGD with Nesterov's momentum and a decoupled weight decay.

    Its state has the buffer b of zeros before the first update, and a count of updates, as that of
    torch's fused AdamW has. Like that one it reads `grad_scale` and `found_inf`, if they are set.
    """

    grad_scale: Tensor | None
    """What gradients are divided by; None or absent: 1."""
    found_inf: Tensor | None
    """A scalar that is 1 if the update is to be left out; None or absent: it is made."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        """Initialize with parameter groups, each of which may have a decoupled "weight_decay".

        Args:
            groups: The groups.
            lr: The learning rate.
            momentum: m.
        """
        # SGD's own weight decay is added to the gradient, and would take part in the momentum.
        decoupled = [
            {**group, "weight_decay": 0.0, "decay": group["weight_decay"]} for group in groups
        ]
        super().__init__(decoupled, lr=lr, momentum=momentum, nesterov=True, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """Update the weights that have a gradient."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        made = 1.0 if found_inf is None else 1.0 - found_inf
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    # Before the first update. SGD would create it within that, and leave memory
                    # that nobody has written if the update is left out.
                    state["step"] = torch.zeros((), device=weight.device)
                    state["momentum_buffer"] = torch.zeros_like(weight)
                state["step"] += made
                if group["decay"]:
                    weight.mul_(1.0 - group["lr"] * group["decay"] * made)
        loss: float | None = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"] if group["lr"] == 0 else ():
                if weight.grad is not None:
                    self.state[weight]["momentum_buffer"].mul_(1.0 - made)
        return loss
