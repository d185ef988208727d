"""One optimizer step at ZeRO stage 1, on this rank's part of the gradients and weights.

DeepSpeed's `step` copies, scales, clips and measures gradients parameter by parameter, computes the
norm in fp64, and waits for the device several times (deepspeed/runtime/zero/stage_1_and_2.py). Here
the norm takes one launch for all buckets, and the update one per bucket: a fused kernel divides the
gradients by a factor as it reads them. The factor combines the mean over ranks, the loss scale and
the clipping. It stays on the device, so that the host does not wait for it.
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
# send twice that. `make_wire` describes the communication.
#
# DeepSpeed's own reduction cannot be used here. Its hooks follow `engine.backward`, which
# Megatron's schedules do not call, and at stage 1 it all-reduces after the backward pass
# (deepspeed/runtime/ engine.py, `allreduce_gradients`). Megatron's needs buckets of its own
# (pretrain/optim/buckets.py).


def own_part(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a flat tensor, as a view."""
    return flat.view(group.size(), -1)[group.rank()]


Wait = Callable[[], object]
"""Waits until this rank's part of a bucket holds the sums; on a GPU, the current stream waits."""
Wire = Callable[[Tensor], Wait]
"""Starts to sum a bucket over the ranks: fp32 [elements], a multiple of the number of ranks. This
rank's part receives the sums; the other parts are undefined afterwards."""


def make_wire(group: dist.ProcessGroup, dtype: torch.dtype) -> Wire:
    """Return the function that sums gradients over ranks. All processes call this together.

    In fp32 it is a reduce-scatter. A reduce-scatter in 16 bit would also sum in 16 bit, and so
    round once for each rank. In 16 bit, ranks therefore exchange unsummed parts, and each rank sums
    its part in fp32.

    The traffic between nodes decides the time. A reduce-scatter sums the gradients of a node before
    they leave it, whereas unsummed parts leave the node once for each of its ranks. With several
    nodes the sum is therefore taken in two stages: a reduce-scatter in fp32 within each node, then
    a 16-bit exchange between ranks of the same number in their nodes. For 1.36B parameters on 16
    nodes of 8 GPUs, a node sends 2.55 GB, where a reduce-scatter in fp32 sends 5.41 GB and a single
    exchange in 16 bit would send 20.43 GB (docs/performance.md).

    Each piece that is sent is rounded once to `dtype`, whose unit roundoff u is 2^-8 for bf16 and
    2^-11 for fp16, and a sum of n terms in fp32 adds at most (n - 1) 2^-24. An element of the
    result is therefore off by at most (u + n 2^-24) times the sum of the terms' magnitudes (Higham
    2002, Accuracy and Stability of Numerical Algorithms, section 4.2). A ring in bf16 would round
    every partial sum and reach n u.

    Args:
        group: The data-parallel ranks.
        dtype: The data type in which gradients are sent, between nodes if there are several.
    """
    if dtype == torch.float32:

        def in_fp32(flat: Tensor) -> Wait:
            own = own_part(flat, group)
            return _started(dist.reduce_scatter_tensor(own, flat, group=group, async_op=True)).wait

        return in_fp32
    per_node, peers = ranks_per_node(group), group
    # With a single node, or with one rank per node, there is only the exchange.
    per_node = 1 if per_node == group.size() else per_node
    # Rank r of the group is rank r % per_node of node r // per_node.
    node, number = divmod(group.rank(), per_node)
    if per_node > 1:
        ranks = dist.get_process_group_ranks(group)
        own_node = ranks[node * per_node : (node + 1) * per_node]
        node_group, peers = make_groups([own_node, ranks[number::per_node]])

    def start(flat: Tensor) -> Wait:
        """Start to sum a bucket in two stages, or in one if there is one node (`Wire`)."""
        # On another stream, because the second stage waits for the first one, and the backward
        # pass must not wait.
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
    """Return a collective's handle, which is None only for a rank outside the group."""
    assert work is not None
    return work


class GradientReducer:
    """Accumulates the gradients of a step and sums them over the data-parallel ranks.

    A step is `begin_step`, the backward passes, and `finish`. Sums do not depend on when a bucket
    is sent, so overlapping does not change a bit.
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
            wire_dtype: Data type in which gradients are sent. Sums are always taken in fp32.
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
        """Discard the gradients of the last step.

        Args:
            num_microbatches: Number of backward passes after which gradients are complete.
        """
        self._num_microbatches = num_microbatches
        self._num_sent = 0
        for bucket in self.buckets:
            bucket.num_complete = 0
            for slot in bucket.slots:
                slot.num_accumulated = 0
                mark_stale(slot.gradient)
                # A micro batch that ended in an error may have left a gradient.
                slot.parameter.grad = None

    def clear_unused(self) -> None:
        """Zero the gradients that no backward pass has reached in this step."""
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
            # The layer has added the gradient itself, and autograd's tensor is uninitialized.
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
    """The gradients of one bucket, and its progress in this step."""

    def __init__(self, bucket: Bucket, flat_weights: Tensor) -> None:
        # Zeros, because nothing else writes to the padding at the end.
        self.gradients = torch.zeros_like(flat_weights, dtype=torch.float32)
        self.is_late = bucket.is_late
        sizes = [parameter.numel() for parameter in bucket.parameters]
        views = torch.split(self.gradients[: sum(sizes)], sizes)
        self.slots = [_Slot(p, view.view_as(p)) for p, view in zip(bucket.parameters, views)]
        self.num_complete = 0
        """Number of parameters whose gradients are complete."""
        self.wait: Wait | None = None
        """Waits for the reduction in progress."""


Veto = Callable[[Tensor], Tensor]
"""Maps the global gradient norm to a boolean scalar on the device: True skips the update."""


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
        self.reducer = GradientReducer(buckets, flat_weights, group, wire_dtype)
        if add_in_layers:
            accumulate_in_layers(chunks)
        self.gather = WeightGather(chunks, buckets, flat_weights, group)
        self.own_square: Tensor | None = None
        """This rank's contribution to the last squared gradient norm; fp64 scalar."""

    def reduce(self) -> None:
        """Complete the gradients that model-parallel ranks share, and all sums over the ranks."""
        self.reducer.clear_unused()
        finalize_gradients(self._chunks)
        self.reducer.finish()

    @torch.no_grad()
    def update(self, loss_scale: float, veto: Veto | None = None) -> Tensor:
        """Clip, update the masters, and start to gather the weights.

        Args:
            loss_scale: Factor on the loss in the backward passes.
            veto: Decides from the norm whether to skip the update; the same on all ranks.

        Returns:
            The global gradient norm before clipping, fp64 scalar on the device. If it is not
            finite, or `veto` returned True, nothing was updated.
        """
        shards = self.reducer.shards
        # Gradients are sums over the data-parallel ranks, and those of a scaled loss.
        scale = self._data_size * loss_scale
        norm: Tensor = self._norm(shards) / scale
        divisor = torch.full_like(norm, scale)
        if self._clip_grad:
            # As in torch.nn.utils.clip_grad_norm_, whose 1e-6 avoids a division by zero.
            divisor *= ((norm + 1e-6) / self._clip_grad).clamp(min=1.0)
        optimizer = self._zero.optimizer
        # The interface of torch.amp.GradScaler to fused optimizers (torch/amp/grad_scaler.py): the
        # kernel divides by grad_scale, and does nothing if found_inf is 1.
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
        self.gather.start()
        return norm

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Set all weights from the masters after a load. Collective over data-parallel ranks."""
        torch._foreach_copy_(self._weights, self._masters)
        self.gather.start()
        self.gather.wait()

    def _norm(self, shards: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of all ranks, as they are in the shards; fp64 scalar."""
        own = [s for s, bucket in zip(shards, self._buckets) if not bucket.is_copy]
        squares = torch.zeros((), dtype=torch.float64, device=shards[0].device)
        if own:
            squares += torch.stack(torch._foreach_norm(own)).double().square().sum()
        self.own_square = squares.clone()
        # One rank counts each element of the model: its data-parallel owner, on the model-parallel
        # rank on which the element is not a copy.
        dist.all_reduce(squares)
        norm: Tensor = squares.sqrt()
        return norm
