"""The learning rate, a pure function of the step: a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from pretrain.config import RunConfig


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

    Megatron counts samples, and here steps count, also while batch.rampup_batch_size grows. A step
    whose update was skipped counts as well.

    Args:
        config: The run; its [schedule], optimizer.learning_rate (the peak) and train.num_steps.
        step: The step about to be taken, counted from 0: the updates done.
    """
    schedule, peak = config.schedule, config.optimizer.learning_rate
    if step < schedule.lr_warmup_steps:
        first = schedule.lr_warmup_init
        return first + (peak - first) * step / schedule.lr_warmup_steps
    if schedule.lr_decay_style == "constant":
        return peak
    end = config.train.num_steps
    begin = schedule.lr_warmup_steps
    if schedule.lr_decay_style == "warmup_stable_decay":
        begin = end - schedule.lr_wsd_decay_steps
    progress = max(step - begin, 0) / (end - begin)
    if schedule.lr_decay_style == "cosine":
        share_of_peak = (1 + math.cos(math.pi * progress)) / 2
    else:
        share_of_peak = 1 - progress
    minimum = schedule.min_learning_rate
    return minimum + (peak - minimum) * share_of_peak
