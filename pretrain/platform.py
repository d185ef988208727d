"""Hide the difference between running on CUDA and running on the CPU.

This package owns the device, the torch.distributed backend, the data types, the random generators
and the patches that let Megatron run without CUDA. Nothing else in the project asks which of the
two it runs on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import logging
import os
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.config import ConfigError, writing
from pretrain.rundir.trust import check_own_directory, check_place

# One hardware queue, so that kernels start in the order in which they were launched. Megatron
# relies on it to overlap communication and computation (megatron/core/tensor_parallel/layers.py).
# Set when this module is imported: whatever asks for a GPU may start CUDA, which reads it once.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

# Huge pages for host blocks of 2 MB or more, which torch reads at its first allocation. Models of
# transformers allocate scores and masks in each layer, and the kernel clears every page of them.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def device_index(local_rank: int, num_visible: int) -> int:
    """Return the number of a process's GPU among those that it can see.

    Where all processes of a node see all its GPUs, that is the local rank. With one GPU bound to
    each (srun --gpus-per-task=1, --gpu-bind=single:1) every process sees one, whose number is 0.
    NCCL refuses two ranks on one GPU.

    Args:
        local_rank: Number of the process on its machine.
        num_visible: Number of GPUs that it can see, at least 1.
    """
    return local_rank % num_visible


# ---- Keep the directories of compiled kernels private to the user ----


CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Variables that name directories of compiled code."""


def make_caches_private() -> None:
    """Make the directories of compiled kernels, of which each process executes what is in them.

    Also TMPDIR, where it is missing. torch's own default is a fixed name in /tmp, where another
    user may have made it first.

    Raises:
        ConfigError: One of them belongs to another user, or others may write to it.
    """
    if (temporary := os.environ.get("TMPDIR")) and not os.path.lexists(temporary):
        _make_private(Path(temporary))
        # Forget where temporary files went while the directory was missing.
        tempfile.tempdir = None
    own = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", own)
    for name in CACHES:
        if directory := os.environ.get(name):
            _make_private(Path(directory))
            check_place(Path(directory).parent)
            check_own_directory(Path(directory), entries=False)


def _make_private(directory: Path) -> None:
    with writing(directory):
        directory.parent.mkdir(0o700, parents=True, exist_ok=True)
        directory.mkdir(0o700, exist_ok=True)


@contextlib.contextmanager
def fp16_allowed_on_cpu() -> Iterator[None]:
    """Let a run in fp16 pass on a CPU in this context, to test it or to count what it would do.

    torch computes in fp16 on a CPU, slowly. DeepSpeed refuses it, as does `check_precision`.
    `prepare` must have been called.
    """
    # Imported late: it takes asyncio with it, which runs do without.
    from unittest.mock import patch

    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    with (
        patch.object(sys.modules[__name__], "check_precision", lambda *wanted: None),
        patch.object(accelerator, "is_fp16_supported", lambda self: True),
    ):
        yield


# ---- Say which device this process has, what it is called and what it can compute ----


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


def check_precision(precision: str, fp8: bool) -> None:
    """Raise ConfigError if this device cannot train in `precision` (a key of DTYPES), or in fp8."""
    if has_cuda():
        needed = (8, 9) if fp8 else (8, 0) if precision == "bf16" else (0, 0)
        if torch.cuda.get_device_capability() < needed:
            what = "fp8 = true" if fp8 else "precision = bf16"
            raise ConfigError(
                f"train.{what}: {device_name()} does not support it (compute capability "
                f"{needed[0]}.{needed[1]} is needed). {'Leave it out' if fp8 else 'Use fp16'}"
            )
    elif precision == "fp16":
        raise ConfigError(
            "train.precision = fp16: DeepSpeed does not support it on a CPU. Use bf16 or fp32"
        )


def check_build() -> None:
    """Check that torch was built for this process's GPU, and can use GPUs where there are any.

    A build without code for the GPU fails at the first kernel, minutes into a start, and so does
    Triton without a compiler. A build without CUDA, or one for a newer driver, would train on the
    CPU of a machine with GPUs.

    Raises:
        ConfigError: It was not, or cannot, or Triton lacks something.
    """
    remedy = "Install the build of torch for this GPU (docs/v100.md for V100s)"
    if has_cuda():
        capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
        if not is_supported(built, capability):
            gpu = f"GPU {torch.cuda.current_device()} ({device_name()})"
            raise ConfigError(
                f"torch {torch.__version__}: {gpu} has compute capability "
                f"{'.'.join(map(str, capability))}, and torch is built for "
                f"{', '.join(built) or 'no GPU'}. {remedy}"
            )
        if can_compile() and (lacking := lacking_for_triton()):
            raise ConfigError(
                f"Triton needs {lacking} to launch its kernels. Install gcc and Python's headers "
                "(Debian's python3-dev), or set CC to a C compiler"
            )
    elif _shows_gpus():
        cuda = torch.version.cuda
        why = f"CUDA {cuda} does not start, run nvidia-smi" if cuda else "built without CUDA"
        raise ConfigError(
            f"torch {torch.__version__}: cannot use this machine's NVIDIA GPUs ({why}). {remedy}, "
            "start a container with its option for GPUs (apptainer --nv), or set "
            "CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )


def is_supported(architectures: Sequence[str], capability: Sequence[int]) -> bool:
    """Return True if a build of torch runs on a GPU.

    Machine code (sm_80) runs on GPUs of the same major version and at least its minor one, PTX
    (compute_80) on all later ones. A suffix, as in sm_90a, ties code to exactly that GPU.

    Args:
        architectures: What the build contains, as torch.cuda.get_arch_list() returns it.
        capability: The GPU's compute capability, major and minor.
    """
    if len(capability) != 2:
        return False
    major, minor = capability
    for name in architectures:
        if not (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)):
            continue
        kind, built, suffix = match[1], (int(match[2]), int(match[3])), match[4]
        if suffix == "a":
            runs = built == (major, minor)
        elif kind == "sm" or suffix:
            runs = built[0] == major and built[1] <= minor
        else:
            runs = built <= (major, minor)
        if runs:
            return True
    return False


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


def lacking_for_triton() -> str | None:
    """Return what Triton would not find when it launches a first kernel; None if nothing.

    It builds the code that launches a kernel in C against Python's headers
    (triton/runtime/build.py).
    """
    compilers = [given] if (given := os.environ.get("CC")) else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"a C compiler ({' or '.join(compilers)})"
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    return None if header.exists() else str(header)


def can_accumulate_products() -> bool:
    """Return True if one operation can add a product of 16-bit matrices to an fp32 matrix.

    On a GPU that is `add_product`, which is tried out: torch's documentation does not say where it
    works. Liger-Kernel uses it from compute capability 8.0 on
    (liger_kernel/ops/fused_linear_cross_entropy.py).
    """
    if not has_cuda():
        return True
    is_modern = torch.cuda.get_device_capability() >= (8, 0)
    return is_modern and all(_adds(dtype, device()) for dtype in (torch.bfloat16, torch.float16))


def add_product(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor, *, overwrite: bool
) -> None:
    """Add a product to a matrix on a GPU, in one operation.

    Args:
        left: 16-bit matrix [M, K].
        right: 16-bit matrix [K, N].
        total: fp32 matrix [M, N].
        overwrite: Do not read the matrix, but replace it by the product.
    """
    # Tensor cores always accumulate in fp32; `out_dtype` keeps their result unrounded.
    if overwrite:
        torch.mm(left, right, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@functools.cache
def _adds(dtype: torch.dtype, on: torch.device) -> bool:
    """Return True if `add_product` adds without rounding to 16 bits; else log what it did."""
    # The square of 1 + 2^-7 does not fit into 16 bits. The matrix is a view, as of a bucket.
    factor = torch.full((16, 16), 1 + 2**-7, dtype=dtype, device=on)
    total = torch.full((2, 16, 16), torch.nan, device=on)[1]
    problem = "wrong result"
    try:
        add_product(factor, factor, total, overwrite=True)
        add_product(factor, factor, total, overwrite=False)
        if bool((total == 2 * 16 * (1 + 2**-7) ** 2).all()):
            return True
    except (RuntimeError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    logging.getLogger("pretrain.kernels").info(
        f"torch.addmm cannot add a product of {dtype} to fp32 here ({problem}). Weight gradients "
        "are rounded to the training precision, and added in a second kernel"
    )
    return False


# ---- Measure the memory of this process and the memory that it can still allocate ----


def peak_memory_bytes() -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident on the CPU."""
    if has_cuda():
        return torch.cuda.max_memory_allocated()
    # Linux reports ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def release_memory() -> None:
    """Give the host memory of objects that are no longer used back to the system."""
    # A model's modules refer to each other, so only the collector frees them.
    gc.collect()
    # glibc keeps what was freed in blocks below its threshold; other C libraries lack the function.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def free_memory() -> int:
    """Return the bytes that this process can still allocate on `device()`."""
    if not has_cuda():
        return available_memory()
    free, _ = torch.cuda.mem_get_info()
    # torch keeps freed memory and gives it out again.
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def available_memory() -> int:
    """Return the bytes of host memory that can be allocated.

    The least of the machine's and of what the cgroups of this process have left (those of a
    container or of a Slurm job).
    """
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(sizes["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_cgroup_memory()]))


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> list[int]:
    """Return what each cgroup with a limit that this process is in has left, of cgroup v2.

    Args:
        root: Where the cgroups are mounted. In a container that is the container's own.
        own: This process's cgroup below it; None reads it from /proc.
    """
    if own is None:
        own = "/"
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                # The lines of cgroup version 1 begin with other numbers.
                own = line.removeprefix("0::") if line.startswith("0::") else own
    folder, left = root / own.lstrip("/"), []
    for group in (folder, *folder.parents):
        if group != root and root not in group.parents:
            break
        # "max", which is no number, where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            statistics = dict(
                line.split() for line in (group / "memory.stat").read_text().splitlines()
            )
            # Files that were read are kept in memory as long as nothing else needs it.
            cached = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
            left.append(limit - used + cached)
    return left


# ---- Patch Megatron-core, which assumes CUDA, so that it runs on a CPU ----


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

    # pipeline_parallel/schedules.py counts tokens in torch.zeros(..., device="cuda"). It gets a
    # copy of the torch module in which zeros allocates on the CPU.
    on_cpu = {"zeros": lambda *size, device, **kwargs: torch.zeros(*size, device="cpu", **kwargs)}
    schedules.torch = types.SimpleNamespace(**{**vars(torch), **on_cpu})
    # tensor_parallel/random.py tracks states of the CUDA generator.
    random.CudaRNGStatesTracker.add = _add_state
    random.CudaRNGStatesTracker.fork = _fork_state
    # The same file saves and restores the CUDA generator around activation recomputation, beside
    # the CPU generator, which is enough here.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _add_state(tracker: Any, name: str, seed: int) -> None:
    """Keep a named state of torch's CPU generator, for Megatron's CudaRNGStatesTracker."""
    tracker._is_initialized = True
    tracker.states_[name] = torch.Generator().manual_seed(seed).get_state()


@contextlib.contextmanager
def _fork_state(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Let torch's CPU generator go on from a named state in this context."""
    outside = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)


# ---- Set this process up: its device, DeepSpeed, Megatron and the random generators ----


def prepare(local_rank: int) -> None:
    """Select this process's device, and configure DeepSpeed and Megatron for it.

    Must be called before anything else imports Megatron or DeepSpeed. May be called again.

    Args:
        local_rank: Number of this process on its machine.

    Raises:
        ConfigError: if another user may write to the directories of compiled kernels.
    """
    make_caches_private()
    _select_device(local_rank)
    # Variables of libraries that compute nothing here. DeepSpeed requires that mpirun's equals
    # LOCAL_RANK (runtime/engine.py), and Megatron that the others are 1
    # (models/common/language_module/language_module.py).
    others = "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", *others):
        os.environ.pop(name, None)
    # A run computes what its config says, whatever the caller or a container's variables have set.
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    os.environ["DS_ACCELERATOR"] = "cuda" if has_cuda() else "cpu"
    # Imported here because DeepSpeed chooses its accelerator from the environment on import.
    import deepspeed.ops

    for name in ("DeepSpeed", "torch.distributed", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not has_cuda():
        # deepspeed/comm/torch.py would compile this extension when communication starts, which
        # takes 70 s and needs a compiler. It goes unused when marked as incompatible. The table is
        # made here, because DeepSpeed would try each of its extensions, some with a compiler, to
        # make it, and asks for no other.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        patch_megatron_for_cpu()


def _select_device(local_rank: int) -> None:
    """Make a GPU this process's own, and tell DeepSpeed which one."""
    if has_cuda():
        local_rank = device_index(local_rank, torch.cuda.device_count())
        torch.cuda.set_device(local_rank)
    # deepspeed/runtime/engine.py requires it and takes it for the number of the GPU. srun does not
    # set it.
    os.environ["LOCAL_RANK"] = str(local_rank)


def seed_generators(seed: int) -> None:
    """Seed torch's default generator and Megatron's tracked generators.

    The default generator gets the same seed on all tensor ranks, for dropout on replicated
    activations. The tracked "model-parallel-rng" gets another one on each, for dropout on
    activations that are split over tensor ranks. Megatron's parallel_state says which rank this is.

    Args:
        seed: The seed; the same on all tensor ranks.
    """
    from megatron.core.tensor_parallel import random

    # Megatron calls torch.cuda.manual_seed, which does nothing without CUDA.
    if not has_cuda():
        torch.default_generator.manual_seed(seed)
    random.model_parallel_cuda_manual_seed(seed)


# ---- queue ----
# Copy, wait and measure time in the device's queue of work, which the host does not wait for.


def synchronize() -> None:
    """Wait for the device, so that a clock read afterwards includes the work queued before."""
    if has_cuda():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give memory that nothing uses any more back to the device."""
    if has_cuda():
        torch.cuda.empty_cache()


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device without waiting for the work queued there.

    From memory that is not pinned, a copy to the GPU would wait for all kernels launched before it
    (aten/src/ATen/native/cuda/Copy.cu).
    """
    return tensor.pin_memory().to(device(), non_blocking=True) if has_cuda() else tensor


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Queue the block's work beside the default queue, behind everything queued there so far.

    Memory that the block allocates may be used by the default queue after it has waited for the
    block's work, and be freed at any time: it is only given out again to other blocks, which begin
    behind the default queue.
    """
    if not has_cuda():
        yield
        return
    queue = _queue_beside()
    queue.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(queue):
        yield


def is_main_queue() -> bool:
    """Return True if the default queue takes what is queued now, and so not within `beside`."""
    return not has_cuda() or torch.cuda.current_stream() == torch.cuda.default_stream()


@functools.cache
def _queue_beside() -> torch.cuda.Stream:
    """Return the stream of `beside`, the same in every call."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch declares no types here


class Moment:
    """A point in the device's queue of work: it has passed when all work queued before is done."""

    def __init__(self) -> None:
        """Mark the present end of the queue. On a CPU that is now."""
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if has_cuda():
            # torch declares no types here.
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Wait until the moment has passed. Work queued after it goes on."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds between two moments that have passed, by the device's clock."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1e3
        return self._seconds - earlier._seconds


class Readback:
    """Numbers on their way from the device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start to copy a tensor of one dimension, behind the work queued so far."""
        self._host = tensor
        if has_cuda():
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self.arrival = Moment()

    def numbers(self) -> list[float]:
        """Return the numbers, once they are here."""
        self.arrival.wait()
        return [float(number) for number in self._host.tolist()]


class HostCopy:
    """A copy of tensors into host memory, made while the device and the host go on.

    The tensors must not change before `before_change` has been called.
    """

    def __init__(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Start to copy.

        Args:
            sources: Tensors on the device, each of one dimension.
            targets: Host memory for each, of the same size and dtype; pinned if `pin` could.
        """
        self._thread: threading.Thread | None = None
        self._event: torch.cuda.Event | None = None
        if has_cuda():
            with beside():
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()
            return
        # NumPy copies on one core and lets other threads run; torch would start a second team of
        # threads that competes with the model's.
        pairs = [(s.detach().numpy(), t.numpy()) for s, t in zip(sources, targets, strict=True)]
        self._thread = threading.Thread(target=_copy_all, args=(pairs,), daemon=True)
        self._thread.start()

    def before_change(self) -> None:
        """Hold changes of the tensors, which are queued from now on, back until they are copied."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()
        if self._thread is not None:
            self._thread.join()


def _copy_all(pairs: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    for source, target in pairs:
        np.copyto(target, source)


def pin(memory: torch.Tensor) -> bool:
    """Pin host memory that another process shares, so that the device copies into it by itself.

    Returns:
        False where it could not be pinned: copies then pass through a buffer of the driver's.
    """
    if not has_cuda():
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    # A refusal, as by a container's limit, stays CUDA's last error, which torch takes for that of
    # its next kernel.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device())
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`."""
    if has_cuda():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
