"""CPU or CUDA: the device, its backend, its number types, its random generators, and Megatron's CPU gaps.

Nothing else in the project asks which of the two it runs on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import types
from collections.abc import Iterator

import torch

from pretrain.config import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def has_cuda() -> bool:
    """True where the run takes place on NVIDIA GPUs; everything else runs on the CPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """This process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend that serves `device()`."""
    return "nccl" if has_cuda() else "gloo"


def device_name() -> str:
    """As the vendor calls it, for looking up its peak ("NVIDIA H200", "cpu")."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def check_precision(precision: str) -> None:
    """Raises ConfigError when this device cannot train in `precision`."""
    if has_cuda():
        if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
            raise ConfigError(f"train.precision = bf16: {device_name()} has none. Use fp16")
    elif precision == "fp16":
        raise ConfigError(
            "train.precision = fp16: DeepSpeed does not train in it on a CPU. Use bf16 or fp32"
        )


def peak_memory_bytes() -> int:
    """Most memory this process has held: allocated on the GPU, or resident on the CPU."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronize() -> None:
    """Waits for the device, so that a clock read afterwards has seen the work."""
    if has_cuda():
        torch.cuda.synchronize()


def prepare(local_rank: int) -> None:
    """Once per process, before Megatron or DeepSpeed are imported: picks the device and quiets the libraries."""
    os.environ["LOCAL_RANK"] = str(
        local_rank
    )  # deepspeed/runtime/engine.py insists on it, also under srun
    if has_cuda():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}. "
                "Start one process a GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        torch.cuda.set_device(local_rank)
        # What Megatron's overlap of communication and computation needs (megatron/core/tensor_parallel/layers.py).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    for name in ("DeepSpeed", "torch.distributed", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not has_cuda():
        # deepspeed/comm/torch.py would compile this extension on first use (70 s, and only where a compiler is).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _patch_megatron()


def seed_generators(seed: int, tensor_parallel_rank: int) -> None:
    """Seeds the default generator (same on all tensor ranks) and Megatron's tracked one (own on each)."""
    from megatron.core.tensor_parallel import random

    if has_cuda():
        torch.cuda.manual_seed(seed)
        random.model_parallel_cuda_manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("data-parallel-rng", seed)
    tracker.add("model-parallel-rng", seed + 2718 + tensor_parallel_rank)


# ---- Megatron-core 0.16 assumes CUDA in five places; each is patched here, and only where CUDA is absent -------------
def _patch_megatron() -> None:
    cpu = torch.device("cpu")
    # p2p_communication.py, mappings.py, layers.py, rotary_pos_embedding.py allocate on the current device.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    # language_module.py moves the tied embedding with .cuda().
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]
    # dist_checkpointing and the schedules wait for the device.
    torch.cuda.synchronize = lambda *args, **kwargs: None

    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    schedules.torch = _TorchOnCpu()  # type: ignore[attr-defined]  # schedules.py allocates with device="cuda"
    random._CUDA_RNG_STATE_TRACKER = _cpu_rng_tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # random.py keeps the CUDA state beside the CPU one when it recomputes; the CPU one is enough here.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


class _TorchOnCpu(types.ModuleType):
    """`torch`, but zeros(device="cuda") lands on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def zeros(*size, device=None, **kwargs) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **kwargs)


def _cpu_rng_tracker():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    class CpuRngTracker(CudaRNGStatesTracker):
        """Megatron's tracker over the CPU's generator."""

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
