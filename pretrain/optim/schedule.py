"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from pretrain.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of step `step` (0-based: the step about to be taken, 0 <= step < train.num_steps).

    Warm-up is linear: step 0 takes 1/lr_warmup_steps of the peak and step lr_warmup_steps - 1 the peak itself. From
    there the rate falls to min_learning_rate, reached at the last step: along a straight line (linear), half a cosine
    wave (cosine, Loshchilov and Hutter 2017, equation 5), or flat and then straight over the last lr_wsd_decay_steps
    (warmup_stable_decay). `constant` stays at the peak. Without warm-up step 0 takes the peak.
    """
    s, peak = config.schedule, config.optimizer.learning_rate
    if step < s.lr_warmup_steps:
        return peak * (step + 1) / s.lr_warmup_steps
    if s.lr_decay_style == "constant":
        return peak
    last = config.train.num_steps - 1
    start = max(s.lr_warmup_steps - 1, 0)  # the last step at the peak
    if s.lr_decay_style == "warmup_stable_decay":
        start = last - s.lr_wsd_decay_steps
    progress = max(step - start, 0) / max(last - start, 1)
    left = (1 + math.cos(math.pi * progress)) / 2 if s.lr_decay_style == "cosine" else 1 - progress
    return s.min_learning_rate + (peak - s.min_learning_rate) * left
