"""The learning rate, a pure function of the step: a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from pretrain.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of one optimizer step.

    The warm-up is linear: step 0 uses 1 / lr_warmup_steps of the peak, and step
    lr_warmup_steps - 1 the peak itself. Without a warm-up, step 0 uses the peak. From there the
    rate falls to schedule.min_learning_rate, which the last step of the run uses:

    - `linear`: along a straight line.
    - `cosine`: along half a cosine wave (Loshchilov and Hutter 2017, equation 5).
    - `warmup_stable_decay`: it stays at the peak, then falls along a straight line during the
      last lr_wsd_decay_steps steps.
    - `constant`: it does not fall; min_learning_rate is not used.

    Args:
        config: The run; its [schedule], optimizer.learning_rate (the peak) and train.num_steps.
        step: The step about to be taken, counted from 0; smaller than train.num_steps.
    """
    schedule, peak = config.schedule, config.optimizer.learning_rate
    if step < schedule.lr_warmup_steps:
        return peak * (step + 1) / schedule.lr_warmup_steps
    if schedule.lr_decay_style == "constant":
        return peak
    last_step = config.train.num_steps - 1
    last_peak_step = max(schedule.lr_warmup_steps - 1, 0)
    if schedule.lr_decay_style == "warmup_stable_decay":
        last_peak_step = last_step - schedule.lr_wsd_decay_steps
    # A run of a single step has nothing to decay over: max(..., 1) avoids a division by zero.
    progress = max(step - last_peak_step, 0) / max(last_step - last_peak_step, 1)
    if schedule.lr_decay_style == "cosine":
        share_of_peak = (1 + math.cos(math.pi * progress)) / 2
    else:
        share_of_peak = 1 - progress
    minimum = schedule.min_learning_rate
    return minimum + (peak - minimum) * share_of_peak
