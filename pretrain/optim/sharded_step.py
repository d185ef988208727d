"""One optimizer step at ZeRO stage 1, on this rank's part of the gradients and weights alone.

DeepSpeed's `step` would copy, scale, clip and measure the norm of gradients by the parameter, in
fp64, and wait for the device several times (deepspeed/runtime/zero/stage_1_and_2.py). Here the norm
takes one launch for all buckets, and the update one per bucket: AdamW's fused kernel divides the
gradients by a factor as it reads them. That factor holds the mean over ranks, the loss scale and
the clipping. It stays on the device, so that nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from pretrain.model.weight_gradients import accumulate_in_layers
from pretrain.optim.buckets import Bucket
from pretrain.optim.gather import WeightGather
from pretrain.optim.gradients import finalize_gradients
from pretrain.optim.reduction import GradientReducer

Veto = Callable[[Tensor], Tensor]
"""The global gradient norm -> a boolean scalar on the device: True leaves the update out."""


class ShardedStep:
    """Reduces gradients, updates this rank's masters and gathers the weights."""

    def __init__(
        self,
        zero: Any,
        chunks: list[GPTModel],
        buckets: list[Bucket],
        *,
        clip_grad: float,
        wire_dtype: torch.dtype,
        add_in_layers: bool,
        overlap: bool,
    ) -> None:
        """Register the hooks that reduce gradients and gather weights.

        Args:
            zero: DeepSpeed's optimizer of stage 1, whose parameter groups are the buckets.
            chunks: This rank's model chunks.
            buckets: The buckets.
            clip_grad: Largest global gradient norm; 0 turns clipping off.
            wire_dtype: Data type in which gradients are sent.
            add_in_layers: Let linear layers add their weights' gradients to the sums themselves.
            overlap: Communicate while the model computes.
        """
        group = parallel_state.get_data_parallel_group()
        self._zero, self._chunks, self._buckets = zero, chunks, buckets
        self._clip_grad, self._data_size = clip_grad, group.size()
        self._masters: list[Tensor] = zero.single_partition_of_fp32_groups
        partitions = zero.parallel_partitioned_bit16_groups
        self._weights: list[Tensor] = [parts[group.rank()] for parts in partitions]
        flat_weights = zero.bit16_groups_flat
        self._reducer = GradientReducer(buckets, flat_weights, group, wire_dtype, overlap)
        if add_in_layers:
            accumulate_in_layers(chunks)
        self._gather = WeightGather(chunks, buckets, flat_weights, group, overlap)

    def begin(self, num_microbatches: int) -> None:
        """Prepare for a step's backward passes, one for each micro batch."""
        self._reducer.begin_step(num_microbatches)

    def reduce(self) -> None:
        """Complete the gradients that model-parallel ranks share, and all sums over the ranks."""
        self._reducer.clear_unused()
        finalize_gradients(self._chunks)
        self._reducer.finish()

    @torch.no_grad()
    def update(self, loss_scale: float, veto: Veto | None = None) -> Tensor:
        """Clip, update the masters, and start to gather the weights.

        Args:
            loss_scale: Factor of the loss in the backward passes.
            veto: Decides from the norm if the update is left out; alike on all ranks.

        Returns:
            The global gradient norm before clipping, fp64 scalar on the device. Where it is not
            finite, or `veto` was true, nothing has been updated.
        """
        shards = self._reducer.shards
        # Gradients are sums over the data-parallel ranks, of a scaled loss.
        scale = self._data_size * loss_scale
        norm: Tensor = self._norm(shards) / scale
        divisor = torch.full_like(norm, scale)
        if self._clip_grad:
            # As torch.nn.utils.clip_grad_norm_ does, with its 1e-6 against a division by zero.
            divisor *= ((norm + 1e-6) / self._clip_grad).clamp(min=1.0)
        adam = self._zero.optimizer
        # What torch.amp.GradScaler hands to a fused optimizer (torch/amp/grad_scaler.py): the
        # kernel divides by the one and does nothing if the other is 1.
        adam.grad_scale = divisor.float()
        is_left_out = ~norm.isfinite()
        if veto is not None:
            is_left_out |= veto(norm)
        adam.found_inf = is_left_out.float()
        for master, shard in zip(self._masters, shards):
            master.grad = shard
        adam.step()
        for master in self._masters:
            master.grad = None
        torch._foreach_copy_(self._weights, self._masters)
        self._gather.start()
        return norm

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Set all weights from the masters, after a load. All data-parallel ranks together."""
        torch._foreach_copy_(self._weights, self._masters)
        self._gather.start()
        self._gather.wait()

    def wait_for_weights(self) -> None:
        """Wait until the updated weights of all ranks are here."""
        self._gather.wait()

    def _norm(self, shards: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of all ranks, as they are in the shards; fp64 scalar."""
        own = [s for s, bucket in zip(shards, self._buckets) if not bucket.is_copy]
        squares = torch.zeros((), dtype=torch.float64, device=shards[0].device)
        if own:
            squares += torch.stack(torch._foreach_norm(own)).double().square().sum()
        # Every element of the model is counted by one rank: its data-parallel owner, on the one
        # model-parallel rank for which it is no copy.
        dist.all_reduce(squares)
        norm: Tensor = squares.sqrt()
        return norm
