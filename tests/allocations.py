"""Follow every allocation of a rank, real or simulated, and say what is alive when.

torch's dispatcher shows every tensor that an operator returns. A storage counts from the operator
that returns it first until Python frees it, so views and in-place results count once. Tensors of
the meta device hold nothing.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.config import RunConfig
from pretrain.topology import Topology


class Allocations(TorchDispatchMode):
    """A context that counts the bytes of all storages that are alive.

    What Python holds already is left out of garbage collection within it, which takes four fifths
    of the time of a collection beside torch and Megatron.
    """

    def __init__(self, counter: Any = None) -> None:
        """Count from zero.

        Args:
            counter: The counter of a simulation. What it does not count, stand-ins for fused
                kernels, has intermediate results that the kernels do not have; they are not seen.
        """
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """The most since `begin`."""
        self._counter = counter
        self._alive: set[int] = set()

    def __enter__(self) -> Allocations:
        gc.freeze()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        gc.unfreeze()

    def begin(self) -> None:
        """Forget the most so far."""
        gc.collect()
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        if self._counter is None or not self._counter._paused:
            self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            return
        self._alive.add(storage._cdata)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self.now -= size


def measure(config: RunConfig, topology: Topology, allocations: Allocations) -> dict[str, int]:
    """Build this rank's model and optimizer, take two steps, and return what the second held.

    Args:
        config: The run.
        topology: This rank's place in the layout. All ranks together.
        allocations: The active count, which has seen nothing of the rank yet.

    Returns:
        "weights", "gradients", "optimizer": bytes of the tensors of ZeRO 1. "between": all that is
        alive between two steps. "peak": the most at any time of the passes, beside those three
        parts; at ZeRO 2 and 3 beside nothing.
    """
    from pretrain.model.gpt import build_model
    from pretrain.optim.zero import ZeroOptimizer
    from pretrain.training.step import forward_backward

    chunks = build_model(config)
    optimizer = ZeroOptimizer(config, topology, chunks)
    shape = (config.batch.micro_batch_size, config.data.sequence_length + 1)
    # Unseen, because on a GPU the token ids of a step wait on the host.
    with torch.utils._python_dispatch._disable_current_modes():
        tokens = torch.ones(shape, dtype=torch.int64, device="cpu")
    batches = [tokens] * topology.layout.num_microbatches
    result: dict[str, int] = {}
    for _ in range(2):
        allocations.begin()
        losses = forward_backward(chunks, optimizer, batches, None)
        result["peak"] = allocations.peak
        del losses
        optimizer.reduce_gradients()
        optimizer.update(1e-3)
        optimizer.wait_for_weights()
        gc.collect()
        result["between"] = allocations.now
    zero = optimizer.zero
    if optimizer.stage == 1:
        sharded = optimizer._sharded_step
        assert sharded is not None
        moments = [t for state in zero.optimizer.state.values() for t in state.values()]
        result["weights"] = _bytes(zero.bit16_groups_flat)
        result["gradients"] = _bytes([b.gradients for b in sharded.reducer.buckets])
        result["optimizer"] = _bytes([*zero.single_partition_of_fp32_groups, *moments])
        state = sum(result[part] for part in ("weights", "gradients", "optimizer"))
        result["peak"] -= state
    return result


def _bytes(*lists: list[Tensor]) -> int:
    """Return the bytes of tensors' storages, each once."""
    tensors = itertools.chain(*lists)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
