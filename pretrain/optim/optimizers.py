"""One class per optimizer: its keys in [optimizer], its state, its update, and what that costs.

A class below `Optimizer` is all that an optimizer is, wherever it stands: its name is then a value
of optimizer.name, checkpoints hold its moments, `pretrain plan` charges its memory and its update,
and ZeRO shards it in any layout. No other module compares the name of an optimizer with a word.

An update sees a flat part of the parameters of one rank, which respects no parameter's bounds, so
it has to treat each element by itself. A matrix optimizer (Muon) cannot be written so;
docs/walkthrough.md says what it would take.

torch is imported within the updates: the launcher reads configs where there is none.
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
    """A flat part of a rank's parameters that share their settings; all tensors are fp32."""

    weights: Tensor
    """[n], the masters, to be changed in place."""
    gradients: Tensor
    """[n]. What is left of them is not read again."""
    moments: dict[str, Tensor]
    """[n] each, by the names of `Optimizer.moments`, zeros before the first update."""
    updates: Tensor
    """Updates made, this one included; a scalar."""
    learning_rate: float
    weight_decay: float
    grad_scale: Tensor | None
    """What gradients are to be divided by, a scalar; None for 1."""
    found_inf: Tensor | None
    """A scalar: 1 if the update is to be left out, which the host does not know; None for 0."""


class Optimizer(ChosenSection):
    """[optimizer]: the keys of every optimizer, and of each its own."""

    EFFECT = Effect.TRAJECTORY
    CHOICE = "optimizer.name"
    REGISTERED: ClassVar = {}

    # A checkpoint has the moments of one optimizer.
    name: Fixed[str] = "adamw"
    """adamw: AdamW. nag: fairseq's Nesterov's accelerated gradient, SGD with a momentum that looks
    ahead; its learning rates are about a thousand times those of AdamW, as of 1.0 for WikiText-103
    with clip_grad = 0.1. It keeps one moment instead of two."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate, which [schedule] warms up to and decays from."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices. Biases, LayerNorms and slopes are never decayed."""

    clip_grad: float = Field(default=1.0, ge=0, allow_inf_nan=True)
    """Largest global gradient norm (L2), beyond which gradients are scaled down; 0 turns clipping
    off, and so does inf."""

    position_learning_rate_mult: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the learning rate of the position method's own parameters: T5's table of biases, or
    trainable slopes. A learned position table is an embedding and is trained as one. AdamW moves an
    entry by about the learning rate in a step, so in a short training T5's table can need a factor:
    see configs/studies/debian_decide.toml."""

    # The scale at step 0; the present one is in the checkpoint.
    initial_loss_scale_power: Free[int] = Field(default=16, ge=0)
    """fp16: the dynamic loss scale starts at 2 to this power. Lower it when a run begins with many
    skipped steps."""

    moments: ClassVar[dict[str, str]]
    """What is kept of each parameter beside its fp32 master, fp32 too: the name in a checkpoint,
    torch's where torch has the optimizer -> what it is, in the plural, for people."""

    def formula(self, shard: Shard) -> None:
        """Make one update, with gradients that are scaled already; leaving out is done around it.

        A class has this, or an `update` of its own.
        """
        raise NotImplementedError

    def update(self, shard: Shard) -> None:
        """Make one update of a shard, or leave it out if `found_inf` says so.

        This one works for any formula, and moves the weights and moments twice more than the
        formula does. Where torch has a fused kernel that reads `grad_scale` and `found_inf`
        itself, call that instead.
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
        """Bytes that a fused update of one parameter reads and writes in memory.

        Weights, moments and gradients are read and written, since the fused kernels store the
        gradients that they have scaled (ATen/native/cuda/fused_adam_utils.cuh).
        """
        return 8 * (2 + len(self.moments))

    def refusals(self) -> Iterator[Refusal]:
        """Yield what is wrong with the keys together."""
        yield from ()


OPTIMIZERS: dict[str, type[Optimizer]] = Optimizer.REGISTERED
"""optimizer.name -> its class."""


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, Decoupled weight decay regularization)."""

    name: Fixed[Literal["adamw"]] = "adamw"

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """adamw: decay per step of the running mean of the gradients."""

    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """adamw: decay per step of the running mean of the squared gradients. Large models often use
    0.95; Adam's own default of 0.999 averages over more steps."""

    adam_eps: float = Field(default=1e-8, gt=0)
    """adamw: added to the square root of the second moment, so that an update with tiny gradients
    stays small."""

    moments: ClassVar = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}

    def update(self, shard: Shard) -> None:
        """Launch torch's fused kernel, as torch.optim.AdamW does."""
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
    the learning rate, r' that of the update before, m the momentum and d the weight decay:

        w = w (1 - r d) + m^2 (r / r') v - (1 + m) r g
        v = m (r / r') v - r g

    With v = -r' b the rates before cancel, and what is left is torch.optim.SGD(nesterov=True):

        b = m b + g
        w = w (1 - r d) - r (g + m b)

    So b, a sum of gradients, is what is kept. It does not depend on the learning rate, which may
    change from step to step. An update with a rate of 0 leaves v = 0, hence b = 0 is set behind
    such a one.
    """

    name: Fixed[Literal["nag"]] = "nag"

    momentum: float = Field(default=0.99, gt=0, lt=1)
    """nag: decay of the sum of the gradients. The default is fairseq's."""

    moments: ClassVar = {"momentum_buffer": "momentum"}

    def update(self, shard: Shard) -> None:
        """Decay the weights, and launch torch's fused kernel."""
        import torch

        made = 1.0 if shard.found_inf is None else 1.0 - shard.found_inf
        buffer = shard.moments["momentum_buffer"]
        # The kernel's own weight decay is added to the gradient, and would take part in the
        # momentum.
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
        """As of any optimizer, and 8 for the weight decay, which is a kernel of its own."""
        return super().update_bytes + (8 if self.weight_decay else 0)

    def refusals(self) -> Iterator[Refusal]:
        """Refuse a decay beyond zero: the default decay is for AdamW's rates, far below these."""
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
    """Return what a kind of tensor in a checkpoint is, in the plural, as "first moments"."""
    known = {"master": "fp32 weights"}
    for optimizer in OPTIMIZERS.values():
        known |= optimizer.moments
    return known.get(kind, kind)


# ---- The learning rate, a pure function of the step: a resumed run needs no scheduler state ----


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of one optimizer step, that of Megatron's and Hugging Face's too.

    They set the rate from the number of updates that are done, before the first update and after
    each one (megatron/core/optimizer_param_scheduler.py, transformers.get_scheduler; so does
    fairseq). The first update therefore takes the rate of 0 updates done, and the last one that of
    train.num_steps - 1: schedule.min_learning_rate would be reached by the update after it.

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
