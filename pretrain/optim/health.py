"""Check the state on the ranks: find non-finite values and copies that differ.

Several ranks hold the same values in every layout. After the start these are not copied between
ranks, except the weights of ZeRO 1 and 2. They stay equal because every rank computes the same. A
memory error or a broken kernel on one rank makes the copies differ, and the run would continue with
an inconsistent model. These values must be equal bit for bit:

    values                                    among the ranks of        at ZeRO stage
    model weights                             the replicas              1, 2
    unsplit parameters (layer norms, biases   the tensor group          1, 2, 3
    of row-parallel layers): weights, state
    the tied embedding: weights, state        the embedding group       1
    the position method's parameters          the pipeline group        1

"State" is this data-parallel rank's part of the fp32 masters and the moments. All ranks store
copies in the same layout (pretrain/optim/buckets.py), so these parts cover the same elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from pretrain import platform
from pretrain.config import MemoryChanged, RunConfig
from pretrain.config.tensors import TIED
from pretrain.model.gpt import Named
from pretrain.optim.buckets import is_shared_embedding
from pretrain.optim.zero import ZeroOptimizer, flat_masters, read_fragments
from pretrain.topology import gather, host_name, replica_group

# ---- Detect steps whose loss or gradient norm is far above that of the steps before ----
# A step is a spike if its loss or its gradient norm lies more than `threshold` standard deviations
# above the mean of the last `window` steps, as in OLMo-core (allenai/OLMo-core,
# src/olmo_core/optim/skip_step_optimizer.py). There are two differences. Values far below the mean
# are not spikes. And a spike enters the window as the limit that it exceeded. With its own value, a
# single spike would blind the detector until it leaves the window. Without any value, a permanently
# higher loss would be a spike forever; this way the limit grows by about a tenth with each spike in
# a row.
#
# Everything is computed on the device from numbers that are equal on all ranks. All ranks therefore
# decide the same, without waiting for the host or for each other.


FEWEST_STEPS = 20
"""Steps are judged once this many, and at least half of the window, have been observed."""
NAMES = ("loss_nats", "gradient_norm")
"""The observed numbers, in the order of the window's rows."""


class SpikeDetector:
    """The last losses and gradient norms, and how many updates were skipped because of spikes."""

    def __init__(self, threshold: float, window: int) -> None:
        """Begin without any step.

        Args:
            threshold: Standard deviations above the mean beyond which a value is a spike.
            window: Number of steps for the mean and the deviation.
        """
        self._threshold, self._window = threshold, window
        self._fewest = min(window, max(FEWEST_STEPS, window // 2))
        self.state = torch.zeros(2 * window + 2, dtype=torch.float64, device=platform.device())
        """Losses [window], norms [window], number of steps observed, number of updates skipped."""
        self.rollbacks: list[tuple[int, int]] = []
        """(step of the spike, step of the checkpoint) for each rollback."""
        self._last = torch.zeros(3, dtype=torch.float64, device=platform.device())
        self._forgotten: dict[str, list[float]] | None = None

    @property
    def summary(self) -> Tensor:
        """Return the verdict on the last step observed, its limits, and the number of skips.

        fp64 [4], on the device: 1 if the step was a spike, the limits of loss and norm, and the
        updates skipped so far.
        """
        return torch.cat([self._last, self.state[-1:]])

    @torch.no_grad()
    def observe(self, loss: Tensor, norm: Tensor, *, skips: bool) -> Tensor:
        """Judge a step by the steps before it, and add its numbers to the window.

        Args:
            loss: Mean loss in nats, a scalar.
            norm: Global gradient norm, a scalar.
            skips: Count the step as skipped if it is a spike.

        Returns:
            Whether the step is a spike, a boolean scalar on the device. Non-finite numbers are not
            spikes, and their step does not enter the window.
        """
        window, count = self.state[: 2 * self._window].view(2, -1), self.state[-2]
        seen = torch.stack([loss.to(window), norm.to(window)])
        filled = torch.arange(self._window, device=window.device) < count
        number = count.clamp(1, self._window)
        mean = torch.where(filled, window, 0.0).sum(1) / number
        squares = torch.where(filled, (window - mean[:, None]).square(), 0.0).sum(1)
        limit = mean + self._threshold * (squares / (number - 1).clamp(min=1)).sqrt()
        is_ready, is_finite = count >= self._fewest, seen.isfinite().all()
        # Judge each number by itself: in fp16 a spike's norm may overflow while its loss does not.
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

    def load(self, lists: dict[str, list[float]] | None, *, forgets: bool = False) -> None:
        """Set the state to what `to_lists` returned; None resets it.

        With another window size the window starts empty, and the number of skipped updates is kept.

        Args:
            lists: The state.
            forgets: Start with an empty window, now and whenever this state is loaded again.
        """
        self._forgotten = lists if forgets else self._forgotten
        self.state.zero_()
        lists = lists or {}
        steps = [lists.get(key, []) for key in ("rolled_back_from", "rolled_back_to")]
        self.rollbacks = [(int(spike), int(step)) for spike, step in zip(*steps)]
        if not lists:
            return
        self.state[-1] = lists["updates_skipped"][0]
        rows = [lists[name] for name in NAMES]
        if lists != self._forgotten and all(len(row) == self._window for row in rows):
            values = [*rows[0], *rows[1], lists["steps_observed"][0]]
            self.state[:-1] = torch.tensor(values, dtype=torch.float64)


LARGEST_WEIGHT = 1e6
"""The magnitude of an fp32 master beyond which a model does not work: fp16 ends at 65,504."""
SLACK = 1e6
"""How far beyond a clipped gradient and its square a moment may lie: it may be a sum of them, and
clip_grad may have been another one before. A flipped high bit of an exponent changes a number by
2^64 or more."""
GROWTH, SPAN = 1e3, 1e12
"""How far the largest master, and the largest element of a moment, may grow between a proven state
and the save after the next one. A spike of one clipped gradient raises a square by 1e10."""
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


def largest_magnitudes(optimizer: ZeroOptimizer) -> Tensor:
    """Return the largest magnitude of this rank's masters and of each moment; NaN if one is NaN.

    Returns:
        fp32 [1 + moments], on the device; 0 for moments that do not exist yet.
    """
    buffers = []
    for flat in flat_masters(optimizer):
        # The optimizer creates its moments at the first update.
        state = optimizer.zero.optimizer.state[flat]
        buffers += [flat.detach(), *(state.get(m, flat.new_zeros(1)) for m in optimizer.moments)]
    # The maximum norm, because a Euclidean norm may overflow although every element is finite.
    largest = torch.stack(torch._foreach_norm(buffers, math.inf))
    return largest.view(-1, 1 + len(optimizer.moments)).amax(0)


def plausible_limits(optimizer: ZeroOptimizer, proven: Tensor | None) -> Tensor:
    """Return the magnitudes beyond which masters and moments cannot come from training.

    Args:
        optimizer: The optimizer.
        proven: Its `largest_magnitudes` in the last proven state; None if that is not known.

    Returns:
        fp32 [1 + moments], on the device.
    """
    # No element of a clipped gradient exceeds its norm; without clipping there is no limit.
    clip, moments = optimizer.clip_grad or math.inf, len(optimizer.moments)
    most = min(SLACK * max(clip, clip * clip), torch.finfo(torch.float32).max)
    limits = platform.to_device(torch.tensor([LARGEST_WEIGHT, *[most] * moments]))
    if proven is None:
        return limits
    growth = platform.to_device(torch.tensor([GROWTH, *[SPAN] * moments]))
    # Moments, and with them their limits, begin at 0.
    return torch.minimum(limits, torch.where(proven > 0, proven * growth, torch.inf))


def implausible_state(optimizer: ZeroOptimizer, limits: Tensor) -> list[str]:
    """Return the names of this rank's masters and moments beyond their limits, with a value."""
    found = []
    limit = dict(zip(("master", *optimizer.moments), limits.tolist()))
    for fragment in read_fragments(optimizer):
        for kind, values in fragment.tensors.items():
            bad = values[~(values.abs() <= limit[kind])]
            if bad.numel():
                found.append(f"{kind} of {fragment.named.name} ({float(bad[0])})")
    return found


# ---- Check that memory does not change between two updates ----
# A checksum of each buffer is taken after an update and compared before the next one. Checksums are
# bound by memory, and a step by arithmetic. On an H100 (steps at 400 TFLOP/s, checksums at 3 TB/s),
# 24 bytes of masters and moments, split over the data-parallel ranks, and 2 bytes of weights take
# this share of a step of 6 FLOP per parameter and token: (533 + 44 ranks) / (tokens of the global
# batch).


def memory_check_interval(config: RunConfig, data_size: int) -> int:
    """Return recovery.memory_check_interval_steps; by default checks cost at most 1 % of time."""
    if config.recovery.memory_check_interval_steps is not None:
        return config.recovery.memory_check_interval_steps
    tokens = config.batch.global_batch_size * config.data.sequence_length
    return math.ceil(100 * (533 + 44 * data_size) / tokens)


class Resting:
    """Checksums of the state that this rank keeps between two updates."""

    def __init__(self, optimizer: ZeroOptimizer, interval: int) -> None:
        """Initialize without taking checksums.

        Args:
            optimizer: The optimizer.
            interval: Steps between two checks.
        """
        self._optimizer, self._interval = optimizer, interval
        self._group = replica_group()
        self._sums: Tensor | None = None

    def take(self, step: int, in_replay: bool) -> None:
        """Take the checksums after an update, if the next update is to check them.

        Args:
            step: Completed steps.
            in_replay: Take them whatever the interval is: a replay is short, and must tell a fault
                of the data from changed memory.
        """
        self._sums = self._sum() if in_replay or step % self._interval == 0 else None

    @torch.no_grad()
    def check(self) -> Tensor | None:
        """Compare with the checksums of `take`; None if there are none.

        Returns:
            fp64 [3], on the device: 1 if masters or moments have changed; a number whose sum over
            all ranks is 0 if all replicas hold the same weights; and the total checksum.
        """
        if self._sums is None:
            return None
        now = self._sum()
        copies = torch.zeros_like(now[:1])
        if self._group.size() > 1 and self._optimizer.stage < 3:
            flats = self._optimizer.zero.bit16_groups_flat
            copies = torch.stack([checksum(flat) for flat in flats]).sum(0, keepdim=True)
        # Exact in fp64: 32 bits, of up to 2^20 ranks.
        lead = self._group.size() - 1 if self._group.rank() == 0 else -1
        seen = [(now != self._sums).any()[None], lead * (copies & 0xFFFFFFFF)]
        return torch.cat([*seen, now.sum(0, keepdim=True) & 0xFFFFFFFFFFFF]).double()

    def _sum(self) -> Tensor:
        """Return the checksum of each buffer of masters, moments and this rank's weights, int64."""
        zero, buffers = self._optimizer.zero, []
        for flat in flat_masters(self._optimizer):
            state = zero.optimizer.state[flat]
            buffers += [flat, *(state[m] for m in self._optimizer.moments if m in state)]
        if self._optimizer.stage == 3:
            buffers += zero.fp16_partitioned_groups_flat
        elif self._group.size() == 1:
            buffers += zero.bit16_groups_flat
        return torch.stack([checksum(buffer) for buffer in buffers])


def changed_memory(step: int, own: Sequence[float]) -> MemoryChanged:
    """Return the error about memory that has changed between updates. All ranks call it together.

    Args:
        step: The step in which the change was found.
        own: The result of `Resting.check` on this rank.
    """
    group = dist.get_process_group_ranks(replica_group())
    everyone = gather((host_name(), group, list(own)), tuple[str, list[int], list[float]])
    ranks = {rank for rank, (_, _, (changed, *_)) in enumerate(everyone) if changed}
    if not ranks:
        for _, members, _ in everyone:
            # Undo the weights of `Resting.check`.
            lead = everyone[members[0]][2][1] / max(len(members) - 1, 1)
            values = {rank: -everyone[rank][2][1] for rank in members[1:]} | {members[0]: lead}
            [(common, count), *others] = Counter(values.values()).most_common()
            if others and 2 * count > len(members):
                ranks |= {rank for rank, value in values.items() if value != common}
    named = ", ".join(f"{rank} ({everyone[rank][0]})" for rank in sorted(ranks))
    what = f"rank {named}" if ranks else "a rank, of which there is no majority"
    return MemoryChanged(
        f"step {step}: the memory of {what} has changed since the update of the step before",
        "Nothing after it is saved. Start again from the last checkpoint; if it is always the same "
        "host, leave it out",
        sorted(ranks),
    )


def find_copies(optimizer: ZeroOptimizer) -> list[Copies]:
    """Return the values that must equal those of other ranks, for each group of ranks."""
    data = replica_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    found = []
    if data.size() > 1 and optimizer.stage < 3:
        weights = {f"{n.name} (weight)": n.parameter.data for n in optimizer.parameters}
        found.append(Copies(data, weights))
    if tensor.size() > 1:
        # A split parameter is smaller than the global one, as for plan_buckets.
        unsplit = {n.name for n in optimizer.parameters if n.shape == n.global_shape}
        found.append(Copies(tensor, dict(_weights_and_state(optimizer, unsplit))))
    if pipeline.size() > 1:
        shared = {n.name for n in optimizer.parameters if n.name.startswith("position.")}
        found.append(Copies(pipeline, dict(_weights_and_state(optimizer, shared))))
        if any(map(is_shared_embedding, optimizer.parameters)):
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
    """Return this rank's weights of a parameter; under ZeRO 3 its partition."""
    if optimizer.stage < 3:
        return named.parameter.data
    return cast(Tensor, cast(Any, named.parameter).ds_tensor.data)
