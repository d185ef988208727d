"""Recognise steps whose loss or gradient norm is far above that of the steps before.

A step is a spike if its loss or its gradient norm lies more than `threshold` standard deviations
above the mean of the last `window` steps, as in OLMo-core (allenai/OLMo-core, src/olmo_core/optim/
skip_step_optimizer.py). Two things differ. Values far *below* the mean are no spikes. And a spike
enters the window as the limit that it exceeded: with its own value, a single one would blind the
detector for as long as it stays in the window, and left out, a loss that has risen for good would
be a spike for ever. So the limit widens by about a tenth with each spike in a row.

Everything is computed on the device from numbers that are equal on all ranks. So all ranks decide
the same, and neither the host nor another rank is waited for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain import platform

FEWEST_STEPS = 20
"""No step is judged by fewer steps than this, or half of the window, whichever is more."""
NAMES = ("loss_nats", "gradient_norm")
"""What is observed, in the order of the window's rows."""


class SpikeDetector:
    """The last losses and gradient norms, and how many updates were skipped because of spikes."""

    def __init__(self, threshold: float, window: int) -> None:
        """Begin without any step.

        Args:
            threshold: Standard deviations above the mean from which on a value is a spike.
            window: Steps of which mean and deviation are taken.
        """
        self._threshold, self._window = threshold, window
        self._fewest = min(window, max(FEWEST_STEPS, window // 2))
        self.state = torch.zeros(2 * window + 2, dtype=torch.float64, device=platform.device())
        """Losses [window], norms [window], number of steps observed, number of updates skipped."""
        self._last = torch.zeros(3, dtype=torch.float64, device=platform.device())

    @property
    def summary(self) -> Tensor:
        """Return the verdict on the last step observed, its limits, and the number of skips.

        fp64 [4], on the device: 1 if the step was a spike, the limits of loss and norm, and the
        updates skipped so far.
        """
        return torch.cat([self._last, self.state[-1:]])

    @torch.no_grad()
    def observe(self, loss: Tensor, norm: Tensor, *, skips: bool) -> Tensor:
        """Take a step's numbers into the window, and judge it by the steps before.

        Args:
            loss: Mean loss in nats, a scalar.
            norm: Global gradient norm, a scalar.
            skips: Count the step as skipped if it is a spike.

        Returns:
            If the step is a spike: a boolean scalar on the device. A number that is not finite
            makes none, and its step is not taken into the window.
        """
        window, count = self.state[: 2 * self._window].view(2, -1), self.state[-2]
        seen = torch.stack([loss.to(window), norm.to(window)])
        filled = torch.arange(self._window, device=window.device) < count
        number = count.clamp(1, self._window)
        mean = torch.where(filled, window, 0.0).sum(1) / number
        squares = torch.where(filled, (window - mean[:, None]).square(), 0.0).sum(1)
        limit = mean + self._threshold * (squares / (number - 1).clamp(min=1)).sqrt()
        is_ready, is_finite = count >= self._fewest, seen.isfinite().all()
        # Each by itself: in fp16 the norm of a spike may overflow, and its loss tells.
        is_spike: Tensor = is_ready & ((seen > limit) & seen.isfinite()).any()
        place = (count % self._window).long().view(1)
        kept = torch.where(is_ready, torch.minimum(seen, limit), seen)[:, None]
        window.index_copy_(1, place, torch.where(is_finite, kept, window.index_select(1, place)))
        count += is_finite
        if skips:
            self.state[-1] += is_spike
        limit = torch.where(is_ready, limit, torch.inf)
        self._last = torch.cat([is_spike.to(limit)[None], limit])
        return is_spike

    def to_lists(self) -> dict[str, list[float]]:
        """Return the state as lists, for a checkpoint. Waits for the device."""
        values = self.state.tolist()
        size = self._window
        rows = {name: values[i * size : (i + 1) * size] for i, name in enumerate(NAMES)}
        return {**rows, "steps_observed": values[-2:-1], "updates_skipped": values[-1:]}

    def load(self, lists: dict[str, list[float]] | None) -> None:
        """Set the state to what `to_lists` returned; begin anew if there is none that fits.

        A window of another size begins anew, and the updates skipped so far are kept.
        """
        self.state.zero_()
        if not lists:
            return
        self.state[-1] = lists["updates_skipped"][0]
        rows = [lists[name] for name in NAMES]
        if all(len(row) == self._window for row in rows):
            values = [*rows[0], *rows[1], lists["steps_observed"][0]]
            self.state[:-1] = torch.tensor(values, dtype=torch.float64)
