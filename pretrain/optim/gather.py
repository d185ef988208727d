"""Gather updated weights from the data-parallel ranks while the next forward pass begins.

At ZeRO stage 1 each rank updates its part of every bucket. All gathers are started right after the
update, in the order in which the forward pass needs the weights, and every module waits for its own
before it runs.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from pretrain.optim.buckets import Bucket


class WeightGather:
    """Starts the gathers of all buckets, and has modules wait for the weights that they use."""

    def __init__(
        self,
        chunks: list[GPTModel],
        buckets: list[Bucket],
        flat_weights: list[Tensor],
        group: dist.ProcessGroup,
        overlap: bool = True,
    ) -> None:
        """Register a hook on each module that has to wait.

        Args:
            chunks: This rank's model chunks.
            buckets: The buckets, in the order of the backward pass.
            flat_weights: The flat weights of each bucket, [padded elements], of which this rank
                updates its part.
            group: The data-parallel ranks.
            overlap: Return from `start` at once. False waits there for all weights.
        """
        self._flat_weights, self._group = flat_weights, group
        self._size, self._rank = group.size(), group.rank()
        self._overlap = overlap
        self._works: dict[int, Any] = {}
        """The gathers under way, by the number of the bucket."""
        bucket_of = {id(p): i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        # What the backward pass completes last, the forward pass needs first.
        self._order = list(reversed(range(len(buckets))))
        if self._size == 1:
            return
        for chunk in chunks:
            units = _units(chunk)
            within = {id(p) for unit in units for p in unit.parameters()}
            # The position method's parameters belong to no unit, because all layers use them.
            outside = [p for p in chunk.parameters() if id(p) not in within]
            for module, parameters in [(chunk, outside), *((u, u.parameters()) for u in units)]:
                needed = sorted({bucket_of[id(p)] for p in parameters})
                if needed:
                    module.register_forward_pre_hook(
                        lambda module, args, needed=needed: self._wait(needed)
                    )

    def start(self) -> None:
        """Start to gather every bucket. The work queued on the device before comes first."""
        if self._size == 1:
            return
        for number in self._order:
            flat = self._flat_weights[number]
            own = flat.view(self._size, -1)[self._rank]
            self._works[number] = dist.all_gather_into_tensor(
                flat, own, group=self._group, async_op=True
            )
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Wait until all weights are complete, for what reads them outside a forward pass."""
        self._wait(list(self._works))

    def _wait(self, buckets: list[int]) -> None:
        """Wait for the gathers of some buckets, if they are still under way."""
        if not self._works:
            return
        for number in buckets:
            work = self._works.pop(number, None)
            if work is not None:
                work.wait()


def _units(chunk: GPTModel) -> list[nn.Module]:
    """Return the modules of a chunk that wait for their own weights: those that run in turn."""
    units = [
        getattr(chunk, "embedding", None),
        *chunk.decoder.layers,
        chunk.decoder.final_layernorm,
        getattr(chunk, "output_layer", None),
    ]
    return [unit for unit in units if unit is not None]
