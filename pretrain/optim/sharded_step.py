"""One optimizer step at ZeRO stage 1, on this rank's part of the gradients and weights alone.

DeepSpeed's `step` would copy, scale, clip and measure the norm of gradients by the parameter, in
fp64, and wait for the device several times (deepspeed/runtime/zero/stage_1_and_2.py). Here the norm
takes one launch for all buckets, and the update one per bucket: a fused kernel divides the
gradients by a factor as it reads them. That factor holds the mean over ranks, the loss scale and
the clipping. It stays on the device, so that nothing waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain import platform
from pretrain.model.loss import accumulate_in_layers, mark_stale, take_stale
from pretrain.optim.buckets import Bucket, WeightGather, finalize_gradients
from pretrain.topology import make_groups, ranks_per_node, replica_group

# ---- reduction ----
# Add up gradients in fp32, and sum them over the data-parallel ranks while the backward pass runs.
#
# At ZeRO stage 1 every bucket (pretrain/optim/buckets.py) has one flat fp32 tensor of gradients. A
# hook adds each gradient to it as soon as the backward pass has computed it. During the last micro
# batch, a bucket whose gradients are complete is sent at once, so that the network works while the
# backward pass goes on. Each rank receives only its own part of a bucket, which is all that its
# share of the optimizer needs: a rank sends (n - 1) / n of the bucket, where an all-reduce would
# send twice that. How it travels is said at `make_wire`.
#
# DeepSpeed's own reduction cannot be used here. Its hooks follow `engine.backward`, which
# Megatron's schedules do not call, and at stage 1 it all-reduces after the backward pass
# (deepspeed/runtime/ engine.py, `allreduce_gradients`). Megatron's needs buckets of its own
# (pretrain/optim/buckets.py).


def own_part(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a flat tensor, as a view."""
    return flat.view(group.size(), -1)[group.rank()]


Wait = Callable[[], object]
"""Waits until this rank's part of a bucket holds the sums; on a GPU, the present queue waits."""
Wire = Callable[[Tensor], Wait]
"""Starts to sum a bucket over the ranks: fp32 [elements], a multiple of the number of ranks. The
part with this rank's number takes the sums; the others are undefined afterwards."""


def make_wire(group: dist.ProcessGroup, dtype: torch.dtype) -> Wire:
    """Return the way in which gradients travel. All processes together.

    In fp32 that is a reduce-scatter. In 16 bit it is not: a reduce-scatter adds up in the data type
    that it sends, and would round once for each rank. So unsummed parts have to travel, and each
    rank adds up, in fp32, what the others send it.

    What crosses between nodes decides the time. A reduce-scatter has added up the gradients of a
    node before they leave it, whereas unsummed parts leave for each rank of the node. Over several
    nodes the sum is therefore taken in two stages: a reduce-scatter in fp32 within the node, then
    16 bit between ranks of equal number in their nodes. For 1.36B parameters on 16 nodes of 8, a
    node sends 2.55 GB, where the reduce-scatter in fp32 sends 5.41 GB and a single exchange in
    16 bit would send 20.43 GB (docs/performance.md).

    Each piece that travels is rounded once to `dtype`, whose unit roundoff u is 2^-8 for bf16 and
    2^-11 for fp16, and a sum of n terms in fp32 adds at most (n - 1) 2^-24. An element of the
    result is therefore off by at most (u + n 2^-24) times the sum of the terms' magnitudes (Higham
    2002, Accuracy and Stability of Numerical Algorithms, section 4.2). A ring in bf16 would round
    every partial sum and reach n u.

    Args:
        group: The data-parallel ranks.
        dtype: The data type in which gradients travel, between nodes if there are several.
    """
    if dtype == torch.float32:

        def in_fp32(flat: Tensor) -> Wait:
            own = own_part(flat, group)
            return _started(dist.reduce_scatter_tensor(own, flat, group=group, async_op=True)).wait

        return in_fp32
    per_node, peers = ranks_per_node(group), group
    # The parts of a single node, or of nodes of one rank, are all exchanged.
    per_node = 1 if per_node == group.size() else per_node
    # Rank r of the group is rank r % per_node of node r // per_node.
    node, number = divmod(group.rank(), per_node)
    if per_node > 1:
        ranks = dist.get_process_group_ranks(group)
        own_node = ranks[node * per_node : (node + 1) * per_node]
        node_group, peers = make_groups([own_node, ranks[number::per_node]])

    def start(flat: Tensor) -> Wait:
        """Start to sum a bucket in two stages, or in one if there is one node (`Wire`)."""
        # The second stage waits for the first, which the backward pass must not do.
        with platform.beside():
            # From [nodes, ranks of a node, part] to [ranks of a node, nodes, part]: the rank with a
            # number receives what the ranks with its number need, on all nodes.
            by_number = flat.view(peers.size(), per_node, -1).transpose(0, 1).contiguous()
            of_node = by_number[number]
            if per_node > 1:
                _started(
                    dist.reduce_scatter_tensor(
                        of_node.view(-1), by_number.view(-1), group=node_group, async_op=True
                    )
                ).wait()
            sent = of_node.to(dtype)
            received = torch.empty_like(sent)
            work = _started(dist.all_to_all_single(received, sent, group=peers, async_op=True))

        def wait() -> None:
            work.wait()
            torch.sum(received, dim=0, dtype=torch.float32, out=own_part(flat, group))

        return wait

    return start


def _started(work: dist.Work | None) -> dist.Work:
    """Return a collective's handle; None stands for a rank outside of the group."""
    assert work is not None
    return work


class GradientReducer:
    """Accumulates the gradients of a step and sums them over the data-parallel ranks.

    A step is `begin_step`, the backward passes, and `finish`. Sums do not depend on the moment at
    which a bucket is sent, so overlapping changes no bit.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        flat_weights: list[Tensor],
        group: dist.ProcessGroup,
        wire_dtype: torch.dtype,
    ) -> None:
        """Allocate the gradients, and register a hook on every parameter.

        Args:
            buckets: The buckets, in the order in which they are sent.
            flat_weights: The flat weights of each bucket, [padded elements]; gradients are laid out
                like them. Each length is a multiple of the group's size.
            group: The data-parallel ranks.
            wire_dtype: Data type in which gradients are sent. Sums are taken in fp32 in any case.
        """
        self._group, self._is_alone = group, group.size() == 1
        if not self._is_alone:
            self._wire = make_wire(group, wire_dtype)
        self.buckets = [_FlatBucket(b, weights) for b, weights in zip(buckets, flat_weights)]
        self._num_microbatches = 0
        self._num_sent = 0
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.main_grad = slot.gradient  # type: ignore[attr-defined]  # Megatron
                hook = functools.partial(self._accumulate, bucket, slot)
                # torch declares no types here.
                slot.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def shards(self) -> list[Tensor]:
        """Return this rank's part of every bucket's gradients, fp32 [padded elements / ranks].

        After `finish`, they are the sums (not the means) over the ranks.
        """
        return [own_part(bucket.gradients, self._group) for bucket in self.buckets]

    def begin_step(self, num_microbatches: int) -> None:
        """Forget the gradients of the last step.

        Args:
            num_microbatches: Backward passes that will run, after which gradients are complete.
        """
        self._num_microbatches = num_microbatches
        self._num_sent = 0
        for bucket in self.buckets:
            bucket.num_complete = 0
            for slot in bucket.slots:
                slot.num_accumulated = 0
                mark_stale(slot.gradient)
                # A micro batch that ended in an error may have left one.
                slot.parameter.grad = None

    def clear_unused(self) -> None:
        """Set the gradients to zero that no backward pass has reached in this step."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if take_stale(slot.gradient):
                    slot.gradient.zero_()

    def finish(self) -> None:
        """Send what has not been sent yet, and wait until the sums in `shards` are complete."""
        if self._is_alone:
            return
        for bucket in self.buckets[self._num_sent :]:
            self._send(bucket)
        self._num_sent = len(self.buckets)
        for bucket in self.buckets:
            assert bucket.wait is not None
            bucket.wait()
            bucket.wait = None

    def _accumulate(self, bucket: _FlatBucket, slot: _Slot, parameter: Any) -> None:
        """Add the gradient that the backward pass has just computed to the sum in fp32."""
        if getattr(parameter, "grad_added_to_main_grad", False):
            # The layer has added it, and what autograd got in its place was never filled.
            parameter.grad_added_to_main_grad = False
        elif take_stale(slot.gradient):
            slot.gradient.copy_(parameter.grad)
        else:
            slot.gradient.add_(parameter.grad)
        parameter.grad = None
        count = slot.num_accumulated = slot.num_accumulated + 1
        if count < self._num_microbatches or bucket.is_late:
            return
        if count > self._num_microbatches:
            raise RuntimeError(
                f"a parameter of shape {tuple(slot.parameter.shape)} received more than one "
                f"gradient for each of the {self._num_microbatches} micro batches, after its "
                "bucket may have been sent"
            )
        bucket.num_complete += 1
        if not self._is_alone:
            self._send_complete()

    def _send_complete(self) -> None:
        """Send the buckets that are complete, in the order that all ranks keep."""
        for bucket in self.buckets[self._num_sent :]:
            if bucket.is_late or bucket.num_complete < len(bucket.slots):
                return
            self._send(bucket)
            self._num_sent += 1

    def _send(self, bucket: _FlatBucket) -> None:
        """Start the reduction of one bucket."""
        bucket.wait = self._wire(bucket.gradients)


@dataclass
class _Slot:
    """The place of one parameter's gradient in its bucket."""

    parameter: nn.Parameter
    gradient: Tensor
    """A view of the bucket's gradients, in the shape of the parameter."""
    num_accumulated: int = 0
    """Gradients added in this step."""


class _FlatBucket:
    """The gradients of one bucket, and how far they have come in this step."""

    def __init__(self, bucket: Bucket, flat_weights: Tensor) -> None:
        # Zeros, because nothing ever writes to the padding at the end.
        self.gradients = torch.zeros_like(flat_weights, dtype=torch.float32)
        self.is_late = bucket.is_late
        self.slots: list[_Slot] = []
        start = 0
        for parameter in bucket.parameters:
            view = self.gradients[start : start + parameter.numel()].view(parameter.shape)
            self.slots.append(_Slot(parameter, view))
            start += parameter.numel()
        self.num_complete = 0
        """Parameters whose gradients are complete."""
        self.wait: Wait | None = None
        """Waits for the reduction that is under way."""


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
    ) -> None:
        """Register the hooks that reduce gradients and gather weights.

        Args:
            zero: DeepSpeed's optimizer of stage 1, whose parameter groups are the buckets.
            chunks: This rank's model chunks.
            buckets: The buckets.
            clip_grad: Largest global gradient norm; 0 turns clipping off.
            wire_dtype: Data type in which gradients are sent.
            add_in_layers: Let linear layers add their weights' gradients to the sums themselves.
        """
        group = replica_group()
        self._zero, self._chunks, self._buckets = zero, chunks, buckets
        self._clip_grad, self._data_size = clip_grad, group.size()
        self._masters: list[Tensor] = zero.single_partition_of_fp32_groups
        partitions = zero.parallel_partitioned_bit16_groups
        self._weights: list[Tensor] = [parts[group.rank()] for parts in partitions]
        flat_weights = zero.bit16_groups_flat
        self._reducer = GradientReducer(buckets, flat_weights, group, wire_dtype)
        if add_in_layers:
            accumulate_in_layers(chunks)
        self._gather = WeightGather(chunks, buckets, flat_weights, group)
        self.own_square: Tensor | None = None
        """What this rank added to the last squared norm, before the reduction; fp64 scalar."""

    def begin(self, num_microbatches: int) -> None:
        """Prepare for a step's backward passes, one for each micro batch."""
        self._reducer.begin_step(num_microbatches)

    @property
    def own_sums(self) -> list[Tensor]:
        """Return the gradients of this rank's samples, if they are held back; fp32, by bucket.

        Sending changes them.
        """
        return [bucket.gradients for bucket in self._reducer.buckets]

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
        optimizer = self._zero.optimizer
        # What torch.amp.GradScaler hands to a fused optimizer (torch/amp/grad_scaler.py): the
        # kernel divides by the one and does nothing if the other is 1.
        optimizer.grad_scale = divisor.float()
        is_left_out = ~norm.isfinite()
        if veto is not None:
            is_left_out |= veto(norm)
        optimizer.found_inf = is_left_out.float()
        for master, shard in zip(self._masters, shards):
            master.grad = shard
        optimizer.step()
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
        self.own_square = squares.clone()
        # Every element of the model is counted by one rank: its data-parallel owner, on the one
        # model-parallel rank for which it is no copy.
        dist.all_reduce(squares)
        norm: Tensor = squares.sqrt()
        return norm
