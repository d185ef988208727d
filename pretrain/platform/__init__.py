"""Hide the difference between running on CUDA and running on the CPU.

This package owns the device, the torch.distributed backend, the data types, the random generators
and the patches that let Megatron run without CUDA. Nothing else in the project asks which of the
two it runs on.
"""

from pretrain.platform.caches import make_caches_private
from pretrain.platform.hardware import (
    DTYPES,
    backend,
    can_accumulate_products,
    can_compile,
    check_build,
    check_precision,
    device,
    device_name,
    has_cuda,
    versions,
)
from pretrain.platform.memory import available_memory, free_memory, peak_memory_bytes
from pretrain.platform.process import own_device, prepare, seed_generators
from pretrain.platform.queue import (
    HostCopy,
    Moment,
    Readback,
    beside,
    pin,
    synchronize,
    to_device,
    unpin,
)
from pretrain.platform.replacing import fp16_allowed_on_cpu, replaced

__all__ = [
    "DTYPES",
    "HostCopy",
    "Moment",
    "Readback",
    "available_memory",
    "backend",
    "beside",
    "can_accumulate_products",
    "can_compile",
    "check_build",
    "check_precision",
    "device",
    "device_name",
    "fp16_allowed_on_cpu",
    "free_memory",
    "has_cuda",
    "make_caches_private",
    "own_device",
    "peak_memory_bytes",
    "pin",
    "prepare",
    "replaced",
    "seed_generators",
    "synchronize",
    "to_device",
    "unpin",
    "versions",
]
