"""Say which device this process has, what it is called and what it can compute."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
from pathlib import Path

import torch

from pretrain.config import ConfigError
from pretrain.config.architectures import is_supported, not_supported

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of train.precision."""

DEVICES = Path("/dev")
"""Where NVIDIA's driver shows its GPUs, as nvidia0, nvidia1 and so on."""


def has_cuda() -> bool:
    """Return True if the run uses NVIDIA GPUs. Every other run uses the CPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """Return the name of the torch.distributed backend for `device()`."""
    return "nccl" if has_cuda() else "gloo"


def device_name() -> str:
    """Return the vendor's name of the device, such as "NVIDIA H200", or "cpu"."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def versions() -> dict[str, str]:
    """Return the versions of torch's build, CUDA, NCCL and the driver, as far as there are any."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if has_cuda():
        # torch does not annotate this function.
        parts = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, parts))
    with contextlib.suppress(OSError):
        said = Path("/proc/driver/nvidia/version").read_text()
        if match := re.search(r"Module.*?\s(\d+(?:\.\d+)+)", said):
            found["driver"] = match[1]
    return {name: version for name, version in found.items() if version}


def check_precision(precision: str) -> None:
    """Raise ConfigError if this device cannot train in `precision` (a key of DTYPES)."""
    if has_cuda():
        if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
            raise ConfigError(
                f"train.precision = bf16: {device_name()} does not support it (compute capability "
                "8.0 is needed). Use fp16"
            )
    elif precision == "fp16":
        raise ConfigError(
            "train.precision = fp16: DeepSpeed does not support it on a CPU. Use bf16 or fp32"
        )


def check_build() -> None:
    """Check that torch was built for this process's GPU, and can use GPUs where there are any.

    A build without code for the GPU fails at the first kernel, minutes into a start. A build
    without CUDA, or one for a newer driver, would train on the CPU of a machine with GPUs.

    Raises:
        ConfigError: It was not, or cannot.
    """
    remedy = "Install the build of torch for this GPU (docs/v100.md for V100s)"
    if has_cuda():
        capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
        if not is_supported(built, capability):
            gpu = not_supported(device_name(), capability, built)
            raise ConfigError(f"torch {torch.__version__}: {gpu}. {remedy}")
    elif _shows_gpus():
        cuda = torch.version.cuda
        why = f"CUDA {cuda} does not start, run nvidia-smi" if cuda else "built without CUDA"
        raise ConfigError(
            f"torch {torch.__version__}: cannot use this machine's NVIDIA GPUs ({why}). {remedy}, "
            "start a container with its option for GPUs (apptainer --nv), or set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )


def _shows_gpus() -> bool:
    """Return True if the driver shows GPUs to this process and the user has not hidden them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(
        re.fullmatch(r"nvidia\d+", path.name) for path in DEVICES.glob("nvidia*")
    )


def can_compile() -> bool:
    """Return True if torch.compile can generate code for `device()`.

    It generates Triton on a GPU, which needs compute capability 8.0, and C++ on a CPU, which needs
    a compiler.
    """
    if has_cuda():
        capable = torch.cuda.get_device_capability() >= (8, 0)
        return capable and importlib.util.find_spec("triton") is not None
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def can_accumulate_products() -> bool:
    """Return True if one operation can add a product of 16-bit matrices to an fp32 matrix.

    On a GPU that is `torch.addmm` with `out_dtype`. It accepts the fp32 matrix since torch 2.10
    (pytorch pull request 167931), and Liger-Kernel uses it from compute capability 8.0 on
    (liger_kernel/ops/fused_linear_cross_entropy.py).
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return not has_cuda() or (
        (major, minor) >= (2, 10) and torch.cuda.get_device_capability() >= (8, 0)
    )
