"""Patch Megatron-core, which assumes CUDA, so that it runs on a CPU."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch


def patch_megatron_for_cpu() -> None:
    """Replace the places where Megatron-core 0.16 assumes CUDA. Called only where there is no CUDA.

    Paths in the comments are relative to megatron/core. Some patches replace functions of
    torch.cuda: they are what Megatron calls, and without CUDA nothing else can use them.
    """
    cpu = torch.device("cpu")
    # Buffers are allocated with device=torch.cuda.current_device(): for received activations in
    # pipeline_parallel/p2p_communication.py, for gathered and scattered ones in
    # tensor_parallel/mappings.py and layers.py, and for the frequencies in
    # models/common/embeddings/rotary_pos_embedding.py.
    # The type checker objects that the original returns a number.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    # models/common/language_module/language_module.py moves the tied embedding with .cuda() before
    # it is reduced between the first and the last stage.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # a patch

    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    # pipeline_parallel/schedules.py counts tokens in torch.zeros(..., device="cuda").
    schedules.torch = _TorchOnCpu()
    # tensor_parallel/random.py tracks states of the CUDA generator. Marked as initialized, because
    # Megatron would otherwise put its own tracker back.
    random._CUDA_RNG_STATE_TRACKER = _cpu_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # The same file saves and restores the CUDA generator around activation recomputation, beside
    # the CPU generator, which is enough here.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


class _TorchOnCpu(types.ModuleType):
    """The `torch` module, except that zeros(device="cuda") allocates on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **kwargs)


def _cpu_rng_tracker() -> Any:
    """Return a tracker like Megatron's CudaRNGStatesTracker that works on the CPU generator."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    class CpuRngTracker(CudaRNGStatesTracker):  # type: ignore[misc]  # Megatron ships no types
        """Keep named states of torch's CPU generator, each restored while it is forked."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return CpuRngTracker()
