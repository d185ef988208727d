"""Lion (Chen et al. 2023, Symbolic discovery of optimization algorithms) as one class.

It is all that a user writes: tests train, save, resume and plan it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pretrain.config.schema import Fixed
from pretrain.optim.optimizers import Optimizer, Shard


class Lion(Optimizer):
    """Lion: the sign of a mean of momentum and gradient."""

    name: Fixed[Literal["lion"]] = "lion"

    lion_beta1: float = Field(default=0.9, ge=0, lt=1)
    """lion: share of the momentum in the direction of an update."""

    lion_beta2: float = Field(default=0.99, ge=0, lt=1)
    """lion: decay per step of the momentum."""

    moments: ClassVar = {"lion_momentum": "momentum of Lion"}

    def formula(self, shard: Shard) -> None:
        """m is the momentum: w -= r (sign(b1 m + (1 - b1) g) + d w), then m = b2 m + (1 - b2) g."""
        momentum, gradients = shard.moments["lion_momentum"], shard.gradients
        direction = momentum.lerp(gradients, 1 - self.lion_beta1).sign_()
        shard.weights.mul_(1 - shard.learning_rate * shard.weight_decay)
        shard.weights.sub_(direction, alpha=shard.learning_rate)
        momentum.lerp_(gradients, 1 - self.lion_beta2)
