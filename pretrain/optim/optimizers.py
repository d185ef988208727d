"""One class per optimizer: its keys in [optimizer], its state, its update, and what that costs.

To add an optimizer, write a subclass of `Optimizer` anywhere. Its name is then a value of
optimizer.name, checkpoints hold its moments, `pretrain plan` counts its memory and update, and ZeRO
shards it in any layout. No other module compares the names of optimizers.

An update gets a flat part of one rank's parameters, which may begin and end within a parameter, so
it must treat each element separately. A matrix optimizer (Muon) does not fit this interface;
docs/walkthrough.md says what it would need.

torch is imported within the updates, because the launcher reads configs without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from pretrain.config.errors import Refusal
from pretrain.config.schema import ChosenSection, Effect, Fixed, Free

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.config import RunConfig


@dataclass
class Shard:
    """A flat part of a rank's parameters with the same settings; all tensors are fp32."""

    weights: Tensor
    """[n], the master weights, to update in place."""
    gradients: Tensor
    """[n]. An update may overwrite them."""
    moments: dict[str, Tensor]
    """[n] each, by the names of `Optimizer.moments`; zeros before the first update."""
    updates: Tensor
    """Number of updates, including this one; a scalar."""
    learning_rate: float
    weight_decay: float
    grad_scale: Tensor | None
    """Divisor of the gradients, a scalar on the device; None for 1."""
    found_inf: Tensor | None
    """1 to skip the update, else 0, a scalar on the device; None for 0."""


class Optimizer(ChosenSection):
    """[optimizer]: keys of all optimizers, and of the chosen one."""

    EFFECT = Effect.TRAJECTORY
    CHOICE = "optimizer.name"
    REGISTERED: ClassVar = {}

    # FIXED, because a checkpoint has the moments of one optimizer.
    name: Fixed[str] = "adamw"
    """adamw: AdamW. nag: Nesterov's accelerated gradient as in fairseq, which is SGD with Nesterov
    momentum and keeps one moment instead of two. Its learning rates are about a thousand times
    those of AdamW: 1.0 for WikiText-103, with clip_grad = 0.1."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate. [schedule] sets the warm-up to it and the decay from it."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices. Biases, LayerNorms and slopes are never decayed."""

    clip_grad: float = Field(default=1.0, ge=0, allow_inf_nan=True)
    """Largest global gradient norm (L2). Gradients with a larger norm are scaled down to it. 0 or
    inf turns clipping off."""

    position_learning_rate_mult: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the learning rate of the position method's own parameters, such as T5's table of
    biases or trainable slopes, but not a learned position table, which is trained like an
    embedding. AdamW moves a number by about the learning rate per step, so a short training may
    need a factor: docs/results/README.md has methods that gain by one, and others that lose."""

    # FREE, because it acts only at step 0: a checkpoint holds the current scale.
    initial_loss_scale_power: Free[int] = Field(default=16, ge=0)
    """With fp16, the dynamic loss scale starts at 2 to this power. Lower it if a run begins with
    many skipped steps."""

    moments: ClassVar[dict[str, str]]
    """The fp32 tensors that are kept for each parameter besides its master: name in a checkpoint,
    which is torch's name if torch has the optimizer -> description in the plural, for messages."""

    def formula(self, shard: Shard) -> None:
        """Make one update with scaled gradients; the caller handles skipped updates.

        A subclass implements either this or `update`.
        """
        raise NotImplementedError

    def update(self, shard: Shard) -> None:
        """Make one update of a shard, or skip it if `found_inf` is 1.

        This default works for any formula, but reads and writes weights and moments two more times
        than the formula does. If torch has a fused kernel that takes `grad_scale` and `found_inf`,
        override this method and call the kernel.
        """
        import torch

        if shard.grad_scale is not None:
            shard.gradients.div_(shard.grad_scale)
        if shard.found_inf is None:
            self.formula(shard)
            return
        written = [shard.weights, *shard.moments.values()]
        before = [each.clone() for each in written]
        self.formula(shard)
        for new, old in zip(written, before):
            new.copy_(torch.where(shard.found_inf.bool(), old, new))

    @property
    def update_bytes(self) -> int:
        """Bytes of memory that a fused update of one parameter reads and writes.

        Weights, moments and gradients are read and written, because fused kernels also store the
        scaled gradients (ATen/native/cuda/fused_adam_utils.cuh).
        """
        return 8 * (2 + len(self.moments))

    def refusals(self) -> Iterator[Refusal]:
        """Yield why the keys do not work together."""
        yield from ()


OPTIMIZERS: dict[str, type[Optimizer]] = Optimizer.REGISTERED
"""optimizer.name -> class."""


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, Decoupled weight decay regularization)."""

    name: Fixed[Literal["adamw"]] = "adamw"

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of AdamW's running mean of the gradients."""

    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay per step of AdamW's running mean of the squared gradients. Large models often use 0.95;
    Adam's original default of 0.999 averages over more steps."""

    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of AdamW's second moment, so that updates with tiny gradients stay
    small."""

    moments: ClassVar = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}

    def update(self, shard: Shard) -> None:
        """Launch torch's fused kernel, like torch.optim.AdamW."""
        import torch

        torch._fused_adamw_(
            [shard.weights],
            [shard.gradients],
            [shard.moments["exp_avg"]],
            [shard.moments["exp_avg_sq"]],
            [],
            [shard.updates],
            lr=shard.learning_rate,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            weight_decay=shard.weight_decay,
            eps=self.adam_eps,
            amsgrad=False,
            maximize=False,
            grad_scale=shard.grad_scale,
            found_inf=shard.found_inf,
        )


class NAG(Optimizer):
    """Nesterov's accelerated gradient as in fairseq, computed by torch's fused SGD.

    fairseq's update (fairseq/optim/nag.py) of weights w with gradient g and buffer v, where r is
    the learning rate, r' the learning rate of the previous update, m the momentum and d the weight
    decay:

        w = w (1 - r d) + m^2 (r / r') v - (1 + m) r g
        v = m (r / r') v - r g

    With v = -r' b the previous rates cancel, which gives torch.optim.SGD(nesterov=True):

        b = m b + g
        w = w (1 - r d) - r (g + m b)

    The stored moment is therefore b, a sum of gradients, which does not depend on learning rates
    that change from step to step. In fairseq an update with a rate of 0 sets v = 0, so b is set to
    0 after such an update.
    """

    name: Fixed[Literal["nag"]] = "nag"

    momentum: float = Field(default=0.99, gt=0, lt=1)
    """Decay per step of NAG's sum of the gradients. The default is fairseq's."""

    moments: ClassVar = {"momentum_buffer": "momentum"}

    def update(self, shard: Shard) -> None:
        """Decay the weights, and launch torch's fused kernel."""
        import torch

        made = 1.0 if shard.found_inf is None else 1.0 - shard.found_inf
        buffer = shard.moments["momentum_buffer"]
        # Not by the kernel, whose weight decay is added to the gradient and so to the momentum.
        if shard.weight_decay:
            shard.weights.mul_(1.0 - shard.learning_rate * shard.weight_decay * made)
        torch._fused_sgd_(
            [shard.weights],
            [shard.gradients],
            [buffer],
            weight_decay=0.0,
            momentum=self.momentum,
            lr=shard.learning_rate,
            dampening=0.0,
            nesterov=True,
            maximize=False,
            is_first_step=False,
            grad_scale=shard.grad_scale,
            found_inf=shard.found_inf,
        )
        if shard.learning_rate == 0:
            buffer.mul_(1.0 - made)

    @property
    def update_bytes(self) -> int:
        """Add 8 bytes for the weight decay, which is a separate kernel."""
        return super().update_bytes + (8 if self.weight_decay else 0)

    def refusals(self) -> Iterator[Refusal]:
        """Refuse a decay beyond zero: the default suits AdamW's much smaller learning rates."""
        if self.learning_rate * self.weight_decay >= 1:
            yield Refusal(
                "optimizer.weight_decay",
                self.weight_decay,
                f"each update multiplies matrices by 1 - {self.learning_rate} x "
                f"{self.weight_decay}, which leaves nothing of them",
                f"Choose less than {1 / self.learning_rate:.3g}, or 0 as the published runs",
            )


AnyOptimizer = Annotated[SerializeAsAny[Optimizer], BeforeValidator(Optimizer.chosen)]
"""The section [optimizer] of a run."""


def meaning(kind: str) -> str:
    """Return the description of a kind of tensor in a checkpoint, such as "first moments"."""
    known = {"master": "fp32 weights"}
    for optimizer in OPTIMIZERS.values():
        known |= optimizer.moments
    return known.get(kind, kind)


# ---- The learning rate, a pure function of the step: a resumed run needs no scheduler state ----


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of an optimizer step, as in Megatron, Hugging Face and fairseq.

    The rate depends on the number of updates before the step
    (megatron/core/optimizer_param_scheduler.py, transformers.get_scheduler). The first update has
    the rate for 0 updates, and the last one that for train.num_steps - 1: only the update after it
    would have schedule.min_learning_rate.

    The warm-up is linear: the first update has the rate lr_warmup_init, and the one after
    lr_warmup_steps updates the peak. Without a warm-up the first update has the peak. From there
    the rate falls:

    - `linear`: along a straight line.
    - `cosine`: along half a cosine wave (Loshchilov and Hutter 2017, equation 5).
    - `warmup_stable_decay`: it stays at the peak, then falls along a straight line over the
      last lr_wsd_decay_steps steps, the first of which still has the peak.
    - `constant`: it does not fall; min_learning_rate is not used.

    The schedule counts its steps from schedule.lr_begin_step, and the decay ends at
    schedule.lr_end_step, by default train.num_steps; after it the rate stays.

    Megatron counts samples, and here steps count, also while batch.rampup_batch_size grows. A step
    whose update was skipped counts as well.

    Args:
        config: The run, or its phase; its [schedule], optimizer.learning_rate (the peak) and
            train.num_steps.
        step: The step about to be taken, counted from 0: the updates done.
    """
    schedule, peak = config.schedule, config.optimizer.learning_rate
    step = max(step - schedule.lr_begin_step, 0)
    if step < schedule.lr_warmup_steps:
        first = schedule.lr_warmup_init
        return first + (peak - first) * step / schedule.lr_warmup_steps
    if schedule.lr_decay_style == "constant":
        return peak
    end = config.lr_end_step - schedule.lr_begin_step
    begin = schedule.lr_warmup_steps
    if schedule.lr_decay_style == "warmup_stable_decay":
        begin = end - schedule.lr_wsd_decay_steps
    progress = min(max(step - begin, 0) / (end - begin), 1.0)
    if schedule.lr_decay_style == "cosine":
        share_of_peak = (1 + math.cos(math.pi * progress)) / 2
    else:
        share_of_peak = 1 - progress
    minimum = schedule.min_learning_rate
    return minimum + (peak - minimum) * share_of_peak
