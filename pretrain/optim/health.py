"""Find what is wrong with the state on the ranks: values that are not finite, copies that differ.

Several ranks hold the same values in every layout. Nothing copies those from one rank to another
after the start (but for the weights of ZeRO 1 and 2): they stay equal because every rank computes
the same. A memory error or a broken kernel on one rank makes them drift apart, and the run goes on
with a model that is no longer one. What must be equal, bit for bit:

    values                                    among the ranks of        at ZeRO stage
    model weights                             the data-parallel group   1, 2
    unsplit parameters (layer norms, biases   the tensor group          1, 2, 3
    of row-parallel layers): weights, state
    the tied embedding: weights, state        the embedding group       1
    the position method's parameters          the pipeline group        1

"State" is the part of the fp32 masters and the moments that this data-parallel rank keeps.
Copies are laid out alike on all ranks (pretrain/optim/buckets.py), so these parts cover the same
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from pretrain import platform
from pretrain.config.tensors import TIED
from pretrain.model.gpt import Named
from pretrain.optim.zero import flat_masters, read_fragments

if TYPE_CHECKING:
    from pretrain.optim.zero import ZeroOptimizer


# ---- Recognise steps whose loss or gradient norm is far above that of the steps before ----
# A step is a spike if its loss or its gradient norm lies more than `threshold` standard deviations
# above the mean of the last `window` steps, as in OLMo-core (allenai/OLMo-core,
# src/olmo_core/optim/ skip_step_optimizer.py). Two things differ. Values far *below* the mean are
# no spikes. And a spike enters the window as the limit that it exceeded: with its own value, a
# single one would blind the detector for as long as it stays in the window, and left out, a loss
# that has risen for good would be a spike for ever. So the limit widens by about a tenth with each
# spike in a row.
#
# Everything is computed on the device from numbers that are equal on all ranks. So all ranks decide
# the same, and neither the host nor another rank is waited for.


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
        self.rollbacks: list[tuple[int, int]] = []
        """(step of the spike, step of the checkpoint) of each time that the run went back."""
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
        return {
            **rows,
            "steps_observed": values[-2:-1],
            "updates_skipped": values[-1:],
            "rolled_back_from": [float(spike) for spike, _ in self.rollbacks],
            "rolled_back_to": [float(step) for _, step in self.rollbacks],
        }

    def load(self, lists: dict[str, list[float]] | None) -> None:
        """Set the state to what `to_lists` returned; begin anew if there is none that fits.

        A window of another size begins anew, and the updates skipped so far are kept.
        """
        self.state.zero_()
        lists = lists or {}
        steps = [lists.get(key, []) for key in ("rolled_back_from", "rolled_back_to")]
        self.rollbacks = [(int(spike), int(step)) for spike, step in zip(*steps)]
        if not lists:
            return
        self.state[-1] = lists["updates_skipped"][0]
        rows = [lists[name] for name in NAMES]
        if all(len(row) == self._window for row in rows):
            values = [*rows[0], *rows[1], lists["steps_observed"][0]]
            self.state[:-1] = torch.tensor(values, dtype=torch.float64)


LARGEST_WEIGHT = 1e6
"""The magnitude of an fp32 master beyond which a model does not work: fp16 ends at 65,504."""
SLACK = 1e6
"""How far beyond a clipped gradient and its square a moment may lie: it may be a sum of them, and
clip_grad may have been another one before. A flipped high bit of an exponent changes a number by
2^64 or more."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers as which its bits are summed."""


@dataclass(frozen=True)
class Copies:
    """Tensors of this rank that every rank of a group must hold with the same bits."""

    group: dist.ProcessGroup
    tensors: dict[str, Tensor]
    """By name, in the same order on all ranks of the group."""

    def checksums(self) -> Tensor:
        """Return the checksum of each tensor, int64 [tensors]."""
        return torch.stack([checksum(tensor) for tensor in self.tensors.values()])


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of all elements, each read as an integer; int64 scalar.

    It takes one kernel and finds any single change. It cannot find elements that have changed
    places, which no failure of one rank would do.
    """
    return tensor.detach().view(BITS[tensor.element_size()]).sum(dtype=torch.int64)


def state_is_plausible(optimizer: ZeroOptimizer) -> Tensor:
    """Return if no master and no moment of this rank is beyond its limit; a nan is.

    Returns:
        A boolean scalar on the device.
    """
    buffers, limits = [], []
    for flat in flat_masters(optimizer):
        # The optimizer makes its moments at the first update.
        state = optimizer.zero.optimizer.state[flat]
        moments = {name: state[name] for name in optimizer.moments if name in state}
        for name, buffer in {"master": flat.detach(), **moments}.items():
            buffers.append(buffer)
            limits.append(_limit(optimizer, name))
    # The largest magnitude: a Euclidean norm overflows where every element is finite.
    largest = torch.stack(torch._foreach_norm(buffers, math.inf))
    # A nan is not below anything.
    return (largest <= platform.to_device(torch.tensor(limits))).all()


def _limit(optimizer: ZeroOptimizer, kind: str) -> float:
    """Return the magnitude beyond which a master or a moment cannot come from training."""
    if kind == "master":
        return LARGEST_WEIGHT
    # No element of a clipped gradient is larger than its norm. Unclipped, it may be of any size.
    largest = optimizer.clip_grad or math.inf
    return min(SLACK * max(largest, largest * largest), torch.finfo(torch.float32).max)


def implausible_state(optimizer: ZeroOptimizer) -> list[str]:
    """Return the names of this rank's masters and moments beyond their limits, with a value."""
    found = []
    for fragment in read_fragments(optimizer):
        for kind, values in fragment.tensors.items():
            bad = values[~(values.abs() <= _limit(optimizer, kind))]
            if bad.numel():
                found.append(f"{kind} of {fragment.named.name} ({float(bad[0])})")
    return found


def find_copies(optimizer: ZeroOptimizer) -> list[Copies]:
    """Return what this rank must have in common with other ranks, for each group of them."""
    data = parallel_state.get_data_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    found = []
    if data.size() > 1 and not optimizer.partitions_weights:
        weights = {f"{n.name} (weight)": n.parameter.data for n in optimizer.parameters}
        found.append(Copies(data, weights))
    if tensor.size() > 1:
        # As plan_buckets tells them: a split parameter is smaller than the global one.
        unsplit = {n.name for n in optimizer.parameters if n.shape == n.global_shape}
        found.append(Copies(tensor, dict(_weights_and_state(optimizer, unsplit))))
    if pipeline.size() > 1:
        shared = {n.name for n in optimizer.parameters if n.name.startswith("position.")}
        found.append(Copies(pipeline, dict(_weights_and_state(optimizer, shared))))
        if _holds_tied_embedding(optimizer):
            embedding = parallel_state.get_embedding_group()
            found.append(Copies(embedding, dict(_weights_and_state(optimizer, {TIED}))))
    return [copies for copies in found if copies.tensors]


def update_counts(optimizer: ZeroOptimizer) -> Tensor:
    """Return Adam's smallest and largest number of updates over the groups; int64 [2]."""
    masters = flat_masters(optimizer)
    none = torch.zeros((), device=masters[0].device)
    states = [optimizer.zero.optimizer.state[flat] for flat in masters]
    steps = torch.stack([state.get("step", none) for state in states])
    return torch.stack(steps.aminmax()).long()


def _weights_and_state(optimizer: ZeroOptimizer, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the weights of some parameters, and of this rank's part of the state.

    Args:
        optimizer: The optimizer.
        names: Global names of the parameters.
    """
    for named in optimizer.parameters:
        if named.name in names:
            yield f"{named.name} (weight)", _own_weight(optimizer, named)
    for fragment in read_fragments(optimizer):
        if fragment.named.name in names:
            for kind, values in fragment.tensors.items():
                yield f"{fragment.named.name} ({kind})", values


def _own_weight(optimizer: ZeroOptimizer, named: Named) -> Tensor:
    """Return a parameter's weights as this rank keeps them: under ZeRO 3 its partition."""
    if not optimizer.partitions_weights:
        return named.parameter.data
    return cast(Tensor, cast(Any, named.parameter).ds_tensor.data)


def _holds_tied_embedding(optimizer: ZeroOptimizer) -> bool:
    """Return True on the first and the last pipeline stage of a model with a tied embedding."""
    # Megatron's mark of weights that the first and the last stage share.
    tied = [n for n in optimizer.parameters if n.name == TIED]
    return bool(tied) and hasattr(tied[0].parameter, "shared_embedding")
