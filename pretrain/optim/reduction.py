"""Add up gradients in fp32, and sum them over the data-parallel ranks while the backward pass runs.

At ZeRO stage 1 every bucket (pretrain/optim/buckets.py) has one flat fp32 tensor of gradients. A
hook adds each gradient to it as soon as the backward pass has computed it. During the last micro
batch, a bucket whose gradients are complete is sent at once, so that the network works while the
backward pass goes on. Each rank receives only its own part of a bucket, which is all that its share
of the optimizer needs: a rank sends (n - 1) / n of the bucket, where an all-reduce would send twice
that. How it travels is said in pretrain/optim/wire.py.

DeepSpeed's own reduction cannot be used here. Its hooks follow `engine.backward`, which Megatron's
schedules do not call, and at stage 1 it all-reduces after the backward pass (deepspeed/runtime/
engine.py, `allreduce_gradients`). Megatron's needs buckets of its own (pretrain/optim/buckets.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.model.weight_gradients import mark_stale, take_stale
from pretrain.optim.buckets import Bucket
from pretrain.optim.wire import Wait, make_wire, own_part


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
        overlap: bool = True,
    ) -> None:
        """Allocate the gradients, and register a hook on every parameter.

        Args:
            buckets: The buckets, in the order in which they are sent.
            flat_weights: The flat weights of each bucket, [padded elements]; gradients are laid out
                like them. Each length is a multiple of the group's size.
            group: The data-parallel ranks.
            wire_dtype: Data type in which gradients are sent. Sums are taken in fp32 in any case.
            overlap: Send a bucket as soon as it is complete. False sends all buckets in `finish`.
        """
        self._group, self._is_alone = group, group.size() == 1
        self._overlap = overlap and not self._is_alone
        self._wire = None if self._is_alone else make_wire(group, wire_dtype)
        self._buckets = [_FlatBucket(b, weights) for b, weights in zip(buckets, flat_weights)]
        self._num_microbatches = 0
        self._num_sent = 0
        for bucket in self._buckets:
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
        return [own_part(bucket.gradients, self._group) for bucket in self._buckets]

    def begin_step(self, num_microbatches: int) -> None:
        """Forget the gradients of the last step.

        Args:
            num_microbatches: Backward passes that will run, after which gradients are complete.
        """
        self._num_microbatches = num_microbatches
        self._num_sent = 0
        for bucket in self._buckets:
            bucket.num_complete = 0
            for slot in bucket.slots:
                slot.num_accumulated = 0
                mark_stale(slot.gradient)
                # A micro batch that ended in an error may have left one.
                slot.parameter.grad = None

    def clear_unused(self) -> None:
        """Set the gradients to zero that no backward pass has reached in this step."""
        for bucket in self._buckets:
            for slot in bucket.slots:
                if take_stale(slot.gradient):
                    slot.gradient.zero_()

    def finish(self) -> None:
        """Send what has not been sent yet, and wait until the sums in `shards` are complete."""
        if self._is_alone:
            return
        for bucket in self._buckets[self._num_sent :]:
            self._send(bucket)
        self._num_sent = len(self._buckets)
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
            bucket.wait = None

    def _accumulate(self, bucket: _FlatBucket, slot: _Slot, _: Tensor) -> None:
        """Add the gradient that the backward pass has just computed to the sum in fp32."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if getattr(slot.parameter, "grad_added_to_main_grad", False):
            # The layer has added it, and what autograd got in its place was never filled.
            slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # Megatron
        elif take_stale(slot.gradient):
            slot.gradient.copy_(gradient)
        else:
            slot.gradient.add_(gradient)
        slot.parameter.grad = None
        slot.num_accumulated += 1
        if bucket.is_late or slot.num_accumulated < self._num_microbatches:
            return
        if slot.num_accumulated > self._num_microbatches:
            raise RuntimeError(
                f"a parameter of shape {tuple(slot.parameter.shape)} received more than one "
                f"gradient for each of the {self._num_microbatches} micro batches, after its "
                "bucket may have been sent"
            )
        bucket.num_complete += 1
        if self._overlap:
            self._send_complete()

    def _send_complete(self) -> None:
        """Send the buckets that are complete, in the order that all ranks keep."""
        for bucket in self._buckets[self._num_sent :]:
            if bucket.is_late or bucket.num_complete < len(bucket.slots):
                return
            self._send(bucket)
            self._num_sent += 1

    def _send(self, bucket: _FlatBucket) -> None:
        """Start the reduction of one bucket."""
        assert self._wire is not None
        bucket.wait = self._wire.start(bucket.gradients)


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
